"""Programs written for torch_npu.hooks, with their imports changed and `.npu()` left out."""

from __future__ import annotations

import copy
import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.capture.adapters import TensorIdentity, TensorReading
from astray.capture.pytorch import adapter
from astray.capture.pytorch.tensors import TorchReader
from astray.compat import torch_npu
from astray.compat.torch_npu import (
    Overflow,
    register_hook,
    schedule,
    seed_all,
    set_dump_path,
    step_schedule,
    wrap_acc_cmp_hook,
    wrap_async_datadump_hook,
    wrap_checkoverflow_hook,
)
from astray.compat.torch_npu.tools import compare
from astray.errors import CompareError, RecordError, RunError, RunExists, UsageError
from astray.store import BackgroundWriter

CASES = Path(__file__).parents[2] / "cases" / "torch_npu_hooks"
KNOWN = [
    "NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape", "Bench Tensor Shape",
    "Cosine", "RMSE", "MAPE",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    step_schedule.reset_step()
    yield
    torch_npu.stop()
    assert torch._C._len_torch_function_stack() == 0
    assert not nn.modules.module._global_forward_hooks


class ModuleOP(nn.Module):
    """The model of the documents."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features=2, out_features=2)
        self.linear_2 = nn.Linear(in_features=2, out_features=1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.linear_2(self.linear_1(x)))


class ConvNet(nn.Module):
    """A residual network small enough to be run here."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        y = self.conv(x)
        y += x
        return self.head(self.pool(y).flatten(1))


def lines(path: str | Path) -> list[list[Any]]:
    """A dump as its users read it."""
    return [json.loads(one) for one in Path(path).read_text().splitlines()]


def names(path: str | Path) -> list[str]:
    return [line[0] for line in lines(path)]


def table(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: str, *rows: Any) -> Path:
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Path(path)


# -- the examples of the documents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [True, False])
def test_the_first_example(sample: bool) -> None:
    module = ModuleOP()
    register_hook(module, wrap_acc_cmp_hook, sample=sample)
    seed_all()
    x = torch.randn(2, 2)
    set_dump_path("./cpu_module_op.pkl")
    module(x).sum().backward()
    set_dump_path("./npu_module_op.pkl")
    module(x).sum().backward()
    compare("./npu_module_op.pkl", "./cpu_module_op.pkl", "./module_result.csv")
    assert names("cpu_module_op.pkl") == names("npu_module_op.pkl") == [
        "0_Functional_linear_forward_input.0",
        "1_Functional_linear_forward_input.1",
        "2_Functional_linear_forward_input.2",
        "3_Functional_linear_forward_output",
        "4_Functional_linear_forward_input.0",
        "5_Functional_linear_forward_input.1",
        "6_Functional_linear_forward_input.2",
        "7_Functional_linear_forward_output",
        "8_Functional_relu_forward_input.0",
        "9_Functional_relu_forward_output",
        "10_Tensor_sum_forward_input.0",
        "11_Tensor_sum_forward_output",
        "12_Tensor_sum_backward_input.0",
        "13_Tensor_sum_backward_output.0",
        "14_Functional_relu_backward_input.0",
        "15_Functional_relu_backward_output.0",
        "16_Functional_linear_backward_input.0",
        "17_Functional_linear_backward_input.1",
        "18_Functional_linear_backward_input.2",
        "19_Functional_linear_backward_output.0",
        "20_Functional_linear_backward_input.1",
        "21_Functional_linear_backward_input.2",
        "22_Functional_linear_backward_output.0",
    ]  # fmt: skip
    first = lines("cpu_module_op.pkl")[0]
    values = x.ravel().tolist()
    assert first[1][:4] == values
    assert first[1][4:] == ([max(values), min(values), pytest.approx(np.mean(values), rel=1e-12)] if sample else [])
    assert first[2:] == ["torch.float32", [2, 2]]
    rows = table("module_result.csv")
    assert list(rows[0])[:9] == KNOWN
    assert len(rows) == 23
    assert {row["RMSE"] for row in rows} == {"0.0"}
    assert all(row["Note"].startswith("sampled: ") == sample for row in rows)


def test_the_example_of_a_larger_model_in_two_copies() -> None:
    model_cpu = ConvNet().eval()
    model_npu = copy.deepcopy(model_cpu).eval()
    with torch.no_grad():
        model_npu.conv.weight *= 1.01
    seed_all()
    register_hook(model_cpu, wrap_acc_cmp_hook, sample=False)
    register_hook(model_npu, wrap_acc_cmp_hook, sample=False)
    inputs, labels = torch.randn(1, 3, 8, 8), torch.tensor([3])
    criterion = nn.CrossEntropyLoss()
    for name, model in (("cpu", model_cpu), ("npu", model_npu)):
        set_dump_path(f"./{name}_resnet50_op.pkl")
        criterion(model(inputs), labels).backward()
    compare("./npu_resnet50_op.pkl", "./cpu_resnet50_op.pkl", "./resnet50_result.csv")
    rows = table("resnet50_result.csv")
    wrong = [row["NPU Name"].partition("_")[2] for row in rows if row["RMSE"] != "0.0"]
    assert wrong[0] == "Functional_conv2d_forward_input.1"  # the weight, of the second convolution
    assert [row["NPU Tensor Dtype"] for row in rows if "cross_entropy_forward_input.1" in row["NPU Name"]] == [
        "torch.int64"
    ]  # integers were left out by the original, and so were tensors without dimensions:
    assert any(row["NPU Tensor Shape"] == "[]" for row in rows)
    assert all(row["Bench Name"] for row in rows)
    kinds = {name.split("_", 2)[2] for name in names("npu_resnet50_op.pkl")}
    assert {"conv2d_backward_input.1", "batch_norm_forward_input.3", "__iadd___forward_input.0"} <= kinds


def test_the_example_of_a_schedule() -> None:
    model = ModuleOP()
    register_hook(model, wrap_acc_cmp_hook, schedule=schedule(4, 10, 2), sample=False)
    set_dump_path("steps.pkl")
    for epoch in range(2):
        step_schedule.reset_step()
        for step in range(12):
            inputs = torch.full((1, 2), 100.0 * epoch + step)
            model(inputs).sum().backward()
            step_schedule.step()
    torch_npu.stop()
    firsts = [line[1][0] for line in lines("steps.pkl") if "linear_forward_input.0" in line[0]][::2]
    assert firsts == [4.0, 6.0, 8.0, 10.0, 104.0, 106.0, 108.0, 110.0]
    backwards = [name for name in names("steps.pkl") if "linear_backward_output" in name]
    assert len(backwards) == 16


@pytest.mark.parametrize(
    ("made", "steps"),
    [
        (schedule(), [0, 1, 2, 3, 4]),
        (schedule(begin=5, stride=3), [5, 8, 11, 14]),
        (schedule(end=10, stride=3), [0, 3, 6, 9]),
        (schedule(4, 10, 2), [4, 6, 8, 10]),
        (schedule(2, 2), [2]),
    ],
)
def test_schedules_as_the_documents_have_them(made: Callable[[int], bool], steps: list[int]) -> None:
    assert [step for step in range(15) if made(step)][: len(steps)] == steps


def test_the_example_of_asynchronous_dumps() -> None:
    module = ModuleOP()
    register_hook(module, wrap_async_datadump_hook, path="./output", schedule=schedule(1, 2))
    x = torch.randn(2, 2)
    for _ in range(4):
        module(x).sum().backward()
        step_schedule.step()
    torch_npu.stop()
    found = sorted(path.name for path in Path("output").iterdir())
    assert "4_Functional_relu_forward_input0_shape[2,1]_stride[1,1]_offset[0]_format[2].npy" in found
    first = np.load("output/0_Functional_linear_forward_input0_shape[2,2]_stride[2,1]_offset[0]_format[2].npy")
    np.testing.assert_array_equal(first, x.numpy())
    assert sum("_linear_forward_input0" in name for name in found) == 4  # two layers, two steps
    assert len(found) == len(set(found)) == 46
    assert len(astray.open("output").ranks[0].tensors) == 46
    compare("output", "output", "same.csv")
    assert {row["RMSE"] for row in table("same.csv")} == {"0.0"}


def test_the_example_of_an_overflow() -> None:
    model = ConvNet()
    register_hook(model, wrap_checkoverflow_hook)
    criterion = nn.CrossEntropyLoss()
    criterion(model(torch.randn(1, 3, 8, 8)), torch.tensor([3])).backward()
    with torch.no_grad():
        model.head.weight.fill_(3e38)
    with pytest.raises(ValueError, match=r"^Overflow in Functional_linear_forward\. Its stack, inputs") as caught:
        model(torch.rand(1, 3, 8, 8) * 1e3)
    error = caught.value
    assert isinstance(error, Overflow)
    assert isinstance(error, astray.AstrayError)
    assert error.path is not None
    assert error.path.parent == Path.cwd()
    told = lines(error.path)
    assert told[0][0] == "Functional_linear_forward_stack_info.0"
    assert "return self.head(" in told[0][1]
    tensors = [line for line in told if "stack_info" not in line[0]]
    ends = ("input.0", "input.1", "input.2", "output")
    assert [line[0] for line in tensors] == [f"Functional_linear_forward_{end}" for end in ends]
    assert not np.isfinite(tensors[-1][1]).any()
    assert tensors[1][1] == model.head.weight.ravel().tolist()
    assert error.trip.path is not None
    assert astray.open(error.trip.path).alarms()[0].origin.site == "head/linear"
    model(torch.rand(1, 3, 8, 8) * 1e3)  # the check is over


@pytest.mark.parametrize("backward", [torch.Tensor.backward, torch.autograd.backward])
def test_an_overflow_in_the_backward_pass(backward: Callable[[torch.Tensor], None]) -> None:
    model = nn.Linear(2, 2, bias=False)
    register_hook(model, wrap_checkoverflow_hook)
    with pytest.raises(Overflow, match="Overflow in Torch_sqrt_backward") as caught:
        backward(torch.sqrt((model(torch.zeros(1, 2)) ** 2).sum()))
    assert [line[0] for line in lines(caught.value.path or "")][-2:] == [
        "Torch_sqrt_backward_input.0",
        "Torch_sqrt_backward_output.0",
    ]


# -- what the hooks must not do --------------------------------------------------------------------------------------


def train(steps: int, model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.randint(0, 5, (4,))).backward()
        optimizer.step()
    return [
        *(p.detach().clone() for p in model.parameters()),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("hook", [wrap_acc_cmp_hook, wrap_async_datadump_hook, wrap_checkoverflow_hook])
def test_no_bit_of_a_training_changes(hook: Any) -> None:
    torch.manual_seed(0)
    bare = ConvNet()
    hooked = copy.deepcopy(bare)
    expected = train(2, bare)
    register_hook(hooked, hook, path="out")
    if hook is wrap_acc_cmp_hook:
        set_dump_path("train.pkl")
    for one, other in zip(expected, train(2, hooked), strict=True):
        assert torch.equal(one, other)


def test_a_file_may_be_set_before_the_model_and_moved_between_models() -> None:
    one, other = ModuleOP(), ModuleOP()
    set_dump_path("a.pkl")
    register_hook(one, wrap_acc_cmp_hook, sample=False)
    one(torch.ones(1, 2))
    register_hook(other, wrap_acc_cmp_hook, sample=False)  # goes on in the same file
    other(torch.ones(1, 2))
    one.to(torch.float64)  # as .npu() would
    one(torch.ones(1, 2, dtype=torch.float64))
    set_dump_path("b.pkl")
    other(torch.ones(1, 2))
    torch_npu.stop()
    numbers = [int(name.partition("_")[0]) for name in names("a.pkl")]
    assert numbers == list(range(len(numbers)))
    linear = [line for line in lines("a.pkl") if "linear_forward_output" in line[0]]
    assert [line[2] for line in linear] == ["torch.float32"] * 4 + ["torch.float64"] * 2
    assert names("b.pkl")[0] == "0_Torch_ones_forward_output"


def test_the_same_file_again_begins_anew() -> None:
    model = ModuleOP()
    register_hook(model, wrap_acc_cmp_hook)
    x = torch.ones(1, 2)
    for _ in range(2):
        set_dump_path("a.pkl")
        model(x)
    torch_npu.stop()
    assert names("a.pkl")[0] == "0_Functional_linear_forward_input.0"
    assert len(names("a.pkl")) == 10


def test_a_file_that_is_not_a_dump_is_not_replaced() -> None:
    Path("mine.pkl").write_text("precious")
    register_hook(ModuleOP(), wrap_acc_cmp_hook)
    with pytest.raises(RunExists, match="is there already, and is not a dump"):
        set_dump_path("mine.pkl")
    assert Path("mine.pkl").read_text() == "precious"


def test_wrong_arguments_are_answered_in_words() -> None:
    with pytest.raises(UsageError, match="None is not the name of a file"):
        set_dump_path()
    with pytest.raises(UsageError, match=r"is a folder\. Give the name of a file in it"):
        set_dump_path(".")
    with pytest.raises(UsageError, match=r"is not a hook\. Give one of wrap_acc_cmp_hook, wrap_async"):
        register_hook(ModuleOP(), print)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"Pass a torch\.nn\.Module"):
        register_hook(3, wrap_acc_cmp_hook)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no step in it"):
        schedule(5, 4)


def test_hooks_without_a_file_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = ModuleOP()
    register_hook(model, wrap_acc_cmp_hook)
    model(torch.ones(1, 2))
    torch_npu.stop()
    assert "set_dump_path was not, so nothing was dumped" in caplog.text


def test_each_rank_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        model = ModuleOP()
        register_hook(model, wrap_acc_cmp_hook)
        register_hook(model, wrap_async_datadump_hook, path="folder")
        set_dump_path("dumps/npu.pkl")
        model(torch.ones(1, 2))
        compare("dumps/npu.pkl", "dumps/npu.pkl", f"{rank}.csv")
        torch_npu.stop()
    assert sorted(path.name for path in Path("dumps").iterdir()) == ["npu_rank0.pkl", "npu_rank1.pkl"]
    assert sorted(astray.open("dumps").ranks) == sorted(astray.open("folder").ranks) == [0, 1]


KILLED = """
import time, sys
from pathlib import Path
import torch
from torch import nn
from astray.compat.torch_npu import register_hook, set_dump_path, wrap_acc_cmp_hook

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
register_hook(model, wrap_acc_cmp_hook, sample=False)
x = torch.ones(2, 4)
set_dump_path(sys.argv[1])
for _ in range(3):
    model(x).sum().backward()
for _ in range(1000):  # nothing asks for it to be written
    if len(Path(sys.argv[1]).read_text().splitlines()) == 3 * 15:
        print("written", flush=True)
        break
    time.sleep(0.05)
else:
    sys.exit("nothing was written")
while True:
    model(x).sum().backward()
"""


def test_a_killed_program_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "killed.pkl"
    program = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    with program:
        assert program.stdout.readline() == "written\n"
        os.kill(program.pid, signal.SIGKILL)
    run = astray.open(path)
    assert run.problems == [] or not path.read_bytes().endswith(b"\n")
    rank = run.ranks[0]
    assert len(rank.tensors) >= 45
    written = [line.split(b"_", 1)[1].split(b'"')[0] for line in path.read_bytes().splitlines()[:30]]
    assert written[:15] == written[15:]


UNSTOPPED = """
import sys, torch
from torch import nn
from astray.compat.torch_npu import register_hook, set_dump_path, wrap_acc_cmp_hook
model = nn.Linear(4, 4)
register_hook(model, wrap_acc_cmp_hook)
set_dump_path(sys.argv[1])
model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.slow
def test_a_program_that_ends_has_written_everything(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", UNSTOPPED, str(tmp_path / "a.pkl")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert len(names(tmp_path / "a.pkl")) == 12


# -- compare ---------------------------------------------------------------------------------------------------------


def test_real_dumps_give_the_rows_of_the_original() -> None:
    compare(CASES / "full_a.pkl", CASES / "full_b.pkl", "out.csv")
    found, expected = table("out.csv"), table(CASES / "full.csv")
    assert len(found) == len(expected) == 25
    values = [{line[0]: np.array(line[1]) for line in lines(CASES / f"full_{name}.pkl")} for name in "ab"]
    for row, other in zip(found, expected, strict=True):
        assert {name: row[name] for name in KNOWN if name != "Cosine"} == {
            name: other[name] for name in KNOWN if name != "Cosine"
        }
        npu, bench = values[0][row["NPU Name"]], values[1][row["Bench Name"]]
        cosine = float(npu @ bench / np.linalg.norm(npu) / np.linalg.norm(bench))
        assert float(row["Cosine"]) == pytest.approx(cosine, abs=1e-14)
        assert float(other["Cosine"]) == pytest.approx(0.5 + 0.5 * cosine, abs=1e-14)
        assert row["Note"] == ""


def of(values: Any, dtype: str = "float32", shape: list[int] | None = None) -> list[Any]:
    return [values, f"torch.{dtype}", [len(values)] if shape is None else shape]


LEFT_OUT = "MAPE leaves out 1 of 2 numbers that are 0 in bench"


def test_operators_without_a_partner_are_rows() -> None:
    one = of([2.0, 0.0])
    npu = write(
        "npu.pkl",
        ["0_Torch_tanh_forward_input.0", *one],
        ["1_Torch_tanh_forward_output", *one],
        ["2_NPU_fused_forward_input.0", *one],
        ["3_NPU_fused_forward_output", *one],
        ["4_Torch_exp_forward_input.0", *one],
        ["5_Torch_exp_forward_output", *one],
    )
    bench = write(
        "bench.pkl",
        ["0_Torch_tanh_forward_input.0", *one],
        ["1_Torch_tanh_forward_output", *one],
        ["2_Torch_mul_forward_input.0", *one],
        ["3_Torch_mul_forward_input.1", *one],
        ["4_Torch_mul_forward_output", *one],
        ["5_Torch_exp_forward_input.0", *one],
        ["6_Torch_exp_forward_output", *one],
    )
    compare(npu, bench, "out.csv")
    assert [(row["NPU Name"][:1], row["Bench Name"][:1], row["Cosine"], row["Note"]) for row in table("out.csv")] == [
        ("0", "0", "1.0", LEFT_OUT),
        ("1", "1", "1.0", LEFT_OUT),
        ("", "2", "", "only in the bench dump: this operator has no partner"),
        ("", "3", "", "only in the bench dump: this operator has no partner"),
        ("", "4", "", "only in the bench dump: this operator has no partner"),
        ("2", "", "", "only in the NPU dump: this operator has no partner"),
        ("3", "", "", "only in the NPU dump: this operator has no partner"),
        ("4", "5", "1.0", LEFT_OUT),
        ("5", "6", "1.0", LEFT_OUT),
    ]


def test_shapes_count_when_they_are_asked_for() -> None:
    npu = write("npu.pkl", ["0_Torch_tanh_forward_input.0", *of([1.0])], ["1_Torch_exp_forward_input.0", *of([1.0])])
    other = ["0_Torch_tanh_forward_input.0", *of([1.0, 2.0])]
    bench = write("bench.pkl", other, ["1_Torch_exp_forward_input.0", *of([1.0])])
    compare(npu, bench, "loose.csv")
    loose = table("loose.csv")
    cells = [loose[0][name] for name in ("Cosine", "RMSE", "MAPE", "Note")]
    assert cells == [*["cannot be calculated"] * 3, "the shapes differ"]
    compare(npu, bench, "strict.csv", shape_flag=True)
    strict = [(row["NPU Name"][:1], row["Bench Name"][:1]) for row in table("strict.csv")]
    assert strict == [("", "0"), ("0", ""), ("1", "1")]


def test_numbers_that_are_not_there_have_their_reason() -> None:
    rows = [
        ("zeros", of([0.0, 0.0]), of([1.0, 0.0])),
        ("nan", of([4.0, float("nan"), 3.0]), of([4.0, 2.0, 3.0])),
        ("empty", of([], shape=[0, 3]), of([], shape=[0, 3])),
        ("scalar", of([2.0], shape=[]), of([4.0], shape=[])),
        ("whole", of([1, 2], "int64"), of([1, 4], "int64")),
        ("broken", of([1.0, None]), of([1.0, 2.0])),
    ]
    paths = [
        write(f"{side}.pkl", *([f"{i}_Torch_{row[0]}_forward_input.0", *row[side]] for i, row in enumerate(rows)))
        for side in (1, 2)
    ]
    compare(*paths, "out.csv")
    found = [[row[name] for name in ("Cosine", "RMSE", "MAPE", "Note")] for row in table("out.csv")]
    cosine = 9 / (np.sqrt(5) * np.sqrt(17))
    assert [found[0][0], float(found[0][1]), found[0][2]] == ["nan", pytest.approx(np.sqrt(0.5)), "100.0%"]
    zero, without = found[0][3].split("; ")
    assert zero == "cosine is nan because NPU is a zero vector"
    assert without == "MAPE leaves out 1 of 2 numbers that are 0 in bench"
    odd = "1 of 3 numbers are NaN or infinite on one side, and something else on the other"
    assert found[1] == ["nan", "nan", "nan%", odd]
    assert found[2] == ["nan", "nan", "nan%", "the tensors are empty"]
    assert found[3] == ["1.0", "2.0", "50.0%", ""]
    assert float(found[4][0]) == pytest.approx(cosine, abs=1e-15)
    assert float(found[4][1]) == pytest.approx(np.sqrt(2.0), rel=1e-15)
    assert found[4][2:] == ["25.0%", ""]
    assert found[5][:3] == ["cannot be calculated"] * 3
    assert "are not a plain list of numbers" in found[5][3]


@pytest.mark.parametrize(
    ("npu", "bench"),
    [("nan", 2.0), (2.0, "nan"), ("inf", 2.0), ("-inf", 2.0), ("inf", "-inf"), ("inf", "nan")],
)
def test_nan_or_infinity_on_one_side_is_not_an_agreement(npu: float | str, bench: float | str) -> None:
    write("npu.pkl", ["0_Torch_tanh_forward_input.0", *of([4.0, float(npu), 3.0])])
    write("bench.pkl", ["0_Torch_tanh_forward_input.0", *of([4.0, float(bench), 3.0])])
    compare("npu.pkl", "bench.pkl", "out.csv")
    (row,) = table("out.csv")
    assert [row[name] for name in ("Cosine", "RMSE", "MAPE")] == ["nan", "nan", "nan%"]
    assert row["Note"] == "1 of 3 numbers are NaN or infinite on one side, and something else on the other"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_the_same_nan_on_both_sides_is_left_out(value: str) -> None:
    for path in ("npu.pkl", "bench.pkl"):
        write(path, ["0_Torch_tanh_forward_input.0", *of([4.0, float(value), 3.0])])
    compare("npu.pkl", "bench.pkl", "out.csv")
    (row,) = table("out.csv")
    assert [row[name] for name in ("Cosine", "RMSE", "MAPE")] == ["1.0", "0.0", "0.0%"]
    assert row["Note"] == "1 of 3 numbers are the same NaN or infinity on both sides, and are left out"


def test_no_operator_of_the_same_shapes_is_a_table_all_the_same() -> None:
    npu = write("npu.pkl", ["0_Torch_tanh_forward_input.0", *of([1.0])])
    bench = write("bench.pkl", ["0_Torch_tanh_forward_input.0", *of([1.0, 2.0])])
    compare(npu, bench, "out.csv", shape_flag=True)
    notes = [(row["NPU Name"], row["Bench Name"], row["Note"]) for row in table("out.csv")]
    assert notes == [
        ("", "0_Torch_tanh_forward_input.0", "only in the bench dump: this operator has no partner"),
        ("0_Torch_tanh_forward_input.0", "", "only in the NPU dump: this operator has no partner"),
    ]
    with pytest.raises(CompareError, match="have no operator in common"):
        compare(npu, write("other.pkl", ["0_Torch_exp_forward_input.0", *of([1.0])]), "other.csv", shape_flag=True)


class SimulatedDeviceReader(TorchReader):
    """Takes the CPU for a device, so that values go the way of a device's."""

    def read(self, tensor: torch.Tensor, identity: TensorIdentity | None, statistics: bool) -> TensorReading:
        near = super().read(tensor, identity, statistics)
        if near.memory is None:
            return near
        return self._measured(near, tensor if identity is not None else near.owner, statistics)


@pytest.fixture(params=["near", "far", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "far":
        monkeypatch.setattr(adapter, "TorchReader", SimulatedDeviceReader)
    return "cuda" if request.param == "cuda" else "cpu"


def test_a_sampled_dump_reads_the_sample_and_no_more(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    values = BackgroundWriter.values

    def counting(self: BackgroundWriter, data: Any, *args: Any, **named: Any) -> Any:
        taken.append(data.nbytes)
        return values(self, data, *args, **named)

    monkeypatch.setattr(BackgroundWriter, "values", counting)
    model = nn.Linear(64, 128).to(device)
    x = torch.linspace(-1.0, 2.0, 64 * 32).reshape(64, 32).to(device)
    whole: list[list[Any]] = []
    for sample in (False, True):
        taken.clear()
        register_hook(model, wrap_acc_cmp_hook, sample=sample)
        set_dump_path(f"{sample}.pkl")
        model(x.t()).sum().backward()
        torch_npu.stop()
        whole = whole or lines("False.pkl")
        assert max(taken) == (40 if sample else 4 * 64 * 128)  # ten numbers of float32
    for line, all_of_it in zip(lines("True.pkl"), whole, strict=True):
        numbers = all_of_it[1]
        mean = pytest.approx(np.mean(numbers), rel=1e-6, abs=1e-6)
        assert line == [all_of_it[0], [*numbers[:10], max(numbers), min(numbers), mean], *all_of_it[2:]]


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_the_summary_of_a_sampled_dump_is_of_all_numbers(bad: str, device: str) -> None:
    x = torch.ones(100, device=device)
    x[70] = float(bad)
    register_hook(nn.Tanh(), wrap_acc_cmp_hook)
    set_dump_path("out.pkl")
    torch.tanh(x)
    torch_npu.stop()
    first = lines("out.pkl")[0]
    assert first[1][:10] == [1.0] * 10
    expected = [function(x).item() for function in (torch.max, torch.min, torch.mean)]
    np.testing.assert_array_equal(first[1][10:], expected)


def test_a_sampled_dump_against_a_whole_one() -> None:
    values = np.random.default_rng(0).normal(size=40)
    other = values * 1.5
    sampled = [*values[:10], values.max(), values.min(), values.mean()]
    bench = [*other[:10], other.max(), other.min(), other.mean()]
    npu = write("npu.pkl", ["0_Torch_tanh_forward_input.0", *of(sampled, "float64", [5, 8])])
    whole = write("bench.pkl", ["0_Torch_tanh_forward_input.0", *of(other.tolist(), "float64", [5, 8])])
    compare(npu, whole, "out.csv")
    row = table("out.csv")[0]
    assert row["Note"] == "sampled: 10 values, max, min and mean"
    assert float(row["RMSE"]) == pytest.approx(np.sqrt(np.mean((np.array(sampled) - bench) ** 2)), rel=1e-12)
    assert row["MAPE"] == "33.3333%"


def test_what_cannot_be_compared_is_said_and_nothing_is_written() -> None:
    npu = write("npu.pkl", ["0_Torch_tanh_forward_input.0", *of([1.0])])
    with pytest.raises(RunError, match=r"missing\.pkl does not exist\. Was set_dump_path called"):
        compare(npu, "missing.pkl", "out.csv")
    with pytest.raises(CompareError, match="have no operator in common"):
        compare(npu, write("other.pkl", ["0_Torch_exp_forward_input.0", *of([1.0])]), "out.csv")
    Path("real.pkl").write_bytes(b"\x80\x04N.")
    with pytest.raises(RunError, match="is a real pickle"):
        compare(npu, "real.pkl", "out.csv")
    assert not Path("out.csv").exists()
