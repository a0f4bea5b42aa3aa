"""Makes one difference of what is the same in many places, and leaves out what follows from another.

`findings` of one rank go in, differences come out, those that change results first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from astray.comparison.select.pairs import natural
from astray.comparison.setup.effects import effect_of, epsilon_of, kind_of
from astray.comparison.setup.setup_difference import ABSENT, Effect, Finding, Kind, SetupDifference
from astray.comparison.setup.wording import sentence_of, subject_of
from astray.records import ROOT

_EFFECTS: tuple[Effect, ...] = ("changes results", "changes rounding", "none known")
_ORDER: tuple[Kind, ...] = (
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
    found: dict[Any, SetupDifference] = {}
    for one in differences:
        key = _text(one.reference), _text(one.candidate), one.subject, one.name, one.step, one.kind, one.sites
        known = found.get(key)
        found[key] = one if known is None else replace(known, ranks=(*known.ranks, *one.ranks))
    return in_order(found.values())


def _key(finding: Finding) -> Any:
    values = _text(finding.reference), _text(finding.candidate)
    site = "" if finding.subject != "config" else finding.site
    label = finding.type.partition(", ")[0] if finding.subject == "optimizer" else ""
    return kind_of(finding), finding.subject, finding.name, values, finding.step, site, label


def _text(value: Any) -> str:
    return "absent" if value is ABSENT else json.dumps(value)


def _difference(rank: int, found: Sequence[Finding]) -> SetupDifference:
    first = found[0]
    effects = [effect_of(one) for one in found]
    sites = tuple(dict.fromkeys(one.site for one in found if one.site))
    return SetupDifference(
        rank=rank,
        step=first.step,
        subject=subject_of(found),
        site=sites[0] if sites else "",
        name=first.name,
        reference=None if first.reference is ABSENT else first.reference,
        candidate=None if first.candidate is ABSENT else first.candidate,
        kind=kind_of(first),
        expected_effect=min(effects, key=_EFFECTS.index),
        sentence=sentence_of(found, first.step),
        epsilon=epsilon_of(first),
        sites=sites,
        ranks=(rank,),
    )


# -- what follows from another ---------------------------------------------------------------------------------------


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

    def explain(self, one: Finding) -> bool:
        """Whether a finding follows from another."""
        if one.subject == "argument":
            module = one.site.partition("/")[0]
            if "mask" in one.name and ("config", "_attn_implementation") in self._named:
                return True  # each implementation has its own way to be told
            is_of_module = any((place, _values(one)) in self._by_module for place in (one.site, module))
            return is_of_module or (kind_of(one) == "device" and ("module", "device") in self._named)
        if one.subject == "config":
            of_dtypes = one.name in ("dtype", "torch_dtype") and ("parameter", "dtype") in self._named
            return of_dtypes or _values(one) in self._values
        if one.subject == "parameter":
            return one.name == "tensor" and self._is_of_another_class(one.site)
        if one.subject == "optimizer":
            return self._explain_optimizer(one)
        if one.subject == "torch":
            is_matmul = one.name.endswith("matmul.fp32_precision")
            return is_matmul and ("torch", "float32_matmul_precision") in self._named
        if one.subject == "environment":
            return one.name in _THREADS and ("torch", "threads") in self._named
        cause = _FOLLOWING.get((one.subject, one.name))
        return cause is not None and (one.subject, cause) in self._named

    def _explain_optimizer(self, one: Finding) -> bool:
        if one.name == "parameters":
            return ("parameter", "tensor", one.site) in self._placed or self._is_of_another_class(one.site)
        if one.name == "initial_lr":
            return ("optimizer", "lr", one.site) in self._placed
        return one.name == "decoupled_weight_decay" and one.type.partition(",")[0] in self._classes

    def _is_of_another_class(self, parameter: str) -> bool:
        return ("module", "class", parameter.rpartition(".")[0] or ROOT) in self._placed


_FOLLOWING = {("device", "cuda.capability"): "cuda", ("seed", "cuda"): "torch"}
"""Values that follow from another of the same subject."""


def _values(finding: Finding) -> tuple[str, str]:
    return _text(finding.reference), _text(finding.candidate)


def _is_common(value: Any) -> bool:
    """Whether a value says too little for one difference to be taken for the same as another."""
    return value is None or value is ABSENT or isinstance(value, bool)
