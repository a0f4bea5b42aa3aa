"""`python -m astray.compat.msprobe compare -tp A -gp B -o output`: msprobe's command, with its options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from astray.errors import AstrayError
from astray.foreign.msprobe.comparing import compare
from astray.formatting.terminal import say, tell


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; gives 0, or 2 when it could not do its work."""
    options = _parser().parse_args(argv)
    try:
        files = compare(
            {"npu_path": options.target_path, "bench_path": options.golden_path},
            options.output_path,
            fuzzy_match=options.fuzzy_match,
            xlsx=options.xlsx,
            data_mapping=options.data_mapping,
            cell_mapping=options.cell_mapping,
            mapping=options.map,
        )
    except (AstrayError, OSError) as error:
        tell(f"msprobe compare: {error}")
        return 2
    say("\n".join(map(str, files)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m astray.compat.msprobe", description=__doc__)
    command = parser.add_subparsers(required=True).add_parser("compare", help="compare two dumps into msprobe's table")
    add = command.add_argument
    add("-tp", "--target_path", required=True, help="the dump that may be wrong: a dump.json, or a folder")
    add("-gp", "--golden_path", required=True, help="the dump that is right")
    add("-o", "--output_path", default="./output", help="the folder for the table")
    add("--xlsx", action="store_true", help="a workbook in place of CSV")
    add("-fm", "--fuzzy_match", action="store_true", help="pair calls by their order, whatever their names")
    add("-dm", "--data_mapping", help="a YAML file: which entry is which")
    add("-cm", "--cell_mapping", help="a YAML file: which module is which")
    add("--map", help="a file of `astray map`")
    return parser


if __name__ == "__main__":
    sys.exit(main())
