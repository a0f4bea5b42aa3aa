"""Which differences in how two runs were set up could explain a wrong result of a call."""

from __future__ import annotations

from collections.abc import Iterable

from astray.comparison.setup.setup_difference import Kind, SetupDifference
from astray.records import ROOT

_EVERYWHERE: tuple[Kind, ...] = ("precision", "kernel", "layout", "seed", "device", "version", "environment")
"""Kinds that can change any call, when they are about no site; those first that change more."""


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
    for place, one in enumerate(differences):
        distance = _distance(one, site, phase, step, parameter)
        if distance is not None:
            ranked.append((distance, place, one))
    return [one for *_, one in sorted(ranked, key=lambda entry: entry[:2])]


def _distance(one: SetupDifference, site: str, phase: str, step: int, parameter: str | None) -> float | None:
    """How far away a difference is: 0 at the site itself. None when it explains nothing."""
    if one.step is not None and one.step > step:
        return None
    if one.kind == "optimizer":
        return _of_optimizer(one, phase, step, parameter)
    module = site.partition("/")[0]
    if one.sites and any(place != ROOT for place in one.sites):
        return _nearest(one.sites, site, module, parameter)
    if one.kind in _EVERYWHERE:
        known = one.expected_effect != "none known"
        return 3 + _EVERYWHERE.index(one.kind) / len(_EVERYWHERE) if known else None
    return 2.0 if one.sites and phase != "update" else None


def _of_optimizer(one: SetupDifference, phase: str, step: int, parameter: str | None) -> float | None:
    if phase == "update":
        is_its = parameter is None or not one.sites or parameter in one.sites or one.name == "class"
        return 0.0 if is_its else None
    # A weight that is wrong before its first update was so from the start.
    has_stepped = step > (one.step if one.step is not None else 0)
    is_its = parameter is not None and (not one.sites or parameter in one.sites or one.name == "class")
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
