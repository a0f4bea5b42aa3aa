"""Everything about one row, beside plain numpy, and what is said where something is not there."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from astray import Comparison, compare
from astray.comparison.pair.layouts import Layout
from astray.comparison.pair.mapping import LayoutRule, Mapping
from astray.records import Frame
from astray.web.detail import detail_of
from astray.web.views import ComparisonView, RunView
from astray.web.wire import encode
from page_documents import HOSTILE, hostile_run, pair_of, program_comparison
from record_builders import Builder, linear_program

RANDOM = np.random.default_rng(0)
LEFT = RANDOM.normal(size=(4, 8)).astype(np.float32)
RIGHT = (LEFT * np.float32(1.01)).astype(np.float32)


def detail(comparison: Comparison, row: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(detail_of(ComparisonView(comparison), row)))
    return found


def named(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in items}


def test_metrics_and_statistics_are_those_of_float64():
    found = detail(pair_of(LEFT, RIGHT))
    a, b = LEFT.astype(np.float64), RIGHT.astype(np.float64)
    metrics, statistics = named(found["metrics"]), named(found["statistics"])
    assert metrics["max_abs"]["value"] == np.abs(b - a).max()
    assert metrics["rel_l2"]["value"] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-12)
    assert metrics["cosine"]["value"] == pytest.approx(1.0, rel=1e-12)
    assert metrics["different"] == {
        "name": "different", "value": 32.0, "text": "32",
        "help": "How many elements have another value. NaN equals NaN here, and 0 equals −0.",
    }  # fmt: skip
    assert all(metric["help"] for metric in found["metrics"])
    assert statistics["mean"]["a"] == pytest.approx(a.mean(), rel=1e-12)
    assert statistics["mean"]["b"] == pytest.approx(b.mean(), rel=1e-12)
    assert (statistics["shape"]["a"], statistics["dtype"]["b"]) == ("4×8", "float32")
    assert found["verdict"] == "diverged"
    assert found["sentence"].startswith(
        "step 0, forward, call 0 of layer (Linear), output: diverged: its values are off by 1.0e-02; rounding explains"
    )
    assert (found["values"], found["lacking"]) == ("whole", None)
    assert len(found["histograms"]["a"]) == 64
    assert len(found["worst"]) == 20
    assert found["heat"]["views"][0]["shape"] == [4, 8]


def laid_out(keep: str = "stats,tensors", part: str | None = None) -> Comparison:
    """A weight, and one that is transposed and has one element that is off."""
    sides = [Builder("runs/good", keep), Builder("runs/bad", keep)]
    wrong = LEFT.copy()
    wrong[1, 5] += 1
    for builder, values in zip(sides, (LEFT, wrong.T), strict=True):
        builder.tensor(builder.call("fc"), "parameter", "weight", values, part=part)
    mapping = Mapping(layouts=[LayoutRule("fc.weight", Layout.parse("transpose"))])
    return compare(sides[0].run, sides[1].run, mapping=mapping)


def test_values_that_lie_otherwise_are_shown_as_the_reference_lays_them_out():
    found = detail(laid_out())
    [worst] = [element for element in found["worst"] if element["difference"]]
    assert (worst["index"], worst["difference"]) == ([1, 5], pytest.approx(1.0, rel=1e-6))
    assert found["heat"]["views"][0]["shape"] == [4, 8]
    assert (found["statistics"][1]["a"], found["statistics"][1]["b"]) == ("4×8", "8×4")


def test_some_values_of_a_tensor_that_lies_otherwise_are_not_shown():
    assert "they are not those of the reference" in detail(laid_out(part=":2, ..."))["lacking"]


def test_a_metric_that_was_asked_for_is_there_too():
    left, right = Builder("runs/good", "stats,tensors"), Builder("runs/bad", "stats,tensors")
    for builder, array in ((left, LEFT), (right, RIGHT)):
        builder.tensor(builder.call("layer"), "output", "out", array)

    def twice_the_gap(one: np.ndarray, other: np.ndarray) -> float:
        return float(2 * np.abs(other - one).max())

    found = named(detail(compare(left.run, right.run, metrics=[twice_the_gap]))["metrics"])
    assert found["twice_the_gap"]["value"] == 2 * found["max_abs"]["value"]


@pytest.mark.parametrize(
    ("keep", "values", "lacking"),
    [
        ("stats,fingerprint", "statistics", "No values were kept. Record with keep='tensors'"),
        ("fingerprint", "fingerprint", "No values were kept."),
        ("stats,sample", "sample", "4 sampled values of each were kept"),
    ],
)
def test_what_was_not_kept_is_said(keep: str, values: str, lacking: str):
    found = detail(pair_of(LEFT, RIGHT, keep))
    assert found["values"] == values
    assert found["lacking"].startswith(lacking)
    assert found["heat"] is None
    if values == "sample":
        assert sum(found["histograms"]["a"]) == 4
        for one in found["worst"]:
            assert (one["a"], one["b"]) == (LEFT[tuple(one["index"])], RIGHT[tuple(one["index"])])
    else:
        assert (found["histograms"], found["worst"]) == (None, [])


def test_a_slice_beside_the_whole():
    runs = []
    for path, array, part in (("runs/good", LEFT, "1:3, ..., ::2"), ("runs/bad", RIGHT, None)):
        builder = Builder(path, "stats,tensors")
        builder.tensor(builder.call("layer"), "output", "out", array, part=part)
        runs.append(builder.run)
    found = detail(compare(*runs))
    assert (found["values"], found["lacking"]) == ("slice", "Only the slice [1:3, ..., ::2] was kept and is shown.")
    gaps = np.abs(RIGHT.astype(np.float64) - LEFT)[1:3, ::2]
    place = np.unravel_index(gaps.argmax(), gaps.shape)
    assert found["worst"][0]["index"] == [1 + place[0], 2 * place[1]]
    assert found["heat"]["views"][0]["shape"] == [2, 4]


def test_shapes_that_differ():
    found = detail(pair_of(LEFT, RIGHT[:3]))
    assert found["verdict"] == "shape"
    assert found["lacking"] == (
        "The shapes differ, 4×8 against 3×8: no element has a partner. What is shown is the reference alone."
    )
    assert sum(found["histograms"]["a"]) == 32
    assert found["histograms"]["b"] is None


def test_other_shapes_of_as_many_elements_are_laid_side_by_side():
    found = detail(pair_of(LEFT, RIGHT.reshape(2, 16)))
    assert found["lacking"] is None
    assert sum(found["histograms"]["b"]) == 32


def test_a_tensor_that_only_the_candidate_has():
    builders = [Builder(path, "stats,tensors") for path in ("runs/good", "runs/bad")]
    for number, builder in enumerate(builders):
        builder.tensor(builder.call("both"), "output", "out", LEFT)
        if number:
            builder.tensor(builder.call("new"), "output", "out", RIGHT)
    found = detail(compare(*(builder.run for builder in builders)), 1)
    assert found["verdict"] == "only in candidate"
    assert found["lacking"] == "The reference has no such tensor. What is shown is the candidate alone."
    assert found["histograms"]["a"] is None
    assert sum(found["histograms"]["b"]) == 32
    assert found["worst"][0]["a"] is None
    assert found["worst"][0]["b"] == RIGHT.reshape(-1)[np.abs(RIGHT).argmax()]
    assert named(found["statistics"])["mean"]["a"] is None


def test_values_that_should_be_there_and_are_not():
    builder = Builder("runs/good", "stats,tensors")
    builder.tensor(builder.call("layer"), "output", "out", LEFT)
    builder.rank().unreadable.add(0)
    found = json.loads(encode(detail_of(RunView(builder.run), 0)))
    assert (found["values"], found["lacking"]) == ("statistics", "The file is not there.")


def test_the_line_the_stack_and_the_arguments():
    builders = [Builder(path) for path in ("runs/good", "runs/bad")]
    frames = [Frame("net.py", 7, "Net.forward", "self.act(x)"), Frame("train.py", 5, "<module>", "net(x)")]
    for eps, builder in zip((1e-5, 1e-6), builders, strict=True):
        args = json.dumps({"args": ["<tensor>"], "kwargs": {"eps": eps}})
        seq = builder.call("act", stack=builder.stacked(*frames), args=args)
        builder.tensor(seq, "output", "out", LEFT)
        back = builder.call("act", phase="backward", parent=seq, args="{not json")
        builder.tensor(back, "output", "0", LEFT + 1)
    comparison = compare(*(builder.run for builder in builders))
    forward, backward = detail(comparison, 0), detail(comparison, 1)
    assert forward["source"] == {"file": "net.py", "line": 7, "function": "Net.forward", "code": "self.act(x)"}
    assert [frame["file"] for frame in forward["stack"]] == ["net.py", "train.py"]
    assert forward["args"] == {"args": ["<tensor>"], "kwargs": {"eps": 1e-5}}
    assert forward["args_b"] == {"args": ["<tensor>"], "kwargs": {"eps": 1e-6}}
    assert backward["source"] == forward["source"]
    assert (backward["args"], backward["args_b"]) == ("{not json", None)


def test_arguments_that_go_too_far():
    builder = Builder()
    texts = ("[" * 90 + "]" * 90, "[" * 900 + "]" * 900, "[" * 99_000, '"' + "x" * 200_000 + '"')
    for number, args in enumerate(texts):
        builder.tensor(builder.call(f"f{number}", args=args), "output", "out", LEFT)
    view = RunView(builder.run)
    deep, deeper, broken, long = (json.loads(encode(detail_of(view, row)))["args"] for row in range(4))
    for _ in range(50):
        (deep,) = deep
    assert deep == "…"
    assert deeper == texts[1]
    assert broken == "[" * 99_000
    assert long == '"' + "x" * 99_999 + "…"


def test_previous_and_next_go_from_call_to_call_across_steps_and_back():
    comparison = program_comparison(proj=1.5)
    view = ComparisonView(comparison)
    seen, row = [], 0
    while row is not None:
        found = detail_of(view, row)
        seen.append((found["key"]["step"], int(view.calls.of_row[row])))
        if found["next"] is not None:
            assert view.calls.of_row[detail_of(view, found["next"])["previous"]] == view.calls.of_row[row]
        row = found["next"]
    assert [call for _, call in seen] == list(range(len(view.calls.parent)))
    assert sorted({step for step, _ in seen}) == [0, 1, 2]
    first = comparison.first
    assert first is not None
    wrong = [row for row in range(len(view)) if view.pairs["verdict"][row] == "diverged"]
    before = detail_of(view, view.calls.rows(int(view.calls.of_row[wrong[0]]) - 1)[0])
    assert before["next"] == wrong[0]  # and not the first row of that call, which agrees


def test_rows_of_the_same_call():
    view = ComparisonView(program_comparison())
    found = detail_of(view, 0)  # the input of the root
    rows = found["call"]["rows"]
    assert [view.pairs["site"][row] for row in rows] == ["<root>", "<root>"]
    assert [view.pairs["role"][row] for row in rows] == ["input", "output"]


def test_producers_and_consumers_have_the_same_bits():
    view = ComparisonView(program_comparison())
    key = ("step", "phase", "site", "role", "path")
    rows = {tuple(view.cell(name, row) for name in key): row for row in range(len(view))}
    made = rows[1, "forward", "mlp.fc", "output", "out"]
    taken = rows[1, "forward", "mlp.act", "input", "0"]
    assert [link["row"] for link in detail_of(view, made)["consumers"]] == [taken]
    assert detail_of(view, taken)["producers"] == [{"row": made, "sentence": "step 1, forward, mlp.fc, output out"}]
    passed = rows[1, "forward", "mlp.proj", "output", "out"]
    assert [link["row"] for link in detail_of(view, passed)["consumers"]] == [
        rows[1, "forward", "mlp", "output", "out"]
    ]


def test_tensors_of_zeros_are_not_taken_for_each_other():
    builder = Builder()
    for name in ("a", "b"):
        builder.tensor(builder.call(name), "output", "out", np.zeros(4))
    run = builder.run
    assert detail(compare(run, run))["consumers"] == []


def test_nan_and_infinity_are_texts():
    left = np.array([1.0, np.nan, 2.0])
    found = detail(pair_of(left, np.array([1.0, 3.0, np.inf])))
    assert found["verdict"] == "non-finite"
    assert found["worst"] == [
        {"index": [1], "a": "nan", "b": 3.0, "difference": "inf"},
        {"index": [2], "a": 2.0, "b": "inf", "difference": "inf"},
    ]
    assert found["heat"]["views"][0] == {
        "rows": None, "columns": 0, "shape": [1, 3], "values": [None, "inf", "inf"], "pooled": [1, 1],
    }  # fmt: skip


def test_hostile_names_come_through_as_they_are():
    comparison = compare(hostile_run("runs/good").run, hostile_run("runs/bad", 1.5).run)
    view = ComparisonView(comparison)
    for row, name in enumerate(HOSTILE):
        text = encode(detail_of(view, row))
        assert text.isascii()
        found = json.loads(text)
        assert found["key"]["site"] == found["key"]["type"] == found["key"]["path"] == name
        assert found["args"] == {"args": [name]}
        assert named(found["statistics"])["note"]["a"] == name


def test_one_run_alone():
    run = linear_program(Builder(keep="stats,fingerprint,tensors"))
    view = RunView(run)
    found = json.loads(encode(detail_of(view, 4)))
    assert found["verdict"] is None
    assert found["metrics"] == []
    assert found["sentence"] == "step 0, forward, call 0 of mlp.fc (Linear), output."
    assert found["values"] == "whole"
    assert found["lacking"] is None
    assert all(statistic["b"] is None for statistic in found["statistics"])
    assert len(found["worst"]) == 20
    assert found["source"]["file"] == "net.py"
    assert [found["previous"], found["next"]] == [1, 5]


def test_a_joined_batch_is_read_as_one():
    runs = []
    for cuts in (1, 2):
        builder = Builder(keep="stats,tensors")
        for micro, part in enumerate(np.split(LEFT, cuts)):
            builder.tensor(builder.call("layer", micro=micro), "output", "out", part)
        runs.append(builder.run)
    found = detail(compare(*runs, micro="joined"))
    assert found["verdict"] == "identical" or found["verdict"] == "rounding"
    assert sum(found["histograms"]["b"]) == 32
    assert math.isclose(found["histograms"]["edges"][0], LEFT.min(), rel_tol=1e-12)
