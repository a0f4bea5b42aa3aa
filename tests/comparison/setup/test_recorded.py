"""One small program, recorded twice with one thing changed: that is the one thing said to be set differently."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.comparison.setup.differences import setup_differences
from astray.comparison.setup.setup_difference import SetupDifference

BOTH = ["module", "function"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.1)
        self.act = nn.GELU()
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x + self.act(self.fc(x)) * self.scale))


def record(
    path: Path,
    *,
    level: Any = "module",
    seed: int = 0,
    prepare: Callable[[nn.Module], object] | None = None,
    change: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
    later: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    around: Callable[[], Any] = nullcontext,
    steps: int = 3,
    **numbers: Any,
) -> Path:
    """Records a few steps. `later` is called after the first of them."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
    if prepare is not None:
        prepare(model)
    stepping = optimizer(model.parameters(), **{"lr": 1e-3, **numbers})
    if change is not None:
        change(model, stepping)
    with astray.record(path, model, level=level) as rec:
        for step in range(steps):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(model[2].weight.dtype)
            with around():
                loss = model(x).float().square().sum()
            loss.backward()
            stepping.step()
            stepping.zero_grad()
            if step == 0 and later is not None:
                later(model, stepping)
            rec.step()
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "plain")


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "functions", level=BOTH)


def only(reference: Path, candidate: Path) -> SetupDifference:
    """The one difference there is."""
    found = astray.compare(reference, candidate).setup
    assert len(found) == 1, [str(one) for one in found]
    return found[0]


def test_the_same_program_twice_was_set_to_the_same(plain: Path, functions: Path, tmp_path: Path) -> None:
    assert astray.compare(plain, record(tmp_path / "again")).setup == ()
    assert astray.compare(functions, record(tmp_path / "functions", level=BOTH)).setup == ()
    assert astray.compare(plain, functions).setup == ()


def test_a_learning_rate(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "lr", lr=2e-3))
    assert (found.kind, found.subject, found.name) == ("optimizer", "optimizer AdamW, group 0", "lr")
    assert (found.reference, found.candidate, found.step) == (1e-3, 2e-3, None)
    assert found.expected_effect == "changes results"
    assert found.site == "0.fc.bias"
    assert found.count == 10
    assert found.sentence == "AdamW, group 0 steps with lr 0.001 in the reference and 0.002 in the candidate."


def test_betas(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "betas", betas=(0.9, 0.99)))
    assert (found.name, found.reference, found.candidate) == ("betas", [0.9, 0.999], [0.9, 0.99])


def test_a_weight_decay_that_changes_midway(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "decay", later=lambda _, o: o.param_groups[0].update(weight_decay=0.1)))
    assert (found.name, found.reference, found.candidate, found.step) == ("weight_decay", 0.01, 0.1, 1)
    assert found.sentence.startswith("From step 1 on, AdamW, group 0 steps with weight_decay 0.01 in the reference")


def test_a_schedule_that_parts_later(tmp_path: Path) -> None:
    def scheduled(path: Path, factor: float) -> Path:
        def later(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.param_groups[0]["lr"] *= factor

        return record(path, later=later)

    found = only(scheduled(tmp_path / "a", 0.5), scheduled(tmp_path / "b", 0.25))
    assert (found.name, found.reference, found.candidate, found.step) == ("lr", 5e-4, 2.5e-4, 1)


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    left = record(tmp_path / "a", lr=torch.tensor(1e-3, dtype=torch.float64), foreach=False, capturable=False)
    right = record(tmp_path / "b", lr=torch.tensor(2e-3, dtype=torch.float64), foreach=False, capturable=False)
    found = only(left, right)
    assert (found.name, found.reference, found.candidate) == ("lr", 1e-3, 2e-3)


def test_another_optimizer(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "adam", optimizer=torch.optim.Adam, weight_decay=0.01))
    assert (found.kind, found.name, found.reference, found.candidate) == ("optimizer", "class", "AdamW", "Adam")
    assert found.sentence == "The optimizer is AdamW in the reference and Adam in the candidate."


def test_a_parameter_that_is_left_out(plain: Path, tmp_path: Path) -> None:
    def without_last(parameters: Iterator[nn.Parameter], **numbers: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(parameters)[:-1], **numbers)

    found = only(plain, record(tmp_path / "left", optimizer=without_last))
    assert (found.kind, found.name, found.site) == ("optimizer", "parameters", "2.bias")
    assert (found.reference, found.candidate) == ("AdamW, group 0", None)
    assert found.sentence == (
        "2.bias is optimized by AdamW, group 0 in the reference and not optimized in the candidate."
    )


def test_groups_are_compared_by_what_is_in_them(plain: Path, tmp_path: Path) -> None:
    def grouped(decay: float) -> Callable[..., torch.optim.Optimizer]:
        def make(parameters: Iterator[nn.Parameter], **numbers: Any) -> torch.optim.Optimizer:
            own = list(parameters)
            biases = [one for one in own if one.ndim == 1]
            weights = [one for one in own if one.ndim > 1]
            groups = [{"params": weights}, {"params": biases, "weight_decay": decay}]
            return torch.optim.AdamW(groups, **numbers)

        return make

    assert astray.compare(plain, record(tmp_path / "same", optimizer=grouped(0.01))).setup == ()
    found = only(plain, record(tmp_path / "none", optimizer=grouped(0.0)))
    assert (found.name, found.reference, found.candidate) == ("weight_decay", 0.01, 0.0)
    assert found.count == 7


def test_the_eps_of_one_norm(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "eps", change=lambda model, _: setattr(model[1].norm, "eps", 1e-3)))
    assert (found.kind, found.subject, found.site) == ("module", "module 1.norm (LayerNorm)", "1.norm")
    assert (found.name, found.reference, found.candidate) == ("eps", 1e-5, 1e-3)
    assert found.sentence == "1.norm (LayerNorm) has eps 1e-05 in the reference and 0.001 in the candidate."


def test_a_modules_eps_is_not_said_again_as_an_argument(functions: Path, tmp_path: Path) -> None:
    right = record(tmp_path / "eps", level=BOTH, change=lambda model, _: setattr(model[1].norm, "eps", 1e-3))
    assert only(functions, right).subject == "module 1.norm (LayerNorm)"


def test_the_same_change_in_every_layer_is_one_difference(plain: Path, tmp_path: Path) -> None:
    def drop_more(model: nn.Module, _: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2

    found = only(plain, record(tmp_path / "p", change=drop_more))
    assert (found.name, found.sites, found.count) == ("p", ("0.drop", "1.drop"), 2)
    assert found.subject == "2 modules (Dropout)"


def test_an_attribute_that_changes_midway(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "scale", later=lambda model, _: setattr(model[0], "scale", 0.25)))
    assert (found.name, found.reference, found.candidate, found.step) == ("scale", 0.5, 0.25, 1)


def test_a_module_in_evaluation_mode(functions: Path, tmp_path: Path) -> None:
    found = only(functions, record(tmp_path / "eval", level=BOTH, change=lambda model, _: model[1].drop.eval()))
    assert (found.name, found.site, found.expected_effect) == ("training", "1.drop", "changes results")
    assert found.sentence == (
        "1.drop (Dropout) is in training mode in the reference and in evaluation mode in the candidate."
    )


def test_the_training_mode_of_a_layer_that_has_none_changes_nothing(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "eval", change=lambda model, _: model[2].eval()))
    assert (found.name, found.expected_effect) == ("training", "none known")


def test_another_class(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "silu", prepare=lambda model: setattr(model[0], "act", nn.SiLU())))
    assert (found.name, found.site, found.reference, found.candidate) == ("class", "0.act", "GELU", "SiLU")
    assert found.sentence == "0.act is GELU in the reference and SiLU in the candidate."


def test_a_frozen_parameter(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "frozen", prepare=lambda model: model[0].fc.weight.requires_grad_(False)))
    assert found.sentence == "0.fc.weight is trained in the reference and frozen in the candidate."


def test_an_argument(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self, scale: float | None, dim: int) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self._scale, self._dim = scale, dim

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.scaled_dot_product_attention(x, x, x, scale=self._scale)
            return F.softmax(self.fc(y), self._dim)

    def attend(path: Path, scale: float | None, dim: int) -> Path:
        torch.manual_seed(0)
        model = Attention(scale, dim)
        with astray.record(path, model, level=BOTH) as rec:
            for _ in range(2):
                model(torch.ones(2, 3, 8)).sum().backward()
                rec.step()
        return path

    reference = attend(tmp_path / "a", 0.5, -1)
    found = only(reference, attend(tmp_path / "b", 0.25, -1))
    assert (found.kind, found.subject) == ("argument", "call <root>/scaled_dot_product_attention")
    assert (found.name, found.reference, found.candidate) == ("scale", 0.5, 0.25)
    found = only(reference, attend(tmp_path / "c", 0.5, 1))
    assert found.sentence == "<root>/softmax is called with dim -1 in the reference and 1 in the candidate."
    assert only(reference, attend(tmp_path / "d", None, -1)).candidate is None


def test_autocast(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "cast", around=lambda: torch.autocast("cpu", torch.bfloat16)))
    assert (found.kind, found.name, found.candidate) == ("precision", "autocast", "cpu bfloat16")
    assert (found.expected_effect, found.epsilon) == ("changes rounding", 2**-8)
    assert found.sentence == "Autocast is off in the reference and on (cpu bfloat16) in the candidate."


class Cast(nn.Module):
    """Runs what is in it under autocast, whatever is around it."""

    def __init__(self, inner: nn.Module, on: bool) -> None:
        super().__init__()
        self.inner, self._on = inner, on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._on):
            return self.inner(x)


def test_autocast_inside_of_the_model(tmp_path: Path) -> None:
    def cast(on: bool) -> Callable[[nn.Module], None]:
        def prepare(model: nn.Module) -> None:
            model[1] = Cast(model[1], on)

        return prepare

    found = only(record(tmp_path / "off", prepare=cast(False)), record(tmp_path / "on", prepare=cast(True)))
    assert found.name == "autocast"
    assert set(found.sites) == {"1.inner", "1.inner.fc", "1.inner.act", "1.inner.norm", "1.inner.drop"}


def test_a_cast_of_the_model(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "half", prepare=lambda model: model.bfloat16()))
    assert (found.kind, found.name, found.reference, found.candidate) == ("data type", "dtype", "float32", "bfloat16")
    assert (found.expected_effect, found.epsilon, found.count) == ("changes rounding", 2**-8, 10)
    assert found.sentence.startswith("10 parameters and buffers (0.fc.bias, 0.fc.weight, 0.norm.bias, …) are float32")


def test_the_precision_of_matrix_products(plain: Path, tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        found = only(plain, record(tmp_path / "high"))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (found.kind, found.subject, found.name) == ("precision", "torch", "float32_matmul_precision")
    assert (found.expected_effect, found.epsilon) == ("changes rounding", 2**-11)


def test_a_flag_that_is_set_midway(plain: Path, tmp_path: Path) -> None:
    try:
        run = record(tmp_path / "flag", later=lambda *_: torch.use_deterministic_algorithms(True))
    finally:
        torch.use_deterministic_algorithms(False)
    found = only(plain, run)
    assert (found.kind, found.name, found.step, found.candidate) == ("kernel", "deterministic_algorithms", 1, True)


def test_threads(plain: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        found = only(plain, record(tmp_path / "threads"))
    finally:
        torch.set_num_threads(before)
    assert (found.kind, found.name, found.expected_effect) == ("kernel", "threads", "changes rounding")


def test_a_seed(plain: Path, tmp_path: Path) -> None:
    found = only(plain, record(tmp_path / "seed", seed=1))
    assert found.sentence == "The seed of torch is 0 in the reference and 1 in the candidate."
    assert (found.kind, found.expected_effect) == ("seed", "changes results")


def test_an_environment_variable(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("SOME_TOKEN", "a secret")
    run = record(tmp_path / "environment")
    found = only(plain, run)
    assert found.sentence == "NVIDIA_TF32_OVERRIDE is not set in the reference and 0 in the candidate."
    assert (found.kind, found.reference, found.candidate) == ("environment", None, "0")
    assert "secret" not in (run / "rank0" / "setup.jsonl").read_text()


def test_another_attention_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def attend(path: Path, attention: str, **numbers: Any) -> Path:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, attn_implementation=attention, **numbers,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        with astray.record(path, model) as rec:
            tokens = torch.arange(16)[None]
            model(input_ids=tokens, labels=tokens).loss.backward()
            rec.step()
        return path

    reference = attend(tmp_path / "eager", "eager")
    assert astray.compare(reference, attend(tmp_path / "again", "eager")).setup == ()
    found = only(reference, attend(tmp_path / "sdpa", "sdpa"))
    assert (found.kind, found.name, found.site) == ("kernel", "_attn_implementation", "<root>")
    assert (found.reference, found.candidate, found.expected_effect) == ("eager", "sdpa", "changes rounding")
    found = only(reference, attend(tmp_path / "eps", "eager", rms_norm_eps=1e-4))
    assert (found.name, found.count) == ("variance_epsilon", 5)
    found = only(
        reference, attend(tmp_path / "rope", "eager", rope_parameters={"rope_type": "default", "rope_theta": 2.0})
    )
    assert (found.name, found.expected_effect) == ("rope_parameters.rope_theta", "changes results")


def test_several_things_at_once_and_those_first_that_change_results(plain: Path, tmp_path: Path) -> None:
    run = record(
        tmp_path / "several",
        lr=2e-3,
        change=lambda model, _: setattr(model[1].norm, "eps", 1e-3),
        prepare=lambda model: model.bfloat16(),
    )
    found = astray.compare(plain, run).setup
    assert [(one.kind, one.name) for one in found] == [("optimizer", "lr"), ("module", "eps"), ("data type", "dtype")]
    assert found == setup_differences(astray.open(plain), astray.open(run))


def test_only_what_is_asked_for_is_compared(plain: Path, tmp_path: Path) -> None:
    run = record(tmp_path / "b", change=lambda model, _: setattr(model[1].norm, "eps", 1e-3), later=_decay)
    assert {one.name for one in astray.compare(plain, run).setup} == {"eps", "weight_decay"}
    assert {one.name for one in astray.compare(plain, run, steps="0").setup} == {"eps"}
    assert {one.name for one in astray.compare(plain, run, sites=r"^0").setup} == {"weight_decay"}


def _decay(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1


def test_names_go_through_the_mapping(plain: Path, tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = Block(), Block(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(x)))

    torch.manual_seed(0)
    model = Named()
    model.second.norm.eps = 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with astray.record(tmp_path / "named", model) as rec:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        rec.step()
    names = tmp_path / "names.yaml"
    names.write_text("sites: {first: '0', second: '1', head: '2'}\ntypes: {Named: Sequential}\n")
    found = astray.compare(plain, tmp_path / "named", mapping=names).setup
    assert [(one.site, one.name) for one in found] == [("1.norm", "eps")]


@pytest.mark.slow
def test_a_run_of_a_script(tmp_path: Path) -> None:
    """The models are found as the program runs, and its seed is set after the recording has begun."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch\n"
        "torch.manual_seed(int(os.environ['SEED']))\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(float(os.environ['DROP'])))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(2):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )

    def run(name: str, seed: int, drop: float) -> Path:
        command = [sys.executable, "-m", "astray", "run", "-o", str(tmp_path / name), str(script)]
        environment = {**os.environ, "SEED": str(seed), "DROP": str(drop)}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        return tmp_path / name

    found = astray.compare(run("a", 3, 0.1), run("b", 4, 0.2)).setup
    assert [(one.name, one.reference, one.candidate) for one in found] == [("p", 0.1, 0.2), ("torch", 3, 4)]


def test_clipping(tmp_path: Path) -> None:
    """What Adam hardly shows in its weights is named as the cause all the same."""

    def train(path: Path, limit: float | None) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), nn.Linear(8, 4)).bfloat16().eval()
        stepping = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with astray.record(path, model) as rec:
            for _ in range(3):
                model(torch.randn(16, 8).bfloat16()).square().sum().backward()
                if limit is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), limit)
                stepping.step()
                stepping.zero_grad()
                rec.step()
        return path

    found = astray.compare(train(tmp_path / "a", 0.1), train(tmp_path / "b", None))
    told = "clipped to a norm of 0.1 in the reference and not clipped in the candidate."
    assert [str(one) for one in found.setup] == [f"The gradients of AdamW, group 0 are {told}"]
    assert found.first is not None
    assert found.first.phase == "forward"
    assert [one.name for one in found.first.settings] == ["clip_grad_norm"]


def test_a_gradient_that_one_run_writes_to(tmp_path: Path) -> None:
    """Adam makes nearly the same update of a gradient whatever its scale: that it was written to tells the rest."""

    def train(path: Path, factor: float | None) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), nn.Linear(8, 4)).bfloat16().eval()
        stepping = torch.optim.AdamW(model.parameters(), lr=0.05)
        with astray.record(path, model) as rec:
            for step in range(3):
                model(torch.randn(16, 8).bfloat16()).square().sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if step == 1 and factor is not None:
                    model[1].weight.grad[2].mul_(factor)
                stepping.step()
                stepping.zero_grad()
                rec.step()
        return path

    found = astray.compare(train(tmp_path / "a", None), train(tmp_path / "b", 4.0))
    told = "In step 1, the gradient of 1.weight is changed between backward and step in the candidate, not in the"
    assert [str(one) for one in found.setup] == [f"{told} reference."]
    assert found.first is not None
    assert (found.first.step, found.first.site, found.first.cause) == (2, "1", "parameter")
    assert [one.name for one in found.first.settings] == ["written_gradient"]
