"""`astray compare`: two runs, and their first divergence."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astray.comparison.pair.matching import MatchingOptions
    from astray.results.comparison import Comparison

TOP = 25


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="find where two runs part, or how two checkpoints differ",
        description="Compares two runs and names the first call whose result is wrong while its inputs were right. Of "
        "two checkpoints it says which tensors differ, those that are furthest off first.",
        epilog="Exit code: 0 the runs agree, 1 they diverge, 2 they could not be compared.",
    )
    parser.add_argument(
        "reference", metavar="REFERENCE", help="the run that is right, another tool's dump, a checkpoint"
    )
    parser.add_argument("candidate", metavar="CANDIDATE", nargs="?", help="the run in question, or another checkpoint")
    parser.add_argument(
        "--replicas", action="store_true", help="instead of a candidate: compare the ranks of REFERENCE with each other"
    )
    parser.add_argument(
        "--setup",
        action="store_true",
        help="instead of the answer: a table of what was set differently, such as learning rates, eps, TF32",
    )
    add_comparison_options(parser)
    rows = parser.add_argument_group("rows", "List rows beneath the answer. `astray help reports` has the columns.")
    rows.add_argument("--filter", metavar="EXPR", help="those that fit, such as \"error > 1e-3 and site ~ 'mlp'\"")
    rows.add_argument("--sort", metavar="COLUMNS", help="in this order, such as -error,site (- for the largest first)")
    rows.add_argument("--top", type=int, metavar="N", help=f"so many of them (default {TOP}; 0 for all)")
    files = parser.add_argument_group(
        "files", "Write the result. CSV and workbook have the rows that --filter and --sort ask for, or all."
    )
    files.add_argument("--csv", metavar="DIR", help="pairs.csv and summary.csv, into this folder")
    files.add_argument("--xlsx", metavar="FILE", help="a workbook (needs astray[xlsx])")
    files.add_argument("--json", metavar="FILE", help="the answer, the counts and the rows that do not agree")
    files.add_argument("--html", metavar="FILE", help="the page of `astray view` as one file to look at anywhere")
    files.add_argument("--junit", metavar="FILE", help="test results for continuous integration")
    parser.set_defaults(main=main)


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """What to compare, how to judge and how to pair: the options that `astray view` has too."""
    parser.add_argument("--steps", metavar="B:E:S", help="compare only these steps, such as 0:10:2 or 3,7")
    parser.add_argument("--ranks", metavar="N,N", help="compare only these ranks, such as 0,3")
    parser.add_argument("--sites", metavar="REGEX", help="compare only sites in whose name this is found")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="compare so many ranks at once (default: one for each core)"
    )
    judging = parser.add_argument_group("judging", "What may be rounding. `astray help verdict` has the rules.")
    judging.add_argument(
        "--noise",
        action="append",
        metavar="RUN",
        help="a further recording of the reference, as by `astray run --perturb`: how far apart right runs get, "
        "in place of what siblings and models say; may be given several times",
    )
    judging.add_argument(
        "--tolerance", action="append", metavar="WHAT=ERROR", help="allow this error, by site (a regex) or dtype"
    )
    judging.add_argument("--exact", action="store_true", help="the runs should be bit-identical: nothing is rounding")
    judging.add_argument(
        "--no-replay",
        action="store_true",
        help="execute no call again; by default those that look wrong are, in both runs of PyTorch that kept values",
    )
    judging.add_argument(
        "--allow-missing",
        action="store_true",
        help="tensors that only one run has are fine: exit code 0 if the rest agrees",
    )
    judging.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="also measure this of kept values: kl, mean_abs, or file.py:function",
    )
    pairing = parser.add_argument_group("pairing", "For models that differ. `astray help alignment` explains each.")
    pairing.add_argument(
        "--map", metavar="FILE", help="what the candidate's names are in the reference; see `astray map`"
    )
    pairing.add_argument(
        "--by",
        choices=("auto", "key", "order"),
        default="auto",
        help="pair calls by their names, or by their order (default: by names, unless one run does not tell modules)",
    )
    pairing.add_argument(
        "--shapes",
        choices=("judged", "same", "loose"),
        default="judged",
        help="pair tensors of any shape, of the same shape only, or take dimensions of size 1 for nothing",
    )
    pairing.add_argument(
        "--micro",
        choices=("paired", "joined"),
        default="paired",
        help="compare micro steps one by one, or joined along the batch: one run may have more and smaller ones",
    )
    pairing.add_argument("--offset", type=int, default=0, metavar="N", help="add this to the candidate's step numbers")


def with_descending_sort(argv: Sequence[str]) -> list[str]:
    """The arguments with `--sort -error` as one word: argparse takes what begins with a dash for an option."""
    words: list[str] = []
    for word in argv:
        if words[:1] == ["compare"] and words[-1] == "--sort" and word.startswith("-") and not word.startswith("--"):
            words[-1] = f"--sort={word}"
        else:
            words.append(word)
    return words


def main(options: argparse.Namespace) -> int:
    from astray.comparison.comparison import compare
    from astray.errors import AstrayError
    from astray.formatting.terminal import Progress, print_report, table_width, wants_colour, width
    from astray.report.setup import render as render_setup
    from astray.report.text import render
    from astray.results.comparison import Comparison

    if options.replicas or options.candidate is None:
        return _replicas(options)
    _check(options)
    try:
        with Progress("comparing values") as progress:
            data = compare(options.reference, options.candidate, progress=progress, **arguments(options))
    except AstrayError as error:
        if options.junit:
            from astray.report.junit import write_failure

            write_failure(options.reference, options.candidate, str(error), Path(options.junit))
        raise
    comparison = Comparison.of(data)
    show = render_setup if options.setup else render
    print_report(show(comparison, width=width(), table_width=table_width(), colour=wants_colour(sys.stdout)))
    written = (
        (options.json, comparison.to_json),
        (options.junit, comparison.to_junit),
        (options.html, comparison.to_html),
    )
    for path, write in written:
        if path:
            write(path)
            _report_written(f"{Path(path)}")
    if any(option is not None for option in (options.filter, options.sort, options.top)):
        print_report("\n" + _rows(comparison, options))
    _write_rows(comparison, options)
    return comparison.exit_code


def _check(options: argparse.Namespace) -> None:
    """Raises before the work, not after it, if an option is wrong or something is not installed."""
    from astray.comparison.comparison import check_selection
    from astray.comparison.select.pairs import check_top
    from astray.report.atomic_files import check_writable
    from astray.report.xlsx import xlsxwriter_module

    check_selection(options.filter, options.sort, options.metric)
    check_top(options.top or 0)
    if options.xlsx:
        xlsxwriter_module()
    if options.html:
        from astray.web.html import read_page

        read_page()
    files = [options.xlsx, options.json, options.junit, options.html, options.csv and Path(options.csv) / "pairs.csv"]
    for file in filter(None, files):
        check_writable(Path(file))


def _replicas(options: argparse.Namespace) -> int:
    from astray.comparison.ranks.replicas import compare_replicas, render
    from astray.errors import CompareError
    from astray.formatting.terminal import print_report, width

    if not options.replicas or options.candidate is not None:
        raise CompareError("It takes two runs, REFERENCE and CANDIDATE, or one run and --replicas.")
    unused = [
        name
        for name in ("csv", "xlsx", "json", "html", "junit", "filter", "sort", "top", "map", "setup")
        if getattr(options, name)
    ]
    if unused:
        raise CompareError(f"--{unused[0]} does not go with --replicas, which is about one run.")
    replicas = compare_replicas(options.reference, steps=options.steps, sites=options.sites)
    print_report(render(replicas, width=width()))
    return replicas.exit_code


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `compare` for the options of `add_comparison_options`."""
    from astray.results.comparison import REPLAYER
    from astray.web.options import tolerances_of

    return {
        "noise": options.noise,
        "tolerances": tolerances_of("--tolerance", options.tolerance or []),
        "exact": options.exact,
        "allow_missing": options.allow_missing,
        "metrics": options.metric,
        "processes": options.processes,
        "replayer": None if options.no_replay else REPLAYER,
        **_matching(options),
    }


def _matching(options: argparse.Namespace) -> MatchingOptions:
    from astray.web.options import ranks_of

    ranks = None if options.ranks is None else ranks_of("--ranks", options.ranks)
    return {
        "steps": options.steps,
        "ranks": ranks,
        "sites": options.sites,
        "mapping": options.map,
        "by": options.by,
        "shapes": options.shapes,
        "micro": options.micro,
        "offset": options.offset,
    }


def _rows(comparison: Comparison, options: argparse.Namespace) -> str:
    from astray.comparison.select.row_table import render
    from astray.formatting.terminal import table_width, wants_colour

    top = TOP if options.top is None else options.top or None
    pairs = comparison.select(options.filter, options.sort, top)
    text = render(pairs, width=table_width(), colour=wants_colour(sys.stdout), most=None)
    return text if len(pairs) == pairs.found else f"{text}\n… {pairs.found - len(pairs):,} more; --top 0 shows all."


def _write_rows(comparison: Comparison, options: argparse.Namespace) -> None:
    from astray.formatting.terminal import Progress

    selection = {"filter": options.filter, "sort": options.sort}
    count = ""
    if options.filter is not None and (options.csv or options.xlsx):
        count = f"  ({len(comparison.select(options.filter)):,} of {len(comparison.pairs):,} rows)"
    files: list[tuple[str | None, Callable[..., object]]]
    files = [(options.csv, comparison.to_csv), (options.xlsx, comparison.to_xlsx)]
    for path, write in files:
        if path:
            with Progress(f"writing {path}") as progress:
                write(path, **selection, progress=progress)
            _report_written(f"{Path(path)}{count}")


def _report_written(what: str) -> None:
    from astray.formatting.terminal import print_note

    print_note(f"written   {what}")
