"""Dumps that were cut, mistyped, or made to harm: what is whole is read, and the rest is a sentence."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

import astray
from astray.errors import CompareError, RunError
from astray.foreign.msprobe import open_dump, recognises
from astray.foreign.msprobe.files import read_whole_pairs
from astray.store import RunData
from msprobe_cases import CASES, keyed


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """The folder of a rank with tensors."""
    shutil.copytree(CASES / "L0-tensor", tmp_path / "dump")
    return tmp_path / "dump/step0/proc7"


def edit(folder: Path, change: Any) -> None:
    path = folder / "dump.json"
    said = json.loads(path.read_text())
    change(said["data"])
    path.write_text(json.dumps(said))


def values_of(run: RunData) -> list[Any]:
    """Everything that can be asked of a run is asked."""
    for rank in run.ranks.values():
        assert len(rank.calls) == len([rank.calls.row(at) for at in range(len(rank.calls))])
        found = [rank.tensors.row(at) for at in range(len(rank.tensors))]
    repr(run)
    return found


@pytest.mark.parametrize("data", ["1.5", "null", "[]", '"a"', "true"])
def test_a_cut_dump_whose_entries_are_none(dump: Path, data: str) -> None:
    (dump / "dump.json").write_text(f'{{"task": "tensor", "data": {data}, "x": ')
    assert any("was cut in the middle: the 0 entries before" in problem for problem in open_dump(dump).problems)


def test_a_cut_dump_is_read_up_to_the_cut(dump: Path) -> None:
    said = (dump / "dump.json").read_text().rstrip()
    whole = json.loads(said)["data"]
    shutil.rmtree(dump / "dump_tensor_data")  # or rows would be made from the names of files
    ends = {
        name: said.index(json.dumps({name: entry})[1:-1]) + len(json.dumps({name: entry})) - 2
        for name, entry in whole.items()
    }
    for place in [*range(0, len(said), 397), len(said) - 2, len(said) - 1]:
        (dump / "dump.json").write_text(said[:place])
        run = open_dump(dump)
        read = set(run.ranks[0].entries.values())  # type: ignore[attr-defined]
        calls = {name for name, end in ends.items() if end <= place and leaves_of(whole[name])}
        assert {name for name in read if name in ends and leaves_of(whole[name])} >= calls
        assert len(run.ranks[0].tensors) == sum(leaves_of(whole[name]) for name, end in ends.items() if end <= place)
        assert any("was cut in the middle" in problem for problem in run.problems)
        assert not run.complete


def leaves_of(value: Any) -> int:
    """How many tensors there are in a value of dump.json."""
    if isinstance(value, dict) and "dtype" in value:
        return 1
    return sum(map(leaves_of, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "data": {"b": [1], "c": 2', {"a": 1, "data": {"b": [1]}}),
        ('{"a": 1, "data": {"b": [1], "c": "x"', {"a": 1, "data": {"b": [1], "c": "x"}}),
        ('{"data": {"b": NaN}', {"data": {"b": None}}),
        ('{"data": {"b": 1}, "z": {"y": 1, "x": ', {"data": {"b": 1}}),
        ('{"a": 1', {}),
        ('{"a"', {}),
        ('{"a\\', {}),
        ('{"a" 1', {}),
        (" {", {}),
        ("", {}),
        ('{"a": 1, "b": }', {"a": 1}),
        ('{"data": "x", "b": [', {"data": "x"}),
    ],
)
def test_the_whole_pairs_of_a_cut_document(text: str, expected: dict[str, Any]) -> None:
    found = read_whole_pairs(text, "data")
    assert json.loads(json.dumps(found).replace("NaN", "null")) == expected


def test_files_without_entries_become_rows(dump: Path) -> None:
    before = keyed(open_dump(dump).ranks[0])
    data = dump / "dump_tensor_data"
    for number, file in enumerate(sorted(data.iterdir())):
        os.utime(file, (number, number))
    (dump / "dump.json").write_text('{"task": "tensor", "level": "L0", "framework": "pytorch", "data": {}}')
    (dump / "construct.json").unlink()
    (dump / "stack.json").unlink()
    run = open_dump(dump)
    after = keyed(run.ranks[0])
    assert {key: row["fingerprint"] for key, row in after.items()} == {
        key: row["fingerprint"] for key, row in before.items()
    }
    assert not run.complete
    problem = "does not mention 43 files in dump_tensor_data: the program was stopped before it had written that."
    assert problem in run.problems[0]
    (data / "odd.pt").write_bytes(b"")
    assert any("holds 1 file of no entry, left out" in problem for problem in open_dump(dump).problems)


def test_files_that_are_not_there_leave_the_statistics(dump: Path) -> None:
    shutil.rmtree(dump / "dump_tensor_data")
    run = open_dump(dump)
    rows = keyed(run.ranks[0]).values()
    assert {row["note"] for row in rows if "weight" in (row["note"] or "")}
    assert all("is missing in dump_tensor_data" in row["note"] for row in rows)
    assert all(row["std"] is None for row in rows)
    assert any("lacks 43 files" in problem and "have their statistics alone" in problem for problem in run.problems)


@pytest.mark.parametrize("name", ["../../../../secret.pt", "/etc/passwd", "a\0b.pt"])
def test_nothing_outside_of_the_folder_is_read(dump: Path, name: str) -> None:
    def change(data: dict[str, Any]) -> None:
        data["Module.norm.LayerNorm.forward.0"]["output"][0]["data_name"] = name

    edit(dump, change)
    row = keyed(open_dump(dump).ranks[0])[0, 0, "module", "norm", "LayerNorm", 0, "forward", "output", "out"]
    assert "leads out of" in row["note"] or "cannot be followed" in row["note"]
    assert row["std"] is None


def test_links_that_lead_out_are_not_followed(dump: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.pt"
    file = dump / "dump_tensor_data/Module.norm.LayerNorm.forward.0.output.0.pt"
    file.rename(secret)
    file.symlink_to(secret)
    row = keyed(open_dump(dump).ranks[0])[0, 0, "module", "norm", "LayerNorm", 0, "forward", "output", "out"]
    assert "leads out of" in row["note"]
    (dump / "dump.json").rename(tmp_path / "other.json")
    (dump / "dump.json").symlink_to(tmp_path / "other.json")
    assert any("leads out of" in problem for problem in open_dump(dump).problems)
    (tmp_path / "dump/step3").symlink_to(tmp_path)
    assert open_dump(tmp_path / "dump").steps == [0]


class Harm:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize("content", ["pickle", "zip", "text", "empty", "other shape"])
def test_files_that_are_no_tensors(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.chdir(tmp_path)
    file = dump / "dump_tensor_data/Module.norm.LayerNorm.forward.0.output.0.pt"
    if content == "pickle":
        file.write_bytes(pickle.dumps(Harm()))
    elif content == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x/data.pkl", pickle.dumps(Harm()))
    elif content == "other shape":
        shutil.copy(dump / "dump_tensor_data/Module.norm.LayerNorm.forward.0.parameters.weight.pt", file)
    else:
        file.write_bytes(b"no tensor" * (content == "text"))
    run = open_dump(dump)
    rows = keyed(run.ranks[0])
    row = rows[0, 0, "module", "norm", "LayerNorm", 0, "forward", "output", "out"]
    assert str(file) in row["note"]
    assert row["max"] is not None  # what the dump says of it
    assert row["note"] in run.ranks[0].problems
    assert not (tmp_path / "harmed").exists()
    assert sum(one["note"] is None for one in rows.values()) == 42


@pytest.mark.parametrize("place", ["data", "entry", "group", "leaf", "shape", "dtype", "deep", "name", "parent"])
@pytest.mark.parametrize("value", [None, -1, "text", [], {"a": {"b": 1}}, [-1]])
def test_wrong_types_anywhere_are_no_traceback(dump: Path, place: str, value: Any) -> None:
    def change(data: dict[str, Any]) -> None:
        entry = data["Module.norm.LayerNorm.forward.0"]
        if place == "entry":
            data["Module.norm.LayerNorm.forward.0"] = value
        elif place == "group":
            entry.update(dict.fromkeys(("input_args", "input_kwargs", "output", "parameters"), value))
        elif place == "leaf":
            entry["output"][0] = value
        elif place in ("shape", "dtype"):
            entry["output"][0][place] = value
        elif place == "deep":
            entry["output"][0].update(
                dict.fromkeys(("Max", "Min", "Mean", "Norm", "md5", "data_name", "placements"), value)
            )
        elif place == "name":
            data[str(value)] = entry

    if place == "data":
        said = json.loads((dump / "dump.json").read_text())
        (dump / "dump.json").write_text(
            json.dumps(said | {"data": value, "task": value, "framework": value, "astray": value})
        )
    elif place == "parent":
        for name in ("construct.json", "stack.json"):
            said = json.loads((dump / name).read_text())
            (dump / name).write_text(json.dumps(dict.fromkeys(said, value)))
    else:
        edit(dump, change)
    run = open_dump(dump)
    values_of(run)
    with contextlib.suppress(CompareError):  # where nothing is left to compare
        astray.compare(CASES / "L0-tensor", run)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"3", b"nonsense", b"\xff\xfe", b"{" * 100_000, b'{"data": ' * 2000, b'{"data": {"a": NaN']
)
@pytest.mark.parametrize("name", ["dump.json", "construct.json", "stack.json", "debug.json"])
def test_files_that_are_no_json(dump: Path, name: str, content: bytes) -> None:
    (dump / name).write_bytes(content)
    run = open_dump(dump)
    values_of(run)
    assert any(str(dump / name) in problem for problem in run.problems)


def test_a_circle_of_parents_ends(dump: Path) -> None:
    names = list(json.loads((dump / "construct.json").read_text()))
    circle = dict(zip(names, [*names[1:], names[0]], strict=True))
    (dump / "construct.json").write_text(json.dumps(circle))
    assert len(values_of(open_dump(dump))) == 43


def test_what_is_not_a_dump_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "step0/rank0").mkdir(parents=True)
    (tmp_path / "rank").write_text("")
    assert not recognises(tmp_path)
    assert not recognises(tmp_path / "rank")
    (tmp_path / "debug.json").write_text('{"level": 3}')  # of anything
    assert not recognises(tmp_path)
    (tmp_path / "debug.json").unlink()
    with pytest.raises(RunError, match=r"is not a dump of msprobe: it has no step0/rank0 with a dump\.json in it\."):
        open_dump(tmp_path)
    with pytest.raises(RunError, match="is not a run"):
        astray.open(tmp_path)


@pytest.mark.parametrize("said", ["-1", "+f", " f", "0x-5", "1_0", "d7f8\ud800", "", "zz", "-" * 16])
def test_a_checksum_that_is_not_a_hexadecimal_number(dump: Path, said: str) -> None:
    def change(data: dict[str, Any]) -> None:
        leaf = data["Module.norm.LayerNorm.forward.0"]["output"][0]
        del leaf["data_name"]
        leaf["md5"] = said

    edit(dump, change)
    rank = open_dump(dump).ranks[0]
    assert keyed(rank)[0, 0, "module", "norm", "LayerNorm", 0, "forward", "output", "out"]["fingerprint"] is None


@pytest.mark.parametrize("depth", [100, 400, 880])
def test_values_nested_without_end(dump: Path, depth: int) -> None:
    def change(data: dict[str, Any]) -> None:
        nested: list[Any] = []
        for _ in range(depth):
            nested = [nested]
        entry = data["Module.norm.LayerNorm.forward.0"]
        entry["input_args"] += [{"type": "torch.Size", "value": nested}, {"type": "list", "value": nested}]
        entry["output"][0] |= {"device_mesh": nested, "placements": [{"Shard": {"dim": nested}}]}
        data["Module.norm.LayerNorm.backward.0"]["output"][0]["shape"] = nested

    edit(dump, change)
    run = open_dump(dump)
    values_of(run)
    astray.compare(CASES / "L0-tensor", run, processes=1)
    astray.convert(run, dump.parent / "again", to="msprobe")


def test_a_shape_of_more_bytes_than_can_be_counted(dump: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["Module.norm.LayerNorm.forward.0"]["output"][0] |= {"shape": [1 << 60], "dtype": "torch.float64"}

    edit(dump, change)
    assert any("the form of a tensor" in problem for problem in open_dump(dump).problems)
