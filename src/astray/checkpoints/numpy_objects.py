"""The numpy arrays and numbers in a pickle: dtype, shape, order, and where the bytes are.

Read by `paddle_files`, for the entries that `pickled_entries` finds. An array's bytes are in the pickle itself, as they
are or, in a pickle of protocol 2, as a text.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from astray.checkpoints.pickles import Payload, PickledObject
from astray.checkpoints.stored_tensor import Unread, is_shape, printable, row_major

_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_FROM_BUFFER = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")
_SCALAR = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_DTYPE = "numpy.dtype"
_BYTES = ("builtins.bytes", "__builtin__.bytes")

DTYPES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
    "b1": "bool",
    "c8": "complex64",
    "c16": "complex128",
}
"""What numpy's pickles call a dtype."""


class PickledArray(NamedTuple):
    """An array in a pickle. `stride` counts elements; `data` is its bytes, or where they are in the file.

    made: the object in the pickle, which is one and the same for all names of the array.
    """

    made: PickledObject
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: bytes | Payload


def is_array(made: PickledObject) -> bool:
    """Whether an object is an array."""
    return made.called in _RECONSTRUCT or made.called in _FROM_BUFFER


def value_of(made: PickledObject) -> PickledArray | Unread | complex | None:
    """The array or number that an object stands for; None when it is something else.

    Raises ValueError, TypeError or IndexError where its parts are not those of an array.
    """
    if made.called in _RECONSTRUCT:
        _, shape, dtype, is_fortran, data = made.state
    elif made.called in _FROM_BUFFER:
        data, dtype, shape, order = made.args
        is_fortran = order == "F"
    elif made.called in _SCALAR:
        return _number(*made.args)
    else:
        return None
    code = _code(dtype)
    if isinstance(code, Unread):
        return code
    if not isinstance(shape, tuple) or not is_shape(shape):
        raise ValueError
    stride = _column_major(shape) if is_fortran else row_major(shape)
    return PickledArray(made, DTYPES[code], shape, stride, _data(data))


def _code(dtype: Any) -> str | Unread:
    """The code of a dtype, without its byte order."""
    if not isinstance(dtype, PickledObject) or dtype.called != _DTYPE or not isinstance(dtype.args[0], str):
        raise ValueError
    code = dtype.args[0]
    order = dtype.state[1] if dtype.state is not None else "|"
    if code not in DTYPES:
        return Unread(f"an array of {printable(code)}", "astray does not know this dtype", 1)
    if order == ">" and not code.endswith("1"):
        return Unread("an array", "its numbers have the byte order of a big-endian machine; save it on this one", 1)
    return code


def _data(data: Any) -> bytes | Payload:
    if isinstance(data, bytes | Payload):
        return data
    if isinstance(data, str):  # a string of Python 2
        return data.encode("latin-1")
    if isinstance(data, PickledObject) and data.called in _BYTES and not data.args:
        return b""
    if isinstance(data, PickledObject) and data.called == "_codecs.encode" and data.args[1:] == ("latin1",):
        text = data.args[0]
        if isinstance(text, Payload):
            return text
        if isinstance(text, str):
            return text.encode("latin-1")
    raise ValueError


def _number(dtype: Any, data: Any) -> complex | Unread:
    code = _code(dtype)
    if isinstance(code, Unread):
        return code
    raw = _data(data)
    if isinstance(raw, Payload):
        raise ValueError
    (number,) = np.frombuffer(raw, f"<{code}").tolist()
    return number  # type: ignore[no-any-return]


def _column_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of an array in Fortran's order, in elements."""
    return tuple(accumulate((max(size, 1) for size in shape[:-1]), int.__mul__, initial=1)) if shape else ()
