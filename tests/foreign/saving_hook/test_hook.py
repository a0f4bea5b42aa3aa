"""A program written for the saving hook runs with the import changed and nothing else."""

from __future__ import annotations

import copy
import inspect
import logging
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
from torch.utils.checkpoint import checkpoint

import astray
from astray.compat.saving_hook import register_hook, register_saving_hook, remove_saving_hook
from astray.errors import RecordError
from astray.foreign.saving_hook.files import FileName, FolderName, parse
from astray.store.convert import convert
from integration.distributed.launching import torchrun
from small_models import MODELS, build, same_bits, train

RANKS = Path(__file__).parent / "ranks.py"


class ColumnSequenceParallelLinear(nn.Linear):
    pass


class RowSequenceParallelLinear(nn.Linear):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up_proj = ColumnSequenceParallelLinear(6, 8)
        self.down_proj = RowSequenceParallelLinear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))


class Llama(nn.Module):
    """Two blocks, a head, and a parameter that belongs to no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Trainer:
    """Steps after every second micro step; keeps what each backward brought, taken from what has accumulated."""

    def __init__(self, model: nn.Module, micro_steps: int = 4, after_step: Callable[[], None] | None = None) -> None:
        self.model = model
        self.after_step = after_step
        self.micro_steps = micro_steps
        self.brought: list[dict[str, torch.Tensor]] = []

    def train(self) -> None:
        generator = torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for micro in range(self.micro_steps):
            before = {name: self._gradient(p) for name, p in self.model.named_parameters()}
            self.model(torch.randn(2, 6, generator=generator)).square().sum().backward()
            after = {name: self._gradient(p) for name, p in self.model.named_parameters()}
            self.brought.append({name: after[name] - before[name] for name in after})
            if micro % 2:
                optimizer.step()
                optimizer.zero_grad()
                if self.after_step is not None:
                    self.after_step()

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


@pytest.fixture
def model() -> Iterator[nn.Module]:
    one = build(Llama)
    yield one
    remove_saving_hook(one)


def files(path: Path, folder: FolderName, rank: int = 0) -> dict[FileName, np.ndarray[Any, Any]]:
    """What was saved, in order."""
    found = {}
    for file in (path / folder / f"rank_{rank}").iterdir():
        saved = parse(folder, file.name)
        assert saved is not None, file
        found[saved] = np.load(file)
    return dict(sorted(found.items()))


def hooks_of(model: nn.Module) -> list[Any]:
    modules = [hook for m in model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    return modules + [p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks]


def test_the_call_is_the_same() -> None:
    parameters = inspect.signature(register_saving_hook).parameters
    assert {name: one.default for name, one in parameters.items() if one.default is not one.empty} == {
        "path": "./tmp_tensors",
        "target_class_names": None,
        "max_saved_tensors": 50,
        "max_saved_grads": 100,
        "max_saved_tensors_per_step": None,
        "max_saved_grads_per_step": None,
    }
    assert next(iter(parameters)) == "model"
    assert register_hook is register_saving_hook


def test_the_example_of_the_document(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    registered = register_saving_hook(
        model,
        path="./tmp_tensors",
        target_class_names=["ColumnSequenceParallelLinear", "RowSequenceParallelLinear", "LayerNorm"],
        max_saved_tensors=100,
        max_saved_grads=200,
    )
    assert registered is model
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # a path is meant from where the hook was registered
    trainer = Trainer(registered)
    trainer.train()
    remove_saving_hook(model)
    kinds = {
        "norm": "LayerNorm", "up_proj": "ColumnSequenceParallelLinear", "down_proj": "RowSequenceParallelLinear",
    }  # fmt: skip
    layers = [(f"blocks.{block}.{name}", kind) for block in range(2) for name, kind in kinds.items()]
    tensors = files(tmp_path / "tmp_tensors", "tensors")
    assert list(tensors) == [
        FileName(6 * micro + at, site, kind, micro, "out")
        for micro in range(4)
        for at, (site, kind) in enumerate(layers)
    ]
    gradients = files(tmp_path / "tmp_tensors", "grads")
    names = {f"{site}.{name}" for site, _ in layers for name in ("weight", "bias")}
    assert [saved.idx for saved in gradients] == list(range(48))
    for micro in range(4):
        assert {saved.site for saved in gradients if saved.micro == micro} == names
    assert hooks_of(model) == []


def test_gradients_are_those_of_each_backward(model: nn.Module, tmp_path: Path) -> None:
    """The second micro step of each optimizer step adds to what is there; its file has what it brought."""
    register_saving_hook(model, tmp_path, max_saved_grads=-1)
    trainer = Trainer(model)
    trainer.train()
    remove_saving_hook(model)
    found = files(tmp_path, "grads")
    assert len(found) == 4 * 14  # all leaves; `scale` is of none
    for saved, values in found.items():
        brought = trainer.brought[saved.micro][saved.site].numpy()
        # What was brought is known from a difference of sums, which are rounded; the first of two is exact.
        np.testing.assert_allclose(
            values, brought, rtol=0 if saved.micro % 2 == 0 else 1e-4, atol=1e-6 * (saved.micro % 2)
        )
    one = {saved.site: values for saved, values in found.items() if saved.micro == 1}
    again = build(Llama)
    generator = torch.Generator().manual_seed(1)
    torch.randn(2, 6, generator=generator)
    again(torch.randn(2, 6, generator=generator)).square().sum().backward()
    for name, values in one.items():  # to the bit what this backward gives alone
        gradient = again.get_parameter(name).grad
        assert gradient is not None
        assert gradient.numpy().tobytes() == values.tobytes()


def test_without_classes_all_leaf_layers_are_saved(model: nn.Module, tmp_path: Path) -> None:
    assert register_saving_hook(model, tmp_path) is model
    Trainer(model, 1).train()
    remove_saving_hook(model)
    leaves = ["norm", "up_proj", "down_proj"]
    assert [saved.site for saved in files(tmp_path, "tensors")] == [
        *(f"blocks.{block}.{leaf}" for block in range(2) for leaf in leaves),
        "head",
    ]


@pytest.mark.parametrize(
    ("classes", "sites"),
    [
        ("Linear", ["head"]),  # and not the classes made of it
        (["Linear"], ["head"]),
        ("RowSequenceParallelLinear", ["blocks.0.down_proj", "blocks.1.down_proj"]),
        (["Linear", "Block"], ["head"]),  # a block is not a leaf
    ],
)
def test_classes_are_matched_exactly(model: nn.Module, tmp_path: Path, classes: Any, sites: list[str]) -> None:
    register_hook(model, tmp_path, classes)
    Trainer(model, 1).train()
    remove_saving_hook(model)
    assert [saved.site for saved in files(tmp_path, "tensors")] == sites
    of_parameters = {f"{site}.{name}" for site in sites for name in ("weight", "bias")}
    assert {saved.site for saved in files(tmp_path, "grads")} == of_parameters


def test_a_class_that_is_not_there_is_said(model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "astray"):
        assert register_saving_hook(model, tmp_path / "a", ["LayerNrom", "Conv2d"]) is model
    assert caplog.messages == [
        "No leaf layer of the Llama is of the class 'LayerNrom'. Did you mean 'LayerNorm'?",
        "No leaf layer of the Llama is of the class 'Conv2d'. Its leaf layers are: LayerNorm (2), "
        "ColumnSequenceParallelLinear (2), RowSequenceParallelLinear (2), Linear (1).",
    ]
    assert hooks_of(model) == []


def test_limits_end_the_recording(model: nn.Module, tmp_path: Path) -> None:
    register_saving_hook(model, tmp_path, max_saved_tensors=9, max_saved_grads=16)
    for _ in range(500):  # the recorder's thread writes them in its own time
        Trainer(model, 4).train()
        if not hooks_of(model):
            break
    assert hooks_of(model) == []
    tensors, gradients = files(tmp_path, "tensors"), files(tmp_path, "grads")
    assert [(saved.idx, saved.micro) for saved in tensors] == [(at, at // 7) for at in range(9)]
    assert [(saved.idx, saved.micro) for saved in gradients] == [(at, at // 14) for at in range(16)]
    register_saving_hook(model, tmp_path / "again")  # and another can begin


def test_defaults_are_fifty_and_a_hundred(model: nn.Module, tmp_path: Path) -> None:
    register_saving_hook(model, tmp_path)
    Trainer(model, 8).train()
    remove_saving_hook(model)
    assert (len(files(tmp_path, "tensors")), len(files(tmp_path, "grads"))) == (50, 100)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_not_above_zero_is_none(model: nn.Module, tmp_path: Path, limit: int) -> None:
    register_saving_hook(model, tmp_path, None, limit, limit)
    Trainer(model, 8).train()
    remove_saving_hook(model)
    assert (len(files(tmp_path, "tensors")), len(files(tmp_path, "grads"))) == (7 * 8, 14 * 8)


@pytest.mark.parametrize(
    ("limits", "tensors", "gradients"),
    [
        ({"max_saved_tensors_per_step": 2, "max_saved_grads_per_step": 3}, 2 * 8, 3 * 8),
        ({"max_saved_tensors_per_step": 7}, 7 * 8, 100),
        ({"max_saved_tensors_per_step": 7, "max_saved_tensors": 50}, 50, 100),
        ({"max_saved_tensors_per_step": 0, "max_saved_grads_per_step": -1}, 7 * 8, 14 * 8),
    ],
)
def test_limits_of_each_micro_step(
    model: nn.Module, tmp_path: Path, limits: dict[str, int], tensors: int, gradients: int
) -> None:
    register_saving_hook(model, tmp_path, **limits)  # type: ignore[arg-type]
    Trainer(model, 8).train()
    remove_saving_hook(model)
    assert (len(files(tmp_path, "tensors")), len(files(tmp_path, "grads"))) == (tensors, gradients)


@pytest.mark.parametrize("kind", MODELS)
def test_no_bit_of_the_training_changes(kind: type[nn.Module], tmp_path: Path) -> None:
    bare = train(build(kind), steps=3)
    watched = build(kind)
    saved = train(register_saving_hook(watched, tmp_path, max_saved_tensors=7, max_saved_grads=-1), steps=3)
    remove_saving_hook(watched)
    assert same_bits(bare, saved)
    assert hooks_of(watched) == []


def test_tuples_are_taken_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LSTM(3, 2))
    x = torch.randn(5, 4)
    y, (h, c) = model(x)
    register_saving_hook(model, tmp_path)
    model(x)
    remove_saving_hook(model)
    found = files(tmp_path, "tensors")
    assert [(saved.site, saved.path) for saved in found] == [
        ("0", "out"), ("1", "out.0"), ("1", "out.1.0"), ("1", "out.1.1"),
    ]  # fmt: skip
    for values, expected in zip(list(found.values())[1:], (y, h, c), strict=True):
        assert values.tobytes() == expected.detach().numpy().tobytes()


def test_a_parametrized_layer_is_one_layer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    register_saving_hook(model, tmp_path, "Linear")
    model(torch.ones(1, 2)).sum().backward()
    remove_saving_hook(model)
    assert [(saved.site, saved.type) for saved in files(tmp_path, "tensors")] == [("0", "Linear"), ("1", "Linear")]
    assert {saved.site for saved in files(tmp_path, "grads")} == {
        "0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1", "1.weight", "1.bias",
    }  # fmt: skip


def test_a_parameter_that_another_layer_has_too_is_saved_once(tmp_path: Path) -> None:
    """It is called after the first layer that has it, whether or not that is of a class that was asked for."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))  # type: ignore[no-any-return]

    model = build(Tied)
    register_saving_hook(model, tmp_path, "Linear")
    model(torch.tensor([1, 2])).sum().backward()
    remove_saving_hook(model)
    assert {saved.site for saved in files(tmp_path, "tensors")} == {"head"}
    (values,) = files(tmp_path, "grads").values()
    assert model.embedding.weight.grad is not None
    assert values.tobytes() == model.embedding.weight.grad.numpy().tobytes()


def test_dicts_and_wrappers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Giving(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"k": [x * 2], "y": x + 1}

    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2), Giving()))
    register_saving_hook(model, tmp_path)
    model(torch.ones(1, 2))
    with caplog.at_level(logging.WARNING, "astray"):
        remove_saving_hook(model)
    assert [(saved.site, saved.path) for saved in files(tmp_path, "tensors")] == [
        ("0", "out"), ("1", "out.k.0"), ("1", "out.y"),
    ]  # fmt: skip
    assert caplog.messages == []


def test_a_model_that_is_a_leaf_itself(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    register_saving_hook(model, tmp_path)
    model(torch.ones(2, 4)).sum().backward()
    remove_saving_hook(model)
    assert {saved.site for saved in files(tmp_path, "tensors")} == {"<root>"}
    assert {saved.site for saved in files(tmp_path, "grads")} == {"weight", "bias"}
    run = astray.open(tmp_path)
    assert run.tensor(astray.Key(0, 0, "<root>", 0, "forward", "output", "out")).shape == (2, 3)


def test_bfloat16_is_stored_as_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    register_saving_hook(model, tmp_path)
    y = model(torch.randn(2, 4, dtype=torch.bfloat16))
    y.sum().backward()
    remove_saving_hook(model)
    (values,) = files(tmp_path, "tensors").values()
    assert values.dtype == np.float32
    assert same_bits(torch.from_numpy(values), y.detach().float())
    assert {one.dtype for one in files(tmp_path, "grads").values()} == {np.dtype(np.float32)}


def test_forwards_before_their_backwards(model: nn.Module, tmp_path: Path) -> None:
    """Gradients belong to the micro step whose forward they come from, in whatever order backwards run."""
    register_saving_hook(model, tmp_path, ["Linear"])
    losses = [model(torch.full((2, 6), float(micro))).sum() for micro in range(3)]
    for loss in reversed(losses):
        loss.backward()
    remove_saving_hook(model)
    gradients = files(tmp_path, "grads")
    assert [saved.micro for saved in gradients if saved.site == "head.weight"] == [2, 1, 0]


def test_what_checkpointing_computes_again_is_saved_once(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = build(Checkpointed)
    register_saving_hook(model, tmp_path, max_saved_tensors=2)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    remove_saving_hook(model)
    assert [(saved.idx, saved.micro) for saved in files(tmp_path, "tensors")] == [(0, 0), (1, 1)]
    assert len(files(tmp_path, "grads")) == 4


def test_it_compares_with_a_recording_of_gradient_accumulation(model: nn.Module, tmp_path: Path) -> None:
    register_saving_hook(model, tmp_path / "dump")
    other = copy.deepcopy(model)  # which takes nothing of the hooks along
    assert not [hook for hook in hooks_of(other) if type(hook).__module__.startswith("astray")]
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 6, generator=generator) for _ in range(3)]
    for batch in batches:
        model(batch).sum().backward()
    remove_saving_hook(model)
    with astray.record(tmp_path / "native", other, keep="tensors"):
        for batch in batches:
            other(batch).sum().backward()
    comparison = astray.compare(tmp_path / "dump", tmp_path / "native")
    verdicts = comparison.pairs["verdict"].tolist()
    assert verdicts.count("identical") == 3 * (7 + 14)
    assert comparison.first is None


def test_it_compares_with_a_recording_of_many_steps(model: nn.Module, tmp_path: Path) -> None:
    """The dump has no steps; a run that is written in its format has none either."""
    register_saving_hook(model, tmp_path / "dump", "Linear")
    other = build(Llama)
    Trainer(model).train()
    remove_saving_hook(model)
    with astray.record(tmp_path / "native", other, keep="tensors", classes="Linear") as recorder:
        Trainer(other, after_step=recorder.step).train()
    native = astray.open(tmp_path / "native")
    assert native.steps == [0, 1]
    convert(native, tmp_path / "converted", "saving_hook")
    comparison = astray.compare(tmp_path / "dump", tmp_path / "converted")
    assert comparison.pairs["verdict"].tolist() == ["identical"] * 4 * 3


def test_what_was_not_seen_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Opaque:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensors = [tensor + number for number in range(300)]  # more than are taken out of one object

    class Hiding(nn.Module):
        def forward(self, x: torch.Tensor) -> Opaque:
            return Opaque(x)

    model = nn.Sequential(nn.Linear(2, 2), Hiding())
    register_saving_hook(model, tmp_path)
    model(torch.ones(1, 2))
    with caplog.at_level(logging.WARNING, "astray"):
        remove_saving_hook(model)
    assert any(message.startswith(f"Not saved in {tmp_path}: tensors inside a") for message in caplog.messages)


def test_a_path_is_for_one_model(model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    register_saving_hook(model, tmp_path / "a")
    with pytest.raises(RecordError, match=r"The tensors of a Llama are being saved in .*a already\."):
        register_saving_hook(build(Llama), tmp_path / "a")
    Trainer(model, 2).train()
    remove_saving_hook(model)
    remove_saving_hook(model)  # which does no harm
    with caplog.at_level(logging.WARNING, "astray"):
        register_saving_hook(model, tmp_path / "a", "Linear")
    home = tmp_path / "a" / "tensors" / "rank_0"
    assert caplog.messages[0] == f"{home} held 14 files of an earlier recording, which are replaced."
    Trainer(model, 1).train()
    remove_saving_hook(model)
    assert len(list(home.iterdir())) == 1


def test_a_place_that_cannot_be_written_to_leaves_no_hook(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "grads").write_text("a file")
    with pytest.raises(astray.errors.RunError, match="cannot be recorded into"):
        register_saving_hook(model, tmp_path)
    assert hooks_of(model) == []


def test_what_is_no_model_is_said() -> None:
    for given in ({}, type("Layer", (), {"__module__": "paddle.nn.layer.layers"})()):
        what = type(given).__name__
        with pytest.raises(
            RecordError, match=rf"^A {what} was given, which cannot be recorded\. Pass a paddle\.nn\.Layer"
        ):
            register_saving_hook(given)


PROGRAM = """
import sys, torch
from torch import nn
from astray.compat.saving_hook import register_saving_hook
model = register_saving_hook(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), sys.argv[1], None, -1, -1)
for _ in range(int(sys.argv[2])):
    model(torch.ones(64, 64)).sum().backward()
    print("going", flush=True)
"""


def test_the_end_of_the_program_ends_the_recording(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path, "3"], check=True, capture_output=True, timeout=120)
    assert (len(files(tmp_path, "tensors")), len(files(tmp_path, "grads"))) == (6, 12)


@pytest.mark.slow
def test_a_kill_leaves_every_file_whole(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path, "1000000"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while sum(1 for _ in tmp_path.rglob("*.npy")) < 30 and process.stdout.readline():
            pass
        process.send_signal(signal.SIGKILL)
    for folder in ("tensors", "grads"):
        whole = [file for file in (tmp_path / folder / "rank_0").iterdir() if not file.name.startswith(".")]
        for file in whole:
            assert np.load(file).size in (64 * 64, 64)
    run = astray.open(tmp_path)
    assert len(run.ranks[0].tensors) >= 30
    assert [problem for problem in run.problems if "not finished" not in problem] == []


@pytest.mark.slow
def test_two_ranks_have_their_folders(tmp_path: Path) -> None:
    torchrun(RANKS, tmp_path / "dump")
    run = astray.open(tmp_path / "dump")
    assert sorted(run.ranks) == [0, 1]
    assert run.problems == []
    for rank in (0, 1):
        assert len(files(tmp_path / "dump", "tensors", rank)) == 4
        assert len(files(tmp_path / "dump", "grads", rank)) == 8
    key = astray.Key(0, 0, "0", 0, "forward", "output", "out")
    assert not np.array_equal(run.tensor(key), run.tensor(key._replace(rank=1)))  # each had its own batch
