"""What several parts' tests share."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from astray.comparison.ranks.schedule import cores
from record_builders import Builder, linear_program

GOLDEN = Path(__file__).parent / "golden"
LONGEST = Path(__file__).parent / "integration", Path(__file__).parent / "fuzz"
PAGE = Path(__file__).parents[1] / "src" / "astray" / "web" / "static"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

collect_ignore_glob = [] if find_spec("paddle") else ["**/test_paddle_*.py"]
"""Tests of Paddle programs have an environment of their own: `make test-paddle`."""

_NOT_RUN = pytest.StashKey[dict[str, int]]()


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "there is no CUDA device here"


def _no_browser() -> str | None:
    if not any(map(shutil.which, BROWSERS)):
        return "there is no chromium here, which drives the page"
    if find_spec("playwright") is None:
        return "playwright is not installed, which drives the page"
    return None if (PAGE / "page.js").exists() else "the page was not built (`python page/build.py` says why)"


_NEEDS: dict[str, Callable[[], str | None]] = {"gpu": _no_gpu, "browser": _no_browser}
"""Marks of tests that cannot run everywhere, and the function that says why not here."""


@pytest.hookimpl(trylast=True)  # after -m and -k, so that what they leave out is not counted as missing
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that need what is not here, such as a GPU. The long ones run first: else workers wait."""
    items.sort(key=lambda item: not any(map(item.path.is_relative_to, LONGEST)))
    missing = config.stash[_NOT_RUN] = {}
    for mark, missed in _NEEDS.items():
        needs = [item for item in items if item.get_closest_marker(mark)]
        why = missed() if needs else None
        if why:
            missing[why] = len(needs)
            config.hook.pytest_deselected(items=needs)
            items[:] = [item for item in items if item not in needs]
    if hasattr(config, "workeroutput"):  # one of several workers, which have no terminal of their own
        config.workeroutput["not_run"] = missing


def pytest_collection_finish() -> None:
    """Keeps the garbage collector away from what collection has loaded, so that `gc.collect()` in a test is fast."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[object]) -> None:
    """Several workers share the cores: with all threads in each of them, they would mostly wait for one another."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // len(specs))))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Every worker has collected all tests, so each knows the whole number; one that was killed knows none."""
    known = node.config.stash.get(_NOT_RUN, {})
    node.config.stash[_NOT_RUN] = known | getattr(node, "workeroutput", {}).get("not_run", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for why, count in config.stash.get(_NOT_RUN, {}).items():
        terminalreporter.write_line(f"MISSING: {why}, so {count} tests did not run.", yellow=True)
    if collect_ignore_glob:
        terminalreporter.write_line("The tests of Paddle programs are not among these: `make test-paddle` runs them.")


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests run in an empty folder: what one of them writes to a relative path is not written into the repository."""
    home, places = Path.cwd(), os.environ.get("PYTHONPATH", "")
    folder = tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        if places:  # as it was meant where pytest was started, for the processes that tests start
            patch.setenv("PYTHONPATH", os.pathsep.join(str(home / place) for place in places.split(os.pathsep)))
        patch.chdir(folder)
        yield folder


@pytest.fixture(autouse=True)
def _nothing_left(_elsewhere: Path) -> Iterator[None]:
    """A test that writes into the folder it runs in fails: outside of the tests, that folder is the user's own.

    The others ask for this one before `monkeypatch`, so that it looks when every patch is undone.
    """
    yield
    left = sorted(_elsewhere.iterdir())
    for one in left:
        shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
    assert not left, f"It has left {', '.join(one.name for one in left)} in the current folder. Write into tmp_path."


@pytest.fixture(autouse=True)
def _hundred_columns(_nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are as wide as in a pipe, whatever terminal the tests run in.

    Readline, which pytest loads with its debugger, tells child processes of 80 columns where there is no terminal: the
    workers of pytest-xdist are such.
    """
    monkeypatch.setenv("COLUMNS", "100")


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
