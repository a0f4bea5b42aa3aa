"""Programs that know nothing of astray: when their steps end, and that nothing stays on torch afterwards."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import astray
from astray.capture.adapters import discovering_adapter
from recorded_rows import rows


@pytest.fixture(autouse=True)
def torch_stays_as_it_is() -> Iterator[None]:
    from torch.nn.modules.module import _global_forward_pre_hooks
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    hooks = _global_forward_pre_hooks, _global_optimizer_post_hooks, _global_optimizer_pre_hooks
    before, step = tuple(map(len, hooks)), GradScaler.step
    yield
    assert tuple(map(len, hooks)) == before
    assert GradScaler.step is step


def discovered(path: Path, **settings: Any) -> astray.Recorder:
    return astray.Recorder.discovering(path, discovering_adapter("torch"), **settings)


def forwards(path: Path, site: str = "<root>") -> list[tuple[int, int]]:
    """Step and micro step of each forward of the model."""
    return [(row["step"], row["micro"]) for row in rows(astray.open(path), site=site, phase="forward", role="output")]


def model_and_loss(x: float = 1.0) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 2)
    return model, lambda x=x: model(torch.full((1, 2), x)).sum()


def test_a_step_that_a_scaler_skips_ends_a_step_too(tmp_path: Path) -> None:
    model, loss = model_and_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with discovered(tmp_path / "run"):
        for x in (torch.inf, 1.0, torch.inf, torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(loss(x)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert forwards(tmp_path / "run") == [(step, 0) for step in range(5)]
    assert scaler.get_scale() == 128.0  # three were skipped


def test_scalers_stay_what_they_are(tmp_path: Path) -> None:
    class Mine(torch.amp.GradScaler):
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return super().step(optimizer, *args, **kwargs)

    model, loss = model_and_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = Mine("cpu", init_scale=2.0)
    plain = torch.amp.GradScaler("cpu", init_scale=64.0)
    with discovered(tmp_path / "run"):
        for x in (1.0, torch.inf):
            optimizer.zero_grad()
            scaler.scale(loss(x)).backward()
            assert scaler.step(optimizer) is None
            scaler.update()
        copied = pickle.loads(pickle.dumps(plain))
        bound = pickle.loads(pickle.dumps(plain.step))
        assert torch.amp.GradScaler.step.__name__ == "step"
    assert copied.state_dict() == plain.state_dict()
    assert type(bound.__self__) is torch.amp.GradScaler
    assert forwards(tmp_path / "run") == [(0, 0), (1, 0)]
    assert "step" not in vars(scaler)


def test_a_scaler_that_is_off_or_whose_optimizer_unscales_by_itself(tmp_path: Path) -> None:
    model, loss = model_and_loss()
    for number, (enabled, fused) in enumerate([(False, False), (True, True)]):
        optimizer = torch.optim.Adam(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        with discovered(tmp_path / f"run{number}"):
            for x in (1.0, torch.inf, 1.0):
                optimizer.zero_grad()
                scaler.scale(loss(x)).backward()
                scaler.step(optimizer)
                scaler.update()
        assert forwards(tmp_path / f"run{number}") == [(0, 0), (1, 0), (2, 0)]


def test_a_wrapper_around_the_optimizer_as_accelerate_has_it(tmp_path: Path) -> None:
    class Accelerated(torch.optim.Optimizer):
        """Never calls the constructor of its class, delegates all attributes, and notices skipped steps."""

        def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
            self.optimizer = optimizer
            self.scaler = scaler
            self.stepped = 0

        def step(self, closure: Any = None) -> None:
            step = self.optimizer.step

            def counting(*args: Any, **kwargs: Any) -> Any:
                self.stepped += 1
                return step(*args, **kwargs)

            self.optimizer.step = counting
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.step = step

    model, loss = model_and_loss()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = Accelerated(torch.optim.AdamW(model.parameters()), scaler)
    with discovered(tmp_path / "run"):
        for x in (torch.inf, 1.0, 1.0):
            optimizer.optimizer.zero_grad()
            scaler.scale(loss(x)).backward()
            optimizer.step()
    assert optimizer.stepped == 2
    assert forwards(tmp_path / "run") == [(0, 0), (1, 0), (2, 0)]


def test_a_scaler_given_the_wrapper_itself(tmp_path: Path) -> None:
    class Wrapped:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

        def step(self) -> None:
            self.optimizer.step()

    model, loss = model_and_loss()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wrapped = Wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    with discovered(tmp_path / "run"):
        for x in (torch.inf, 1.0, torch.inf, 1.0):
            wrapped.optimizer.zero_grad()
            scaler.scale(loss(x)).backward()
            scaler.step(wrapped)
            scaler.update()
    assert forwards(tmp_path / "run") == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_somebody_else_covers_the_same_function_and_takes_theirs_off_later(tmp_path: Path) -> None:
    model, loss = model_and_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    original, calls = GradScaler.step, []
    with discovered(tmp_path / "run"):
        ours = GradScaler.step

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return ours(self, *args, **kwargs)

        GradScaler.step = theirs
    try:
        scaler.scale(loss(torch.inf)).backward()
        scaler.step(optimizer)  # through theirs and ours, which does nothing any more
        assert len(calls) == 1
    finally:
        GradScaler.step = original


def test_several_optimizers_the_first_that_steps_sets_the_pace(tmp_path: Path) -> None:
    model, loss = model_and_loss()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with discovered(tmp_path / "run"):
        for _ in range(2):
            loss().backward()
            second.step()
            loss().backward()
            first.step()
    assert forwards(tmp_path / "run") == [(0, 0), (1, 0), (1, 1), (2, 0)]


def test_the_next_optimizer_leads_when_the_first_is_gone(tmp_path: Path) -> None:
    model, loss = model_and_loss()
    with discovered(tmp_path / "run"):
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                loss().backward()
                optimizer.step()
            del optimizer
    assert forwards(tmp_path / "run") == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_accumulated_gradients_are_micro_steps_of_one_step(tmp_path: Path) -> None:
    model, loss = model_and_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with discovered(tmp_path / "run"):
        for _ in range(2):
            for _ in range(3):
                loss().backward()
            optimizer.step()
    assert forwards(tmp_path / "run") == [(step, micro) for step in (0, 1) for micro in (0, 1, 2)]


def test_the_forwards_of_a_closure_belong_to_its_step(tmp_path: Path) -> None:
    model, _ = model_and_loss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(1, 2)).square().sum()
        value.backward()
        return value

    with discovered(tmp_path / "run"):
        for _ in range(2):
            optimizer.step(closure)
    assert forwards(tmp_path / "run") == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_step_that_calls_its_parents_is_one_step(tmp_path: Path) -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model, loss = model_and_loss()
    torch.optim.SGD(model.parameters(), lr=0.1)  # from here on the parent's step has hooks as well
    optimizer = Mine(model.parameters(), lr=0.1)
    with discovered(tmp_path / "run"):
        for _ in range(2):
            loss().backward()
            optimizer.step()
    assert forwards(tmp_path / "run") == [(0, 0), (1, 0)]


def test_a_step_that_raises_ends_nothing(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ZeroDivisionError
            return super().step(closure)

    model, loss = model_and_loss()
    optimizer = Failing(model.parameters(), lr=0.1)
    with discovered(tmp_path / "run"):
        loss().backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        optimizer.fails = False
        for _ in range(2):
            loss().backward()
            optimizer.step()
    assert forwards(tmp_path / "run") == [(0, 0), (0, 1), (1, 0)]


def test_without_an_optimizer_everything_is_one_step_of_micro_steps(tmp_path: Path) -> None:
    _, loss = model_and_loss()
    with discovered(tmp_path / "run"), torch.no_grad():
        for _ in range(3):
            loss()
    assert forwards(tmp_path / "run") == [(0, 0), (0, 1), (0, 2)]


def test_the_update_is_recorded_before_the_step_ends(tmp_path: Path) -> None:
    model, loss = model_and_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with discovered(tmp_path / "run", optimizer="update"):
        for _ in range(2):
            loss().backward()
            optimizer.step()
    found = rows(astray.open(tmp_path / "run"), phase="update", path="update")
    assert [(row["step"], row["site"]) for row in found] == [(0, "weight"), (0, "bias"), (1, "weight"), (1, "bias")]


class Stepping(nn.Module):
    """A model as Lightning has them: a trainer calls its steps, and never the model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.net = nn.ModuleDict({"head": nn.Linear(6, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net["head"](self.encoder(x))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self._shared(batch)

    def validation_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self(batch).sum()

    def _shared(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net["head"](self.encoder(batch)).sum()


def sites(path: Path) -> set[str]:
    return {row["site"] for row in rows(astray.open(path), phase="forward")}


def test_modules_that_a_step_calls_are_named_as_parts_of_its_model(tmp_path: Path) -> None:
    model, batch = Stepping(), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with discovered(tmp_path / "steps", optimizer="weight"):
        for number in range(2):
            model.training_step(batch, number).backward()
            optimizer.step()
        model.validation_step(batch, 0)
    parts = {"encoder", "encoder.0", "encoder.1", "net.head"}
    assert sites(tmp_path / "steps") == {*parts, "<root>"}  # the last from the step that calls the model itself
    assert forwards(tmp_path / "steps", "encoder") == [(0, 0), (1, 0), (2, 0)]
    updated = {row["site"] for row in rows(astray.open(tmp_path / "steps"), phase="update")}
    assert updated == {"encoder.0.weight", "encoder.0.bias", "net.head.weight", "net.head.bias"}
    with astray.record(tmp_path / "told", model):
        model.training_step(batch, 0)
    assert sites(tmp_path / "told") == parts


def test_a_module_from_elsewhere_keeps_its_own_name_in_a_step(tmp_path: Path) -> None:
    other = nn.Linear(2, 2)

    class Borrowing(Stepping):
        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return other(self.net["head"](self.encoder(batch))).sum()

    with discovered(tmp_path / "run"):
        Borrowing().training_step(torch.ones(2, 4), 0)
    assert sites(tmp_path / "run") == {"encoder", "encoder.0", "encoder.1", "net.head", "Linear"}


def test_two_models_with_parts_of_one_name(tmp_path: Path) -> None:
    one, other = Stepping(), Stepping()
    with discovered(tmp_path / "run"):
        one.training_step(torch.ones(2, 4), 0)
        other.training_step(torch.ones(2, 4), 0)
    assert {"encoder", "encoder#2", "encoder#2.0", "net.head#2"} <= sites(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_training_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    with discovered(tmp_path / "run"):
        trainer.fit(Lit(), torch.utils.data.DataLoader(data, 4))
    assert sites(tmp_path / "run") == {"net", "net.0", "net.1", "net.2"}
    assert forwards(tmp_path / "run", "net.2") == [(0, 0), (1, 0)]
