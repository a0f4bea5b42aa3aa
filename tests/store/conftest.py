"""Records built by hand, and runs made of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray.store
from astray.store import RunData, RunInfo, RunWriter, open_run
from row_fixtures import call, info, make_call, make_tensor, tensor

__all__ = ["call", "info", "tensor"]

SOURCE = Path(astray.store.__file__).parents[2]
PROGRAMS = Path(__file__).parent / "writing" / "programs"


@pytest.fixture
def small_run(tmp_path: Path, info: RunInfo) -> RunData:
    """Two steps of four calls, each with an output whose values are its own number."""
    with RunWriter(tmp_path / "small", info=info) as writer:
        for seq in range(8):
            writer.call(make_call(seq))
            writer.tensor(make_tensor(seq), np.full((2, 3), seq, np.float32))
    return open_run(tmp_path / "small")


@pytest.fixture
def program() -> Callable[..., subprocess.Popen[str]]:
    """Starts one of the programs beside the tests, as a user would."""

    def start(name: str, *words: object, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(PROGRAMS / name), *map(str, words)]
        environment = os.environ | {"PYTHONPATH": str(SOURCE)}
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, **options)

    return start


@pytest.fixture
def run_program(program: Callable[..., subprocess.Popen[str]]) -> Callable[..., str]:
    """Runs a program to its end and gives what it printed."""

    def run(name: str, *words: object, **options: Any) -> str:
        with program(name, *words, **options) as process:
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return output

    return run
