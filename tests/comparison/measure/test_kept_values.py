"""Slices and samples: what two sides have in common, and what is said of the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.comparison.comparison import compare
from astray.comparison.measure import measurements
from astray.comparison.measure.evidence import KeptSelection, KeptValues, shared_source, source_labels, with_part
from astray.comparison.verdict import EvidenceSource
from astray.stats.kernels import contrast, sample_positions

RIGHT = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
PART = "0:1, ..., :2"
STATISTICS = frozenset({"stats", "fingerprint"})


def kept(builder_keep: str, part: str | None = None) -> dict:
    return {"keep": STATISTICS | {builder_keep}, "part": part}


WHOLE, SLICE, SAMPLE = kept("tensors"), kept("tensors", PART), kept("sample")
SAMPLE_OF_SLICE, OTHER_SLICE = kept("sample", PART), kept("tensors", "1:")


def judged(runs, one, other, candidate, reference=RIGHT, **changes):
    """The row of a pair of tensors of which the two sides kept different things, and the comparison."""
    sides = []
    for array, kinds in ((reference, one), (candidate, other)):
        builder = runs.Builder()
        builder.tensor(builder.call("site"), "output", "out", array, **(kinds | changes))
        sides.append(builder.run)
    diff = compare(*sides)
    return diff.pairs.row(0), diff


def off(index, by: float = 100) -> np.ndarray:
    array = RIGHT.copy()
    array[index] += by
    return array


@pytest.mark.parametrize(("one", "other"), [(SLICE, SLICE), (SLICE, WHOLE), (WHOLE, SLICE)])
def test_values_of_the_same_slice(runs, one, other):
    row, diff = judged(runs, one, other, off(np.s_[0, 1, 1]))
    assert (row["verdict"], row["source"]) == ("diverged", f"values of the slice {PART}")
    assert (row["different"], row["max_abs"], row["mean_reference"]) == (1, 100, RIGHT[0:1, ..., :2].mean())
    assert diff.sources == {f"values of the slice {PART}": 1}
    assert row["reason"] is None


@pytest.mark.parametrize(("one", "other"), [(SLICE, SLICE), (SLICE, WHOLE), (WHOLE, SLICE)])
def test_a_difference_outside_the_slice_is_seen_by_the_statistics(runs, one, other):
    row, diff = judged(runs, one, other, off(np.s_[1, 1, 1]))
    assert (row["verdict"], row["source"]) == ("diverged", f"values of the slice {PART}")
    assert (row["different"], row["error"]) == (0, pytest.approx((100 + RIGHT[1, 1, 1] - 24) / 24))
    assert row["reason"] == "every value of the slice is the same"
    assert diff.first.magnitude == 100 + RIGHT[1, 1, 1] - 24


@pytest.mark.parametrize("outside", [False, True])
def test_a_swap_is_seen_whether_in_the_slice_or_not(runs, outside):
    other = RIGHT.copy()
    where = 1 if outside else 0
    other[where, 0, :2] = RIGHT[where, 0, 1::-1]
    row, _ = judged(runs, SLICE, SLICE, other)
    assert row["verdict"] == "diverged"
    assert math.isnan(row["error"]) == outside
    assert "the same values in another order" in row["reason"]


def test_an_equal_slice_alone_proves_nothing(runs):
    nothing_else = {"keep": {"tensors"}}
    row, _ = judged(runs, SLICE, SLICE, off(np.s_[1, 1, 1]), **nothing_else)
    assert (row["verdict"], row["reason"]) == ("rounding", "every value of the slice is the same")
    row, _ = judged(runs, SLICE, SLICE, RIGHT, **nothing_else)
    assert row["verdict"] == "rounding"
    row, _ = judged(runs, SLICE, SLICE, RIGHT, keep={"tensors", "stats"})
    assert (row["verdict"], row["source"]) == ("identical", f"values of the slice {PART}")
    row, _ = judged(runs, SLICE, SLICE, RIGHT)
    assert (row["verdict"], row["source"]) == ("identical", "fingerprint")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SAMPLE_OF_SLICE, SAMPLE_OF_SLICE),
        (SAMPLE_OF_SLICE, SLICE),
        (SLICE, SAMPLE_OF_SLICE),
        (SAMPLE_OF_SLICE, WHOLE),
        (WHOLE, SAMPLE_OF_SLICE),
    ],
)
@pytest.mark.parametrize("seen", [True, False])
def test_a_sample_of_a_slice(runs, one, other, seen):
    part = RIGHT[0:1, ..., :2]
    sampled = sample_positions(part.size, 4)
    missed = np.setdiff1d(np.arange(part.size), sampled)
    wrong = RIGHT.copy()
    wrong[(0, *np.unravel_index((sampled if seen else missed)[0], part.shape[1:]))] += 100
    row, _ = judged(runs, one, other, wrong)
    assert (row["verdict"], row["source"]) == ("diverged", f"sample of the slice {PART}")
    assert (row["different"], row["max_abs"]) == ((1, 100) if seen else (0, 0))
    assert ("every sampled value is the same" in (row["reason"] or "")) == (not seen)


@pytest.mark.parametrize(
    ("one", "other"), [(SLICE, OTHER_SLICE), (SLICE, SAMPLE), (SAMPLE, SLICE), (SAMPLE_OF_SLICE, SAMPLE)]
)
def test_values_that_the_other_side_did_not_keep_fall_back_on_statistics(runs, one, other):
    row, diff = judged(runs, one, other, RIGHT * 2)
    assert (row["verdict"], row["source"], row["error"]) == ("diverged", "statistics", 1)
    assert row["reason"] == (
        "each side kept values that the other did not (another slice or sample): they were not compared"
    )
    assert math.isnan(row["max_abs"])
    assert diff.sources == {"statistics": 1}


def test_values_in_common_neither_needs_nor_gets_a_reason_when_only_one_side_kept_any(runs):
    row, _ = judged(runs, SLICE, {"keep": {"stats"}}, RIGHT * 2)
    assert (row["source"], row["reason"]) == ("statistics", None)


@pytest.mark.parametrize("other", [WHOLE, kept("tensors", "7:9")])
def test_a_slice_outside_of_the_tensor_holds_nothing(runs, other):
    row, _ = judged(runs, kept("tensors", "7:9"), other, RIGHT * 2)
    assert (row["verdict"], row["source"], row["reason"]) == ("diverged", "statistics", None)


def test_a_slice_that_cannot_be_read_falls_back(runs):
    sides = [runs.Builder(keep="stats,tensors") for _ in range(2)]
    for builder, factor in zip(sides, (1, 2), strict=True):
        builder.tensor(builder.call("site"), "output", "out", RIGHT * np.float32(factor), part=PART)
    sides[1].rank().unreadable.add(0)
    row = compare(*(builder.run for builder in sides)).pairs.row(0)
    assert (row["verdict"], row["source"]) == ("diverged", "statistics")
    assert row["reason"] == "the kept values could not be read"


@pytest.mark.parametrize("dead", [0, 1e-9])
def test_a_slice_of_almost_nothing_is_judged_beside_the_whole(runs, dead):
    """What is zero but for rounding in the slice is not a divergence when the numbers around it are not small."""
    reference, candidate = RIGHT.copy(), RIGHT.copy()
    reference[0, :, :2], candidate[0, :, :2] = dead, -3e-9
    row, _ = judged(runs, SLICE, SLICE, candidate, reference)
    assert (row["verdict"], row["source"], row["reason"]) == ("rounding", f"values of the slice {PART}", None)
    alone, _ = judged(runs, SLICE, SLICE, candidate, reference, keep={"tensors"})
    assert alone["verdict"] == "diverged"


def test_dtypes_that_numpy_lacks_and_complex_ones(runs):
    bits = (RIGHT.view(np.uint32) >> 16).astype(np.uint16)
    other = bits.copy()
    other[0, 0, 0] ^= 0x40
    sides = []
    for array in (bits, other):
        builder = runs.Builder(keep="stats,tensors")
        builder.tensor(builder.call("half"), "output", "out", array, "bfloat16", part=PART)
        builder.tensor(builder.call("complex"), "output", "out", array.astype(np.complex64), part=PART)
        sides.append(builder.run)
    pairs = compare(*sides).pairs
    assert pairs["different"].tolist() == [1, 1]
    assert pairs["source"].tolist() == [f"values of the slice {PART}"] * 2


def test_ranks_and_settings_that_changed_are_told_apart(runs):
    sides = []
    for factor in (1, 2):
        builder = runs.Builder(keep="stats,tensors", world_size=2)
        for rank, parts in enumerate([("1:", None, PART), (PART, "1:", "1:")]):
            rows = builder.rank(rank)
            for number, part in enumerate(parts):
                rows.tensor(rows.call(f"site{number}"), "output", "out", RIGHT * np.float32(factor), part=part)
        sides.append(builder.run)
    diff = compare(*sides)
    texts = [f"values of the slice {part}" for part in ("1:", PART)]
    assert diff.pairs["source"].tolist() == [texts[0], "values", texts[1], texts[1], texts[0], texts[0]]
    assert diff.sources == {"values": 1, texts[0]: 3, texts[1]: 2}
    assert next(iter(diff.sources)) == "values"


def test_shared_in_columns():
    one = KeptValues(np.array([-1, -1, -1, 0, 0, 0, 0, -1, -1]), np.array([-1, -1, 5, -1, -1, 4, -1, 5, 5]))
    other = KeptValues(np.array([-1, 2, -1, 0, 1, 0, 0, -1, 0]), np.array([-1, -1, -1, -1, -1, 4, 3, 6, -1]))
    expected = ["VALUES", "SLICE", "SAMPLE", "SLICE", "NONE", "SAMPLE", "SAMPLE", "NONE", "NONE"]
    for sides in ((one, other), (other, one)):
        assert [EvidenceSource(code).name for code in shared_source(*sides)] == expected


def test_a_selection_is_narrowed_to_what_both_have():
    values = np.arange(12).reshape(3, 4)
    whole, part, sample = KeptSelection(None, -1), KeptSelection("1:2", -1), KeptSelection("1:2", 2)
    assert whole.intersection(part) == part
    assert sample.intersection(whole) == part.intersection(sample) == sample
    assert whole.narrow(values, part).tolist() == [[4, 5, 6, 7]]
    assert part.narrow(values[1:2], part).tolist() == [[4, 5, 6, 7]]
    expected = values[1][sample_positions(4, 2)].tolist()
    assert whole.narrow(values, sample).tolist() == part.narrow(values[1:2], sample).tolist() == expected


def test_labels_are_in_order_from_the_worst():
    codes = np.array(
        [
            EvidenceSource.VALUES,
            with_part(EvidenceSource.SLICE, 1),
            with_part(EvidenceSource.SAMPLE, 0),
            EvidenceSource.NONE,
            EvidenceSource.SAMPLE,
        ]
    )
    found = source_labels(codes, ["1:", ":2"])
    assert found.tolist() == ["values", "values of the slice :2", "sample of the slice 1:", "none", "sample"]
    assert found.values == ["none", "sample", "sample of the slice 1:", "values of the slice :2", "values"]
    assert source_labels(np.empty(0, np.int32), []).values == []


def test_values_that_are_stored_once_are_measured_once(tmp_path, monkeypatch):
    for name in ("good", "bad"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        with torch.no_grad():
            model[0].weight.mul_(1.001 if name == "bad" else 1)
        with astray.record(tmp_path / name, model, keep="tensors", phases="forward") as rec:
            model(torch.ones(2, 4))
            rec.step()
    calls = []
    monkeypatch.setattr(measurements, "contrast", lambda *sides: calls.append(1) or contrast(*sides))
    found = compare(tmp_path / "good", tmp_path / "bad")
    rows = found.pairs
    # What differs: a weight, and the results of three modules, of which one is also the root's and two are inputs.
    assert list(rows["source"]).count("values") == 1 + 3 + 1 + 2
    assert len(calls) == 1 + 3
    of = {(site, role): row for row, (site, role) in enumerate(zip(rows["site"], rows["role"], strict=True))}
    for one, other in ((("0", "output"), ("1", "input")), (("2", "output"), ("<root>", "output"))):
        assert rows["rmse"][of[one]] == rows["rmse"][of[other]] > 0
    run = astray.open(tmp_path / "good").ranks[0], astray.open(tmp_path / "bad").ranks[0]
    for row in np.flatnonzero([source == "values" for source in rows["source"]]).tolist():
        sides = [
            side.values(int(rows[f"row_{name}"][row]))
            for side, name in zip(run, ("reference", "candidate"), strict=True)
        ]
        assert rows["max_abs"][row] == np.abs(sides[0].astype(np.float64) - sides[1].astype(np.float64)).max()
