"""`python -m astray.compat.saving_hook --pathA A --pathB B`: what two folders of the saving hook have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from astray.errors import AstrayError
from astray.foreign.saving_hook.checker import check, describe, plan
from astray.foreign.saving_hook.files import RESULTS
from astray.formatting.terminal import COULD_NOT, Progress, say, tell


def main(argv: Sequence[str] | None = None) -> int:
    """Checks two folders; the exit code is 0 whatever the numbers are, and 2 when it could not be done."""
    parser = argparse.ArgumentParser(
        prog="python -m astray.compat.saving_hook",
        description="Compares the tensors that two folders of the saving hook have in common, and writes a CSV for "
        "each rank into A/tensors/compare_rst and A/grads/compare_rst.",
    )
    parser.add_argument("--pathA", required=True, type=Path, metavar="A", help="one folder; the results are put there")
    parser.add_argument("--pathB", required=True, type=Path, metavar="B", help="the other")
    options = parser.parse_args(argv)
    try:
        _check(options.pathA, options.pathB)
    except (AstrayError, OSError) as error:
        tell(f"{parser.prog}: {_sentence(error)}")
        return COULD_NOT
    return 0


def _check(a: Path, b: Path) -> None:
    jobs, problems = plan(a, b)
    for problem in problems:
        say(problem)
    for job in jobs:
        with Progress(f"comparing {job.folder} of rank {job.rank}") as progress:
            checked = check(job, a / job.folder / RESULTS, progress)
        for line in describe(checked):
            say(line)


def _sentence(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror or error}."


if __name__ == "__main__":
    raise SystemExit(main())
