"""`astray.experiment.seed_all`: it seeds every generator, and changes nothing else."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray.errors import UsageError


@pytest.fixture(autouse=True)
def settings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.deterministic, cudnn.benchmark = before[1:]


def drawn() -> list[Any]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def test_every_generator_starts_anew() -> None:
    astray.experiment.seed_all(7)
    first = drawn()
    assert first == pytest.approx([0.3238327, 0.0763083, 0.5349225], abs=1e-6)
    assert drawn() != first
    astray.experiment.seed_all(np.int64(7))
    assert drawn() == first
    astray.experiment.seed_all()
    assert torch.initial_seed() == 1234
    assert os.environ["PYTHONHASHSEED"] == "1234"


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "7", None, True])
def test_what_is_not_a_seed_is_refused_and_nothing_is_seeded(seed: Any) -> None:
    random.seed(3)
    before = random.getstate()
    with pytest.raises(UsageError, match=r"not a seed\. It is a whole number from 0 to 4,294,967,295"):
        astray.experiment.seed_all(seed)
    assert random.getstate() == before
    assert os.environ["PYTHONHASHSEED"] == "0"


def test_the_largest_seed_is_taken_by_all() -> None:
    astray.experiment.seed_all(2**32 - 1)
    assert torch.initial_seed() == 2**32 - 1


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="CUDA is running already, of which it would warn")
def test_determinism_is_asked_for_only_when_wanted() -> None:
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True
    astray.experiment.seed_all(1)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    astray.experiment.seed_all(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_workspace_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    astray.experiment.seed_all(1, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_workspace_that_comes_too_late_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="not set when CUDA started") as caught:
        astray.experiment.seed_all(1, deterministic=True)
    assert caught[0].filename == __file__


def test_torch_is_not_imported_for_it_and_no_device_is_started() -> None:
    code = (
        "import sys, astray; astray.experiment.seed_all(5, deterministic=True); print('torch' in sys.modules); "
        "import torch; astray.experiment.seed_all(5); print(torch.cuda.is_initialized(), torch.initial_seed())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "5"]
    assert "Neither torch nor Paddle has been imported yet" in done.stderr
