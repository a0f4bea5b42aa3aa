"""The tensors in the pickle of a torch file: each is a view of a storage, by its key.

Read by `torch_files`, for the entries that `pickled_entries` finds. Plain values are kept beside the tensors, other
objects as `Unread`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

from astray.checkpoints.pickled_entries import DEEPEST, ObjectReader, find_entries, module_state
from astray.checkpoints.pickles import Global, Persistent, PickledObject
from astray.checkpoints.stored_tensor import MOST_DIMENSIONS, Unread, extent, is_shape, printable
from astray.stats.dtypes import DTYPES

_MOST_ARGUMENTS = 16  # of the functions that rebuild tensors

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
    """Every tensor in a pickle, in order, and everything else."""
    found = NamedContents({}, {})
    for name, value in find_entries(root, where, ObjectReader(_value, lambda made: made.called in _VIEWS)).items():
        if isinstance(value, StorageView):
            found.tensors[name] = value
        else:
            found.others[name] = value
    return found


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that was pickled whole, by name; None for other values.

    The parameters, buffers and modules that a module has registered are among them.
    """
    if not isinstance(value, PickledObject) or not isinstance(value.state, dict):
        return None
    own = {key: item for key, item in value.state.items() if isinstance(key, str)}
    return own | dict(module_state(value) or ())


def _value(made: PickledObject) -> object:
    """The tensor or the size that an object stands for; None when it is something else."""
    if made.called == "torch.Size" and len(made.args) == 1:
        size = made.args[0]
        is_one = isinstance(size, list | tuple) and len(size) <= MOST_DIMENSIONS
        return tuple(size) if is_one else Unread("torch.Size")
    return _tensor(made)


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
