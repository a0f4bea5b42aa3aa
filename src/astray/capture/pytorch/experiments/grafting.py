"""Puts values of a recorded run in the place of those of the program that is being recorded: the setting `graft`.

The native code that records calls asks `Grafts` about each of them: before its inputs are recorded, after that, and
before its outputs are. So the recording sees what was grafted, and both runs call a tensor by the same key. Only a
tensor with other bits than the run's is replaced. Its gradient goes on to the computation that it replaces, unchanged.
Hooks on tensors stay in a graph that outlives the recording; they do nothing from then on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, _DisableTorchDispatch
from torch._C._functorch import is_functorch_wrapped_tensor

from astray.capture.engine import Engine
from astray.capture.graft_words import SUBJECT, Graft
from astray.capture.pytorch.calls.call_capture import CalledFunction, flattener
from astray.capture.pytorch.calls.wrappers import state
from astray.capture.pytorch.experiments.reference_values import (
    LEVEL_OF,
    CallKey,
    Place,
    ReferenceValues,
    Rows,
    open_rank,
)
from astray.capture.pytorch.experiments.round_trip import mapped
from astray.capture.pytorch.kept_tensors import NotKeptError
from astray.capture.pytorch.native.core import OpenCall
from astray.errors import RecordError, RunError
from astray.log import logger
from astray.process import relative_to_cwd
from astray.records import Role
from astray.wording import counted

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Named = list[tuple[str, Tensor]]

_NOT_MADE = "no such call was made and seen"
_NOT_FOUND = "the call had no such tensor, or had it inside an object"


class CannotGraftError(Exception):
    """A tensor that cannot be replaced; its text says why."""


class Grafts:
    """The grafts of a recording, from `start` of its adapter until `remove`."""

    def __init__(self, engine: Engine, texts: Sequence[str], rank: int) -> None:
        self._engine = engine
        self._flat = flattener()
        ranks = {run: open_rank(run, rank) for run in {Graft.read(text).run for text in texts}}
        self._grafts = [_Applied(engine, Graft.read(text), ranks) for text in texts]
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
        rows = self._rows_of(call)
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

    def _rows_of(self, call: OpenCall) -> dict[Place, _Row]:
        """What is to be grafted at a call, each from the first graft that has it."""
        found: dict[Place, _Row] = {}
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
                self._overwrite(grafted, Place(False, role, name), tensor)

    def _replace_given(
        self, grafted: _GraftedCall, replace: Callable[[Tensor, str], Tensor], *, by_path: bool = True
    ) -> None:
        """Gives the call other tensors."""
        replacing = _Replacing(self._inputs_of(grafted), replace, by_path=by_path)
        args, kwargs = grafted.given
        grafted.given = mapped(args, replacing.of), mapped(kwargs, replacing.of)
        grafted.copies += replacing.copies()

    def _replace_outputs(self, grafted: _GraftedCall, result: Any) -> Any:
        if not grafted.has(False, "output"):
            return result
        named, written = self._outputs_of(grafted, result), grafted.written()
        for path, tensor in named:
            if _is_among(tensor, written):  # the program goes on with that very tensor
                self._overwrite(grafted, Place(False, "output", path), tensor)
        named = [(path, tensor) for path, tensor in named if not _is_among(tensor, written)]
        return mapped(result, _Replacing(named, partial(self._replaced, grafted, "output")).of)

    def _replace_arriving_gradients(self, grafted: _GraftedCall, result: Any) -> None:
        if not grafted.has(True, "input") or not torch.is_grad_enabled() or grafted.is_op:
            return
        for path, tensor in self._outputs_of(grafted, result):
            row = grafted.rows.get(Place(True, "input", path))
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
        row = grafted.rows.get(Place(False, role, path))
        if row is not None and role == "output" and grafted.is_op and grafted.is_view:
            row.graft.refused(row.number, "it is a view, and an op has to return it as one")
            return tensor
        values = None if row is None else self._values(grafted.call, row, tensor)
        return tensor if values is None else _with_gradient(tensor, values, connected=not grafted.is_op)

    def _overwrite(self, grafted: _GraftedCall, place: Place, tensor: Tensor) -> None:
        """Writes the run's values into a tensor. Past its version counter: a graph that has saved it goes on."""
        row = grafted.rows.get(place)
        values = None if row is None else self._values(grafted.call, row, tensor)
        if values is not None:
            with torch.no_grad():
                tensor.data.copy_(values)
            self._engine.tensors.changed(tensor)

    def _with_sent_gradient(self, grafted: _GraftedCall, tensor: Tensor, path: str) -> Tensor:
        row = grafted.rows.get(Place(True, "output", path))
        if row is None or not tensor.requires_grad or grafted.is_op:
            return tensor
        try:
            _check_replaceable(tensor)
        except CannotGraftError as error:
            row.graft.refused(row.number, str(error))
            return tensor
        copy: Tensor = _SentGradient.apply(tensor, self._gradient_of(grafted, row))  # type: ignore[no-untyped-call]
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
                return gradient if values is None else _with_gradient(gradient, values)
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


# -- one graft ---------------------------------------------------------------------------------------------------------


class _Applied:
    """One graft: what it takes, and what became of that."""

    def __init__(self, engine: Engine, graft: Graft, ranks: dict[str, Any]) -> None:
        self._engine = engine
        self._graft = graft
        self._reference = ReferenceValues(graft, ranks[graft.run])
        self._step = -1
        self._rows: dict[CallKey, Rows] = {}
        self._seen: set[CallKey] = set()  # calls of this step
        self._taken: set[int] = set()  # rows of this step
        self._refused: Counter[str] = Counter()
        self._unreached: Counter[str] = Counter()
        self.tensors = self.differed = 0
        self._check_level()

    def _check_level(self) -> None:
        """Raises where none of the calls that are meant is seen by this recording."""
        level = self._engine.settings.level
        unseen = {LEVEL_OF[kind] for kind in self._reference.kinds} - set(level)
        if not unseen or unseen < {LEVEL_OF[kind] for kind in self._reference.kinds}:
            return
        raise RecordError(
            f"{self._graft.where.partition('@')[0]} is seen at level {', '.join(sorted(unseen))}, and this recording "
            f"observes level {', '.join(level)}. Give both: --level {','.join([*level, *sorted(unseen)])}."
        )

    def rows_of(self, call: OpenCall) -> Rows:
        """What it takes at a call. A recomputation takes the same as the call, where the run did not compute again."""
        if self._step != call.step:
            self._step, self._rows = call.step, self._reference.of_step(call.step)
        key = CallKey(call.site.name, call.micro, call.number, call.phase, call.recompute)
        found = self._rows.get(key)
        if found is None and call.recompute:
            found = self._rows.get(key._replace(recompute=False))
        self._seen.add(key)
        return found or {}

    def values(self, row: int, tensor: Tensor, *, counts: bool) -> Tensor | None:
        """The run's values like a tensor of the program: its dtype, device and strides. None for the same bits.

        counts: whether it is one more that was grafted. Raises CannotGraftError or NotKeptError.
        """
        self._taken.add(row)
        _check_replaceable(tensor)
        values = self._reference.value(row)
        _check_fits(values, tensor)
        with torch.no_grad():
            made = torch.empty_like(tensor, requires_grad=False).copy_(values)
            differs = not _same_bits(made, tensor)
        if counts:
            self._count(differs)
            if values.dtype != tensor.dtype:
                cast = f"cast from {_name(values.dtype)} to {_name(tensor.dtype)}"
                self._engine.missed(f"the bits of {self._graft.where} in the run", cast)
        return made if differs else None

    def _count(self, differs: bool) -> None:
        if not self.tensors:
            self._engine.setup.note(self._engine.step, SUBJECT, self._graft.where, {"from": self._graft.run})
        self.tensors += 1
        self.differed += differs

    def pass_over(self, rows: list[int]) -> None:
        """These are not to be grafted, or an earlier graft has them."""
        self._taken.update(rows)

    def refused(self, row: int, why: str) -> None:
        self._taken.add(row)
        self._refused[why] += 1
        self._engine.missed(f"the graft of {self._graft.where}", why)

    def end_step(self) -> None:
        """Counts what no call of this step has taken."""
        step = self._engine.step
        if self._step != step:
            self._rows = self._reference.of_step(step) if step in self._engine.settings.steps else {}
        for key, rows in self._rows.items():
            left = 0 if key.recompute else len({row for each in rows.values() for row in each} - self._taken)
            if left:
                why = _NOT_FOUND if key in self._seen else _NOT_MADE
                self._engine.missed(f"the graft of {self._graft.where}", why, left)
                self._unreached[why] += left
        self._taken.clear()
        self._seen.clear()
        self._step, self._rows = -1, {}

    def finish(self) -> None:
        if self._step == self._engine.step:  # a step that was begun
            self.end_step()
        counts = {"tensors": self.tensors, "differed": self.differed, "unreached": self._unreached.total()}
        self._engine.setup.note(self._engine.step, SUBJECT, self._graft.where, {"from": self._graft.run, **counts})
        text = self._text()
        self._engine.remarks.append(text)
        if not self.tensors:
            logger.warning("astray: %s", text)

    def _text(self) -> str:
        """What became of it, in a sentence."""
        graft = f"{relative_to_cwd(Path(self._graft.run))}, {self._graft.where}"
        if not self.tensors:
            why = [*self._refused, *self._unreached, "no step that it has was recorded"][0]
            return f"nothing was grafted from {graft}: {why}."
        parts = [f"grafted {counted(self.tensors, 'tensor')} from {graft}; {self._differing()}"]
        left = (self._refused + self._unreached).most_common()
        parts += [f"{counted(count, 'tensor')} could not be grafted: {why}" for why, count in left]
        return "; ".join(parts) + "."

    def _differing(self) -> str:
        if not self.differed:
            return "the program had computed the same bits"
        return f"{self.differed:,} had other bits than the program's own"


class _Row(NamedTuple):
    """A tensor of the run that is to be grafted."""

    graft: _Applied
    number: int
    later: list[int]  # when a backward pass goes there again


# -- one call ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _GraftedCall:
    """A running call at which something is grafted. `given`: what it was called with."""

    call: OpenCall
    callee: Any
    rows: dict[Place, _Row]
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


class _Replacing:
    """Replaces the tensors of one set of arguments or results, each by its path; the same for one remains one.

    by_path: a tensor at two paths may be replaced by two; else the first path counts.
    """

    def __init__(self, named: Named, replace: Callable[[Tensor, str], Tensor], *, by_path: bool = True) -> None:
        self._paths: dict[int, list[str]] = defaultdict(list)
        for path, tensor in named:
            self._paths[id(tensor)].append(path)
        self._replace = replace
        self._by_path = by_path
        self._made: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # by the id of the original

    def of(self, tensor: Tensor) -> Tensor:
        paths, made = self._paths.get(id(tensor)), self._made[id(tensor)]
        if made and (not self._by_path or not paths):
            return made[0][1]
        if not paths:
            return tensor
        replaced = self._replace(tensor, paths.pop(0))
        same = next((known for _, known in made if known is replaced or _are_equal(known, replaced)), replaced)
        made.append((tensor, same))
        return same

    def copies(self) -> list[tuple[Tensor, Tensor, int | None]]:
        """The originals with what was given in their place, and its version then."""
        return [
            (original, given, None if given.is_inference() else given._version)
            for made in self._made.values()
            for original, given in made
            if given is not original
        ]


def _are_equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and _same_bits(first, second)


# -- tensors -----------------------------------------------------------------------------------------------------------


class _Replaced(torch.autograd.Function):
    """Other values in the place of a tensor, whose gradient goes on to that tensor."""

    @staticmethod
    def forward(_ctx: Any, _tensor: Tensor, values: list[Tensor]) -> Tensor:
        return values[0]  # in a list, since a tensor that is an argument would come back as a view of it

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(_ctx: Any, tangent: Tensor, _values: Any) -> Tensor:
        return tangent


class _SentGradient(torch.autograd.Function):
    """A copy of a tensor, whose gradient goes on to it as `replace` gives it back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.replace = replace
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.replace(gradient), None

    @staticmethod
    def jvp(_ctx: Any, tangent: Tensor, _replace: Any) -> Tensor:
        return tangent.clone()


def _with_gradient(tensor: Tensor, values: Tensor, *, connected: bool = True) -> Tensor:
    """The values, with the gradient of the tensor."""
    if not connected or not tensor.requires_grad or not torch.is_grad_enabled():
        return values
    made: Tensor = _Replaced.apply(tensor, [values])  # type: ignore[no-untyped-call]
    return made


def _check_replaceable(tensor: Tensor) -> None:
    """Raises for a tensor whose bits cannot be compared and replaced."""
    if type(tensor) not in (Tensor, nn.Parameter):
        raise CannotGraftError(f"it is a {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise CannotGraftError(f"its layout is {str(tensor.layout).removeprefix('torch.')}")
    if is_functorch_wrapped_tensor(tensor) or torch._C._are_functorch_transforms_active():
        raise CannotGraftError("it is inside a functorch transform")
    if tensor.is_meta or tensor.is_quantized:
        raise CannotGraftError("it has no memory" if tensor.is_meta else "it is quantized")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CannotGraftError("a CUDA graph is being captured")


def _check_fits(values: Tensor, tensor: Tensor) -> None:
    if values.shape != tensor.shape:
        raise CannotGraftError(f"its shape is {list(tensor.shape)}, and that in the run {list(values.shape)}")
    if values.dtype != tensor.dtype and _kind_of(values.dtype) != _kind_of(tensor.dtype):
        raise CannotGraftError(f"it is {_name(tensor.dtype)}, and that in the run {_name(values.dtype)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind_of(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # of one element the stride may be any
