"""What a script says of a recorded call: its source, its tensors, its results and what rounding explains of them.

Reads a call as `replay` does, and refuses what that cannot execute, for the same reasons; feeds `script.py`. Texts of
the run come in as data: `script.py` writes them as literals and comments of printable ASCII.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PureWindowsPath
from typing import Any, NamedTuple

import torch

from astray.formatting import figures
from astray.replay.call_judgement import ReplayedTensor, execute_as_recorded, judge_call, rank_of, rounding_dtype
from astray.replay.calls import CannotReplayError, RebuiltCall, RecordedCalls
from astray.replay.exact import Executed, Way, execute
from astray.replay.judging import FUNCTION_ULPS, HALF_ULP, HALF_ULP_RMS, ROUNDINGS, SIGMAS, ResultJudgement, Scale
from astray.replay.source import WrittenCall, part_of, unused, write_function, write_module
from astray.replay.torch_settings import written_settings
from astray.stats.dtypes import DTYPES
from astray.store import RankRun

_MOST_GAPS = 8
"""How many times the memory of its elements an input may lie in: a slice of queries, keys and values has three."""

_FEW = 8
"""Where the largest error is so many times their root mean square, that is the error of a few elements, such as those
of rows that cancel: they are all off together, and do not add up as many roundings do."""

_LONGEST_TEXT = 120
_VERSION = re.compile(r"[\w.+-]{1,60}", re.ASCII)


class StoredTensor(NamedTuple):
    """A tensor of the file, which lies in one block there.

    shape, stride: as the call had it, if it did not lie so there; dimensions of stride 0 are stored once. pairs:
    whether it is complex, and stored as pairs of real numbers.
    """

    values: torch.Tensor
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] | None = None
    pairs: bool = False


class WrittenBackward(NamedTuple):
    """A backward of the call: of each gradient that arrives or is sent, by its path, the name in script and file."""

    number: int
    arrived: dict[str, str]
    sent: dict[str, str]


class ExpectedResult(NamedTuple):
    """A result that is judged.

    part: the expression for it. dtype: the one whose spacings errors are measured in. most, most_rms: how large an
    error rounding explains, in ulps: of one element, and as the root mean square of all.
    """

    part: str
    recorded: StoredTensor
    dtype: torch.dtype
    most: float
    most_rms: float
    judgement: ResultJudgement


class ScriptedCall(NamedTuple):
    """All that a script says of a call.

    inputs: what the call is given, by the names in the file; gradients that arrive and random states are among them.
    results: by their names. cast: the dtype in which autocast gave it its inputs. draws: whether it draws random
    numbers. settings: statements that set torch as it was. summary: what was found. origin: where it was recorded.
    """

    written: WrittenCall
    inputs: dict[str, StoredTensor]
    backwards: list[WrittenBackward]
    results: dict[str, ExpectedResult]
    cast: torch.dtype | None
    draws: bool
    settings: list[str]
    summary: str
    origin: list[str]
    recorded_on: str

    @property
    def layouts(self) -> dict[str, StoredTensor]:
        """The tensors that did not lie in one block."""
        return {name: each for name, each in self.inputs.items() if each.stride is not None}

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the tensors in the file."""
        stored = [*self.inputs.values(), *(each.recorded for each in self.results.values())]
        return sorted({str(each.values.dtype).removeprefix("torch.") for each in stored})


def scripted(calls: RecordedCalls, rank: RankRun, row: int) -> ScriptedCall:
    """All that a script says of the call in a row. Raises CannotReplayError where it cannot be executed."""
    call = calls.rebuild(row)
    judged = [each for each in judge_call(call, calls.flags) if math.prod(each.shape)]
    if not judged:
        raise CannotReplayError(call.lost[0] if call.lost else "no result that can be judged")
    way, own = execute_as_recorded(call)
    exact = own if call.drawn is not None else execute(call, way._replace(dtype=torch.float64))
    module = call.call["kind"] == "module"
    written = write_module(call, calls.settings(call.call)) if module else write_function(call, way.tuples)
    strides = {tensor["path"]: tensor["stride"] for _, tensor in calls.tensors(row) if tensor["role"] == "input"}
    inputs = _inputs(call, written, strides)
    backwards = _backwards(call, judged, written, inputs, own)
    results = _results(call, judged, backwards, way, (own, exact))
    if not results:
        raise CannotReplayError(call.lost[-1])
    return ScriptedCall(
        written,
        inputs,
        backwards,
        results,
        way.cast,
        call.drawn is not None,
        written_settings(call, calls.flags),
        _summary(results),
        list(_origin(call, rank)),
        _recorded_on(call, rank),
    )


# -- tensors -----------------------------------------------------------------------------------------------------------


def _inputs(call: RebuiltCall, written: WrittenCall, strides: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """What the call is given, by the names in the file. strides: of inputs by their paths, as they were."""
    inputs = {
        written.variables[path]: stored_tensor(tensor, strides.get(path))
        for path, tensor in call.inputs.items()
        if path not in call.twins
    }
    inputs |= {f"module.{name}": stored_tensor(tensor) for name, tensor in call.own.items()}
    if call.drawn is not None:
        inputs["generator"] = stored_tensor(call.drawn.before)
    return inputs


def stored_tensor(tensor: torch.Tensor, stride: tuple[int, ...] | None = None) -> StoredTensor:
    """A tensor for the file, with the layout it had. stride: as recorded; a rebuilt tensor has only their order."""
    if tensor.is_complex():
        return StoredTensor(_compact(torch.view_as_real(tensor.resolve_conj())), pairs=True)
    if DTYPES[str(tensor.dtype).removeprefix("torch.")].safetensors is None:
        raise CannotReplayError(f"a tensor of {tensor.dtype}, for which safetensors files have no name")
    shape = tuple(tensor.shape)
    if stride is None or not _is_layout(shape, stride):
        stride = tensor.stride()
    if not tensor.numel() or stride == torch.empty(shape, device="meta").stride():
        return StoredTensor(_compact(tensor))
    for dim, step in enumerate(stride):
        if step == 0 and shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return StoredTensor(_compact(tensor), shape, tuple(stride))


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in one block. Those of one element are taken to lie in one whatever their strides."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether strides put each element in a place of its own, in memory not much larger than all of them need."""
    if len(stride) != len(shape) or min(stride, default=0) < 0:
        return False
    reached = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if step and size > 1:
            if step < reached:
                return False
            reached += step * (size - 1)
    return reached <= _MOST_GAPS * math.prod(shape)


def _backwards(
    call: RebuiltCall,
    judged: Iterable[ReplayedTensor],
    written: WrittenCall,
    inputs: dict[str, StoredTensor],
    own: Executed,
) -> list[WrittenBackward]:
    """The backwards whose gradients were judged; what arrives there is put among the inputs."""
    judged_paths: dict[int, list[str]] = {}
    for each in judged:
        if each.backward is not None:
            judged_paths.setdefault(each.backward, []).append(each.path)
    used, found = set(inputs), list[WrittenBackward]()
    for number, paths in judged_paths.items():
        backward = WrittenBackward(number, {}, {})
        for path, gradient in call.backwards[number].arrived.items():
            if path in own.outputs and own.outputs[path].is_floating_point() | own.outputs[path].is_complex():
                name = backward.arrived[path] = unused(f"grad_{path.replace('.', '_')}", used)
                inputs[name] = stored_tensor(gradient.to(own.outputs[path].dtype))
                used.add(name)
        for path in paths:
            backward.sent[path] = unused(f"grad_{written.variables[path]}", used)
            used.add(backward.sent[path])
        found.append(backward)
    return found


# -- results -----------------------------------------------------------------------------------------------------------


def _results(
    call: RebuiltCall,
    judged: Iterable[ReplayedTensor],
    backwards: Iterable[WrittenBackward],
    way: Way,
    executed: tuple[Executed, Executed],
) -> dict[str, ExpectedResult]:
    """The judged results and gradients, by their names. executed: the call in its own dtype, and exact."""
    gradients = {each.number: each.sent for each in backwards}
    results: dict[str, ExpectedResult] = {}
    for tensor in judged:
        path, number, judgement = tensor.path, tensor.backward, tensor.judgement
        if number is None:
            name, part, recorded = path, part_of(path), call.kept[path]
            own, exact = (each.outputs[path] for each in executed)
        else:
            name = part = gradients[number][path]
            recorded = call.backwards[number].sent[path]
            own, exact = (each.gradients[number][path] for each in executed)
        rounds = judgement.unequal is None
        if not rounds and not torch.equal(own, exact):
            call.lost.append(f"{name}, which is another where the call is made in float64")
            continue
        dtype = rounding_dtype(recorded, way) if rounds else recorded.dtype
        limits = _limits(judgement, recorded, own, exact, dtype)
        results[name] = ExpectedResult(part, stored_tensor(_compact(recorded)), dtype, *limits, judgement)
    return results


def _limits(
    judgement: ResultJudgement, recorded: torch.Tensor, own: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """How large an error rounding explains: of an element, and as the root mean square of all, in ulps.

    As `judge` has it, with the whole result for a tile. What was not further off than can be explained is within.
    """
    if judgement.unequal is not None:
        return 0.0, 0.0
    scale = Scale(exact, dtype)
    plain, errors = (scale.errors(each, scale.exact) for each in (own, recorded))
    steps = FUNCTION_ULPS / HALF_ULP if dtype in (torch.float32, torch.float64) else 1.0
    most = ROUNDINGS * max(judgement.plain, plain.max, HALF_ULP * steps)
    strays = ROUNDINGS * (1 + SIGMAS * math.sqrt(2 / judgement.size))
    factor = math.sqrt(strays) if plain.max <= _FEW * plain.rms else ROUNDINGS
    most_rms = factor * max(judgement.plain_rms, plain.rms, HALF_ULP_RMS * steps)
    if judgement.surprise <= 1:
        return max(most, errors.max), max(most_rms, errors.rms)
    most = max(most, judgement.ulps / judgement.surprise)
    if errors.max <= most and errors.rms <= most_rms:  # one tile alone stands out
        most = max(plain.max, judgement.ulps / judgement.surprise)
    return most, most_rms


# -- words -------------------------------------------------------------------------------------------------------------


def _summary(results: Mapping[str, ExpectedResult]) -> str:
    """What was found of the worst result."""
    name, worst = max(results.items(), key=lambda each: rank_of(each[1].judgement))
    judgement = worst.judgement
    if judgement.surprise <= 1:
        return "What was recorded is as exact as rounding allows."
    if judgement.unequal is not None:
        return f"What was recorded is wrong: {judgement.unequal:,} elements of {name}."
    off, most = figures.surprise(judgement.ulps), figures.surprise(worst.most)
    return f"What was recorded is wrong: {name} is {off} ulps off, where rounding explains {most}."


def _origin(call: RebuiltCall, rank: RankRun) -> Iterator[str]:
    """Where the call was recorded, and what of it is left out."""
    row = call.call
    step = f"step {row['step']}" + (f", micro step {row['micro']}" if row["micro"] else "")
    yield f"Exported by astray from {_plain(row['site'])}, call {row['call']} of {step}."
    stack = rank.stack(row["stack"]) if row["stack"] is not None else []
    if stack:
        file = PureWindowsPath(stack[0].file).name  # which knows both kinds of separators
        yield f"{_plain(file)}:{stack[0].line}: {_plain(stack[0].code)}"
    for reason in dict.fromkeys(call.lost):
        yield f"Left out: {_plain(reason)}."


def _recorded_on(call: RebuiltCall, rank: RankRun) -> str:
    """The version of torch, and the device."""
    known: dict[str, dict[str, Any]] = {"version": {}, "device": {}}
    for setup in rank.setup:
        if setup.subject in known and setup.step <= call.call["step"]:
            known[setup.subject] |= setup.values
    version = str(known["version"].get("torch", ""))
    device = next(iter(sorted(call.devices - {"cpu"})), "cpu")
    name = known["device"].get(device)
    return f"torch {version if _VERSION.fullmatch(version) else 'of an unknown version'} on {_plain(device)}" + (
        f" ({_plain(name)})" if isinstance(name, str) and name else ""
    )


def _plain(text: str) -> str:
    """A text of the run on one line of printable ASCII, cut where it is long."""
    written = ascii(text)[1:-1]
    return written if len(written) <= _LONGEST_TEXT else f"{written[: _LONGEST_TEXT - 3]}..."
