"""How far off a row may be: sums, gates that flip, cancellation, and weights that rounding moves; and faults beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import astray
from astray.comparison.comparison import compare
from block_models import Blocks, scaled, train

STATISTICS, VALUES = "stats", ["stats", "fingerprint", "tensors"]
BFLOAT16, NOISE = {"dtype": torch.bfloat16}, (1e-6, 2e-3)
KEEPS = pytest.mark.parametrize("keep", [STATISTICS, VALUES], ids=["statistics", "values"])


def half() -> nn.Module:
    return Blocks().bfloat16()


def rectified() -> nn.Module:
    return Blocks(act=nn.ReLU)


# ---- siblings, sums and values ---------------------------------------------------------------------------------------


@KEEPS
@pytest.mark.parametrize("model", [Blocks, rectified, half])
def test_two_runs_that_round_differently_agree(tmp_path: Path, model: Any, keep: Any) -> None:
    how = {"model": model, "keep": keep} | (BFLOAT16 if model is half else {})
    found = astray.compare(train(tmp_path / "a", **how), train(tmp_path / "b", noise=NOISE[model is half], **how))
    assert found.first is None
    assert found.counts["diverged"] == 0
    assert "siblings" in found.pairs["rule"]


@KEEPS
@pytest.mark.parametrize("factor", [1.1, 0.5])
def test_a_fault_stands_out_of_the_noise_of_bfloat16(tmp_path: Path, keep: Any, factor: float) -> None:
    """Every element is off by up to half a percent; in the norm of a thousand of them that is ten times less."""
    how = {"model": half, "keep": keep} | BFLOAT16
    plant = lambda net: scaled(net.h[3].up, factor)  # noqa: E731
    runs = train(tmp_path / "a", **how), train(tmp_path / "b", plant, noise=NOISE[True], **how)
    found = astray.compare(*runs, replay=False)
    assert (found.first.site, found.first.rule) == ("h.3.up", "siblings")
    assert found.first.siblings == 5
    assert found.first.surprise > 1


def bfloat16(values: np.ndarray) -> np.ndarray:
    return ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def noisy(size: int, spread: float, seed: int) -> np.ndarray:
    values = np.random.default_rng(0).normal(size=size)
    return (values * (1 + np.random.default_rng(seed).normal(0, spread, size))).astype(np.float32)


@pytest.mark.parametrize(("size", "found"), [(1 << 16, True), (1 << 4, False)])
def test_the_more_elements_the_smaller_a_factor_that_statistics_show(runs: Any, size: int, found: bool) -> None:
    """Rounding averages out as the root of their number."""
    sides = []
    for candidate in (False, True):
        builder = runs.Builder()
        for number in range(6):
            seq = builder.call(f"h.{number}")
            for role, seed in (("input", 2 * number + 1), ("output", 2 * number + 2)):
                values = noisy(size, 4e-3 if candidate else 0, seed)
                if candidate and (number, role) == (3, "output"):
                    values *= np.float32(1.005)
                builder.tensor(seq, role, "0", bfloat16(values), "bfloat16")
        sides.append(builder.run)
    first = compare(*sides).first
    assert (first is not None and (first.site, first.measure) == ("h.3", "norm")) == found


# ---- slices ----------------------------------------------------------------------------------------------------------


def layers(
    runs: Any,
    gains: dict[int, float],
    *,
    spread: float = 0.0,
    row: int | None = None,
    lost: int = 0,
    seed: int = 1,
    keep: str = "tensors",
) -> astray.Run:
    """Eight layers whose outputs are so many times as far off as their inputs; in the third a row may be doubled.

    lost: so many rows of everything have gone another way, as tokens do that another expert got.
    """
    builder = runs.Builder(keep=f"stats,fingerprint,{keep}" if keep else "stats,fingerprint")
    right, wrong = np.random.default_rng(0), np.random.default_rng(seed)
    for number in range(8):
        seq = builder.call(f"h.{number}")
        builder.tensor(seq, "parameter", "weight", np.ones(32, np.float32))  # the same in all runs
        for role in ("input", "output"):
            values = right.normal(size=(1024, 32))
            values *= 1 + spread * (gains.get(number, 1.0) if role == "output" else 1.0) * wrong.normal(
                size=values.shape
            )
            if (number, role) != (0, "input"):
                values[:lost] += wrong.normal(size=(lost, 32))
            if (number, role) == (2, "output") and row is not None:
                values[row] *= 2
            builder.tensor(seq, role, "0", bfloat16(values), "bfloat16")
    return builder.run


def test_a_doubled_row_is_seen_in_its_slice(runs: Any) -> None:
    """Beside the whole tensor it is a thirtieth, which noise hides."""
    reference = layers(runs, {})
    first = compare(reference, layers(runs, {}, spread=0.02, row=5)).first
    assert (first.site, first.measure, first.furthest) == ("h.2", "slices", "slice 5 of dimension 0")
    assert first.explained.startswith("its slice 5 of dimension 0 is off by 1.")
    assert (first.metrics["slice_dim"], first.metrics["slice_index"]) == (0, 5)
    assert first.metrics["rel_slice"] == pytest.approx(first.deviation)
    assert compare(reference, layers(runs, {}, spread=0.02)).first is None
    for keep in ("", "samples"):  # which know nothing of slices
        sides = (layers(runs, {}, keep=keep), layers(runs, {}, spread=0.02, row=5, keep=keep))
        assert "slices" not in compare(*sides).pairs["measure"]


# ---- long tails ------------------------------------------------------------------------------------------------------


def tailed(runs: Any, keep: str, is_candidate: bool, given: float = 0.0, fault: float = 1.0) -> Any:
    """Eight layers, off by `given` and two roundings more. An element of the fifth's output is far larger than all."""
    builder = runs.Builder(keep=keep)
    right, wrong = np.random.default_rng(0), np.random.default_rng(1)
    for number in range(8):
        seq = builder.call(f"h.{number}")
        builder.tensor(seq, "parameter", "weight", bfloat16(np.ones(32)), "bfloat16")  # the same in both runs
        for role, off in (("input", given), ("output", given + 2.0**-7)):
            values, noise = right.normal(size=(1024, 32)), off * wrong.normal(size=(1024, 32))
            if (number, role) == (4, "output"):
                values[5, 3], noise[5, 3] = 2.0**13, off
                values *= fault
            values *= 1 + is_candidate * noise
            builder.tensor(seq, role, "0", bfloat16(values), "bfloat16")
    return builder.run


@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats,fingerprint,tensors"])
@pytest.mark.parametrize(("given", "fault"), [(0.0, 1.2), (2.0**-3, 8.0)])
def test_norms_and_slices_of_a_long_tail_are_those_of_few_elements(
    runs: Any, keep: str, given: float, fault: float
) -> None:
    """The norm is as far off as that element is, and its row is 32 times as large as rows are on average."""
    reference = tailed(runs, keep, is_candidate=False)
    tolerances = {"^h.0$": 1.0}  # which is given what is off
    found = compare(reference, tailed(runs, keep, True, given), tolerances=tolerances)
    assert [str(one.place) for one in (*found.firsts, *found.others)] == []
    first = compare(reference, tailed(runs, keep, True, given, fault), tolerances=tolerances).first
    assert (first.site, first.phase) == ("h.4", "forward")


# ---- a typical row ---------------------------------------------------------------------------------------------------


def test_what_a_few_lost_rows_hide_is_seen_in_a_typical_one(runs: Any) -> None:
    """A twentieth of the rows is off by as much as they are large. By all values that is 22 %, in every layer."""
    reference = layers(runs, {})
    for gain, wrong in ((10.0, True), (1.0, False)):
        found = compare(reference, layers(runs, {4: gain}, spread=0.004, lost=51)).pairs
        row = next(row for row in range(len(found)) if (found["site"][row], found["role"][row]) == ("h.4", "output"))
        assert found["rel_l2"][row] == pytest.approx(0.22, rel=0.1)
        assert (found["surprise"][row] > 1) == wrong
        assert (found["measure"][row] == "typical") == wrong
        if wrong:
            assert found["rule"][row] == "siblings"
            assert found["deviation"][row] == found["rel_typical"][row] == pytest.approx(0.04, rel=0.1)


def test_a_typical_row_without_siblings_says_nothing(runs: Any) -> None:
    """Of two tensors with other lost rows the sum has twice as many: soon it is most of them."""
    builders = [runs.Builder(keep="stats,fingerprint,tensors") for _ in range(2)]
    for builder, is_candidate in zip(builders, (False, True), strict=True):
        parts = [np.random.default_rng(seed).normal(size=(100, 32)).astype(np.float32) for seed in (0, 1)]
        for number, part in enumerate(parts):
            part[number * 40 : number * 40 + 40] *= np.float32(1.01 if is_candidate else 1)
        seq = builder.call("sum")
        for number, part in enumerate(parts):
            builder.tensor(seq, "input", str(number), part)
        builder.tensor(seq, "output", "out", parts[0] + parts[1])
    found = compare(builders[0].run, builders[1].run).pairs
    assert found["rel_typical"][2] > 100 * max(found["rel_typical"][:2])
    assert found["measure"][2] != "typical"


def mixing(runs: Any, is_candidate: bool, share: float, fault: float = 1.0) -> Any:
    """Eight layers. A few tokens go another way; the fifth layer mixes rows.

    What it gives are its rows, and such a share of all others; so the tokens that are lost are a little of each row.
    """
    builder = runs.Builder(keep="stats,fingerprint,tensors")
    right, wrong = np.random.default_rng(0), np.random.default_rng(1)
    mixed = right.normal(size=(1024, 1024)) / 32
    for number in range(8):
        entered = right.normal(size=(1024, 32))
        off = 0.004 * entered * wrong.normal(size=entered.shape)
        off[:51] += 4 * wrong.normal(size=(51, 32))
        entered += is_candidate * off
        made = (entered + (share if number == 4 else 0.0) * mixed @ entered)[:, ::-1]
        made = made * (fault if is_candidate and number == 4 else 1.0)
        seq = builder.call(f"h.{number}")
        builder.tensor(seq, "input", "0", bfloat16(entered), "bfloat16")
        builder.tensor(seq, "parameter", "weight", bfloat16(np.ones(32)), "bfloat16")  # the same in both runs
        builder.tensor(seq, "output", "out", bfloat16(made), "bfloat16")
    return builder.run


@pytest.mark.parametrize(("share", "fault", "wrong"), [(0.05, 1.0, False), (0.05, 1.3, True), (0.0, 1.0, False)])
def test_a_call_that_mixes_rows_gives_a_part_of_the_lost_ones_to_each(
    runs: Any, share: float, fault: float, wrong: bool
) -> None:
    sides = mixing(runs, False, share), mixing(runs, True, share, fault)
    first = compare(*sides, tolerances={"^h.0$": 10.0}).first  # which is given tokens that are lost
    assert (first is not None) == wrong
    if first is not None:
        assert (first.site, first.measure) == ("h.4", "typical")


def summed(runs: Any, is_candidate: bool, fault: float = 1.0) -> Any:
    """Eight layers and the gradients of their weights, which are sums over rows. One row of the fifth is another."""
    builder = runs.Builder(keep="stats,fingerprint,tensors")
    right, wrong = np.random.default_rng(0), np.random.default_rng(1)
    entering, arriving = right.normal(size=(2, 8, 1024, 32))
    for values in (entering, arriving):
        values *= 1 + is_candidate * 0.004 * wrong.normal(size=values.shape)
    entering[4, 7] += is_candidate * 4 * wrong.normal(size=32)
    for number, values in enumerate(entering):
        seq = builder.call(f"h.{number}")
        builder.tensor(seq, "input", "0", bfloat16(values), "bfloat16")
        builder.tensor(seq, "parameter", "weight", bfloat16(right.normal(size=(32, 32))), "bfloat16")
    for number in range(7, -1, -1):
        seq = builder.call(f"h.{number}", phase="backward", parent=number)
        builder.tensor(seq, "input", "out", bfloat16(arriving[number]), "bfloat16")
        seq = builder.call(f"h.{number}.weight", "Parameter", phase="backward", kind="parameter")
        gradient = arriving[number].T @ entering[number]
        gradient[:20] *= fault if is_candidate and number == 4 else 1
        builder.tensor(seq, "gradient", "grad", bfloat16(gradient), "bfloat16")
    return builder.run


@pytest.mark.parametrize(("fault", "wrong"), [(1.0, False), (2.0, True)])
def test_a_row_that_is_lost_is_in_each_of_a_weights_gradient(runs: Any, fault: float, wrong: bool) -> None:
    """By a typical row it came of next to nothing, and is off as far as all elements of its input are."""
    sides = summed(runs, False), summed(runs, True, fault)
    first = compare(*sides, tolerances={r"^h.\d$": 10.0}).first  # to which the lost row is given
    assert (first is not None) == wrong
    if first is not None:
        assert first.site == "h.4.weight"


# ---- gradients of parameters -----------------------------------------------------------------------------------------


def gradients(runs: Any, noise: float, fault: float) -> astray.Run:
    """Eight modules whose inputs are off, and the gradients of their weights, in which that averages out."""
    builder = runs.Builder(keep="stats,fingerprint,tensors")
    right, wrong = np.random.default_rng(0), np.random.default_rng(1)

    def tensor(seq: int, role: str, path: str, spread: float, factor: float = 1.0, size: float = 1.0) -> None:
        values = right.normal(size=(64, 32))
        values = (size * (values * factor + spread * wrong.normal(size=values.shape))).astype(np.float32)
        builder.tensor(seq, role, path, bfloat16(values), "bfloat16")

    sites = [f"h.{number}" for number in range(8)]
    for site in sites:
        seq = builder.call(site)
        tensor(seq, "input", "0", noise)
        builder.tensor(seq, "parameter", "weight", np.ones((64, 32), np.float32))
        tensor(seq, "output", "out", noise)
    for site in reversed(sites):
        seq = builder.call(site, phase="backward")
        tensor(seq, "input", "out", noise)
        tensor(seq, "output", "0", noise)
        seq = builder.call(f"{site}.weight", "Parameter", phase="backward", kind="parameter")
        tensor(seq, "gradient", "grad", noise / 10, 1 + fault * (site == "h.3"), size=64.0)
    return builder.run


@pytest.mark.parametrize(("fault", "found"), [(0.05, True), (0.0, False)])
def test_a_gradient_is_held_to_what_its_siblings_average_out(runs: Any, fault: float, found: bool) -> None:
    """It is off by about as much as what it came from; but all others are off by ten times less."""
    first = compare(gradients(runs, 0.0, 0.0), gradients(runs, 0.03, fault)).first
    assert (first is not None) == found
    if first is not None:
        assert (first.site, first.rule) == ("h.3.weight", "siblings")


# ---- noise runs ------------------------------------------------------------------------------------------------------


def test_a_noise_run_sees_what_ill_conditioned_siblings_hide(runs: Any) -> None:
    """One layer multiplies errors by 30, in any run. Beside it, another that multiplies them by 50 looks harmless."""
    reference, candidate = layers(runs, {}), layers(runs, {1: 30.0, 5: 50.0}, spread=0.01)
    assert compare(reference, candidate).first is None
    first = compare(reference, candidate, noise=layers(runs, {1: 30.0}, spread=0.01, seed=7)).first
    assert (first.site, first.rule) == ("h.5", "noise run")


def test_a_noise_run_allows_a_row_what_it_shows_of_it(runs: Any) -> None:
    reference, candidate = layers(runs, {}), layers(runs, {5: 10.0}, spread=0.01)
    assert compare(reference, candidate).first.site == "h.5"
    assert compare(reference, candidate, noise=layers(runs, {5: 8.0}, spread=0.01, seed=7)).first is None


def test_kernels_that_round_more_than_a_noise_run_do_so_in_all_layers(runs: Any) -> None:
    """All outputs are off by ten times as much as in the noise run, and one by a hundred times."""
    reference, noise = layers(runs, {}), layers(runs, {}, spread=0.01, seed=7)
    every = dict.fromkeys(range(8), 10.0)
    assert compare(reference, layers(runs, every, spread=0.01), noise=noise).first is None
    first = compare(reference, layers(runs, every | {5: 100.0}, spread=0.01), noise=noise).first
    assert (first.site, first.rule) == ("h.5", "noise run")


def test_statistics_are_judged_beside_noise_runs_too(runs: Any) -> None:
    reference, candidate = layers(runs, {}, keep=""), layers(runs, {5: 100.0}, spread=0.01, keep="")
    noise = layers(runs, {}, spread=0.01, seed=7, keep="")
    found = compare(reference, candidate, noise=noise)
    assert (found.first.site, found.first.rule) == ("h.5", "noise run")
    assert compare(reference, layers(runs, {}, spread=0.01, keep=""), noise=noise).first is None


# ---- gates -----------------------------------------------------------------------------------------------------------


@KEEPS
@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-3])
def test_gates_that_flip_are_quiet(tmp_path: Path, keep: Any, noise: float) -> None:
    """An element whose sign rounding has changed lets its gradient through in one run, and not in the other."""
    reference = train(tmp_path / "a", model=rectified, keep=keep)
    candidate = train(tmp_path / "b", model=rectified, keep=keep, noise=noise)
    tolerances = {"^(<root>|h.0|h.0.norm)$": 1.0}  # to which the noise is given
    found = astray.compare(reference, candidate, tolerances=tolerances)
    assert [str(one.place) for one in (*found.firsts, *found.others)] == []


@KEEPS
def test_a_halved_gradient_beside_gates_is_found(tmp_path: Path, keep: Any) -> None:
    def plant(net: Any) -> None:
        net.h[3].act.register_full_backward_hook(lambda _, given, __: tuple(one / 2 for one in given))

    reference = train(tmp_path / "a", model=rectified, keep=keep)
    found = astray.compare(reference, train(tmp_path / "b", plant, model=rectified, keep=keep, noise=1e-6))
    assert (found.first.site, found.first.phase) in [("h.3.act", "backward"), ("h.3", "backward")]


Gates = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def close_one_and_open_another(entered: np.ndarray, noise: np.ndarray, gradient: np.ndarray, _: np.ndarray) -> None:
    """Two of the largest gradients are at gates that are all but shut: the norm stays as it was."""
    for place, sign in ((1, 1.0), (2, -1.0)):
        at = (place,) * entered.ndim
        entered[at], noise[at], gradient[at] = sign * 1e-9, sign * -2e-9, 60.0


def flip_in_one_row(entered: np.ndarray, noise: np.ndarray, gradient: np.ndarray, _: np.ndarray) -> None:
    """A token that the layer hardly answers to, and that much depends on."""
    entered[5] *= noise.std() / 2
    gradient[5] *= 4


def flip_in_one_channel(entered: np.ndarray, noise: np.ndarray, _: np.ndarray, scale: np.ndarray) -> None:
    """A channel of almost nothing, which the norm before it had divided by almost nothing."""
    entered[:, 3] *= noise.std()
    scale[3] = 1000


def gated(runs: Any, shape: tuple[int, ...], spread: float, change: Gates, fault: float = 1.0) -> Any:
    """Two runs of eight norms, each with a ReLU behind it. What enters the ReLUs is off by `spread`; one is changed."""
    right, wrong = np.random.default_rng(0), np.random.default_rng(1)
    layers = []
    for number in range(8):
        entered, gradient = (right.normal(size=shape) for _ in range(2))
        noise, scale = spread * wrong.normal(size=shape), np.ones(shape[-1])
        if number == 4:
            change(entered, noise, gradient, scale)
        layers.append((entered, noise, gradient, scale))
    sides = []
    for is_candidate in (False, True):
        builder = runs.Builder(keep="stats,fingerprint,tensors")

        def off(values: np.ndarray, is_candidate: bool = is_candidate) -> np.ndarray:
            return (values + is_candidate * spread * wrong.normal(size=values.shape)).astype(np.float32)

        calls = []
        for number, (entered, noise, *_) in enumerate(layers):
            normed = (entered + is_candidate * noise).astype(np.float32)
            norm, act = builder.call(f"h.{number}.norm", "BatchNorm"), builder.call(f"h.{number}.act", "ReLU")
            builder.tensor(norm, "input", "0", off(entered / 2))
            builder.tensor(norm, "parameter", "weight", np.ones(8, np.float32))  # the same in both runs
            builder.tensor(norm, "output", "out", normed)
            builder.tensor(act, "input", "0", normed)
            builder.tensor(act, "output", "out", np.maximum(normed, 0))
            calls.append((norm, act, normed))
        for number, (norm, act, normed) in reversed(list(enumerate(calls))):
            arriving, scale = off(layers[number][2]), layers[number][3]
            passed = arriving * (normed > 0) * np.float32(fault if is_candidate and number == 4 else 1)
            back = builder.call(f"h.{number}.act", "ReLU", phase="backward", parent=act)
            builder.tensor(back, "input", "out", arriving)
            builder.tensor(back, "output", "0", passed)
            back = builder.call(f"h.{number}.norm", "BatchNorm", phase="backward", parent=norm)
            builder.tensor(back, "input", "out", passed)
            builder.tensor(back, "output", "0", off(passed * scale))
        sides.append(builder.run)
    return compare(*sides, tolerances={"^h.0.norm$": 1.0}).first  # which is given what is off by more than rounding


@pytest.mark.parametrize(
    ("shape", "spread", "change"),
    [
        ((16, 16, 16), 1e-7, close_one_and_open_another),
        ((64, 64), 1e-3, flip_in_one_row),
        ((256, 64), 1e-3, flip_in_one_channel),
    ],
)
def test_a_flipped_gate_may_be_the_largest_element_or_one_of_many_in_a_slice(
    runs: Any, shape: tuple[int, ...], spread: float, change: Gates
) -> None:
    assert gated(runs, shape, spread, change) is None
    first = gated(runs, shape, spread, change, fault=2.0)
    assert (first.site, first.phase) == ("h.4.act", "backward")


# ---- weights that an optimizer moves by rounding ---------------------------------------------------------------------


class Convolution(nn.Module):
    """The batch norm takes the bias of the convolution away again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.out = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.bn(self.conv(x.reshape(-1, 1, 4, 4)))).flatten(1))


class Attention(nn.Module):
    """A third of the bias, that of the keys, adds the same to all scores of a query."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.qkv, self.out = nn.Linear(4, 32), nn.Linear(32, 96), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.up(x.reshape(-1, 4, 4))).chunk(3, -1)
        weights = (query @ key.transpose(-1, -2) / 32**0.5).softmax(-1)
        return self.out((weights @ value).mean(1))


ADAM = {"steps": 3, "stepping": torch.optim.Adam}
ALL = {"level": ["module", "function"], "keep": VALUES, "optimizer": ["update", "weight"]}


@pytest.mark.parametrize("options", [{}, {"keep": VALUES}, {"level": "function"}, ALL], ids=str)
@pytest.mark.parametrize("model", [Convolution, Attention])
def test_a_weight_that_rounding_moves_is_not_a_fault(tmp_path: Path, model: Any, options: dict[str, Any]) -> None:
    """Adam brings to its own scale whatever the gradient is, be it nothing but rounding."""
    reference = train(tmp_path / "a", model=model, **ADAM, **options)
    found = astray.compare(reference, train(tmp_path / "b", model=model, noise=1e-7, **ADAM, **options))
    assert found.first is None
    assert found.counts["diverged"] == 0


def at_step(step: int, change: Callable[[Any], None]) -> Any:
    """A plant that changes the model before a step."""

    def plant(net: Any) -> None:
        seen = [0]

        def hook(*_: Any) -> None:
            if seen[0] == step:
                with torch.no_grad():
                    change(net)
            seen[0] += 1

        net.register_forward_pre_hook(hook)

    return plant


@KEEPS
@pytest.mark.parametrize(
    ("step", "change", "place"),
    [
        (0, lambda net: net.conv.bias.mul_(1.01), ("conv", "parameter")),
        (2, lambda net: net.conv.bias.mul_(10), ("conv", "parameter")),
        (2, lambda net: net.out.weight.mul_(1.1), ("out", "parameter")),
        (2, lambda net: setattr(net.bn, "eps", 1e-3), ("bn", "computation")),
        (2, lambda net: scaled(net.out, 1.01), ("out", "computation")),
    ],
    ids=["start", "bias", "weight", "epsilon", "result"],
)
def test_a_fault_beside_it_is_named(
    tmp_path: Path, keep: Any, step: int, change: Callable[[Any], None], place: tuple[str, str]
) -> None:
    reference = train(tmp_path / "a", at_step(9, change), model=Convolution, keep=keep, **ADAM)
    candidate = train(tmp_path / "b", at_step(step, change), model=Convolution, keep=keep, noise=1e-7, **ADAM)
    first = astray.compare(reference, candidate).first
    assert (first.step, first.site, first.cause) == (step, *place)


def test_a_fault_in_the_part_of_a_bias_that_counts_is_named(tmp_path: Path) -> None:
    def change(net: Any) -> None:
        net.qkv.bias[64:] += 0.2

    reference = train(tmp_path / "a", at_step(9, change), model=Attention, **ADAM)
    first = astray.compare(
        reference, train(tmp_path / "b", at_step(2, change), model=Attention, noise=1e-7, **ADAM)
    ).first
    assert (first.step, first.site, first.cause) == (2, "qkv", "parameter")


WIDE = np.ones(1 << 16, np.float32)


def one_off(by: float) -> np.ndarray:
    values = WIDE.copy()
    values[7] += np.float32(by)
    return values


@pytest.mark.parametrize(
    ("gradient", "weight", "verdict"),
    [
        (0.0, 0.0, "identical"),
        (1e-7, 2e-3, "drifting"),  # the gradient of one element was rounding, and it went the other way
        (0.0, 2e-3, "diverged"),  # no rounding, no excuse
        (1e-7, 0.5, "diverged"),  # further than the optimizer moves anything
    ],
)
def test_one_element_of_a_weight_that_was_updated(runs: Any, gradient: float, weight: float, verdict: str) -> None:
    sides = []
    for off in (0, 1):
        builder = runs.Builder(keep="stats,fingerprint,tensors")
        for step in range(2):
            seq = builder.call("fc", step=step)
            builder.tensor(seq, "input", "0", WIDE[: 8 + step])
            moved = one_off(off * weight) - np.float32(1e-3) if step else WIDE
            builder.tensor(seq, "parameter", "weight", moved)
            event = builder.call("fc.weight", "Parameter", kind="parameter", phase="backward", step=step)
            builder.tensor(event, "gradient", "grad", one_off(off * gradient) * np.float32(1 + step))
        sides.append(builder.run)
    rows = compare(*sides).pairs
    assert rows["verdict"][4] == verdict


def test_a_weight_whose_gradient_is_the_same_has_moved_alike(tmp_path: Path) -> None:
    """Another step size moves everything, and is seen however small it is."""
    reference = train(tmp_path / "a", steps=2)

    def change(net: Any) -> None:
        net.h[2].up.weight.data.add_(net.h[2].up.weight.grad, alpha=-1e-4)

    first = astray.compare(reference, train(tmp_path / "b", steps=2, before_update=change)).first
    assert (first.step, first.site, first.cause) == (1, "h.2.up", "parameter")
    assert "though its gradient in step 0 agrees (identical)" in first.evidence[0]
