"""Puts values of a recorded run in the place of those of the program that is being recorded: the setting `graft`.

The native code that records calls asks `Grafts` about each of them: before its inputs are recorded, after that, and
before its outputs are. So the recording sees what was grafted, and both runs call a tensor by the same key. Only a
tensor with other bits than the run's is replaced. Its gradient goes on to the computation that it replaces, unchanged.
Hooks on tensors stay in a graph that outlives the recording; they do nothing from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, _DisableTorchDispatch

from astray.capture.engine import Engine
from astray.capture.graft_words import Graft
from astray.capture.pytorch.calls.call_capture import CalledFunction, flattener
from astray.capture.pytorch.calls.wrappers import state
from astray.capture.pytorch.experiments.applied_graft import AppliedGraft
from astray.capture.pytorch.experiments.grafted_tensors import (
    CannotGraftError,
    Named,
    ReplacedTensors,
    SentGradient,
    check_replaceable,
    with_gradient,
)
from astray.capture.pytorch.experiments.reference_values import (
    TensorSlot,
    open_rank,
)
from astray.capture.pytorch.experiments.round_trip import mapped
from astray.capture.pytorch.kept_tensors import NotKeptError
from astray.capture.pytorch.native.core import OpenCall
from astray.errors import RunError
from astray.records import Role

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Grafts:
    """The grafts of a recording, from `start` of its adapter until `remove`."""

    def __init__(self, engine: Engine, texts: Sequence[str], rank: int) -> None:
        self._engine = engine
        self._flat = flattener()
        ranks = {run: open_rank(run, rank) for run in {Graft.read(text).run for text in texts}}
        self._grafts = [AppliedGraft(engine, Graft.read(text), ranks) for text in texts]
        self._open: dict[int, _GraftedCall] = {}  # by the ids of calls, which they hold
        self._handles: list[Any] = []  # of hooks on leaves, which no graph frees
        self._removed = False

    def next_step(self) -> None:
        """The step ends."""
        self._open.clear()
        self._remove_handles()
        for graft in self._grafts:
            graft.end_step()

    def remove(self) -> None:
        """Ends the grafts, and says in the run what became of them."""
        self._removed = True
        self._open.clear()
        self._remove_handles()
        for graft in self._grafts:
            graft.finish()

    def _remove_handles(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- what the native code asks -----------------------------------------------------------------------------------

    def entered(self, call: OpenCall, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """A call starts: the arguments that it is to be given and recorded with instead, if any are."""
        rows: dict[TensorSlot, _Row] = {}
        try:
            rows = self._rows_of(call)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"what there is to graft at {call.site.name}", error)
        if not rows:
            return None
        with self._outside_of_the_program(f"the graft of what {call.site.name} is given"):
            grafted = _GraftedCall(call, callee, rows, (args, kwargs))
            if isinstance(callee, nn.Module):
                self._overwrite_state(grafted, callee)
            if grafted.has(False, "input"):
                if grafted.takes_others:
                    self._replace_given(grafted, partial(self._replaced, grafted, "input"))
                else:
                    grafted.leave_inputs()
            if isinstance(callee, nn.Module) and grafted.has(False, "output"):
                grafted.note_versions(self._inputs_of(grafted))
            self._open[id(call)] = grafted
            return grafted.given if grafted.given[0] is not args or grafted.given[1] is not kwargs else None
        return None

    def entered_below(
        self, call: OpenCall, _callee: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Its inputs have been recorded: what it is given instead, with the gradients that it sends replaced."""
        grafted = self._open.get(id(call))
        if grafted is None or not grafted.has(True, "output") or not torch.is_grad_enabled():
            return None
        with self._outside_of_the_program(f"the graft of the gradients that {call.site.name} sends"):
            self._replace_given(grafted, partial(self._with_sent_gradient, grafted), by_path=False)
            return grafted.given
        return None

    def returned(self, call: OpenCall, result: Any) -> Any:
        """A call has returned: what takes the place of its result, or the same."""
        grafted = self._open.pop(id(call), None)
        if grafted is None:
            return result
        with self._outside_of_the_program(f"the graft of what {call.site.name} returns"):
            result = grafted.write_back(result)
            result = self._replace_outputs(grafted, result)
            self._replace_arriving_gradients(grafted, result)
        return result

    @contextmanager
    def _outside_of_the_program(self, doing: str) -> Iterator[None]:
        """What is computed inside the block is seen by no mode, and what fails is reported, not raised."""
        try:
            with DisableTorchFunction(), _DisableTorchDispatch():  # only plain tensors are computed with
                yield
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(doing, error)

    # -- what is grafted ---------------------------------------------------------------------------------------------

    def _rows_of(self, call: OpenCall) -> dict[TensorSlot, _Row]:
        """What is to be grafted at a call, each from the first graft that has it."""
        found: dict[TensorSlot, _Row] = {}
        for graft in self._grafts:
            for place, numbers in graft.rows_of(call).items():
                if place in found:
                    graft.pass_over(numbers)
                else:
                    found[place] = _Row(graft, numbers[0], numbers[1:])
        return found

    def _overwrite_state(self, grafted: _GraftedCall, module: nn.Module) -> None:
        """The module's own parameters and buffers hold the run's values from now on."""
        if grafted.has(False, "parameter") or grafted.has(False, "state"):
            for role, name, tensor in state(module, inside=False):
                self._overwrite(grafted, TensorSlot(False, role, name), tensor)

    def _replace_given(
        self, grafted: _GraftedCall, replace: Callable[[Tensor, str], Tensor], *, by_path: bool = True
    ) -> None:
        """Gives the call other tensors."""
        replacing = ReplacedTensors(self._inputs_of(grafted), replace, by_path=by_path)
        args, kwargs = grafted.given
        grafted.given = mapped(args, replacing.of), mapped(kwargs, replacing.of)
        grafted.copies += replacing.copies()

    def _replace_outputs(self, grafted: _GraftedCall, result: Any) -> Any:
        if not grafted.has(False, "output"):
            return result
        named, written = self._outputs_of(grafted, result), grafted.written()
        for path, tensor in named:
            if _is_among(tensor, written):  # the program goes on with that very tensor
                self._overwrite(grafted, TensorSlot(False, "output", path), tensor)
        named = [(path, tensor) for path, tensor in named if not _is_among(tensor, written)]
        return mapped(result, ReplacedTensors(named, partial(self._replaced, grafted, "output")).of)

    def _replace_arriving_gradients(self, grafted: _GraftedCall, result: Any) -> None:
        if not grafted.has(True, "input") or not torch.is_grad_enabled() or grafted.is_op:
            return
        for path, tensor in self._outputs_of(grafted, result):
            row = grafted.rows.get(TensorSlot(True, "input", path))
            if row is not None and tensor.requires_grad:
                handle = tensor.register_hook(self._gradient_of(grafted, row))  # type: ignore[no-untyped-call]
                if tensor.is_leaf:
                    self._handles.append(handle)

    def _inputs_of(self, grafted: _GraftedCall) -> Named:
        args, kwargs = grafted.given
        if isinstance(grafted.callee, nn.Module):
            return self._flat.arguments(args, kwargs)[0]
        callee: CalledFunction = grafted.callee
        return callee.inputs(self._flat, args, kwargs)[0]

    def _outputs_of(self, grafted: _GraftedCall, result: Any) -> Named:
        if isinstance(grafted.callee, nn.Module):
            return self._flat.result(result)
        args, kwargs = grafted.given
        callee: CalledFunction = grafted.callee
        return callee.outputs(self._flat, args, kwargs, result)

    # -- how it is replaced ------------------------------------------------------------------------------------------

    def _replaced(self, grafted: _GraftedCall, role: Role, tensor: Tensor, path: str) -> Tensor:
        """What takes the place of a tensor: the run's values, with the gradient going on to the tensor."""
        row = grafted.rows.get(TensorSlot(False, role, path))
        if row is not None and role == "output" and grafted.is_op and grafted.is_view:
            row.graft.refused(row.number, "it is a view, and an op has to return it as one")
            return tensor
        values = None if row is None else self._values(grafted.call, row, tensor)
        return tensor if values is None else with_gradient(tensor, values, connected=not grafted.is_op)

    def _overwrite(self, grafted: _GraftedCall, place: TensorSlot, tensor: Tensor) -> None:
        """Writes the run's values into a tensor. Past its version counter: a graph that has saved it goes on."""
        row = grafted.rows.get(place)
        values = None if row is None else self._values(grafted.call, row, tensor)
        if values is not None:
            with torch.no_grad():
                tensor.data.copy_(values)
            self._engine.tensors.changed(tensor)

    def _with_sent_gradient(self, grafted: _GraftedCall, tensor: Tensor, path: str) -> Tensor:
        row = grafted.rows.get(TensorSlot(True, "output", path))
        if row is None or not tensor.requires_grad or grafted.is_op:
            return tensor
        try:
            check_replaceable(tensor)
        except CannotGraftError as error:
            row.graft.refused(row.number, str(error))
            return tensor
        copy: Tensor = SentGradient.apply(tensor, self._gradient_of(grafted, row))  # type: ignore[no-untyped-call]
        return copy

    def _gradient_of(self, grafted: _GraftedCall, row: _Row) -> Callable[[Tensor], Tensor]:
        """What a hook does with a gradient. It outlives the call."""
        call = grafted.call
        due = [row, *(_Row(row.graft, number, []) for number in row.later)]

        def replaced(gradient: Tensor) -> Tensor:
            if self._removed or self._engine.paused or not self._engine.in_own_process or not due:
                return gradient
            row = due.pop(0)
            with self._outside_of_the_program(f"the graft of a gradient of {call.site.name}"):
                values = self._values(call, row, gradient)
                return gradient if values is None else with_gradient(gradient, values)
            return gradient

        return replaced

    def _values(self, call: OpenCall, row: _Row, tensor: Tensor) -> Tensor | None:
        """The run's values in place of a tensor; None where it has the same bits, or cannot be replaced."""
        try:
            return row.graft.values(row.number, tensor, counts=not call.recompute)
        except (CannotGraftError, NotKeptError) as error:
            row.graft.refused(row.number, str(error))
        except RunError:
            row.graft.refused(row.number, "a tensor that cannot be read from the run")
        return None


# -- one call ----------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A tensor of the run that is to be grafted."""

    graft: AppliedGraft
    number: int
    later: list[int]  # when a backward pass goes there again


@dataclass(slots=True, eq=False)
class _GraftedCall:
    """A running call at which something is grafted. `given`: what it was called with."""

    call: OpenCall
    callee: Any
    rows: dict[TensorSlot, _Row]
    given: Arguments
    copies: list[tuple[Tensor, Tensor, int | None]] = field(default_factory=list)  # original, what was given, version
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def has(self, backward: bool, role: str) -> bool:
        return any(place.backward == backward and place.role == role for place in self.rows)

    @property
    def is_op(self) -> bool:
        """Whether it runs below autograd."""
        return self.call.site.kind == "op"

    def note_versions(self, inputs: Named) -> None:
        """Remembers what the inputs were, to know afterwards which of them the call has written into."""
        self.versions = [(tensor, tensor._version) for _, tensor in inputs if not tensor.is_inference()]

    @property
    def is_view(self) -> bool:
        """Whether it may return a view of what it is given."""
        return not isinstance(self.callee, nn.Module) and bool(self.callee.is_view)

    @property
    def takes_others(self) -> bool:
        """Whether it may be given other tensors. A view is a way to write into the program's own, and those that
        torch.autograd is asked about are tensors of its graph.
        """
        return not self.is_view and not str(self.call.site.type).startswith("torch.autograd.")

    def leave_inputs(self) -> None:
        for place, row in self.rows.items():
            if not place.backward and place.role == "input":
                row.graft.pass_over([row.number, *row.later])

    def written(self) -> list[Tensor]:
        """The arguments that the call has written into."""
        if isinstance(self.callee, nn.Module):
            return [tensor for tensor, version in self.versions if tensor._version != version]
        written: list[Tensor] = self.callee.written(*self.given)
        return written

    def write_back(self, result: Any) -> Any:
        """Copies what the call wrote to tensors of ours back into the program's, which the result then has instead."""
        if not self.copies:
            return result
        written = [] if isinstance(self.callee, nn.Module) else self.callee.written(*self.given)
        originals: dict[int, Tensor] = {}

        def original_of(tensor: Tensor) -> Tensor:
            while id(tensor) in originals:
                tensor = originals[id(tensor)]
            return tensor

        for original, copy, version in reversed(self.copies):  # a copy of a copy first
            if (version is not None and copy._version != version) or _is_among(copy, written):
                _copy_into(original, copy, below_autograd=self.is_op)
                originals[id(copy)] = original
                written.append(original)
        args, kwargs = self.given
        self.given = mapped(args, original_of), mapped(kwargs, original_of)
        return mapped(result, original_of)


def _is_among(tensor: Tensor, tensors: list[Tensor]) -> bool:
    return any(tensor is one for one in tensors)


def _copy_into(original: Tensor, copy: Tensor, *, below_autograd: bool) -> None:
    differentiably = (
        not below_autograd and torch.is_grad_enabled() and not (original.is_leaf and original.requires_grad)
    )
    with torch.set_grad_enabled(differentiably):
        (original.data if below_autograd else original).copy_(copy)
