"""Where a fault shows in a recording of functions alone: the call that is next to the culprit's code.

Such a recording has no calls of modules. What a module's own code gives is then seen where a function takes it. Which
function that is can be read from a recording of the same program that has both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

import astray
from faults.declared import Cause, Culprit


def consequences(run: astray.Run, culprit: Culprit) -> tuple[Culprit, ...]:
    """What is exact besides the culprit itself, where only functions are recorded."""
    shown = [replace(culprit, cause="input")] if culprit.cause == "computation" else []  # made by the module's own code
    if culprit.cause != "parameter":
        for site in dict.fromkeys(_neighbours(run, culprit)):
            module, _, function = site.rpartition("/")
            causes: tuple[Cause, ...] = ("input", "computation")
            shown += [replace(culprit, site=module, function=function, cause=cause) for cause in causes]
    return tuple(shown)


def _neighbours(run: astray.Run, culprit: Culprit) -> Iterator[str]:
    """The functions that take what the module gives, or is given wrongly; in backward, those that made its inputs."""
    calls, tensors = run.ranks[0].calls, run.ranks[0].tensors
    site, phase, kind = (np.array(calls.coded(name).tolist()) for name in ("site", "phase", "kind"))
    call = np.searchsorted(calls.numbers("seq"), tensors.numbers("seq"))
    role, prints = np.array(tensors.coded("role").tolist()), tensors.numbers("fingerprint")
    here = (calls.numbers("step")[call] == culprit.step) & (phase[call] == "forward")
    wanted, taken = ("output", "input") if culprit.phase == "forward" else ("input", "output")
    if culprit.cause == "input":
        wanted = "input"
    of_culprit = here & (site[call] == culprit.site) & (role == wanted)
    function = here & (kind[call] == "function") & (role == taken) & np.isin(prints, prints[of_culprit])
    yield from site[call[function]].tolist()
