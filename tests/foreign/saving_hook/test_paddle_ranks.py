"""The documentation's example from end to end: two ranks, twice, and the checker on what they have saved."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray

pytestmark = [pytest.mark.paddle, pytest.mark.slow]
paddle = pytest.importorskip("paddle")

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
KINDS = ("data_parallel", "main_grad")
COLUMNS = [
    "tensor_name", "cosine similarity", "meanA", "meanB", "meanA - meanB", "stdA", "stdB", "stdA - stdB", "varA",
    "varB", "varA - varB",
]  # fmt: skip
Csv = list[dict[str, str]]


def launch(logs: Path, *command: Any) -> None:
    """Runs a program on two ranks, as a person would. Fails with what they said."""
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo"]
    places = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]  # the ranks test the tree that the tests do
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(
        [*launcher, "--log_dir", logs, *command], env=environment, capture_output=True, text=True, timeout=240
    )
    said = "\n".join(log.read_text(errors="replace")[-4000:] for log in sorted(logs.glob("workerlog.*")))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + said


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a reference and of a changed program, checked by the command."""
    home = tmp_path_factory.mktemp("ranks")
    for change in ("reference", "changed"):
        launch(home / f"{change}-logs", HERE / "paddle_ranks.py", home / change, change)
    for kind in KINDS:
        command = [sys.executable, "-m", "astray.compat.saving_hook"]
        command += ["--pathA", str(home / "reference" / kind), "--pathB", str(home / "changed" / kind)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count(" tensors compared → ") == 4
    return home


def result(home: Path, kind: str, folder: str, rank: int) -> Csv:
    file = home / "reference" / kind / folder / "compare_rst" / f"rank_{rank}_rst.csv"
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def order() -> list[str]:
    """The layers that are saved, in the order of their calls."""
    block = [("LlamaRMSNorm", "llama_rms_norm"), ("ColumnSequenceParallelLinear", "column_sequence_parallel_linear"),
             ("RowSequenceParallelLinear", "row_sequence_parallel_linear")]  # fmt: skip
    names = [f"layer_class_{type}_layer_name_{name}_{number}" for number in range(4) for type, name in block]
    return [*names, "layer_class_LlamaRMSNorm_layer_name_llama_rms_norm_4"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fault_is_in_its_line(home: Path, kind: str, rank: int) -> None:
    """Rotary embeddings have no layer of their own: the first that is off is the one behind the attention."""
    rows = result(home, kind, "tensors", rank)
    assert list(rows[0]) == COLUMNS
    assert [row["tensor_name"] for row in rows] == [
        f"tensor_idx_{13 * micro + at}_{name}_micro_step_{micro}.npy"
        for micro in range(4)
        for at, name in enumerate(order())
    ]
    same = {name for name in COLUMNS if " - " in name}
    for row in rows[:2]:
        assert float(row["cosine similarity"]) == pytest.approx(1, abs=1e-15)
        assert {float(row[name]) for name in same} == {0.0}
    first = next(row for row in rows if any(float(row[name]) for name in same))
    assert first["tensor_name"].startswith("tensor_idx_2_layer_class_RowSequenceParallelLinear_layer_name_row_")
    assert float(first["cosine similarity"]) < 0.99999
    for row in rows:
        assert float(row["meanA"]) - float(row["meanB"]) == float(row["meanA - meanB"])
        assert float(row["stdA"]) ** 2 == pytest.approx(float(row["varA"]))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_a_line_each(home: Path, kind: str, rank: int) -> None:
    rows = result(home, kind, "grads", rank)
    assert list(rows[0]) == COLUMNS
    assert len(rows) == 4 * 21
    assert [row["tensor_name"].split("_")[2] for row in rows] == [str(at) for at in range(84)]
    assert min(float(row["cosine similarity"]) for row in rows) < 0.9999


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_backward_on_one_rank(home: Path, kind: str, rank: int) -> None:
    """Neither averaged over the ranks nor added to those of the micro step before."""
    folder = home / "reference" / kind
    with np.load(folder / f"expected_{rank}.npz") as expected:
        compared = 0
        for file in (folder / "grads" / f"rank_{rank}").iterdir():
            values = np.load(file)
            key = file.stem.partition("_of_param_name_")[2]
            if key in expected:
                assert values.dtype == np.float32
                assert np.allclose(2 * values, expected[key], rtol=1e-5, atol=1e-7), file.name
                compared += 1
    assert compared == 2 * 21


def test_each_rank_has_its_own(home: Path) -> None:
    for kind in KINDS:
        run = astray.open(home / "reference" / kind)
        assert sorted(run.ranks) == [0, 1]
        assert run.problems == []
        key = astray.Key(0, 0, "llama_rms_norm_0", 0, "forward", "output", "out")
        assert not np.array_equal(run.tensor(key), run.tensor(key._replace(rank=1)))


def test_the_culprit_is_named(home: Path) -> None:
    comparison = astray.compare(home / "reference" / "main_grad", home / "changed" / "main_grad")
    assert comparison.first is not None
    assert comparison.first.place.site == "row_sequence_parallel_linear_0"
