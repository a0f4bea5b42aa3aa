"""What a pickle says, as data. Nothing is imported, called or built but the containers of this module.

A pickle is a program for a small machine with a stack. Ours runs that program, except that a class or function stays a
name (`Global`), and what is to be made by calling it is a record of the call (`Made`). So any file can be read, a
hostile one too; `torch_objects` then picks out what it knows. Only the binary opcodes are known, which is all that
torch has ever written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from astray.errors import CheckpointError

DEEPEST_KEY = 3
LONGEST_KEY = 100
"""How deep and long tuples may be that are keys: hashing one that is endlessly deep would end the process."""

LARGEST_KEY = 1 << 64
"""Of whole numbers up to here a few share a hash. Of larger ones as many do as somebody wants, and a dictionary of such
takes time with the square of their number."""

MOST_OBJECTS = 1 << 24
"""Lists, tuples, dictionaries and objects in one pickle, each of which takes a byte there and a hundred in memory. A
million tensors take about half of them."""

MOST_REMEMBERED = 1 << 25
"""Things that a pickle may number to come back to them."""


class Global(NamedTuple):
    """A class or function, by its name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Persistent(NamedTuple):
    """Something that lies outside of the pickle; `id` says what."""

    id: Any


_NOTHING: list[Any] = []  # for all that have no items or members, which is nearly all: never changed


class Made:
    """Something that would be made by calling `what`, and filled with `state`, `items` and `members` after that."""

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
        """The name of what would make it; empty where that is itself something made, or worse."""
        return str(self.what) if isinstance(self.what, Global) else ""

    def __repr__(self) -> str:
        return f"<Made {self.called} of {len(self.args)} arguments>"


class _Malformed(Exception):  # noqa: N818 - never leaves this module
    """What is wrong with the pickle."""


_MARK = object()


def read_pickle(data: bytes | memoryview, where: str, start: int = 0) -> tuple[Any, int]:
    """What the pickle that begins at `start` says, and where it ends. `where` is what an error calls it."""
    machine = _Machine(memoryview(data), start)
    try:
        return machine.run(), machine.place
    except _Malformed as error:
        why = str(error)
    except (struct.error, IndexError):
        why = "it ends too early"
    except (KeyError, TypeError, ValueError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        why = f"byte {machine.place:,} makes no sense ({type(error).__name__})"
    raise CheckpointError(f"{where} is damaged: {why}. Copy it again from where it was made.")


class _Machine:
    """The stack machine. Its memory is a dictionary: a list would be as long as the largest number in the file."""

    def __init__(self, data: memoryview, place: int) -> None:
        self._data = data
        self.place = place
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._objects = 0

    def run(self) -> Any:
        steps, data = _STEPS, self._data
        while True:
            opcode = data[self.place]
            self.place += 1
            if opcode == 0x2E:  # STOP
                return self._stack.pop()
            step = steps.get(opcode)
            if step is None:
                raise _Malformed(f"byte {self.place - 1:,} is {bytes([opcode])!r}, which is not read here")
            step(self)

    # -- bytes ---------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> memoryview:
        taken = self._data[self.place : self.place + count]
        if count < 0 or len(taken) != count:
            raise _Malformed("it ends too early")
        self.place += count
        return taken

    def _byte(self) -> int:
        self.place += 1
        return self._data[self.place - 1]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        rest = bytes(self._data[self.place : self.place + 1000])  # names of classes are shorter than that
        end = rest.index(b"\n")
        self.place += end + 1
        return rest[:end].decode()

    # -- stack ---------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def put(self, made: Any) -> None:
        """Push a container or an object, which is counted."""
        self._objects += 1
        if self._objects > MOST_OBJECTS:
            raise _Malformed(f"it makes more than {MOST_OBJECTS:,} objects")
        self._stack.append(made)

    def _since_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise _Malformed("a mark is missing")
        found = self._stack[place + 1 :]
        del self._stack[place:]
        return found

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise _Malformed("its stack is empty")
        found = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self.put(found)

    # -- containers ----------------------------------------------------------------------------------------------

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Made):
            if target.members is _NOTHING:
                target.members = []
            target.members.extend(values)
        elif isinstance(target, set):
            target.update(map(_key, values))
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise _Malformed("something is put into what is no container")

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        if isinstance(target, Made):
            if target.items is _NOTHING:
                target.items = []
            target.items.extend(pairs)
        elif isinstance(target, dict):
            target.update((_key(name), value) for name, value in pairs)
        else:
            raise _Malformed("something is put into what is no container")

    # -- objects -------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        args, what = self.pop(), self.pop()
        if not isinstance(args, tuple):
            raise _Malformed("a call has no arguments")
        self.put(Made(what, args))

    def _new_with_keywords(self) -> None:
        kwargs, args, what = self.pop(), self.pop(), self.pop()
        if not isinstance(args, tuple):
            raise _Malformed("a call has no arguments")
        self.put(Made(what, args, kwargs))

    def _build(self) -> None:
        state, target = self.pop(), self._stack[-1]
        if isinstance(target, Made):
            target.state = state  # other things have none that matters here

    def _global(self) -> None:
        module = self._line()
        self.put(Global(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _Malformed("a class has no name")
        self.put(Global(module, name))

    def _remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]
        if len(self._memo) > MOST_REMEMBERED:
            raise _Malformed(f"it numbers more than {MOST_REMEMBERED:,} things")


def _key(value: Any, depth: int = 0) -> Any:
    """The value, if it can be hashed without harm."""
    if isinstance(value, tuple | frozenset):
        if depth == DEEPEST_KEY or len(value) > LONGEST_KEY:
            raise _Malformed("a key is no key")
        for item in value:
            _key(item, depth + 1)
    elif isinstance(value, int) and abs(value) > LARGEST_KEY:
        raise _Malformed("a key is a number without end")
    return value


def _text(machine: _Machine, form: str) -> None:
    machine.push(bytes(machine._take(machine._number(form))).decode("utf-8", "surrogatepass"))


def _raw(machine: _Machine, form: str) -> None:
    machine.push(bytes(machine._take(machine._number(form))))


def _string(machine: _Machine, form: str) -> None:
    """What Python 2 called a string."""
    machine.push(bytes(machine._take(machine._number(form))).decode("latin-1"))


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
        "q": lambda m: m._remember(m._byte()),
        "r": lambda m: m._remember(m._number("<I")),
        "\x94": lambda m: m._remember(len(m._memo)),
        "c": lambda m: m._global(),
        "\x93": lambda m: m._stack_global(),
        "R": lambda m: m._reduce(),
        "\x81": lambda m: m._reduce(),  # NEWOBJ: a class and the arguments of its __new__
        "\x92": lambda m: m._new_with_keywords(),
        "b": lambda m: m._build(),
        "Q": lambda m: m.put(Persistent(m.pop())),
    }.items()
}
