"""Files that `paddle.save` writes, read without Paddle: against what `paddle.load` makes of them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray import checkpoints
from astray.cli import main
from astray.store import open_run

pytestmark = [pytest.mark.paddle, pytest.mark.filterwarnings("ignore:When training, we now always track")]
paddle = pytest.importorskip("paddle")


class Net(paddle.nn.Layer):  # type: ignore[misc]
    """Parameters of two dtypes, one under two names, and the statistics of a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = paddle.nn.Linear(40, 30)
        self.bn = paddle.nn.BatchNorm1D(30)
        self.table = self.create_parameter([50, 30], dtype="bfloat16")

    def forward(self, x: Any) -> Any:
        return self.bn(self.fc(x)) @ self.table.astype("float32").T


@pytest.fixture
def trained() -> tuple[Any, Any]:
    paddle.seed(0)
    model = Net()
    schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=[*model.fc.parameters(), *model.bn.parameters()])
    model(paddle.randn([8, 40])).sum().backward()
    optimizer.step()
    schedule.step()
    return model, optimizer


def loaded(path: Path) -> dict[str, Any]:
    """What Paddle reads, by dotted names."""
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else key)
        elif isinstance(value, paddle.Tensor):
            flat[name] = value

    walk(paddle.load(str(path)), "")
    return flat


def check(path: Path) -> None:
    expected = loaded(path)
    with checkpoints.open(path) as found:
        assert found.format == "paddle"
        assert set(found.names) == set(expected)
        for name, tensor in expected.items():
            values, dtype, shape = found.read(name)
            assert (dtype, shape) == (str(tensor.dtype).removeprefix("paddle."), tuple(tensor.shape))
            assert values.tobytes() == tensor.numpy().tobytes()
            assert torch.equal(found[name], torch.from_dlpack(tensor.detach()))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_layer_and_its_optimizer(tmp_path: Path, trained: Any, protocol: int) -> None:
    model, optimizer = trained
    for state, name in ((model.state_dict(), "a.pdparams"), (optimizer.state_dict(), "a.pdopt")):
        paddle.save(state, str(tmp_path / name), protocol=protocol)
        check(tmp_path / name)
    with checkpoints.open(tmp_path / "a.pdparams") as found:
        assert found.spec("table").dtype == "bfloat16"
        assert {"bn._mean", "bn._variance"} <= set(found)
        assert found.others["StructuredToParameterName@@.fc.weight"] == model.fc.weight.name
    with checkpoints.open(tmp_path / "a.pdopt") as found:
        assert found.others["LR_Scheduler.last_epoch"] == 1


@pytest.mark.parametrize("protocol", [2, 4])
def test_both_in_one_file(tmp_path: Path, trained: Any, protocol: int) -> None:
    model, optimizer = trained
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    paddle.save(content, str(tmp_path / "a.pdckpt"), protocol=protocol)
    check(tmp_path / "a.pdckpt")
    with checkpoints.open(tmp_path / "a.pdckpt") as found:
        assert found.spec("model.table").dtype == "bfloat16"
        assert found.others["epoch"] == 3


def test_float32_copies_of_rounded_weights(tmp_path: Path) -> None:
    """No kernel on a CPU takes them, so the optimizer makes them and no step."""
    model = Net()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=[model.table], multi_precision=True)
    optimizer._create_accumulators(paddle.static.default_main_program().global_block(), [model.table])
    paddle.save(optimizer.state_dict(), str(tmp_path / "a.pdopt"))
    check(tmp_path / "a.pdopt")
    tensors = open_run(tmp_path / "a.pdopt").ranks[0].tensors
    assert {tensors.row(row)["role"] for row in range(len(tensors))} == {"state"}
    with checkpoints.open(tmp_path / "a.pdopt") as found:
        assert found.spec(f"master_weights.{model.table.name}") == ("float32", (50, 30))


def test_other_things_that_are_saved(tmp_path: Path, trained: Any) -> None:
    model, _ = trained
    for number, content in enumerate([
        OrderedDict(model.state_dict()),
        {name: tensor.numpy() for name, tensor in model.state_dict().items()},
        {"scalar": paddle.to_tensor(1.5), "empty": paddle.zeros([0, 3]), "mask": paddle.ones([2], "bool")},
        {"complex": paddle.ones([2], "complex64"), "half": paddle.ones([3], "float16"), "i": paddle.arange(3)},
    ]):  # fmt: skip
        path = tmp_path / f"{number}.pdparams"
        paddle.save(content, str(path))
        check(path)
    paddle.save(model.table, str(tmp_path / "one.pdtensor"))
    with checkpoints.open(tmp_path / "one.pdtensor") as found:
        assert found.spec("tensor") == ("bfloat16", (50, 30))
    paddle.save([model.table, paddle.ones([2])], str(tmp_path / "list"))
    with checkpoints.open(tmp_path / "list") as found:
        assert found.names == ("0", "1")
        assert found.format == "paddle"


def test_an_8_bit_float_is_what_paddle_loads(tmp_path: Path) -> None:
    """What it was is not in the file: Paddle saves int8."""
    paddle.save({"w": paddle.ones([2]).astype("float8_e4m3fn")}, str(tmp_path / "a.pdparams"))
    check(tmp_path / "a.pdparams")
    with checkpoints.open(tmp_path / "a.pdparams") as found:
        assert found.spec("w").dtype == "int8"


def test_a_large_tensor_is_sliced_as_paddle_expects_it(tmp_path: Path) -> None:
    """Slices have a gigabyte; a file with smaller ones is made by hand, and Paddle reads it."""
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    parts = {f"w@@.{i}": part for i, part in enumerate(np.split(array.reshape(-1), [17, 34, 51]))}
    content = {**parts, "UnpackBigParamInfor@@": {"w": {"OriginShape": (3, 4, 5), "slices": list(parts)}}}
    (tmp_path / "a.pdparams").write_bytes(
        pickle.dumps(content | {"StructuredToParameterName@@": {"w": "linear_0.w_0"}}, 2)
    )
    check(tmp_path / "a.pdparams")


def test_safetensors_of_paddle_are_safetensors(tmp_path: Path, trained: Any) -> None:
    pytest.importorskip("safetensors")
    model, _ = trained
    paddle.save(model.state_dict(), str(tmp_path / "a.safetensors"), safetensors=True)
    with checkpoints.open(tmp_path / "a.safetensors") as found:
        assert found.format == "safetensors"
        assert found.spec("table").dtype == "bfloat16"


def test_compared_and_listed(tmp_path: Path, trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained
    paddle.save(model.state_dict(), str(tmp_path / "a.pdparams"))
    paddle.save(optimizer.state_dict(), str(tmp_path / "a.pdopt"))
    torch.save(
        {name: torch.from_dlpack(tensor.detach()).clone() for name, tensor in model.state_dict().items()},
        tmp_path / "a.pt",
    )
    model.fc.weight.set_value(model.fc.weight * 1.5)
    paddle.save(model.state_dict(), str(tmp_path / "b.pdparams"), protocol=2)

    diff = astray.compare(tmp_path / "a.pdparams", tmp_path / "b.pdparams")
    assert diff.first is not None
    assert diff.first.site == "fc.weight"
    assert astray.compare(tmp_path / "a.pdparams", tmp_path / "a.pt").first is None

    assert main(["show", str(tmp_path / "a.pdopt")]) == 0
    assert "paddle · 16 tensors" in capsys.readouterr().out
    tensors = open_run(tmp_path / "a.pdopt").ranks[0].tensors
    assert {tensors.row(row)["role"] for row in range(len(tensors))} == {"state"}


def test_a_port_is_compared_by_a_mapping(tmp_path: Path, trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = trained
    paddle.save(model.state_dict(), str(tmp_path / "a.pdparams"))
    ported = {
        name.replace("_mean", "running_mean").replace("_variance", "running_var"): torch.from_dlpack(tensor.detach())
        for name, tensor in model.state_dict().items()
    }
    torch.save({name: tensor.clone() for name, tensor in ported.items()}, tmp_path / "b.pt")
    assert main(["map", str(tmp_path / "a.pdparams"), str(tmp_path / "b.pt")]) == 0
    (tmp_path / "map.yaml").write_text(capsys.readouterr().out)
    arguments = ["compare", str(tmp_path / "a.pdparams"), str(tmp_path / "b.pt"), "--map", str(tmp_path / "map.yaml")]
    assert main(arguments) == 0
    assert "7 tensors agree (7 identical)" in capsys.readouterr().out


def test_paddle_is_not_imported_to_read_its_files(tmp_path: Path, trained: Any) -> None:
    model, _ = trained
    paddle.save(model.state_dict(), str(tmp_path / "a.pdparams"))
    code = (
        f"import sys, astray.checkpoints; found = astray.checkpoints.open({str(tmp_path / 'a.pdparams')!r});"
        "found.measure('fc.weight');"
        "assert not {'paddle', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
