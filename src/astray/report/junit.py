"""A Comparison as JUnit XML, which every continuous integration shows as a page of test results.

A test case is a site. The site of the first divergence fails, with the answer; so does one whose tensors are in one run
only. What else is wrong is skipped: it cannot be judged until the first divergence is fixed, and the page shows one
failure instead of hundreds. Where there are many sites, a case is a group of them: the module around them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from astray.comparison.comparison import ComparisonData
from astray.comparison.divergence import Divergence, TensorPlace
from astray.comparison.rows import Ints
from astray.comparison.verdict import BAD, Verdict
from astray.formatting import figures
from astray.report.atomic_files import atomic_file
from astray.report.text import render, reported_others

MOST_CASES = 300
"""The most cases: a page with more is too long to read."""

_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML cannot hold, not even escaped."""


def write_junit(comparison: ComparisonData, file: Path) -> Path:
    """Write the results; returns the path."""
    name = f"{comparison.reference.path} → {comparison.candidate.path}"
    suite = ElementTree.Element("testsuite", name=_plain(name))
    properties = ElementTree.SubElement(suite, "properties")
    for label, value in _facts(comparison):
        ElementTree.SubElement(properties, "property", name=label, value=_plain(value))
    for case in _cases(comparison):
        suite.append(case)
    ElementTree.SubElement(suite, "system-out").text = _plain(render(comparison))
    return _write(suite, file)


def write_failure(reference: str, candidate: str, why: str, file: Path) -> Path:
    """Write that the runs could not be compared: one case, with an error."""
    suite = ElementTree.Element("testsuite", name=_plain(f"{reference} → {candidate}"))
    case = ElementTree.SubElement(suite, "testcase", classname="astray", name="compare")
    ElementTree.SubElement(case, "error", message=_plain(why), type="could not be compared")
    return _write(suite, file)


def _write(suite: ElementTree.Element, file: Path) -> Path:
    cases = suite.findall("testcase")
    kinds = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {name: str(sum(case.find(tag) is not None for case in cases)) for name, tag in kinds.items()}
    suite.attrib |= {"tests": str(len(cases)), **counts}
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    with atomic_file(file) as draft:
        ElementTree.ElementTree(suites).write(draft, encoding="utf-8", xml_declaration=True)
    return file


def _facts(comparison: ComparisonData) -> Iterator[tuple[str, str]]:
    yield from ((label, str(count)) for label, count in comparison.counts.items() if count)
    yield from (("note", problem) for problem in comparison.problems)


def _cases(comparison: ComparisonData) -> Iterator[ElementTree.Element]:
    """A case for each group of sites, in order of first appearance."""
    sites, verdicts = comparison.pairs.coded("site"), comparison.pairs.coded("verdict").codes
    group_of = grouped(sites.values, MOST_CASES)
    names = list(dict.fromkeys(group_of.values()))
    number = {name: i for i, name in enumerate(names)}
    groups = np.array([number[group_of[site]] for site in sites.values])[sites.codes]
    others = comparison.others if comparison.of_checkpoints else reported_others(comparison)
    divergences = (*comparison.firsts, *others)  # of several at one site, the earliest
    divergence_of = {number[group_of[divergence.site]]: divergence for divergence in reversed(divergences)}
    distinct, begin = np.unique(groups, return_index=True)
    for group in distinct[np.argsort(begin)].tolist():
        rows = np.flatnonzero(groups == group)
        yield _case(comparison, names[group], rows, verdicts[rows], divergence_of.get(group))


def _case(
    comparison: ComparisonData, name: str, rows: Ints, verdicts: Ints, divergence: Divergence | None
) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname="astray", name=_plain(name))
    wrong, unmatched = rows[np.isin(verdicts, BAD)], rows[comparison.missing[rows]]
    if divergence is not None:
        what = "First divergence" if divergence in comparison.firsts else "Wrong by itself"
        what = "Differs" if comparison.of_checkpoints else what
        sure = "" if comparison.of_checkpoints else f" How sure: {divergence.sureness}."
        text = f"{what}{_on_rank(comparison, divergence)}: {divergence.place.full}. {divergence.evidence[0]}{sure}"
        _add(case, "failure", text, divergence.verdict)
    elif len(unmatched):
        place = TensorPlace.of(comparison.pairs, int(unmatched[0]))
        counted = f"{figures.counted(len(unmatched), 'tensor')} in one run only"
        _add(case, "failure", f"{counted}, first {place} ({place.verdict}).", place.verdict)
    elif len(wrong):
        place = TensorPlace.of(comparison.pairs, int(wrong[0]))
        text = f"{figures.counted(len(wrong), 'tensor')} wrong, first {place} ({place.verdict}"
        text += ")" if math.isnan(place.error) else f", {figures.error(place.error)})"
        if comparison.first is None or comparison.of_checkpoints:  # tensors of checkpoints have no victims
            _add(case, "failure", f"{text}.", place.verdict)
        else:
            _add(case, "skipped", f"{text}, which the first divergence may explain.", place.verdict)
    elif np.all(verdicts == Verdict.UNKNOWN):
        place = TensorPlace.of(comparison.pairs, int(rows[0]))
        _add(case, "skipped", f"Could not be compared: {place.reason}.", place.verdict)
    return case


def _add(case: ElementTree.Element, tag: str, message: str, kind: str) -> None:
    element = ElementTree.SubElement(case, tag, message=_plain(message), type=kind)
    if tag == "failure":  # some CI pages show only the text
        element.text = _plain(message)


def _on_rank(comparison: ComparisonData, divergence: Divergence) -> str:
    return f" on rank {divergence.rank}" if len(comparison.reference.ranks) > 1 else ""


def grouped(sites: list[str], most: int) -> Mapping[str, str]:
    """The group of each site: the site itself; or, when there are too many, the module it is in, or one further out.

    >>> grouped(["h.0.fc", "h.0.fc/gelu", "h.1.fc"], most=2)
    {'h.0.fc': 'h.0.fc', 'h.0.fc/gelu': 'h.0.fc', 'h.1.fc': 'h.1.fc'}
    """
    group_of = {site: site for site in sites}
    if len(group_of) > most:
        group_of = {site: site.split("/")[0] or site for site in sites}
    depth = max((group.count(".") for group in group_of.values()), default=0)
    while len(set(group_of.values())) > most and depth > 0:
        group_of = {site: ".".join(group.split(".")[:depth]) for site, group in group_of.items()}
        depth -= 1
    return group_of if len(set(group_of.values())) <= most else dict.fromkeys(sites, "all sites")


def _plain(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
