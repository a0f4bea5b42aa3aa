"""The table and the overview of a comparison and of a run, and a place over the steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from astray.comparison.comparison import compare
from astray.store import DictionaryColumn, End, RankRun, RunData, RunInfo, Table
from astray.web.columns import headroom, states
from astray.web.detail import detail_of
from astray.web.html import contents
from astray.web.overview import overview_of, row_of
from astray.web.run_list import session_of
from astray.web.views import ComparisonView, RunView
from astray.web.wire import encode, pack
from page_documents import HOSTILE, hostile_run, program_comparison, unpack
from record_builders import Builder, linear_program


def test_the_table_of_a_comparison():
    comparison = program_comparison(proj=1.5)
    view = ComparisonView(comparison)
    found, pairs = unpack(pack(view.table)), comparison.pairs
    assert list(found) == [
        "rank", "step", "micro", "site", "type", "kind", "call", "phase", "recompute", "role", "path", "verdict",
        "reason", "source", "origin", "error", "surprise", "measure", "deviation", "limit", "given", "siblings", "rule",
        "cosine", "max_abs", "relative_l2", "rmse", "mape", "dtype_a", "dtype_b", "shape_a", "shape_b", "seq_a",
        "seq_b", "group", "parent",
    ]  # fmt: skip
    for name in ("site", "phase", "verdict", "role"):
        assert found[name] == pairs.coded(name).tolist()
    assert np.array_equal(found["error"], pairs.numbers("error"), equal_nan=True)
    assert np.array_equal(found["relative_l2"], pairs.numbers("rel_l2"), equal_nan=True)
    seq = comparison.reference.ranks[0].calls.numbers("seq")
    assert found["seq_a"] == seq[pairs.numbers("call_reference")].tolist()
    assert found["shape_a"][0] == "4×8"


def test_the_answer_of_a_comparison():
    comparison = program_comparison(proj=1.5)
    found = json.loads(encode(overview_of(ComparisonView(comparison))))
    first = found["first"]
    assert found["agree"] is False
    assert found["sentence"] == "First divergence: step 1, forward, call 0 of mlp.proj (Linear), output"
    assert (first["step"], first["site"], first["phase"], first["call"]) == (1, "mlp.proj", "forward", 0)
    assert comparison.pairs["site"][first["row"]] == "mlp.proj"
    assert comparison.pairs["role"][first["row"]] == "output"
    assert comparison.pairs["verdict"][first["row"]] == first["verdict"] == "diverged"
    assert first["where"] == {
        "file": "net.py", "line": 7, "function": "MLP.forward", "code": "return self.proj(self.act(self.fc(x)))",
    }  # fmt: skip
    assert first["evidence"][0]["text"].startswith("Error: its values are off by 0.50; rounding explains at most ")
    assert first["evidence"][1]["text"].startswith("How sure: certain: more than 1,000 times")
    assert (first["sureness"], first["settings"], first["measure"]) == ("certain", [], "values")
    assert found["suspects"][0]["row"] == first["row"]
    assert first["inside"] == ["<root> (Net)", "mlp (MLP)"]
    assert found["counts"] == comparison.counts
    assert first["before"]["sentence"].endswith("identical")


def test_the_answer_when_all_agrees():
    found = overview_of(ComparisonView(program_comparison()))
    assert found["agree"] is True
    assert found["first"] is None
    assert found["sentence"].startswith("No divergence: ")


def test_the_row_of_a_call_as_such_is_its_first_wrong_one():
    comparison = program_comparison(residual=1.5)  # code of the root, none of whose modules is wrong
    first = comparison.first
    assert first is not None
    row = row_of(comparison.pairs, first.place, 0)
    assert row is not None
    assert comparison.pairs["site"][row] == "<root>"
    assert comparison.pairs["verdict"][row] == "diverged"


def test_the_table_of_a_run_has_its_statistics_and_head_room():
    run = linear_program(Builder())
    view = RunView(run)
    found = unpack(pack(view.table))
    tensors = run.ranks[0].tensors
    for name in ("min", "max", "mean", "std", "l2", "absmax", "zeros", "count"):
        assert found[name] == tensors.numbers(name).tolist()
    largest = float(np.finfo(np.float32).max)
    assert found["headroom"] == (largest / tensors.numbers("absmax")).tolist()
    assert found["site"][:3] == ["<root>", "mlp", "mlp.fc"]
    assert found["group"] == view.calls.of_row.tolist()


def test_what_is_not_known_is_nan_in_the_table_of_a_run():
    builder = Builder(keep="fingerprint")
    builder.tensor(builder.call("a"), "output", "out", np.ones(3))
    builder.tensor(builder.call("b"), "output", "out", np.ones(3, np.int64), keep={"stats"})
    found = unpack(pack(RunView(builder.run).table))
    assert math.isnan(found["absmax"][0])
    assert math.isnan(found["count"][0])
    assert found["count"][1] == 3
    assert math.isnan(found["headroom"][1])


def test_ranks_share_one_numbering_of_words():
    builder = Builder(world_size=2)
    for rank, site in ((0, "a"), (1, "b")):
        rows = builder.rank(rank)
        rows.tensor(rows.call(site), "output", "out", np.ones(2))
    found = unpack(pack(RunView(builder.run).table))
    assert (found["rank"], found["site"]) == ([0, 1], ["a", "b"])


def test_alarms_of_a_run_lead_to_their_row():
    builder = Builder()
    fine, bad = np.ones((2, 2), np.float32), np.full((2, 2), np.nan, np.float32)
    root = builder.call("<root>", "Net")
    builder.tensor(root, "input", "0", fine)
    for name, given, made in (("a", fine, fine), ("b", fine, bad)):
        seq = builder.call(name, parent=root)
        builder.tensor(seq, "input", "0", given)
        builder.tensor(seq, "output", "out", made)
    builder.tensor(root, "output", "out", bad)
    view = RunView(builder.run)
    found = overview_of(view)
    assert found["counts"] == {"alarms": 1, "steps": 1, "ranks": 1, "tensors": 6}
    assert found["sentence"].startswith("NaN from step 0, forward, call 0 of b (Linear)")
    alarm = found["alarms"][0]
    assert view.table["site"][alarm["row"]] == "b"
    assert alarm["advice"]
    assert overview_of(RunView(linear_program(Builder())))["sentence"] == (
        "No NaN or infinity reached a result, a gradient or a weight in 3 steps on 1 rank."
    )


def test_a_run_without_tensors_says_so():
    builder = Builder()
    builder.call("a")
    view = RunView(builder.run)
    found = overview_of(view)
    assert "holds no tensors" in found["notes"][0]
    assert found["sentence"].endswith("notes say what is missing.")
    assert unpack(pack(view.table))["step"] == []


def test_the_state_of_a_tensor_is_by_the_rules_of_risk():
    builder = Builder()
    cases = [
        ("float16", 4000.0, "finite"),
        ("float16", 5000.0, "tight"),  # 13×
        ("float16", 40000.0, "overflow near"),
        ("float16", 65504.0, "tight"),  # a mask or a clamp
        ("float32", 1.0, "finite"),
        ("float32", np.inf, "non-finite"),
        ("float32", np.nan, "non-finite"),
        ("float32", 0.0, "finite"),
    ]
    for dtype, value, _ in cases:
        builder.tensor(builder.call("a"), "output", "out", np.array([value, 0], dtype))
    builder.tensor(builder.call("b"), "output", "out", np.ones(3, np.float32), keep={"fingerprint"})
    table = RunView(builder.run).table
    assert unpack(pack(table))["state"] == [*(state for _, _, state in cases), "unknown"]
    # 8-bit floats are scaled to be full: only the last factor of two is worth a word, and none of it is alarming.
    eighth = np.array([448.0, 300.0, 100.0])
    dtype = DictionaryColumn(np.zeros(3, np.int32), ["float8_e4m3fn"])
    none = np.zeros(3)
    columns = {"absmax": eighth, "dtype": dtype, "headroom": headroom(eighth, dtype), "nan": none, "inf": none}
    assert states(columns).tolist() == ["tight", "tight", "finite"]


def test_the_states_agree_with_the_analysis_of_risk():
    builder = Builder()
    sizes = [1.0, 4095.0, 4094.0, 32752.0, 32768.0, 65504.0, np.inf]
    for at, size in enumerate(sizes):
        builder.tensor(builder.call(f"s{at}"), "output", "out", np.array([size, 1.0], np.float16))
    view = RunView(builder.run)
    risk = builder.run.risk().table
    levels = dict(zip(risk["site"].tolist(), risk["risk"].tolist(), strict=True))
    words = {"finite": "calm", "tight": "tight", "overflow near": "overflow", "non-finite": "non-finite"}
    table = unpack(pack(view.table))
    assert {site: words[state] for site, state in zip(table["site"], table["state"], strict=True)} == levels


def test_an_alarm_of_no_known_kind_is_told_without_one():
    builder = Builder()
    fine, bad = np.ones(2, np.float32), np.full(2, np.nan, np.float32)
    root = builder.call("<root>", "Net")
    inner = builder.call("a", parent=root)
    builder.tensor(inner, "input", "0", fine)
    builder.tensor(inner, "output", "out", fine)
    builder.tensor(root, "output", "out", bad)
    found = overview_of(RunView(builder.run))
    assert found["alarms"][0]["kind"] == "unknown"
    assert found["sentence"] == found["alarms"][0]["sentence"] == "NaN from step 0, forward, call 0 of <root> (Net)."


def test_hostile_names_in_every_document():
    comparison = compare(hostile_run("runs/<b>good</b>").run, hostile_run("runs/bad", 1.5).run)
    view = ComparisonView(comparison)
    assert unpack(pack(view.table))["site"] == HOSTILE
    for document in (overview_of(view), session_of(view, {"sites": "</script>"}), overview_of(RunView(view.runs[0]))):
        text = encode(document)
        assert text.isascii()
        json.loads(text)


def test_two_checkpoints(tmp_path: Path):
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=(3, 4)).astype(np.float32) for name in ("a.weight", "b.weight", "<b>")}
    save_file(tensors, tmp_path / "good.safetensors")
    save_file(tensors | {"b.weight": tensors["b.weight"] * 2}, tmp_path / "bad.safetensors")
    view = ComparisonView(compare(tmp_path / "good.safetensors", tmp_path / "bad.safetensors"))
    overview = overview_of(view)
    assert overview["sentence"] == "1 of 3 tensors differs: b.weight"
    found = json.loads(encode(detail_of(view, overview["first"]["row"])))
    assert found["values"] == "whole"
    assert len(found["worst"]) == 12
    alone = RunView(view.runs[1])
    assert overview_of(alone)["sentence"] == "A checkpoint of 3 tensors."
    assert sorted(unpack(pack(alone.table))["site"]) == sorted(tensors)
    assert session_of(alone, {})["runs"][0]["facts"][0][0] == "checkpoint"


def test_a_dump_of_another_tool_is_a_run_like_any():
    cases = Path(__file__).parents[1] / "cases" / "precision_checker"
    view = ComparisonView(compare(cases / "A", cases / "B"))
    assert len(unpack(pack(view.table))["site"]) == len(view) > 20
    found = [json.loads(encode(detail_of(view, row))) for row in range(len(view))]
    assert {one["values"] for one in found} == {"whole"}
    assert len(unpack(pack(RunView(view.runs[0]).table))["site"]) > 20
    json.loads(encode(overview_of(view)))


def test_two_hundred_thousand_rows():
    rows = 200_000
    comparison = compare(_large(rows, 0.0), _large(rows, 1e-2))
    view = ComparisonView(comparison)
    table = pack(view.table)
    assert len(table) < 32 << 20
    assert len(unpack(table)["site"]) == rows
    assert overview_of(view)["first"] is not None
    assert detail_of(view, rows - 1)["next"] is None
    assert len(contents(view, {})) < 8 << 20


class _Large:
    """A rank of many calls with two tensors each."""

    end = End(complete=True)
    problems: list[str] = []  # noqa: RUF012 - what a source has

    def __init__(self, calls: Table, tensors: Table) -> None:
        self._tables = calls, tensors

    def calls(self) -> tuple[Table, list[str]]:
        return self._tables[0], []

    def tensors(self) -> tuple[Table, list[str]]:
        return self._tables[1], []

    def stack(self, id: int) -> list:
        return []

    def values(self, tensors: Table, row: int) -> None:
        return None


def _large(rows: int, gap: float) -> RunData:
    calls, sites = rows // 2, 500
    seq, same, null = np.arange(calls), np.zeros(rows, np.int32), np.full(rows, -1)
    numbers = np.random.default_rng(0).random(rows) + 1 + gap * (np.arange(rows) > rows // 2)
    coded = np.tile([0, 1], calls).astype(np.int32)
    columns = {
        "seq": seq,
        "step": seq // sites,
        **{name: np.zeros(calls, np.int64) for name in ("micro", "call")},
        "site": DictionaryColumn(
            (seq % sites).astype(np.int32), [f"layers.{n // 10}.block.{n % 10}" for n in range(sites)]
        ),
        **{name: DictionaryColumn(same[:calls], [word]) for name, word in (("kind", "module"), ("type", "Linear"))},
        "phase": DictionaryColumn(same[:calls], ["forward"]),
        "parent": np.where(seq % 10, seq - seq % 10, -1),
        "stack": null[:calls],
        "args": DictionaryColumn(null[:calls].astype(np.int32), []),
        "recompute": np.zeros(calls, np.bool_),
    }
    tensors = {
        "seq": np.repeat(seq, 2),
        "role": DictionaryColumn(coded, ["input", "output"]),
        "path": DictionaryColumn(coded, ["0", "out"]),
        "dtype": DictionaryColumn(same, ["float32"]),
        **{name: DictionaryColumn(same, [(8, 64)]) for name in ("shape", "stride")},
        "device": DictionaryColumn(same, ["cpu"]),
        **{name: DictionaryColumn(null.astype(np.int32), []) for name in ("placement", "note", "part")},
        "requires_grad": np.zeros(rows, np.bool_),
        **dict.fromkeys(("min", "max", "mean", "std", "l2", "absmax"), numbers),
        "first_bad_value": np.full(rows, np.nan),
        **{name: np.zeros(rows, np.int64) for name in ("zeros", "nan", "inf")},
        "count": np.full(rows, 512),
        **dict.fromkeys(("first_bad", "blob_file", "blob_offset", "blob_bytes", "sampled", "value"), null),
        "fingerprint": (numbers * 1e15).astype(np.uint64),
    }
    source = _Large(Table(columns), Table(tensors, {"fingerprint": np.ones(rows, np.bool_)}))
    return RunData(Path(f"runs/{gap}"), RunInfo(astray="0", created=""), {0: RankRun(0, source)})


def test_what_was_set_differently_is_in_the_overview(tmp_path):
    from astray.records import Call, Setup, Statistics, Tensor
    from astray.store import RunInfo, RunWriter

    for name, eps in (("a", 1e-5), ("b", 1e-3)):
        with RunWriter(tmp_path / name, info=RunInfo.of_process()) as writer:
            writer.setup(Setup(0, "module", "norm", {"class": "LayerNorm", "eps": eps}))
            writer.setup(Setup(0, "environment", "", {} if name == "a" else {"NCCL_ALGO": "Ring"}))
            writer.call(Call(0, 0, 0, "module", "norm", "LayerNorm", 0, "forward"))
            numbers = Statistics(0.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0, 0, 0, 2)
            writer.tensor(Tensor(0, "output", "out", "float32", (2,), (1,), "cpu", False, numbers, fingerprint=1))
    view = ComparisonView(compare(tmp_path / "a", tmp_path / "b"))
    first, second = overview_of(view)["setup"]
    assert (first["row"], first["subject"], first["name"]) == (0, "module norm (LayerNorm)", "eps")
    assert (first["reference"], first["candidate"], first["effect"]) == ("1e-05", "0.001", "changes results")
    assert (second["row"], second["reference"], second["candidate"]) == (None, "–", "Ring")


@pytest.mark.parametrize(
    "said", [["a", "b"], [[0, 0], [1, 1]], [[0, 0, 0], [1, 1 << 70, 0]], [[0, 0, 0.5], [1, 2, 3]], [[], []], [1, 2]]
)
def test_epochs_that_are_none(said: list[object]) -> None:
    run = linear_program(Builder())
    run.info.settings["epochs"] = said
    assert "epoch" not in unpack(pack(RunView(run).table))
