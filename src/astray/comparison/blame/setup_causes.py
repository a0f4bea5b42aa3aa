"""Names what was set differently as the cause: of a divergence that it explains, or of one too small to be seen.

Reads what `setup` found of one rank, feeds `first`. A setting that is known to change results is a divergence where it
first takes effect, if the tensors there differ at all, however little: a learning rate is not rounding.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from astray.comparison.blame.weights import has_role
from astray.comparison.rows import Bools, Ints
from astray.comparison.setup.setup_difference import DifferenceKind, SetupDifference
from astray.comparison.verdict import BAD, Verdict
from astray.graph.keys import one_key
from astray.records import ROOT
from astray.store import Table

NUMERICAL = (
    "class", "*eps*", "p", "*dropout*", "momentum", "*scale*", "scaling", "*heads*", "*groups*", "normalized_shape",
    "*stride*", "*padding*", "dilation", "kernel_size", "approximate", "negative_slope", "alpha", "beta", "*theta*",
    "training", "*top_k*", "norm_topk_prob", "*causal*", "*window*", "affine", "track_running_stats", "temperature",
    "label_smoothing", "reduction", "ignore_index", "*activation*", "hidden_act", "act_fn",
)  # fmt: skip
"""Attributes and arguments that models compute with. A program may keep anything else in its modules, so that other
names count only where the results of their module are wrong."""


_EVERYWHERE: tuple[DifferenceKind, ...] = ("precision", "kernel", "layout", "seed", "device", "version", "environment")
"""Kinds that can change any call, when they are about no site; those first that change more."""


class SettingEffect(NamedTuple):
    """Where a setting takes effect first: a row of the pairs."""

    row: int
    setting: SetupDifference


def explaining(
    setup: Sequence[SetupDifference], *, site: str, phase: str, step: int, parameter: str | None
) -> tuple[SetupDifference, ...]:
    """Those that change the results of a call, or of what moved its parameter: set at the site itself."""
    found = causes_of(
        [difference for difference in setup if changes_results(difference)],
        site=site,
        phase=phase,
        step=step,
        parameter=parameter,
    )
    module = site.partition("/")[0]
    return tuple(
        difference
        for difference in found
        if difference.kind == "optimizer" or {site, module} & set(difference.sites or (difference.site,))
    )


def causes_of(
    differences: Iterable[SetupDifference], *, site: str, phase: str, step: int, parameter: str | None = None
) -> list[SetupDifference]:
    """Those that could explain a wrong result of a call, the nearest first.

    site, phase, step: of the call. parameter: the parameter that is wrong, or that is updated.

    First come those of the site itself; then of what lies inside it, of what is around it, and at last what holds
    everywhere and is known to change numbers. An optimizer's explain an update, and in later steps the parameters that
    it has updated, and nothing else.
    """
    ranked = []
    for place, difference in enumerate(differences):
        distance = _distance(difference, site, phase, step, parameter)
        if distance is not None:
            ranked.append((distance, place, difference))
    return [difference for *_, difference in sorted(ranked, key=lambda entry: entry[:2])]


def _distance(difference: SetupDifference, site: str, phase: str, step: int, parameter: str | None) -> float | None:
    """How far away a difference is: 0 at the site itself. None when it explains nothing."""
    if difference.step is not None and difference.step > step:
        return None
    if difference.kind == "optimizer":
        return _of_optimizer(difference, phase, step, parameter)
    module = site.partition("/")[0]
    if difference.sites and any(place != ROOT for place in difference.sites):
        return _nearest(difference.sites, site, module, parameter)
    if difference.kind in _EVERYWHERE:
        known = difference.expected_effect != "none known"
        return 3 + _EVERYWHERE.index(difference.kind) / len(_EVERYWHERE) if known else None
    return 2.0 if difference.sites and phase != "update" else None


def _of_optimizer(difference: SetupDifference, phase: str, step: int, parameter: str | None) -> float | None:
    if phase == "update":
        is_its = (
            parameter is None or not difference.sites or parameter in difference.sites or difference.name == "class"
        )
        return 0.0 if is_its else None
    # A weight that is wrong before its first update was so from the start.
    has_stepped = step > (difference.step if difference.step is not None else 0)
    is_its = parameter is not None and (
        not difference.sites or parameter in difference.sites or difference.name == "class"
    )
    return 0.0 if has_stepped and is_its else None


def _nearest(sites: Iterable[str], site: str, module: str, parameter: str | None) -> float | None:
    best: float | None = None
    for place in sites:
        if place in (site, module) or (parameter is not None and place == parameter):
            return 0.0
        if place == ROOT or site.startswith(f"{place}."):
            distance = 2.0
        elif module in ("", ROOT) or place.startswith((f"{module}.", f"{module}/")):
            distance = 0.5 if place.rpartition(".")[0] == module else 1.0
        else:
            continue
        best = distance if best is None else min(best, distance)
    return best


def changes_results(difference: SetupDifference) -> bool:
    """Whether it changes more than roundings: a number, a flag or a class that both runs have, or what is optimized."""
    is_optimized = (
        difference.kind == "optimizer" and difference.name == "parameters"
    )  # absent means that nothing steps it
    absent = (difference.reference is None or difference.candidate is None) and not is_optimized
    tensors = any(
        isinstance(value, str) and value.startswith("<") for value in (difference.reference, difference.candidate)
    )
    return difference.expected_effect == "changes results" and not absent and not tensors


def effects(pairs: Table, setup: Sequence[SetupDifference]) -> list[SettingEffect]:
    """Where settings that are known to change results take effect, the earliest first; `pairs` are of one rank."""
    differs = (pairs.coded("verdict").codes != Verdict.IDENTICAL) & (pairs.numbers("row_candidate") >= 0)
    differs &= pairs.numbers("row_reference") >= 0
    found = []
    for difference in setup:
        if not changes_results(difference):
            continue
        if difference.kind == "optimizer":
            rows = _moved(pairs, differs, difference)
        elif difference.kind in ("module", "argument") and any(
            fnmatch.fnmatch(difference.name, name) for name in NUMERICAL
        ):
            rows = _results(pairs, differs, difference)
        else:
            continue
        if len(rows):
            found.append(SettingEffect(_first_that_shows(pairs, rows), difference))
    return sorted(found, key=lambda effect: effect.row)


def _first_that_shows(pairs: Table, rows: Ints) -> int:
    """The first of some rows; if that is off by rounding alone, the first that is wrong there or a step later.

    The first update of Adam is the same for all its betas, but for rounding.
    """
    step, verdict = pairs.numbers("step"), pairs.coded("verdict").codes
    wrong = rows[np.isin(verdict[rows], BAD) & (step[rows] <= step[rows[0]] + 1)]
    return int(wrong[0] if len(wrong) else rows[0])


def _results(pairs: Table, differs: Bools, difference: SetupDifference) -> Ints:
    """What the calls of its sites give."""
    site = pairs.coded("site")
    codes = [site.code(place) for place in difference.sites or (difference.site,) if place and place != ROOT]
    of_sites = differs & np.isin(site.codes, codes) & has_role(pairs, "output")
    return np.flatnonzero(of_sites & (pairs.numbers("step") >= (difference.step or 0)))


def _moved(pairs: Table, differs: Bools, difference: SetupDifference) -> Ints:
    """What its step makes: updates where they were recorded, and the weights of the next step."""
    phase, step = pairs.coded("phase"), pairs.numbers("step")
    since = difference.step if difference.step is not None else int(step.min(initial=0))
    updated = (phase.codes == phase.code("update")) & has_role(pairs, "output") & (step >= since)
    used = (phase.codes == phase.code("forward")) & has_role(pairs, "parameter") & (step > since)
    rows = np.flatnonzero(differs & (updated | used))
    if difference.name == "class" or not difference.sites:
        return rows
    site, path, wanted = pairs.coded("site"), pairs.coded("path"), set(difference.sites)
    distinct, which = np.unique(one_key([site.codes[rows], path.codes[rows]]), return_index=True, return_inverse=True)[
        1:
    ]
    is_its = []
    for row in rows[distinct].tolist():
        module, name = str(site[row]), str(path[row])
        is_its.append(bool({module, name if module == ROOT else f"{module}.{name}"} & wanted))
    return rows[np.array(is_its, np.bool_)[which.ravel()]]
