"""`python -m astray.compat.hooktools demo tracer` writes tracer_demo.yaml; `… compare FILE` compares by such a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from astray.errors import AstrayError, UsageError
from astray.foreign.hooktools.comparer import Comparer
from astray.foreign.hooktools.demo import DEMOS
from astray.formatting.terminal import COULD_NOT, say, tell


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; gives 0, or 2 when it could not do its work."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        options.work(options)
    except (AstrayError, OSError) as error:
        tell(f"{parser.prog}: {error}")
        return COULD_NOT
    return 0


def _demo(options: argparse.Namespace) -> None:
    file = options.output or Path(f"{options.of}_demo.yaml")
    if file.exists() and not options.force:
        raise UsageError(f"{file} is there already. Choose another name with -o, or overwrite it with --force.")
    file.write_text(DEMOS[options.of], encoding="utf-8")
    say(f"Wrote {file}. Edit it; `astray help hooktools` explains every key.")


def _compare(options: argparse.Namespace) -> None:
    found = Comparer(options.config).compare()
    if options.html is not None:
        say(f"The page is in {found.comparison.to_html(options.html)}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m astray.compat.hooktools", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="write tracer_demo.yaml or comparer_demo.yaml, every key with its meaning")
    demo.add_argument("of", nargs="?", choices=tuple(DEMOS), default="tracer", help="which; tracer by default")
    demo.add_argument("-o", "--output", type=Path, metavar="FILE", help="under another name")
    demo.add_argument("--force", action="store_true", help="overwrite a file that is there")
    demo.set_defaults(work=_demo)
    compare = commands.add_parser("compare", help="compare two dumps as a comparer's YAML file says")
    compare.add_argument("config", metavar="FILE", help="such as comparer_demo.yaml")
    compare.add_argument("--html", type=Path, metavar="FILE", help="also write the page: choose epoch and metric there")
    compare.set_defaults(work=_compare)
    return parser


if __name__ == "__main__":
    sys.exit(main())
