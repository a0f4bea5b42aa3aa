"""Notebooks: the stack of a call names the cell as the user sees it, and not its temporary file."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import astray

CELL = """
import torch
def go(model):
    return model(torch.ones(1, 2))
go(model)
"""


def run_cell(file: str, **names: Any) -> None:
    """Runs the cell as IPython does: from a source that only linecache knows."""
    linecache.cache[file] = (len(CELL), None, CELL.splitlines(keepends=True), file)
    exec(compile(CELL, file, "exec"), names)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of cell 7 of a kernel, as ipykernel names it and IPython knows it."""
    file = "/tmp/ipykernel_4711/1234567890.py"
    module: Any = ModuleType("IPython.core.getipython")
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={file: 7}))
    module.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return file


def test_a_cell_is_named_by_its_number(tmp_path: Path, kernel: str) -> None:
    for file, place in ((kernel, "In [7]"), ("<ipython-input-5-0a1b2c3d>", "In [5]")):
        model = nn.Linear(2, 2)
        with astray.record(tmp_path / place, model):
            run_cell(file, model=model)
        run = astray.open(tmp_path / place)
        frames = run.ranks[0].stack(run.ranks[0].calls["stack"][0])
        assert [tuple(frame) for frame in frames] == [
            (place, 4, "go", "return model(torch.ones(1, 2))"),
            (place, 5, "<module>", "go(model)"),  # and nothing of what runs cells
        ]
        linecache.cache.pop(file, None)


@pytest.mark.parametrize("file", ["/tmp/ipykernel_4711/other.py", "/tmp/ipykernel_4711.py", "<string>"])
def test_other_files_stay_what_they_are(tmp_path: Path, kernel: str, file: str) -> None:
    model = nn.Linear(2, 2)
    with astray.record(tmp_path / "run", model):
        run_cell(file, model=model)
    run = astray.open(tmp_path / "run")
    assert run.ranks[0].stack(run.ranks[0].calls["stack"][0])[0].file == file
    linecache.cache.pop(file, None)


def test_the_report_names_the_cell(tmp_path: Path, kernel: str) -> None:
    for name, factor in (("good", 1.0), ("bad", 3.0)):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        model.weight.data[0, 0] *= factor
        with astray.record(tmp_path / name, model):
            run_cell(kernel, model=model)
    assert "In [7]:4 in go    return model(torch.ones(1, 2))" in str(
        astray.compare(tmp_path / "good", tmp_path / "bad")
    )
    linecache.cache.pop(kernel, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_notebook(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [
        "import torch, astray",
        "model = torch.nn.Linear(2, 2)",
        f"with astray.record({str(tmp_path / 'run')!r}, model):\n    model(torch.ones(1, 2))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, kernel_name="python3").execute()
    run = astray.open(tmp_path / "run")
    (frame,) = run.ranks[0].stack(run.ranks[0].calls["stack"][0])
    assert tuple(frame) == ("In [3]", 2, "<module>", "model(torch.ones(1, 2))")
