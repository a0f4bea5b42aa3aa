"""`compare` of torch_npu.hooks.tools: two dumps, operator by operator, as a CSV with the columns its users know.

Operators are paired in order by what was called, and tensors by their places; what has no partner is a row too. The
metrics are those of `astray.compare`, between all numbers that the two lines have in common.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from astray.comparison.measure import metrics
from astray.comparison.pair.alignment import merge
from astray.comparison.pair.sequence_alignment import CallStream, pair_streams
from astray.comparison.rows import Ints
from astray.errors import CompareError, RunError
from astray.foreign import torch_npu
from astray.foreign.torch_npu import numbers
from astray.foreign.torch_npu.calls import calls
from astray.foreign.torch_npu.dumping import settle
from astray.foreign.torch_npu.names import SAMPLE, DumpedTensor, Floats
from astray.foreign.torch_npu.writer import place_of
from astray.process import rank_and_world_size
from astray.report.atomic_files import atomic_file
from astray.stats import Contrast, Strided, contrast
from astray.wording import counted

COLUMNS = (
    "NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape", "Bench Tensor Shape",
    "Cosine", "RMSE", "MAPE", "Note",
)  # fmt: skip

IMPOSSIBLE = "cannot be calculated"

Operator = list[DumpedTensor]


def compare(
    pkl_path1: str | os.PathLike[str],
    pkl_path2: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    shape_flag: bool = False,
) -> None:
    """Compare two dumps, tensor by tensor, and write a CSV.

    >>> compare("./npu_model.pkl", "./cpu_model.pkl", "./result.csv")

    pkl_path1: the dump that may be wrong, and pkl_path2: the one that is right; each a file, or a folder of arrays.
    shape_flag: operators are the same only if they also have as many tensors, of the same shapes.

    Raises RunError when a dump cannot be read, CompareError when the two have no operator of one name.
    """
    settle()
    npu, bench = (list(calls(torch_npu.read(_found(Path(path))).tensors)) for path in (pkl_path1, pkl_path2))
    pairs = _paired(npu, bench, shape_flag)
    if not any(one and other for one, other in pairs) and not (shape_flag and _share_names(npu, bench)):
        raise CompareError(f"{pkl_path1} and {pkl_path2} have no operator in common. Were they dumped by one program?")
    with (
        atomic_file(Path(output_path)) as file,
        file.open("w", newline="", encoding="utf-8", errors="backslashreplace") as output,
    ):
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row for one, other in pairs for row in _rows(one, other))


def _share_names(npu: Sequence[Operator], bench: Sequence[Operator]) -> bool:
    """Whether an operator of one has the name of one of the other: it is their shapes that differ."""
    one, other = ({tensors[0].name.called for tensors in operators} for operators in (npu, bench))
    return not one.isdisjoint(other)


def _found(path: Path) -> Path:
    """The path, or what this rank has written in its place."""
    rank, world_size = rank_and_world_size(os.environ)
    own = place_of(path, rank, world_size, folder=False)
    place = own if not path.exists() and own.exists() else path
    if not place.exists():
        raise RunError(f"{place} does not exist. Was set_dump_path called with this name, and the model run since?")
    return place


# -- pairs -----------------------------------------------------------------------------------------------------------


def _paired(npu: Sequence[Operator], bench: Sequence[Operator], shapes: bool) -> list[tuple[Operator, Operator]]:
    """The operators of both in one order, an empty one where there is no partner."""
    left, right = pair_streams(*_streams(npu, bench, shapes))
    partner = np.full(len(npu), -1)
    partner[left] = right
    aligned = merge(partner, len(bench))
    return [
        (npu[i] if i >= 0 else [], bench[j] if j >= 0 else [])
        for i, j in zip(aligned.reference.tolist(), aligned.candidate.tolist(), strict=True)
    ]


def _streams(npu: Sequence[Operator], bench: Sequence[Operator], shapes: bool) -> tuple[CallStream, CallStream]:
    """Operators as numbers: what they are called, and what makes a pair more likely."""
    words: dict[object, int] = {}

    def coded(keys: Sequence[object]) -> Ints:
        return np.array([words.setdefault(key, len(words)) for key in keys], np.int64)

    streams = []
    for operators in (npu, bench):
        called = [one[0].name.called for one in operators]
        forms = [tuple((tensor.name.unnumbered, tensor.shape) for tensor in one) for one in operators]
        names = [tuple(tensor.name.unnumbered for tensor in one) for one in operators]
        kind = coded([("form", *form) for form in forms]) if shapes else coded(called)
        streams.append(CallStream(kind, coded(forms), coded(names), np.full(len(operators), np.nan)))
    return streams[0], streams[1]


def _rows(npu: Operator, bench: Operator) -> Iterator[list[str]]:
    """The rows of a pair of operators: those of the first in its order, then what only the second has."""
    others = {tensor.name.unnumbered: tensor for tensor in bench}
    lone = " operator has no partner" if not npu or not bench else " tensor has no partner in the other operator"
    for tensor in npu:
        other = others.pop(tensor.name.unnumbered, None)
        yield _row(tensor, other) if other else _one_sided(tensor, None, f"only in the NPU dump: this{lone}")
    for tensor in others.values():
        yield _one_sided(None, tensor, f"only in the bench dump: this{lone}")


def _one_sided(npu: DumpedTensor | None, bench: DumpedTensor | None, note: str) -> list[str]:
    return [*_cells(npu, bench), "", "", "", note]


def _cells(npu: DumpedTensor | None, bench: DumpedTensor | None) -> list[str]:
    sides = [
        ("", "", "") if one is None else (one.text, f"torch.{one.dtype}", str(list(one.shape))) for one in (npu, bench)
    ]
    return [cell for both in zip(*sides, strict=True) for cell in both]


# -- numbers ---------------------------------------------------------------------------------------------------------


def _row(npu: DumpedTensor, bench: DumpedTensor) -> list[str]:
    if npu.shape != bench.shape:
        return [*_cells(npu, bench), *(IMPOSSIBLE,) * 3, "the shapes differ"]
    try:
        here, there, label = _common(npu, bench)
    except RunError as error:
        return [*_cells(npu, bench), *(IMPOSSIBLE,) * 3, str(error)]
    found = contrast(Strided.from_numpy(there), Strided.from_numpy(here))
    notes = [*label, *_remarks(found)]
    return [*_cells(npu, bench), *_metrics(found), "; ".join(notes)]


def _metrics(found: Contrast) -> tuple[str, str, str]:
    """The metrics over what is finite on both sides; nan where it is not the same that is not finite."""
    if not found.finite or found.nonfinite_mismatch:
        return "nan", "nan", "nan%"
    cosine = math.nan if found.cosine is None else found.cosine
    return str(cosine), str(metrics.rmse(found)), f"{round(metrics.mape(found) * 100, 4)}%"


def _common(npu: DumpedTensor, bench: DumpedTensor) -> tuple[Floats, Floats, list[str]]:
    """What both have: every value, or what a sampled line has, which is made of the other side where that has all."""
    here, there = npu.numbers(), bench.numbers()
    if not npu.is_sampled and not bench.is_sampled:
        label = []
    else:
        here = here if npu.is_sampled else _sampled(here)
        there = there if bench.is_sampled else _sampled(there)
        label = [f"sampled: {counted(len(here) - 3, 'value')}, max, min and mean"]
    if len(here) != len(there):
        raise RunError(f"the dumps hold {len(here)} and {len(there)} numbers of it")
    return here, there, label


def _sampled(whole: Floats) -> Floats:
    return np.array([*whole[:SAMPLE], *numbers.summary(whole)])


def _remarks(found: Contrast) -> Iterator[str]:
    """Why a number is nan, or does not tell of all elements."""
    if not found.count:
        yield "the tensors are empty"
    odd, same = found.nonfinite_mismatch, found.count - found.finite - found.nonfinite_mismatch
    if odd:
        yield f"{odd} of {found.count} numbers are NaN or infinite on one side, and something else on the other"
        return
    if same:
        yield f"{same} of {found.count} numbers are the same NaN or infinity on both sides, and are left out"
    if found.finite and found.cosine is None:
        zero = [name for name, l2 in (("NPU", found.l2_candidate), ("bench", found.l2_reference)) if not l2]
        verb = "is a zero vector" if len(zero) == 1 else "are zero vectors"
        yield f"cosine is nan because {' and '.join(zero)} {verb}"
    left_out = found.finite - found.rel_count
    if left_out:
        yield f"MAPE leaves out {left_out} of {found.finite} numbers that are 0 in bench"
