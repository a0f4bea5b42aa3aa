"""What several parts' tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from record_builders import Builder, linear_program

GOLDEN = Path(__file__).parent / "golden"


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
