"""Healthy programs, of which nothing stands out; planted kernels, which come first; what is left out, and why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.errors import RunError, UsageError
from astray.replay.replay import Replay
from astray.results.run import Run
from replay import faults, programs, transformer_models

HEALTHY = {**programs.FIRST_HALF, **programs.SECOND_HALF}
QUICK = ("gpt bf16", "conv net f32", "llama autocast")


def slow_but(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def recorded(folder: Path, program: Any, level: str = "function") -> Run:
    """What a function does in one step, recorded without a module of its own."""
    with astray.record(folder, nn.Identity(), level=level, keep="stats,tensors") as recorder:
        program()
        recorder.step()
    return astray.open(folder)


# -- healthy and not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but(HEALTHY, QUICK))
def test_nothing_stands_out_of_a_healthy_program(name: str, tmp_path: Path) -> None:
    replay = programs.record(tmp_path / "r", HEALTHY[name]).replay()
    assert not replay.stands_out
    assert not replay.left_out


@pytest.mark.slow
@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("name", ["gpt bf16", "conv net bf16", "lstm f32"])
def test_nothing_stands_out_of_its_modules_and_operators(name: str, level: str, tmp_path: Path) -> None:
    replay = programs.record(tmp_path / "r", HEALTHY[name], level).replay()
    assert not replay.stands_out
    assert len(replay.calls) > 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", transformer_models.MODELS)
def test_nothing_stands_out_of_models_that_were_not_seen(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    replay = transformer_models.record(tmp_path / "r", name, dtype).replay()
    assert not replay.stands_out
    left_out = {kind: count for types in replay.left_out.values() for kind, count in types.items()}
    assert left_out == ({"torch.Tensor.__setitem__": 2} if name == "mixtral" else {})  # written into unfilled memory


def assert_first(replay: Replay, fault: faults.Fault) -> None:
    assert replay.calls[0].site.endswith(fault.site)
    assert replay.calls[0].stands_out


PLANTED = {**faults.FIRST_HALF, **faults.SECOND_HALF}


@pytest.mark.parametrize("name", slow_but(PLANTED, ("narrow sums", "wrong tile", "one sample less", "other variance")))
def test_a_planted_kernel_comes_first_without_a_reference(name: str, tmp_path: Path) -> None:
    fault = PLANTED[name]
    planted = faults.Planted(fault)
    replay = programs.record(tmp_path / "r", HEALTHY[fault.program], fault=planted).replay()
    assert planted.done
    assert_first(replay, fault)
    assert len(replay.stands_out) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", faults.UNSEEN)
def test_so_it_does_in_a_model_that_was_not_seen(name: str, tmp_path: Path) -> None:
    planted = faults.Planted(faults.UNSEEN[name])
    replay = transformer_models.record(tmp_path / "r", "gpt2", torch.bfloat16, fault=planted).replay()
    assert planted.done
    assert_first(replay, faults.UNSEEN[name])


@pytest.mark.slow
def test_what_is_within_rounding_is_not_seen(tmp_path: Path) -> None:
    planted = faults.Planted(faults.WITHIN_ROUNDING["truncated"])
    replay = programs.record(tmp_path / "r", HEALTHY["gpt bf16"], fault=planted).replay()
    assert planted.done
    assert not replay.stands_out


# -- in place, random, special arguments -------------------------------------------------------------------------------


def in_place() -> None:
    leaf = torch.randn(8, 32, requires_grad=True)
    x = leaf * 1.5
    x.add_(leaf, alpha=2).mul_(0.5)
    x += 1
    x[1:3] = leaf[:2].exp()
    x[:, 5] = 0.25
    x.masked_fill_(torch.arange(32) > 28, -1.0)
    y = torch.zeros(8, 32).copy_(x)
    y.clamp_(-2, 2)
    z = F.relu(y * 2, inplace=True)
    F.leaky_relu_(z - 0.5, 0.1).square().sum().backward()


def test_calls_in_place_with_their_backward(tmp_path: Path) -> None:
    replay = recorded(tmp_path / "r", in_place).replay()
    assert not replay.stands_out
    assert not replay.left_out
    for name in ("add_", "mul_", "setitem", "masked_fill_", "copy_", "clamp_", "relu", "leaky_relu_"):
        calls = [call for call in replay.calls if call.site.endswith(f"/{name}")]
        assert calls, name
        assert all({"forward", "backward"} <= {tensor.phase for tensor in call.tensors} for call in calls), name


def test_a_wrong_result_in_place_stands_out(tmp_path: Path) -> None:
    fault = faults.Fault("masked_fill_.Scalar", 0, lambda result, *_: result.mul_(1.01), "/masked_fill_")
    with faults.Planted(fault) as planted:
        replay = recorded(tmp_path / "r", in_place).replay()
    assert planted.done
    assert_first(replay, fault)


class Drawing(nn.Module):
    """Every way of drawing random numbers that programs have."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(32, 32), nn.Dropout(0.3)
        self.lstm = nn.LSTM(32, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.alpha_dropout(F.dropout(self.drop(self.line(x)), 0.1), 0.1, True)
        heads = x.view(2, 8, 2, 16).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.25).transpose(1, 2).reshape(2, 8, 32)
        x = F.rrelu(x, training=True) + F.gumbel_softmax(x)
        x = x * torch.empty(2, 8, 32).bernoulli_(0.9) + torch.zeros(2, 8, 32).normal_().uniform_(-1, 1)
        x = x + torch.randn_like(x) + torch.rand(2, 8, 32, generator=self.own) + torch.randint(0, 9, (32,))
        x = x + torch.multinomial(x.flatten(0, 1).softmax(-1), 3).float().mean()
        x = F.dropout1d(x[:, torch.randperm(8)], 0.2)
        return self.lstm(F.dropout(x.to(self.line.weight.dtype), 0.1, True, True))[0]


DRAWN = """
dropout alpha_dropout scaled_dot_product_attention rrelu gumbel_softmax bernoulli_ normal_ uniform_ randn_like rand
randint multinomial dropout1d randperm lstm
"""


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_random_calls_draw_what_they_drew(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = Drawing().to(dtype)
    with astray.record(tmp_path / "r", model, level="module,function", keep="stats,tensors") as recorder:
        model(torch.randn(2, 8, 32).to(dtype)).float().sum().backward()
        recorder.step()
    before = torch.get_rng_state()
    replay = astray.open(tmp_path / "r").replay()
    assert torch.equal(torch.get_rng_state(), before)  # none were taken from who asks
    assert not replay.stands_out
    assert {*replay.left_out} == {"a module that is not a leaf of torch.nn"}
    assert {*DRAWN.split()} <= {call.site.rpartition("/")[2] for call in replay.calls}
    assert replay["drop"], "the module draws what the function inside of it drew"
    assert replay["lstm"]


def test_a_dropout_that_scales_wrongly_stands_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wrong = faults.Fault("div_.Scalar", 0, lambda result, *_: result.mul_(1.02), "/dropout")

    def program() -> None:
        F.dropout(torch.randn(8, 32, requires_grad=True), 0.25).sum().backward()

    with faults.Planted(wrong) as planted:
        replay = recorded(tmp_path / "r", program).replay()
    assert planted.done
    assert_first(replay, wrong)


def special_arguments() -> None:
    """Broadcasting, the same tensor twice, expanded and transposed ones, results in parts, complex numbers."""
    x = torch.randn(16, 24, requires_grad=True)
    y = (x * x).t().expand(2, 24, 16) @ x
    first, second = y.chunk(2, dim=1)
    spectrum = torch.fft.rfft(first + second.flip(-1))
    weights = spectrum.abs().clamp(min=0.1)
    joined = torch.cat([weights, weights.cumsum(-1)], dim=-1)
    joined.unflatten(-1, (2, -1)).type(torch.float64).logsumexp((-1, -2)).sum().backward()
    torch.bincount(torch.arange(6) % 3).repeat_interleave(torch.tensor([1, 2, 3]))
    torch.sort(torch.randint(0, 3, (20,)))


def test_special_arguments(tmp_path: Path) -> None:
    replay = recorded(tmp_path / "r", special_arguments).replay()
    assert not replay.stands_out
    assert not replay.left_out
    (order,) = [call for call in replay.calls if call.site.endswith("/sort")]
    assert order.lost == ["indices of equal values, of which every implementation may choose another"]


# -- what is left out --------------------------------------------------------------------------------------------------


def reasons(run: Run) -> dict[str, str]:
    """For each type of a call that is left out the reason."""
    return {kind: reason for reason, types in run.replay().left_out.items() for kind in types}


def test_what_cannot_be_replayed_is_told(tmp_path: Path) -> None:
    out = torch.zeros(4)

    def program() -> None:
        x = torch.randn(4, 4)
        torch.as_strided(x, (2, 2), (1, 2))
        x.apply_(lambda value: value + 1)
        torch.empty(3, 3)[1] = 2.0
        torch.add(x[0], x[1], out=out)
        x.to_sparse()

    found = reasons(recorded(tmp_path / "r", program))
    assert found["torch.as_strided"] == "a view by strides of its own: what lies around its input was not kept"
    assert found["torch.Tensor.apply_"] == "not a function that computes with tensors"
    assert "memory that was not filled" in found["torch.Tensor.__setitem__"]
    assert found["torch.add"] == "a result written into the argument out"


def test_without_values_nothing_can_be_replayed(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with astray.record(tmp_path / "r", model, level="function"):
        model(torch.ones(2, 4))
    replay = astray.open(tmp_path / "r").replay()
    assert not replay.calls
    assert [*replay.left_out] == ["the values of a tensor were not kept: record with keep=tensors"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"keep": "sample"}, "a sample alone was kept of a tensor: record with keep=tensors"),
        ({"keep": "tensors", "slice": "0:1"}, "a slice alone was kept of a tensor: record with keep=tensors and "
         "without slice"),
        ({"keep": "tensors", "roles": "output"}, "an input that was not recorded, such as memory that was not filled "
         "yet"),
    ],
)  # fmt: skip
def test_parts_of_values_are_not_enough(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with astray.record(tmp_path / "r", nn.Linear(256, 256), level="function", **options) as recorder:
        F.linear(torch.ones(64, 256), torch.ones(256, 256)).sum()
        recorder.step()
    assert reasons(astray.open(tmp_path / "r"))["torch.nn.functional.linear"] == reason


def test_random_calls_of_modules_alone_have_no_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    with astray.record(tmp_path / "r", model, level="module", keep="stats,tensors"):
        model(torch.ones(2, 4))
    found = reasons(astray.open(tmp_path / "r"))
    assert found["Dropout"] == "random numbers whose generator was not recorded: record with --level function"


def test_a_generator_that_was_moved_on_by_another_is_told(tmp_path: Path) -> None:
    def program() -> None:
        class Elsewhere(faults.Planted):
            def __torch_dispatch__(self, func: Any, *rest: Any) -> Any:
                torch.default_generator.manual_seed(1)  # as another thread may draw meanwhile
                return super().__torch_dispatch__(func, *rest)

        with Elsewhere(faults.Fault("none", -1, print, "")):
            torch.rand(5)

    found = reasons(recorded(tmp_path / "r", program))
    assert found["torch.rand"].startswith("random numbers that this torch draws otherwise, or another thread")


# -- asking for some ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "three"
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.GELU(), layer, nn.GELU())
    with astray.record(path, model, level="function", keep="stats,tensors") as recorder:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            recorder.step()
    return astray.open(path)


def test_sites_calls_and_steps_are_selected(run: Run) -> None:
    assert len(run.replay().calls) == 3 * 6
    assert {call.site for call in run.replay("0").calls} == {"0/linear"}
    assert len(run.replay("0/linear").calls) == 6
    assert len(run.replay("0/linear#1").calls) == 3
    assert [call.call["step"] for call in run.replay("0/linear#1", steps=1).calls] == [1]
    assert [call.call["call"] for call in run.replay(steps="2")["0/linear"]] == [0, 1]


def test_what_is_not_there_is_told(run: Run) -> None:
    with pytest.raises(UsageError, match=r"has no call '0/lineal'\. Did you mean"):
        run.replay("0/lineal")
    with pytest.raises(UsageError, match="has no call '0/linear#7'"):
        run.replay("0/linear#7")
    with pytest.raises(UsageError, match="has no rank 4; it has 0"):
        run.replay(rank=4)
    with pytest.raises(UsageError, match="has no calls in step 9; it has steps 0, 1, 2"):
        run.replay(steps=9)


def test_progress_is_told(run: Run) -> None:
    told: list[tuple[int, int]] = []
    run.replay("0", progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 6) for done in range(6)]


def test_it_can_be_interrupted_and_leaves_the_generator_as_it_was(run: Run) -> None:
    def interrupt(done: int, _: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        run.replay(progress=interrupt)
    assert torch.equal(torch.get_rng_state(), before)


def test_reprs_say_what_was_found(run: Run) -> None:
    replay = run.replay()
    assert repr(replay) == f"<Replay of {run.path}: 18 of 18 calls replayed, nothing stands out>"
    assert repr(replay["0/linear"][0]).startswith("<ReplayedCall 0/linear#0: ")
    assert all(math.isfinite(call.worst.judgement.ulps) for call in replay.calls)


def test_a_checkpoint_has_no_calls(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    with pytest.raises(RunError, match="can be replayed"):
        astray.open(tmp_path / "model.pt").replay()
