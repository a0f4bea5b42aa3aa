"""Every entry of a pickle by its dotted name, in order: tensors, plain values, and what is not read.

Takes the content that `pickles` has read. What the objects in it are, the module of a framework says: `torch_objects`,
`numpy_objects`. Everything is counted, since a small file can refer to the same things again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from astray.checkpoints.pickles import Global, Payload, Persistent, PickledObject
from astray.checkpoints.stored_tensor import LONGEST, Unread, printable
from astray.errors import CheckpointError
from astray.wording import counted

DEEPEST = 100
"""The deepest nesting of containers."""

MOST_ENTRIES = 5_000_000
"""The most entries. A file with more, by repeated references to the same objects, is made to exhaust memory."""

MOST_VISITED = 50_000_000
MOST_TEXT = 1_000_000_000
"""The most values that are visited to find the entries, and the most characters of all names together. Small files
reach them too, by referring to the same list or name again and again."""

MOST_COUNTED = 100_000
_OF_MODULE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_CODE = "it needs code to be made, and astray runs none that comes with a file"
_EXPECTED = (TypeError, ValueError, IndexError, KeyError, AttributeError)


class ObjectReader(NamedTuple):
    """What a framework's objects are.

    value: the tensor or the plain value that an object stands for; None when it is something else. Any of the errors
    that come of arguments that make no sense may be raised.
    is_tensor: whether an object is a tensor, for those inside of others that are not read.
    """

    value: Callable[[PickledObject], object]
    is_tensor: Callable[[PickledObject], bool]


def find_entries(root: Any, where: str, reader: ObjectReader) -> dict[str, object]:
    """Every entry of a pickle's content. A value that is the whole content is called `tensor`."""
    found: dict[str, object] = {}
    walk = _Walk(where, reader)
    for name, value in walk.entries(root, ()):
        dotted = ".".join(name) or "tensor"
        if dotted in found:
            raise CheckpointError(f"{where} has two entries called {dotted!r}, so it cannot be told which is meant.")
        found[dotted] = value
    return found


class _Walk:
    """Traverses the content of a pickle, with limits for cycles and repeated references."""

    def __init__(self, where: str, reader: ObjectReader) -> None:
        self._where = where
        self._reader = reader
        self._entries = 0
        self._visited = 0
        self._text = 0
        self._enclosing: set[int] = set()  # ids of the containers around the current value
        self._tensor_counts: dict[int, int] = {}  # by id of the object

    def _count(self, things: int = 0, text: int = 0) -> None:
        """Count visited values and characters, and refuse a file beyond the limits."""
        self._visited += things
        self._text += text
        if self._visited > MOST_VISITED:
            raise CheckpointError(f"{self._where} leads to the same things again and again, so it is not read.")
        if self._text > MOST_TEXT:
            raise CheckpointError(f"{self._where} has names of more than {MOST_TEXT:,} characters, so it is not read.")

    def entries(self, value: Any, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
        """Tensors, plain values and other objects, each with its name."""
        self._count(1 + _width(value), len(name) + sum(map(len, name)))
        members = None if _is_plain(value) else _members(value)
        if members is None:
            yield name, self._leaf(value)
            return
        if id(value) in self._enclosing:
            yield name, Unread("a reference to what it lies in")
            return
        if len(name) >= DEEPEST:
            raise CheckpointError(f"{self._where} has more than {DEEPEST} containers in each other, so it is not read.")
        self._enclosing.add(id(value))
        for key, member in members:
            self._entries += 1
            if self._entries > MOST_ENTRIES:
                raise CheckpointError(f"{self._where} has more than {MOST_ENTRIES:,} entries, so it is not read.")
            yield from self.entries(member, (*name, key))
        self._enclosing.discard(id(value))

    def _leaf(self, value: Any) -> object:
        """A tensor, a plain value, or why it is not read."""
        if isinstance(value, PickledObject):
            try:
                known = self._reader.value(value)
            except _EXPECTED:
                return Unread(f"a tensor ({_named(value)})", "what the file says of it makes no sense", 1)
            return known if known is not None else self._unknown(value)
        if isinstance(value, Payload):
            return Unread(f"{value.nbytes:,} bytes")
        if isinstance(value, Persistent | Global | set | frozenset):
            return Unread(_named(value))
        return value

    def _unknown(self, made: PickledObject) -> object:
        if id(made) not in self._tensor_counts:
            self._tensor_counts[id(made)], seen = _count_tensors(made, self._reader.is_tensor)
            self._count(seen)
        tensors = self._tensor_counts[id(made)]
        inside = f", with {counted(tensors, 'tensor')} in it" if tensors else ""
        return Unread(f"{_named(made)}{inside}", _CODE, tensors)


def _width(value: Any) -> int:
    """How many values are visited to find the members of a value."""
    if isinstance(value, PickledObject):
        state = value.state if isinstance(value.state, dict) else {}
        parts = (value.members, value.items, *value.args[:1], *(state.get(name) for name in _OF_MODULE))
        return sum(map(_width, (part for part in parts if not isinstance(part, PickledObject)))) + sum(
            len(part.items) + len(part.members) for part in parts if isinstance(part, PickledObject)
        )
    return len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 0


def _is_plain(value: Any) -> bool:
    """Whether a value is kept as it is, such as a number or a list of only numbers."""
    if isinstance(value, list | tuple) and not isinstance(value, Global | Persistent):
        return all(item is None or isinstance(item, bool | int | float | str) for item in value)
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _members(value: Any) -> list[tuple[str, Any]] | None:
    """The members of a container, with names; None for other values."""
    if isinstance(value, dict):
        return [(_key(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple) and not isinstance(value, Global | Persistent):
        return [(str(place), item) for place, item in enumerate(value)]
    if not isinstance(value, PickledObject):
        return None
    module = module_state(value)
    if module is not None:
        return module
    if value.called == "collections.OrderedDict" or value.items:  # a subclass of dict has its items
        pairs = value.items or (value.args[0] if value.args else [])
        if isinstance(pairs, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            return [(_key(key), item) for key, item in pairs]
        return None
    return [(str(place), item) for place, item in enumerate(value.members)] if value.members else None


def module_state(made: PickledObject) -> list[tuple[str, Any]] | None:
    """The entries of `state_dict` for a module that was pickled whole; None when it is not a module.

    They are derived from its attributes, which name its parameters, buffers and modules.
    """
    state = made.state
    if not isinstance(state, dict) or not {"_parameters", "_buffers", "_modules"} <= state.keys():
        return None
    left_out = _set(state.get("_non_persistent_buffers_set"))
    entries: list[tuple[str, Any]] = []
    for kind in _OF_MODULE[:3]:
        members = _members(state[kind]) or []
        entries += [(name, member) for name, member in members if member is not None and name not in left_out]
    return entries


def _set(value: Any) -> set[str]:
    """The names in a set, which is made of a list in pickles of protocol 2."""
    members = value.args[0] if isinstance(value, PickledObject) and value.args else value
    return {name for name in members if isinstance(name, str)} if isinstance(members, list | set) else set()


def _key(key: Any) -> str:
    if isinstance(key, int) and abs(key) >= 1 << 64:  # Python refuses to format very large numbers
        return "a large number"
    if isinstance(key, bytes):
        return str(key[:LONGEST])
    return str(key) if isinstance(key, str | int | float) or key is None else _named(key)


def _named(value: Any) -> str:
    """The class of a value, or the function that would make it."""
    if isinstance(value, PickledObject):
        value = value.what
    if isinstance(value, Persistent):  # a class whose source was saved too
        value = value.id[1] if isinstance(value.id, tuple) and len(value.id) > 1 else None
    if not isinstance(value, Global):
        return "something"
    return printable(f"{value.module[:LONGEST]}.{value.name[:LONGEST]}")


def _count_tensors(made: PickledObject, is_tensor: Callable[[PickledObject], bool]) -> tuple[int, int]:
    """How many tensors an object contains, up to a limit of visited values, and how many were visited."""
    todo: list[Any] = [made]
    seen, count, visited = {id(made)}, 0, 0
    while todo and visited < MOST_COUNTED:
        value = todo.pop()
        if isinstance(value, PickledObject):
            if is_tensor(value):
                count += 1
                continue
            inside = [*value.args, value.state, *value.members, *(item for pair in value.items for item in pair)]
        elif isinstance(value, dict):
            inside = list(value.values())
        else:
            inside = list(value) if isinstance(value, list | tuple) else []
        visited += 1 + len(inside)
        for item in inside:
            if id(item) not in seen and isinstance(item, PickledObject | dict | list | tuple):
                seen.add(id(item))
                todo.append(item)
    return count, visited
