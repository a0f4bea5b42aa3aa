"""States of Paddle's layers and optimizers: names, values, memory that is shared, and what cannot be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray.errors import StateError

pytestmark = [pytest.mark.paddle, pytest.mark.filterwarnings("ignore:When training, we now always track")]
paddle = pytest.importorskip("paddle")


class Net(paddle.nn.Layer):  # type: ignore[misc]
    """Parameters of two dtypes, a layer under two names, statistics, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = paddle.nn.Linear(4, 6)
        self.bn = paddle.nn.BatchNorm1D(6)
        self.tied = self.fc
        self.table = self.create_parameter([6, 5], dtype="bfloat16")
        self.register_buffer("scale", paddle.full([1], 2.0))

    def forward(self, x: Any) -> Any:
        return self.bn(self.fc(x)) @ self.table.astype("float32") * self.scale


def trained(make: Any = None) -> tuple[Any, Any]:
    paddle.seed(0)
    model = Net()
    parameters = [p for p in model.parameters() if p.dtype == paddle.float32]
    optimizer = (make or paddle.optimizer.AdamW)(0.1, parameters=parameters)
    model(paddle.randn([8, 4])).square().sum().backward()
    optimizer.step()
    return model, optimizer


def values(tensor: Any) -> Any:
    return tensor.astype("float64").numpy()


def test_weights_have_the_names_of_the_layer_and_share_its_memory() -> None:
    model, optimizer = trained()
    weight = astray.state.from_weight(model)
    assert list(weight) == [name for name, _ in model.named_parameters()]
    assert "bn._mean" in weight
    assert "tied.weight" not in weight
    assert weight["table"].dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert weight[name].data_ptr() == parameter.data_ptr()
        assert np.array_equal(weight[name].double().numpy(), values(parameter))
    before = weight.clone()
    model(paddle.randn([8, 4])).square().sum().backward()
    optimizer.step()
    model.table.set_value(paddle.ones([6, 5], "bfloat16"))
    assert (weight - before).norm2(lw=True)["fc.weight"] > 0
    assert weight["table"].double().sum() == 30
    assert list(astray.state.from_weight(model, requires_grad=True)) == [
        name for name, parameter in model.named_parameters() if not parameter.stop_gradient
    ]
    assert list(astray.state.from_weight(model, "bn.*")) == ["bn.weight", "bn.bias", "bn._mean", "bn._variance"]
    assert repr(weight).startswith("Net_weights[L2=")


def test_statistics_are_those_of_the_numbers() -> None:
    model, _ = trained()
    weight = astray.state.from_weight(model)
    everything = np.concatenate([values(parameter).reshape(-1) for parameter in model.parameters()])
    assert weight.numel() == everything.size
    assert weight.mean() == pytest.approx(everything.mean())
    assert weight.norm2() == pytest.approx(np.linalg.norm(everything))
    table = weight.describe(lw=True, display=False)
    assert "fc.weight" in str(table)


def test_a_state_dict_has_the_buffers_too() -> None:
    model, optimizer = trained()
    state = astray.state.from_state_dict(model.state_dict())
    assert {"scale", "bn._variance", "tied.weight"} <= set(state)
    moments = astray.state.from_state_dict(optimizer.state_dict())
    assert f"{model.fc.weight.name}_moment1_0" in moments
    scheduled = paddle.optimizer.SGD(paddle.optimizer.lr.StepDecay(0.1, 2), parameters=model.parameters())
    with pytest.warns(UserWarning, match=r"'LR_Scheduler' \(dict\)"):
        assert not astray.state.from_state_dict(scheduled.state_dict())


def test_gradients() -> None:
    model, optimizer = trained()
    model.fc.bias.clear_gradient(False)
    with pytest.warns(UserWarning, match="have no gradient") as warned:
        grad = astray.state.from_grad(model)
    assert "fc.bias" in str(warned[0].message)
    assert set(grad) == {"fc.weight", "bn.weight", "bn.bias", "table"}
    assert grad["fc.weight"].data_ptr() == model.fc.weight.grad.data_ptr()
    kept = grad.clone()
    optimizer.clear_grad()
    assert grad["fc.weight"].abs().sum() == 0  # Paddle writes zeros
    assert kept["fc.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", [None, "mine"])
def test_states_of_optimizers(name: str | None) -> None:
    model, optimizer = trained(lambda lr, parameters: paddle.optimizer.Adam(lr, parameters=parameters, name=name))
    moment = astray.state.from_optimizer_state(model, optimizer, "moment1")
    assert set(moment) == {"fc.weight", "fc.bias", "bn.weight", "bn.bias"}
    assert np.allclose(moment["fc.weight"].numpy(), 0.1 * model.fc.weight.grad.numpy(), atol=1e-7)
    weight, grad, (first, second) = astray.state.from_together(model, optimizer, ["moment1", "moment2"])
    assert len(weight) == 7
    assert len(grad) == 5
    assert first["bn.bias"].data_ptr() == moment["bn.bias"].data_ptr()
    assert second.min() >= 0
    with pytest.raises(StateError, match="Adam keeps no 'exp_avg' for this model's parameters: it keeps moment1, mo"):
        astray.state.from_optimizer_state(model, optimizer, "exp_avg")
    fresh = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    with pytest.raises(StateError, match="Adam has no state yet"):
        astray.state.from_optimizer_state(model, fresh, "moment1")


def test_master_weights_and_states_that_are_filed_under_their_names() -> None:
    """No kernel on a CPU takes them, so the optimizer makes them and no step."""
    model = Net()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=[model.table], multi_precision=True)
    optimizer._create_accumulators(paddle.static.default_main_program().global_block(), [model.table])
    master = astray.state.from_optimizer_state(model, optimizer, "master_weight")
    assert list(master) == ["table"]
    assert master["table"].dtype == torch.float32
    assert torch.equal(master["table"].bfloat16(), astray.state.from_weight(model)["table"])
    assert astray.state.from_optimizer_state(model, optimizer, "moment2")["table"].shape == (6, 5)


def test_names_without_wrappers() -> None:
    class Wrapper(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self, layers: Any) -> None:
            super().__init__()
            self._layers = layers

    model, _ = trained()
    assert list(astray.state.from_weight(Wrapper(model), "fc.*", unwrap=True)) == ["fc.weight", "fc.bias"]


def test_a_layer_against_its_checkpoint_and_a_module_of_torch(tmp_path: Path) -> None:
    model, _ = trained()
    paddle.save(model.state_dict(), str(tmp_path / "a.pdparams"))
    weight = astray.state.from_weight(model)
    stored = astray.state.load_state(tmp_path / "a.pdparams").filter(r"(?!scale|tied)")
    assert (weight - stored).abs_max() == 0
    weight.save(tmp_path / "a.pt")
    assert (astray.state.load_state(tmp_path / "a.pt") - weight).abs_max() == 0


def test_what_cannot_be_read_is_said() -> None:
    table = paddle.nn.Embedding(5, 2, sparse=True)
    table(paddle.to_tensor([1, 3])).sum().backward()
    with pytest.raises(StateError, match="The numbers of 'weight' cannot be read: it is sparse"):
        astray.state.from_grad(table)
    with paddle.LazyGuard():
        empty = paddle.nn.Linear(2, 2)
    with pytest.raises(StateError, match="The numbers of 'weight' cannot be read: it has no memory"):
        astray.state.from_weight(empty)
    with pytest.raises(StateError, match=r"A list was given, .* Give a torch.nn.Module or a paddle.nn.Layer"):
        astray.state.from_weight([])


def test_paddle_is_not_imported_for_torch() -> None:
    code = (
        "import sys, torch, astray; m = torch.nn.Linear(2, 2); astray.state.from_weight(m).norm2();"
        "o = torch.optim.SGD(m.parameters(), 0.1);"
        "astray.state.check_updates(o, m).close(); assert 'paddle' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
