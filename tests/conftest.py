"""What several parts' tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from record_builders import Builder, linear_program

GOLDEN = Path(__file__).parent / "golden"

_NOT_RUN = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that need a GPU where there is none."""
    needs = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[_NOT_RUN] = 0
    if needs:
        import torch

        if not torch.cuda.is_available():
            config.stash[_NOT_RUN] = len(needs)
            config.hook.pytest_deselected(items=needs)
            items[:] = [item for item in items if item not in needs]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(_NOT_RUN, 0)
    if count:
        text = f"MISSING: there is no CUDA device here, so {count} tests did not run."
        terminalreporter.write_line(text, yellow=True)


@pytest.fixture
def runs() -> SimpleNamespace:
    """`runs.Builder(path, keep)` for rows by hand, `runs.program(builder, fault=…)` for whole programs."""
    return SimpleNamespace(Builder=Builder, program=linear_program)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares a text with tests/golden/NAME. ASTRAY_UPDATE_GOLDEN=1 writes the file instead: read its diff then."""

    def check(name: str, text: str) -> None:
        file = GOLDEN / name
        if os.environ.get("ASTRAY_UPDATE_GOLDEN"):
            file.write_text(text + "\n", encoding="utf-8")
        assert file.read_text(encoding="utf-8") == text + "\n"

    return check
