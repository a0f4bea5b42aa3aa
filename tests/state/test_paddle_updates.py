"""Updates of Paddle's optimizers: those that are right, those that are not, and the clip, regularisation and decay in
between. The rules are checked against Paddle's own steps in float64, where hardly anything is rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray.errors import UsageError
from astray.state.updates import ExpectedUpdate, ParameterState, Updates

pytestmark = pytest.mark.paddle
paddle = pytest.importorskip("paddle")

from paddle.distributed.fleet.utils import mix_precision_utils  # noqa: E402

Make = Callable[[Any], Any]
optim, clip, regular = paddle.optimizer, paddle.nn, paddle.regularizer
is_weight = lambda name: ".w_" in name  # noqa: E731 - the functions that Paddle takes are of this kind

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(0.1, p),
    "SGD, L2": lambda p: optim.SGD(0.1, p, weight_decay=0.01),
    "SGD, L1": lambda p: optim.SGD(0.1, p, weight_decay=regular.L1Decay(0.01)),
    "Momentum": lambda p: optim.Momentum(0.1, 0.9, p),
    "Momentum of Nesterov, L2": lambda p: optim.Momentum(0.1, 0.9, p, use_nesterov=True, weight_decay=0.01),
    "Momentum, L2Decay": lambda p: optim.Momentum(0.1, 0.9, p, weight_decay=regular.L2Decay(0.01)),
    "Momentum, L1": lambda p: optim.Momentum(0.1, 0.9, p, weight_decay=regular.L1Decay(0.01)),
    "Adam": lambda p: optim.Adam(0.01, parameters=p),
    "Adam, L2, amsgrad": lambda p: optim.Adam(0.01, parameters=p, weight_decay=0.1, amsgrad=True, epsilon=1e-5),
    "Adam, named": lambda p: optim.Adam(0.01, 0.8, 0.95, parameters=p, name="mine"),
    "AdamW": lambda p: optim.AdamW(0.01, parameters=p, weight_decay=0.1),
    "AdamW, amsgrad": lambda p: optim.AdamW(0.01, parameters=p, amsgrad=True, beta2=0.9),
    "AdamW, decay of some": lambda p: optim.AdamW(
        0.01, parameters=p, weight_decay=0.5, apply_decay_param_fun=is_weight
    ),
    "Adagrad": lambda p: optim.Adagrad(0.1, parameters=p, initial_accumulator_value=0.3),
    "RMSProp": lambda p: optim.RMSProp(0.01, parameters=p),
    "RMSProp, centered": lambda p: optim.RMSProp(0.01, rho=0.9, momentum=0.9, centered=True, parameters=p),
    "Adamax": lambda p: optim.Adamax(0.01, parameters=p, weight_decay=0.1),
    "Lamb": lambda p: optim.Lamb(0.01, 0.1, parameters=p),
    "Lamb without decay": lambda p: optim.Lamb(0.01, 0.0, parameters=p),
    "Lamb, always": lambda p: optim.Lamb(0.01, 0.0, parameters=p, always_adapt=True),
    "Lamb, decay of some": lambda p: optim.Lamb(
        0.01, 0.1, parameters=p, exclude_from_weight_decay_fn=lambda each: not is_weight(each.name)
    ),
    "clipped by value": lambda p: optim.Adam(
        0.01, parameters=p, grad_clip=clip.ClipGradByValue(1e-3), weight_decay=0.1
    ),
    "clipped by norm": lambda p: optim.Momentum(0.1, parameters=p, grad_clip=clip.ClipGradByNorm(1e-2)),
    "clipped by the norm of all": lambda p: optim.AdamW(
        0.01, parameters=p, grad_clip=clip.ClipGradByGlobalNorm(1e-2)
    ),
    "a schedule": lambda p: optim.AdamW(optim.lr.PolynomialDecay(0.1, 5), parameters=p),
    "groups, one clipped by norm": lambda p: optim.AdamW(
        0.01,
        parameters=[
            {"params": p[:2], "weight_decay": 0.0, "learning_rate": 0.1, "beta1": 0.5},
            {"params": p[2:], "grad_clip": clip.ClipGradByNorm(1e-2)},
        ],
    ),
    "groups of Momentum": lambda p: optim.Momentum(
        0.1, parameters=[{"params": p[:2], "weight_decay": 0.3}, {"params": p[2:], "momentum": 0.5}], weight_decay=0.1
    ),
    "groups of Adam": lambda p: optim.Adam(
        0.01, parameters=[{"params": p[:2], "weight_decay": 0.3, "beta2": 0.9}, {"params": p[2:]}], weight_decay=0.1
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_float32() -> Any:
    yield
    paddle.set_default_dtype("float32")


def network(dtype: str = "float32") -> Any:
    paddle.set_default_dtype(dtype)
    paddle.seed(0)
    attribute = paddle.ParamAttr(regularizer=regular.L2Decay(0.02), learning_rate=0.5)
    return paddle.nn.Sequential(
        paddle.nn.Linear(24, 40),
        paddle.nn.LayerNorm(40),
        paddle.nn.GELU(),
        paddle.nn.Linear(40, 3, bias_attr=attribute),
    )


def step(model: Any, optimizer: Any) -> None:
    x = paddle.randn([16, 24], model[0].weight.dtype)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    if not isinstance(optimizer._learning_rate, float):
        optimizer._learning_rate.step()


def checked(make: Make, dtype: str = "float32", count: int = 3) -> Updates:
    model = network(dtype)
    optimizer = make(list(model.parameters()))
    with astray.state.check_updates(optimizer, model) as watch:
        for _ in range(count):
            step(model, optimizer)
    return watch.updates


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_right_optimizer_is_right(name: str, dtype: str) -> None:
    if dtype == "float64" and "by norm" in name:
        pytest.skip("Paddle clips by norm in float32 alone on a CPU")
    updates = checked(OPTIMIZERS[name], dtype)
    assert [row.verdict for row in updates] == ["right"] * 18, str(updates)
    assert {row.name for row in updates} == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert all(row.made > 0 for row in updates)
    if dtype == "float64":
        assert max(row.error for row in updates) < 1e-11


def numbers(tensor: Any) -> Any:
    return tensor.astype("float64").numpy().copy()


def test_the_size_of_the_update_is_that_of_numpy() -> None:
    model = network("float64")
    optimizer = optim.AdamW(0.01, parameters=model.parameters(), weight_decay=0.1)
    before = {name: numbers(parameter) for name, parameter in model.named_parameters()}
    with astray.state.check_updates(optimizer, model) as watch:
        step(model, optimizer)
    for row in watch.updates:
        made = numbers(dict(model.named_parameters())[row.name]) - before[row.name]
        assert row.made == pytest.approx(np.linalg.norm(made), rel=1e-12)
        assert row.due == pytest.approx(row.made, rel=1e-12)
        assert row.lr == (0.005 if row.name == "3.bias" else 0.01)
        assert row.optimizer == "AdamW"


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("SGD, L2", "regularization", regular.L2Decay(0.02)),
        ("Momentum", "_momentum", 0.91),
        ("Momentum of Nesterov, L2", "_use_nesterov", False),
        ("Momentum of Nesterov, L2", "_regularization_coeff", 0.02),
        ("Adam", "_beta1", 0.91),
        ("Adam, L2, amsgrad", "_epsilon", 1e-4),
        ("AdamW", "_weight_decay", 0.11),
        ("AdamW, decay of some", "_apply_decay_param_fun", None),
        ("Adagrad", "_epsilon", 1e-4),
        ("RMSProp", "_rho", 0.94),
        ("RMSProp, centered", "_centered", False),
        ("Adamax", "_beta2", 0.9),
        ("Lamb", "_lamb_weight_decay", 0.2),
        ("Lamb, always", "always_adapt", False),
    ],
)
def test_a_step_by_another_setting_is_wrong(name: str, attribute: str, value: Any) -> None:
    """The step is made by one setting and checked against another: it is put back before the step has ended."""
    model = network("float64")
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for _ in range(3):
        step(model, optimizer)
    own = optimizer.step

    def by_another() -> None:
        kept = getattr(optimizer, attribute)
        setattr(optimizer, attribute, value)
        own()
        setattr(optimizer, attribute, kept)

    optimizer.step = by_another
    with astray.state.check_updates(optimizer, model) as watch:
        step(model, optimizer)
    wrong = {row.name for row in watch.updates.wrong}
    assert ("0.bias" if attribute == "_apply_decay_param_fun" else "0.weight") in wrong, str(watch.updates)


@pytest.mark.parametrize(("factor", "verdict"), [(0.0, "not updated"), (0.5, "wrong"), (1.01, "wrong")])
@pytest.mark.parametrize("name", ["SGD", "Momentum of Nesterov, L2", "AdamW", "Lamb"])
def test_a_parameter_without_all_of_its_update_is_found(name: str, factor: float, verdict: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    held, own = model[3].weight.clone(), optimizer.step

    def spoilt() -> None:
        own()
        with paddle.no_grad():
            model[3].weight.set_value(held + (model[3].weight - held) * factor)

    optimizer.step = spoilt
    with astray.state.check_updates(optimizer, model) as watch:
        step(model, optimizer)
    (row,) = watch.updates.wrong
    assert (row.name, row.verdict) == ("3.weight", verdict)
    if factor:
        assert row.factor == pytest.approx(factor, rel=1e-3)


def test_the_kernel_on_a_cpu_does_not_rescale_and_that_is_found() -> None:
    """Paddle 3.3 documents `rescale_grad`, and its CPU kernel of Momentum leaves it out."""
    updates = checked(lambda p: optim.Momentum(0.1, 0.9, p, rescale_grad=0.5), count=1)
    assert {row.verdict for row in updates} == {"wrong state"}, str(updates)


def test_a_state_that_does_not_follow_from_the_gradient() -> None:
    model = network()
    optimizer = optim.Momentum(0.1, 0.9, model.parameters())
    step(model, optimizer)
    own = optimizer.step

    def spoilt() -> None:
        velocity = optimizer._accumulators["velocity"][model[0].weight.name]
        velocity.set_value(velocity * 2)
        own()

    optimizer.step = spoilt
    with astray.state.check_updates(optimizer, model) as watch:
        step(model, optimizer)
    (row,) = watch.updates.wrong
    assert (row.name, row.verdict) == ("0.weight", "wrong state")


def test_float32_copies_of_rounded_weights() -> None:
    """No kernel on a CPU takes them: this one stands in for it, and rounds the weight from its copy."""

    class Copies(optim.SGD):  # type: ignore[misc, name-defined]
        factor = 1.0

        def _append_optimize_op(self, block: Any, pair: Any) -> None:
            parameter, gradient = pair
            copy = self._master_weights[parameter.name]
            copy.set_value(copy - self._global_learning_rate() * gradient.astype("float32"))
            parameter.set_value((copy * self.factor).astype(parameter.dtype))

    weight = paddle.nn.Linear(30, 20)
    weight.to(dtype="bfloat16")
    optimizer = Copies(1e-3, weight.parameters(), multi_precision=True)
    with astray.state.check_updates(optimizer, weight) as watch:
        for optimizer.factor in (1.0, 1.0, 1.1):
            (weight.weight.astype("float32").square().sum() + weight.bias.astype("float32").sum()).backward()
            optimizer.step()
            optimizer.clear_grad()
    rows = [row for row in watch.updates if row.name == "weight"]
    assert [(row.step, row.verdict, row.dtype) for row in sorted(rows, key=lambda row: row.step)] == [
        (0, "right", "bfloat16"),
        (1, "right", "bfloat16"),
        (2, "wrong", "bfloat16"),
    ]


def test_a_parameter_without_gradient_must_not_move() -> None:
    model = network()
    model[1].weight.stop_gradient = True
    optimizer = optim.AdamW(0.1, parameters=model.parameters())
    own = optimizer.step
    with astray.state.check_updates(optimizer, model) as watch:
        step(model, optimizer)
    (idle,) = [row for row in watch.updates if row.verdict == "idle"]
    assert (idle.name, idle.why) == ("1.weight", "it has no gradient")

    def moves() -> None:
        own()
        model[1].weight.set_value(model[1].weight + 1)

    optimizer.step = moves
    with astray.state.check_updates(optimizer, model) as watch:
        step(model, optimizer)
    (row,) = watch.updates.wrong
    assert row.verdict == "moved without gradient"


def test_a_grad_scaler_may_skip() -> None:
    """It tells the optimizer that there were infinities; it is off on a CPU, so this is done here in its place."""
    model = network()
    optimizer = optim.AdamW(0.01, parameters=model.parameters())
    with astray.state.check_updates(optimizer, model) as watch:
        for number in range(3):
            optimizer._set_auxiliary_var("found_inf", paddle.to_tensor([number == 1]))
            step(model, optimizer)
    assert not watch.updates.wrong, str(watch.updates)
    skipped = [row for row in watch.updates if row.verdict == "idle"]
    assert [row.step for row in skipped] == [1] * 6
    assert {row.why for row in skipped} == {"its GradScaler has left the step out"}


def test_minimize_is_a_step() -> None:
    model = network()
    optimizer = optim.Adam(0.01, parameters=model.parameters())
    with astray.state.check_updates(optimizer, model) as watch:
        loss = model(paddle.randn([16, 24])).square().mean()
        loss.backward()
        optimizer.minimize(loss)
    assert [row.verdict for row in watch.updates] == ["right"] * 6


@pytest.mark.parametrize("given", ["wrapper", "optimizer"])
def test_an_optimizer_within_that_of_mixed_precision(given: str) -> None:
    """It hands the sums in `main_grad` over to the optimizer, whose step it never calls."""
    model = paddle.nn.Linear(4, 3)
    mix_precision_utils.MixPrecisionLayer(model, dtype="bfloat16")
    inner = optim.AdamW(0.1, parameters=model.parameters(), grad_clip=clip.ClipGradByGlobalNorm(1e-2))
    optimizer = mix_precision_utils.MixPrecisionOptimizer(inner)
    with astray.state.check_updates(optimizer if given == "wrapper" else inner, model) as checked:
        for _ in range(2):
            for _ in range(2):
                model(paddle.randn([5, 4])).square().mean().backward()
            gradients = astray.state.from_grad(model)
            assert np.array_equal(gradients["weight"].numpy(), model.weight.main_grad.numpy())
            optimizer.step()
            optimizer.clear_grad()
    assert {(row.step, row.name, row.verdict) for row in checked.updates} == {
        (step, name, "right") for step in range(2) for name in ("weight", "bias")
    }


def test_what_has_no_rule_is_said() -> None:
    def why(make: Make) -> set[tuple[str, str]]:
        return {(row.verdict, row.why) for row in checked(make, count=1)}

    assert why(lambda p: optim.Adadelta(0.01, parameters=p)) == {("unchecked", "there is no rule for Adadelta")}
    assert why(lambda p: optim.NAdam(0.01, parameters=p)) == {("unchecked", "there is no rule for NAdam")}
    assert why(lambda p: optim.Adam(0.01, parameters=p, lazy_mode=True)) == {
        ("unchecked", "lazy_mode is not recomputed")
    }

    class Other(regular.L2Decay):  # type: ignore[misc, name-defined]
        """As a program may define one."""

    assert ("unchecked", "regularisation by Other is not recomputed") in why(
        lambda p: optim.SGD(0.01, p, weight_decay=Other(0.1))
    )
    table = paddle.nn.Embedding(5, 3, sparse=True)
    optimizer = optim.SGD(0.1, table.parameters())
    with astray.state.check_updates(optimizer, table) as watch:
        table(paddle.to_tensor([1, 3])).sum().backward()
        optimizer.step()
    (row,) = watch.updates
    assert (row.verdict, row.why) == ("unchecked", "updates by sparse gradients are not recomputed")


def test_an_optimizer_that_makes_its_steps_in_another_way_is_not_checked() -> None:
    model, x = network(), paddle.randn([16, 24])
    optimizer = optim.LBFGS(0.1, max_iter=2, parameters=model.parameters())

    def closure() -> Any:
        optimizer.clear_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with astray.state.check_updates(optimizer, model) as watch:
        optimizer.step(closure)
    assert {(row.verdict, row.why) for row in watch.updates} == {("unchecked", "there is no rule for LBFGS")}


def test_a_parameter_that_cannot_be_read_is_said_and_does_not_stop_the_training() -> None:
    with paddle.LazyGuard():
        empty = paddle.nn.Linear(2, 2)
    model = network()
    optimizer = optim.SGD(0.1, [*model.parameters(), empty.weight])
    with astray.state.check_updates(optimizer) as watch:
        step(model, optimizer)
    (row,) = [row for row in watch.updates if row.verdict != "right"]
    assert (row.name, row.verdict, row.shape, row.dtype) == ("group0.6", "unchecked", (2, 2), "float32")
    assert "it has no memory" in row.why


def test_a_rule_of_ones_own() -> None:
    def rule(before: ParameterState) -> ExpectedUpdate:
        change = -float(before.group["lr"]) * before.gradient.sign()
        return ExpectedUpdate(change, 1e-6 * torch.ones_like(change), {})

    class SignSGD(optim.SGD):  # type: ignore[misc, name-defined]
        def _append_optimize_op(self, block: Any, pair: Any) -> None:
            pair[0].set_value(pair[0] - self._create_param_lr(pair) * pair[1].sign())

    model = network()
    model[3].bias.regularizer = None
    optimizer = SignSGD(0.01, model.parameters())
    for rules in ({SignSGD: rule}, {"SignSGD": rule}):
        with astray.state.check_updates(optimizer, model, rules=rules) as watch:
            step(model, optimizer)
        assert {row.verdict for row in watch.updates} == {"right"}


def test_only_what_is_asked_for_is_looked_at_and_nothing_remains() -> None:
    model = network()
    optimizer = optim.AdamW(0.1, parameters=model.parameters())
    attributes = dict(vars(optimizer))
    with astray.state.check_updates(optimizer, model, pattern=r"3\.") as watch:
        step(model, optimizer)
    assert sorted(row.name for row in watch.updates) == ["3.bias", "3.weight"]
    assert attributes.keys() == vars(optimizer).keys()
    step(model, optimizer)
    assert len(watch.updates) == 2

    outer, inner = (astray.state.check_updates(optimizer) for _ in range(2))
    outer.close()  # beneath the other
    step(model, optimizer)
    inner.close()
    step(model, optimizer)
    assert (len(outer.updates), len(inner.updates)) == (0, 6)
    assert inner.updates[0].name.startswith("group0.")


def test_what_cannot_be_is_said() -> None:
    model = network()
    optimizer = optim.AdamW(0.1, parameters=model.parameters())
    with pytest.raises(UsageError, match="None of the 6 parameters of this AdamW belongs to this Linear"):
        astray.state.check_updates(optimizer, paddle.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="A Linear was given, whose steps cannot be watched"):
        astray.state.check_updates(paddle.nn.Linear(2, 2))


def test_watching_changes_nothing() -> None:
    def weights(watched: bool) -> list[Any]:
        model = network()
        optimizer = optim.AdamW(0.1, parameters=model.parameters(), grad_clip=clip.ClipGradByGlobalNorm(1e-2))
        if watched:
            astray.state.check_updates(optimizer, model)
        for _ in range(3):
            step(model, optimizer)
        return [numbers(parameter) for parameter in model.parameters()]

    assert all(np.array_equal(one, other) for one, other in zip(weights(False), weights(True), strict=True))
