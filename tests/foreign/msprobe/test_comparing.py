"""msprobe's compare: its columns in each mode, the engine's numbers, and a Result that means something."""

from __future__ import annotations

import ast
import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import astray
from astray.compat.msprobe import compare, compare_distributed
from astray.errors import CompareError, RunError, UsageError
from astray.foreign.msprobe.comparing import main
from msprobe_parts import debugging, network, train

BASIC = [
    "NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape",
    "NPU Requires_grad", "Bench Requires_grad",
]  # fmt: skip
STATISTICS = [f"{side} {name}" for side in ("NPU", "Bench") for name in ("max", "min", "mean", "l2norm")]
JUDGED = ["Requires_grad Consistent", "Result", "Err_message", "NPU_Stack_Info"]
METRICS = [
    "Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio",
]  # fmt: skip
DIFFERENCES = [
    "Max diff", "Min diff", "Mean diff", "L2norm diff",
    "MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr",
]  # fmt: skip

Dumps = dict[str, Path]


def dump(folder: Path, scale: float = 1.0, **how: Any) -> Path:
    with debugging(dump_path=folder, **how) as debugger:
        train(debugger, model := network(scale), 2, model)
    return folder


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    """The same training, right and with one weight scaled by 1.001, in each form."""
    folder = tmp_path_factory.mktemp("dumps")
    (folder / "md5.json").write_text(json.dumps({"statistics": {"summary_mode": "md5"}}))
    (folder / "relu.json").write_text(json.dumps({"statistics": {"list": ["relu", "linear.1"]}}))
    return {
        f"{form} {scale}": dump(folder / f"{form}{scale}", scale, **how)
        for form, how in {
            "tensor": {"task": "tensor", "level": "mix"},
            "statistics": {"level": "mix"},
            "md5": {"config_path": folder / "md5.json", "level": "mix"},
            "few": {"config_path": folder / "relu.json", "level": "L1"},
        }.items()
        for scale in (1.0, 1.001)
    }


def table(npu: Path, bench: Path, out: Path, **options: Any) -> list[dict[str, str]]:
    file, *rest = compare({"npu_path": str(npu), "bench_path": str(bench)}, str(out), **options)
    assert re.fullmatch(r"compare_result_\d{14}\.csv", file.name)
    assert [re.sub(r"\d{14}", "T", one.name) for one in rest] == ["advisor_T.txt"]
    with file.open(newline="") as held:
        return list(csv.DictReader(held))


def of(rows: list[dict[str, str]], name: str) -> dict[str, str]:
    (found,) = [row for row in rows if row["NPU Name"] == name]
    return found


def test_values(dumps: Dumps, tmp_path: Path) -> None:
    npu, bench = (dumps[f"tensor {scale}"] / "step0" / "rank" / "dump.json" for scale in (1.001, 1.0))
    rows = table(npu, bench, tmp_path)
    assert list(rows[0]) == [*BASIC, *METRICS, *STATISTICS, *JUDGED, "Data_name"]
    names = [row["NPU Name"] for row in rows]
    assert names[:12] == [
        "Functional.linear.0.forward.input.0", "Functional.linear.0.forward.input.1",
        "Functional.linear.0.forward.input.2", "Functional.linear.0.forward.output.0",
        "Module.linear_1.Linear.forward.0.input.0", "Module.linear_1.Linear.forward.0.parameters.weight",
        "Module.linear_1.Linear.forward.0.parameters.bias", "Module.linear_1.Linear.forward.0.output.0",
        "Functional.linear.1.forward.input.0", "Functional.linear.1.forward.input.1",
        "Functional.linear.1.forward.input.2", "Functional.linear.1.forward.output.0",
    ]  # fmt: skip
    assert names == [row["Bench Name"] for row in rows]

    weight = of(rows, "Functional.linear.0.forward.input.1")
    file = "dump_tensor_data/Functional.linear.0.forward.input.1.pt"
    ours, theirs = (torch.load(path.parent / file, weights_only=True).double().numpy() for path in (npu, bench))
    error = np.abs(ours - theirs) / np.abs(theirs)
    expected = [
        1.0, np.linalg.norm(ours - theirs), np.abs(ours - theirs).max(), error.max(),
        np.mean(error <= 0.001), np.mean(error <= 0.005),
    ]  # fmt: skip
    assert [float(weight[name]) for name in METRICS] == pytest.approx(expected)
    assert weight["Result"] == "error"  # msprobe passes it, and all that comes of it
    assert weight["Err_message"].startswith('["diverged, off by 0.001 relative where nothing may differ"')
    assert (weight["NPU Dtype"], weight["Bench Tensor Shape"]) == ("torch.float32", "[4, 8]")
    assert (weight["NPU Requires_grad"], weight["Requires_grad Consistent"]) == ("True", "True")
    assert ast.literal_eval(weight["Data_name"]) == ["Functional.linear.0.forward.input.1.pt"] * 2
    assert float(weight["Bench max"]) == theirs.max()

    first = of(rows, "Functional.linear.0.forward.input.0")
    assert [first[name] for name in METRICS] == ["1.0", "0.0", "0.0", "0.0", "1.0", "1.0"]
    assert (first["Result"], first["Err_message"]) == ("pass", "[]")
    assert first["NPU_Stack_Info"].startswith("['File ")
    assert weight["NPU_Stack_Info"] == "N/A"  # it stands at the first tensor of an entry
    blamed = [row["NPU Name"] for row in rows if "a divergence begins here" in row["Err_message"]]
    assert blamed == ["Module.linear_1.Linear.forward.0.output.0"]
    (advice,) = tmp_path.glob("advisor_*.txt")
    assert "First divergence: step 0, forward, call 0 of linear_1 (Linear), output" in advice.read_text()


def test_statistics(dumps: Dumps, tmp_path: Path) -> None:
    rows = table(dumps["statistics 1.001"] / "step1", dumps["statistics 1.0"] / "step1", tmp_path)
    assert list(rows[0]) == [*BASIC, *DIFFERENCES, *STATISTICS, *JUDGED]
    weight = of(rows, "Functional.linear.0.forward.input.1")
    for name, statistic in zip(DIFFERENCES[:4], ("max", "min", "mean", "l2norm"), strict=True):
        npu, bench = float(weight[f"NPU {statistic}"]), float(weight[f"Bench {statistic}"])
        assert float(weight[name]) == npu - bench
        relative = weight[f"{'Norm' if statistic == 'l2norm' else statistic.capitalize()}RelativeErr"]
        assert relative == f"{abs((npu - bench) / bench) * 100}%"
    assert weight["Result"] == "error"
    same = of(rows, "Functional.linear.0.forward.input.0")
    assert [same[name] for name in DIFFERENCES] == ["0.0"] * 4 + ["0"] * 4


def test_checksums(dumps: Dumps, tmp_path: Path) -> None:
    rows = table(dumps["md5 1.001"] / "step0", dumps["md5 1.0"] / "step0", tmp_path)
    assert list(rows[0]) == [*BASIC, "NPU MD5", "BENCH MD5", *JUDGED]
    weight = of(rows, "Functional.linear.0.forward.input.1")
    assert re.fullmatch(r"[0-9a-f]{8}", weight["NPU MD5"])
    assert weight["NPU MD5"] != weight["BENCH MD5"]
    assert weight["Result"] == "error"
    same = of(rows, "Functional.linear.0.forward.input.0")
    assert (same["NPU MD5"], same["Result"]) == (same["BENCH MD5"], "pass")


def test_two_runs_that_are_the_same_pass(dumps: Dumps, tmp_path: Path) -> None:
    rows = table(dumps["tensor 1.0"] / "step0", dumps["tensor 1.0"] / "step0", tmp_path)
    assert {row["Result"] for row in rows} == {"pass"}
    assert {row["Cosine"] for row in rows} == {"1.0"}


def taking(folder: Path, value: float, task: str) -> Path:
    """The dump of one call that is given a number in the middle of others."""
    with debugging(dump_path=folder, task=task, level="L1") as debugger:
        debugger.start()
        torch.relu(torch.tensor([4.0, value, 3.0]))
        debugger.stop()
        debugger.step()
    return folder / "step0"


@pytest.mark.parametrize(("npu", "bench"), [("nan", 2.0), (2.0, "nan"), ("inf", 2.0), ("inf", "-inf"), ("inf", "nan")])
def test_nan_or_infinity_on_one_side_is_not_an_agreement(npu: float | str, bench: float | str, tmp_path: Path) -> None:
    for task, columns, cell in (("tensor", METRICS, "N/A"), ("statistics", DIFFERENCES, "Nan")):
        sides = [taking(tmp_path / task / side, float(one), task) for side, one in (("npu", npu), ("bench", bench))]
        row = of(table(*sides, tmp_path / task / "out"), "Torch.relu.0.forward.input.0")
        assert [row[name] for name in columns] == [cell] * len(columns)  # as msprobe has it, of values and statistics
        assert row["Result"] == "error"


def test_the_same_nan_on_both_sides_is_left_out(tmp_path: Path) -> None:
    sides = [taking(tmp_path / side, float("nan"), "tensor") for side in ("npu", "bench")]
    row = of(table(*sides, tmp_path / "out"), "Torch.relu.0.forward.input.0")
    assert [row[name] for name in METRICS] == ["1.0", "0.0", "0.0", "0.0", "1.0", "1.0"]
    assert row["Result"] == "pass"


def test_entries_on_one_side_only_are_rows_that_say_so(dumps: Dumps, tmp_path: Path) -> None:
    few, all_ = dumps["few 1.0"] / "step0", dumps["statistics 1.0"] / "step0"
    rows = table(few, all_, tmp_path / "a")
    missing = [row for row in rows if row["NPU Name"] == "N/A"]
    assert "Functional.linear.0.forward.input.0" in [row["Bench Name"] for row in missing]
    assert {(row["Result"], row["Err_message"]) for row in missing} == {
        ("warning", '["only in Bench: NPU has no such tensor"]')
    }
    rows = table(all_, few, tmp_path / "b")
    extra = of(rows, "Functional.linear.0.forward.input.0")
    assert (extra["Bench Name"], extra["Result"], extra["Max diff"]) == ("N/A", "warning", "N/A")


def test_a_dump_of_a_few_entries_keeps_their_names(dumps: Dumps, tmp_path: Path) -> None:
    rows = table(dumps["few 1.001"] / "step0", dumps["few 1.0"] / "step0", tmp_path)
    assert {row["NPU Name"].rpartition(".forward")[0] for row in rows if "forward" in row["NPU Name"]} == {
        "Functional.linear.1", "Functional.relu.0"
    }  # fmt: skip


def test_a_workbook(dumps: Dumps, tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    paths = {"npu_path": dumps["tensor 1.001"] / "step0", "bench_path": dumps["tensor 1.0"] / "step0"}
    (file,) = compare(paths, tmp_path, auto_analyze=False, xlsx=True, suffix="_mine")
    assert re.fullmatch(r"compare_result_mine_\d{14}\.xlsx", file.name)
    (plain,) = compare(paths, tmp_path, auto_analyze=False, suffix="_mine")
    lines = list(openpyxl.load_workbook(file).active.iter_rows(values_only=True))
    with plain.open(newline="") as held:
        expected = list(csv.reader(held))
    assert list(lines[0]) == expected[0]
    assert len(lines) == len(expected)
    assert [line[0] for line in lines] == [line[0] for line in expected]
    cosine = expected[0].index("Cosine")
    assert [line[cosine] for line in lines[1:]] == [float(line[cosine]) for line in expected[1:]]


def test_all_steps_have_a_file_each(dumps: Dumps, tmp_path: Path) -> None:
    files = compare_distributed(dumps["tensor 1.001"], dumps["tensor 1.0"], tmp_path, auto_analyze=False)
    assert [re.sub(r"\d{14}", "T", file.name) for file in files] == [
        "compare_result_step0_T.csv", "compare_result_step1_T.csv"
    ]  # fmt: skip


def test_a_step_with_several_ranks(dumps: Dumps, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own example gives the folder of a step, in which ranks lie as they do in a run of astray's."""
    for name, scale in (("npu", 1.001), ("bench", 1.0)):
        for rank in (0, 1):
            shutil.copytree(dumps[f"statistics {scale}"] / "step0" / "rank", tmp_path / name / "step0" / f"rank{rank}")
    assert astray.open(tmp_path / "npu" / "step0").info.settings["format"] == "msprobe"
    paths = str(tmp_path / "npu" / "step0"), str(tmp_path / "bench" / "step0")
    assert main(["compare", "-tp", paths[0], "-gp", paths[1], "-o", str(tmp_path / "out")]) == 0
    names = [re.sub(r"\d{14}", "T", Path(line).name) for line in capsys.readouterr().out.splitlines()]
    assert names == ["compare_result_rank0_T.csv", "compare_result_rank1_T.csv", "advisor_T.txt"]


def test_one_step_with_another(dumps: Dumps, tmp_path: Path) -> None:
    rows = table(dumps["tensor 1.0"] / "step1", dumps["tensor 1.0"] / "step0", tmp_path)
    assert of(rows, "Functional.linear.0.forward.input.0")["Result"] == "error"  # another batch
    assert of(rows, "Functional.linear.0.forward.input.1")["Result"] == "pass"  # the same weight: nothing updates it


def test_a_dump_against_a_run_of_astray(dumps: Dumps, tmp_path: Path) -> None:
    from msprobe_parts import batches

    model = network()
    with astray.record(tmp_path / "run", model, level=["module", "function"], keep="tensors") as rec:
        for x in batches(2):
            model(x).sum().backward()
            rec.step()
    files = compare({"npu_path": tmp_path / "run", "bench_path": dumps["tensor 1.0"]}, tmp_path / "out")
    with files[0].open(newline="") as held:
        rows = list(csv.DictReader(held))
    matched = [row for row in rows if "N/A" not in (row["NPU Name"], row["Bench Name"])]
    assert {row["Result"] for row in matched} == {"pass"}
    assert (
        of(rows, "Module.linear_1.Linear.forward.0.output.0")["Bench Name"]
        == "Module.linear_1.Linear.forward.0.output.0"
    )
    # The outermost module, which msprobe has not, and of the last node of `linear` what is not an argument's gradient.
    assert {row["Bench Name"] for row in rows if row not in matched} == {
        "N/A", "Functional.linear.0.backward.output.2", "Functional.linear.1.backward.output.2"
    }  # fmt: skip


def test_a_mapping_says_which_is_which(dumps: Dumps, tmp_path: Path) -> None:
    mapping = {"Functional.linear.0.forward": "Functional.linear.1.forward"}
    rows = table(dumps["tensor 1.0"] / "step0", dumps["tensor 1.0"] / "step0", tmp_path, data_mapping=mapping)
    assert of(rows, "Functional.linear.0.forward.input.0")["Bench Name"] == "Functional.linear.1.forward.input.0"
    one = tmp_path / "map.yaml"
    one.write_text("Functional.linear.0.forward.output.0: Functional.linear.1.forward.input.0\n")
    rows = table(dumps["tensor 1.0"] / "step0", dumps["tensor 1.0"] / "step0", tmp_path, data_mapping=one)
    assert of(rows, "Functional.linear.0.forward.output.0")["Bench Name"] == "Functional.linear.1.forward.input.0"
    assert of(rows, "Functional.linear.0.forward.output.0")["Result"] == "pass"
    with pytest.raises(
        CompareError, match=r"data_mapping says 'Functional.gelu.0.forward': .* one of them is not there"
    ):
        table(dumps["tensor 1.0"], dumps["tensor 1.0"], tmp_path, data_mapping={"Functional.gelu.0.forward": "x"})
    with pytest.raises(CompareError, match="data_mapping is 3"):
        table(dumps["tensor 1.0"], dumps["tensor 1.0"], tmp_path, data_mapping=3)


def test_modules_of_other_names(dumps: Dumps, tmp_path: Path) -> None:
    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            right = network()
            self.first, self.linear_2 = right.linear_1, right.linear_2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.relu(self.linear_2(self.first(x)))

    with debugging(task="tensor", level="L0", dump_path=tmp_path / "dump") as debugger:
        train(debugger, model := Renamed(), 1, model)
    npu, bench = tmp_path / "dump" / "step0", dumps["tensor 1.0"] / "step0"
    rows = table(npu, bench, tmp_path, cell_mapping={"first.Linear": "linear_1.Linear"})
    row = of(rows, "Module.first.Linear.forward.0.output.0")
    assert (row["Bench Name"], row["Result"]) == ("Module.linear_1.Linear.forward.0.output.0", "pass")
    fuzzy = of(table(npu, bench, tmp_path, fuzzy_match=True), "Module.first.Linear.forward.0.output.0")
    assert fuzzy["Bench Name"] == "Module.linear_1.Linear.forward.0.output.0"


def test_what_the_program_saved(tmp_path: Path) -> None:
    for scale in (1.0, 1.001):
        with debugging(task="tensor", level="debug", dump_path=tmp_path / str(scale)) as debugger:
            out = network(scale)(torch.ones(1, 8))
            debugger.save(out.sum(), "loss")
            debugger.step()
    (file,) = compare(
        {"npu_path": tmp_path / "1.001" / "step0" / "rank" / "debug.json", "bench_path": tmp_path / "1.0"},
        tmp_path / "out", auto_analyze=False,
    )  # fmt: skip
    assert re.fullmatch(r"debug_compare_result_\d{14}\.csv", file.name)
    with file.open(newline="") as held:
        (row,) = csv.DictReader(held)
    assert (row["NPU Name"], row["NPU Tensor Shape"], row["Result"]) == ("loss.0.debug", "[]", "error")
    assert float(row["Cosine"]) == 1.0  # of a single number too, where msprobe says that it is unsupported


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer_mapping": "x"}, "layer_mapping='x' is not supported. Give data_mapping"),
        ({"api_mapping": True}, "api_mapping=True is not supported."),
        ({"fuzy_match": True}, "fuzy_match=True is not an option of compare."),
    ],
)
def test_options_that_are_not_there(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        compare({"npu_path": "a", "bench_path": "b"}, tmp_path, **options)


def test_inputs_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"input_param has 'npu_pth'. .* Did you mean 'npu_path'?"):
        compare({"npu_pth": "a", "bench_path": "b"}, tmp_path)
    with pytest.raises(UsageError, match=r"input_param has no path bench_path: it is None."):
        compare({"npu_path": "a"}, tmp_path)
    with pytest.raises(RunError, match="does not exist"):
        compare({"npu_path": tmp_path / "a" / "dump.json", "bench_path": tmp_path}, tmp_path)


def test_the_command(dumps: Dumps, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["-tp", str(dumps["tensor 1.001"] / "step0"), "-gp", str(dumps["tensor 1.0"] / "step0")]
    assert main(["compare", *paths, "-o", str(tmp_path / "out"), "-fm"]) == 0
    table, advice = capsys.readouterr().out.split()
    assert re.fullmatch(r"compare_result_\d{14}\.csv", Path(table).name)
    assert Path(advice).read_text().count("First divergence") == 1
    assert main(["compare", *paths[:3], str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith(f"msprobe compare: {tmp_path / 'nowhere'} does not exist.")


def test_arguments_that_are_not_tensors_are_rows(tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    for name, eps, dim in (("npu", 1e-3, 0), ("bench", 1e-5, 0)):
        with debugging(level="L1", dump_path=tmp_path / name) as debugger:
            debugger.start()
            F.layer_norm(x, (4,), eps=eps)
            torch.softmax(x, dim)
            x.reshape(x.shape)
            F.embedding(torch.tensor([0]), x, None)
            if name == "npu":
                x.clamp(0.5)
            debugger.stop()
    files = compare({"npu_path": tmp_path / "npu", "bench_path": tmp_path / "bench"}, tmp_path / "out")
    with files[0].open(newline="") as held:
        rows = list(csv.DictReader(held))
    entry = "Functional.layer_norm.0.forward"
    assert [row["NPU Name"] for row in rows if row["NPU Name"].startswith(entry)] == [
        f"{entry}.input.0", f"{entry}.input.1.0", f"{entry}.input.eps", f"{entry}.output.0"
    ]  # fmt: skip
    eps = of(rows, f"{entry}.input.eps")
    assert (eps["Bench Name"], eps["NPU Dtype"], eps["NPU max"], eps["Bench l2norm"]) == (
        f"{entry}.input.eps", "<class 'float'>", "0.001", "1e-05"
    )  # fmt: skip
    assert eps["Result"] == "error"
    assert json.loads(eps["Err_message"]) == ["the argument is 0.001 in NPU and 1e-05 in Bench"]
    assert (of(rows, "Torch.softmax.0.forward.input.1")["Result"], eps["Max diff"]) == ("pass", str(1e-3 - 1e-5))
    size = of(rows, "Tensor.reshape.0.forward.input.1")
    assert (size["NPU Dtype"], size["NPU Tensor Shape"], size["NPU max"]) == ("torch.Size", "[2, 4]", "None")
    nothing = of(rows, "Functional.embedding.0.forward.input.2")
    assert (nothing["NPU Dtype"], nothing["NPU max"], nothing["Result"]) == ("N/A", "None", "pass")
    alone = of(rows, "Tensor.clamp.0.forward.input.1")
    assert (alone["Bench Name"], alone["Result"]) == ("N/A", "warning")
    books = compare({"npu_path": tmp_path / "npu", "bench_path": tmp_path / "bench"}, tmp_path / "book", xlsx=True)
    assert books[0].suffix == ".xlsx"
