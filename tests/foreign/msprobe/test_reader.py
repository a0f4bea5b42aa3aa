"""Opening dumps that the real msprobe made, kept in tests/cases/msprobe."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray.foreign.msprobe import open_dump, recognises
from astray.store import RunData
from msprobe_cases import CASES, keyed, record

FORWARD = [
    ("embed", "Embedding"), ("embed/embedding", "torch.nn.functional.embedding"),
    ("norm", "LayerNorm"), ("norm/layer_norm", "torch.nn.functional.layer_norm"),
    ("mix", "Mix"), ("mix/matmul", "torch.Tensor.matmul"), ("mix/mul", "torch.Tensor.mul"),
    ("mix/softmax", "torch.softmax"), ("mix/matmul", "torch.Tensor.matmul"),
    ("mix.proj", "Linear"), ("mix.proj/linear", "torch.nn.functional.linear"),
    ("<root>/add", "torch.Tensor.add"), ("<root>/relu", "torch.nn.functional.relu"),
    ("tail", "Sequential"), ("tail.0", "Linear"), ("tail.0/linear", "torch.nn.functional.linear"),
    ("tail.1", "GELU"), ("tail.1/gelu", "torch.nn.functional.gelu"),
    ("/mean", "torch.Tensor.mean"), ("/cross_entropy", "torch.nn.functional.cross_entropy"),
]  # fmt: skip
"""The calls of a forward in the order in which they begin, at level mix. The loss, a module outside, is in none."""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return record(tmp_path_factory.mktemp("native") / "run", level=["module", "function"], keep="tensors")


def calls_of(run: RunData, phase: str) -> list[tuple[Any, ...]]:
    rows = [run.ranks[0].calls.row(at) for at in range(len(run.ranks[0].calls))]
    wanted = ("step", "micro", "site", "type", "call")
    return [tuple(row[name] for name in wanted) for row in rows if row["phase"] == phase and row["kind"] != "parameter"]


def test_level_mix_has_the_modules_of_functions_and_micro_steps() -> None:
    run = open_dump(CASES / "mix-statistics")
    calls = [0, 0, 0, 0, 0, 0, 0, 0, 1, *[0] * 11]  # mix multiplies two matrices twice
    expected = [(*one, call) for one, call in zip(FORWARD, calls, strict=True)]
    assert calls_of(run, "forward") == [
        (step, micro, *one) for step, micro in ((0, 0), (1, 0), (1, 1)) for one in expected
    ]
    backward = {(step, micro, site, call) for step, micro, site, _, call in calls_of(run, "backward")}
    assert backward == {(step, micro, site, call) for step, micro, site, _, call in calls_of(run, "forward")}
    assert run.problems == []
    assert run.complete
    assert (run.info.framework, run.info.world_size) == ("torch", 1)
    assert run.info.settings == {"format": "msprobe", "task": "statistics", "level": "mix"}


def test_a_call_lies_in_another_and_a_backward_belongs_to_its_forward() -> None:
    calls = open_dump(CASES / "mix-statistics").ranks[0].calls
    rows = [calls.row(at) for at in range(len(calls))]
    by_name = {(row["site"], row["phase"], row["call"]): row for row in rows if row["step"] == 0}
    linear, proj, mix = (by_name[site, "forward", 0] for site in ("mix.proj/linear", "mix.proj", "mix"))
    assert (linear["parent"], proj["parent"], mix["parent"]) == (proj["seq"], mix["seq"], None)
    assert by_name["mix/matmul", "backward", 1]["parent"] == by_name["mix/matmul", "forward", 1]["seq"]
    assert linear["args"] == '{"args":["<tensor>","<tensor>","<tensor>"]}'
    assert by_name["mix", "forward", 0]["args"] == '{"args":["<tensor>"],"kwargs":{"scale":"<tensor>"}}'


def test_a_stack_shows_the_program_and_not_torch() -> None:
    rank = open_dump(CASES / "mix-statistics").ranks[0]
    row = next(at for at in range(len(rank.calls)) if rank.calls["site"][at] == "mix/softmax")
    frames = rank.stack(int(rank.calls["stack"][row]))
    assert [frame.function for frame in frames] == ["forward", "forward", "train", "main", "<module>"]
    assert frames[0].file == "/program/program.py"
    assert frames[0].code == "scores = torch.softmax(x @ x.transpose(-1, -2) * scale, -1)"


def test_statistics_are_those_of_the_dump() -> None:
    run = open_dump(CASES / "mix-statistics")
    said = json.loads((CASES / "mix-statistics/step0/proc7/dump.json").read_text())["data"]
    leaf = said["Module.mix.Mix.forward.0"]["output"][1]
    row = keyed(run.ranks[0])[0, 0, "module", "mix", "Mix", 0, "forward", "output", "out.1"]
    assert (row["dtype"], row["shape"], row["requires_grad"]) == ("float32", (2, 4, 4), True)
    assert (row["max"], row["min"], row["mean"], row["l2"]) == (leaf["Max"], leaf["Min"], leaf["Mean"], leaf["Norm"])
    assert (row["absmax"], row["count"]) == (leaf["Max"], 32)
    assert (row["std"], row["zeros"], row["nan"], row["inf"], row["fingerprint"]) == (None,) * 5


def test_every_tensor_that_both_have_is_the_same(native: RunData) -> None:
    """By statistics, and the gradients of nodes that belong to no function are never taken for an argument's."""
    diff = astray.compare(native, open_dump(CASES / "mix-statistics"))
    assert diff.first is None
    happened = {verdict for verdict, count in diff.counts.items() if count}
    assert happened == {"identical", "rounding", "only in reference", "only in candidate"}
    mine, theirs = keyed(native.ranks[0]), keyed(open_dump(CASES / "mix-statistics").ranks[0])
    assert {key[-1].split(".")[0] for key in theirs if key not in mine} == {"node"}
    assert {key[3] for key in theirs if key not in mine} == {
        "mix/matmul",
        "mix.proj/linear",
        "tail.0/linear",
        "/cross_entropy",
    }


def test_tensors_are_measured_from_their_files(native: RunData) -> None:
    run = open_dump(CASES / "L0-tensor")
    theirs, mine = keyed(run.ranks[0]), keyed(native.ranks[0])
    assert len(theirs) == 43
    assert {key[2] for key in theirs} == {"module", "parameter"}
    for key, row in theirs.items():
        assert row["std"] == pytest.approx(mine[key]["std"], rel=1e-5, abs=1e-9), key  # machines round differently
        assert (row["count"], row["zeros"], row["nan"]) == (mine[key]["count"], mine[key]["zeros"], 0)
        assert row["fingerprint"] is not None
    key = astray.Key(0, 0, "tail.0", 0, "forward", "parameter", "weight")
    np.testing.assert_array_equal(run.tensor(key), native.tensor(key))  # drawn, not computed
    assert run.problems == []


@pytest.mark.parametrize("level", ["", "step0", "step0/proc7", "step0/proc7/dump.json"])
def test_the_dump_its_step_or_its_rank_may_be_given(level: str) -> None:
    path = CASES / "L0-tensor" / level
    assert recognises(path)
    run = astray.open(path)
    assert (len(run.ranks[0].tensors), run.steps, list(run.ranks)) == (43, [0], [0])


def test_a_step_keeps_its_number_and_a_rank_its_own(tmp_path: Path) -> None:
    shutil.copytree(CASES / "L0-tensor/step0/proc7", tmp_path / "dump/step12/rank3")
    shutil.copytree(CASES / "L0-tensor/step0/proc7", tmp_path / "dump/step12/rank0")
    run = open_dump(tmp_path / "dump")
    assert (run.steps, list(run.ranks), run.info.world_size) == ([12], [0, 3], 2)
    assert open_dump(tmp_path / "dump/step12/rank3").steps == [12]
    assert list(open_dump(tmp_path / "dump/step12/rank3").ranks) == [3]


def test_processes_without_a_rank_are_numbered_and_that_is_said(tmp_path: Path) -> None:
    for process in ("proc90", "proc100"):
        shutil.copytree(CASES / "debug-tensor/step0/proc7", tmp_path / "dump/step0" / process)
    run = open_dump(tmp_path / "dump")
    assert list(run.ranks) == [0, 1]
    assert run.problems[0].startswith(f"{tmp_path}/dump/step0 has 2 folders of processes that do not say their rank")


def test_level_l1_knows_no_modules_and_counts_through_the_step() -> None:
    run = open_dump(CASES / "L1-md5")
    assert [(site, call) for _, _, site, _, call in calls_of(run, "forward")] == [
        ("/embedding", 0), ("/layer_norm", 0), ("/matmul", 0), ("/mul", 0), ("/softmax", 0), ("/matmul", 1),
        ("/linear", 0), ("/add", 0), ("/relu", 0), ("/linear", 1), ("/gelu", 0), ("/mean", 0), ("/cross_entropy", 0),
    ]  # fmt: skip


def test_an_operator_and_its_function_are_calls_of_one_site(tmp_path: Path) -> None:
    path = copy(tmp_path, "L1-md5")

    def change(data: dict[str, Any]) -> None:
        data["Tensor.add.0.forward"] = data["Tensor.__add__.0.forward"]
        data["Torch.relu.4.forward"] = data["Functional.relu.0.forward"]

    edit(path, change)
    found = [(site, call) for _, _, site, _, call in calls_of(open_dump(tmp_path / "dump"), "forward")]
    assert [one for one in found if one[0] in ("/add", "/relu")] == [
        ("/add", 0),
        ("/relu", 0),
        ("/add", 1),
        ("/relu", 1),
    ]


def test_functions_of_level_l1_are_paired_by_order(tmp_path: Path) -> None:
    functions = record(tmp_path / "functions", level="function")
    diff = astray.compare(functions, open_dump(CASES / "L1-md5"), by="order", steps="0")
    assert diff.first is None
    assert diff.counts["identical"] + diff.counts["rounding"] >= 40


def test_a_checksum_is_compared_with_its_like_alone(native: RunData, tmp_path: Path) -> None:
    run = open_dump(CASES / "L1-md5")
    said = json.loads((CASES / "L1-md5/step0/proc7/dump.json").read_text())["data"]
    leaf = said["Functional.relu.0.forward"]["output"][0]
    row = keyed(run.ranks[0])[0, 0, "function", "/relu", "torch.nn.functional.relu", 0, "forward", "output", "out"]
    assert row["fingerprint"] == int(leaf["md5"], 16)
    assert run.ranks[0].fingerprints == "msprobe crc32"
    same = astray.compare(run, open_dump(CASES / "L1-md5"))
    assert same.counts["identical"] == len(same.pairs)
    other = copy(tmp_path, "L1-md5")
    edit(other, lambda data: data["Functional.relu.0.forward"]["output"][0].update(md5="00000001"))
    changed = astray.compare(run, open_dump(tmp_path / "dump"))
    assert changed.counts["rounding"] == 1  # the bits differ, the statistics do not
    assert native.ranks[0].fingerprints == "astray"


def copy(tmp_path: Path, name: str) -> Path:
    shutil.copytree(CASES / name, tmp_path / "dump")
    return tmp_path / "dump/step0/proc7/dump.json"


def edit(path: Path, change: Any) -> None:
    said = json.loads(path.read_text())
    change(said["data"])
    path.write_text(json.dumps(said))


def test_what_was_saved_comes_with_its_gradient() -> None:
    found = keyed(open_dump(CASES / "debug-tensor").ranks[0])
    assert [(key[3], key[4], key[5], key[6], key[7], key[8]) for key in found] == [
        ("kept", "dict", 0, "forward", "output", "out.logits"),
        ("kept", "dict", 0, "forward", "output", "out.parts.0"),
        ("kept", "dict", 0, "backward", "input", "out.logits"),
        ("kept", "Tensor", 1, "forward", "output", "out"),
        ("kept", "Tensor", 1, "backward", "input", "out"),
    ]
    assert {key[2] for key in found} == {"custom"}
    assert [row["l2"] for row in found.values()][2] == 4.0


def test_statistics_that_are_not_finite_say_what_they_can(tmp_path: Path) -> None:
    path = copy(tmp_path, "mix-statistics")

    def change(data: dict[str, Any]) -> None:
        relu = data["Functional.relu.0.forward"]
        relu["input_args"][0] |= {"Max": math.nan, "Min": math.nan, "Mean": math.nan, "Norm": math.nan}
        relu["output"][0] |= {"Max": math.inf, "Mean": math.inf, "Norm": math.inf}
        data["Module.norm.LayerNorm.forward.0"]["output"][0] |= {"Norm": math.inf, "Mean": None}
        data["Module.mix.Mix.forward.0"]["output"][0] = {
            "type": "torch.Tensor",
            "dtype": "torch.float32",
            "shape": [2, 4, 3],
        }

    edit(path, change)
    found = keyed(open_dump(tmp_path / "dump").ranks[0])
    relu = 0, 0, "function", "<root>/relu", "torch.nn.functional.relu", 0, "forward"
    nan, inf = found[(*relu, "input", "0")], found[(*relu, "output", "out")]
    assert (
        nan["note"] == "Some of its elements are not finite: msprobe says that its maximum is nan and its minimum nan."
    )
    assert (nan["max"], nan["min"], nan["mean"], nan["l2"], nan["nan"], nan["inf"]) == (None,) * 6
    assert (inf["max"], inf["mean"], inf["l2"]) == (None,) * 3
    assert inf["min"] == 0.0
    overflowed = found[0, 0, "module", "norm", "LayerNorm", 0, "forward", "output", "out"]
    assert (overflowed["l2"], overflowed["mean"], overflowed["note"]) == (None, None, None)
    assert overflowed["max"] > 1
    bare = found[0, 0, "module", "mix", "Mix", 0, "forward", "output", "out.0"]
    assert (bare["count"], bare["max"], bare["shape"]) == (None, None, (2, 4, 3))
    diff = astray.compare(CASES / "mix-statistics", tmp_path / "dump")
    assert diff.counts["non-finite"] == 2
    assert diff.first is not None
    assert (diff.first.site, diff.first.role) == ("<root>/relu", "input")


def test_other_shapes_of_what_msprobe_has_written_over_the_years(tmp_path: Path) -> None:
    path = copy(tmp_path, "mix-statistics")
    folder = path.parent
    stacks = json.loads((folder / "stack.json").read_text())
    old = {name: lines for names, lines in stacks.values() for name in names}
    (folder / "stack.json").write_text(json.dumps(old))
    construct = json.loads((folder / "construct.json").read_text())
    told = {name: [parent, 0] for name, parent in construct.items()}
    (folder / "construct.json").write_text(json.dumps(told | {"megatron_micro_step_number": 1}))

    def change(data: dict[str, Any]) -> None:
        data["Module.norm.LayerNorm.parameters_grad"] = data.pop("Module.norm.LayerNorm.parameters_grad.0")
        leaf = data["Module.norm.LayerNorm.forward.0"]["parameters"]["weight"]
        leaf |= {"device_mesh": [0, 1], "placements": [{"Shard": {"dim": 0}}, {"Replicate": {}}]}
        data["Functional.relu.0.forward"]["output"][0] = {
            "type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 4, 3], "md5": "0x00000000000000ff",
        }  # fmt: skip

    edit(path, change)
    run = open_dump(tmp_path / "dump")
    before, after = keyed(open_dump(CASES / "mix-statistics").ranks[0]), keyed(run.ranks[0])
    assert list(before) == list(after) or set(before) == set(after)
    weight = after[0, 0, "module", "norm", "LayerNorm", 0, "forward", "parameter", "weight"]
    assert json.loads(weight["placement"])["placements"] == ["Shard(0)", "Replicate()"]
    relu = after[0, 0, "function", "<root>/relu", "torch.nn.functional.relu", 0, "forward", "output", "out"]
    assert (relu["fingerprint"], relu["max"]) == (255, None)
    assert run.problems == []


def test_megatrons_micro_steps_are_taken_from_construct(tmp_path: Path) -> None:
    shutil.copytree(CASES / "mix-statistics/step1/proc7", tmp_path / "dump/step1/rank0")
    path = tmp_path / "dump/step1/rank0/construct.json"
    construct = json.loads(path.read_text())
    path.write_text(json.dumps({name: [parent, 1] for name, parent in construct.items()}))
    assert {row[1] for row in calls_of(open_dump(tmp_path / "dump"), "forward")} == {1}


def test_a_wrapper_around_the_model_is_seen_through(tmp_path: Path) -> None:
    folder = tmp_path / "dump/step0/rank0"
    shutil.copytree(CASES / "mix-statistics/step0/proc7", folder)
    for file in folder.iterdir():
        said = file.read_text().replace('"Module.', '"Module.module.')
        if file.name == "construct.json":
            said = said.replace("{", '{"Module.module.Net.forward.0": null, ', 1)
        file.write_text(said)
    sites = {row[2] for row in calls_of(open_dump(tmp_path / "dump"), "forward")}
    assert {"embed", "mix.proj", "mix/matmul"} <= sites
    assert not any(site.startswith("module") for site in sites)


def test_mindspore_dumps_open(tmp_path: Path) -> None:
    folder = tmp_path / "dump/step0/rank0"
    (folder / "dump_tensor_data").mkdir(parents=True)
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(folder / "dump_tensor_data/Cell.fc.Dense.forward.0.output.0.npy", values)
    leaf = {
        "type": "mindspore.Tensor",
        "dtype": "Float32",
        "shape": [2, 3],
        "Max": 5.0,
        "Min": 0.0,
        "Mean": 2.5,
        "Norm": 7.4,
    }
    data = {
        "Mint.add.0.forward": {"input_args": [leaf], "input_kwargs": {}, "output": [leaf]},
        "Cell.fc.Dense.forward.0": {
            "input_args": [leaf],
            "input_kwargs": {},
            "output": [leaf | {"data_name": "Cell.fc.Dense.forward.0.output.0.npy"}],
        },
    }
    said = {"task": "tensor", "level": "mix", "framework": "mindspore", "data": data}
    (folder / "dump.json").write_text(json.dumps(said))
    run = open_dump(tmp_path / "dump")
    assert run.info.framework == "mindspore"
    found = keyed(run.ranks[0])
    assert found[0, 0, "module", "fc", "Dense", 0, "forward", "output", "out"]["std"] == pytest.approx(values.std())
    assert found[0, 0, "function", "/add", "mindspore.mint.add", 0, "forward", "input", "0"]["mean"] == 2.5


def test_structure_alone_gives_calls(tmp_path: Path) -> None:
    path = copy(tmp_path, "mix-statistics")
    edit(path, lambda data: data.clear())
    calls = calls_of(open_dump(tmp_path / "dump/step0"), "forward")
    assert [row[2] for row in calls if "/" not in row[2]] == [
        "embed",
        "norm",
        "mix",
        "mix.proj",
        "tail",
        "tail.0",
        "tail.1",
    ]
    assert len(open_dump(tmp_path / "dump/step0").ranks[0].tensors) == 0
