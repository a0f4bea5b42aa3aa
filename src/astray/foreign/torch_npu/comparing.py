"""`compare` of torch_npu.hooks.tools: two dumps, operator by operator, as a CSV with the columns of that tool.

NPU is the candidate, bench the reference. Operators are paired in order by their names, and tensors by their positions;
a tensor without a partner has a row too. The metrics are those of `astray.compare`, over the numbers that both dumps
hold.
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
from astray.foreign.torch_npu.hooks import settle
from astray.foreign.torch_npu.lines import summarise
from astray.foreign.torch_npu.names import SAMPLE, DumpedTensor, Floats
from astray.foreign.torch_npu.reader import group_calls, read
from astray.foreign.torch_npu.writer import rank_path
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
    npu, bench = (list(group_calls(read(_existing(Path(path))).tensors)) for path in (pkl_path1, pkl_path2))
    pairs = _pair_operators(npu, bench, shape_flag)
    has_pairs = any(npu_tensors and bench_tensors for npu_tensors, bench_tensors in pairs)
    if not has_pairs and not (shape_flag and _share_names(npu, bench)):
        raise CompareError(f"{pkl_path1} and {pkl_path2} have no operator in common. Were they dumped by one program?")
    with (
        atomic_file(Path(output_path)) as file,
        file.open("w", newline="", encoding="utf-8", errors="backslashreplace") as output,
    ):
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row for pair in pairs for row in _rows(*pair))


def _share_names(npu: Sequence[Operator], bench: Sequence[Operator]) -> bool:
    """Whether the dumps have operators of the same name, whose shapes then differ."""
    npu_names, bench_names = ({tensors[0].name.operator for tensors in operators} for operators in (npu, bench))
    return not npu_names.isdisjoint(bench_names)


def _existing(path: Path) -> Path:
    """The path, or where that does not exist, the file that this rank has written for it."""
    rank, world_size = rank_and_world_size(os.environ)
    own_path = rank_path(path, rank, world_size, folder=False)
    path = own_path if not path.exists() and own_path.exists() else path
    if not path.exists():
        raise RunError(f"{path} does not exist. Was set_dump_path called with this name, and the model run since?")
    return path


# -- pairs -----------------------------------------------------------------------------------------------------------


def _pair_operators(
    npu: Sequence[Operator], bench: Sequence[Operator], by_shape: bool
) -> list[tuple[Operator, Operator]]:
    """The operators of both dumps in one order, an empty list where there is no partner."""
    npu_rows, bench_rows = pair_streams(*_streams(npu, bench, by_shape))
    partner = np.full(len(npu), -1)
    partner[npu_rows] = bench_rows
    aligned = merge(partner, len(bench))
    return [
        (npu[i] if i >= 0 else [], bench[j] if j >= 0 else [])
        for i, j in zip(aligned.reference.tolist(), aligned.candidate.tolist(), strict=True)
    ]


def _streams(npu: Sequence[Operator], bench: Sequence[Operator], by_shape: bool) -> tuple[CallStream, CallStream]:
    """The operators of both dumps as integer codes: of their names, and of what makes a pair more likely."""
    codes: dict[object, int] = {}

    def coded(keys: Sequence[object]) -> Ints:
        return np.array([codes.setdefault(key, len(codes)) for key in keys], np.int64)

    streams = []
    for operators in (npu, bench):
        names = [tensors[0].name.operator for tensors in operators]
        forms = [tuple((tensor.name.unnumbered, tensor.shape) for tensor in tensors) for tensors in operators]
        tensor_names = [tuple(tensor.name.unnumbered for tensor in tensors) for tensors in operators]
        kind = coded([("form", *form) for form in forms]) if by_shape else coded(names)
        streams.append(CallStream(kind, coded(forms), coded(tensor_names), np.full(len(operators), np.nan)))
    return streams[0], streams[1]


def _rows(npu: Operator, bench: Operator) -> Iterator[list[str]]:
    """The rows of a pair of operators: the tensors of npu in order, then those that only bench has."""
    bench_tensors = {tensor.name.unnumbered: tensor for tensor in bench}
    reason = " operator has no partner" if not npu or not bench else " tensor has no partner in the other operator"
    for tensor in npu:
        partner = bench_tensors.pop(tensor.name.unnumbered, None)
        if partner:
            yield _row(tensor, partner)
        else:
            yield [*_cells(tensor, None), "", "", "", f"only in the NPU dump: this{reason}"]
    for tensor in bench_tensors.values():
        yield [*_cells(None, tensor), "", "", "", f"only in the bench dump: this{reason}"]


def _cells(npu: DumpedTensor | None, bench: DumpedTensor | None) -> list[str]:
    sides = [
        ("", "", "") if tensor is None else (tensor.text, f"torch.{tensor.dtype}", str(list(tensor.shape)))
        for tensor in (npu, bench)
    ]
    return [cell for column in zip(*sides, strict=True) for cell in column]


# -- numbers ---------------------------------------------------------------------------------------------------------


def _row(npu: DumpedTensor, bench: DumpedTensor) -> list[str]:
    if npu.shape != bench.shape:
        return [*_cells(npu, bench), *(IMPOSSIBLE,) * 3, "the shapes differ"]
    try:
        npu_numbers, bench_numbers, notes = _comparable_numbers(npu, bench)
    except RunError as error:
        return [*_cells(npu, bench), *(IMPOSSIBLE,) * 3, str(error)]
    result = contrast(Strided.from_numpy(bench_numbers), Strided.from_numpy(npu_numbers))
    return [*_cells(npu, bench), *_metrics(result), "; ".join([*notes, *_notes(result)])]


def _metrics(result: Contrast) -> tuple[str, str, str]:
    """The metrics over what is finite on both sides; nan where an element is not finite on one side only."""
    if not result.finite or result.nonfinite_mismatch:
        return "nan", "nan", "nan%"
    cosine = math.nan if result.cosine is None else result.cosine
    return str(cosine), str(metrics.rmse(result)), f"{round(metrics.mape(result) * 100, 4)}%"


def _comparable_numbers(npu: DumpedTensor, bench: DumpedTensor) -> tuple[Floats, Floats, list[str]]:
    """The numbers that both dumps hold, and a note if those are samples: a side with all values is sampled then."""
    npu_numbers, bench_numbers = npu.numbers(), bench.numbers()
    notes = []
    if npu.is_sampled or bench.is_sampled:
        npu_numbers = npu_numbers if npu.is_sampled else _sample(npu_numbers)
        bench_numbers = bench_numbers if bench.is_sampled else _sample(bench_numbers)
        notes.append(f"sampled: {counted(len(npu_numbers) - 3, 'value')}, max, min and mean")
    if len(npu_numbers) != len(bench_numbers):
        raise RunError(f"the dumps hold {len(npu_numbers)} and {len(bench_numbers)} numbers of it")
    return npu_numbers, bench_numbers, notes


def _sample(numbers: Floats) -> Floats:
    """What a sampled line would hold of these numbers."""
    return np.array([*numbers[:SAMPLE], *summarise(numbers)])


def _notes(result: Contrast) -> Iterator[str]:
    """Why a metric is nan, or leaves out elements."""
    if not result.count:
        yield "the tensors are empty"
    mismatched, same = result.nonfinite_mismatch, result.count - result.finite - result.nonfinite_mismatch
    if mismatched:
        yield f"{mismatched} of {result.count} numbers are NaN or infinite on one side, and something else on the other"
        return
    if same:
        yield f"{same} of {result.count} numbers are the same NaN or infinity on both sides, and are left out"
    if result.finite and result.cosine is None:
        zero = [name for name, l2 in (("NPU", result.l2_candidate), ("bench", result.l2_reference)) if not l2]
        verb = "is a zero vector" if len(zero) == 1 else "are zero vectors"
        yield f"cosine is nan because {' and '.join(zero)} {verb}"
    left_out = result.finite - result.rel_count
    if left_out:
        yield f"MAPE leaves out {left_out} of {result.finite} numbers that are 0 in bench"
