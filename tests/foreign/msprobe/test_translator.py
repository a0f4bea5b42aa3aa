"""A recording written as msprobe's files, and read again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray.errors import RunExists, UsageError
from astray.foreign.dump_rows import DumpRank, DumpRows
from astray.foreign.msprobe import open_dump, translate
from astray.records import Frame, Statistics
from astray.store import RunData, RunInfo
from astray.store.convert import StepBatches, convert
from astray.store.formats import Translator
from astray.store.run_info import End
from msprobe_cases import CASES, keyed, record, write

LEVELS = ["module", "function"]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return record(tmp_path_factory.mktemp("native") / "run", level=LEVELS, keep="tensors")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def leaves(value: Any, path: str = "") -> dict[str, dict[str, Any]]:
    """The tensors in a value, by their places."""
    if isinstance(value, dict) and "dtype" in value:
        return {path: value}
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {at: leaf for name, one in inner for at, leaf in leaves(one, f"{path}.{name}").items()}


def test_a_round_trip_loses_what_it_says(native: RunData, tmp_path: Path) -> None:
    done = convert(native, tmp_path / "dump", to="msprobe")
    before, after = keyed(native.ranks[0]), keyed(open_dump(tmp_path / "dump").ranks[0])
    missing = [key for key in before if key not in after]
    assert [key for key in after if key not in before] == []
    outermost = [key for key in missing if key[3] == "<root>"]
    added = [key for key in missing if key[-1] == "added"]
    assert len(outermost) + len(added) == len(missing)
    assert done.lost == {
        "a call of the outermost module": 6,
        "what one backward added to a gradient": len(added),
    }
    for key, row in after.items():
        told = ("dtype", "shape", "requires_grad", "min", "max", "mean", "std", "l2", "zeros", "nan", "fingerprint")
        assert [row[name] for name in told] == [before[key][name] for name in told], key


def test_a_round_trip_keeps_what_is_around_calls(native: RunData, tmp_path: Path) -> None:
    write(native, tmp_path / "dump")
    back = open_dump(tmp_path / "dump")

    def told(run: RunData) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        rank = run.ranks[0]
        rows = {row["seq"]: row for row in map(rank.calls.row, range(len(rank.calls)))}
        found = {}
        for row in rows.values():
            if row["site"] == "<root>" or row["kind"] == "parameter":
                continue
            parent = rows.get(row["parent"], {}).get("site")
            frames = rank.stack(row["stack"]) if row["stack"] is not None else []
            key = (row["step"], row["micro"], row["site"], row["call"], row["phase"])
            found[key] = (row["kind"], row["type"], None if parent == "<root>" else parent, frames)
        return found

    assert told(back) == told(native)


def test_names_are_those_that_msprobe_gives(native: RunData, tmp_path: Path) -> None:
    """Against the real dump of the same program. It leaves out what only moves or makes numbers."""
    write(native, tmp_path / "dump")
    for step in (0, 1):
        theirs = read(CASES / f"mix-statistics/step{step}/proc7/dump.json")
        mine = read(tmp_path / f"dump/step{step}/rank/dump.json")
        assert (mine["level"], mine["framework"]) == (theirs["level"], theirs["framework"])
        assert [name for name in theirs["data"] if name not in mine["data"]] == []
        more = {name.rsplit(".", 2)[0] for name in mine["data"] if name not in theirs["data"]}
        assert more == {"Torch.tensor", "Tensor.transpose"}
        construct, others = (read(one) for one in (
            tmp_path / f"dump/step{step}/rank/construct.json",
            CASES / f"mix-statistics/step{step}/proc7/construct.json",
        ))  # fmt: skip
        different = {name.rsplit(".", 2)[0] for name, parent in others.items() if construct[name] != parent}
        assert different == {"Functional.embedding"}  # the backward of its module is over before its own, to msprobe


EXCEPTIONS = {
    "Functional.linear.0.backward.output": "of a view in front of the node, where three dimensions are made two",
    "Functional.linear.1.backward.output": "the same",
    "Tensor.__matmul__.0.backward.output": "of a view behind the node that multiplies",
    "Tensor.__matmul__.1.backward.output": "the same",
    "Functional.cross_entropy.0.backward.output": "of the logarithms inside, not of the logits",
}
"""Where msprobe's numbers are of something else: of the last node of the graph that a function makes."""


def test_numbers_are_those_that_msprobe_measures(native: RunData, tmp_path: Path) -> None:
    write(native, tmp_path / "dump", task="statistics")
    theirs = read(CASES / "mix-statistics/step0/proc7/dump.json")["data"]
    mine = read(tmp_path / "dump/step0/rank/dump.json")["data"]
    compared = 0
    for name, entry in theirs.items():
        for group, value in entry.items():
            if f"{name}.{group}" in EXCEPTIONS or (name.startswith("Functional") and group.startswith("input_")):
                continue  # and functions get their arguments by position or keyword
            ours = leaves(mine[name][group])
            for place, other in leaves(value).items():
                one = ours[place]
                compared += 1
                form = ("dtype", "shape", "requires_grad")
                assert [one[part] for part in form] == [other[part] for part in form], (name, group, place)
                for statistic in ("Max", "Min", "Mean", "Norm"):
                    if other[statistic] is not None:  # of integers it has no mean
                        assert one[statistic] == pytest.approx(other[statistic], rel=2e-5, abs=2e-7), (name, statistic)
    assert compared > 80


def test_tensors_are_files_that_torch_opens(native: RunData, tmp_path: Path) -> None:
    write(native, tmp_path / "dump")
    folder = tmp_path / "dump/step0/rank"
    said = read(folder / "dump.json")
    assert said["task"] == "tensor"
    assert said["dump_data_dir"] == str(folder / "dump_tensor_data")
    names = [leaf["data_name"] for leaf in leaves(said["data"]).values()]
    assert sorted(names) == sorted(file.name for file in (folder / "dump_tensor_data").iterdir())
    assert "Module.mix.Mix.forward.0.kwargs.scale.pt" in names
    assert "Module.norm.LayerNorm.parameters_grad.0.weight.pt" in names
    loaded = torch.load(folder / "dump_tensor_data/Module.mix.Mix.forward.0.output.1.pt", weights_only=True)
    key = astray.Key(0, 0, "mix", 0, "forward", "output", "out.1")
    np.testing.assert_array_equal(loaded.numpy(), native.tensor(key))


def test_the_same_bits_lie_on_the_disk_once(native: RunData, tmp_path: Path) -> None:
    write(native, tmp_path / "dump")
    files = sorted((tmp_path / "dump" / "step0").rglob("*.pt"))
    content: dict[int, set[bytes]] = {}
    for file in files:
        content.setdefault(file.stat().st_ino, set()).add(file.read_bytes())
    assert all(len(one) == 1 for one in content.values())
    assert len(content) < len(files)


@pytest.mark.parametrize("kept", [0, 3000])
def test_tensors_of_a_cut_dump_are_found_by_their_names(native: RunData, tmp_path: Path, kept: int) -> None:
    write(native, tmp_path / "dump")
    folder = tmp_path / "dump/step0/rank"
    whole = (folder / "dump.json").read_bytes()
    head = whole[: whole.index(b'"data"')] + b'"data": {}}'  # as a kill leaves it
    (folder / "dump.json").write_bytes(whole[:kept] if kept else head)
    run = open_dump(tmp_path / "dump")
    files = {file.name for file in (folder / "dump_tensor_data").iterdir()}
    rank = run.ranks[0]
    steps = rank.calls.numbers("step")[rank.call_rows]
    assert int((steps == 0).sum()) == len(files)
    assert not any("of no entry" in problem for problem in run.problems)
    assert not run.complete


def test_checksums_are_crc32_of_the_bytes(native: RunData, tmp_path: Path) -> None:
    write(native, tmp_path / "dump", task="md5")
    said = read(tmp_path / "dump/step0/rank/dump.json")
    weight = said["data"]["Module.embed.Embedding.forward.0"]["parameters"]["weight"]
    theirs = read(CASES / "L1-md5/step0/proc7/dump.json")["data"]["Functional.embedding.0.forward"]
    assert weight["md5"] == theirs["input_args"][1]["md5"]  # drawn, so the same everywhere
    assert said["task"] == "statistics"
    assert not (tmp_path / "dump/step0/rank/dump_tensor_data").exists()


def test_structure_has_names_and_no_tensors(native: RunData, tmp_path: Path) -> None:
    write(native, tmp_path / "dump", task="structure")
    folder = tmp_path / "dump/step0/rank"
    assert (read(folder / "dump.json")["task"], read(folder / "dump.json")["data"]) == ("structure", {})
    assert read(folder / "construct.json")["Functional.linear.0.forward"] == "Module.mix.proj.Linear.forward.0"
    assert len(open_dump(tmp_path / "dump").ranks[0].calls) > 100


def overflowing(values: list[float]) -> RunData:
    """A run of one linear layer, with these outputs."""
    rows = DumpRows()
    seq = rows.call("fc", "Linear", stack=rows.stack([Frame("a.py", 3, "f", "fc(x)")]))
    rows.tensor(seq, "input", "0", "float32", (2,), statistics=Statistics(1.0, 1.0, 1.0, 0.0, 2**0.5, 1.0, 0, 0, 0, 2))
    array = np.array(values, np.float32)
    finite = array[np.isfinite(array)]
    bad = int(np.flatnonzero(~np.isfinite(array))[0]) if len(finite) < len(array) else None
    measured = (
        [float(f(finite)) for f in (np.min, np.max, np.mean, np.std, np.linalg.norm)] if len(finite) else [None] * 5
    )
    counts = [0, int(np.isnan(array).sum()), int(np.isinf(array).sum()), len(array)]
    largest = float(np.abs(finite).max()) if len(finite) else None
    first = None if bad is None else float(array[bad])
    rows.tensor(
        seq, "output", "out", "float32", array.shape, statistics=Statistics(*measured, largest, *counts, bad, first)
    )
    return RunData(Path("run"), RunInfo(astray="1", created=""), {0: DumpRank(0, rows.source())})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.nan], (math.nan, math.nan, math.nan, math.nan)),
        ([1.0, math.inf], (math.inf, 1.0, math.inf, math.inf)),
        ([-math.inf, 1.0], (1.0, -math.inf, -math.inf, math.inf)),
        ([math.inf, math.inf], (math.inf, math.inf, math.inf, math.inf)),
    ],
)
def test_what_is_not_finite_is_written_as_torch_measures_it(
    values: list[float], expected: tuple[float, ...], tmp_path: Path
) -> None:
    write(overflowing(values), tmp_path / "dump")
    said = read(tmp_path / "dump/step0/rank/dump.json")["data"]["Module.fc.Linear.forward.0"]["output"][0]
    np.testing.assert_equal(tuple(said[name] for name in ("Max", "Min", "Mean", "Norm")), expected)
    tensor = torch.tensor(values)
    np.testing.assert_equal(
        (said["Max"], said["Min"], said["Mean"]), (tensor.max().item(), tensor.min().item(), tensor.mean().item())
    )


def test_a_search_for_overflow_has_only_what_overflowed(tmp_path: Path) -> None:
    write(overflowing([1.0, math.inf]), tmp_path / "bad", task="overflow_check")
    write(overflowing([1.0, 2.0]), tmp_path / "good", task="overflow_check")
    assert list(read(tmp_path / "bad/step0/rank/dump.json")["data"]) == ["Module.fc.Linear.forward.0"]
    assert read(tmp_path / "good/step0/rank/dump.json")["data"] == {}


def test_what_was_saved_goes_to_debug_json(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    with astray.record(tmp_path / "run", net, keep="tensors") as recorder:
        out = net(torch.ones(3, 2))
        recorder.save("a/b", {"x": out, "y": [out * 2]})
        recorder.save("c", out)
        out.sum().backward()
        recorder.step()
    convert(astray.open(tmp_path / "run"), tmp_path / "dump", to="msprobe")
    said = read(tmp_path / "dump/step0/rank/debug.json")
    assert said["level"] == "debug"
    assert list(said["data"]) == ["a/b.0.debug", "c.0.debug", "a/b_grad.0.debug", "c_grad.0.debug"]
    assert said["data"]["a/b.0.debug"]["y"][0]["data_name"] == "a_b.0.debug.y.0.pt"
    before, after = keyed(astray.open(tmp_path / "run").ranks[0]), keyed(open_dump(tmp_path / "dump").ranks[0])
    custom = {key: row["fingerprint"] for key, row in before.items() if key[2] == "custom"}
    assert {key: row["fingerprint"] for key, row in after.items() if key[2] == "custom"} == custom


def test_files_are_whole_whenever_they_are_looked_at(native: RunData, tmp_path: Path) -> None:
    """A step that comes in pieces, as from a running program."""
    translator: Translator = translate(tmp_path / "pieces", 0, native.info, overwrite=False)
    whole = StepBatches(native.ranks[0])
    for step in (0, 1):
        rows = whole.of(step)
        seqs = rows.calls.numbers("seq")
        for begin in range(0, len(seqs), 40):
            own = seqs[begin : begin + 40]
            translator.take(step, _Some(rows, own))
            translator.sync()
            assert open_dump(tmp_path / "pieces").problems == []
        translator.end_step(step)
    translator.close(End(complete=True))
    write(native, tmp_path / "whole")
    left, right = (keyed(open_dump(tmp_path / name).ranks[0]) for name in ("pieces", "whole"))
    assert {key: row["fingerprint"] for key, row in left.items()} == {
        key: row["fingerprint"] for key, row in right.items()
    }


class _Some(astray.store.RankRun):
    """Some calls of a rank, with their tensors."""

    def __init__(self, rank: astray.store.RankRun, seqs: Any) -> None:
        self.rank, self._whole = rank.rank, rank
        self._rows = np.flatnonzero(np.isin(rank.tensors.numbers("seq"), seqs))
        self._seqs = seqs

    @property
    def calls(self) -> Any:
        return self._whole.calls.take(np.isin(self._whole.calls.numbers("seq"), self._seqs))

    @property
    def tensors(self) -> Any:
        return self._whole.tensors.take(self._rows)

    def stack(self, id: int) -> list[Frame]:
        return self._whole.stack(id)

    def values(self, row: int) -> Any:
        return self._whole.values(int(self._rows[row]))


def test_ranks_have_folders_of_their_own(native: RunData, tmp_path: Path) -> None:
    info = RunInfo(astray="1", created="", world_size=2)
    for rank in (0, 1):
        translator = translate(tmp_path / "dump", rank, info)
        translator.take(0, StepBatches(native.ranks[0]).of(0))
        translator.close(End(complete=True))
    assert sorted(path.name for path in (tmp_path / "dump/step0").iterdir()) == ["rank0", "rank1"]
    with pytest.raises(RunExists, match="rank1 is there already"):
        translate(tmp_path / "dump", 1, info)
    translate(tmp_path / "dump", 1, info, overwrite=True)
    assert [path.name for path in (tmp_path / "dump/step0").iterdir()] == ["rank0"]


def test_tasks_and_levels_that_are_none_are_refused(tmp_path: Path) -> None:
    info = RunInfo(astray="1", created="")
    with pytest.raises(UsageError, match=r"'tensors' is none of .* Did you mean 'tensor'"):
        translate(tmp_path, 0, info, task="tensors")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'L3' is none of"):
        translate(tmp_path, 0, info, level="L3")  # type: ignore[arg-type]


def test_what_has_no_place_is_counted(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with astray.record(tmp_path / "run", net, level=["module", "op"]) as recorder:
        net(torch.randn(3, 2)).sum().backward()
        optimizer.step()
        recorder.step()
    run = astray.open(tmp_path / "run")
    lost = convert(run, tmp_path / "dump", to="msprobe").lost
    assert lost["a buffer of a module"] == 3
    assert lost["a call of the outermost module"] == 2
    tensors = len(open_dump(tmp_path / "dump").ranks[0].tensors)
    assert lost["the fingerprint of a tensor"] == lost["std, zeros and counts of a tensor"] == tensors


def test_a_run_of_operators_is_entries_of_aten(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with astray.record(tmp_path / "run", net, level="op", keep="tensors") as recorder:
        torch.relu(net(torch.randn(4, 2))).sum().backward()
        optimizer.step()
        recorder.step()
    run = astray.open(tmp_path / "run")
    assert not [what for what in convert(run, tmp_path / "dump", to="msprobe").lost if "call" in what and "op" in what]
    folder = tmp_path / "dump" / "step0" / "rank"
    names = list(json.loads((folder / "dump.json").read_text())["data"])
    calls = run.ranks[0].calls
    assert len(names) == sum(kind == "op" for kind in calls["kind"])
    assert {name.split(".")[0] for name in names} == {"Aten"}
    assert {"Aten.addmm.default.0.forward", "Aten.threshold_backward.default.0.forward"} <= set(names)
    again = open_dump(tmp_path / "dump")
    assert again.problems == []
    assert set(keyed(again.ranks[0])) == {key for key in keyed(run.ranks[0]) if key[2] == "op"}
    assert astray.compare(run, tmp_path / "dump").first is None


def test_an_old_dump_shows_a_fault_of_a_new_run(tmp_path: Path) -> None:
    """A weight scaled by 1.001, which msprobe's own comparison passes."""
    faulty = record(tmp_path / "faulty", factor=1.001, keep="tensors")
    diff = astray.compare(CASES / "L0-tensor", faulty, steps="0")
    assert diff.first is not None
    assert (diff.first.site, diff.first.phase, diff.first.cause) == ("tail.0", "forward", "parameter")
    assert 3e-4 < diff.first.error < 1e-3  # of the output, which has a bias, too
    by_statistics = astray.compare(CASES / "mix-statistics", faulty, steps="0")
    assert by_statistics.first is not None
    assert (by_statistics.first.site, by_statistics.first.cause) == ("tail.0", "parameter")
