"""Reads a pickle as data: nothing is imported or called, and only the containers of this module are built.

A pickle is a program for a stack machine. The machine here runs it, except that a class or function stays a name
(`Global`), and an object that would be made by calling it becomes a record of the call (`PickledObject`). So any file
can be read safely, a hostile one too; `torch_objects` and `numpy_objects` then interpret what they know. Only the
binary opcodes are supported, which is all that torch and Paddle have ever written.

A pickle that holds the values of tensors itself is read from its file, where they stay: each is a `Payload`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from astray.checkpoints.stored_tensor import Files
from astray.errors import CheckpointError

DEEPEST_KEY = 3
LONGEST_KEY = 100
"""The limits of tuples that are keys: hashing one of unbounded depth would crash the process."""

LARGEST_KEY = 1 << 64
"""Few whole numbers up to here share a hash. Of larger ones any number can be made to, and a dictionary of such keys
takes quadratic time."""

MOST_OBJECTS = 1 << 24
"""The most lists, tuples, dictionaries and objects in one pickle. Each takes a byte there and a hundred in memory; a
million tensors take about half of this number."""

MOST_MEMOISED = 1 << 25
"""The most entries of a pickle's memo."""

LONGEST_KEPT = 1024
"""Longer texts and bytes stay in the file that they are read from. Names are shorter."""

MOST_READ = 1 << 30
"""The most bytes that are read of a file beside its payloads: a million tensors take a third of this."""

_WINDOW = 1 << 16  # bytes of a file that are in memory at a time


class Global(NamedTuple):
    """A class or function, by its name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Persistent(NamedTuple):
    """A reference to something outside of the pickle, by its `id`."""

    id: Any


@dataclass(frozen=True, slots=True)
class Payload:
    """Long bytes in a pickle, left where they are in its file.

    encoded: as a text in UTF-8 whose characters are the bytes, which pickles of protocol 2 have.
    """

    start: int
    nbytes: int
    encoded: bool


_NOTHING: list[Any] = []  # shared by all objects without items or members, which is nearly all; never changed


class PickledObject:
    """An object that would be made by calling `what`, and then filled with `state`, `items` and `members`."""

    __slots__ = ("args", "items", "kwargs", "members", "state", "what")

    def __init__(self, what: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
        self.what = what
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        self.items: list[tuple[Any, Any]] = _NOTHING
        self.members: list[Any] = _NOTHING

    @property
    def called(self) -> str:
        """The name of what would be called; empty where that is not a `Global`."""
        return str(self.what) if isinstance(self.what, Global) else ""

    def __repr__(self) -> str:
        return f"<Made {self.called} of {len(self.args)} arguments>"


class _Malformed(Exception):  # noqa: N818 - never leaves this module
    """The pickle is damaged; the message says how."""


_MARK = object()


def read_pickle(data: bytes | memoryview, where: str, start: int = 0) -> tuple[Any, int]:
    """The content of the pickle that begins at `start`, and where it ends. `where` names it in errors."""
    return _run(_Machine(memoryview(data), start), where)


def read_pickle_file(path: Path, files: Files) -> tuple[Any, int]:
    """The content of the pickle that a file begins with, and where it ends. Long bytes are a `Payload`."""
    return _run(_Machine(_FileWindow(path, files), 0), str(path))


def _run(machine: _Machine, where: str) -> tuple[Any, int]:
    try:
        return machine.run(), machine.position
    except _Malformed as error:
        why = str(error)
    except (struct.error, IndexError):
        why = "it ends too early"
    except (KeyError, TypeError, ValueError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        why = f"byte {machine.position:,} makes no sense ({type(error).__name__})"
    raise CheckpointError(f"{where} is damaged: {why}. Copy it again from where it was made.")


class _FileWindow:
    """The bytes of a file, of which a few are in memory: those from the machine's position on."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files
        self._size = files.size(path)
        self._held = memoryview(b"")
        self._start = 0
        self._left = 0

    def __getitem__(self, place: Any) -> Any:
        """A byte, or those of a slice as far as they are there. Raises IndexError behind the end."""
        first, last = (place.start, place.stop) if isinstance(place, slice) else (place, place + 1)
        if not self._start <= first <= last <= self._start + len(self._held):
            self._hold(first, last - first)
        held = self._held[first - self._start :]
        return held[: last - first] if isinstance(place, slice) else held[0]

    def leave(self, start: int, count: int) -> None:
        """Bytes that stay in the file."""
        if start + count > self._size:
            raise _Malformed("it ends too early")
        self._left += count

    def _hold(self, start: int, count: int) -> None:
        if count > _WINDOW:
            raise _Malformed(f"something at byte {start:,} is {count:,} bytes long")
        if start - self._left > MOST_READ:
            raise _Malformed(f"it has more than {MOST_READ:,} bytes beside long ones")
        nbytes = max(min(_WINDOW, self._size - start), 0)
        self._held = memoryview(self._files.read(self._path, start, nbytes))
        self._start = start


class _Machine:
    """The stack machine. Its memo is a dictionary: a list would be as long as the largest index in the file."""

    def __init__(self, data: memoryview | _FileWindow, position: int) -> None:
        self._data = data
        self.position = position
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._objects = 0

    def run(self) -> Any:
        steps, data = _STEPS, self._data
        while True:
            opcode = data[self.position]
            self.position += 1
            if opcode == 0x2E:  # STOP
                return self._stack.pop()
            step = steps.get(opcode)
            if step is None:
                raise _Malformed(f"byte {self.position - 1:,} is {bytes([opcode])!r}, which is not read here")
            step(self)

    # -- bytes ---------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> memoryview:
        taken = self._data[self.position : self.position + count]
        if count < 0 or len(taken) != count:
            raise _Malformed("it ends too early")
        self.position += count
        return taken

    def payload(self, count: int, *, encoded: bool = False) -> Payload | None:
        """The place of so many bytes, where these stay in the file; None where they are to be read."""
        if count <= LONGEST_KEPT or not isinstance(self._data, _FileWindow):
            return None
        self._data.leave(self.position, count)
        self.position += count
        return Payload(self.position - count, count, encoded)

    def _byte(self) -> int:
        self.position += 1
        return self._data[self.position - 1]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        rest = bytes(self._data[self.position : self.position + 1000])  # names of classes are shorter
        end = rest.index(b"\n")
        self.position += end + 1
        return rest[:end].decode()

    # -- stack ---------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def put(self, made: Any) -> None:
        """Push a container or an object, and count it."""
        self._objects += 1
        if self._objects > MOST_OBJECTS:
            raise _Malformed(f"it makes more than {MOST_OBJECTS:,} objects")
        self._stack.append(made)

    def _since_mark(self) -> list[Any]:
        mark = len(self._stack) - 1
        while self._stack[mark] is not _MARK:
            mark -= 1
            if mark < 0:
                raise _Malformed("a mark is missing")
        values = self._stack[mark + 1 :]
        del self._stack[mark:]
        return values

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise _Malformed("its stack is empty")
        values = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self.put(values)

    # -- containers ----------------------------------------------------------------------------------------------

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, PickledObject):
            if target.members is _NOTHING:
                target.members = []
            target.members.extend(values)
        elif isinstance(target, set):
            target.update(map(_key, values))
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise _Malformed("something is put into what is not a container")

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        if isinstance(target, PickledObject):
            if target.items is _NOTHING:
                target.items = []
            target.items.extend(pairs)
        elif isinstance(target, dict):
            target.update((_key(name), value) for name, value in pairs)
        else:
            raise _Malformed("something is put into what is not a container")

    # -- objects -------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        args, what = self.pop(), self.pop()
        if not isinstance(args, tuple):
            raise _Malformed("a call has no arguments")
        self.put(PickledObject(what, args))

    def _new_with_keywords(self) -> None:
        kwargs, args, what = self.pop(), self.pop(), self.pop()
        if not isinstance(args, tuple):
            raise _Malformed("a call has no arguments")
        self.put(PickledObject(what, args, kwargs))

    def _build(self) -> None:
        state, target = self.pop(), self._stack[-1]
        if isinstance(target, PickledObject):
            target.state = state  # that of other values is ignored

    def _global(self) -> None:
        module = self._line()
        self.put(Global(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _Malformed("a class has no name")
        self.put(Global(module, name))

    def _memoise(self, number: int) -> None:
        self._memo[number] = self._stack[-1]
        if len(self._memo) > MOST_MEMOISED:
            raise _Malformed(f"it numbers more than {MOST_MEMOISED:,} things")


def _key(value: Any, depth: int = 0) -> Any:
    """The value, checked to be hashable safely."""
    if isinstance(value, tuple | frozenset):
        if depth == DEEPEST_KEY or len(value) > LONGEST_KEY:
            raise _Malformed("a key is nested too deep or too long")
        for item in value:
            _key(item, depth + 1)
    elif isinstance(value, int) and abs(value) > LARGEST_KEY:
        raise _Malformed("a key is too large a number")
    return value


def _text(machine: _Machine, form: str) -> None:
    count = machine._number(form)
    left = machine.payload(count, encoded=True)
    machine.push(left or bytes(machine._take(count)).decode("utf-8", "surrogatepass"))


def _raw(machine: _Machine, form: str) -> None:
    count = machine._number(form)
    machine.push(machine.payload(count) or bytes(machine._take(count)))


def _string(machine: _Machine, form: str) -> None:
    """A string of Python 2."""
    count = machine._number(form)
    machine.push(machine.payload(count) or bytes(machine._take(count)).decode("latin-1"))


def _long(machine: _Machine, form: str) -> None:
    machine.push(int.from_bytes(machine._take(machine._number(form)), "little", signed=True))


_STEPS: dict[int, Callable[[_Machine], object]] = {
    ord(code): step
    for code, step in {
        "\x80": lambda m: m._take(1),  # PROTO
        "\x95": lambda m: m._take(8),  # FRAME
        "(": lambda m: m.push(_MARK),
        "0": lambda m: m.pop(),
        "1": lambda m: m._since_mark(),
        "2": lambda m: m.push(m._stack[-1]),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(m._number("<i")),
        "K": lambda m: m.push(m._byte()),
        "M": lambda m: m.push(m._number("<H")),
        "G": lambda m: m.push(m._number(">d")),
        "\x8a": lambda m: _long(m, "<B"),
        "\x8b": lambda m: _long(m, "<i"),
        "X": lambda m: _text(m, "<I"),
        "\x8c": lambda m: _text(m, "<B"),
        "\x8d": lambda m: _text(m, "<Q"),
        "U": lambda m: _string(m, "<B"),
        "T": lambda m: _string(m, "<i"),
        "B": lambda m: _raw(m, "<I"),
        "C": lambda m: _raw(m, "<B"),
        "\x8e": lambda m: _raw(m, "<Q"),
        "\x96": lambda m: _raw(m, "<Q"),
        "]": lambda m: m.put([]),
        "a": lambda m: m._append([m.pop()]),
        "e": lambda m: m._append(m._since_mark()),
        "l": lambda m: m.put(m._since_mark()),
        ")": lambda m: m.push(()),
        "t": lambda m: m.put(tuple(m._since_mark())),
        "\x85": lambda m: m._tuple(1),
        "\x86": lambda m: m._tuple(2),
        "\x87": lambda m: m._tuple(3),
        "}": lambda m: m.put({}),
        "s": lambda m: m._set([m.pop(), m.pop()][::-1]),
        "u": lambda m: m._set(m._since_mark()),
        "\x8f": lambda m: m.put(set()),
        "\x90": lambda m: m._append(m._since_mark()),
        "\x91": lambda m: m.put(frozenset(map(_key, m._since_mark()))),
        "h": lambda m: m.push(m._memo[m._byte()]),
        "j": lambda m: m.push(m._memo[m._number("<I")]),
        "q": lambda m: m._memoise(m._byte()),
        "r": lambda m: m._memoise(m._number("<I")),
        "\x94": lambda m: m._memoise(len(m._memo)),
        "c": lambda m: m._global(),
        "\x93": lambda m: m._stack_global(),
        "R": lambda m: m._reduce(),
        "\x81": lambda m: m._reduce(),  # NEWOBJ: a class and the arguments of its __new__
        "\x92": lambda m: m._new_with_keywords(),
        "b": lambda m: m._build(),
        "Q": lambda m: m.put(Persistent(m.pop())),
    }.items()
}
