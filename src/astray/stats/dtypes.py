"""The element types that tensors come in, by name, for every framework alike.

A name is what torch prints after `torch.`; other frameworks map onto it. numpy has no bfloat16 and no 8-bit floats, so
those are held as unsigned integers of their size (`storage`) and widened by `decode`. A complex number is measured as
its real and imaginary part, two real numbers in memory order.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

NumberKind = Literal["float", "int", "bool", "complex"]
Array = npt.NDArray[Any]


class DType(NamedTuple):
    """One element type.

    `eps` is the spacing of the numbers just above 1 (0 for integers, which do not round), `max` the largest finite
    number, `tiny` the smallest positive normal one; those of a complex type are of its parts. `part` is the type of
    the real numbers it is made of: itself, unless it is complex. `safetensors` is None where that format has no name
    for the type.
    """

    name: str
    kind: NumberKind
    itemsize: int
    storage: np.dtype[Any]
    part: str
    eps: float
    max: float
    tiny: float
    safetensors: str | None


class _FloatFormat(NamedTuple):
    """The bits of a float: sign, exponent, mantissa; how its exponent is biased, and which patterns are not numbers."""

    exponent: int
    mantissa: int
    bias: int
    specials: Literal["ieee", "fn", "fnuz", "e8m0"]
    """ieee: the top exponent is infinity and NaN. fn: only all-ones is NaN. fnuz: only minus zero is. e8m0: a bare
    exponent without sign or zero, all-ones is NaN."""


_FORMATS = {
    "float64": _FloatFormat(11, 52, 1023, "ieee"),
    "float32": _FloatFormat(8, 23, 127, "ieee"),
    "float16": _FloatFormat(5, 10, 15, "ieee"),
    "bfloat16": _FloatFormat(8, 7, 127, "ieee"),
    "float8_e4m3fn": _FloatFormat(4, 3, 7, "fn"),
    "float8_e5m2": _FloatFormat(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": _FloatFormat(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": _FloatFormat(5, 2, 16, "fnuz"),
    "float8_e8m0fnu": _FloatFormat(8, 0, 127, "e8m0"),
}

_STORAGE = {"float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": "u2"}

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


def _float(name: str) -> DType:
    form = _FORMATS[name]
    top = (1 << form.exponent) - 1 - (form.specials == "ieee")  # the highest exponent that holds finite numbers
    # "fn" gives the all-ones mantissa of the top exponent to NaN, e8m0 the top exponent itself.
    mantissa = 2.0 - 2.0**-form.mantissa * (2 if form.specials == "fn" else 1)
    largest = mantissa * 2.0 ** (top - form.bias) if form.specials != "e8m0" else 2.0 ** (top - 1 - form.bias)
    # e8m0 has no subnormals: its smallest number has exponent 0, all others keep 0 for them.
    smallest = 2.0 ** ((form.specials != "e8m0") - form.bias)
    storage = np.dtype("<" + _STORAGE.get(name, "u1"))
    eps = 2.0**-form.mantissa
    return DType(name, "float", storage.itemsize, storage, name, eps, largest, smallest, _SAFETENSORS[name])


def _integer(name: str) -> DType:
    storage = np.dtype(name).newbyteorder("<")
    largest = float(np.iinfo(storage).max)
    return DType(
        name, "int", storage.itemsize, storage, name, 0.0, largest, 1.0, f"{name[0].upper()}{name.lstrip('uint')}"
    )


def _complex(name: str, part: str, storage: str) -> DType:
    real = _float(part)
    safetensors = "C64" if name == "complex64" else None
    return real._replace(
        name=name, kind="complex", itemsize=2 * real.itemsize, storage=np.dtype(storage), safetensors=safetensors
    )


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        *map(_float, _FORMATS),
        *map(_integer, ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")),
        DType("bool", "bool", 1, np.dtype("?"), "bool", 0.0, 1.0, 1.0, "BOOL"),
        _complex("complex32", "float16", "<u4"),
        _complex("complex64", "float32", "<c8"),
        _complex("complex128", "float64", "<c16"),
    )
}


def find(name: str) -> DType:
    """The element type of this name; a ValueError names the known ones."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ValueError(f"Unknown dtype {name!r}. Known: {', '.join(DTYPES)}.") from None


@cache
def decode_table(name: str) -> npt.NDArray[np.float64]:
    """The values of the 256 bit patterns of an 8-bit type, read-only.

    >>> float(decode_table("float8_e4m3fn")[0x7E])
    448.0
    """
    dtype = find(name)
    if dtype.itemsize != 1:
        raise ValueError(f"A decode table exists for 8-bit types only; {name} has {8 * dtype.itemsize} bits.")
    patterns = np.arange(256)
    table: npt.NDArray[np.float64]
    if name == "bool":
        table = (patterns != 0).astype(np.float64)
    elif dtype.kind == "int":
        table = patterns.astype(np.uint8).view(dtype.storage).astype(np.float64)
    else:
        table = np.array([_value(pattern, _FORMATS[name]) for pattern in range(256)])
    table.flags.writeable = False
    return table


def _value(pattern: int, form: _FloatFormat) -> float:
    """The value of one 8-bit pattern, from the definition of its format."""
    if form.specials == "e8m0":
        return float("nan") if pattern == 0xFF else 2.0 ** (pattern - form.bias)
    sign = -1.0 if pattern & 0x80 else 1.0
    exponent = (pattern & 0x7F) >> form.mantissa
    mantissa = pattern & ((1 << form.mantissa) - 1)
    if form.specials == "fnuz" and pattern == 0x80:
        return float("nan")
    if form.specials == "fn" and pattern & 0x7F == 0x7F:
        return float("nan")
    if form.specials == "ieee" and exponent == (1 << form.exponent) - 1:
        return float("nan") if mantissa else sign * float("inf")
    fraction = mantissa / (1 << form.mantissa)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - form.bias)
    return sign * (1.0 + fraction) * 2.0 ** (exponent - form.bias)


def decode(raw: Array, dtype: str) -> npt.NDArray[np.float32] | npt.NDArray[np.float64]:
    """Widen raw elements to numbers: float32 for floats that fit in it, float64 for everything else.

    Exact, but for 64-bit integers beyond 2⁵³, which float64 cannot hold. Complex elements gain a last axis of length 2.

    >>> decode(np.array([0x3F80, 0xC000], np.uint16), "bfloat16")
    array([ 1., -2.], dtype=float32)
    """
    kind = find(dtype)
    raw = np.asarray(raw)
    if raw.dtype.itemsize != kind.itemsize:
        raise ValueError(f"{dtype} elements are {kind.itemsize} bytes; the array holds {raw.dtype} of {raw.itemsize}.")
    if kind.kind == "complex":
        part = find(kind.part)
        return decode(np.ascontiguousarray(raw).reshape(*raw.shape, 1).view(part.storage), kind.part)
    if kind.itemsize == 1:
        table = decode_table(dtype)
        return (table.astype(np.float32) if kind.kind == "float" else table)[raw.view(np.uint8)]
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = raw.view(kind.storage)
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        if kind.kind == "float" and kind.itemsize <= 4:
            return numbers.astype(np.float32)
        return numbers.astype(np.float64)


def widen(raw: Array, dtype: str) -> npt.NDArray[np.float64]:
    """The same as float64 throughout. A NaN of any bits is one, and no warning: numpy has one for signalling NaN."""
    with np.errstate(invalid="ignore"):
        return decode(raw, dtype).astype(np.float64, copy=False)
