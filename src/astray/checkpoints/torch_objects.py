"""Finds the tensors in the pickle of a torch file, and their names.

Takes the content that `pickles` has read, and describes each tensor as a view of a storage, by its key. Nested
dictionaries, lists and modules become dotted names. Plain values are kept beside the tensors, other objects as
`Unread`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

from astray.checkpoints.pickles import Global, Persistent, PickledObject
from astray.checkpoints.stored_tensor import LONGEST, MOST_DIMENSIONS, Unread, extent, is_shape, printable
from astray.errors import CheckpointError
from astray.stats.dtypes import DTYPES
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
_MOST_ARGUMENTS = 16  # of the functions that rebuild tensors
_OF_MODULE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}

_VIEWS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_WRAPPED = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
)
"""Functions that wrap a tensor with the same values."""

_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_CODE = "it needs code to be made, and astray runs none that comes with a file"
_EXPECTED = (TypeError, ValueError, IndexError, KeyError, AttributeError)


class Storage(NamedTuple):
    """A storage: its key in the file, its dtype and its size."""

    key: str
    dtype: str
    nbytes: int


class StorageView(NamedTuple):
    """A tensor: a view of a storage. `offset` and `stride` count elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """How many bytes of the storage it needs."""
        size = extent(self.shape, self.stride)
        return (self.offset + size) * DTYPES[self.dtype].itemsize if size else 0


class NamedContents(NamedTuple):
    """The content of a file by dotted names."""

    tensors: dict[str, StorageView]
    others: dict[str, object]


def find_tensors(root: Any, where: str) -> NamedContents:
    """Every tensor in a pickle, in order. A tensor that is the whole content is called `tensor`."""
    found = NamedContents({}, {})
    walk = _Walk(where)
    for name, value in walk.entries(root, ()):
        dotted = ".".join(name) or "tensor"
        if dotted in found.tensors or dotted in found.others:
            raise CheckpointError(f"{where} has two entries called {dotted!r}, so it cannot be told which is meant.")
        if isinstance(value, StorageView):
            found.tensors[dotted] = value
        else:
            found.others[dotted] = value
    return found


class _Walk:
    """Traverses the content of a pickle, with limits for cycles and repeated references."""

    def __init__(self, where: str) -> None:
        self._where = where
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
                tensor = _tensor(value)
            except _EXPECTED:
                return Unread(f"a tensor ({_named(value)})", "what the file says of it makes no sense", 1)
            return tensor if tensor is not None else self._unknown(value)
        if isinstance(value, Persistent | Global | set | frozenset):
            return Unread(_named(value))
        return value

    def _unknown(self, made: PickledObject) -> object:
        if made.called == "torch.Size" and len(made.args) == 1:
            size = made.args[0]
            is_one = isinstance(size, list | tuple) and len(size) <= MOST_DIMENSIONS
            return tuple(size) if is_one else Unread("torch.Size")
        if id(made) not in self._tensor_counts:
            self._tensor_counts[id(made)], seen = _count_tensors(made)
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
    module = _module_state(value)
    if module is not None:
        return module
    if value.called == "collections.OrderedDict" or value.items:  # a subclass of dict has its items
        pairs = value.items or (value.args[0] if value.args else [])
        if isinstance(pairs, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            return [(_key(key), item) for key, item in pairs]
        return None
    return [(str(place), item) for place, item in enumerate(value.members)] if value.members else None


def _module_state(made: PickledObject) -> list[tuple[str, Any]] | None:
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


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that was pickled whole, by name; None for other values.

    The parameters, buffers and modules that a module has registered are among them.
    """
    if not isinstance(value, PickledObject) or not isinstance(value.state, dict):
        return None
    own = {key: item for key, item in value.state.items() if isinstance(key, str)}
    return own | dict(_module_state(value) or ())


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


def _count_tensors(made: PickledObject) -> tuple[int, int]:
    """How many tensors an object contains, up to a limit of visited values, and how many were visited."""
    todo: list[Any] = [made]
    seen, count, visited = {id(made)}, 0, 0
    while todo and visited < MOST_COUNTED:
        value = todo.pop()
        if isinstance(value, PickledObject):
            if value.called in _VIEWS:
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


def _tensor(made: PickledObject) -> StorageView | Unread | None:
    """The tensor that an object stands for; None when it is something else."""
    what = made.called
    for _ in range(DEEPEST):
        if what not in _WRAPPED and what != _SUBCLASS:
            break
        if what == _SUBCLASS:  # a subclass of Tensor with the same values
            function, _, args = made.args[:3]
            made = PickledObject(function, tuple(args[:_MOST_ARGUMENTS]))
        elif isinstance(made.args[0], PickledObject):
            made = made.args[0]
        else:
            return None
        what = made.called
    return _view(what, made.args) if what in _VIEWS else None


def _view(what: str, args: tuple[Any, ...]) -> StorageView | Unread:
    storage = _storage(args[0])
    if isinstance(storage, Unread):
        return storage
    offset, shape, stride, rest = args[1], sizes(args[2]), sizes(args[3]), args[4:]
    dtype, flags = storage.dtype, rest[2] if len(rest) > 2 else None
    if what.endswith("v3"):
        dtype, flags = dtype_name(rest[2]), rest[3] if len(rest) > 3 else None
    if dtype not in DTYPES:
        return Unread(f"a tensor of {printable(dtype)}", "astray does not know this dtype", 1)
    if flags:  # the values would have to be negated or conjugated on reading
        return Unread("a tensor", "it is a negated or conjugated view; save it with .resolve_neg().resolve_conj()", 1)
    if not is_size(offset) or not is_shape(shape) or len(shape) != len(stride):
        raise ValueError
    return StorageView(storage, dtype, offset, shape, stride)


def sizes(value: Any) -> tuple[int, ...]:
    """The sizes of a torch.Size or a tuple. Raises ValueError for other values."""
    if isinstance(value, PickledObject) and value.called == "torch.Size":
        value = value.args[0] if value.args else ()
    if len(value) > MOST_DIMENSIONS:
        raise ValueError
    found = tuple(value)
    if not all(map(is_size, found)):
        raise ValueError
    return found


def is_size(value: Any) -> TypeGuard[int]:
    """Whether it is a possible number of elements or bytes. Python refuses to format much larger numbers."""
    return type(value) is int and 0 <= value < 1 << 60


def dtype_name(value: Any) -> str:
    """The name of a dtype. Raises ValueError for other values."""
    if not isinstance(value, Global) or value.module != "torch":
        raise ValueError
    return value.name


def _storage(value: Any) -> Storage | Unread:
    """The storage for the tuple that `torch.save` writes: ("storage", class, key, device, size)."""
    if isinstance(value, PickledObject) and len(value.args) == 1:  # a typed storage around an untyped one
        value = value.args[0]
    if not isinstance(value, Persistent):
        raise ValueError
    kind, cls, key, _, count, *view = value.id[:_MOST_ARGUMENTS]
    if not isinstance(key, str | int):
        raise ValueError
    if kind != "storage" or not isinstance(cls, Global) or not is_size(count):
        raise ValueError
    if view and view[0] is not None:
        return Unread("a tensor", "it is a view of a storage in a way that torch gave up in 2019; save it again", 1)
    if cls.name not in STORAGES:
        return Unread(f"a tensor of {printable(str(cls))}", "astray does not know this kind of storage", 1)
    dtype = STORAGES[cls.name]
    return Storage(str(key), dtype, count * DTYPES[dtype].itemsize)
