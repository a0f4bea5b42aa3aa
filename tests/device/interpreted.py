"""Where the tests run the Triton kernels: a GPU, or without one Triton's interpreter in a process of its own.

The interpreter is chosen by an environment variable that must be set before Triton is first imported, and from then on
no kernel of that process can be compiled. So the tests' own process must never see it.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

WIDTH = 10


class Part(NamedTuple):
    """A tensor within some bytes. `more` goes to `layout.plan`."""

    start: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    more: dict[str, Any]


class Machine(ABC):
    """Runs the kernels."""

    pairs = False
    """Whether it has instructions for two 16-bit floats."""

    @abstractmethod
    def measure(self, memory: np.ndarray, parts: list[Part]) -> np.ndarray:
        """The merged rows of tensors in `memory`, bytes of which the first is aligned to 16."""

    @abstractmethod
    def measure_together(self, memory: np.ndarray, dtype: str, tensors: list[tuple[int, int]], more: Any) -> np.ndarray:
        """The same for tensors of one dtype, each given by where it starts and its size, by one launch."""

    @abstractmethod
    def merge_rows(self, partials: list[np.ndarray]) -> np.ndarray:
        """The rows that partial rows, an array (WIDTH, programs) for each tensor, are merged into."""


def aligned(size: int) -> np.ndarray:
    """Bytes whose first is aligned to 16."""
    room = np.zeros(size + 16, np.uint8)
    start = -address(room) % 16
    return room[start : start + size]


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


class Buffers(NamedTuple):
    """Memory of the kernels: the partial rows, the table of what they belong to, the results, a list of tensors."""

    partials: np.ndarray
    table: np.ndarray
    results: np.ndarray
    listed: np.ndarray | None

    @classmethod
    def of(cls, programs: int, tensors: int, listed: np.ndarray | None = None) -> Buffers:
        """More than is needed, full of −1, to see whether the rest stays so."""
        shapes = (WIDTH, programs + 3), (tensors + 2, 2), (WIDTH, tensors + 2)
        return cls(*(np.full(shape, -1) for shape in shapes), listed)

    def rows(self, tensors: int, *, measured: bool) -> np.ndarray:
        assert (self.results[:, tensors:] == -1).all(), "merged beyond the slots"
        assert (self.table[tensors:] == -1).all(), "wrote beyond its slot"
        assert not measured or (self.partials[:, [0, -2, -1]] == -1).all(), "wrote beyond its partial rows"
        return self.results[:, :tensors].copy()


class Interpreter(Machine):
    """A child process that does what it is sent."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        child = self._child = Popen([sys.executable, __file__], stdin=PIPE, stdout=PIPE, env=environment)
        assert child.stdin is not None
        assert child.stdout is not None
        self._requests, self._answers = child.stdin, child.stdout

    def measure(self, memory: np.ndarray, parts: list[Part]) -> np.ndarray:
        return self._ask("measure", memory, [tuple(part) for part in parts])

    def measure_together(self, memory: np.ndarray, dtype: str, tensors: list[tuple[int, int]], more: Any) -> np.ndarray:
        return self._ask("measure_together", memory, dtype, tensors, more)

    def merge_rows(self, partials: list[np.ndarray]) -> np.ndarray:
        return self._ask("merge_rows", partials)

    def _ask(self, *request: Any) -> np.ndarray:
        pickle.dump(request, self._requests)
        self._requests.flush()
        answer = pickle.load(self._answers)
        if isinstance(answer, str):
            raise AssertionError(answer)
        assert isinstance(answer, np.ndarray)
        return answer

    def close(self) -> None:
        self._requests.close()
        self._answers.close()
        self._child.wait()


class Card(Machine):
    """The current CUDA device."""

    def __init__(self, pairs: bool) -> None:
        self.pairs = pairs

    def measure(self, memory: np.ndarray, parts: list[Part]) -> np.ndarray:
        import torch

        there = torch.from_numpy(memory.copy()).cuda()
        return _measure(self, there.data_ptr(), parts)

    def measure_together(self, memory: np.ndarray, dtype: str, tensors: list[tuple[int, int]], more: Any) -> np.ndarray:
        import torch

        there = torch.from_numpy(memory.copy()).cuda()
        return _measure_together(self, there.data_ptr(), dtype, tensors, more)

    def merge_rows(self, partials: list[np.ndarray]) -> np.ndarray:
        return _merge_rows(self, partials)

    def launch(self, buffers: Buffers, launches: Iterator[tuple[Any, int, tuple[int, ...]]]) -> None:
        import torch

        from astray.device.launcher import kernel

        there = {address(buffer): torch.from_numpy(buffer).cuda() for buffer in buffers if buffer is not None}
        stream = torch.cuda.current_stream().cuda_stream
        for source, programs, arguments in launches:
            values = (there[value].data_ptr() if value in there else value for value in arguments)
            assert kernel(source, torch.cuda.current_device()).launch(programs, stream, *values) == 0
        for buffer in buffers[:3]:
            buffer[:] = there[address(buffer)].cpu().numpy()


# --- in either ---


def _measure(machine: Any, memory: int, parts: list[Part]) -> np.ndarray:
    from astray.device import layout

    plans = [layout.plan(part.shape, part.stride, part.dtype, memory + part.start, **part.more) for part in parts]
    buffers = Buffers.of(sum(plan.programs for plan in plans), len(parts))
    into, table = address(buffers.partials), address(buffers.table)

    def launches() -> Iterator[tuple[Any, int, tuple[int, ...]]]:
        first = 1
        for slot, (part, plan) in enumerate(zip(parts, plans, strict=True)):
            place = memory + part.start, into, buffers.partials.shape[1], first, table, slot
            yield plan.source, plan.programs, (*place, *plan.arguments)
            first += plan.programs
        yield _settling(buffers, len(parts))

    machine.launch(buffers, launches())
    return buffers.rows(len(parts), measured=True)


def _measure_together(
    machine: Any, memory: int, dtype: str, tensors: list[tuple[int, int]], more: dict[str, Any]
) -> np.ndarray:
    from astray.device import layout

    plan = layout.plan_many([(memory + start, count) for start, count in tensors], dtype, **more)
    buffers = Buffers.of(plan.programs, len(tensors), plan.words)
    places = address(buffers.partials), buffers.partials.shape[1], 1, address(buffers.table), 0, len(tensors)
    launches = [(plan.source, plan.programs, (address(plan.words), *places)), _settling(buffers, len(tensors))]
    machine.launch(buffers, iter(launches))
    return buffers.rows(len(tensors), measured=True)


def _merge_rows(machine: Any, partials: list[np.ndarray]) -> np.ndarray:
    buffers = Buffers.of(sum(each.shape[1] for each in partials), len(partials))
    first = 1
    for slot, each in enumerate(partials):
        programs = each.shape[1]
        buffers.partials[:, first : first + programs] = each
        buffers.table[slot] = first, programs
        first += programs
    machine.launch(buffers, iter([_settling(buffers, len(partials))]))
    return buffers.rows(len(partials), measured=False)


def _settling(buffers: Buffers, tensors: int) -> tuple[Any, int, tuple[int, ...]]:
    from astray.device import triton_kernels

    partials, table, results, _ = buffers
    places = address(partials), partials.shape[1], address(table), address(results), results.shape[1]
    return triton_kernels.MERGE_ROWS, tensors, places


# --- in the child ---


class _Here:
    """Launches in this process, by the interpreter."""

    def launch(self, buffers: Buffers, launches: Iterator[tuple[Any, int, tuple[int, ...]]]) -> None:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        types = {"*u8": tl.pointer_type(tl.uint8), "*i64": tl.pointer_type(tl.int64), "i64": tl.int64}
        for source, programs, arguments in launches:
            values: dict[str, Any] = dict(source.constants)
            for (name, kind), argument in zip(source.signature.items(), arguments, strict=True):
                data = np.array([argument], np.int64 if kind == "i64" else np.uint64)
                values[name] = tl.tensor(TensorHandle(data, types[kind]), types[kind])
            source.function[(programs,)](**values)


def _mend() -> None:
    """Three things in Triton's interpreter that stand in the way."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, patch = interpreter._patch_lang_tensor, interpreter._patch_lang
    patched: set[object] = set()

    def mended(tensor: Any, scope: Any) -> None:
        """It makes an int of an array of one element, which numpy no longer does."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def once(function: Any) -> Any:
        """It patches the whole language anew at each call of a function, which takes longer than all else."""
        languages = {each for each in (tl, tl.core) if any(each is value for value in function.__globals__.values())}
        if not languages <= patched:
            patch(function)
            patched.update(languages)
        return SimpleNamespace(restore=lambda: None)

    def by_halves(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
        """It reduces several tensors together element by element."""
        parts = [each.handle.data for each in inputs]
        while len(parts[0]) > 1:
            half = len(parts[0]) // 2
            sides = [
                self.to_tensor(side, each.dtype)
                for cut in (slice(half), slice(half, None))
                for side, each in zip((part[cut] for part in parts), inputs, strict=True)
            ]
            parts = [each.handle.data for each in self.combine_fn.fn(*sides)]
        return [self.to_tensor(part[0], each.dtype) for part, each in zip(parts, inputs, strict=True)]

    interpreter._patch_lang_tensor, interpreter._patch_lang = mended, once
    interpreter.ReduceOps.generic_reduce = by_halves


def _answer(what: str, *request: Any) -> object:
    try:
        with np.errstate(all="ignore"):
            if what == "merge_rows":
                return _merge_rows(_Here(), *request)
            memory, *rest = request
            here = aligned(memory.size)
            here[:] = memory
            if what == "measure_together":
                return _measure_together(_Here(), address(here), *rest)
            return _measure(_Here(), address(here), [Part(*part) for part in rest[0]])
    except Exception:  # noqa: BLE001 - the test that asked shows it
        return traceback.format_exc()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the answers
    _mend()
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_answer(*request), answers)
        answers.flush()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2] / "src")
    _serve()
