"""What two runs were set to differently: the entry of this package.

Each rank is compared by itself (`of_rank`), in whichever process compares its tensors: its findings become differences,
one for what is the same in many places and none for what follows from another. `put_together` makes one list of all
ranks', those first that change results, and adds what older runs recorded only once per run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from astray.comparison.pair.mapping import Mapping
from astray.comparison.pair.matching import Matching
from astray.comparison.select.pairs import natural
from astray.comparison.setup.arguments import argument_findings
from astray.comparison.setup.setup_difference import (
    ABSENT,
    DifferenceKind,
    Effect,
    Finding,
    SetupDifference,
    effect_of,
    epsilon_of,
    kind_of,
)
from astray.comparison.setup.subjects import findings
from astray.comparison.setup.timelines import read_timelines
from astray.comparison.setup.wording import sentence_of, subject_of
from astray.records import ROOT
from astray.store import CheckpointRank, RankRun, RunData

__all__ = ["SetupDifference", "of_rank", "put_together", "setup_differences"]


def setup_differences(
    reference: RunData, candidate: RunData, matching: Matching | None = None
) -> tuple[SetupDifference, ...]:
    """Everything that was set differently, those first that change results.

    >>> for difference in setup_differences(astray.open("runs/a"), astray.open("runs/b")):
    ...     print(difference)
    h.3.norm (LayerNorm) has eps 1e-05 in the reference and 0.001 in the candidate.
    """
    matching = (matching or Matching()).of_runs(reference, candidate)
    found: list[SetupDifference] = []
    for rank in matching.ranks_of(reference, candidate):
        found += of_rank(rank, reference.ranks.get(rank), candidate.ranks.get(rank), matching)
    return put_together(found, reference, candidate)


def of_rank(
    rank: int, reference: RankRun | None, candidate: RankRun | None, matching: Matching
) -> list[SetupDifference]:
    """Those of one rank. A checkpoint was set to nothing, and neither was a rank that one run does not have."""
    if reference is None or candidate is None:
        return []
    if isinstance(reference, CheckpointRank) or isinstance(candidate, CheckpointRank):
        return []
    steps = _shared_steps(reference, candidate, matching)
    if not steps:
        return []
    timelines_reference, timelines_candidate = (
        read_timelines(reference, across_frameworks=matching.across_frameworks),
        read_timelines(candidate, matching.mapping, matching.offset, across_frameworks=matching.across_frameworks),
    )
    found = [
        *findings(timelines_reference, timelines_candidate, steps),
        *argument_findings(reference, candidate, matching, steps),
    ]
    found = [one for one in found if not _has_no_counterpart(one, matching.mapping)]
    if matching.sites is not None:
        pattern = matching.sites
        found = [one for one in found if not one.site or pattern.search(one.site)]
    return differences_of(rank, found)


def _has_no_counterpart(finding: Finding, mapping: Mapping) -> bool:
    """Whether it is about a tensor of one run that the mapping says the other has nothing for."""
    if finding.name != "tensor" or finding.subject != "parameter":
        return False
    names = mapping.only_in_candidate if finding.reference is ABSENT else mapping.only_in_reference
    return finding.site.rpartition(".")[2] in names


def _shared_steps(reference: RankRun, candidate: RankRun, matching: Matching) -> list[int]:
    steps_candidate = {step + matching.offset for step in candidate.summary.steps}
    return [step for step in reference.summary.steps if step in steps_candidate and step in matching.steps]


def put_together(
    differences: Iterable[SetupDifference], reference: RunData, candidate: RunData
) -> tuple[SetupDifference, ...]:
    """Those of all ranks, and of the runs as wholes where their ranks do not tell."""
    known = list(differences)
    ranks = sorted(set(reference.ranks) & set(candidate.ranks))
    if ranks and not (reference.ranks[ranks[0]].setup and candidate.ranks[ranks[0]].setup):
        known += differences_of(ranks[0], _of_wholes(reference, candidate))
    return tuple(over_ranks(known))


def _of_wholes(reference: RunData, candidate: RunData) -> Iterator[Finding]:
    """What `run.json` holds, for runs that have not recorded their setup."""
    info_reference, info_candidate = reference.info, candidate.info
    if info_reference.framework != info_candidate.framework:
        return
    for name in sorted(info_reference.versions.keys() & info_candidate.versions.keys() - {"astray kernels"}):
        if info_reference.versions[name] != info_candidate.versions[name]:
            yield Finding("version", "", "", name, info_reference.versions[name], info_candidate.versions[name])
    if info_reference.python and info_candidate.python and info_reference.python != info_candidate.python:
        yield Finding("version", "", "", "python", info_reference.python, info_candidate.python)
    if (
        info_reference.seed is not None
        and info_candidate.seed is not None
        and info_reference.seed != info_candidate.seed
    ):
        yield Finding(
            "seed", "", "", info_reference.framework or "the program", info_reference.seed, info_candidate.seed
        )
    if info_reference.world_size != info_candidate.world_size:
        yield Finding("process", "", "", "world_size", info_reference.world_size, info_candidate.world_size)
    if info_reference.devices and info_candidate.devices and info_reference.devices != info_candidate.devices:
        yield Finding("device", "", "", "devices", info_reference.devices, info_candidate.devices)


# -- findings of one rank to differences -------------------------------------------------------------------------------


_EFFECTS: tuple[Effect, ...] = ("changes results", "changes rounding", "none known")
_ORDER: tuple[DifferenceKind, ...] = (
    "optimizer", "module", "argument", "data type", "precision", "kernel", "layout", "seed", "device", "version",
    "environment",
)  # fmt: skip

_THREADS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_DYNAMIC"}


def differences_of(rank: int, findings: Iterable[Finding]) -> list[SetupDifference]:
    """The differences of one rank, those first that may change the most."""
    groups: dict[Any, list[Finding]] = {}
    for finding in without_consequences(list(findings)):
        groups.setdefault(_key(finding), []).append(finding)
    return in_order(_difference(rank, sorted(found, key=lambda one: natural(one.site))) for found in groups.values())


def in_order(differences: Iterable[SetupDifference]) -> list[SetupDifference]:
    """Those that change results first, then by kind, by step, and by where they are."""
    return sorted(
        differences,
        key=lambda one: (
            _EFFECTS.index(one.expected_effect),
            _ORDER.index(one.kind),
            -1 if one.step is None else one.step,
            natural(one.site),
            one.name,
        ),
    )


def over_ranks(differences: Iterable[SetupDifference]) -> list[SetupDifference]:
    """One of those that are the same on several ranks."""
    merged: dict[Any, SetupDifference] = {}
    for difference in differences:
        key = (
            _text(difference.reference),
            _text(difference.candidate),
            difference.subject,
            difference.name,
            difference.step,
            difference.kind,
            difference.sites,
        )
        known = merged.get(key)
        merged[key] = difference if known is None else replace(known, ranks=(*known.ranks, *difference.ranks))
    return in_order(merged.values())


def _key(finding: Finding) -> Any:
    values = _text(finding.reference), _text(finding.candidate)
    site = "" if finding.subject != "config" else finding.site
    label = finding.type.partition(", ")[0] if finding.subject == "optimizer" else ""
    return kind_of(finding), finding.subject, finding.name, values, finding.step, site, label


def _text(value: Any) -> str:
    return "absent" if value is ABSENT else json.dumps(value)


def _difference(rank: int, findings: Sequence[Finding]) -> SetupDifference:
    first = findings[0]
    effects = [effect_of(one) for one in findings]
    sites = tuple(dict.fromkeys(one.site for one in findings if one.site))
    return SetupDifference(
        rank=rank,
        step=first.step,
        subject=subject_of(findings),
        site=sites[0] if sites else "",
        name=first.name,
        reference=None if first.reference is ABSENT else first.reference,
        candidate=None if first.candidate is ABSENT else first.candidate,
        kind=kind_of(first),
        expected_effect=min(effects, key=_EFFECTS.index),
        sentence=sentence_of(findings, first.step),
        epsilon=epsilon_of(first),
        sites=sites,
        ranks=(rank,),
    )


# -- what follows from another -----------------------------------------------------------------------------------------


def without_consequences(findings: list[Finding]) -> list[Finding]:
    """The findings but for those that another explains: a module's eps is an argument of the function it calls."""
    causes = _Causes(findings)
    return [one for one in findings if not causes.explain(one)]


class _Causes:
    """What may explain others among some findings."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        of_modules = [one for one in findings if one.subject in ("module", "autocast")]
        self._named = {(one.subject, one.name) for one in findings}
        self._placed = {(one.subject, one.name, one.site) for one in findings}
        self._by_module = {(one.site, _values(one)) for one in of_modules}
        self._values = {_values(one) for one in of_modules if not _is_common(one.reference)}
        self._classes = {one.type for one in findings if one.subject == "optimizer" and one.name == "class"}

    def explain(self, finding: Finding) -> bool:
        """Whether a finding follows from another."""
        if finding.subject == "argument":
            module = finding.site.partition("/")[0]
            if "mask" in finding.name and ("config", "_attn_implementation") in self._named:
                return True  # each implementation takes its mask in its own way
            is_of_module = any((place, _values(finding)) in self._by_module for place in (finding.site, module))
            return is_of_module or (kind_of(finding) == "device" and ("module", "device") in self._named)
        if finding.subject == "config":
            of_dtypes = finding.name in ("dtype", "torch_dtype") and ("parameter", "dtype") in self._named
            return of_dtypes or _values(finding) in self._values
        if finding.subject == "parameter":
            return finding.name == "tensor" and self._is_of_another_class(finding.site)
        if finding.subject == "optimizer":
            return self._explain_optimizer(finding)
        if finding.subject == "torch":
            is_matmul = finding.name.endswith("matmul.fp32_precision")
            return is_matmul and ("torch", "float32_matmul_precision") in self._named
        if finding.subject == "environment":
            return finding.name in _THREADS and ("torch", "threads") in self._named
        cause = _FOLLOWING.get((finding.subject, finding.name))
        return cause is not None and (finding.subject, cause) in self._named

    def _explain_optimizer(self, finding: Finding) -> bool:
        if finding.name == "parameters":
            return ("parameter", "tensor", finding.site) in self._placed or self._is_of_another_class(finding.site)
        if finding.name == "initial_lr":
            return ("optimizer", "lr", finding.site) in self._placed
        return finding.name == "decoupled_weight_decay" and finding.type.partition(",")[0] in self._classes

    def _is_of_another_class(self, parameter: str) -> bool:
        return ("module", "class", parameter.rpartition(".")[0] or ROOT) in self._placed


_FOLLOWING = {("device", "cuda.capability"): "cuda", ("seed", "cuda"): "torch"}
"""Values that follow from another of the same subject."""


def _values(finding: Finding) -> tuple[str, str]:
    return _text(finding.reference), _text(finding.candidate)


def _is_common(value: Any) -> bool:
    """Whether a value says too little for one difference to be taken for the same as another."""
    return value is None or value is ABSENT or isinstance(value, bool)
