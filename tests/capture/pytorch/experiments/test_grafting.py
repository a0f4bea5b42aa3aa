"""`graft`: what another run recorded takes the place of what the program computes, and nothing else changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import astray
from astray.capture.graft_words import GraftNote, graft_notes
from astray.capture.pytorch.experiments import applied_graft
from astray.errors import RecordError, RunError
from astray.recorder import Recorder
from recorded_rows import hooks_of, rows
from small_models import MODELS, InPlace, Nested, Shared, build, same_bits
from small_models import train as train_small

FUNCTIONS = "module,function"


# -- a program in which faults can be planted --------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """In which block something is wrong; −1 for none."""

    activation: int = -1
    softmax: int = -1
    weight: int = -1
    backward: int = -1
    checkpointed: bool = False


NONE = Faults()


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2 * ctx.factor, None


class Doubling(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return WrongBackward.apply(x, self.factor)  # type: ignore[no-any-return, no-untyped-call]


class Activation(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x * (1.5 if self.wrong else 1.0))


class Mlp(nn.Module):
    def __init__(self, number: int, faults: Faults) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 8), Activation(faults.activation == number), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, number: int, faults: Faults) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), Mlp(number, faults)
        self.doubling = Doubling(1.01 if faults.backward == number else 1.0)
        self.scale = 1.01 if faults.softmax == number else 1.0

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax((x @ x.transpose(-1, -2)) * self.scale, -1)
        x = self.doubling(scores @ x)
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.h = nn.ModuleList(Block(number, faults) for number in range(2))
        self.head = nn.Linear(6, 9)
        self.checkpointed = faults.checkpointed
        if faults.weight >= 0:
            with torch.no_grad():
                self.h[faults.weight].mlp.up.weight.mul_(1.01)  # type: ignore[union-attr, operator]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)  # type: ignore[no-any-return]


def train(model: nn.Module, after_step: Callable[[], None], *, steps: int = 2, micro: int = 1) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            ids = torch.randint(9, (2, 5), generator=generator)
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten().roll(1))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        optimizer.step()
        after_step()
    return losses


def record(path: Path, faults: Faults = NONE, *, micro: int = 1, **settings: Any) -> Any:
    torch.manual_seed(1)
    model = Net(faults)
    with astray.record(path, model, **{"keep": "tensors", "level": FUNCTIONS, **settings}) as recorder:
        train(model, recorder.step, micro=micro)
    assert hooks_of(model) == 0
    return astray.open(path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graft") / "a"
    record(path)
    return path


def prints(run: Any, **wanted: Any) -> dict[tuple[Any, ...], int]:
    """The fingerprints of a run's tensors, by their keys."""
    names = ("step", "micro", "site", "call", "recompute", "phase", "role", "path")
    return {tuple(row[name] for name in names): row["fingerprint"] for row in rows(run, **wanted)}


def different_sites(reference: Path, candidate: Any, **wanted: Any) -> set[str]:
    """The sites with a tensor that both runs have, and that is not the same."""
    ours, others = prints(astray.open(reference), **wanted), prints(candidate, **wanted)
    assert ours
    return {key[2] for key in ours.keys() & others.keys() if ours[key] != others[key]}


def missed(run: Any) -> dict[str, int]:
    return {f"{one.what}: {one.why}": one.count for one in run.ranks[0].end.missed}


def notes(run: Any) -> list[GraftNote]:
    return graft_notes(run.ranks[0].setup)


# -- nothing changes where nothing differs -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[type[nn.Module], tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("small")
    return {kind: (folder / kind.__name__, record_small(folder / kind.__name__, kind)) for kind in MODELS}


def record_small(path: Path, kind: type[nn.Module], **settings: Any) -> Any:
    model = build(kind)
    with astray.record(path, model, **{"keep": "tensors", "level": FUNCTIONS, **settings}) as recorder:
        return train_small(model, 2, after_step=recorder.step)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_runs_own_values_change_no_bit(
    kind: type[nn.Module],
    is_replaced: bool,
    small_runs: dict[type[nn.Module], tuple[Path, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where every tensor is replaced, as if it had differed."""
    path, trained = small_runs[kind]
    if is_replaced:
        monkeypatch.setattr(applied_graft, "have_same_bits", lambda first, second: first is second)
    everything = "outputs,inputs,parameters,gradients"
    grafts = [str(path), f"{path}:.*@{everything}", f"{path}:.*/.*@{everything}"]
    assert same_bits(record_small(tmp_path / "b", kind, graft=grafts), trained)
    run = astray.open(tmp_path / "b")
    assert prints(astray.open(path)).items() <= prints(run).items()
    if not is_replaced:  # a view that is replaced is none any more, and has gradients of its own
        assert len(prints(run)) == len(prints(astray.open(path)))
    assert missed(run) == {}
    found = notes(run)
    assert [note.unreached for note in found] == [0, 0, 0]
    assert sum(note.tensors for note in found) > 60
    assert sum(note.differed for note in found) == (sum(note.tensors for note in found) if is_replaced else 0)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_ops_are_grafted_below_autograd(kind: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = record_small(tmp_path / "a", kind, level="op")
    monkeypatch.setattr(applied_graft, "have_same_bits", lambda first, second: first is second)
    graft = f"{tmp_path / 'a'}:.*/.*@inputs,outputs"
    assert same_bits(record_small(tmp_path / "b", kind, level="op", graft=graft), trained)
    run = astray.open(tmp_path / "b")
    assert prints(run) == prints(astray.open(tmp_path / "a"))
    assert set(missed(run)) <= {
        "the graft of .*/.*@outputs,inputs: it is a view, and an op has to return it as one",
    }
    assert notes(run)[0].tensors > 60


# -- a planted fault goes, or not --------------------------------------------------------------------------------------


def test_a_fault_goes_where_its_results_are_grafted(reference: Path, tmp_path: Path) -> None:
    wrong = Faults(activation=1)
    assert "h.1.mlp.down" in different_sites(reference, record(tmp_path / "b", wrong), step=0, phase="forward")
    right = record(tmp_path / "c", wrong, graft=f"{reference}:h.1.mlp.act")
    inside = {"h.1.mlp.act/mul", "h.1.mlp.act/sigmoid"}
    assert different_sites(reference, right, step=0, phase="forward") == inside
    assert notes(right) == [GraftNote("h.1.mlp.act@outputs", str(reference), 2, 2, 0)]
    other = record(tmp_path / "d", wrong, graft=f"{reference}:h.0.mlp.act")
    assert "h.1.mlp.down" in different_sites(reference, other, step=0, phase="forward")
    assert notes(other) == [GraftNote("h.0.mlp.act@outputs", str(reference), 2, 1, 0)]  # wrong from step 1 on


def test_the_gradient_goes_on_to_what_was_replaced(reference: Path, tmp_path: Path) -> None:
    """What arrives at the call is right, and what it makes of that is its own."""
    right = record(tmp_path / "c", Faults(activation=1), graft=f"{reference}:h.1.mlp.act")
    found = different_sites(reference, right, step=0, phase="backward", kind="module")
    assert "h.1.mlp.down" not in found
    assert {"h.1.mlp.act", "h.1.mlp.up", "h.0"} <= found
    assert different_sites(reference, right, step=0, phase="backward", site="h.1.mlp.act", role="input") == set()


def test_a_function_is_grafted(reference: Path, tmp_path: Path) -> None:
    right = record(tmp_path / "c", Faults(softmax=0), graft=f"{reference}:h.0/softmax")
    assert different_sites(reference, right, step=0, phase="forward") == {"h.0/mul", "h.0/softmax"}
    assert different_sites(reference, right, step=0, phase="forward", site="h.0/softmax", role="output") == set()
    of_all = record(tmp_path / "d", Faults(softmax=0), graft=rf"{reference}:h\.\d/soft.*")
    assert notes(of_all)[0].tensors == 4


def test_what_a_call_is_given_is_grafted(reference: Path, tmp_path: Path) -> None:
    """The recording shows what the call truly got. A sum around it goes on with the program's own."""
    right = record(tmp_path / "c", Faults(activation=0), graft=f"{reference}:h.1.norm@inputs")
    found = different_sites(reference, right, step=0, phase="forward", kind="module")
    assert found == {"h.0.mlp.act", "h.0.mlp.down", "h.0.mlp", "h.0", "h.1.doubling", "h.1", "head", "<root>"}


def test_parameters_hold_the_runs_values_from_then_on(reference: Path, tmp_path: Path) -> None:
    wrong, graft = Faults(weight=1), f"{reference}:h.1.mlp.up@parameters"
    assert different_sites(reference, record(tmp_path / "b", wrong), step=0, phase="forward")
    assert different_sites(reference, record(tmp_path / "c", wrong, graft=graft)) == set()
    assert notes(astray.open(tmp_path / "c")) == [GraftNote("h.1.mlp.up@parameters", str(reference), 4, 1, 0)]


def test_the_gradients_that_a_call_sends_are_grafted(reference: Path, tmp_path: Path) -> None:
    wrong, graft = Faults(backward=0), f"{reference}:h.0.doubling@gradients"
    found = different_sites(reference, record(tmp_path / "b", wrong), step=0)
    assert {"h.0.doubling", "h.0/matmul"} <= found
    assert "h.0.norm" not in found
    right = record(tmp_path / "c", wrong, graft=graft)
    assert different_sites(reference, right) == {"h.0.doubling/mul"}  # in its wrong backward
    assert notes(right)[0][2:] == (2, 2, 0)
    other = record(tmp_path / "d", wrong, graft=f"{reference}:h.1.doubling@gradients")
    assert "h.0.doubling" in different_sites(reference, other, step=0)


@pytest.mark.parametrize("level", ["module", FUNCTIONS])
def test_in_a_single_step_each_call_is_judged_alone(reference: Path, tmp_path: Path, level: str) -> None:
    wrong = Faults(activation=1, softmax=0, backward=1)
    run = record(tmp_path / "c", wrong, level=level, graft=str(reference))
    forward = different_sites(reference, run, phase="forward", role="output")
    backward = different_sites(reference, run, phase="backward", role="output", kind="module")
    assert different_sites(reference, run, role="input") == set()
    assert different_sites(reference, run, role="parameter") == set()
    # What a module computes between the modules in it is seen by the functions alone.
    assert forward == ({"h.1.mlp.act"} if level == "module" else {"h.0/mul", "h.1.mlp.act/mul"})
    assert backward == {"h.1.mlp.act", "h.1.doubling"} | ({"h.0", "h.1"} if level == "module" else set())


# -- programs ----------------------------------------------------------------------------------------------------------


def test_recomputed_forwards_get_the_same_grafts(reference: Path, tmp_path: Path) -> None:
    """The run has none of them; the weights behind the call get a gradient that is made of what is recomputed."""
    run = record(tmp_path / "c", Faults(activation=1, checkpointed=True), graft=f"{reference}:h.1.mlp.act")
    down = {"step": 0, "site": "h.1.mlp.down.weight"}
    assert different_sites(reference, run, **down) == set()
    assert notes(run)[0].tensors == 2  # once for each call, however often it is made again
    again = record(tmp_path / "d", Faults(checkpointed=True))
    every = record(tmp_path / "e", Faults(checkpointed=True), graft=str(tmp_path / "d"))
    assert prints(every) == prints(again)
    assert (notes(every)[0].differed, notes(every)[0].unreached, missed(every)) == (0, 0, {})


def test_under_autocast(tmp_path: Path, reference: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        right = record(tmp_path / "a")
        run = record(tmp_path / "c", Faults(activation=1), graft=f"{tmp_path / 'a'}:h.1.mlp.act")
        other = record(tmp_path / "d", graft=f"{reference}:h.1.mlp.up")
    assert different_sites(tmp_path / "a", run, step=0, phase="forward", kind="module") == set()
    assert missed(right) == {}
    assert missed(other) == {"the bits of h.1.mlp.up@outputs in the run: cast from float32 to bfloat16": 2}
    assert {row["dtype"] for row in rows(other, site="h.1.mlp.up", role="output", phase="forward")} == {"bfloat16"}


def test_each_micro_step_has_its_own(tmp_path: Path) -> None:
    record(tmp_path / "a", micro=3)
    run = record(tmp_path / "c", Faults(activation=0), micro=3, graft=f"{tmp_path / 'a'}:h.0.mlp.act")
    assert different_sites(tmp_path / "a", run, step=0, phase="forward", kind="module") == set()
    assert notes(run)[0].tensors == 6


class Off(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01


def wrongly(model: nn.Module, name: str) -> nn.Module:
    getattr(model, name).__class__ = Off
    return model


def record_one(path: Path, model: nn.Module, *args: Any, **settings: Any) -> Any:
    with astray.record(path, model, **{"keep": "tensors", **settings}) as recorder:
        result = model(*args)
        recorder.step()
    return result


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def test_one_of_several_calls(tmp_path: Path) -> None:
    record_one(tmp_path / "a", build(Shared), X)
    for number in range(3):
        graft = f"{tmp_path / 'a'}:layer#{number}"
        record_one(tmp_path / "c", wrongly(build(Shared), "layer"), X, graft=graft, overwrite=True)
        run = astray.open(tmp_path / "c")
        ours, others = (
            prints(one, site="layer", phase="forward", role="output") for one in (astray.open(tmp_path / "a"), run)
        )
        assert [key[3] for key in ours if ours[key] == others[key]] == [number]


def test_results_may_be_nested(tmp_path: Path) -> None:
    right = record_one(tmp_path / "a", build(Nested), X)
    model = build(Nested)
    model.give.layer.__class__ = Off
    assert not torch.equal(record_one(tmp_path / "b", model, X), right)
    assert torch.equal(record_one(tmp_path / "c", model, X, graft=f"{tmp_path / 'a'}:give"), right)
    assert torch.equal(record_one(tmp_path / "d", model, X, graft=f"{tmp_path / 'a'}:take@inputs"), right)
    assert missed(astray.open(tmp_path / "c")) == missed(astray.open(tmp_path / "d")) == {}


@pytest.mark.parametrize("graft", ["first", "act", "act@inputs", "<root>/relu_", "second@inputs", "<root>/setitem"])
def test_what_is_written_in_place_is_written_in_the_programs_tensors(tmp_path: Path, graft: str) -> None:
    """`act` writes into what it is given, and the program goes on with that."""
    right = record_one(tmp_path / "a", build(InPlace), X, level=FUNCTIONS)
    if graft == "<root>/relu_":
        graft = "act/relu"  # nn.ReLU's own call
    model = wrongly(build(InPlace), "first")
    result = record_one(tmp_path / "c", model, X, level=FUNCTIONS, graft=f"{tmp_path / 'a'}:{graft}")
    assert torch.equal(result, right)
    result.sum().backward()
    assert model.first.weight.grad is not None  # type: ignore[union-attr]


class Adding(nn.Module):
    """Writes into what it is given, and returns something else."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x.sum()


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.adding = nn.Linear(6, 6), Adding()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.adding(y) + y  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", ["module", FUNCTIONS, "op"])
def test_what_a_call_writes_into_its_inputs_reaches_the_program(tmp_path: Path, level: str) -> None:
    right = record_one(tmp_path / "a", build(Around), X, level=level)
    site = {"module": "adding", FUNCTIONS: "adding/add_", "op": "adding/aten.add_"}[level]
    graft = f"{tmp_path / 'a'}:{site}@inputs"
    result = record_one(tmp_path / "c", wrongly(build(Around), "first"), X, level=level, graft=graft)
    if level == "module":
        assert torch.equal(result, right)
    else:  # the sum is not grafted, and sees what was written
        assert torch.equal(result, right)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(tmp_path: Path, mode: Callable[[], Any]) -> None:
    record_one(tmp_path / "a", build(Shared), X)
    with mode():
        model = wrongly(build(Shared), "layer")
        grafts = [f"{tmp_path / 'a'}:layer@inputs,outputs", str(tmp_path / "a")]
        right = record_one(tmp_path / "c", model, X, graft=grafts, level=FUNCTIONS)
    assert torch.equal(right, build(Shared)(X))
    assert not right.requires_grad
    assert missed(astray.open(tmp_path / "c")).keys() <= {"the graft of every call: no such call was made and seen"}


class Three(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.attend = Attend()
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        q, k = x * 2, x * 3
        return self.attend(q, q if self.wrong else k, q)  # type: ignore[no-any-return]


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert v is q
        return q * k + v


def test_one_tensor_in_several_places_is_replaced_in_each(tmp_path: Path) -> None:
    right = record_one(tmp_path / "a", Three(wrong=False), X)
    model = Three(wrong=True)
    assert torch.equal(record_one(tmp_path / "c", model, X, graft=f"{tmp_path / 'a'}:attend@inputs"), right)


def test_integers_and_flags(tmp_path: Path) -> None:
    class Choice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.argmax(-1), x > self.limit

        limit = 0.0

    class Chooser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.choice = Choice()

        def forward(self, x: Tensor) -> Tensor:
            index, mask = self.choice(x)
            return index + mask.sum()

    right = record_one(tmp_path / "a", Chooser(), X)
    model = Chooser()
    model.choice.limit = 0.5
    assert not torch.equal(model(X), right)
    assert torch.equal(record_one(tmp_path / "c", model, X, graft=f"{tmp_path / 'a'}:choice"), right)


# -- what cannot be grafted --------------------------------------------------------------------------------------------


def test_shapes_that_differ_are_left_alone_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record_one(tmp_path / "a", build(Shared), X)
    with caplog.at_level(logging.WARNING, "astray"):
        result = record_one(tmp_path / "c", build(Shared), X[:3], graft=f"{tmp_path / 'a'}:layer")
    assert torch.equal(result, build(Shared)(X[:3]))
    why = "its shape is [3, 6], and that in the run [5, 6]"
    assert missed(astray.open(tmp_path / "c")) == {f"the graft of layer@outputs: {why}": 3}
    assert f"nothing was grafted from {tmp_path / 'a'}, layer@outputs: {why}." in caplog.text


def test_a_graft_that_never_applies_says_so(reference: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    model = Net(NONE)
    with (
        caplog.at_level(logging.WARNING, "astray"),
        astray.record(tmp_path / "c", model, graft=f"{reference}:head") as rec,
    ):
        model.embed(torch.arange(3))
        rec.step()
    assert "nothing was grafted from" in caplog.text
    assert "no such call was made and seen." in caplog.text
    run = astray.open(tmp_path / "c")
    assert notes(run) == [GraftNote("head@outputs", str(reference), 0, 0, 1)]
    assert missed(run) == {"the graft of head@outputs: no such call was made and seen": 1}


@pytest.mark.parametrize(
    ("graft", "says"),
    [
        ("h.1.mpl", r"has no site h\.1\.mpl to graft from\. Did you mean 'h\.1\.mlp'\?"),
        ("h.1.mlp#7", r"has no call 7 of h\.1\.mlp\. Calls are counted from 0"),
        ("h.1.mlp.act@parameters", r"has no parameters of h\.1\.mlp\.act to graft"),
        ("h.0/softmax", r"h\.0/softmax is seen at level function, and .* level module\. .*--level module,function"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_runs(
    reference: Path, tmp_path: Path, graft: str, says: str
) -> None:
    model = Net(NONE)
    with pytest.raises(RecordError, match=says), astray.record(tmp_path / "c", model, graft=f"{reference}:{graft}"):
        pass
    assert hooks_of(model) == 0
    assert not (tmp_path / "c").exists()


def test_a_run_without_values_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "a", keep="stats")
    with pytest.raises(RecordError, match=r"keeps no values of head@outputs.*keep='tensors'"):
        record(tmp_path / "c", graft=f"{tmp_path / 'a'}:head")
    with pytest.raises(RunError, match="does not exist"):
        record(tmp_path / "c", graft=f"{tmp_path / 'nowhere'}:head")
    with pytest.raises(RecordError, match="cannot be grafted into itself"):
        record(tmp_path / "a", graft=f"{tmp_path / 'a'}:head", overwrite=True)


def test_a_part_of_the_values_is_not_enough(tmp_path: Path) -> None:
    record(tmp_path / "a", slice="0")
    run = record(tmp_path / "c", graft=f"{tmp_path / 'a'}:head")
    assert missed(run) == {
        "the graft of head@outputs: a slice alone was kept of a tensor: record with keep=tensors and without slice": 2
    }


def test_paddle_is_refused(tmp_path: Path) -> None:
    adapter: Any = SimpleNamespace(framework="paddle")
    with pytest.raises(RecordError, match="graft= works with PyTorch so far, and this program is of paddle"):
        Recorder.discovering(tmp_path / "c", adapter, graft="runs/a:head")


def test_each_rank_takes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = build(Shared)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        record_one(tmp_path / "a", model, X * (rank + 1))
    right = model(X * 2)
    result = record_one(tmp_path / "c", wrongly(model, "layer"), X, ranks="1", graft=f"{tmp_path / 'a'}:layer")
    assert torch.equal(result, right)
    with pytest.raises(RecordError, match=r"has no rank 1 to graft from; it has 0\."):
        record(tmp_path / "d", graft=f"{reference}:head")


# -- what a recording sees ---------------------------------------------------------------------------------------------


def test_modules_are_grafted_though_they_are_not_recorded(reference: Path, tmp_path: Path) -> None:
    run = record(tmp_path / "c", Faults(activation=1), match="^head", graft=f"{reference}:h.1.mlp.act")
    assert different_sites(reference, run, step=0, phase="forward") == set()
    assert {row["site"] for row in rows(run, phase="forward")} == {"head", "head/linear"}
    functions = record(tmp_path / "d", Faults(softmax=0), match="^head", graft=f"{reference}:h.0/softmax")
    assert notes(functions)[0][2:] == (0, 0, 2)  # a function that is not recorded is not seen


def test_only_steps_that_are_recorded_are_grafted(reference: Path, tmp_path: Path) -> None:
    run = record(tmp_path / "c", steps="1", graft=f"{reference}:head")
    assert notes(run) == [GraftNote("head@outputs", str(reference), 1, 0, 0)]


def test_the_run_says_what_was_grafted(reference: Path, tmp_path: Path) -> None:
    record(tmp_path / "c", Faults(activation=1), graft=f"{reference}:h.1.mlp.act")
    comparison = astray.compare(reference, tmp_path / "c")
    assert str(comparison.setup[-1]) == (
        f"h.1.mlp.act@outputs is grafted from {reference} in the candidate, and not in the reference."
    )


# -- nothing of ours reaches the program -------------------------------------------------------------------------------


def test_a_failure_of_ours_is_noted(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Iterator[None]:
        raise RuntimeError("planted")

    monkeypatch.setattr(applied_graft.ReferenceValues, "value", fail)
    run = record(tmp_path / "c", graft=f"{reference}:head@inputs,outputs,gradients,parameters")
    assert prints(run) == prints(astray.open(reference))
    assert {text.rpartition(": ")[2] for text in missed(run)} >= {"planted"}


def test_a_graph_that_outlives_the_recording_is_the_programs_own(tmp_path: Path) -> None:
    model = build(Shared)
    with astray.record(tmp_path / "a", model, keep="tensors"):
        model(X).sum().backward()
    model.zero_grad()
    with astray.record(tmp_path / "c", model, graft=f"{tmp_path / 'a'}:layer@gradients,inputs"):
        result = model(X)
    result.sum().mul(2).backward()
    gradient = model.layer.weight.grad  # type: ignore[union-attr]
    model.zero_grad()
    model(X).sum().mul(2).backward()
    assert torch.equal(gradient, model.layer.weight.grad)  # type: ignore[union-attr, arg-type]
