"""What the tests of real programs share: each program is recorded once for every setting that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import astray
from astray.capture.settings import LEVELS
from astray.store import Run
from integration.programs import PROGRAMS, Program
from integration.programs.recorded import Recorded, record


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The programs are tiny: threads that wait for each other would only be slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Recordings:
    """Recordings of programs, made when they are first asked for."""

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


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recordings]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.fixture
def recorded(recordings: Recordings) -> Callable[..., Run]:
    """Gives the recording of a program by name, of its modules unless another level is asked for."""
    return lambda name, level=("module",), keep="stats": astray.open(recordings.get(PROGRAMS[name], level, keep).path)
