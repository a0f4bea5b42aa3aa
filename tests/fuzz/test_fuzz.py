"""A few seeds of the fuzzer: it works, and what it has found stays mended. `python tests/fuzz` tries for an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

import astray
from fuzz import corpus
from fuzz.hunting import LATE, hunt


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is damaged."""
    folder = tmp_path_factory.mktemp("corpus")
    corpus.build(folder)
    for name in corpus.names(folder):  # whole, before anything is damaged
        reference, _ = corpus.pair(folder, name)
        assert astray.open(reference).problems == [], name
    return folder


def tried(home: Path, first: int, count: int, only: list[str] | None = None) -> None:
    told: list[str] = []
    found = hunt(home, first, count=count, minutes=600, only=only, tell=told.append)
    assert not told, "\n".join(told)
    assert found.tried == count


def test_some_seeds(home: Path) -> None:
    tried(home, 0, 8, ["modules", "ranks", "msprobe", "torch-save"])
    tried(home, LATE, 8, ["modules", "ranks", "msprobe", "torch-save"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2000249, 2001237, 3000298, 4000233, 4000478, 12003645, 12003899, 14006473])
def test_what_was_found_late(home: Path, seed: int) -> None:
    """What single seeds have found.

    Products beyond float64 in the search for the odd weight and in `risk --as`; settings in lists without end; the
    fuzzer itself, when a column had become texts before calls lay in each other; a null in the name of a file; the
    fuzzer again, when a table or its name had been damaged before; and a mean that no tensor has, in joined steps.
    """
    tried(home, seed, 1)


@pytest.mark.slow
@pytest.mark.parametrize("first", [*range(1000, 1500, 100), *range(LATE + 1000, LATE + 1300, 100)])
def test_more_seeds(home: Path, first: int) -> None:
    tried(home, first, 100)
