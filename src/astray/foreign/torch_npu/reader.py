"""Opens a dump as a run: finds the ranks, groups the tensors of each into calls, and pairs backward with forward calls.

A dump does not name calls. The tensors of a call follow one another, inputs before outputs and in order of position;
where that order starts over, the next call begins. A backward call belongs to the last forward call of the same
function that has none yet and whose outputs have the shapes of its gradients, since autograd goes from back to front.

The original tool dumps the gradients of a function's last autograd node, whose inputs need not be the function's
arguments. So a gradient counts as that of an argument only where all their shapes agree; otherwise its path begins with
`node.`
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from astray.errors import RunError
from astray.foreign.dump_rows import DumpRank, DumpRows
from astray.foreign.msprobe.names import NODE, by_keyword
from astray.foreign.torch_npu import arrays, lines
from astray.foreign.torch_npu.names import DumpedTensor, FunctionSite, TorchNpuDump, path_order, site
from astray.store.run import RankRun, RunData
from astray.store.run_info import RunInfo
from astray.store.safe_paths import entries

NAME = "torch_npu"

Shape = tuple[int, ...]

_RANK_NAME = re.compile(r"(?:(.+)_)?rank(\d{1,6})(?:\.\w+)?")

_SEVERAL_NODES = ("cross_entropy", "multi_head_attention_forward", "scaled_dot_product_attention")
"""Functions made of several autograd nodes: what the last one sends back is not the gradient of an argument, though it
may have its shape."""


def recognises(path: Path) -> bool:
    """Whether a file or a folder is such a dump: of one rank, or of several side by side."""
    if path.is_file():
        return lines.recognises(path)
    return path.is_dir() and (arrays.recognises(path) or bool(_ranks_in(path)))


def open_dump(path: Path) -> RunData:
    """The dump as a run. Raises RunError when nothing of it can be read."""
    if not path.exists():
        raise RunError(f"{path} does not exist.")
    if path.is_file() or arrays.recognises(path):
        rank_name = _RANK_NAME.fullmatch(path.name)
        paths = {int(rank_name[2]) if rank_name else 0: path}
    else:
        paths = _ranks_in(path)
    if not paths:
        raise RunError(f"{path} holds no dump of torch_npu.hooks, or several. Give the file.")
    problems: list[str] = []
    ranks = {
        rank: rank_run
        for rank, rank_path in paths.items()
        if (rank_run := _open_rank(rank, rank_path, problems)) is not None
    }
    if not ranks:
        raise RunError(problems[0])
    stamp = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    info = RunInfo(
        astray="",
        created=stamp.isoformat(timespec="seconds"),
        framework="torch",
        world_size=max(paths) + 1,
        settings={"format": NAME, "level": ["function"], "modules": "not known", "steps": "not known: all are step 0"},
    )
    return RunData(path, info, ranks, problems)


def read(path: Path) -> TorchNpuDump:
    """The tensors of one rank as the dump has them, in order. Raises RunError when there are none."""
    return arrays.read(path) if path.is_dir() else lines.read(path)


def _open_rank(rank: int, path: Path, problems: list[str]) -> RankRun | None:
    """None, and one more problem, when nothing of the rank can be read."""
    try:
        dump = read(path)
    except RunError as error:
        problems.append(str(error))
        return None
    rows = DumpRows()
    rows.problems.extend(dump.problems)
    add_calls(dump.tensors, rows)
    return DumpRank(rank, rows.source(complete=not dump.is_cut, ended="cut short" if dump.is_cut else "normally"))


def _ranks_in(folder: Path) -> dict[int, Path]:
    """The ranks of the one dump in a folder, side by side as astray writes them; none when there are several dumps."""
    try:
        inside = entries(folder)
    except RunError:
        return {}
    dumps: dict[str, dict[int, Path]] = {}
    for path in inside:
        rank = _RANK_NAME.fullmatch(path.name)
        if rank and (arrays.recognises(path) if path.is_dir() else lines.recognises(path)):
            dumps.setdefault(rank[1] or "", {})[int(rank[2])] = path
    return dict(sorted(dumps.popitem()[1].items())) if len(dumps) == 1 else {}


# -- calls -------------------------------------------------------------------------------------------------------------


class ForwardCall(NamedTuple):
    """A forward call without its backward so far: the shapes of its tensors by their positions in the dump."""

    seq: int
    call: int
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]


def group_calls(tensors: Iterable[DumpedTensor]) -> Iterator[list[DumpedTensor]]:
    """The tensors of a dump, call by call."""
    group: list[DumpedTensor] = []
    for tensor in tensors:
        if group and _begins_call(group[-1], tensor):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _begins_call(previous: DumpedTensor, tensor: DumpedTensor) -> bool:
    before, name = previous.name, tensor.name
    if before.operator != name.operator:
        return True
    if before.side != name.side:
        return name.side == "input"
    return path_order(name.path) <= path_order(before.path)


def add_calls(tensors: Iterable[DumpedTensor], rows: DumpRows) -> None:
    """Add the calls of a dump, and their tensors."""
    unpaired: dict[str, list[ForwardCall]] = {}
    calls_at: Counter[str] = Counter()
    lone_backwards_at: Counter[str] = Counter()
    for group in group_calls(tensors):
        name = group[0].name
        function = f"{name.prefix}_{name.function}"
        of = site(name.prefix, name.function)
        if name.phase == "forward":
            call = calls_at[of.site]
            seq = rows.call(of.site, of.type, kind=of.kind, call=call)
            forward_call = ForwardCall(seq, call, _shapes(group, "input"), _shapes(group, "output"))
            unpaired.setdefault(function, []).append(forward_call)
            calls_at[of.site] += 1
            paths = _forward_paths(group, of)
        else:
            forward = _take_forward(unpaired.get(function, []), _shapes(group, "output"))
            # Without its forward call, a number that no forward call has had so far.
            call = calls_at[of.site] + lone_backwards_at[of.site] if forward is None else forward.call
            lone_backwards_at[of.site] += forward is None
            parent = None if forward is None else forward.seq
            seq = rows.call(of.site, of.type, kind=of.kind, call=call, phase="backward", parent=parent)
            paths = _backward_paths(group, of, forward)
        order = {"input": 0, "output": 1}  # a dump has the gradients that arrive after those that are sent
        for tensor, path in sorted(zip(group, paths, strict=True), key=lambda pair: order[pair[0].name.role]):
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


def _take_forward(unpaired: list[ForwardCall], gradients: dict[str, Shape]) -> ForwardCall | None:
    """Remove and return the last forward call whose outputs have the shapes of these gradients."""
    for index in range(len(unpaired) - 1, -1, -1):
        outputs = unpaired[index].outputs
        if all(outputs.get(path, shape) == shape for path, shape in gradients.items()):
            return unpaired.pop(index)
    return None


def _forward_paths(group: list[DumpedTensor], of: FunctionSite) -> list[str]:
    function = of.site[1:]
    single = sum(tensor.name.side == "output" for tensor in group) == 1
    return [
        by_keyword(function, tensor.name.path or "0")
        if tensor.name.side == "input"
        else _output_path(tensor.name.path, single and tensor.counts_tensors)
        for tensor in group
    ]


def _backward_paths(group: list[DumpedTensor], of: FunctionSite, forward: ForwardCall | None) -> list[str]:
    sent = _shapes(group, "input")
    of_arguments = forward is not None and _are_of_arguments(of.site[1:], sent, forward.inputs)
    single = len(forward.outputs) == 1 if forward is not None and forward.outputs else True
    paths = []
    for tensor in group:
        position = tensor.name.path
        if tensor.name.side == "output":
            paths.append(_output_path(position, single and position == "0"))
        else:
            paths.append(by_keyword(of.site[1:], position or "0") if of_arguments else f"{NODE}{position or 0}")
    return paths


def _output_path(position: str, single: bool) -> str:
    return "out" if not position or single else f"out.{position}"


def _are_of_arguments(function: str, sent: dict[str, Shape], inputs: dict[str, Shape]) -> bool:
    """Whether the gradients a call sends back are those of its arguments, by their shapes."""
    if function in _SEVERAL_NODES or any(inputs.get(position) != shape for position, shape in sent.items()):
        return False
    weight = sent.get("1", ())
    # The node of a linear function has the weight transposed, which the shape of a square one does not show.
    return not (function == "linear" and "2" not in sent and weight == weight[::-1] and len(weight) == 2)
