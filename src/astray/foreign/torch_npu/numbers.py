"""The numbers of a line, as tensors have them: JSON's texts into elements of a dtype, and the other way round.

Python's JSON writes NaN and Infinity as bare words, and so do these dumps. The original made every tensor float32
first; astray writes each number as it is.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.records import Statistics
from astray.stats import DTYPES, Strided, decode, measure

Array = npt.NDArray[Any]

_DECODER = msgspec.json.Decoder(list[int | float])


def read(text: bytes, place: str) -> Array:
    """The numbers between the brackets of a list. Raises RunError when they are none."""
    try:
        found = _parsed(b"[%s]" % text)
        numbers = np.array(found) if found else np.empty(0)
    except (ValueError, OverflowError, RecursionError) as error:
        raise RunError(f"The values of {place} are no numbers: {error}.") from None
    if numbers.dtype.kind not in "iufb" or numbers.ndim != 1:
        raise RunError(f"The values of {place} are no plain list of numbers.")
    return numbers


def _parsed(text: bytes) -> Any:
    """Python's own parser knows NaN and Infinity, and takes ten times as long."""
    try:
        return _DECODER.decode(text)
    except msgspec.MsgspecError:
        return json.loads(text)


def as_elements(numbers: Array, dtype: str, place: str) -> Array:
    """The same as flat elements of a dtype, in the form in which it is stored; complex numbers come in two."""
    kind = DTYPES[dtype]
    if kind.kind == "bool":
        return np.not_equal(numbers, 0)
    if kind.kind == "int":
        with np.errstate(invalid="ignore"):
            whole = numbers.astype(kind.storage)
        if not np.array_equal(whole, numbers):
            raise RunError(f"{place} says that it is {dtype}, and holds {_first_other(numbers, whole)}.")
        return whole
    part = DTYPES[kind.part]
    with np.errstate(over="ignore"):
        if part.storage.kind == "f":
            elements = numbers.astype(part.storage)
        elif kind.part == "bfloat16":
            elements = _bfloat16(numbers.astype(np.float32))
        else:
            elements = _nearest(numbers.astype(np.float32), kind.part)
    return elements.view(kind.storage)


def as_numbers(elements: Array, dtype: str) -> Array:
    """Stored elements as numbers that JSON can write: flat, and complex ones in two."""
    if DTYPES[dtype].kind == "bool":
        return elements.reshape(-1).astype(np.int8)
    plain = elements if elements.dtype.kind in "iuf" and DTYPES[dtype].kind == "int" else decode(elements, dtype)
    return plain.reshape(-1)


def write(numbers: Array, more: tuple[float, ...] = ()) -> str:
    """Numbers as a list of JSON, and some more behind them."""
    plain = [*numbers.tolist(), *more]
    if np.isfinite(numbers).all() and all(map(math.isfinite, more)):
        return msgspec.json.encode(plain).decode()
    return json.dumps(plain)  # which is slow, and has words for what is not finite


def text(name: str) -> str:
    """A name as a string of JSON."""
    return json.dumps(name)


def summary(numbers: Array, known: Statistics | None = None) -> tuple[float, float, float]:
    """Maximum, minimum and mean of all numbers, as torch has them: NaN where there is any, and infinity likewise.

    known: what was measured of all of them before, where `numbers` are perhaps only the first. Of infinities of both
    signs it knows the one that comes first.
    """
    found = known or measure(Strided.from_numpy(numbers), fingerprint=False).statistics
    if found is None or found.nan or (found.max is None and not found.inf):
        return math.nan, math.nan, math.nan
    top, low, mean = (math.nan if one is None else one for one in (found.max, found.min, found.mean))
    if found.inf:
        first = found.first_bad_value
        above = bool(np.isposinf(numbers).any()) or first == math.inf
        below = bool(np.isneginf(numbers).any()) or first == -math.inf
        top, low = math.inf if above else top, -math.inf if below else low
        mean = math.nan if above and below else math.inf if above else -math.inf
        # where nothing else is there, infinity is the other end too
        top, low = (low if math.isnan(top) else top), (top if math.isnan(low) else low)
    return top, low, mean


def _bfloat16(numbers: npt.NDArray[np.float32]) -> Array:
    """The upper half of the bits, rounded to even; a dump of bfloat16 has nothing in the lower."""
    bits = numbers.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _nearest(numbers: npt.NDArray[np.float32], dtype: str) -> Array:
    """The codes of an 8-bit float that stand for these numbers, or for those next to them."""
    codes = np.arange(256, dtype=np.uint8)
    known = decode(codes, dtype)
    order = np.argsort(known[~np.isnan(known)], kind="stable")
    codes, values = codes[~np.isnan(known)][order], known[~np.isnan(known)][order]
    above = np.clip(np.searchsorted(values, numbers), 1, len(values) - 1)
    with np.errstate(invalid="ignore"):
        nearer_below = np.abs(numbers - values[above - 1]) < np.abs(values[above] - numbers)
    found = codes[np.where(nearer_below | (numbers == values[above - 1]), above - 1, above)]
    is_nan = np.isnan(known)
    return np.where(np.isnan(numbers), np.argmax(is_nan).astype(np.uint8) if is_nan.any() else 0, found)


def _first_other(numbers: Array, whole: Array) -> object:
    return numbers[np.flatnonzero(whole != numbers)[0]].item()
