"""Dumps of hooktools: written from a recording, opened as a run, and those that hooktools itself has left."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.errors import RunError, RunExists
from astray.foreign import hooktools
from astray.foreign.hooktools import translator
from astray.foreign.hooktools.files import FileSeries, Label, Numbering, nest, path_in_file, role_of
from astray.foreign.live_writer import live_writer
from astray.recorder import Recorder
from astray.store import End, RankRun, RunData, RunInfo, Table, open_run
from astray.store.convert import StepBatches, convert


class Net(nn.Module):
    """Keyword arguments, a dict of results with a tuple in it, a buffer, a call without tensors, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.mute = nn.Linear(4, 3), nn.Linear(3, 3), Mute()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, gain: float) -> dict[str, Any]:
        hidden = torch.relu(self.norm(self.one(x)))
        self.mute(3)
        return {"logits": self.two(self.two(hidden)) * mask * gain, "pair": (hidden, hidden.sum(-1))}


class Mute(nn.Module):
    def forward(self, number: int) -> None:
        return None


def train(recorder: Recorder, model: nn.Module, steps: int = 2) -> None:
    with recorder as rec:
        for step in range(steps):
            torch.manual_seed(step)
            out = model(torch.randn(5, 4), mask=torch.ones(3), gain=0.5)
            out["logits"].sum().backward()
            rec.save("mine", {"logits": out["logits"]})
            rec.step()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same program as hooktools' files and as a run of ours."""
    home = tmp_path_factory.mktemp("both")
    torch.manual_seed(0)
    model = Net()
    other = copy.deepcopy(model)
    level = ["module", "function"]
    train(Recorder(home / "log", model, writer=live_writer(hooktools.translate), level=level, keep="tensors"), model)
    train(Recorder(home / "run", other, level=level, keep="tensors"), other)
    return home / "log", home / "run"


def only_run(log_dir: Path) -> Path:
    (run,) = (entry for entry in log_dir.iterdir() if entry.is_dir())
    return run


def contents(log_dir: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=True) for path in sorted(log_dir.rglob("*.pt"))}


def observed(run: RunData, *phases: str) -> list[tuple[str, ...]]:
    rank = run.ranks[0]
    calls = [rank.calls.row(row) for row in range(len(rank.calls))]
    rows = zip(rank.call_rows.tolist(), rank.tensors["role"].tolist(), rank.tensors["path"].tolist(), strict=True)
    return [
        (calls[call]["site"], calls[call]["call"], role, path)
        for call, role, path in rows
        if calls[call]["phase"] in phases
    ]


# -- written ---------------------------------------------------------------------------------------------------------


def test_a_file_holds_a_call_and_loads_without_code(both: tuple[Path, Path]) -> None:
    files = {name: file for name, file in contents(both[0]).items() if name.startswith("forward")}
    root = next(file for file in files.values() if file["module_name"] == "<root>")
    assert (root["module_type"], root["classify"], root["kind"], root["call"]) == ("Net", "nn.module", "module", 0)
    assert root["input"][0].shape == (5, 4)
    assert root["kwargs"]["mask"].tolist() == [1, 1, 1]
    assert root["kwargs"]["gain"] == 0.5
    assert set(root["output"]) == {"logits", "pair"}
    assert [tensor.shape for tensor in root["output"]["pair"]] == [(5, 3), (5,)]
    one = next(file for file in files.values() if file["module_name"] == "one")
    assert torch.equal(one["output"], one["input"][0] @ one["parameters"]["weight"].T + one["parameters"]["bias"])
    norm = next(file for file in files.values() if file["module_name"] == "norm")
    assert set(norm["buffers"]) == {"running_mean", "running_var", "num_batches_tracked"}
    relu = next(file for file in files.values() if file["module_name"] == "<root>/relu")
    assert (relu["classify"], relu["module_type"]) == ("non nn.module", "torch.relu")


def test_files_are_numbered_as_calls_end(both: tuple[Path, Path]) -> None:
    """One without results gets its number when the call around it has ended."""
    modules = [
        file["module_name"]
        for name, file in contents(both[0]).items()
        if name.startswith("forward") and file["classify"] == "nn.module"
    ]
    assert modules == ["one", "norm", "two", "two", "mute", "<root>"] * 2
    numbers = [int(name[8:14]) for name in contents(both[0]) if name.startswith("forward")]
    assert numbers == list(range(len(numbers)))


def test_gradients_stand_where_hooktools_had_them(both: tuple[Path, Path]) -> None:
    back = [file for name, file in contents(both[0]).items() if name.startswith("backward")]
    first_two = next(file for file in back if file["module_name"] == "two")
    assert first_two["call"] == 1  # the last call is the first to come back
    assert torch.equal(first_two["output"], torch.full((5, 3), 0.5))
    assert first_two["input"][0].shape == (5, 3)
    grads = {file["module_name"]: file for name, file in contents(both[0]).items() if name.startswith("gradient")}
    assert set(grads) == {"one.weight", "one.bias", "two.weight", "two.bias", "norm.weight", "norm.bias"}
    assert grads["two.bias"]["gradient_grad"].shape == (3,)


def test_the_index_names_the_files_of_each_module(both: tuple[Path, Path]) -> None:
    log, _ = both
    run = only_run(log)
    index = json.loads((log / f"module2path_{run.name.rpartition('_')[2]}.json").read_text())
    assert len(index["two"]) == 8  # two calls, forward and backward, in two steps
    assert sorted(path for paths in index.values() for path in paths) == sorted(map(str, run.rglob("*.pt")))


class Part:
    """Some rows of a rank, as a recording hands them over. It is a `RankSource`."""

    end = None

    def __init__(self, whole: RankRun, calls: slice, tensors: slice) -> None:
        self.problems: list[str] = []
        self._whole, self._calls, self._tensors = whole, calls, tensors

    def calls(self) -> tuple[Table, list[str]]:
        return self._whole.calls.take(self._calls), []

    def tensors(self) -> tuple[Table, list[str]]:
        return self._whole.tensors.take(self._tensors), []

    def stack(self, id: int) -> list[Any]:
        return []

    def values(self, tensors: Table, row: int) -> Any:
        found = self._whole.values(self._tensors.start + row)
        return None if found is None else np.ascontiguousarray(found).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("size", [1, 7])
def test_pieces_make_the_same_files_as_the_whole(both: tuple[Path, Path], tmp_path: Path, size: int) -> None:
    run = open_run(both[1])
    info = RunInfo(astray="", created="2024-05-01T00:00:00+00:00")
    writing = hooktools.translate(tmp_path, 0, info, overwrite=False)
    rows = StepBatches(run.ranks[0])
    for step in run.steps:
        whole = rows.of(step)
        seqs = whole.calls.numbers("seq").tolist()
        told = 0
        for start in range(0, len(whole.tensors), size):
            tensors = slice(start, min(start + size, len(whole.tensors)))
            last = max(whole.tensors.numbers("seq")[tensors].tolist())
            calls = slice(told, max(told, 1 + max(at for at, seq in enumerate(seqs) if seq <= last)))
            told = calls.stop
            writing.take(step, RankRun(0, Part(whole, calls, tensors)))
            writing.sync()
        writing.take(step, RankRun(0, Part(whole, slice(told, len(seqs)), slice(0, 0))))
        writing.end_step(step)
    writing.close(End(complete=True))
    mine, expected = contents(tmp_path), contents(both[0])
    assert list(mine) == list(expected)
    for name, file in mine.items():
        assert file["module_name"] == expected[name]["module_name"]
        assert list(flat(file)) == list(flat(expected[name])), name


def test_a_step_larger_than_memory_makes_the_same_files(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translator, "HELD_BYTES", 100)
    convert(both[1], tmp_path / "log", to="hooktools")
    mine, expected = contents(tmp_path / "log"), contents(both[0])
    assert {name: flat(file) for name, file in mine.items()} == {name: flat(file) for name, file in expected.items()}


def flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """What is in a nest, in an order of its own, tensors by their bits."""
    if isinstance(value, dict):
        return sorted(leaf for key, item in value.items() for leaf in flat(item, f"{path}.{key}"))
    if isinstance(value, tuple):
        return [leaf for place, item in enumerate(value) for leaf in flat(item, f"{path}.{place}")]
    return [(path, str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value))]


def test_what_has_no_place_is_counted(both: tuple[Path, Path], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with astray.record(tmp_path / "run", model, keep="stats", optimizer="weight") as rec:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        rec.step()
    done = convert(tmp_path / "run", tmp_path / "log", to="hooktools")
    assert done.lost["a call of an optimizer"] == 3  # its step, and what came of both parameters
    assert done.lost["a tensor whose values were not kept as a whole"] == 7  # of 11: four are the optimizer's
    with pytest.raises(RunExists, match="is there already"):
        convert(tmp_path / "run", tmp_path / "log", to="hooktools")
    convert(tmp_path / "run", tmp_path / "log", to="hooktools", overwrite=True)
    assert len(open_run(tmp_path / "log").ranks[0].calls) == 4


def test_each_rank_has_a_run_of_its_own(both: tuple[Path, Path], tmp_path: Path) -> None:
    run = open_run(both[1])
    info = RunInfo(astray="", created="2024-05-01T00:00:00+00:00", world_size=2)
    for rank in (0, 1):
        writing = hooktools.translate(tmp_path, rank, info, overwrite=False)
        writing.take(0, StepBatches(run.ranks[0]).of(0))
        writing.close(End(complete=True))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "astray_1714521600_rank0", "astray_1714521600_rank1", "module2path_1714521600_rank0.json",
        "module2path_1714521600_rank1.json",
    ]  # fmt: skip
    assert list(open_run(tmp_path).ranks) == [0, 1]
    assert open_run(tmp_path).info.world_size == 2


def test_recordings_that_follow_each_other_share_numbers(tmp_path: Path) -> None:
    series = FileSeries(tmp_path, "again", 1700000000)
    model = nn.Linear(2, 2)
    for _ in range(2):

        def make(path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> Any:
            return hooktools.translate(
                path, rank, info, overwrite=overwrite, series=series, labels=lambda _: Label(-1, -1)
            )

        with Recorder(tmp_path, model, writer=live_writer(make), keep="tensors", phases="forward"):
            model(torch.ones(1, 2))
    files = list(contents(tmp_path).values())
    assert [(file["seq"], file["micro"]) for file in files] == [(0, 0), (1, 1)]
    assert {path.parent.name for path in tmp_path.rglob("*.pt")} == {"step-1"}


# -- opened ----------------------------------------------------------------------------------------------------------


def test_it_compares_with_a_native_run_by_key(both: tuple[Path, Path]) -> None:
    log, run = open_run(both[0]), open_run(both[1])
    assert (log.info.settings, log.problems, log.complete) == (
        {"format": "hooktools", "steps": {"epoch0": "step"}, "epochs": [[0, 0, 0]]}, [], True,
    )  # fmt: skip
    diff = astray.compare(run, log)
    assert diff.counts["identical"] == len(diff.pairs) > 100
    assert observed(log, "forward") == observed(run, "forward")
    parents = [rank.calls.row(row)["parent"] for rank in (log.ranks[0],) for row in range(len(rank.calls))]
    assert parents.count(None) == [run.ranks[0].calls.row(row)["parent"] for row in range(len(parents))].count(None)


@pytest.mark.parametrize("inside", [".", "*", "*/forward", "*/forward/epoch0", "*/forward/epoch0/step1"])
def test_any_folder_of_it_can_be_opened(both: tuple[Path, Path], inside: str) -> None:
    (folder,) = [both[0]] if inside == "." else sorted(both[0].glob(inside + "/"))[:1]
    run = open_run(folder)
    assert hooktools.recognises(folder)
    assert run.steps == ([1] if inside.endswith("step1") else [0, 1])
    assert ("backward" in run.ranks[0].calls["phase"].tolist()) == ("forward" not in inside)
    assert run.problems == []


def test_several_runs_are_not_one(both: tuple[Path, Path], tmp_path: Path) -> None:
    for stamp in (1700000000, 1700000001):
        shutil.copytree(only_run(both[0]), tmp_path / f"demo_{stamp}")
    with pytest.raises(RunError, match=r"holds 2 runs\. Open one of them: .*demo_1700000000, .*demo_1700000001\.$"):
        open_run(tmp_path)
    assert not hooktools.recognises(tmp_path / "demo_1700000000" / "none")


@pytest.mark.parametrize(
    ("labels", "numbers", "described"),
    [
        ([(-1, -1)], [0], {"epoch-1": "step + 1"}),
        ([(-1, -1), (-1, 0), (-1, 5)], [0, 1, 6], {"epoch-1": "step + 1"}),
        ([(3, 5), (3, 8)], [5, 8], {"epoch3": "step"}),
        ([(0, 0), (0, 9), (1, 0), (1, 9)], [0, 9, 10, 19], {"epoch0": "step", "epoch1": "step + 10"}),
        ([(-1, -1), (0, 2), (1, -1)], [0, 3, 4], {"epoch-1": "step + 1", "epoch0": "step + 1", "epoch1": "step + 5"}),
    ],
)
def test_steps_of_several_epochs_have_one_number_each(
    labels: list[tuple[int, int]], numbers: list[int], described: dict[str, str]
) -> None:
    given = [Label(*label) for label in labels]
    number = Numbering(given)
    assert [number[label] for label in given] == numbers
    assert [number.label(one) for one in numbers] == given
    assert number.described == described


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_places_and_roles_are_each_others_inverse(phase: str) -> None:
    rows = [("input", "0"), ("input", "1.2"), ("input", "kwargs.mask"), ("output", "out"), ("output", "out.a.0")]
    if phase == "backward":
        rows = [("output" if role == "input" else "input", path) for role, path in rows]
    else:
        rows += [("parameter", "weight"), ("state", "running_mean")]
    for role, path in rows:
        place = path_in_file(phase, role, path)
        assert place is not None
        assert role_of(phase, ".".join(filter(None, place))) == (role, path)
    assert path_in_file(phase, "gradient", "grad") is None
    assert role_of(phase, "else.0") is None


def test_a_nest_has_each_leaf_at_its_path() -> None:
    assert nest({"": 1}) == 1
    assert nest({"0": 1, "2.a": 2, "2.b.0": 3}) == (1, None, {"a": 2, "b": (3,)})
    assert nest({"a": 1, "a.b": 2}) == {"a": 1, "a.b": 2}
    assert nest({"a.b": 2, "a": 1}) == {"a.b": 2, "a": 1}
    assert nest({"999999999": 1}) == {"999999999": 1}
    assert nest({"01": 1, "1": 2}) == {"01": 1, "1": 2}


# -- what hooktools itself has left ------------------------------------------------------------------------------------


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes objects as hooktools pickles them: `old` ones are plain, newer ones are modules."""

    class NewHookData(nn.Module):
        def __init__(self, name: str, values: dict[str, Any]) -> None:
            super().__init__()
            self.module_name, self.formal = name, False
            for key, value in values.items():
                setattr(self, key, value)

    class OldHookData:
        def __init__(self, name: str, values: dict[str, Any]) -> None:
            self.module_name, self.timestamp = name, "1690000000"
            self.classify = "nn.module" if "(" in name else "non nn.module"
            self.__dict__ |= values

    class Cache:
        def __init__(self) -> None:
            self.keys = torch.ones(2)

    module = types.ModuleType("hooktools.utils")
    for one in (NewHookData, OldHookData, Cache):
        one.__module__, one.__qualname__ = module.__name__, one.__name__
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, "hooktools", types.ModuleType("hooktools"))
    monkeypatch.setitem(sys.modules, "hooktools.utils", module)

    def make(old: bool, name: str, **values: Any) -> Any:
        return (OldHookData if old else NewHookData)(name, values)

    make.cache = Cache  # type: ignore[attr-defined]
    return make


LINEAR = "Linear(in_features=4, out_features=3, bias=True)"
MODEL = "Net(\n  (one): Linear(in_features=4, out_features=3, bias=True)\n" + "  (two): Linear()\n" * 30 + ")"


def save(folder: Path, phase: str, number: int, data: Any, step: str = "epoch-1/step-1") -> Path:
    path = folder / phase / step / f"{phase}_{number:06d}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(data, path)
    return path


@pytest.mark.parametrize("old", [True, False])
def test_dumps_of_hooktools_open_as_they_are(
    original: Callable[..., Any], tmp_path: Path, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "demo_1690000000"
    x, y, weight = torch.randn(5, 4), torch.randn(5, 3, dtype=torch.bfloat16), nn.Parameter(torch.randn(3, 4))
    save(run, "forward", 0, original(old, LINEAR, input=(x,), output=y))
    save(run, "forward", 1, original(old, LINEAR, input=(x,), output=y))
    save(run, "forward", 2, original(old, "torch.nn.functional.softmax", input=(y, -1), output=y.softmax(-1)))
    save(run, "forward", 3, original(old, MODEL, input=(x, 7), output=(y, {"loss": y.sum()})))
    save(run, "backward", 0, original(old, LINEAR, input=(None, x), output=(y,)))
    values = {"gradient": weight.data} if old else {"gradient": weight, "gradient_grad": weight.data * 2}
    save(run, "gradient", 0, original(old, "one.weight", **values))
    monkeypatch.delitem(sys.modules, "hooktools.utils")  # nothing of it is needed to read them
    found = open_run(tmp_path)
    assert found.problems == []
    calls = [found.ranks[0].calls.row(row) for row in range(6)]
    assert [(call["kind"], call["type"], call["call"], call["phase"]) for call in calls] == [
        ("module", "Linear", 0, "forward"), ("module", "Linear", 1, "forward"),
        ("function", "torch.nn.functional.softmax", 0, "forward"), ("module", "Net", 0, "forward"),
        ("module", "Linear", 0, "backward"), ("parameter", "Parameter", 0, "backward"),
    ]  # fmt: skip
    assert [call["site"] for call in calls[:3]] == [LINEAR, LINEAR, "/softmax"]
    assert calls[3]["site"].startswith("Net( (one): Linear(in_features=4, ")
    assert len(calls[3]["site"]) < 120
    assert [(role, path) for site, _, role, path in observed(found, "forward") if site.startswith("Net")] == [
        ("input", "0"), ("output", "out.0"), ("output", "out.1.loss"),
    ]  # fmt: skip
    gradients = [(role, path) for _, _, role, path in observed(found, "backward")]
    expected = [("input", "out"), ("output", "1"), ("gradient", "grad"), *([("parameter", "value")] * (not old))]
    assert gradients == expected
    grad = found.tensor(astray.Key(0, 0, "one.weight", 0, "backward", "gradient", "grad"))
    assert np.array_equal(grad, (weight.data * (1 if old else 2)).numpy())
    out = found.tensor(astray.Key(0, 0, LINEAR, 0, "forward", "output", "out"))
    assert np.array_equal(out, y.float().numpy())


def test_what_only_code_could_make_is_named_with_a_way_out(original: Callable[..., Any], tmp_path: Path) -> None:
    run = tmp_path / "demo_1690000000"
    cache = original.cache()  # type: ignore[attr-defined]
    save(run, "forward", 0, original(True, LINEAR, input=(torch.ones(2),), output=(torch.ones(2), cache)))
    path = save(run, "forward", 1, cache)
    found = open_run(run)
    assert len(found.ranks[0].tensors) == 2
    assert [text for text in found.problems if "output.1 of Linear(" in text and "hooktools.utils.Cache" in text]
    (whole,) = (text for text in found.problems if str(path) in text)
    assert "needs code to be made, and astray runs none" in whole
    assert "torch.load(file, weights_only=False), then torch.save({'module_name': data.module_name" in whole


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    run = tmp_path / "demo_1690000000"
    save(run, "forward", 0, {"module_name": "fine", "input": (torch.ones(1),), "output": Bomb()})
    save(run, "forward", 1, Bomb())
    (run / "forward/epoch-1/step-1/forward_000002.pt").write_bytes(pickle.dumps(Bomb()))
    found = open_run(run)
    assert len(found.ranks[0].calls) == 1
    assert len(found.problems) == 2
    assert not (tmp_path / "exploded").exists()


# -- damage ------------------------------------------------------------------------------------------------------------


def test_damaged_files_are_named_with_their_modules(both: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(both[0], tmp_path / "log")
    files = sorted((tmp_path / "log").rglob("forward_*.pt"))
    one = next(path for path in files if torch.load(path, weights_only=True)["module_name"] == "one")
    one.write_bytes(one.read_bytes()[:-100])
    files[-1].write_bytes(b"")
    files[-2].unlink()
    draft = files[-3].with_name(".forward_000099.pt.4711")  # what a kill may leave
    draft.write_bytes(b"PK")
    found = open_run(tmp_path / "log")
    assert not found.complete
    (cut,) = (text for text in found.problems if str(one) in text)
    assert "was cut or damaged" in cut
    assert cut.endswith("It is the forward of one.")
    assert [text for text in found.problems if str(files[-1]) in text]
    assert [text for text in found.problems if f"1 file of {only_run(tmp_path / 'log')} are not there" in text]
    assert not [text for text in found.problems if draft.name in text]
    assert len(found.ranks[0].calls) == len(open_run(both[0]).ranks[0].calls) - 3


@pytest.mark.parametrize("said", ["[1]", "3", '{"one": 1.5, "two": "x", "three": null, "four": [[3], null]}'])
def test_an_index_that_lists_no_files(both: tuple[Path, Path], tmp_path: Path, said: str) -> None:
    shutil.copytree(both[0], tmp_path / "dump")
    next((tmp_path / "dump").glob("module2path_*.json")).write_text(said)
    next((tmp_path / "dump").rglob("forward_000000.pt")).write_bytes(b"PK")
    problems = open_run(tmp_path / "dump").problems
    assert any("forward_000000.pt" in problem for problem in problems)


def test_values_that_are_lost_later_are_a_note(both: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(both[0], tmp_path / "log")
    found = open_run(tmp_path / "log")
    victim = found.ranks[0].files[0]  # type: ignore[attr-defined]
    victim.write_bytes(victim.read_bytes()[:64])
    assert found.ranks[0].tensors["min"][-1] is not None
    assert [text for text in found.ranks[0].problems if str(victim) in text]


def test_nothing_but_damage_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "demo_1690000000" / "forward" / "epoch0" / "step0"
    folder.mkdir(parents=True)
    for number in range(12):
        (folder / f"forward_{number:06d}.pt").write_bytes(b"nothing")
    with pytest.raises(RunError, match=r"None of the 12 files in .* can be read\. .*forward_000000\.pt"):
        open_run(tmp_path)
    torch.save({"module_name": "x", "output": torch.ones(1)}, folder / "forward_000012.pt")
    problems = open_run(tmp_path).problems
    assert len(problems) == 11
    assert problems[-1].startswith("2 more files of ")


def test_links_that_lead_out_are_not_followed(both: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "demo_1690000000"
    shutil.copytree(only_run(both[0]), run)
    shutil.rmtree(run / "backward")
    (run / "backward").symlink_to(only_run(both[0]) / "backward")
    assert "out" not in {path for _, _, role, path in observed(open_run(run), "backward") if role == "input"}
