"""The monitor as the user holds it: a recording of what the optimizer does, every few steps.

`Monitor` records it into a run like any other; `series` reads parameters from a run as lines over steps; a
`ScalarWriter` such as TensorBoard's gets the same numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from astray.capture.adapters import adapter_for
from astray.capture.recorder import BaseRecorder
from astray.errors import UsageError
from astray.process import absolute
from astray.records import Statistics
from astray.results.run import Run
from astray.state.models import reader_of
from astray.store import BackgroundWriter, BufferedStep, RankRun, RunWriter, open_run
from astray.wording import did_you_mean

WHAT = {"weight": "weight", "gradient": "grad", "update": "update", "state": "state."}
"""What of a parameter is recorded, and its path in the recording; the path of a state ends with the state's name."""

RATIO = "ratio"
"""The norm of the update over that of the weight."""

_BEFORE = "weight before the step"

SERIES_STATISTICS = tuple(name for name in Statistics._fields if name not in ("first_bad", "first_bad_value"))

EVERY = 10
STATISTICS = ("l2", "mean", "std", "absmax")


class Monitor:
    """Records the weight, gradient, optimizer state and update of every parameter, every few steps, into a run.

    >>> with astray.state.Monitor(model, optimizer, every=10, path="runs/a") as monitor:
    ...     train()
    >>> print(monitor.series("update", "l2"))
    >>> print(monitor.series("ratio"))

    It begins at once and needs no further calls: a step ends with the step of the first optimizer, and the steps in
    between cost nothing. Two trainings compare as any runs do: `astray compare runs/a runs/b`. It prints nothing.

    model: a module of torch or a layer of Paddle, or a dict of them whose names are prefixes of parameters' names.
    optimizer: the one that trains it, to make sure that it does. The steps of every optimizer are recorded.
    every: steps from one recorded step to the next; the first step is recorded.
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
        tensorboard: str | os.PathLike[str] | ScalarWriter | None = None,
        statistics: Sequence[str] = STATISTICS,
        overwrite: bool = False,
    ) -> None:
        wanted = (what,) if isinstance(what, str) else tuple(what)
        _check(every, wanted)
        check_statistics(tuple(statistics))
        adapter = adapter_for(model, detects_steps=True)
        if optimizer is not None:
            _check_optimizer(optimizer, model)
        self.path = absolute(path)
        self._statistics = tuple(statistics)
        self._writer: RunWriter | None = None
        self._scalars: Any = None if tensorboard is None else writer_of(tensorboard)
        self._closes = self._scalars is not None and self._scalars is not tensorboard
        self._recorder = BaseRecorder.discovering(
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
        return Run.of(open_run(self.path))

    def series(self, what: str = "update", statistic: str = "l2") -> ParameterSeries:
        """One number of each parameter over the steps: of its weight, gradient, update, or a state by its name.

        "ratio" is the norm of the update over that of the weight it was made to.
        """
        check_statistics((statistic,))
        rank = self._writer.rank if self._writer is not None else 0
        recorded = list(points(self.run.ranks[rank], (statistic,)))
        known = dict.fromkeys(point.what for point in recorded)
        if recorded and what not in known:
            raise UsageError(
                f"Nothing was recorded of {what!r}.{did_you_mean(what, known)} There are {', '.join(known)}."
            )
        return series(recorded, what, "l2" if what == RATIO else statistic)

    def close(self) -> None:
        """Removes every hook, and closes the run."""
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

    def _open(self, path: Path, rank: int, **named: Any) -> BackgroundWriter:
        self._writer = RunWriter(
            path, rank, on_step=self._write_scalars if self._scalars is not None else None, **named
        )
        return self._writer

    def _write_scalars(self, rows: BufferedStep) -> None:
        """Writes the numbers of a step to TensorBoard, in the recorder's thread."""
        assert self._writer is not None
        for point in points(RankRun(self._writer.rank, rows), self._statistics):
            write(self._scalars, point)


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
    models = list(model.values()) if isinstance(model, Mapping) else [model]
    known = {id(parameter) for each in models for parameter in each.parameters()}
    kind = type(optimizer).__name__
    try:
        trained = reader_of(models[0]).given_to(optimizer)
    except AttributeError:
        raise UsageError(f"A {kind} was given, which does not train this model. Give its optimizer.") from None
    if trained and not any(id(parameter) in known for parameter in trained):
        raise UsageError(f"This {kind} trains none of the parameters of the model. Give the one that does.")


# -- the rows of parameters as lines over steps ------------------------------------------------------------------------


class Point(NamedTuple):
    """A number of one parameter in one step. `what` is weight, gradient, update, or the name of a state."""

    step: int
    parameter: str
    what: str
    statistic: str
    value: float


class ParameterSeries(NamedTuple):
    """One statistic of one thing, for each parameter over the steps."""

    what: str
    statistic: str
    steps: list[int]
    values: Mapping[str, list[float]]
    """By parameter, a value for each step; NaN where there is none."""

    def __str__(self) -> str:
        from astray.formatting.figures import statistic
        from astray.formatting.page import TextTable

        if not self.values:
            return f"There is no {self.statistic} of any {self.what} yet."
        rows = [
            {"parameter": name, **{str(step): statistic(value) for step, value in zip(self.steps, values, strict=True)}}
            for name, values in self.values.items()
        ]
        grid = TextTable(
            words=["parameter"], droppable=[str(step) for step in self.steps[:-1]], min_widths={"parameter": 20}
        )
        head = (
            "norm of the update over that of the weight"
            if self.what == RATIO
            else f"{self.statistic} of each {self.what}"
        )
        return "\n".join([f"{head}, by step", "", *grid.lines(rows, 120)])


def points(rank: RankRun, statistics: tuple[str, ...]) -> Iterator[Point]:
    """Every number of the parameters in a rank, in the order of observation; the ratio once for each step."""
    calls, tensors, rows = rank.calls, rank.tensors, rank.call_rows
    phases, sites, steps = calls.coded("phase"), calls.coded("site"), calls.numbers("step")
    roles, paths = tensors.coded("role"), tensors.coded("path")
    columns = {name: tensors.numbers(name) for name in {*statistics, "l2"}}
    before: dict[str, float] = {}  # norms of weights, by parameter: their updates come later in the step
    for row, call in enumerate(rows.tolist()):
        what = _what(roles[row], paths[row]) if call >= 0 and phases[call] == "update" else None
        if what is None:
            continue
        step, parameter = int(steps[call]), str(sites[call])
        norm = float(columns["l2"][row])
        if what == _BEFORE:
            before[parameter] = norm
            continue
        for name in statistics:
            yield Point(step, parameter, what, name, float(columns[name][row]))
        if what == "update" and before.get(parameter):
            yield Point(step, parameter, RATIO, "l2", norm / before[parameter])


def series(points: Iterable[Point], what: str, statistic: str) -> ParameterSeries:
    """The points of one kind, parameter by parameter."""
    by_parameter: dict[str, dict[int, float]] = {}
    for point in points:
        if (point.what, point.statistic) == (what, statistic):
            by_parameter.setdefault(point.parameter, {})[point.step] = point.value
    steps = sorted({step for values in by_parameter.values() for step in values})
    lines = {name: [values.get(step, math.nan) for step in steps] for name, values in by_parameter.items()}
    return ParameterSeries(what, statistic, steps, lines)


def check_statistics(names: tuple[str, ...]) -> None:
    """Raises a UsageError unless a recording has them all."""
    for name in names:
        if name not in SERIES_STATISTICS:
            known = ", ".join(SERIES_STATISTICS)
            raise UsageError(
                f"There is no statistic {name!r}.{did_you_mean(name, SERIES_STATISTICS)} There are {known}."
            )


def _what(role: str | None, path: str | None) -> str | None:
    """What a row of an optimizer's step shows of its parameter; None for rows that no series has, such as a counter."""
    if path is None or path == f"{WHAT['state']}step":
        return None
    if path.startswith(WHAT["state"]):  # the states before the step are recorded too
        return path.removeprefix(WHAT["state"]) if role == "output" else None
    if path == "weight" and role == "parameter":
        return _BEFORE
    return next((what for what, known in WHAT.items() if path == known), None)


# -- TensorBoard, or anything else that takes scalars ------------------------------------------------------------------


class ScalarWriter(Protocol):
    """What `SummaryWriter` of TensorBoard offers, and many others like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


def writer_of(target: str | os.PathLike[str] | ScalarWriter) -> ScalarWriter:
    """The writer itself, or for a folder a new `SummaryWriter`, which the caller has to close."""
    if not isinstance(target, str | os.PathLike):
        if not callable(getattr(target, "add_scalar", None)):
            raise UsageError(f"A {type(target).__name__} takes no scalars. Give a folder, or what has an add_scalar.")
        return target
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("TensorBoard is not installed. `pip install tensorboard`, or leave tensorboard out.") from None
    return SummaryWriter(os.fspath(absolute(target)))


def write(scalars: ScalarWriter, point: Point) -> None:
    """Writes one number, under a tag by which TensorBoard groups it."""
    group = point.what if point.what == RATIO else f"{point.what} {point.statistic}"
    scalars.add_scalar(f"{group}/{point.parameter}", point.value, point.step)
