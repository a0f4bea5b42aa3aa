"""`astray compare` with rows and files: what a person sees and what lies on the disk afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import openpyxl
import pytest

from astray.cli import main
from astray.records import Call, Tensor
from astray.stats.kernels import Strided, measure
from astray.store import RunInfo, RunWriter


def write(path: Path, factor: float) -> str:
    """A run of three layers, all of which but the first are off by the factor."""
    with RunWriter(path, info=RunInfo.of_process()) as writer:
        for number, site in enumerate(("a", "b", "c")):
            array = np.ones((2, 4), np.float32) * np.float32(factor ** min(number, 1) * (1 + number))
            memory = Strided.from_numpy(array)
            found = measure(memory)
            writer.call(Call(number, 0, 0, "module", site, "Linear", 0, "forward"))
            writer.tensor(Tensor(number, "output", "out", "float32", memory.shape, memory.stride, "cpu", False, *found))
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "good", 1.0), write(tmp_path / "bad", 1.5)


def rows_of(out: str) -> list[str]:
    """The sites of the table beneath the answer."""
    table = out.split("rows where")[-1].split("row where")[-1].split("\n\n")[1]
    return [line.split()[2] for line in table.splitlines()[1:] if not line.startswith("…")]


def test_without_being_asked_there_are_no_rows(runs, capsys):
    assert main(["compare", *runs]) == 1
    assert "rows" not in capsys.readouterr().out.split("verdicts")[1]


def test_rows_beneath_the_answer(runs, capsys):
    assert main(["compare", *runs, "--filter", "wrong", "--sort", "-site"]) == 1
    out = capsys.readouterr().out
    assert out.index("First divergence") < out.index("verdicts") < out.index("2 rows where wrong, sorted by -site")
    assert rows_of(out) == ["c", "b"]


@pytest.mark.parametrize("sort", [["--sort", "-site"], ["--sort=-site"]])
def test_the_largest_first_however_it_is_written(runs, capsys, sort):
    main(["compare", *runs, "--filter", "step == 0", *sort, "--top", "2"])
    out = capsys.readouterr().out
    assert rows_of(out) == ["c", "b"]
    assert out.endswith("… 1 more; --top 0 shows all.\n")
    main(["compare", *runs, "--filter", "step == 0", *sort, "--top", "0"])
    assert rows_of(capsys.readouterr().out) == ["c", "b", "a"]


def test_an_option_behind_sort_is_still_an_option(runs):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *runs, "--sort", "--top", "3"])
    assert stopped.value.code == 2


def test_a_filter_that_cannot_be_understood_is_told_before_any_work(capsys):
    assert main(["compare", "nowhere", "nowhere", "--filter", "error >"]) == 2
    assert capsys.readouterr().err == (
        "astray compare: The filter 'error >' ends where a column, a number or a text is expected.\n"
    )
    assert main(["compare", "nowhere", "nowhere", "--sort", "error,,"]) == 2
    assert "is not an order" in capsys.readouterr().err


def test_a_library_that_is_not_there_is_told_before_any_work(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    assert main(["compare", "nowhere", "nowhere", "--xlsx", "d.xlsx"]) == 2
    assert "pip install 'astray[xlsx]'" in capsys.readouterr().err


def test_an_unknown_column_is_named(runs, capsys):
    assert main(["compare", *runs, "--filter", "eror > 1"]) == 2
    assert "There is no column 'eror'. Did you mean 'error'?" in capsys.readouterr().err
    assert main(["compare", *runs, "--sort", "-eror"]) == 2
    out, err = capsys.readouterr()
    assert "There is no column 'eror' to sort by." in err
    assert out == ""  # before the comparison, which may take long


def test_every_file_at_once(runs, tmp_path, capsys):
    out = tmp_path / "out"
    files = [
        "--csv",
        str(out),
        "--xlsx",
        str(out / "d.xlsx"),
        "--json",
        str(out / "d.json"),
        "--junit",
        str(out / "j.xml"),
    ]
    assert main(["compare", *runs, *files]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"written   {path}" for path in (out / "d.json", out / "j.xml", out, out / "d.xlsx")
    ]
    assert sorted(file.name for file in out.iterdir()) == ["d.json", "d.xlsx", "j.xml", "pairs.csv", "summary.csv"]
    assert json.loads((out / "d.json").read_text(encoding="utf-8"))["first"]["site"] == "b"
    assert openpyxl.load_workbook(out / "d.xlsx")["pairs"].max_row == 4
    assert ElementTree.parse(out / "j.xml").getroot()[0].attrib["failures"] == "1"


def test_files_say_when_they_have_some_of_the_rows(runs, tmp_path, capsys):
    assert main(["compare", *runs, "--csv", str(tmp_path), "--filter", "wrong", "--top", "1"]) == 1
    assert capsys.readouterr().err == f"written   {tmp_path}  (2 of 3 rows)\n"
    assert len((tmp_path / "pairs.csv").read_text(encoding="utf-8").splitlines()) == 3


def test_runs_that_cannot_be_compared_leave_test_results_too(runs, tmp_path, capsys):
    file = tmp_path / "j.xml"
    assert main(["compare", runs[0], str(tmp_path / "nowhere"), "--junit", str(file)]) == 2
    error = ElementTree.parse(file).getroot()[0][0][0]
    assert error.tag == "error"
    assert f"astray compare: {error.attrib['message']}\n" == capsys.readouterr().err


def test_nothing_but_reports_in_a_pipe(runs, tmp_path):
    words = [sys.executable, "-m", "astray", "compare", *runs, "--filter", "wrong", "--csv", str(tmp_path / "o")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"written   {tmp_path / 'o'}  (2 of 3 rows)\n")
    assert "\x1b" not in done.stdout
    silent = subprocess.run(["bash", "-c", f"{' '.join(words[:6])} 2>&-"], capture_output=True, text=True)
    assert (silent.returncode, silent.stderr) == (1, "")
