"""`transformers.Trainer`: through the callback, and unchanged through `astray run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import Trainer, TrainerCallback

import astray
from astray.store import RunData
from astray.transformers import AstrayCallback
from integration.programs.program import bits
from integration.programs.training_script import make_trainer
from recorded_rows import hooks_of, rows

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = Path(__file__).parent / "programs" / "training_script.py"

ALL = ("module", "function", "op")

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluating": {"eval_strategy": "steps", "eval_steps": 2},
    "bfloat16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "workers": {"dataloader_num_workers": 1},
}


def outcome(trainer: Trainer) -> dict[str, Any]:
    """What must not change: losses, weights, optimizer, randomness."""
    timeless = [
        {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
        for entry in trainer.state.log_history
    ]
    found = bits("log", timeless) | bits("weights", trainer.model.state_dict())
    assert trainer.optimizer is not None
    return found | bits("optimizer", trainer.optimizer.state_dict()) | bits("randomness", torch.get_rng_state())


def modes() -> list[Any]:
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def recorded(folder: Path, level: tuple[str, ...] = ("module",), **changes: Any) -> tuple[Trainer, RunData]:
    trainer = make_trainer(folder / "output", callbacks=[AstrayCallback(folder / "run", level=level)], **changes)
    trainer.train()
    return trainer, astray.open(folder / "run")


@pytest.mark.parametrize("level", [("module",), pytest.param(ALL, marks=pytest.mark.slow)], ids="+".join)
@pytest.mark.parametrize(
    "variant", [name if name == "plain" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_the_callback_changes_no_bit_and_leaves_nothing(variant: str, level: tuple[str, ...], tmp_path: Path) -> None:
    changes = VARIANTS[variant]
    alone = make_trainer(tmp_path / "output", **changes)
    alone.train()
    expected = outcome(alone)
    watched, run = recorded(tmp_path, level, **changes)
    assert outcome(watched) == expected
    assert modes() == []
    assert hooks_of(watched.model) == hooks_of(alone.model)
    assert run.complete
    assert run.ranks[0].end.ended == "normally"
    assert [item for item in run.ranks[0].end.missed if item.what != "tensors inside a DynamicCache"] == []


def test_steps_are_those_of_the_optimizer_and_accumulation_makes_micro_steps(tmp_path: Path) -> None:
    _, run = recorded(tmp_path)
    inputs = rows(run, site="<root>", phase="forward", role="input", path="kwargs.input_ids")
    assert [(row["step"], row["micro"]) for row in inputs] == [(step, micro) for step in range(4) for micro in (0, 1)]
    gradients = rows(run, site="lm_head.weight", role="gradient", path="grad")
    assert [(row["step"], row["micro"]) for row in gradients] == [(s, m) for s in range(4) for m in (0, 1)]


def test_an_evaluation_belongs_to_the_step_that_follows(tmp_path: Path) -> None:
    _, run = recorded(tmp_path, **VARIANTS["evaluating"], per_device_eval_batch_size=4)
    inputs = rows(run, site="<root>", phase="forward", role="input", path="kwargs.input_ids")
    assert [(row["step"], row["shape"][0]) for row in inputs] == [
        (0, 2), (0, 2), (1, 2), (1, 2), (2, 4), (2, 2), (2, 2), (3, 2), (3, 2), (4, 4),
    ]  # fmt: skip


@pytest.mark.slow
def test_two_trainings_agree_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        recorded(tmp_path / name, seed=seed)
    assert astray.compare(tmp_path / "a" / "run", tmp_path / "b" / "run").same
    assert astray.compare(tmp_path / "a" / "run", tmp_path / "c" / "run").first is not None


class Failing(TrainerCallback):
    """Ends a training after its first step."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")


def test_after_an_exception_nothing_remains_and_what_came_before_it_is_there(tmp_path: Path) -> None:
    callback = AstrayCallback(tmp_path / "run", level=ALL)
    trainer = make_trainer(tmp_path, callbacks=[callback, Failing()])
    with pytest.raises(RuntimeError, match="out of memory"), callback:
        trainer.train()
    assert hooks_of(trainer.model) == 0
    assert modes() == []
    run = astray.open(tmp_path / "run")
    assert run.complete
    assert run.ranks[0].end.ended == "RuntimeError: out of memory"
    assert run.steps == [0]


@pytest.mark.slow
def test_a_second_training_ends_the_first_recording_and_gets_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[AstrayCallback(tmp_path / "run"), Failing()])
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    trainer.remove_callback(Failing)
    trainer.train()
    assert hooks_of(trainer.model) == 0
    first, second = astray.open(tmp_path / "run"), astray.open(tmp_path / "run-2")
    assert (first.steps, second.steps) == ([0], [0, 1, 2, 3])
    assert "did not report" in first.ranks[0].end.ended
    assert second.ranks[0].end.ended == "normally"


def test_settings_are_those_of_record_and_wrong_ones_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(astray.errors.RecordError, match="Did you mean 'stats'"):
        AstrayCallback(tmp_path / "run", keep="stat")
    callback = AstrayCallback(tmp_path / "run", keep="tensors", steps="1:3")
    make_trainer(tmp_path, callbacks=[callback]).train()
    run = astray.open(tmp_path / "run")
    assert run.steps == [1, 2]
    assert run.values(0, 0) is not None
    again = make_trainer(tmp_path, callbacks=[AstrayCallback(tmp_path / "run")])
    with pytest.raises(astray.errors.RunExists):
        again.train()
    make_trainer(tmp_path, callbacks=[AstrayCallback(tmp_path / "run", overwrite=True)]).train()
    assert astray.open(tmp_path / "run").steps == [0, 1, 2, 3]


@pytest.mark.slow
def test_an_unchanged_script_records_the_same_through_astray_run(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain = [sys.executable, str(SCRIPT), str(tmp_path / "output")]
    alone = subprocess.run(plain, capture_output=True, text=True, check=True, env=environment)
    command = [sys.executable, "-m", "astray", "run", "-o", str(tmp_path / "script"), *plain[1:]]
    watched = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    losses_and_weights = [done.stdout.splitlines()[-2:] for done in (alone, watched)]  # above them, times
    assert losses_and_weights[0] == losses_and_weights[1]
    recorded(tmp_path)
    diff = astray.compare(tmp_path / "run", tmp_path / "script")
    assert diff.same
    assert diff.counts["identical"] == len(diff.pairs)


@pytest.mark.slow
def test_transformers_is_imported_for_the_callback_alone() -> None:
    code = (
        "import sys, torch, astray, astray.capture.recorder, astray.capture.pytorch.adapter\n"
        "print('transformers' in sys.modules)\n"
        "from astray.transformers import AstrayCallback\n"
        "print(AstrayCallback.__mro__[1].__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "transformers.trainer_callback"]
