"""Files that `paddle.save` wrote: `.pdparams`, `.pdopt`. Each is one pickle, which holds the values of its tensors.

The pickle is read as data, and values stay in the file until they are needed. Any other pickle of numpy arrays is read
too.

Paddle saves a bfloat16 tensor as an array of uint16, and takes every array of uint16 for bfloat16 when it loads it. So
it is here, in Paddle's own files. An 8-bit float it saves and loads as int8: what it was is not in the file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from astray.checkpoints import numpy_objects
from astray.checkpoints.numpy_objects import PickledArray
from astray.checkpoints.pickled_entries import ObjectReader, find_entries
from astray.checkpoints.pickles import Payload, PickledObject, read_pickle_file
from astray.checkpoints.stored_tensor import (
    ByteSource,
    CheckpointContents,
    EncodedBytes,
    Files,
    Index,
    Stored,
    StoredBox,
    TensorSpec,
    Unread,
    is_shape,
    row_major,
)
from astray.errors import CheckpointError

ENDINGS = (".pdparams", ".pdopt", ".pdtensor")
"""The suffixes that Paddle recommends; `paddle.save` itself takes any."""

NAMES = "StructuredToParameterName@@"
"""An entry with the name of each parameter in the program, such as `linear_0.w_0` for `fc.weight`."""

SLICED = "UnpackBigParamInfor@@"
"""An entry that says which entries are slices of a tensor of more than a gigabyte: those of protocols below 4."""

_NAMED = ("builtins.tuple", "__builtin__.tuple")
_EVALUATED = ("builtins.eval", "__builtin__.eval")
_AGAIN = "Copy it again from where it was made."
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError)


def open_paddle(path: Path, files: Files) -> CheckpointContents:
    """The tensors of a pickle of arrays, in its order."""
    content, end = read_pickle_file(path, files)
    is_paddle = path.suffix in ENDINGS or (isinstance(content, dict) and not {NAMES, SLICED}.isdisjoint(content))
    sliced = content.pop(SLICED, {}) if isinstance(content, dict) else {}

    def value_of(made: PickledObject) -> object:
        nonlocal is_paddle
        saved = _saved_tensor(made)
        is_paddle |= saved is not None
        return numpy_objects.value_of(made if saved is None else saved)

    def is_tensor(made: PickledObject) -> bool:
        return numpy_objects.is_array(made)

    arrays: dict[str, PickledArray] = {}
    others: dict[str, object] = {}
    for name, value in find_entries(content, str(path), ObjectReader(value_of, is_tensor)).items():
        if isinstance(value, PickledArray):
            arrays[name] = value
        else:
            others[name] = value
    if not arrays:
        raise CheckpointError(
            f"{path} is a pickle, but none that torch.save or paddle.save wrote of tensors. Pickles run code when they "
            "are loaded, so astray loads none: save the tensors with one of these, or as safetensors."
        )
    if files.size(path) > end:
        others["(end)"] = Unread(f"{files.size(path) - end:,} bytes behind the end of the pickle")
    tensors = {name: _stored(path, name, array, is_paddle) for name, array in arrays.items()}
    kind = "paddle" if is_paddle else "pickle of numpy arrays"
    return CheckpointContents(kind, (path,), _joined(path, tensors, sliced), others)


def _saved_tensor(made: PickledObject) -> PickledObject | None:
    """The array of a tensor in the two forms in which `paddle.save` writes one that is not in a flat dict.

    These are a call of `tuple`, of its name and its array; and for a static program's a call of `eval`.
    """
    held: Any = None
    match made.args:
        case ((str(), array),) if made.called in _NAMED:
            held = array
        case ("data", {"data": array}) if made.called in _EVALUATED:
            held = array
    return held if isinstance(held, PickledObject) and numpy_objects.is_array(held) else None


def _stored(path: Path, name: str, array: PickledArray, is_paddle: bool) -> Stored:
    """An array with the place of its bytes. One that cannot be there is an error: the file was cut or damaged."""
    dtype = "bfloat16" if array.dtype == "uint16" and is_paddle else array.dtype
    spec, data = TensorSpec(dtype, array.shape), array.data
    is_text = isinstance(data, Payload) and data.encoded
    nbytes = len(data) if isinstance(data, bytes) else data.nbytes
    if not spec.nbytes <= nbytes <= spec.nbytes * (2 if is_text else 1):
        raise CheckpointError(
            f"{path} is damaged: {name!r} is {dtype} of shape {list(spec.shape)}, which takes {spec.nbytes:,} bytes, "
            f"and it has {nbytes:,}. {_AGAIN}"
        )
    source: ByteSource = path
    start = 0
    if isinstance(data, bytes):
        source = data
    elif data.encoded:
        source = EncodedBytes(path, data.start, data.nbytes)
    else:
        start = data.start
    box = StoredBox(source, start, (0,) * len(spec.shape), spec.shape, array.stride)
    return Stored(spec, lambda: (box,), array.made)


# -- tensors in slices -------------------------------------------------------------------------------------------------


def _joined(path: Path, tensors: dict[str, Stored], sliced: Any) -> dict[str, Stored]:
    """The tensors, with those in one piece that are saved in slices."""
    try:
        described = {
            name: (_shape(facts["OriginShape"]), [str(part) for part in facts["slices"]])
            for name, facts in sliced.items()
        }
    except _MALFORMED:
        raise CheckpointError(f"{path} is damaged: it does not say how its tensors are sliced. {_AGAIN}") from None
    parts = Counter(part for _, slices in described.values() for part in slices)
    joined = {name: stored for name, stored in tensors.items() if name not in parts}
    for name, (shape, slices) in described.items():
        problem = _problem_of(slices, shape, tensors)
        if any(parts[part] > 1 for part in slices):
            problem = "one of them is used twice"
        elif name in joined:
            problem = "another entry has its name"
        if problem is not None:
            whole = f"{name!r} of shape {list(shape)} is in {len(slices)} slices"
            raise CheckpointError(f"{path} is damaged: {whole}, and {problem}. {_AGAIN}")
        joined[name] = _join(TensorSpec(tensors[slices[0]].spec.dtype, shape), [tensors[part] for part in slices])
    return joined


def _problem_of(slices: Sequence[str], shape: Index, tensors: Mapping[str, Stored]) -> str | None:
    """Why slices do not make up a tensor of this shape; None where they do."""
    if not slices or not tensors.keys() >= set(slices):
        return "not all of them are there"
    specs = [tensors[part].spec for part in slices]
    if any(len(spec.shape) != 1 for spec in specs):
        return "one of them is not flat"
    if len({spec.dtype for spec in specs}) > 1:
        return "their dtypes differ"
    size = sum(spec.size for spec in specs)
    return f"they have {size:,} elements" if size != math.prod(shape) else None


def _shape(shape: Any) -> Index:
    if not isinstance(shape, tuple | list) or not is_shape(shape):
        raise ValueError
    return tuple(shape)


def _join(spec: TensorSpec, slices: Sequence[Stored]) -> Stored:
    """A tensor of consecutive runs of its elements."""
    itemsize = spec.nbytes // spec.size if spec.size else 0
    boxes, begin = [], 0
    for part in slices:
        (run,) = part.locate()
        for offset, shape, first in _boxes_of_run(spec.shape, begin, begin + part.spec.size):
            start = run.start + (first - begin) * itemsize
            boxes.append(StoredBox(run.file, start, offset, shape, row_major(spec.shape)))
        begin += part.spec.size
    return Stored(spec, lambda: boxes, tuple(part.place for part in slices))


def _boxes_of_run(shape: Index, begin: int, end: int) -> Iterator[tuple[Index, Index, int]]:
    """The boxes that make up a run of elements in row-major order: offset, shape, and the number of the first element.

    >>> list(_boxes_of_run((3, 4), 3, 9))
    [((0, 3), (1, 1), 3), ((1, 0), (1, 4), 4), ((2, 0), (1, 1), 8)]
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape), begin
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows
    edges = [(begin, min(first * row, end)), (max(last * row, begin), end)] if first <= last else [(begin, end)]
    middle = [((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * row)] if first < last else []
    for number, (low, high) in enumerate(edges):
        outer = low // row
        for offset, inner, start in _boxes_of_run(shape[1:], low - outer * row, high - outer * row):
            yield (outer, *offset), (1, *inner), start + outer * row
        if number == 0:
            yield from middle
