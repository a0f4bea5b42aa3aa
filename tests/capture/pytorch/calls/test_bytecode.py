"""The instruction that a frame waits at, read from its bytecode: in this Python, and in other installed versions."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from astray.capture.pytorch.calls import bytecode
from astray.capture.pytorch.calls.bytecode import UNKNOWN, CallInstruction

CHECK = """
import importlib.util, sys

spec = importlib.util.spec_from_file_location("bytecode", sys.argv[1])
bytecode = importlib.util.module_from_spec(spec)
sys.modules["bytecode"] = bytecode
spec.loader.exec_module(bytecode)
seen = []


def look(*_args, **_kwargs):
    waiting = bytecode.CallInstruction(sys._getframe(1))
    call = waiting.invocation()
    seen.append(call and (call.name, call.positional, call.keywords, call.callee in (look, sys.modules["bytecode"])))


class Thing:
    def _see(self, other):
        waiting = bytecode.CallInstruction(sys._getframe(1))
        left, right = waiting.operands()
        known = [bytecode.UNKNOWN is one for one in (left, right)]
        seen.append((waiting.operator, left is self, right is self, *known))
        return self

    __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = __iadd__ = __lt__ = __gt__ = __ne__ = __rsub__ = _see

    def __neg__(self):
        return self._see_unary()

    def _see_unary(self):
        seen.append(bytecode.CallInstruction(sys._getframe(2)).operator)
        return self

    def look(self, *_args, **_kwargs):
        return look


def program(thing, holder, flag):
    half = 0.5
    thing + 1
    1 + thing
    half * thing
    thing * half
    (2 * half) * thing
    holder.by * thing
    look(1, 2)  # a call in between
    (half if flag else 2) * thing
    thing * (half if flag else 2)
    thing @ thing
    1 - thing
    thing < 1
    1 < thing
    thing != 1
    -thing
    thing += 1
    look(1, 2, a=3)
    look(*[1])
    look()
    holder.look(1, b=2)
    holder.look(half if flag else 1)
    other = look
    other(thing + 1, half)


class Holder:
    pass


holder = Holder()
holder.by = 3.0
holder.look = look
program(Thing(), holder, True)
expected = [
    ("+", True, False, False, False), ("+", False, True, False, False),
    ("*", False, True, False, False), ("*", True, False, False, False),
    ("*", False, True, True, False), ("*", False, True, False, False),
    ("look", 2, (), True),
    ("*", False, True, True, False), ("*", False, False, True, True),
    ("@", True, True, False, False), ("-", False, True, False, False),
    ("<", True, False, False, False), ("<", False, True, False, False), ("!=", True, False, False, False),
    "-x", ("+=", True, False, False, False),
    ("look", 2, ("a",), True), None, ("look", 0, (), True), ("look", 1, ("b",), True), ("", 1, (), False),
    ("+", True, False, False, False), ("other", 2, (), True),
]
for one, other in zip(seen, expected):
    assert one == other, (one, other)
assert len(seen) == len(expected)
"""


def find(version: str) -> Path | None:
    """An interpreter of a version: this one, one on the path, or one that pyenv has."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    there = [*(Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")]
    if on_path := shutil.which(f"python{version}"):
        there.append(Path(on_path))
    for one in there:
        if subprocess.run([one, "-c", ""], check=False, capture_output=True).returncode == 0:
            return one
    return None


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_operators_and_calls_are_told(version: str, tmp_path: Path) -> None:
    python = find(version)
    if python is None:
        pytest.skip(f"Python {version} is not here")
    (tmp_path / "check.py").write_text(CHECK)
    command = [python, tmp_path / "check.py", bytecode.__file__]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Held:
    """Something that can be let go, and knows what requested it."""

    def __add__(self, other: Any) -> Any:
        frame: FrameType = sys._getframe(1)
        return CallInstruction(frame).operands()


def test_what_a_program_lets_go_is_not_kept() -> None:
    """Before Python 3.13 reading `f_locals` leaves a copy of the locals with the frame."""

    def program() -> Any:
        held = Held()
        gone = Held()
        watched = weakref.ref(gone)
        assert (held + 1) == (held, 1)
        del gone
        gc.collect()
        return watched()

    assert program() is None


def test_what_a_program_holds_of_its_locals_stays() -> None:
    def program() -> Any:
        mine = locals()
        held = Held()
        assert (held + 1)[0] is held
        return mine

    assert "held" in program()


def test_no_code_of_the_program_is_run() -> None:
    class Loud:
        @property
        def by(self) -> float:
            raise AssertionError("it was asked")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"it was asked for {name}")

    class Quiet(Held):
        def __radd__(self, other: Any) -> Any:
            return CallInstruction(sys._getframe(1)).operands()

    loud, quiet = Loud(), Quiet()
    frames: list[Any] = []

    def program() -> None:
        frames.append((loud if quiet is None else 1.0) + quiet)

    program()
    assert frames[0][0] is UNKNOWN
    assert bytecode._attribute(loud, "by") is UNKNOWN
    assert bytecode._attribute(loud, "other") is UNKNOWN
