"""The saving hook's checker: the columns its users know, right to the last digits, and nothing lost on the way."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray.foreign.saving_hook.checker import main

CASES = Path(__file__).parents[2] / "cases" / "precision_checker"
COLUMNS = [
    "tensor_name", "cosine similarity", "meanA", "meanB", "meanA - meanB", "stdA", "stdB", "stdA - stdB", "varA",
    "varB", "varA - varB",
]  # fmt: skip


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


class Sides:
    """Two dumps to be, in which `put` saves one tensor on each side under one name."""

    def __init__(self, home: Path) -> None:
        self.a, self.b = home / "A", home / "B"
        self.count = 0

    def put(self, a: Any, b: Any) -> str:
        name = f"tensor_idx_{self.count}_layer_class_Linear_layer_name_l{self.count}_micro_step_0.npy"
        self.count += 1
        for path, values in ((self.a, a), (self.b, b)):
            home = path / "tensors" / "rank_0"
            home.mkdir(parents=True, exist_ok=True)
            if values is not None:
                np.save(home / name, np.asarray(values))
        return name

    def check(self) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """Numbers and notes, by the names of tensors."""
        assert main(["--pathA", str(self.a), "--pathB", str(self.b)]) == 0
        place = self.a / "tensors" / "compare_rst"
        found = {}
        for row in rows(place / "rank_0_rst.csv"):
            name = row.pop("tensor_name")
            found[name] = {column: float(cell) for column, cell in row.items()}
        notes = place / "rank_0_notes.csv"
        return found, {row["tensor_name"]: row["note"] for row in rows(notes)} if notes.exists() else {}


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(tmp_path)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A copy of the real dumps after the command has run on it as a person would, and what it printed."""
    home = tmp_path_factory.mktemp("checker") / "cases"
    shutil.copytree(CASES, home)
    command = [sys.executable, "-m", "astray.compat.saving_hook", "--pathA", home / "A", "--pathB", home / "B"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # there is no progress bar in a pipe
    return home, done.stdout


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("folder", ["tensors", "grads"])
def test_results_are_those_of_exact_arithmetic(checked: tuple[Path, str], folder: str, rank: int) -> None:
    """The expected numbers were made with 128 bits, and rounded to 64 when they were written.

    A sum in float64 is a few units in the last place off, beside the numbers that were added: so is a mean, beside the
    spread of what it is the mean of, and a difference of two columns beside these.
    """
    found = rows(checked[0] / "A" / folder / "compare_rst" / f"rank_{rank}_rst.csv")
    expected = rows(CASES / f"expected_head_float128_{folder}_rank_{rank}.csv")
    assert list(found[0]) == COLUMNS == list(expected[0])
    assert [row["tensor_name"] for row in found] == [row["tensor_name"] for row in expected]
    for one, other in zip(found, expected, strict=True):
        numbers = {name: float(other[name]) for name in COLUMNS[1:]}
        spread = max(numbers["stdA"], numbers["stdB"])
        for name, number in numbers.items():
            size = max(*(abs(numbers[part]) for part in name.split(" - ")), spread if "mean" in name else 0.0, 0.0)
            assert float(one[name]) == pytest.approx(number, rel=0, abs=4e-15 * size), (one, name)


def test_float32_results_are_met_within_their_rounding(checked: tuple[Path, str]) -> None:
    found = rows(checked[0] / "A" / "tensors" / "compare_rst" / "rank_0_rst.csv")
    expected = rows(CASES / "expected_seedversion_float32_tensors_rank_0.csv")
    for one, other in zip(found, expected, strict=True):
        for name in ("cosine similarity", "meanA", "stdA", "varB"):
            assert float(one[name]) == pytest.approx(float(other[name]), rel=1e-6, abs=1e-6)


def test_the_command_says_where_results_are(checked: tuple[Path, str]) -> None:
    place = checked[0] / "A" / "tensors" / "compare_rst" / "rank_0_rst.csv"
    lines = checked[1].splitlines()
    assert lines[0] == f"tensors, rank 0: 9 tensors compared → {place}"
    assert lines[1].startswith("    lowest cosine similarity 0.9998613265: tensor_idx_5_layer_class_Linear_")
    assert len(lines) == 8
    assert sorted(file.name for file in place.parent.iterdir()) == ["rank_0_rst.csv", "rank_1_rst.csv"]


def test_results_are_no_rank_when_it_is_run_again(
    checked: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    home, first = checked
    assert main(["--pathA", str(home / "A"), "--pathB", str(home / "B")]) == 0
    assert capsys.readouterr().out == first
    assert main(["--pathA", str(home / "B"), "--pathB", str(home / "A")]) == 0
    assert astray.open(home / "A").problems == []


def test_what_only_one_side_has_is_reported(sides: Sides, capsys: pytest.CaptureFixture[str]) -> None:
    both = sides.put([1.0, 2.0], [1.0, 2.0])
    only_a, only_b = sides.put([1.0], None), sides.put(None, [1.0])
    shutil.copytree(sides.a / "tensors" / "rank_0", sides.a / "tensors" / "rank_1")
    shutil.copytree(sides.b / "tensors" / "rank_0", sides.b / "grads" / "rank_0")
    found, notes = sides.check()
    assert list(found) == [both]
    lacks = f"{sides.a / 'tensors' / 'rank_0'} lacks"
    assert {name: note for name, note in notes.items() if name} == {only_a: "only in A", only_b: "only in B"}
    assert lacks not in notes.get("", "")
    output = capsys.readouterr().out
    assert f"    {only_a}: only in A\n    {only_b}: only in B\n" in output
    assert "tensors, rank 1: nothing in common\n    There is no rank 1 in `tensors` of B.\n" in output
    assert "grads, rank 0: nothing in common\n    There is no rank 0 in `grads` of A.\n" in output
    place = sides.a / "tensors" / "compare_rst"
    assert not (place / "rank_1_rst.csv").exists()
    assert [row["note"] for row in rows(place / "rank_1_notes.csv")][1:] == ["only in A", "only in A"]


def test_other_shapes_and_sizes_are_rows_and_notes(sides: Sides) -> None:
    turned = sides.put(np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(3, 2))
    longer = sides.put(np.arange(6.0), np.arange(7.0))
    fine = sides.put([3.0, 4.0], [4.0, 3.0])
    found, notes = sides.check()
    assert list(found) == [turned, longer, fine]  # nothing ends the run
    assert np.isnan(found[turned]["cosine similarity"])
    assert (found[turned]["meanA"], found[turned]["meanB"], found[longer]["meanA - meanB"]) == (2.5, 2.5, -0.5)
    assert notes == {
        turned: "elements were not paired, for the shapes are [2, 3] and [3, 2]",
        longer: "elements were not paired, for the shapes are [6] and [7]",
    }
    assert found[fine]["cosine similarity"] == pytest.approx(0.96, rel=1e-15)


def test_numbers_that_float32_cannot_square(sides: Sides) -> None:
    huge, tiny = np.array([3e30, 4e30], np.float32), np.array([3e-30, 4e-30], np.float32)
    names = [
        sides.put(huge, huge[::-1]),
        sides.put(tiny, tiny[::-1]),
        sides.put(np.array([1e300, 2e300]), [1e300, 2e300]),
    ]
    found, notes = sides.check()
    assert [found[name]["cosine similarity"] for name in names] == pytest.approx([0.96, 0.96, 1.0], rel=1e-6)
    assert found[names[0]]["stdA"] == pytest.approx(5e29, rel=1e-6)
    assert found[names[2]]["stdA"] == pytest.approx(5e299, rel=1e-12)
    assert notes == {}


def test_numbers_that_are_not_finite_are_said(sides: Sides) -> None:
    nan, inf = sides.put([1.0, np.nan, 3.0], [1.0, 2.0, 3.0]), sides.put([1.0, 2.0], [np.inf, -np.inf])
    found, notes = sides.check()
    for name, side in ((nan, "A"), (inf, "B")):
        assert np.isnan([found[name][column] for column in ("cosine similarity", f"mean{side}", f"std{side}")]).all()
    assert found[nan]["meanB"] == 2.0
    assert notes == {
        nan: "1 of 3 numbers of A are NaN or infinite",
        inf: "2 of 2 numbers of B are NaN or infinite",
    }


def test_zero_vectors_and_other_dtypes(sides: Sides) -> None:
    zeros, one_zero = sides.put(np.zeros(3), np.zeros(3)), sides.put(np.zeros(3), np.ones(3))
    whole, truth = sides.put(np.arange(4), np.arange(4, dtype=np.int8)), sides.put([True, False], [True, True])
    scalar, empty = sides.put(2.0, np.float16(2.0)), sides.put(np.zeros((0, 3)), np.zeros((0, 3)))
    backwards = sides.put(np.arange(3, dtype=">f8"), np.asfortranarray(np.arange(3.0)))
    mixed = sides.put(np.ones(2, np.complex64), np.ones(2))
    found, notes = sides.check()
    cosines = {name: found[name]["cosine similarity"] for name in found}
    assert (cosines[zeros], cosines[one_zero], cosines[whole], cosines[scalar]) == (1.0, 0.0, 1.0, 1.0)
    assert cosines[truth] == pytest.approx(2**-0.5, rel=1e-15)
    assert cosines[backwards] == pytest.approx(1.0, rel=1e-15)
    assert np.isnan([cosines[empty], cosines[mixed]]).all()
    assert notes == {
        empty: "there are no elements",
        mixed: "elements were not paired, for the types are complex64 and float64",
    }


def test_damaged_files_do_not_end_it(sides: Sides) -> None:
    cut, pickled, fine = sides.put(np.ones(99), np.ones(99)), sides.put([1.0], [1.0]), sides.put([1.0], [2.0])
    file = sides.a / "tensors" / "rank_0" / cut
    file.write_bytes(file.read_bytes()[:300])
    np.save(sides.b / "tensors" / "rank_0" / pickled, np.array([print], dtype=object), allow_pickle=True)
    found, notes = sides.check()
    assert np.isnan(found[cut]["meanA"])
    assert found[cut]["meanB"] == 1.0
    assert found[fine]["meanA - meanB"] == -1.0
    assert "it was cut" in notes[cut]
    assert "a pickle would have to be run" in notes[pickled]


def test_notes_of_an_earlier_check_do_not_stay(sides: Sides) -> None:
    name = sides.put([1.0], None)
    sides.put([1.0], [1.0])
    assert sides.check()[1][name] == "only in A"
    np.save(sides.b / "tensors" / "rank_0" / name, np.ones(1))
    assert sides.check()[1] == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist."),
        (lambda path: path.write_text("x"), "is not a folder."),
        (lambda path: path.mkdir(), "has no folder of a rank, such as tensors/rank_0. Runs of other formats"),
    ],
)
def test_what_is_not_a_dump_is_said(
    sides: Sides, tmp_path: Path, make: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sides.put([1.0], [1.0])
    make(tmp_path / "other")
    assert main(["--pathA", str(tmp_path / "other"), "--pathB", str(sides.b)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m astray.compat.saving_hook: {tmp_path / 'other'} {message}")


def test_a_place_for_results_that_cannot_be_written_to(sides: Sides, capsys: pytest.CaptureFixture[str]) -> None:
    sides.put([1.0], [1.0])
    (sides.a / "tensors" / "compare_rst").write_text("a file")
    assert main(["--pathA", str(sides.a), "--pathB", str(sides.b)]) == 2
    assert "compare_rst" in capsys.readouterr().err


def test_a_bar_is_shown_on_a_terminal(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("astray.formatting.terminal._PATIENCE", -1.0)
    monkeypatch.setattr("astray.formatting.terminal._REDRAW", -1.0)
    for _ in range(3):
        sides.put([1.0], [1.0])
    sides.check()
    assert "comparing tensors of rank 0 █" in terminal.getvalue()
    assert "2 of 3" in terminal.getvalue()
