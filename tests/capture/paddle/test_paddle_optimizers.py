"""What Paddle's optimizers do to each parameter, against the same in numpy; steps that are skipped, and other ways to
step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from paddle import nn  # noqa: E402
from paddle.distributed.fleet.utils import mix_precision_utils  # noqa: E402

import astray  # noqa: E402
from astray.capture.adapters import discovering_adapter  # noqa: E402
from astray.capture.recorder import BaseRecorder  # noqa: E402
from astray.records import SKIPPED_UPDATE  # noqa: E402
from recorded_rows import outline, rows  # noqa: E402

pytestmark = pytest.mark.paddle

ALL = "gradient,state,update,weight"


def value(run: Any, row: dict[str, Any]) -> Any:
    return np.asarray(run.ranks[0].values(row["row"]), np.float64)


def of(run: Any, site: str, step: int) -> dict[tuple[str, str], Any]:
    found = rows(run, site=site, step=step, phase="update")
    return {(row["role"], row["path"]): value(run, row) for row in found}


def line() -> tuple[Any, Any]:
    paddle.seed(0)
    return nn.Linear(3, 2), paddle.randn([5, 3])


def recorded(path: Path, make: Any, steps: int = 2, **settings: Any) -> Any:
    model, x = line()
    optimizer = make(model)
    with astray.record(path, model, keep="stats,tensors", optimizer=ALL, **settings) as recorder:
        for _ in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            recorder.step()
    return astray.open(path)


def test_sgd(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", lambda model: paddle.optimizer.SGD(0.5, parameters=model.parameters()))
    assert outline(run, phase="update", step=1) == [
        "weight update input grad", "weight update parameter weight", "bias update input grad",
        "bias update parameter weight", "weight update output update", "weight update output weight",
        "bias update output update", "bias update output weight",
    ]  # fmt: skip
    for step in range(2):
        seen = of(run, "weight", step)
        before, after = seen["parameter", "weight"], seen["output", "weight"]
        np.testing.assert_allclose(after, before - 0.5 * seen["input", "grad"], rtol=1e-6)
        np.testing.assert_array_equal(seen["output", "update"], np.float32(after) - np.float32(before))
    np.testing.assert_array_equal(of(run, "weight", 1)["parameter", "weight"], of(run, "weight", 0)["output", "weight"])


def test_adam_with_its_state(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", lambda model: paddle.optimizer.Adam(0.1, parameters=model.parameters()))
    first, second = of(run, "weight", 0), of(run, "weight", 1)
    np.testing.assert_allclose(first["output", "state.moment1"], 0.1 * first["input", "grad"], rtol=1e-5)
    np.testing.assert_allclose(first["output", "state.moment2"], 0.001 * first["input", "grad"] ** 2, rtol=1e-4)
    expected = 0.9 * first["output", "state.moment1"] + 0.1 * second["input", "grad"]
    np.testing.assert_allclose(second["output", "state.moment1"], expected, rtol=1e-5)
    assert first["output", "state.beta1_pow_acc"] == pytest.approx(0.81)
    assert ("state", "state.moment1") not in second  # it is as the last step has left it


def clipped(clip: Any) -> Any:
    return lambda model: paddle.optimizer.SGD(1.0, parameters=model.parameters(), grad_clip=clip)


def limits(run: Any) -> list[tuple[Any, ...]]:
    """What the groups of an optimizer clip gradients to."""
    names = ("clip_grad_norm", "clip_grad_value", "grad_clip")
    notes = [note.values for note in run.ranks[0].setup if note.subject == "optimizer"]
    return [tuple(values[name] for name in names) for values in notes]


@pytest.mark.parametrize(
    ("clip", "noted"),
    [
        (nn.ClipGradByGlobalNorm(1e-3), (1e-3, "off", "off")),
        (nn.ClipGradByValue(1e-3), ("off", 1e-3, "off")),
        (nn.ClipGradByValue(1e-3, -2e-3), ("off", "off", "ClipGradByValue(max=0.001, min=-0.002)")),
        (nn.ClipGradByNorm(1e-3), ("off", "off", "ClipGradByNorm(clip_norm=0.001)")),
    ],
)
def test_the_gradient_of_an_update_is_the_clipped_one(clip: Any, noted: tuple[Any, ...], tmp_path: Path) -> None:
    """As in frameworks that clip before the step. That of the backward pass is not clipped."""
    run = recorded(tmp_path / "run", clipped(clip), steps=1)
    assert limits(run) == [noted]
    for site in ("weight", "bias"):
        seen = of(run, site, 0)
        [arrived] = [value(run, row) for row in rows(run, site=site, phase="backward")]
        assert np.abs(seen["input", "grad"]).max() < 2.1e-3 < np.abs(arrived).max()
        np.testing.assert_allclose(seen["output", "update"], -seen["input", "grad"], atol=1e-7)


def test_a_group_may_clip_alone(tmp_path: Path) -> None:
    clip = nn.ClipGradByNorm(1e-3)
    groups = lambda model: [{"params": [model.weight], "grad_clip": clip}, {"params": [model.bias]}]  # noqa: E731
    run = recorded(tmp_path / "run", lambda model: paddle.optimizer.SGD(1.0, parameters=groups(model)), steps=1)
    assert limits(run) == [("off", "off", "ClipGradByNorm(clip_norm=0.001)"), ("off", "off", "off")]
    assert np.linalg.norm(of(run, "weight", 0)["input", "grad"]) == pytest.approx(1e-3, rel=1e-4)
    [arrived] = [value(run, row) for row in rows(run, site="bias", phase="backward")]
    np.testing.assert_array_equal(of(run, "bias", 0)["input", "grad"], arrived)


def test_a_limit_that_the_step_does_not_use(tmp_path: Path) -> None:
    """LBFGS takes one, and clips nothing."""
    model, x = line()
    optimizer = paddle.optimizer.LBFGS(
        0.1, max_iter=1, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1e-3)
    )

    def closure() -> Any:
        optimizer.clear_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with astray.record(tmp_path / "run", model, keep="tensors", optimizer="gradient") as recorder:
        closure()
        optimizer.step(closure)
        recorder.step()
    assert np.abs(of(astray.open(tmp_path / "run"), "weight", 0)["input", "grad"]).max() > 2e-3


def test_optimizers_within_those_of_fleet(tmp_path: Path) -> None:
    """They hand the gradients that mixed precision keeps to the optimizer by themselves, and never call its step."""

    def make(model: Any) -> Any:
        mix_precision_utils.MixPrecisionLayer(model, dtype="bfloat16")
        clip = nn.ClipGradByGlobalNorm(1e-3)
        inner = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), grad_clip=clip)
        return mix_precision_utils.MixPrecisionOptimizer(inner)

    run = recorded(tmp_path / "run", make)
    assert limits(run) == [(1e-3, "off", "off")]
    for step in range(2):
        parts = [of(run, site, step) for site in ("weight", "bias")]
        assert np.sqrt(sum((part["input", "grad"] ** 2).sum() for part in parts)) == pytest.approx(1e-3, rel=1e-4)
        assert all(np.abs(part["output", "update"]).max() > 0.05 for part in parts)
    assert {row["type"] for row in rows(run, phase="update")} == {"AdamW"}


class HandsOver:
    """What wraps an optimizer in a way that is not known."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        gradients = [(each, each._grad_ivar()) for each in self.optimizer._parameter_list]
        self.optimizer._apply_optimize(loss=None, startup_program=None, params_grads=gradients)

    def clear_grad(self) -> None:
        self.optimizer.clear_grad()


@pytest.mark.parametrize("kind", [HandsOver, mix_precision_utils.MixPrecisionOptimizer])
def test_steps_end_where_a_wrapper_steps(kind: Any, tmp_path: Path) -> None:
    paddle.seed(0)
    model = nn.Linear(3, 2)
    if kind is not HandsOver:
        mix_precision_utils.MixPrecisionLayer(model, dtype="bfloat16")
    optimizer = kind(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    with BaseRecorder.discovering(tmp_path / "run", discovering_adapter("paddle"), level="module", optimizer="weight"):
        for _ in range(3):
            for _ in range(2):
                model(paddle.ones([2, 3])).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
    found = rows(astray.open(tmp_path / "run"), site="weight", phase="update", path="weight", role="output")
    assert [row["step"] for row in found] == [0, 1, 2]


def test_groups_and_frozen_parameters(tmp_path: Path) -> None:
    def make(model: Any) -> Any:
        model.bias.stop_gradient = True
        return paddle.optimizer.Momentum(
            0.1, parameters=[{"params": [model.weight], "learning_rate": 0.5}, {"params": [model.bias]}]
        )

    run = recorded(tmp_path / "run", make)
    assert {row["site"] for row in rows(run, phase="update")} == {"weight"}
    seen = of(run, "weight", 0)
    np.testing.assert_allclose(seen["output", "update"], -0.05 * seen["input", "grad"], rtol=1e-5)
    np.testing.assert_allclose(seen["output", "state.velocity"], seen["input", "grad"], rtol=1e-6)


def test_a_class_that_calls_the_step_of_its_parent_steps_once(tmp_path: Path) -> None:
    class Twice(paddle.optimizer.SGD):
        def step(self) -> Any:
            return super().step()

    run = recorded(tmp_path / "run", lambda model: Twice(0.1, parameters=model.parameters()), steps=1)
    calls = run.ranks[0].calls
    assert [calls.row(i)["site"] for i in range(len(calls)) if calls.row(i)["phase"] == "update"] == [
        "Twice", "weight", "bias",
    ]  # fmt: skip


def test_minimize_is_a_step(tmp_path: Path) -> None:
    model, x = line()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with astray.record(tmp_path / "run", model, optimizer=ALL) as recorder:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.minimize(loss)
        recorder.step()
    assert "weight update output update" in outline(astray.open(tmp_path / "run"))


def test_calls_inside_a_step_are_the_optimizers(tmp_path: Path) -> None:
    make = lambda model: paddle.optimizer.AdamW(0.1, parameters=model.parameters())  # noqa: E731
    plain = recorded(tmp_path / "plain", make, level="module,function")
    assert not [site for site in {row["site"] for row in rows(plain)} if "adamw_" in site]
    model, x = line()
    optimizer = make(model)
    with astray.record(tmp_path / "run", model, level="function", optimizer="calls") as recorder:
        model(x).square().mean().backward()
        optimizer.step()
        recorder.step()
    found = rows(astray.open(tmp_path / "run"), phase="update")
    assert {row["site"] for row in found} == {"AdamW/adamw_", "AdamW/full_"}


def test_steps_end_where_the_first_optimizer_steps(tmp_path: Path) -> None:
    """Also where a scaler skips it: then the run says so."""
    paddle.seed(0)
    model = nn.Linear(3, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    other = paddle.optimizer.SGD(0.1, parameters=model.parameters())

    class Scaler(paddle.amp.GradScaler):  # Paddle's own does nothing on a CPU
        skips = False

        def step(self, optimizer: Any) -> None:
            if not self.skips:
                optimizer.step()

    scaler = Scaler()
    path = tmp_path / "run"
    with BaseRecorder.discovering(path, discovering_adapter("paddle"), level="module"):
        for number in range(4):
            for _ in range(2):
                model(paddle.ones([2, 3])).sum().backward()
            scaler.skips = number == 1
            scaler.step(optimizer)
            other.step()
            optimizer.clear_grad()
    run = astray.open(path)
    assert run.steps == [0, 1, 2, 3]
    assert sorted({(row["step"], row["micro"]) for row in rows(run, site="<root>", phase="forward")}) == [
        (step, micro) for step in range(4) for micro in range(2)
    ]
    calls = run.ranks[0].calls
    skipped = [calls.row(i) for i in range(len(calls)) if calls.row(i)["site"] == SKIPPED_UPDATE]
    assert [row["step"] for row in skipped] == [1]


def test_rows_of_sparse_gradients(tmp_path: Path) -> None:
    """An embedding's gradient may hold its used rows alone."""
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with astray.record(tmp_path / "run", model, keep="tensors", optimizer="gradient") as recorder:
        model(paddle.to_tensor([3, 7, 3])).sum().backward()
        optimizer.step()
        recorder.step()
    run = astray.open(tmp_path / "run")
    found = {(row["phase"], row["path"]): value(run, row) for row in rows(run, site="weight")}
    for phase in ("backward", "update"):
        assert found[phase, "grad.rows"].tolist() == [3, 7, 3]
        assert found[phase, "grad.values"].tolist() == [[1.0] * 4] * 3
