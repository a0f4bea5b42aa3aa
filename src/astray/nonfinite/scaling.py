"""Whether a GradScaler has thrown the infinite gradients of a step away, which is its task and no alarm.

A recording shows it in one of three ways: the scaler's own call and no update after it (functions, ops), updates in
other steps and none in this one, or weights with which the next recorded step begins unchanged.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from astray.nonfinite.step_findings import StepFindings
from astray.store import RankRun


def was_skipped(run: RankRun, found: StepFindings) -> bool:
    """Whether the optimizer has left out this step."""
    if not found.is_skippable:
        return False
    phase = run.calls.coded("phase")
    updates_elsewhere = bool((phase.codes == phase.code("update")).any())
    return found.scaled or updates_elsewhere or _weights_stayed(run, found.step)


def _weights_stayed(run: RankRun, step: int) -> bool:
    """Whether the next recorded step began with the same weights."""
    role, steps = run.tensors.coded("role"), run.calls.numbers("step")[run.call_rows]
    weights = role.codes == role.code("parameter")
    later = np.unique(steps[weights & (steps > step)])
    if not len(later):
        return False
    now, then = (_weights(run, np.flatnonzero(weights & (steps == one))) for one in (step, int(later[0])))
    return bool(now) and now == {name: then.get(name) for name in now}


def _weights(run: RankRun, rows: npt.NDArray[np.int64]) -> dict[tuple[str, str], int]:
    sites, paths, prints = run.calls["site"], run.tensors["path"], run.tensors.numbers("fingerprint")
    return {(sites[run.call_rows[row]], paths[row]): int(prints[row]) for row in rows.tolist()}
