"""The monitor as the user holds it: a recording of what the optimizer does, every few steps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from astray.capture.adapters import adapter_for
from astray.capture.recorder import Recorder
from astray.errors import UsageError
from astray.paths import absolute
from astray.state import scalars as to_scalars
from astray.state.scalars import Scalars
from astray.state.series import RATIO, WHAT, Series, check_statistics, points, series
from astray.store import Intake, RankRun, Run, RunWriter, StepRows, open_run
from astray.wording import did_you_mean

EVERY = 10
STATISTICS = ("l2", "mean", "std", "absmax")


class Monitor:
    """Records the weight, gradient, optimizer state and update of every parameter, every few steps, into a run.

    >>> with astray.Monitor(model, optimizer, every=10, path="runs/a") as monitor:
    ...     train()
    >>> print(monitor.series("update", "l2"))
    >>> print(monitor.series("ratio"))

    It begins at once and needs nothing more: a step ends with the step of the first optimizer, and those in between
    cost nothing. Two trainings compare as any runs do: `astray compare runs/a runs/b`. It prints nothing.

    model: a module, or a dict of modules whose names come in front of their parameters.
    optimizer: the one that trains it, to make sure that it does. Whichever step are recorded.
    every: so many steps from one to the next that is recorded; the first one is.
    path: the folder of the run.
    what: "weight", "gradient", "state", "update", or several.
    match: only parameters in whose names this regular expression is found.
    tensorboard: also write these numbers to TensorBoard: a folder, or anything with an `add_scalar`.
    statistics: which numbers go there; the run has them all.
    overwrite: replace a run that is there already.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        every: int = EVERY,
        path: str | os.PathLike[str] = "runs/monitor",
        what: Sequence[str] = tuple(WHAT),
        match: str | None = None,
        tensorboard: str | os.PathLike[str] | Scalars | None = None,
        statistics: Sequence[str] = STATISTICS,
        overwrite: bool = False,
    ) -> None:
        wanted = (what,) if isinstance(what, str) else tuple(what)
        _check(every, wanted)
        check_statistics(tuple(statistics))
        adapter = adapter_for(model, paced=True)
        if optimizer is not None:
            _check_optimizer(optimizer, model)
        self.path = absolute(path)
        self._statistics = tuple(statistics)
        self._writer: RunWriter | None = None
        self._scalars: Any = None if tensorboard is None else to_scalars.writer_of(tensorboard)
        self._closes = self._scalars is not None and self._scalars is not tensorboard
        self._recorder = Recorder.discovering(
            self.path,
            adapter,
            overwrite=overwrite,
            writer=self._open,
            phases=["update"],
            optimizer=list(wanted),
            steps=f"::{every}",
            match=match,
        ).start()

    @property
    def run(self) -> Run:
        """What was recorded so far, as a run."""
        if self._writer is not None and self._writer.end is None:
            self._writer.flush()
        return open_run(self.path)

    def series(self, what: str = "update", statistic: str = "l2") -> Series:
        """One number of each parameter over the steps: of its weight, gradient, update, or a state by its name.

        "ratio" is the norm of the update over that of the weight it was made to.
        """
        check_statistics((statistic,))
        rank = self._writer.rank if self._writer is not None else 0
        found = list(points(self.run.ranks[rank], (statistic,)))
        known = dict.fromkeys(point.what for point in found)
        if found and what not in known:
            raise UsageError(
                f"Nothing was recorded of {what!r}.{did_you_mean(what, known)} There are {', '.join(known)}."
            )
        return series(found, what, "l2" if what == RATIO else statistic)

    def close(self) -> None:
        """Ends it: removes every hook, and closes the run."""
        self._end("normally")

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end("normally" if error is None else f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"<Monitor: {self._recorder.summary()}>"

    def _end(self, ended: str) -> None:
        self._recorder.stop(ended)
        if self._closes:
            self._scalars.close()
            self._closes = False

    def _open(self, path: Path, rank: int, **named: Any) -> Intake:
        self._writer = RunWriter(path, rank, on_step=self._hand_over if self._scalars is not None else None, **named)
        return self._writer

    def _hand_over(self, rows: StepRows) -> None:
        """Gives the numbers of a step to TensorBoard, in the recorder's thread."""
        assert self._writer is not None
        for point in points(RankRun(self._writer.rank, rows), self._statistics):
            to_scalars.write(self._scalars, point)


def _check(every: int, what: tuple[str, ...]) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"every={every!r}: give the number of steps from one recorded to the next, such as 10.")
    for name in what:
        if name not in WHAT:
            near = did_you_mean(name, WHAT)
            raise UsageError(f"what={name!r} is not known.{near} There are {', '.join(WHAT)}.")
    if not what:
        raise UsageError(f"what= is empty. Choose from {', '.join(WHAT)}.")


def _check_optimizer(optimizer: Any, model: Any) -> None:
    models = model.values() if isinstance(model, Mapping) else [model]
    known = {id(parameter) for one in models for parameter in one.parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if trained and not any(id(parameter) in known for parameter in trained):
        raise UsageError(
            f"This {type(optimizer).__name__} trains none of the parameters of the model. Give the one that does."
        )
