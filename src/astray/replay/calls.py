"""A recorded call, made ready to be executed: its callable, its arguments, its results and gradients.

Reads the tables and the values of one rank. What a call lacks is a `CannotReplayError` with the reason; nothing is
executed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from astray.capture.pytorch.kept_tensors import NotKeptError, kept_tensor
from astray.errors import RunError
from astray.records import GENERATOR, Frame, Setup
from astray.replay.arguments import NotPlainError, Skeleton, parse_skeleton, paths
from astray.replay.functions import OVERWRITING, RefusedNameError, ResolvedFunction, resolve
from astray.replay.modules import CLASSES, NotALeafError, rebuild_module
from astray.store import RankRun
from astray.store.columns import Table

MOST_ELEMENTS = 1 << 28
"""Elements of all tensors of a call together: 2 GiB in float64, of which a replay holds a few copies."""

Tensors = dict[str, torch.Tensor]


class CannotReplayError(Exception):
    """A call that cannot be executed again; its text says why, in words that do for every call of the same kind."""


class BackwardCall(NamedTuple):
    """The backward of a call: the gradients that arrived at its results, and those it sent to its inputs."""

    call: dict[str, Any]
    arrived: Tensors
    sent: Tensors


class RecordedGenerator(NamedTuple):
    """The states that torch's generator had before and after a call."""

    before: torch.Tensor
    after: torch.Tensor


class RebuiltCall(NamedTuple):
    """A call that can be executed again.

    callable_of: from the parameters of a module, in the numbers of a way, to what is called. twins: inputs that are
    another input once more, so that the gradient of both is recorded at the first. kept: the results as they were
    recorded. shared: inputs that other calls are given too. drawn: of a call that draws random numbers.
    """

    call: dict[str, Any]
    name: str
    callable_of: Callable[[Mapping[str, torch.Tensor]], Callable[..., Any]]
    in_place: bool
    skeleton: Skeleton
    inputs: Tensors
    own: Tensors
    twins: dict[str, str]
    kept: Tensors
    shared: frozenset[str]
    devices: frozenset[str]
    backwards: list[BackwardCall]
    lost: list[str]  # why some of its tensors are left out
    drawn: RecordedGenerator | None = None


class RecordedCalls:
    """The calls of one rank that could be replayed, in the order in which they were made."""

    def __init__(self, rank: RankRun) -> None:
        self._rank = rank

    @cached_property
    def _rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The rows of tensors by their calls, and where those of each call begin."""
        calls = self._rank.call_rows
        order = np.argsort(calls, kind="stable")
        return order, np.searchsorted(calls[order], np.arange(len(self._rank.calls) + 1))

    @cached_property
    def _backwards(self) -> dict[int, list[int]]:
        """The rows of backward calls, by the number of their forward call."""
        table, found = self._rank.calls, dict[int, list[int]]()
        for row in np.flatnonzero(_is(table, "phase", "backward") & ~_is(table, "kind", "op")).tolist():
            parent = table.row(row)["parent"]
            if parent is not None and parent >= 0:
                found.setdefault(parent, []).append(row)
        return found

    @cached_property
    def _modules(self) -> dict[str, list[tuple[int, dict[str, int]]]]:
        """Of each module the calls at which its parameters and buffers were recorded, with the rows of these."""
        tensors, calls = self._rank.tensors, self._rank.call_rows
        own = (_is(tensors, "role", "parameter") | _is(tensors, "role", "state")) & (calls >= 0)
        own &= np.append(_is(self._rank.calls, "kind", "module"), False)[calls]
        paths, found = tensors.coded("path"), dict[int, dict[str, int]]()
        for index in np.flatnonzero(own).tolist():
            path = paths.values[paths.codes[index]]
            if "." not in path:
                found.setdefault(int(calls[index]), {})[path] = index
        by_site: dict[str, list[tuple[int, dict[str, int]]]] = {}
        for row, rows in found.items():
            call = self._rank.calls.row(row)
            by_site.setdefault(call["site"], []).append((call["seq"], rows))
        return {site: sorted(each, key=lambda one: one[0]) for site, each in by_site.items()}

    @cached_property
    def _module_settings(self) -> dict[str, list[Setup]]:
        """What each module was set to, in the order in which that was noted."""
        found: dict[str, list[Setup]] = {}
        for setup in self._rank.setup:
            if setup.subject == "module":
                found.setdefault(setup.site, []).append(setup)
        return found

    @cached_property
    def flags(self) -> dict[str, Any]:
        """What torch was set to, all steps together: a flag that was on for one may have been on in each."""
        found: dict[str, Any] = {}
        for setup in self._rank.setup:
            if setup.subject == "torch":
                found |= setup.values
        return found

    @cached_property
    def _drawing(self) -> dict[int, list[int]]:
        """The rows of the calls of functions inside of a module that have drawn, by the number of the module's call."""
        role, path = self._rank.tensors.coded("role"), self._rank.tensors.coded("path")
        states = np.flatnonzero((role.codes == role.code("state")) & (path.codes == path.code(GENERATOR[0])))
        found: dict[int, list[int]] = {}
        for row in np.unique(self._rank.call_rows[states]).tolist():
            parent = self._rank.calls.row(row)["parent"] if row >= 0 else None
            if parent is not None and parent >= 0:
                found.setdefault(parent, []).append(row)
        return found

    @cached_property
    def _shared(self) -> frozenset[int]:
        """The values that several calls of functions are given."""
        calls = self._rank.call_rows
        users = np.flatnonzero((calls >= 0) & _is(self._rank.tensors, "role", "input"))
        users = users[_is(self._rank.calls, "kind", "function")[calls[users]]]
        pairs = np.unique(np.stack([self._rank.tensors.numbers("value")[users], calls[users]]), axis=1)
        values, counts = np.unique(pairs[0], return_counts=True)
        return frozenset(values[(counts > 1) & (values >= 0)].tolist())

    def rows(self) -> list[int]:
        """The rows of calls that compute something, in the order of their numbers."""
        table = self._rank.calls
        wanted = (_is(table, "kind", "function") | _is(table, "kind", "module")) & _is(table, "phase", "forward")
        wanted |= _is(table, "kind", "op")
        found = np.flatnonzero(wanted)
        return [int(row) for row in found[np.argsort(table.numbers("seq")[found], kind="stable")]]

    def call(self, row: int) -> dict[str, Any]:
        return {**self._rank.calls.row(row), "rank": self._rank.rank}

    def stack(self, call: Mapping[str, Any]) -> list[Frame]:
        """The lines of the program that made a call; none where they were not recorded."""
        return self._rank.stack(call["stack"]) if call["stack"] is not None else []

    def tensors(self, row: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The tensors of a call with the numbers of their rows."""
        order, starts = self._rows
        for index in order[starts[row] : starts[row + 1]].tolist():
            yield index, self._rank.tensors.row(index)

    def has_outputs(self, row: int) -> bool:
        return any(tensor["role"] == "output" for _, tensor in self.tensors(row))

    def rebuild(self, row: int) -> RebuiltCall:
        """The call of a row. Raises CannotReplayError with the reason."""
        call = self.call(row)
        try:
            return self._rebuild(call, list(self.tensors(row)))
        except (RefusedNameError, NotALeafError, NotPlainError) as error:
            raise CannotReplayError(str(error)) from None
        except RunError:
            raise CannotReplayError("a tensor that cannot be read from the run") from None

    def _rebuild(self, call: dict[str, Any], tensors: list[tuple[int, dict[str, Any]]]) -> RebuiltCall:
        function = None if call["kind"] == "module" else resolve(call["type"])
        if function is None and call["type"] not in CLASSES:
            raise NotALeafError("a module that is not a leaf of torch.nn")
        skeleton = parse_skeleton(call["args"])
        rows = {(tensor["role"], tensor["path"]): (index, tensor) for index, tensor in tensors}
        inputs = {path: rows.get(("input", path)) for path in paths(skeleton)}
        if function is not None and function.name in OVERWRITING and "0" in inputs:
            inputs["0"] = inputs["0"] or rows.get(("output", "out"))  # whose values it does not read
        if missing := [path for path, found in inputs.items() if found is None]:
            raise CannotReplayError(_missing(missing[0]))
        outputs = {path: found for (role, path), found in rows.items() if role == "output"}
        if not outputs:
            raise CannotReplayError("no result was recorded")
        if function is not None and function.in_place and function.name not in OVERWRITING:
            _check_overwritten(inputs, outputs)
        own = self._own(call) if function is None else {}
        everything = [
            *inputs.values(),
            *outputs.values(),
            *((index, self._rank.tensors.row(index)) for index in own.values()),
        ]
        size = sum(prod(found[1]["shape"]) for found in everything if found is not None)
        if size > MOST_ELEMENTS:
            raise CannotReplayError(f"more than {MOST_ELEMENTS:,} elements in the tensors of one call")
        read = {path: self._read(*found) for path, found in inputs.items() if found is not None}
        parameters = {path: self._read(index, self._rank.tensors.row(index)) for path, index in own.items()}
        kept, lost = self._kept(outputs)
        backwards = [self._backward(each, lost) for each in self._backwards.get(call["seq"], ())]
        backwards = [each for each in backwards if each.sent]
        if not kept and not backwards:
            raise CannotReplayError(lost[0])
        return RebuiltCall(
            call,
            call["type"].lower() if function is None else function.name,
            self._callable(call, function, parameters),
            function is not None and function.in_place,
            skeleton,
            read,
            parameters,
            _twins(inputs, {path for each in backwards for path in each.sent}),
            kept,
            frozenset(
                path for path, found in inputs.items() if found is not None and found[1]["value"] in self._shared
            ),
            frozenset(tensor["device"].partition(":")[0] for _, tensor in tensors),
            backwards,
            lost,
            self._drawn(call, rows),
        )

    def _drawn(
        self, call: dict[str, Any], rows: Mapping[tuple[str, str], tuple[int, dict[str, Any]]]
    ) -> RecordedGenerator | None:
        """The states of the generator at a call; of a module those at the first and the last call inside."""
        found = [rows.get(("state", path)) for path in GENERATOR]
        if call["kind"] == "module" and (inside := self._drawing.get(call["seq"])):
            ends = [
                {tensor["path"]: (index, tensor) for index, tensor in self.tensors(row) if tensor["role"] == "state"}
                for row in (inside[0], inside[-1])
            ]
            found = [end.get(path) for end, path in zip(ends, GENERATOR, strict=True)]
        if found[0] is None or found[1] is None:
            return None
        states = RecordedGenerator(self._read(*found[0]), self._read(*found[1]))
        if states.before.numel() != torch.default_generator.get_state().numel():
            raise CannotReplayError("random numbers of a device's own generator, which this processor does not have")
        return states

    def _callable(
        self, call: dict[str, Any], function: ResolvedFunction | None, parameters: Tensors
    ) -> Callable[[Mapping[str, torch.Tensor]], Callable[..., Any]]:
        if function is None:
            return rebuild_module(call["type"], self.settings(call), parameters)
        return lambda _: function.call

    def settings(self, call: dict[str, Any]) -> dict[str, Any]:
        """What a module was set to at a call."""
        found: dict[str, Any] = {}
        for setup in self._module_settings.get(call["site"], ()):
            if setup.step <= call["step"]:
                found |= setup.values
        if not found:
            raise CannotReplayError("a module whose settings were not recorded")
        return found

    def _own(self, call: dict[str, Any]) -> dict[str, int]:
        """The rows of a module's parameters and buffers as they were at a call. They are recorded when they are new."""
        found: dict[str, int] = {}
        for seq, own in self._modules.get(call["site"], ()):
            if seq <= call["seq"]:
                found |= own
        return found

    def _kept(self, outputs: Mapping[str, tuple[int, dict[str, Any]]]) -> tuple[Tensors, list[str]]:
        """The recorded results, and why some are not there."""
        kept, lost = Tensors(), []
        for path, found in outputs.items():
            try:
                kept[path] = self._read(*found)
            except CannotReplayError as error:  # noqa: PERF203 - the others are judged
                lost.append(str(error))
        return kept, lost

    def _backward(self, row: int, lost: list[str]) -> BackwardCall:
        call = self.call(row)
        gradients = {"input": Tensors(), "output": Tensors()}
        try:
            for index, tensor in self.tensors(row):
                if tensor["role"] in gradients:
                    gradients[tensor["role"]][tensor["path"]] = self._read(index, tensor)
        except CannotReplayError as error:
            lost.append(f"{error}, of a gradient")
            return BackwardCall(call, {}, {})
        if not gradients["input"] and gradients["output"]:
            lost.append("no gradient was recorded that arrived at its results")
            return BackwardCall(call, {}, {})
        return BackwardCall(call, gradients["input"], gradients["output"])

    def _read(self, index: int, tensor: Mapping[str, Any]) -> torch.Tensor:
        """The values of a row as a tensor, on this processor, laid out in the order of the recorded strides."""
        if prod(tensor["shape"]) > MOST_ELEMENTS:
            raise CannotReplayError(f"more than {MOST_ELEMENTS:,} elements in the tensors of one call")
        try:
            return kept_tensor(self._rank, index, tensor)
        except NotKeptError as error:
            raise CannotReplayError(str(error)) from None


def _is(table: Table, column: str, word: str) -> npt.NDArray[np.bool_]:
    coded = table.coded(column)
    return np.asarray(coded.codes == coded.code(word))


def _missing(path: str) -> str:
    if path.startswith("kwargs.out"):
        return "a result written into the argument out"
    return "an input that was not recorded, such as memory that was not filled yet"


def _check_overwritten(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """An in-place call's first input must be what was there before it."""
    first, result = next(iter(inputs.values()), None), next(iter(outputs.values()))
    if first is None or first[1]["value"] is None or first[1]["value"] < 0:
        return
    same = first[1]["value"] == result[1]["value"] and first[1]["shape"] == result[1]["shape"]
    if same and first[1]["fingerprint"] is not None and first[1]["fingerprint"] == result[1]["fingerprint"]:
        raise CannotReplayError("an in-place call whose input may have been recorded after it was overwritten")


def _twins(inputs: Mapping[str, Any], sent: set[str]) -> dict[str, str]:
    """Inputs that need a gradient and got none, because the same tensor was given before them: its path for theirs."""
    same = ("value", "shape", "stride", "dtype", "fingerprint")
    twins = {}
    for path, (_, tensor) in inputs.items():
        if path in sent or not tensor["requires_grad"]:
            continue
        for earlier, (_, other) in inputs.items():
            if earlier == path:
                break
            if earlier in sent and all(tensor[name] == other[name] for name in same):
                twins[path] = earlier
                break
    return twins


def described(call: Mapping[str, Any]) -> str:
    """A call in words: `h.2.mlp.proj/linear`, call 1, step 3."""
    return f"{call['site']}#{call['call']} of step {call['step']}"
