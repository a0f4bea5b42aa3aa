"""A program written for msprobe runs with the import changed, and leaves msprobe's files."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import astray
from astray.capture.pytorch.experiments.determinism import WithoutDropout
from astray.compat.msprobe import PrecisionDebugger, seed_all
from astray.errors import RecordError, UsageError
from msprobe_parts import ModuleOP, batches, configured, debugging, names, network, read, tensors, train

FORWARD = ["Functional.linear.0.forward", "Functional.linear.1.forward", "Functional.relu.0.forward"]
TWO, FOUR = torch.ones(2), torch.ones(4)
BACKWARD = ["Functional.relu.0.backward", "Functional.linear.1.backward", "Functional.linear.0.backward"]


# -- the examples of its document ------------------------------------------------------------------------------------


def test_example_2_1_a_model(tmp_path: Path) -> None:
    config = configured(tmp_path, task="tensor", level="mix", tensor={"scope": [], "list": [], "data_mode": ["all"]})
    module = network()
    with debugging(str(config), model=module) as debugger:
        debugger.start()
        x = torch.randn(10, 8)
        out = module(x)
        loss = out.sum()
        loss.backward()
        debugger.stop()

        folder = tmp_path / "dump" / "step0" / "rank"
        assert sorted(path.name for path in folder.iterdir()) == [
            "construct.json", "dump.json", "dump_tensor_data", "stack.json"
        ]  # fmt: skip
        modules = [
            f"Module.linear_{n}.Linear.{rest}"
            for n in (1, 2)
            for rest in ("forward.0", "backward.0", "parameters_grad.0")
        ]
        sums = ["Torch.randn.0.forward", "Tensor.sum.0.forward", "Tensor.sum.0.backward"]
        assert sorted(names(folder)) == sorted([*modules, *FORWARD, *BACKWARD, *sums])
        dump = read(folder)
        assert (dump["task"], dump["level"], dump["framework"]) == ("tensor", "mix", "pytorch")
        assert dump["dump_data_dir"] == str(folder / "dump_tensor_data")
        assert read(folder, "construct.json")["Functional.linear.0.forward"] == "Module.linear_1.Linear.forward.0"
        entry = dump["data"]["Functional.linear.0.forward"]
        assert entry["input_args"][0] == {
            "type": "torch.Tensor", "dtype": "torch.float32", "shape": [10, 8],
            "Max": x.max().item(), "Min": x.min().item(),
            "Mean": pytest.approx(x.double().mean().item()), "Norm": pytest.approx(x.double().norm().item()),
            "requires_grad": False, "data_name": "Functional.linear.0.forward.input.0.pt",
        }  # fmt: skip
        assert entry["input_kwargs"] == {}
        for name, expected in (
            ("Functional.linear.0.forward.input.0", x),
            ("Functional.linear.0.forward.input.1", module.linear_1.weight),
            ("Module.linear_1.Linear.forward.0.parameters.bias", module.linear_1.bias),
            ("Functional.relu.0.forward.output.0", out),
            ("Module.linear_2.Linear.parameters_grad.0.weight", module.linear_2.weight.grad),
            ("Functional.linear.1.backward.gradients.1", module.linear_2.weight.grad),
        ):
            assert expected is not None
            assert torch.equal(torch.load(folder / "dump_tensor_data" / f"{name}.pt", weights_only=True), expected)
        lines = next(
            lines for called, lines in read(folder, "stack.json").values() if "Functional.relu.0.forward" in called
        )
        assert lines[0].startswith(f"File {Path(ModuleOP.forward.__code__.co_filename)}, line ")
        assert lines[0].endswith("return F.relu(x2)")


def test_example_2_2_forward_and_backward_of_every_step(tmp_path: Path) -> None:
    config = configured(tmp_path, task="statistics", level="L1", dump_path="elsewhere")
    model = network()
    criterion = nn.MSELoss()
    loader = [(x, torch.zeros(10, 2)) for x in batches(3)]
    with debugging(config_path=str(config), dump_path=str(tmp_path / "dump_path")) as debugger:
        for step, (data, label) in enumerate(loader):
            debugger.start()
            output = model(data)
            loss = criterion(output, label)
            loss.backward()
            debugger.stop()
            debugger.step()
            folder = tmp_path / "dump_path" / f"step{step}" / "rank"  # complete as soon as step() returns
            losses = ["Functional.mse_loss.0.forward", "Functional.mse_loss.0.backward"]
            assert sorted(names(folder)) == sorted([*FORWARD, *losses, *BACKWARD])
            assert tensors(folder) == []
            told = read(folder)["data"]["Functional.mse_loss.0.forward"]["output"][0]
            assert (told["shape"], told["Max"]) == ([], loss.item())
    assert not Path("elsewhere").exists()
    assert sorted(path.name for path in (tmp_path / "dump_path").iterdir()) == ["step0", "step1", "step2"]


def test_example_2_3_only_a_part_of_the_program(tmp_path: Path) -> None:
    config = configured(tmp_path, task="statistics", level="L1")
    model = network()
    with debugging(config_path=str(config)) as debugger:
        for data in batches(2):
            debugger.start()
            output = model(data)
            debugger.forward_backward_dump_end()
            loss = torch.tanh(output).sum()
            loss.backward()
            debugger.stop()
            debugger.step()
    for step in (0, 1):  # the second step is dumped again
        assert sorted(names(tmp_path / "dump" / f"step{step}" / "rank")) == sorted([*FORWARD, *BACKWARD])


# -- start, stop and step --------------------------------------------------------------------------------------------


def test_what_runs_between_stop_and_start_is_not_dumped_nor_counted(tmp_path: Path) -> None:
    with debugging(task="statistics", level="L1", dump_path=tmp_path / "dump") as debugger:
        debugger.start()
        torch.relu(TWO)
        debugger.stop()
        torch.tanh(TWO)
        torch.relu(TWO)
        debugger.start()
        torch.relu(FOUR)
        debugger.stop()
        folder = tmp_path / "dump" / "step0" / "rank"
        assert names(folder) == ["Torch.relu.0.forward", "Torch.relu.1.forward"]
        assert read(folder)["data"]["Torch.relu.1.forward"]["output"][0]["shape"] == [4]


def test_methods_may_be_called_on_the_class(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"There is no debugger yet. Make one: PrecisionDebugger\('config.json'\)."):
        PrecisionDebugger.start()
    with debugging(level="L1", dump_path=tmp_path / "dump"):
        PrecisionDebugger.start()
        torch.relu(TWO)
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
        assert names(tmp_path / "dump" / "step0" / "rank") == ["Torch.relu.0.forward"]
        with (
            debugging(level="L1", dump_path=tmp_path / "other"),
            pytest.raises(RecordError, match="There are 2 debuggers"),
        ):
            PrecisionDebugger.start()


def test_a_second_debugger_is_never_ignored(tmp_path: Path) -> None:
    model, x = network(), batches(1)[0]
    with debugging(level="L1", dump_path=tmp_path / "a") as first:
        with debugging(level="L0", task="tensor", dump_path=tmp_path / "b", model=model) as second:
            first.start()
            second.start()
            model(x)
            second.stop()
            first.stop()
        assert names(tmp_path / "a" / "step0" / "rank") == FORWARD
        modules = ["Module.linear_1.Linear.forward.0", "Module.linear_2.Linear.forward.0"]
        assert sorted(names(tmp_path / "b" / "step0" / "rank")) == modules
        with pytest.raises(
            RecordError, match="already, by another configuration: task 'tensor' instead of 'statistics'"
        ):
            PrecisionDebugger(task="tensor", level="L1", dump_path=tmp_path / "a")
        again = PrecisionDebugger(level="L1", dump_path=tmp_path / "a")  # the same one, by another name
        again.start()
        torch.tanh(TWO)
        first.stop()
        assert names(tmp_path / "a" / "step0" / "rank") == [*FORWARD, "Torch.tanh.0.forward"]


def test_steps_are_counted_also_before_the_first_start(tmp_path: Path) -> None:
    with debugging(level="L1", dump_path=tmp_path / "dump", step=[1, "3-4"]) as debugger:
        debugger.step()
        for _ in range(5):
            debugger.start()
            torch.relu(TWO)
            debugger.stop()
            debugger.step()
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step1", "step3", "step4"]


def test_nothing_is_in_place_where_nothing_is_dumped(tmp_path: Path) -> None:
    def hooks() -> int:
        modules = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
        return modules + len(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]

    model, x = network(), batches(1)[0]
    with debugging(level="mix", dump_path=tmp_path / "dump", step=[1]) as debugger:
        seen = []
        for _ in range(3):
            debugger.start(model)
            seen.append(hooks() > 0)
            model(x)
            debugger.stop()
            seen.append(hooks() > 0)
            debugger.step()
    assert seen == [False, False, True, False, False, False]
    assert hooks() == 0


def test_a_program_that_goes_on_counts_from_its_own_step(tmp_path: Path) -> None:
    with debugging(level="L1", dump_path=tmp_path / "dump") as debugger:
        debugger.set_init_step(40)
        debugger.start()
        torch.relu(TWO)
        debugger.stop()
        with pytest.raises(RecordError, match="after the first start"):
            debugger.set_init_step(1)
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["step40"]


def test_a_program_that_runs_again_replaces_its_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As with msprobe: a second run does not fail, and a step that it does not dump stays."""
    with debugging(level="L1", task="tensor", dump_path=tmp_path / "dump") as debugger:
        train(debugger, network(), steps=2)
    first, second = (tmp_path / "dump" / f"step{step}" / "rank" for step in (0, 1))
    (first / "notes.txt").write_text("mine")
    before = names(second)
    assert not caplog.records
    with debugging(level="L1", task="statistics", dump_path=tmp_path / "dump") as debugger:
        train(debugger, nn.Linear(8, 2), steps=1)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'dump'} holds a dump already. What is dumped again replaces the same step."
    ]
    assert {name for name in names(first) if name.startswith("Functional")} == {
        "Functional.linear.0.forward", "Functional.linear.0.backward"
    }  # fmt: skip
    assert tensors(first) == []
    assert (first / "notes.txt").read_text() == "mine"
    assert (names(second), bool(tensors(second))) == (before, True)
    with debugging(level="L1", dump_path=tmp_path / "dump", overwrite=True) as debugger:
        train(debugger, network(), steps=1)
    assert not second.exists()


def test_which_model(tmp_path: Path) -> None:
    with debugging(level="L0", dump_path=tmp_path / "a") as debugger:
        with pytest.raises(
            RecordError, match=r"level is 'L0', .* and no model was given. Pass it: debugger.start\(model\)."
        ):
            debugger.start()
        model = network()
        debugger.start(model)
        model(batches(1)[0])
        with pytest.raises(RecordError, match="another model than before"):
            debugger.start(network())
    both = [network(), network()]
    with debugging(level="L0", dump_path=tmp_path / "b") as debugger:
        debugger.start(both)
        for one in both:
            one(batches(1)[0])
        debugger.stop()
        found = set(names(tmp_path / "b" / "step0" / "rank"))
        assert {f"Module.{n}.linear_{m}.Linear.forward.0" for n in (0, 1) for m in (1, 2)} <= found


def test_functions_are_dumped_of_whatever_model(tmp_path: Path) -> None:
    first, second, x = network(), nn.Sequential(nn.Linear(8, 4), nn.Tanh()), batches(1)[0]
    with debugging(level="L1", dump_path=tmp_path / "dump") as debugger:
        for model in (first, second):
            debugger.start(model)
            model(x)
            debugger.stop()
    assert names(tmp_path / "dump" / "step0" / "rank") == [
        *FORWARD, "Functional.linear.2.forward", "Torch.tanh.0.forward"
    ]  # fmt: skip


def test_the_rank_that_the_program_names(tmp_path: Path) -> None:
    config = configured(tmp_path, level="L1", rank=["2-3"])
    with debugging(config) as debugger:
        debugger.start(rank_id=1)
        torch.relu(TWO)
        debugger.stop()
    assert not (tmp_path / "dump").exists()
    with debugging(config) as debugger:
        debugger.start(rank_id=3)
        torch.relu(TWO)
        debugger.stop()
    assert [path.name for path in (tmp_path / "dump" / "step0").iterdir()] == ["rank3"]


def test_what_start_cannot_do_is_said(tmp_path: Path) -> None:
    with debugging(level="L1", dump_path=tmp_path / "dump") as debugger:
        with pytest.raises(RecordError, match="token_range=\\[0, 3\\], but tokens are not counted here"):
            debugger.start(token_range=[0, 3])
        with pytest.raises(RecordError, match="was called before start"):
            debugger.forward_backward_dump_end()
    with pytest.raises(RecordError, match="has been closed"):
        debugger.start()


# -- what is dumped --------------------------------------------------------------------------------------------------


def dumped(tmp_path: Path, level: str = "L1", task: str = "statistics", **section: Any) -> list[str]:
    config = configured(tmp_path, task=task, level=level, **{task: section})
    with debugging(config, overwrite=True) as debugger:
        train(debugger, model := network(), 1, model)
    return names(tmp_path / "dump" / "step0" / "rank")


def test_a_list_chooses_by_parts_of_names(tmp_path: Path) -> None:
    assert dumped(tmp_path, list=["relu"]) == ["Functional.relu.0.forward", "Functional.relu.0.backward"]
    assert dumped(tmp_path, list=["Functional.linear.1"]) == [
        "Functional.linear.1.forward",
        "Functional.linear.1.backward",
    ]
    stacks = read(tmp_path / "dump" / "step0" / "rank", "stack.json")
    assert [called for called, _ in stacks.values()] == [["Functional.linear.1.forward"]]
    inside = dumped(tmp_path, level="mix", list=["linear_2"])  # a module, and the functions inside of it
    assert sorted(inside) == sorted([
        "Functional.linear.1.forward", "Module.linear_2.Linear.forward.0", "Functional.linear.1.backward",
        "Module.linear_2.Linear.backward.0", "Module.linear_2.Linear.parameters_grad.0",
    ])  # fmt: skip


def test_a_scope_is_from_one_entry_to_another(tmp_path: Path) -> None:
    scope = ["Functional.linear.1.forward", "Functional.relu.0.backward"]
    assert dumped(tmp_path, scope=scope) == [
        "Functional.linear.1.forward", "Functional.relu.0.forward", "Tensor.sum.0.forward",
        "Tensor.sum.0.backward", "Functional.relu.0.backward",
    ]  # fmt: skip
    one = ["Module.linear_2.Linear.forward.0"] * 2
    assert sorted(dumped(tmp_path, level="mix", scope=one)) == ["Functional.linear.1.forward", one[0]]


@pytest.mark.parametrize(
    ("modes", "forward", "backward"),
    [
        (["all"], {"input_args", "output"}, {"input", "output"}),
        (["forward"], {"input_args", "output"}, None),
        (["backward"], None, {"input", "output"}),
        (["input"], {"input_args"}, {"input"}),
        (["output"], {"output"}, {"output"}),
        (["forward", "output"], {"output"}, None),
    ],
)
def test_data_mode(tmp_path: Path, modes: list[str], forward: set[str] | None, backward: set[str] | None) -> None:
    found = dumped(tmp_path, list=["relu"], data_mode=modes)
    wanted = {"forward": forward, "backward": backward}
    assert found == [f"Functional.relu.0.{phase}" for phase, parts in wanted.items() if parts]
    data = read(tmp_path / "dump" / "step0" / "rank")["data"]
    for phase, parts in wanted.items():
        entry = data.get(f"Functional.relu.0.{phase}", {})
        assert {part for part in entry if any(isinstance(leaf, dict) and "dtype" in leaf for leaf in entry[part])} == (
            parts or set()
        )


def test_md5_is_the_checksum_of_the_bytes(tmp_path: Path) -> None:
    dumped(tmp_path, summary_mode="md5", list=["linear.0.forward"])
    folder = tmp_path / "dump" / "step0" / "rank"
    leaf = read(folder)["data"]["Functional.linear.0.forward"]["input_args"][0]
    assert leaf["md5"] == f"{zlib.crc32(batches(1)[0].numpy().tobytes()):08x}"
    assert leaf["Max"] == batches(1)[0].max().item()
    assert tensors(folder) == []


def test_a_tensor_list_keeps_the_values_of_a_few_entries(tmp_path: Path) -> None:
    found = dumped(tmp_path, tensor_list=["relu.0.forward"])
    assert len(found) == 8
    folder = tmp_path / "dump" / "step0" / "rank"
    assert tensors(folder) == ["Functional.relu.0.forward.input.0.pt", "Functional.relu.0.forward.output.0.pt"]


def test_extra_info_may_be_left_out(tmp_path: Path) -> None:
    config = configured(tmp_path, level="mix", extra_info=False)
    with debugging(config) as debugger:
        train(debugger, model := network(), 1, model)
    assert [path.name for path in (tmp_path / "dump" / "step0" / "rank").iterdir()] == ["dump.json"]


def test_dump_enable_false_dumps_nothing(tmp_path: Path) -> None:
    with debugging(configured(tmp_path, level="L1", dump_enable=False)) as debugger:
        train(debugger, network())
    assert not (tmp_path / "dump").exists()


def test_dump_enable_is_followed_while_the_program_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(tmp_path, level="L1", dump_enable=False)
    with debugging(config) as debugger:
        train(debugger, network())
        configured(tmp_path, level="L1", dump_enable=True)
        train(debugger, network())
        configured(tmp_path, level="mix", dump_enable=True, task="tensor")
        train(debugger, network())
        config.write_text("{")
        train(debugger, network())
        configured(tmp_path, level="L1", dump_enable=False)
        train(debugger, network())
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step1", "step2", "step3"]
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "task 'tensor' instead of 'statistics'; level 'mix' instead of 'L1'. Only dump_enable is read while a program "
        "runs; the rest holds for the next one.",
        "Expecting property name enclosed in double quotes in line 1. The dump goes on as before.",
    ]


def test_structure_has_names_and_no_data(tmp_path: Path) -> None:
    assert dumped(tmp_path, level="mix", task="structure") == []
    folder = tmp_path / "dump" / "step0" / "rank"
    assert (read(folder)["task"], read(folder)["dump_data_dir"]) == ("structure", None)
    construct = read(folder, "construct.json")
    assert construct["Functional.linear.1.forward"] == "Module.linear_2.Linear.forward.0"
    assert construct["Functional.linear.1.backward"] == "Module.linear_2.Linear.backward.0"
    assert construct["Functional.relu.0.forward"] is None


def test_acc_check_dumps_what_the_check_takes(tmp_path: Path) -> None:
    assert dumped(tmp_path, task="acc_check", white_list=["linear"]) == [
        "Functional.linear.0.forward", "Functional.linear.1.forward",
        "Functional.linear.1.backward", "Functional.linear.0.backward",
    ]  # fmt: skip
    assert read(tmp_path / "dump" / "step0" / "rank")["task"] == "statistics"
    assert "Functional.linear.0.forward" not in dumped(tmp_path, task="acc_check", black_list=["linear"])


@pytest.mark.parametrize(
    ("most", "expected"), [(None, ["Torch.log.0.forward"]), (-1, ["Torch.log.0.forward", "Torch.mul.0.forward"])]
)
def test_overflow_check_dumps_the_entries_with_a_result_that_is_not_finite(
    tmp_path: Path, most: int | None, expected: list[str]
) -> None:
    section = {} if most is None else {"overflow_nums": most}
    with debugging(configured(tmp_path, task="overflow_check", level="L1", overflow_check=section)) as debugger:
        for zero in (1.0, 0.0, 1.0):
            debugger.start()
            y = torch.log(torch.tensor([zero, 2.0]))
            torch.mul(y, 2.0)
            torch.add(TWO, 1.0)
            debugger.stop()
            debugger.step()
    steps = [tmp_path / "dump" / f"step{step}" / "rank" for step in range(3)]
    assert [names(folder) for folder in steps] == [[], expected, []]
    assert torch.load(steps[1] / "dump_tensor_data" / "Torch.log.0.forward.input.0.pt", weights_only=True).tolist() == [
        0,
        2,
    ]
    assert tensors(steps[1])[:2] == ["Torch.log.0.forward.input.0.pt", "Torch.log.0.forward.output.0.pt"]
    assert len(tensors(steps[1])) == 2 * len(expected)
    assert tensors(steps[0]) == tensors(steps[2]) == []


def test_debug_dumps_what_the_program_saves(tmp_path: Path) -> None:
    config = configured(tmp_path, task="tensor", level="debug")
    model = network()
    with debugging(config) as debugger:
        for x in batches(2):
            out = model(x)
            loss = out.sum()
            PrecisionDebugger.save({"out": out, "batch": [x]}, "seen")
            debugger.save(loss, "loss", save_backward=False)
            debugger.save(loss * 2, "loss", save_backward=False)
            loss.backward()
            debugger.step()
        with pytest.raises(RecordError, match="save\\(\\) was given the name 3"):
            debugger.save(loss, 3)  # type: ignore[arg-type]
    folder = tmp_path / "dump" / "step1" / "rank"
    assert sorted(path.name for path in folder.iterdir()) == ["debug.json", "dump_tensor_data"]
    saved = read(folder, "debug.json")
    assert (saved["level"], list(saved["data"])) == (
        "debug", ["seen.0.debug", "loss.0.debug", "loss.1.debug", "seen_grad.0.debug"]
    )  # fmt: skip
    assert saved["data"]["loss.1.debug"]["Max"] == 2 * loss.item()
    assert tensors(folder) == [
        "loss.0.debug.pt", "loss.1.debug.pt", "seen.0.debug.batch.0.pt", "seen.0.debug.out.pt",
        "seen_grad.0.debug.out.pt",
    ]  # fmt: skip
    assert (
        torch.load(folder / "dump_tensor_data" / "seen_grad.0.debug.out.pt", weights_only=True).tolist()
        == [[1, 1]] * 10
    )


def test_the_users_own_list_of_functions(tmp_path: Path) -> None:
    (tmp_path / "support_wrap_ops.yaml").write_text("functional:\n  - relu\n")
    config = configured(tmp_path, level="L1", support_wrap_ops="support_wrap_ops.yaml")
    with debugging(config) as debugger:
        train(debugger, network())
    assert names(tmp_path / "dump" / "step0" / "rank") == ["Functional.relu.0.forward", "Functional.relu.0.backward"]


# -- the traps of the original ---------------------------------------------------------------------------------------


def functions(tmp_path: Path, program: Any, task: str = "tensor") -> dict[str, Any]:
    """The entries of a program, and beside them their tensors."""
    with debugging(task=task, level="L1", dump_path=tmp_path / "dump") as debugger:
        debugger.start()
        program()
        debugger.stop()
    found: dict[str, Any] = read(tmp_path / "dump" / "step0" / "rank")["data"]
    return found


def test_a_linear_on_three_dimensions_has_its_own_gradients(tmp_path: Path) -> None:
    x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    found = functions(tmp_path, lambda: F.linear(x, weight).sum().backward())
    backward = found["Functional.linear.0.backward"]
    assert [leaf and leaf["shape"] for leaf in backward["output"]] == [[6, 5]]  # of a view, which msprobe has
    assert {path: leaf["shape"] for path, leaf in backward["gradients"].items()} == {"0": [2, 3, 4], "1": [5, 4]}
    file = tmp_path / "dump" / "step0" / "rank" / "dump_tensor_data" / "Functional.linear.0.backward.gradients.1.pt"
    assert weight.grad is not None
    assert torch.equal(torch.load(file, weights_only=True), weight.grad)


def test_cross_entropy_has_the_gradient_of_the_logits(tmp_path: Path) -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    found = functions(tmp_path, lambda: F.cross_entropy(logits, torch.tensor([1, 0, 4])).backward())
    assert found["Functional.cross_entropy.0.backward"]["output"][0]["shape"] == [3, 5]


def test_an_inplace_relu_keeps_its_backward_and_its_neighbours(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    with debugging(level="mix", dump_path=tmp_path / "dump") as debugger:
        debugger.start(model)
        model(torch.randn(3, 4)).sum().backward()
        debugger.stop()
    found = names(tmp_path / "dump" / "step0" / "rank")
    assert {"Module.0.Linear.backward.0", "Module.1.ReLU.backward.0", "Module.2.Linear.backward.0"} <= set(found)
    assert "Functional.relu.0.backward" in found


def test_functions_inside_of_an_optimizers_step_are_entries(tmp_path: Path) -> None:
    config = configured(tmp_path, level="mix")
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, foreach=False)
    with debugging(str(config), model=module) as debugger:
        debugger.start()
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        debugger.stop()
    folder = tmp_path / "dump" / "step0" / "rank"
    steps = [f"Tensor.add_.{number}.forward" for number in range(4)]
    assert [name for name in names(folder) if name.startswith("Tensor.add_")] == steps
    assert {read(folder, "construct.json")[name] for name in steps} == {"optimizer"}
    run = astray.open(tmp_path / "dump")
    calls = [run.ranks[0].calls.row(row) for row in range(len(run.ranks[0].calls))]
    updates = [(call["site"], call["call"]) for call in calls if call["phase"] == "update"]
    assert updates == [("SGD/add_", number) for number in range(4)]


def test_statistics_of_integers_doubles_and_halves_are_right(tmp_path: Path) -> None:
    whole, double = torch.arange(4), torch.arange(4, dtype=torch.float64)
    half = torch.full((100,), 60000.0, dtype=torch.float16)
    found = functions(tmp_path, lambda: [torch.neg(one) for one in (whole, double, half)], "statistics")
    for number, one in enumerate((whole, double, half)):
        leaf = found[f"Torch.neg.{number}.forward"]["input_args"][0]
        assert leaf["Mean"] == one.double().mean().item()
        assert leaf["Norm"] == pytest.approx(one.double().norm().item())


def test_a_slice_saves_itself_and_not_the_whole_storage(tmp_path: Path) -> None:
    functions(tmp_path, lambda: torch.relu(torch.zeros(1000, 1000)[0, :4]))
    folder = tmp_path / "dump" / "step0" / "rank" / "dump_tensor_data"
    sliced = next(path for path in folder.iterdir() if path.name.startswith("Torch.relu.0.forward.input"))
    assert sliced.stat().st_size < 4000


def test_functions_imported_before_are_seen_and_stay_what_they_are(tmp_path: Path) -> None:
    from torch import relu

    before = F.gelu, torch.relu, torch.Tensor.add
    found = functions(tmp_path, lambda: relu(TWO))
    assert list(found) == ["Torch.relu.0.forward"]
    assert (F.gelu, torch.relu, torch.Tensor.add) == before


def test_training_has_the_same_bits_with_a_debugger(tmp_path: Path) -> None:
    def trained(debugger: PrecisionDebugger | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(network(), nn.Dropout(0.5), nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for x in batches(4):
            if debugger is not None:
                debugger.start(model)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if debugger is not None:
                debugger.stop()
            optimizer.step()
            losses.append(loss.detach())
            if debugger is not None:
                debugger.step()
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    bare = trained(None)
    for number, task in enumerate(("statistics", "tensor", "overflow_check", "structure")):
        with debugging(task=task, level="mix", dump_path=tmp_path / str(number)) as debugger:
            found = trained(debugger)
        assert all(map(torch.equal, bare, found))


def test_a_dump_opens_as_a_run(tmp_path: Path) -> None:
    with debugging(task="tensor", level="mix", dump_path=tmp_path / "dump") as debugger:
        train(debugger, model := network(), 2, model)
    run = astray.open(tmp_path / "dump")
    assert run.steps == [0, 1]
    key = astray.Key(1, 0, "linear_1", 0, "forward", "input", "0")
    assert run.tensor(key).tolist() == batches(2)[1].tolist()


def test_importing_it_imports_no_torch() -> None:
    code = "import astray.compat.msprobe, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_rank_has_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for ranks in ([0], [1]):
        with debugging(configured(tmp_path, level="L1", rank=ranks)) as debugger:
            train(debugger, network())
        assert (tmp_path / "dump").exists() == (ranks == [1])
    assert [path.name for path in (tmp_path / "dump" / "step0").iterdir()] == ["rank1"]


# -- seeds -----------------------------------------------------------------------------------------------------------


def test_seed_all() -> None:
    drawn = []
    for _ in range(2):
        seed_all(7)
        drawn.append([torch.rand(3).tolist(), random.random(), float(numpy.random.rand())])
    assert drawn[0] == drawn[1]
    for given, said in (
        ({"seed": -1}, "seed=-1 is not a seed"),
        ({"mode": 1}, "mode=1 is not possible. It is True or False."),
        ({"rm_dropout": "yes"}, "rm_dropout='yes' is not possible"),
        ({"is_enhanced": True}, "is_enhanced=True is not supported"),
    ):
        with pytest.raises(UsageError, match=said):
            seed_all(**given)  # type: ignore[arg-type]


def test_seed_all_without_dropout_lasts() -> None:
    code = (
        "import torch; from astray.compat.msprobe import seed_all\n"
        "ones = torch.ones(100); dropped = torch.nn.Dropout(0.5)\n"
        "assert not torch.equal(dropped(ones), ones)\n"
        "seed_all(rm_dropout=True); seed_all(rm_dropout=True)\n"
        "assert torch.equal(dropped(ones), ones)\n"
        "torch.set_default_device('cpu')\n"
        "with torch.device('cpu'): pass\n"
        "assert torch.equal(torch.nn.functional.dropout(ones), ones)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with _Other(), WithoutDropout():
        seed_all(rm_dropout=True)  # it is removed already
    with _Other(), pytest.raises(UsageError, match="this is inside of a block of _Other"):
        seed_all(rm_dropout=True)


class _Other(TorchFunctionMode):
    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))
