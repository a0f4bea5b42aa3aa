"""A run as users hold it: the data of `store`, with the analyses of one run alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from astray.errors import RunError
from astray.store import CheckpointData, RankRun, RunData

if TYPE_CHECKING:
    from astray.headroom.risk import Risk
    from astray.nonfinite.findings import Findings
    from astray.replay.export import ExportedCall
    from astray.replay.replay import Replay, ReplayedCall


class Run(RunData):
    """A recording: what ran, and for each rank its tables and values.

    >>> run = astray.open("runs/a")
    >>> run
    <Run runs/a: torch, 20 steps, 1 rank, 3,480 calls, 9,120 tensors, complete>
    >>> run.tensor(Key(0, 0, "layers.3.attn", 0, "forward", "output", "0")).shape
    (8, 128, 512)
    """

    @staticmethod
    def of(data: RunData) -> Run:
        """This run as users hold it. It shares all state with `data`: tables that one has read, the other has too."""
        if isinstance(data, Run):
            return data
        kind = CheckpointRun if isinstance(data, CheckpointData) else Run
        run = kind.__new__(kind)
        vars(run).update(vars(data))
        return run

    def with_ranks(self, ranks: dict[int, RankRun]) -> Run:
        """The same run with other ranks in place of its own."""
        return Run.of(super().with_ranks(ranks))

    def risk(
        self,
        *,
        steps: str | Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        what_if: str | Sequence[str] = (),
    ) -> Risk:
        """How close the numbers of the run come to overflow, to zero, and to no longer moving; the worst place first.

        >>> run.risk(what_if="float16")
        <Risk of runs/a: 1 non-finite, 2 overflow, 3 tight, 210 calm>

        steps, ranks: look only at these: steps="0:10:2", ranks=[0, 3].
        what_if: other dtypes to compute it for.
        """
        from astray.headroom.risk import risk  # imported on demand

        return risk(self, steps=steps, ranks=ranks, what_if=what_if)

    def alarms(self, *, rank: int | None = None, steps: str | int | Sequence[int] | None = None) -> Findings:
        """Where NaN and infinity come from, and what they reached.

        >>> alarms = run.alarms()
        >>> alarms[0].origin.site, alarms[0].kind.word
        ('h.2.attn/softmax', 'fully masked')

        rank, steps: look only at these.
        """
        from astray.nonfinite.findings import alarms

        return alarms(self, rank, steps)

    def replay(
        self,
        site: str | None = None,
        *,
        steps: str | int | Sequence[int] | None = None,
        rank: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Replay:
        """Executes the calls of a run of PyTorch again from their kept inputs, and judges each result.

        >>> run.replay()
        <Replay of runs/a: 46 of 47 calls replayed, 1 stands out>

        site: only the calls of this site, or inside of this module; `h.2.mlp/gelu#1` is one call.
        rank, steps: look only at these.
        progress: called with how many calls are done, and how many there are.
        """
        _check_replayable(self)
        from astray.replay.replay import replay

        return replay(self, site, steps=steps, rank=rank, progress=progress)

    def export_call(
        self,
        call: str | ReplayedCall,
        path: str | os.PathLike[str],
        *,
        steps: str | int | None = None,
        rank: int | None = None,
        micro: int | None = None,
        phase: str | None = None,
        force: bool = False,
    ) -> ExportedCall:
        """Writes one call as a script that makes it again with nothing but torch, to attach to a bug report.

        >>> exported = run.export_call(run.replay().calls[0], "bug.py")
        >>> exported.script, exported.values
        (PosixPath('bug.py'), PosixPath('bug.safetensors'))

        The script says how far the recorded result and that of its own machine are from the exact one.

        call: a replayed call, or its name: `h.2.mlp/gelu#1`; a site will do where it has one call.
        path: of the script; the tensors of the call are written beside it.
        steps, rank, micro, phase: which of the calls of that name.
        force: overwrite what is there.
        """
        _check_replayable(self)
        from astray.replay.export import export_call

        return export_call(self, call, path, steps=steps, rank=rank, micro=micro, phase=phase, force=force)


def _check_replayable(run: Run) -> None:
    """Before the modules are imported that replay, for they need torch."""
    if run.info.framework == "paddle":
        raise RunError(
            f"{run.path} was recorded from paddle, and only calls of PyTorch can be replayed. Compare it with another "
            "run instead."
        )
    if find_spec("torch") is None:
        raise RunError(
            "Calls are replayed by PyTorch, which is not installed here. Install torch, or copy the run to where it is."
        )


class CheckpointRun(Run, CheckpointData):
    """A checkpoint that is read like a run. `checkpoint` has the tensors themselves."""
