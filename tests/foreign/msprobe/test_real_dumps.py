"""Against the real msprobe, in its own environment (`make peers`): its dumps opened here, ours given to its tools."""

from __future__ import annotations

import csv
import json
import math
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import astray
from astray.foreign.msprobe import open_dump
from astray.store import RunData
from msprobe_cases import CASES, ENVIRONMENT, keyed, program, record, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENT / "msprobe").exists(), reason="MISSING: msprobe is not installed; `make peers` does that"
    ),
]

LEVELS = {"L0": ["module"], "L1": ["function"], "mix": ["module", "function"]}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """As the other side has it: sums are made in another order by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a dump of the program, once for each way of asking."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*settings: str) -> Path:
        if settings not in made:
            folder = tmp_path_factory.mktemp("real") / "dump"
            command = [ENVIRONMENT / "python", CASES / "dump.py", folder, *settings]
            subprocess.run(
                command, check=True, capture_output=True, env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
            )
            made[settings] = folder / "dump"
        return made[settings]

    return make


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return record(tmp_path_factory.mktemp("native") / "run", level=LEVELS["mix"], keep="tensors")


@pytest.fixture(scope="module")
def ours(native: RunData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours") / "dump"
    write(native, path)
    return path


def msprobe(*arguments: object) -> str:
    done = subprocess.run([ENVIRONMENT / "msprobe", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("task", ["statistics", "tensor", "md5"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_its_dumps_open_and_agree(level: str, task: str, dumped: Callable[..., Path], native: RunData) -> None:
    asked = (level, "statistics", "md5") if task == "md5" else (level, task, "statistics")
    run = open_dump(dumped(*asked))
    assert run.problems == []
    assert run.info.settings["level"] == level
    theirs, mine = keyed(run.ranks[0]), keyed(native.ranks[0])
    if level == "L1":  # no modules, so nothing of it has our keys
        assert {key[3].partition("/")[0] for key in theirs} == {""}
        return
    for key, row in theirs.items():
        if key[-1].startswith("node."):  # of a node that does not belong to a function
            continue
        other = mine[key]
        assert (row["dtype"], row["shape"]) == (other["dtype"], other["shape"]), key
        if key[6] == "forward":
            assert (row["max"], row["min"]) == (other["max"], other["min"]), key
            assert task != "tensor" or row["fingerprint"] == other["fingerprint"], key
        for statistic in ("max", "min", "mean", "l2"):  # its hooks add up gradients in another order
            if row[statistic] is not None:
                assert row[statistic] == pytest.approx(other[statistic], rel=1e-4, abs=1e-7), (key, statistic)
    assert len(theirs) == {"L0": 122, "mix": 323}[level]


def test_a_fault_is_found_between_a_dump_and_a_run(dumped: Callable[..., Path], native: RunData) -> None:
    diff = astray.compare(native, dumped("L0", "tensor", "statistics", "1.001"))
    assert diff.first is not None
    assert (diff.first.step, diff.first.site, diff.first.cause) == (0, "tail.0", "parameter")


def results(folder: Path) -> list[dict[str, str]]:
    (table,) = folder.glob("*.csv")
    with table.open() as file:
        return list(csv.DictReader(file))


def test_its_comparison_takes_our_dump(ours: Path, dumped: Callable[..., Path], tmp_path: Path) -> None:
    """Every tensor passes but those of which its own dump has another gradient."""
    (theirs,) = dumped("mix", "tensor", "statistics").glob("step0/*/dump.json")
    msprobe("compare", "-tp", ours / "step0/rank/dump.json", "-gp", theirs, "-o", tmp_path / "out")
    rows = results(tmp_path / "out")
    failed = {row["NPU Name"] for row in rows if row["Result"] != "pass"}
    assert failed == {
        "Functional.cross_entropy.0.backward.output.0",
        "Functional.linear.0.backward.output.0",
        "Functional.linear.1.backward.output.0",
        "Tensor.__matmul__.0.backward.output.0",
        "Tensor.__matmul__.1.backward.output.0",
    }
    exact = [row for row in rows if row["NPU Name"] not in failed and row["Cosine"] not in ("N/A", "unsupported", "")]
    assert len(exact) > 90
    assert max(float(row["MaxAbsErr"]) for row in exact) < 1e-6
    assert {float(row["MaxAbsErr"]) for row in exact if ".forward" in row["NPU Name"]} == {0.0}


@pytest.mark.parametrize("task", ["statistics", "md5"])
def test_its_comparison_takes_two_of_ours(task: str, native: RunData, tmp_path: Path) -> None:
    faulty = record(tmp_path / "faulty", factor=2.0, level=LEVELS["mix"], keep="tensors")
    for name, run in (("good", native), ("bad", faulty)):
        write(run, tmp_path / name, task=task)
    msprobe("compare", "-tp", tmp_path / "bad/step0", "-gp", tmp_path / "good/step0", "-o", tmp_path / "out")
    rows = {row["NPU Name"]: row for row in results(tmp_path / "out")}
    weight, before = (rows[f"Module.{name}.forward.0.{which}"] for name, which in (
        ("tail.0.Linear", "parameters.weight"), ("mix.Mix", "output.0"),
    ))  # fmt: skip
    if task == "md5":
        assert weight["NPU MD5"] != weight["BENCH MD5"]
        assert before["NPU MD5"] == before["BENCH MD5"]
    else:
        assert float(weight["L2norm diff"]) > 0.1
        assert float(before["L2norm diff"]) == 0.0


def test_it_draws_our_graph(ours: Path, tmp_path: Path) -> None:
    msprobe("graph_visualize", "-tp", ours / "step0", "-o", tmp_path / "out")
    (database,) = (tmp_path / "out").glob("*.vis.db")
    with sqlite3.connect(database) as opened:
        tables = [name for (name,) in opened.execute("select name from sqlite_master where type = 'table'")]
        nodes = {name for (name,) in opened.execute(f"select node_name from {next(t for t in tables if 'node' in t)}")}
    assert {"Module.mix.Mix.forward.0", "Module.tail.0.Linear.backward.0", "Functional.linear.0.forward"} <= nodes


def test_it_compares_our_graph_with_its_own(ours: Path, dumped: Callable[..., Path], tmp_path: Path) -> None:
    (theirs,) = dumped("mix", "tensor", "statistics").glob("step0/*")
    msprobe("graph_visualize", "-tp", ours / "step0/rank", "-gp", theirs, "-o", tmp_path / "out")
    (database,) = (tmp_path / "out").glob("*.vis.db")
    with sqlite3.connect(database) as opened:
        tables = [name for (name,) in opened.execute("select name from sqlite_master where type = 'table'")]
        table = next(name for name in tables if "node" in name)
        matched = dict(opened.execute(f"select node_name, matched_node_link from {table} where data_source = 'NPU'"))
    assert "Module.mix.proj.Linear.forward.0" in str(matched["Module.mix.proj.Linear.forward.0"])
    assert "Functional.linear.0.forward" in str(matched["Functional.linear.0.forward"])


def test_its_search_for_overflow_names_the_call(tmp_path: Path) -> None:
    net, ids, labels = program().make()
    with torch.no_grad():
        net.mix.proj.weight[0, 0] = math.inf
    with astray.record(tmp_path / "run", net, level=LEVELS["mix"]) as recorder:
        torch.nn.functional.cross_entropy(net(ids)["logits"].mean(1), labels).backward()
        recorder.step()
    write(astray.open(tmp_path / "run"), tmp_path / "dump")
    msprobe("overflow_check", "-i", tmp_path / "dump/step0", "-o", tmp_path / "out")
    (found,) = (tmp_path / "out").glob("anomaly_analyze_*.json")
    (node,) = json.loads(found.read_text())["rank_0"]
    assert node["op_name"] == "Module.mix.proj.Linear.forward.0"
    assert node["construct_info"] == ["Module.mix.Mix.forward.0", "Module.mix.proj.Linear.forward.0"]
    assert "return self.proj(scores @ x), scores" in node["stack_info"][0]
