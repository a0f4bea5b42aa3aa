"""setup.jsonl, the settings of a program: nothing acknowledged is lost, and damage is reported in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import astray
from astray.comparison.setup.differences import setup_differences
from astray.errors import RunExists
from astray.records import Call, Setup, Tensor
from astray.store import FlightRecorder, RunInfo, RunWriter, open_run
from astray.store.writing import flight_recorder as flight

ROWS = [
    Setup(0, "module", "fc", {"class": "Linear", "eps": 1e-6, "sizes": [1, 2], "name": "ä", "nothing": None}),
    Setup(2, "module", "fc", {"eps": 1e-4}),
]


def write(path: Path, rows: list[Setup] = ROWS) -> Path:
    with RunWriter(path, info=RunInfo.of_process()) as writer:
        for row in rows:
            writer.setup(row)
        writer.call(Call(0, 0, 0, "module", "fc", "Linear", 0, "forward"))
        writer.tensor(Tensor(0, "output", "0", "float32", (2,), (1,), "cpu", False, fingerprint=1))
    return path


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    run = open_run(write(tmp_path / "a"))
    assert run.ranks[0].setup == ROWS
    assert run.complete
    assert run.problems == []
    assert run.ranks[0].end is not None
    assert run.ranks[0].end.setup == 2


def test_a_run_older_than_this_file_has_none_and_that_is_not_a_problem(tmp_path: Path) -> None:
    run = open_run(write(tmp_path / "a", []))
    assert not (tmp_path / "a" / "rank0" / "setup.jsonl").exists()
    assert run.ranks[0].setup == []
    assert run.problems == []


def test_a_run_in_its_place_does_not_keep_the_older_file(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(RunExists):
        write(tmp_path / "a")
    with RunWriter(tmp_path / "a", info=RunInfo.of_process(), overwrite=True) as writer:
        writer.call(Call(0, 0, 0, "module", "fc", "Linear", 0, "forward"))
    assert open_run(tmp_path / "a").ranks[0].setup == []


@pytest.mark.parametrize(
    ("damage", "kept", "sentence"),
    [
        (lambda text: text[:-20], 1, "1 of 2 lines cannot be read"),
        (lambda text: text.splitlines(keepends=True)[0], 1, "has 1 lines; 2 were recorded"),
        (lambda text: b"\xff\x00{" + text, 1, "1 of 2 lines cannot be read"),
        (lambda _: b"", 0, "has 0 lines; 2 were recorded"),
        (lambda _: b"null\n[1]\n{}\n" + b"[" * 100_000 + b"\n", 0, "4 of 4 lines cannot be read"),
        (lambda _: b'{"step":"x","subject":"module","site":"fc","values":{}}\n', 0, "1 of 1 lines cannot be read"),
        (lambda _: b'{"step":0,"subject":"module","site":"fc","values":[1]}\n', 0, "1 of 1 lines cannot be read"),
    ],
)
def test_a_damaged_file_is_a_sentence_and_the_rest_is_compared(
    damage: object, kept: int, sentence: str, tmp_path: Path
) -> None:
    assert callable(damage)
    file = write(tmp_path / "a") / "rank0" / "setup.jsonl"
    file.write_bytes(damage(file.read_bytes()))
    run = open_run(tmp_path / "a")
    assert len(run.ranks[0].setup) == kept
    (problem,) = run.problems
    assert str(file) in problem
    assert sentence in problem
    diff = astray.compare(write(tmp_path / "b"), tmp_path / "a")
    assert sentence in " ".join(diff.problems)
    assert str(diff)


def test_a_file_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    (write(tmp_path / "a") / "rank0" / "setup.jsonl").unlink()
    (problem,) = open_run(tmp_path / "a").problems
    assert problem.endswith("setup.jsonl is missing; it had 2 lines.")
    (tmp_path / "a" / "rank0" / "setup.jsonl").mkdir()
    (problem,) = open_run(tmp_path / "a").problems
    assert problem.endswith("What the program was set to is not known.")


def test_values_of_any_kind_are_compared_without_a_traceback(tmp_path: Path) -> None:
    odd = [Setup(0, "module", "fc", {"class": 3, "eps": {"a": [1]}, "weight.dtype": None, "training": "x"})]
    odd += [
        Setup(0, "optimizer", "SGD", {"class": [], "parameters": [1, None], "lr": {}}),
        Setup(0, "new", "", {"a": 1}),
    ]
    odd += [Setup(0, "autocast", "fc", {"other": 1}), Setup(-5, "seed", "x", {"torch": None})]
    left, right = write(tmp_path / "a"), write(tmp_path / "b", odd)
    for one, other in ((left, right), (right, left), (right, right)):
        for found in setup_differences(open_run(one), open_run(other)):
            assert found.sentence.endswith(".")


def test_a_kill_takes_nothing_of_it(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, torch, astray\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "rec = astray.Recorder(sys.argv[1], model).start()\n"
        "for step in range(3):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.param_groups[0]['lr'] *= 0.5\n"
        "    rec.step()\n"
        "rec.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], check=False)
    assert done.returncode == -9
    run = open_run(tmp_path / "a")
    assert not run.complete
    rates = [row.values["lr"] for row in run.ranks[0].setup if row.subject == "optimizer"]
    assert rates == [0.1, 0.05, 0.025]
    file = tmp_path / "a" / "rank0" / "setup.jsonl"
    file.write_bytes(file.read_bytes()[:-9])  # as if it had come in the middle of the last line
    run = open_run(tmp_path / "a")
    assert [row.values["lr"] for row in run.ranks[0].setup if row.subject == "optimizer"] == [0.1, 0.05]
    assert not any("setup.jsonl" in problem for problem in run.problems)


def test_a_flight_recording_has_what_was_set_before_the_steps_that_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "MOST_SETUP", 8)
    recorder = FlightRecorder(tmp_path / "no", info=RunInfo.of_process(), remember=2)
    recorder.setup(Setup(0, "module", "fc", {"class": "Linear", "eps": 1e-6}))
    for step in range(20):
        recorder.setup(Setup(step, "optimizer", "SGD/param_groups.0", {"lr": 20 - step}))
        recorder.call(Call(step, step, 0, "module", "fc", "Linear", 0, "forward"))
        recorder.step_done()
        recorder.flush()
    recorder.dump(tmp_path / "a", "why not")
    recorder.close()
    rank = open_run(tmp_path / "a").ranks[0]
    assert rank.setup[0] == Setup(0, "module", "fc", {"class": "Linear", "eps": 1e-6})
    rates = {row.step: row.values["lr"] for row in rank.setup[1:]}
    assert rates[18] == 2
    assert rates[19] == 1
    assert len(rank.setup) < 10
    assert rank.problems == []


def test_a_conversion_keeps_it(tmp_path: Path) -> None:
    astray.convert(write(tmp_path / "a"), tmp_path / "b", to="astray")
    assert open_run(tmp_path / "b").ranks[0].setup == ROWS


def test_other_tools_files_have_no_place_for_it(tmp_path: Path) -> None:
    astray.convert(write(tmp_path / "a"), tmp_path / "b", to="msprobe")
    assert open_run(tmp_path / "b").ranks[0].setup == []
    assert setup_differences(open_run(tmp_path / "b"), open_run(tmp_path / "b")) == ()
    assert setup_differences(open_run(tmp_path / "a"), open_run(tmp_path / "b")) == ()
