"""Histograms, heat maps and the worst elements, beside plain numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from astray.comparison.measure.evidence import ALL_VALUES
from astray.web import elements
from astray.web.elements import Elements, blocks
from astray.web.pair_values import (
    BINS,
    CELLS,
    HeatMap,
    Histogram,
    WorstElements,
    axis_pairs,
    compare_values,
    describe_values,
    difference_of,
    edges_of,
)

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of a test have many blocks."""
    monkeypatch.setattr(elements.blocks, "__defaults__", (37,))


def elements_of(array: np.ndarray) -> Elements:
    return Elements(array, array.dtype.name, array.shape, ALL_VALUES)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, 1.0),
        (-3.0, 5.5),
        (1.0, 1.0),
        (0.0, 0.0),
        (1e20, 1e20),
        (1.0, np.nextafter(1.0, 2)),
        (-1e308, 1.7e308),
        (-1.7976931348623157e308, 1.7976931348623157e308),
        (5e-324, 1e-323),
    ],
)
def test_bins_hold_every_number_whatever_the_range(low: float, high: float):
    edges = edges_of(low, high, integers=False)
    assert len(edges) == BINS + 1
    assert np.isfinite(edges).all()
    assert (np.diff(edges) > 0).all()
    assert edges[0] <= low <= high <= edges[-1]
    numbers = np.array([low, high, low / 2 + high / 2])
    found = Histogram(edges)
    found.add(numbers)
    assert found.counts.tolist() == np.histogram(numbers, edges)[0].tolist()
    assert found.counts.sum() == 3


def test_counts_are_those_of_numpy_also_beside_the_edges():
    for scale in (1.0, 1e-30, 1e30):
        numbers = RANDOM.normal(size=5000) * scale
        edges = edges_of(float(numbers.min()), float(numbers.max()), integers=False)
        on_edges = np.concatenate([numbers, edges, np.nextafter(edges[1:], -np.inf), np.nextafter(edges[:-1], np.inf)])
        found = Histogram(edges)
        for part in np.array_split(on_edges, 9):
            found.add(part)
        assert found.counts.tolist() == np.histogram(on_edges, edges)[0].tolist()


def test_a_few_whole_numbers_have_a_bin_each():
    assert edges_of(-1, 2, integers=True).tolist() == [-1.5, -0.5, 0.5, 1.5, 2.5]
    assert len(edges_of(0, 1000, integers=True)) == BINS + 1


def test_histograms_of_both_sides_and_of_the_difference():
    left = RANDOM.normal(size=(4, 5, 6)).astype(np.float32)
    right = left + RANDOM.normal(size=left.shape).astype(np.float32) / 100
    found = compare_values(elements_of(left), elements_of(right)).histograms
    assert found is not None
    a, b = left.astype(np.float64), right.astype(np.float64)
    assert found["edges"][0] == min(a.min(), b.min())
    assert found["edges"][-1] == pytest.approx(max(a.max(), b.max()), abs=0, rel=1e-15)
    assert found["a"].tolist() == np.histogram(a, found["edges"])[0].tolist()
    assert found["b"].tolist() == np.histogram(b, found["edges"])[0].tolist()
    gap = found["difference"]
    assert gap["counts"].tolist() == np.histogram(b - a, gap["edges"])[0].tolist()
    assert gap["counts"].sum() == left.size
    assert found["nonfinite"] == {"a": {}, "b": {}, "difference": {}}


def test_what_is_not_finite_is_counted_apart():
    left = np.array([1.0, np.nan, np.inf, -np.inf, np.nan, 2.0])
    right = np.array([1.0, np.nan, np.inf, np.inf, 3.0, np.nan])
    found = compare_values(elements_of(left), elements_of(right))
    assert found.histograms is not None
    assert found.histograms["nonfinite"]["a"] == {"nan": 2, "inf": 1, "-inf": 1}
    assert found.histograms["nonfinite"]["b"] == {"nan": 2, "inf": 2}
    assert found.histograms["nonfinite"]["difference"] == {"inf": 3}
    assert found.histograms["a"].sum() == 2
    assert [one["index"] for one in found.worst] == [[3], [4], [5]]
    assert difference_of(left, right).tolist() == [0.0, 0.0, 0.0, np.inf, np.inf, np.inf]


def test_nothing_finite_has_no_histogram():
    nothing = np.array([np.nan, np.inf])
    found = compare_values(elements_of(nothing), elements_of(nothing))
    assert found.histograms is None
    assert found.worst == []


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint8"])
def test_whole_numbers(dtype: str):
    left, right = np.array([0, 1, 1, 0, 1], dtype), np.array([0, 1, 0, 0, 1], dtype)
    found = compare_values(elements_of(left), elements_of(right))
    assert found.histograms is not None
    assert found.histograms["edges"].tolist() == [-0.5, 0.5, 1.5]
    assert found.histograms["a"].tolist() == [2, 3]
    assert found.histograms["b"].tolist() == [3, 2]
    assert found.worst == [{"index": [2], "a": 1.0, "b": 0.0, "difference": -1.0}]


@pytest.mark.parametrize("shape", [(200,), (3, 50), (70, 3), (2, 3, 130), (3, 2, 5, 7), (2, 2, 3, 2, 4), (1, 9, 1)])
def test_a_map_is_the_mean_over_all_other_axes(shape: tuple[int, ...]):
    sizes = np.abs(RANDOM.normal(size=shape))
    heat = HeatMap(shape)
    begin = 0
    for block in blocks(shape):
        heat.add(block, sizes.reshape(-1)[begin : begin + block.size])
        begin += block.size
    document = heat.document(complex=False)
    assert document is not None
    assert [axis["size"] for axis in document["axes"]] == list(shape)
    assert [(view["rows"], view["columns"]) for view in document["views"]] == axis_pairs(shape)
    for view in document["views"]:
        kept = tuple(axis for axis in (view["rows"], view["columns"]) if axis is not None)
        mean = sizes.mean(axis=tuple(axis for axis in range(len(shape)) if axis not in kept))
        mean = mean.reshape(1, -1) if view["rows"] is None else mean
        fold = view["pooled"]
        assert max(view["shape"]) <= CELLS
        plain = [
            [mean[i : i + fold[0], j : j + fold[1]].mean() for j in range(0, mean.shape[1], fold[1])]
            for i in range(0, mean.shape[0], fold[0])
        ]
        assert view["shape"] == (len(plain), len(plain[0]))
        assert np.allclose(view["values"], np.log10(plain).reshape(-1), atol=0.0051, rtol=0)


def test_cells_of_a_map_where_nothing_and_where_everything_is_off():
    heat = HeatMap((2, 2))
    heat.add(next(iter(blocks((2, 2)))), np.array([0.0, 1.0, np.inf, 100.0]))
    document = heat.document(complex=False)
    assert document is not None
    assert document["views"][0]["values"] == [None, 0.0, np.inf, 2.0]


def test_scalars_and_empty_tensors_have_no_map():
    for shape in ((), (1,), (1, 1), (0, 4)):
        assert axis_pairs(shape) == []
        array = np.ones(shape)
        assert compare_values(elements_of(array), elements_of(array)).heat is None


def test_the_worst_elements_are_those_of_a_full_sort():
    for size in (1, 19, 20, 21, 500):
        sizes = np.round(np.abs(RANDOM.normal(size=size)), 1)  # many are equal
        found = WorstElements()
        for begin in range(0, size, 33):
            part = slice(begin, begin + 33)
            found.add(begin, sizes[part], sizes[part], -sizes[part])
        order = [place for place in np.argsort(-sizes, kind="stable").tolist() if sizes[place] > 0][:20]
        assert found.elements() == [(place, sizes[place], -sizes[place]) for place in order]


def test_the_worst_elements_have_their_index_and_both_values():
    left = RANDOM.normal(size=(3, 4, 5))
    right = left.copy()
    right[1, 2, 3] += 7
    right[2, 0, 4] -= 9
    found = compare_values(elements_of(left), elements_of(right)).worst
    assert found == [
        {"index": [2, 0, 4], "a": left[2, 0, 4], "b": right[2, 0, 4], "difference": right[2, 0, 4] - left[2, 0, 4]},
        {"index": [1, 2, 3], "a": left[1, 2, 3], "b": right[1, 2, 3], "difference": right[1, 2, 3] - left[1, 2, 3]},
    ]


def test_one_tensor_alone():
    array = RANDOM.normal(size=(7, 11))
    array[3, 4] = np.nan
    found = describe_values(elements_of(array))
    assert found.histograms is not None
    finite = array[np.isfinite(array)]
    assert found.histograms["a"].tolist() == np.histogram(finite, found.histograms["edges"])[0].tolist()
    assert found.histograms["b"] is None
    assert found.worst[0]["index"] == [3, 4]
    assert np.isnan(found.worst[0]["a"])
    largest = np.unravel_index(np.nanargmax(np.abs(array)), array.shape)
    assert found.worst[1] == {"index": list(largest), "a": array[largest], "b": None, "difference": None}
    assert found.heat is not None
    assert found.heat["views"][0]["values"][3 * 11 + 4] == np.inf


@pytest.mark.parametrize("value", [2**62, -(2**63), 2**53, 2**52 + 1])
def test_whole_numbers_beyond_what_a_float_tells_apart(value: int) -> None:
    found = describe_values(elements_of(np.full((3, 2), value, np.int64)))
    assert found.histograms is not None
    assert int(found.histograms["a"].sum()) == 6


def test_a_map_of_numbers_near_the_largest() -> None:
    found = describe_values(elements_of(np.full((4, 3, 5), 1.7e308)))
    assert found.heat is not None
    assert np.inf in found.heat["views"][0]["values"]
