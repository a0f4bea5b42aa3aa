"""Makes calls of the tensors of a dump: which of them belong together, and which backward belongs to which forward.

A dump names no calls. The tensors of one follow one another, inputs before outputs and by their places; where that
order begins anew, so does a call. A backward call belongs to the last forward call of the same function that has none
yet and whose outputs have the shapes of its gradients, as autograd goes from back to front.

The original took the gradients of a function's last autograd node, whose inputs need not be the function's arguments.
So a gradient counts as that of an argument only where all their shapes say so; else its path begins with `node.`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from astray.foreign.dump_rows import DumpRows
from astray.foreign.msprobe.names import by_keyword
from astray.foreign.torch_npu.names import NODE, DumpedTensor, FunctionSite, order, site

Shape = tuple[int, ...]

_SEVERAL_NODES = ("cross_entropy", "multi_head_attention_forward", "scaled_dot_product_attention")
"""Functions that autograd sees as several: what their last node sends back is no gradient of an argument, though it may
have its shape."""


class Forward(NamedTuple):
    """A forward call that waits for its backward: its shapes by the places the dump gives them."""

    seq: int
    call: int
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]


def calls(tensors: Iterable[DumpedTensor]) -> Iterator[list[DumpedTensor]]:
    """The tensors of a dump, call by call."""
    group: list[DumpedTensor] = []
    for tensor in tensors:
        if group and _begins_anew(group[-1], tensor):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _begins_anew(last: DumpedTensor, next: DumpedTensor) -> bool:
    one, other = last.name, next.name
    if one.called != other.called:
        return True
    if one.side != other.side:
        return other.side == "input"
    return order(other.path) <= order(one.path)


def gather(tensors: Iterable[DumpedTensor], rows: DumpRows) -> None:
    """Add the calls of a dump, and their tensors."""
    waiting: dict[str, list[Forward]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for group in calls(tensors):
        name = group[0].name
        function = f"{name.prefix}_{name.function}"
        of = site(name.prefix, name.function)
        if name.phase == "forward":
            call = counts[of.site, "call"]
            seq = rows.call(of.site, of.type, kind=of.kind, call=call)
            sides = _shapes(group, "input"), _shapes(group, "output")
            waiting.setdefault(function, []).append(Forward(seq, call, *sides))
            counts[of.site, "call"] += 1
            paths = _forward_paths(group, of)
        else:
            forward = _partner(waiting.get(function, []), _shapes(group, "output"))
            # Without a partner, a number that no forward call has had so far.
            call = counts[of.site, "call"] + counts[of.site, "lone"] if forward is None else forward.call
            counts[of.site, "lone"] += forward is None
            parent = None if forward is None else forward.seq
            seq = rows.call(of.site, of.type, kind=of.kind, call=call, phase="backward", parent=parent)
            paths = _backward_paths(group, of, forward)
        rank = {"input": 0, "output": 1}  # a dump has the gradients that arrive behind those that are sent
        for tensor, path in sorted(zip(group, paths, strict=True), key=lambda pair: rank[pair[0].name.role]):
            rows.tensor(
                seq,
                tensor.name.role,
                path,
                tensor.dtype,
                tensor.shape,
                values=tensor.values,
                statistics=tensor.statistics,
                note=tensor.note,
            )


def _shapes(group: list[DumpedTensor], side: str) -> dict[str, Shape]:
    return {tensor.name.path or "0": tensor.shape for tensor in group if tensor.name.side == side}


def _partner(waiting: list[Forward], arriving: dict[str, Shape]) -> Forward | None:
    for place in range(len(waiting) - 1, -1, -1):
        outputs = waiting[place].outputs
        if all(outputs.get(path, shape) == shape for path, shape in arriving.items()):
            return waiting.pop(place)
    return None


def _forward_paths(group: list[DumpedTensor], of: FunctionSite) -> list[str]:
    function = of.site[1:]
    alone = sum(tensor.name.side == "output" for tensor in group) == 1
    return [
        by_keyword(function, tensor.name.path or "0")
        if tensor.name.side == "input"
        else _out(tensor.name.path, alone and tensor.counts_tensors)
        for tensor in group
    ]


def _backward_paths(group: list[DumpedTensor], of: FunctionSite, forward: Forward | None) -> list[str]:
    sent = _shapes(group, "input")
    of_arguments = forward is not None and _are_of_arguments(of.site[1:], sent, forward.inputs)
    alone = len(forward.outputs) == 1 if forward is not None and forward.outputs else True
    paths = []
    for tensor in group:
        place = tensor.name.path
        if tensor.name.side == "output":
            paths.append(_out(place, alone and place == "0"))
        else:
            paths.append(by_keyword(of.site[1:], place or "0") if of_arguments else f"{NODE}{place or 0}")
    return paths


def _out(place: str, alone: bool) -> str:
    return "out" if not place or alone else f"out.{place}"


def _are_of_arguments(function: str, sent: dict[str, Shape], inputs: dict[str, Shape]) -> bool:
    if function in _SEVERAL_NODES or any(inputs.get(place) != shape for place, shape in sent.items()):
        return False
    weight = sent.get("1", ())
    # The node of a linear function has the weight transposed, which a square one does not show.
    return not (function == "linear" and "2" not in sent and weight == weight[::-1] and len(weight) == 2)
