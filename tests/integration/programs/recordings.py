"""Keeps the recordings of programs, so that every test of one program with one setting looks at the same recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astray.capture.settings import LEVELS
from integration.programs.program import Program
from integration.programs.recorded import Recorded, record


class Recordings:
    """Recordings of programs, made at their first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Any, Recorded] = {}

    def get(self, program: Program, level: tuple[str, ...], keep: str = "stats", take: int = 0) -> Recorded:
        for one in level:
            if one not in LEVELS:
                pytest.skip(f"level {one!r} does not exist yet")
        key = (program.name, level, keep, take)
        if key not in self._made:
            path = self._folder / f"{program.name}-{'+'.join(level)}-{keep}-{take}"
            self._made[key] = record(program, path, level=level, keep=keep, overwrite=True)
        return self._made[key]
