"""How good the answer of a comparison is: exact, module, wrong or missed.

exact    `Comparison.first` names the culprit's step, site, phase and cause
module   it names the right step, and the culprit's module, one around it or one inside it
wrong    it names something else
missed   it names nothing: no alarm

A site's own code is the site: where functions are recorded, any function of the module is exact, unless the culprit
declares which one it is. The functions of an optimizer get gradients, weights and state alike as inputs, so there the
cause is not asked. The outermost module is around everything, so naming it counts only where it is the culprit.
Where the declared cause is a setting, naming that setting as the cause is exact, wherever it shows first.
"""

from __future__ import annotations

from typing import Any, Literal

import astray
from faults.declared import ANYWHERE, OPTIMIZER, OUTSIDE, ROOT, Culprit, Setting

Score = Literal["exact", "module", "wrong", "missed"]
SCORES: tuple[Score, ...] = ("exact", "module", "wrong", "missed")
PARAMETERS = ("weight", "bias")


def score(found: astray.Divergence | None, culprit: Culprit, setting: Setting) -> Score:
    """Compare what was found with what is declared."""
    if found is None:
        return "missed"
    if culprit.setting is not None and any(one.name == culprit.setting for one in found.settings):
        return "exact"
    if found.step != culprit.step:
        return "wrong"
    here = found.phase == culprit.phase and _is_site(found, culprit, setting)
    if here and _is_cause(found, culprit, setting):
        return "exact"
    return "module" if here or _related(module_of(found.site), module_of(culprit.site)) else "wrong"


def _is_site(found: astray.Divergence, culprit: Culprit, setting: Setting) -> bool:
    if culprit.site in (ANYWHERE, OPTIMIZER):  # every parameter is wrong: which one shows it first says nothing more
        return True
    if setting.functions and culprit.function is not None:
        return found.site == f"{culprit.site}/{culprit.function}"
    return culprit.site in (found.site, found.site.partition("/")[0])


def _is_cause(found: astray.Divergence, culprit: Culprit, setting: Setting) -> bool:
    return found.cause == culprit.cause or (setting.functions and culprit.phase == "update")


def is_module(found: Any, culprit: Culprit) -> bool:
    """Whether a suspect is the culprit's module in the culprit's step, whatever is said of it.

    Where every parameter is the culprit, it is any module in the same phase.
    """
    if found.step != culprit.step:
        return False
    if culprit.site in (ANYWHERE, OPTIMIZER):
        return bool(found.phase == culprit.phase)
    return module_of(found.site) == module_of(culprit.site)


def module_of(site: str) -> str:
    """The module of a function or of a parameter: `h.0.mlp.up` for `h.0.mlp.up/linear` and `h.0.mlp.up.weight`."""
    module = site.partition("/")[0]
    outer, _, name = module.rpartition(".")
    return outer if name in PARAMETERS else module


def _related(one: str, other: str) -> bool:
    if OUTSIDE in (one, other) or ROOT in (one, other):
        return one == other
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
