"""Fixtures for the tests of real programs: each program is recorded once for every setting that a test needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import astray
from astray.store import RunData
from integration.programs import PROGRAMS
from integration.programs.recordings import Recordings


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The programs are tiny: threads that wait for each other would only be slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recordings]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.fixture
def recorded(recordings: Recordings) -> Callable[..., RunData]:
    """Returns the recording of a program by name, at the module level unless another is given."""
    return lambda name, level=("module",), keep="stats": astray.open(recordings.get(PROGRAMS[name], level, keep).path)
