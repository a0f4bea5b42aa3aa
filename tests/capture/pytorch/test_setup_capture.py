"""The recorded settings of a program: each is written once, and again when it has changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import astray
from astray.capture.pytorch import torch_flags as flags
from astray.capture.setup_log import CHANGES_TOO_OFTEN, NOT_PLAIN, SetupLog, environment, plain
from astray.records import Setup


class Asked(nn.Module):
    """Has all kinds of attributes that are recorded, and some that must not be."""

    __constants__ = ("factor", "missing")
    factor = 3

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.eps = 1e-6
        self.limit = float("inf")
        self.kind = torch.bfloat16
        self.sizes = (1, 2)
        self.activation = torch.nn.functional.gelu
        self.nothing = None
        self.long = "x" * 500
        self.table = {"a": 1}
        self.deep = ((1, 2), 3)
        self.tensor = torch.ones(2)
        self._private = 5
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))
        self.config = SimpleNamespace(theta=10_000.0, rope={"type": "default"}, _secret=1, _attn_implementation="eager")

    @property
    def asked(self) -> int:
        raise AssertionError("properties are the program's own")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale.float()


def rows_of(path: Path) -> list[Setup]:
    return astray.open(path).ranks[0].setup


def values_of(path: Path, subject: str, site: str = "") -> dict[str, Any]:
    return {
        name: value
        for row in rows_of(path)
        if (row.subject, row.site) == (subject, site)
        for name, value in row.values.items()
    }


def test_of_a_module_its_plain_attributes_its_class_and_its_tensors(tmp_path: Path) -> None:
    model = Asked()
    with astray.record(tmp_path / "a", model):
        pass  # at the start, though nothing is ever called
    assert values_of(tmp_path / "a", "module", "<root>") == {
        "class": "Asked",
        "training": True,
        "eps": 1e-6,
        "limit": "inf",
        "kind": "bfloat16",
        "sizes": [1, 2],
        "activation": "<gelu>",
        "nothing": None,
        "long": "x" * 99 + "…",
        "factor": 3,
        "scale.dtype": "float64",
        "device": "cpu",
    }
    assert values_of(tmp_path / "a", "module", "fc")["weight.requires_grad"] is True
    assert values_of(tmp_path / "a", "config", "<root>") == {
        "theta": 10_000.0,
        "rope.type": "default",
        "_attn_implementation": "eager",
    }


def test_each_fact_is_written_once_and_again_when_it_changes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with astray.record(tmp_path / "a", model) as rec:
        for step in range(6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 2:
                model[1].p = 0.25
                optimizer.param_groups[0]["lr"] = 0.05
            rec.step()
    later = [row for row in rows_of(tmp_path / "a") if row.step > 0 and row.subject != "version"]
    assert later == [
        Setup(3, "module", "1", {"p": 0.25}),
        Setup(3, "optimizer", "SGD/param_groups.0", {"lr": 0.05}),
    ]
    assert values_of(tmp_path / "a", "optimizer", "SGD/param_groups.0")["parameters"] == ["0.weight", "0.bias"]


def test_the_training_mode_is_that_of_the_calls_and_not_of_the_end_of_the_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with astray.record(tmp_path / "a", model) as rec:
        for _ in range(3):
            model.train()
            model(torch.ones(2, 4)).sum().backward()
            model.eval()
            rec.step()
    assert not [row for row in rows_of(tmp_path / "a") if row.step > 0 and row.subject == "module"]


def test_what_counts_its_calls_is_let_go_after_a_while(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with astray.record(tmp_path / "a", model, keep="fingerprint") as rec:
        for step in range(120):
            model.seen = step
            model(torch.ones(2, 4))
            rec.step()
    rows = [row for row in rows_of(tmp_path / "a") if row.subject == "module" and "seen" in row.values]
    assert len(rows) == 102
    assert rows[-1].values == {"seen": CHANGES_TOO_OFTEN}


def test_layers_that_come_later_are_told_when_they_come(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with astray.record(tmp_path / "a", model) as rec:
        model(torch.ones(2, 4))
        rec.step()
        model.append(nn.Dropout(0.3))
        model(torch.ones(2, 4))
        rec.step()
    (found,) = [row for row in rows_of(tmp_path / "a") if row.site == "1"]
    assert (found.step, found.values["class"], found.values["p"]) == (1, "Dropout", 0.3)


def test_autocast_is_told_where_it_changes(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with astray.record(tmp_path / "a", model) as rec:
        for on in (False, True, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                model(torch.ones(2, 4))
            rec.step()
    found = [(row.step, row.values["autocast"]) for row in rows_of(tmp_path / "a") if row.subject == "autocast"]
    assert found == [(0, "off"), (1, "cpu bfloat16"), (3, "off")]


def test_a_scaler_is_told_where_the_program_is_followed(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with astray.record(tmp_path / "a", model, guard="warn") as rec:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        rec.step()
    assert values_of(tmp_path / "a", "scaler")["init_scale"] == 128.0


def test_losses_gradients_and_random_numbers_are_those_of_the_bare_program(tmp_path: Path) -> None:
    def train(record: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        recorder = astray.Recorder(tmp_path / "a", model).start() if record else None
        found = []
        for _ in range(3):
            loss = model(torch.randn(4, 8)).square().sum()
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
            if recorder is not None:
                recorder.step()
        if recorder is not None:
            recorder.stop()
        assert not any(module._forward_pre_hooks for module in model.modules())
        return [*found, *model.state_dict().values(), torch.get_rng_state()]

    bare, recorded = train(False), train(True)
    assert all(torch.equal(one, other) for one, other in zip(bare, recorded, strict=True))


@pytest.mark.parametrize("broken", ["state", "autocast"])
def test_what_fails_is_noted_and_the_program_goes_on(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    recorder = astray.Recorder(tmp_path / "a", model).start()

    def fail() -> Any:
        raise ValueError("not today")

    monkeypatch.setattr(flags, broken, fail)
    model(torch.ones(2, 4))
    recorder.step()
    recorder.stop()
    run = astray.open(tmp_path / "a")
    assert len(run.ranks[0].tensors)
    assert run.ranks[0].end is not None
    assert ("what the program is set to", "ValueError: not today") in {
        (missed.what, missed.why) for missed in run.ranks[0].end.missed
    }


def test_the_native_hooks_and_those_in_python_tell_the_same(tmp_path: Path) -> None:
    script = (
        "import sys, torch, astray\n"
        "torch.manual_seed(0)\n"
        "class Cast(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        with torch.autocast('cpu', torch.bfloat16):\n"
        "            return self.inner(x).float()\n"
        "cast = Cast(4, 4)\n"
        "cast.inner = torch.nn.Linear(4, 4)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), cast)\n"
        "with astray.record(sys.argv[1], model) as rec:\n"
        "    for step in range(2):\n"
        "        model(torch.ones(2, 4)).sum().backward()\n"
        "        model[0].own = step\n"
        "        rec.step()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=True)
    assert Setup(0, "autocast", "1.inner", {"autocast": "cpu bfloat16"}) in rows_of(tmp_path / "run")


def test_reading_torchs_flags_starts_nothing_and_binds_nothing() -> None:
    script = (
        "import torch\n"
        "from astray.capture.pytorch import torch_flags as flags\n"
        "flags.settings(), flags.seeds(), flags.versions(), flags.devices(), flags.process(), flags.state()\n"
        "torch.set_num_interop_threads(3)\n"
        "torch.set_num_threads(1)\n"
        "assert not torch.cuda.is_initialized()\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "found = flags.settings()\n"
        "assert found['cuda.matmul.fp32_precision'] == 'tf32', found\n"
        "assert found['interop_threads'] == 3, found\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_only_variables_of_the_list_are_read() -> None:
    assert environment({"OMP_NUM_THREADS": "4", "API_KEY": "secret", "HOME": "/"}) == {"OMP_NUM_THREADS": "4"}


def test_plain_values_and_those_that_are_not() -> None:
    class Loud(int):
        def __int__(self) -> int:
            raise AssertionError("the program's own code")

        __str__ = __repr__ = __index__ = __int__  # type: ignore[assignment]

    assert plain(Loud(4)) == 4
    assert plain([1, "a", None, True]) == [1, "a", None, True]
    assert plain(float("nan")) == "nan"
    assert plain(torch.float16, (torch.dtype,)) == "float16"
    for value in ({}, object(), torch.ones(1), [[1]], list(range(17)), lambda: 0 if False else None):
        if not callable(value):
            assert plain(value) is NOT_PLAIN
    assert json.loads(json.dumps(plain(print))) == "<print>"


def test_one_and_true_are_not_the_same() -> None:
    written: list[Setup] = []
    log = SetupLog(written.append)
    for value in (1, 1, True, 1.0):
        log.note(0, "module", "fc", {"flag": value})
    assert [row.values["flag"] for row in written] == [1, True, 1.0]


# ---- what gradients are clipped to ---------------------------------------------------------------------------------


def clipped(path: Path, *clips: Any) -> list[dict[str, Any]]:
    """The recorded clipping of each group of an optimizer, when its gradients are clipped like this in each step; None:
    not clipped.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
    with astray.record(path, model) as recorder:
        for clip in clips:
            model(torch.ones(2, 4)).sum().backward()
            if clip is not None:
                clip(model)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    found: list[dict[str, Any]] = []
    for row in rows_of(path):
        limits = {name: value for name, value in row.values.items() if name.startswith("clip_grad")}
        if row.subject == "optimizer" and limits:
            group = int(row.site[-1])
            known = next((one for one in reversed(found) if one["group"] == group), {})
            found.append({**known, "step": row.step, "group": group, **limits})
    return found


def told(step: int, group: int, norm: Any = "off", value: Any = "off") -> dict[str, Any]:
    return {"step": step, "group": group, "clip_grad_norm": norm, "clip_grad_value": value}


def test_the_limit_of_a_norm_is_noted_when_it_changes(tmp_path: Path) -> None:
    one = lambda model: clip_grad_norm_(model.parameters(), max_norm=1.0)  # noqa: E731
    two = lambda model: clip_grad_norm_(list(model.parameters()), 2)  # noqa: E731
    found = clipped(tmp_path / "a", one, one, two, None)
    assert found == [told(step, group, norm) for step, norm in ((0, 1.0), (2, 2.0), (3, "off")) for group in (0, 1)]


def test_the_limit_of_values_and_of_some_parameters(tmp_path: Path) -> None:
    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_value_(model[1].parameters(), clip_value=0.5)
        clip_grad_norm_(model[0].weight, 3.0)

    assert clipped(tmp_path / "a", clip) == [told(0, 0, norm=3.0), told(0, 1, value=0.5)]


def test_a_norm_that_is_only_measured_is_not_a_limit(tmp_path: Path) -> None:
    assert clipped(tmp_path / "a", lambda model: clip_grad_norm_(model.parameters(), float("inf"))) == [
        told(0, 0),
        told(0, 1),
    ]


def test_clipping_is_torchs_own_before_and_after(tmp_path: Path) -> None:
    before = vars(torch.nn.utils).copy(), vars(torch.nn.utils.clip_grad).copy()
    clipped(tmp_path / "a", None)
    assert (vars(torch.nn.utils), vars(torch.nn.utils.clip_grad)) == before
    with astray.record(tmp_path / "b", nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="missing"):
            torch.nn.utils.clip_grad_value_()
        weight = nn.Parameter(torch.ones(4))
        weight.grad = torch.full((4,), 3.0)
        torch.nn.utils.clip_grad_value_(iter([weight]), 1.0)
        assert weight.grad.tolist() == [1.0] * 4


# ---- gradients that are written to after the backward pass ---------------------------------------------------------


def written(path: Path, *treatments: Any) -> list[Any]:
    """The gradients recorded as written to in each step, when they are treated like this before the update."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    known: dict[int, Any] = {}
    with astray.record(path, model) as recorder:
        for treatment in treatments:
            model(torch.ones(2, 4)).sum().backward()
            treatment(model)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    for row in rows_of(path):
        if "written_gradients" in row.values:
            known[row.step] = row.values["written_gradients"]
    steps = range(len(treatments))
    return [known[max(step for step in known if step <= now)] for now in steps]


def nothing(_: nn.Module) -> None:
    """Does not change the gradients."""


def test_a_gradient_that_is_singled_out_is_noted(tmp_path: Path) -> None:
    def scale(model: nn.Module) -> None:
        clip_grad_norm_(model.parameters(), 0.5)
        model[1].weight.grad[0].mul_(4)

    def replace(model: nn.Module) -> None:
        model[0].bias.grad = model[0].bias.grad * 2

    assert written(tmp_path / "a", nothing, scale, replace, nothing) == [[], ["1.weight"], ["0.bias"], []]


def test_what_is_done_to_all_gradients_singles_none_out(tmp_path: Path) -> None:
    def replace(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 2

    def accumulate(model: nn.Module) -> None:
        model[1](torch.ones(2, 4)).sum().backward()  # reaches some of them alone
        clip_grad_norm_(model.parameters(), 0.5)

    assert written(tmp_path / "a", replace, accumulate) == [[], []]
