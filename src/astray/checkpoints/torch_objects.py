"""Which parts of a pickle that torch wrote are tensors, and what their names are.

Takes what `pickles` read, gives a description of each tensor: its storage by key, and the view of it. Dictionaries,
lists and modules that lie in each other become dotted names. What is no tensor is kept beside them or named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

from astray.checkpoints.pickles import Global, Made, Persistent
from astray.checkpoints.stored_tensor import LONGEST, MOST_DIMENSIONS, Unread, extent, is_shape, printable
from astray.errors import CheckpointError
from astray.stats.dtypes import DTYPES
from astray.wording import counted

DEEPEST = 100
"""So many containers may lie in each other."""

MOST_ENTRIES = 5_000_000
"""A file that holds more, by references to what it holds already, is meant to take all memory."""

MOST_LOOKED_AT = 50_000_000
MOST_TEXT = 1_000_000_000
"""Things that may be looked through to find those, and characters of all their names together. Small files reach them
too, by going to the same list or the same name again and again."""

MOST_COUNTED = 100_000
_MOST_ARGUMENTS = 16  # of what torch makes tensors by
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
"""What is made of a tensor, and has its values."""

_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_CODE = "it needs code to be made, and astray runs none that comes with a file"
_EXPECTED = (TypeError, ValueError, IndexError, KeyError, AttributeError)


class Storage(NamedTuple):
    """A storage: its key in the file, and what the file says of its size."""

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


class FoundTensors(NamedTuple):
    """What is in a file, by dotted names."""

    tensors: dict[str, StorageView]
    others: dict[str, object]


def find_tensors(root: Any, where: str) -> FoundTensors:
    """Every tensor in a pickle, in its order. A lone tensor is called `tensor`."""
    found = FoundTensors({}, {})
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
    """Goes through what lies in a pickle, with care for what leads in circles or never ends."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen = 0
        self._looked_at = 0
        self._text = 0
        self._around: set[int] = set()
        self._inside: dict[int, int] = {}

    def _spend(self, things: int = 0, text: int = 0) -> None:
        """Count what is looked at, and refuse what never ends."""
        self._looked_at += things
        self._text += text
        if self._looked_at > MOST_LOOKED_AT:
            raise CheckpointError(f"{self._where} leads to the same things again and again, so it is not read.")
        if self._text > MOST_TEXT:
            raise CheckpointError(f"{self._where} has names of more than {MOST_TEXT:,} characters, so it is not read.")

    def entries(self, value: Any, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
        """Tensors, plain values and what is neither, each with its name."""
        self._spend(1 + _width(value), len(name) + sum(map(len, name)))
        members = None if _is_plain(value) else _members(value)
        if members is None:
            yield name, self._leaf(value)
            return
        if id(value) in self._around:
            yield name, Unread("a reference to what it lies in")
            return
        if len(name) >= DEEPEST:
            raise CheckpointError(f"{self._where} has more than {DEEPEST} containers in each other, so it is not read.")
        self._around.add(id(value))
        for key, member in members:
            self._seen += 1
            if self._seen > MOST_ENTRIES:
                raise CheckpointError(f"{self._where} has more than {MOST_ENTRIES:,} entries, so it is not read.")
            yield from self.entries(member, (*name, key))
        self._around.discard(id(value))

    def _leaf(self, value: Any) -> object:
        """A tensor, a plain value, or why it is not read."""
        if isinstance(value, Made):
            try:
                tensor = _tensor(value)
            except _EXPECTED:
                return Unread(f"a tensor ({_named(value)})", "what the file says of it makes no sense", 1)
            return tensor if tensor is not None else self._unknown(value)
        if isinstance(value, Persistent | Global | set | frozenset):
            return Unread(_named(value))
        return value

    def _unknown(self, made: Made) -> object:
        if made.called == "torch.Size" and len(made.args) == 1:
            size = made.args[0]
            is_one = isinstance(size, list | tuple) and len(size) <= MOST_DIMENSIONS
            return tuple(size) if is_one else Unread("torch.Size")
        if id(made) not in self._inside:
            self._inside[id(made)], seen = _count_tensors(made)
            self._spend(seen)
        tensors = self._inside[id(made)]
        inside = f", with {counted(tensors, 'tensor')} in it" if tensors else ""
        return Unread(f"{_named(made)}{inside}", _CODE, tensors)


def _width(value: Any) -> int:
    """How much there is to look through to find the members of something."""
    if isinstance(value, Made):
        state = value.state if isinstance(value.state, dict) else {}
        parts = (value.members, value.items, *value.args[:1], *(state.get(name) for name in _OF_MODULE))
        return sum(map(_width, (part for part in parts if not isinstance(part, Made)))) + sum(
            len(part.items) + len(part.members) for part in parts if isinstance(part, Made)
        )
    return len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 0


def _is_plain(value: Any) -> bool:
    """Whether it is a value to be kept as it is. A list of nothing but numbers is one."""
    if isinstance(value, list | tuple) and not isinstance(value, Global | Persistent):
        return all(item is None or isinstance(item, bool | int | float | str) for item in value)
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _members(value: Any) -> list[tuple[str, Any]] | None:
    """What lies in a container, with names; None when it is none."""
    if isinstance(value, dict):
        return [(_key(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple) and not isinstance(value, Global | Persistent):
        return [(str(place), item) for place, item in enumerate(value)]
    if not isinstance(value, Made):
        return None
    module = _module_state(value)
    if module is not None:
        return module
    if value.called == "collections.OrderedDict" or value.items:  # a class made of dict has what a dict has
        pairs = value.items or (value.args[0] if value.args else [])
        if isinstance(pairs, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            return [(_key(key), item) for key, item in pairs]
        return None
    return [(str(place), item) for place, item in enumerate(value.members)] if value.members else None


def _module_state(made: Made) -> list[tuple[str, Any]] | None:
    """What `state_dict` would give of a module that was pickled as a whole; None when it is none.

    A module's attributes are all there is to it: names of the parameters, buffers and modules in it.
    """
    state = made.state
    if not isinstance(state, dict) or not {"_parameters", "_buffers", "_modules"} <= state.keys():
        return None
    left_out = _set(state.get("_non_persistent_buffers_set"))
    found: list[tuple[str, Any]] = []
    for kind in _OF_MODULE[:3]:
        members = _members(state[kind]) or []
        found += [(name, member) for name, member in members if member is not None and name not in left_out]
    return found


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that was pickled as a whole, by name; None when that is not what it is.

    What a module has registered (parameters, buffers, modules) is among them.
    """
    if not isinstance(value, Made) or not isinstance(value.state, dict):
        return None
    own = {key: item for key, item in value.state.items() if isinstance(key, str)}
    return own | dict(_module_state(value) or ())


def _set(value: Any) -> set[str]:
    """The names in a set, which is made of a list in pickles of protocol 2."""
    members = value.args[0] if isinstance(value, Made) and value.args else value
    return {name for name in members if isinstance(name, str)} if isinstance(members, list | set) else set()


def _key(key: Any) -> str:
    if isinstance(key, int) and abs(key) >= 1 << 64:  # Python refuses to write out numbers without end
        return "a large number"
    if isinstance(key, bytes):
        return str(key[:LONGEST])
    return str(key) if isinstance(key, str | int | float) or key is None else _named(key)


def _named(value: Any) -> str:
    """What something is, in a word."""
    if isinstance(value, Made):
        value = value.what
    if isinstance(value, Persistent):  # a class of which the source was saved too
        value = value.id[1] if isinstance(value.id, tuple) and len(value.id) > 1 else None
    if not isinstance(value, Global):
        return "something"
    return printable(f"{value.module[:LONGEST]}.{value.name[:LONGEST]}")


def _count_tensors(made: Made) -> tuple[int, int]:
    """How many tensors lie in something, as far as it is worth counting; and how much was looked at for it."""
    todo: list[Any] = [made]
    seen, count, looked_at = {id(made)}, 0, 0
    while todo and looked_at < MOST_COUNTED:
        value = todo.pop()
        if isinstance(value, Made):
            if value.called in _VIEWS:
                count += 1
                continue
            inside = [*value.args, value.state, *value.members, *(item for pair in value.items for item in pair)]
        elif isinstance(value, dict):
            inside = list(value.values())
        else:
            inside = list(value) if isinstance(value, list | tuple) else []
        looked_at += 1 + len(inside)
        for item in inside:
            if id(item) not in seen and isinstance(item, Made | dict | list | tuple):
                seen.add(id(item))
                todo.append(item)
    return count, looked_at


def _tensor(made: Made) -> StorageView | Unread | None:
    """The tensor that would be made; None when it would be something else."""
    what = made.called
    for _ in range(DEEPEST):
        if what not in _WRAPPED and what != _SUBCLASS:
            break
        if what == _SUBCLASS:  # a class of its own around the same values
            function, _, args = made.args[:3]
            made = Made(function, tuple(args[:_MOST_ARGUMENTS]))
        elif isinstance(made.args[0], Made):
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
    if flags:  # the sign or the imaginary part is to be turned when it is read
        return Unread("a tensor", "it is a negated or conjugated view; save it with .resolve_neg().resolve_conj()", 1)
    if not is_size(offset) or not is_shape(shape) or len(shape) != len(stride):
        raise ValueError
    return StorageView(storage, dtype, offset, shape, stride)


def sizes(value: Any) -> tuple[int, ...]:
    """A torch.Size, or a tuple of sizes. Raises ValueError when it is none."""
    if isinstance(value, Made) and value.called == "torch.Size":
        value = value.args[0] if value.args else ()
    if len(value) > MOST_DIMENSIONS:
        raise ValueError
    found = tuple(value)
    if not all(map(is_size, found)):
        raise ValueError
    return found


def is_size(value: Any) -> TypeGuard[int]:
    """Whether it is a number of elements or bytes that can be. Python refuses to write out numbers without end."""
    return type(value) is int and 0 <= value < 1 << 60


def dtype_name(value: Any) -> str:
    """The name of a dtype. Raises ValueError when it is none."""
    if not isinstance(value, Global) or value.module != "torch":
        raise ValueError
    return value.name


def _storage(value: Any) -> Storage | Unread:
    """What `torch.save` wrote in place of a storage: ("storage", its class, its key, its device, its size)."""
    if isinstance(value, Made) and len(value.args) == 1:  # a typed storage around an untyped one
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
