"""A checkpoint read as a run: `astray.open`, `astray show`, and what each of them reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import astray
from astray.cli import main
from astray.errors import CheckpointError, RunError
from astray.records import Key
from astray.stats import Strided, measure
from astray.store import CheckpointData, open_run


def opened(path: Path) -> CheckpointData:
    run = open_run(path)
    assert isinstance(run, CheckpointData)
    return run


@pytest.fixture
def saved(tmp_path: Path, trained: dict[str, Any]) -> Path:
    torch.save(trained, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_a_row_for_each_tensor(saved: Path, trained: dict[str, Any]) -> None:
    run = opened(saved)
    assert repr(run) == f"<CheckpointRun {saved}: torch, 27 tensors, 752 bytes>"
    assert (run.steps, list(run.ranks), run.complete, run.problems) == ([0], [0], True, [])
    rank = run.ranks[0]
    assert list(rank.calls["site"])[:2] == ["model.0.weight", "model.0.bias"]
    roles = dict(zip(rank.calls["site"], rank.tensors["role"], strict=True))
    assert roles["model.1.running_mean"] == "parameter"
    assert roles["optimizer.state.3.exp_avg_sq"] == "state"
    row = list(rank.calls["site"]).index("model.2.weight")
    weight = trained["model"]["2.weight"].numpy()
    found = measure(Strided.from_numpy(weight))
    cells = rank.tensors.row(row)
    assert {name: cells[name] for name in ("mean", "l2", "count", "fingerprint", "note", "part")} == {
        "mean": found.statistics.mean,  # type: ignore[union-attr]
        "l2": found.statistics.l2,  # type: ignore[union-attr]
        "count": 12,
        "fingerprint": found.fingerprint,
        "note": None,
        "part": None,
    }
    np.testing.assert_array_equal(run.values(0, row), weight)
    key = Key(0, 0, "model.2.weight", 0, "forward", "parameter", "")
    np.testing.assert_array_equal(run.tensor(key), weight)


def test_a_table_for_others(saved: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(open_run(saved).table())
    assert table.num_rows == 27
    assert table["site"][0].as_py() == "model.0.weight"
    assert table["l2"].null_count == 0


def test_only_what_is_looked_at_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(saved)
    measured: list[str] = []
    original = run.checkpoint.measure
    monkeypatch.setattr(run.checkpoint, "measure", lambda name: measured.append(name) or original(name))
    table = run.ranks[0].tensors
    assert len(table) == 27
    assert (len(table["shape"]), table.names[0], "l2" in table) == (27, "seq", True)
    assert not measured
    table.row(4)
    table.row(4)
    assert measured == ["model.1.running_mean"]
    assert not np.isnan(table.numbers("l2")).any()
    assert len(measured) == 27
    assert table.take(slice(2)).row(1) == table.row(1)
    assert len(measured) == 27


def test_tied_tensors_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(3)
    torch.save({"a": weight, "b": weight, "c": weight.clone()}, tmp_path / "a.pt")
    run = opened(tmp_path / "a.pt")
    measured: list[str] = []
    original = run.checkpoint.measure
    monkeypatch.setattr(run.checkpoint, "measure", lambda name: measured.append(name) or original(name))
    assert run.ranks[0].tensors.numbers("l2").tolist() == [3**0.5] * 3
    assert measured == ["a", "c"]


def test_what_cannot_be_read_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from saved_checkpoints import save_distributed

    folder = save_distributed({"a": torch.ones(3)}, tmp_path / "dcp")
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    run = opened(folder)
    cells = run.ranks[0].tensors.row(0)
    assert cells["l2"] is None
    assert cells["fingerprint"] is None
    assert "__0_0.distcp ends after 100 bytes, before a part of 'a'" in cells["note"]
    with pytest.raises(CheckpointError, match="ends after 100 bytes"):
        run.values(0, 0)
    assert main(["show", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a parameter f32 3 – – – – – unread" in text
    assert "unread " + cells["note"] in text


def test_names_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["\x1b[2J\x1b[31mred", "new\nline", "\ud800", "", "naïve/ß", "\u202eright to left"]
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "a.pt")
    assert main(["show", str(tmp_path / "a.pt")]) == 0
    text = capsys.readouterr().out
    for shown in (r"\x1b[2J\x1b[31mred", r"new\nline", r"\ud800", "naïve/ß", r"\u202eright"):
        assert shown in text
    assert "\x1b" not in text


def test_files_and_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(RunError, match=r"notes\.txt is not a checkpoint: it begins neither like safetensors"):
        astray.open(tmp_path / "notes.txt")
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"t": torch.ones(1)}, tmp_path / name)
    with pytest.raises(RunError, match=r"is not a run: .* If it is a checkpoint, give the file: .*x\.safetensors"):
        astray.open(tmp_path)
    assert isinstance(astray.open(tmp_path / "x.safetensors"), CheckpointData)


def test_show(saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    plain = {
        "h.0.weight": torch.arange(6.0).reshape(2, 3),
        "h.0.bias": torch.tensor([-8.0, float("nan")], dtype=torch.bfloat16),
        "head": torch.tensor(2),
    }
    torch.save(plain, "plain.pt")
    assert main(["show", "plain.pt", "--sort", "absmax", "--top", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "plain.pt        torch · 3 tensors · 9 elements · 36 bytes",
        "",
        "name        role       kind     absmax  mean   std  min  max    l2",
        "h.0.bias    parameter  bf16 2        8    -8     0   -8   -8     8  1 NaN from [1]",
        "h.0.weight  parameter  f32 2×3       5   2.5  1.71    0    5  7.42",
        "",
        "… 1 more row. Narrow them with --match or --role, or show all with --top 0.",
    ]
    assert main(["show", "a.pt", "--match", r"exp_avg_sq$", "--top", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 + 6
    assert main(["show", "a.pt", "--risk"]) == 0
    assert main(["show", "a.pt", "--alarms"]) == 2
    assert "is a checkpoint, in which nothing was computed. `astray show a.pt --sort nan`" in capsys.readouterr().err


def test_show_names_tensors_that_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.ones(2), "sparse": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    assert main(["show", str(tmp_path / "a.pt")]) == 0
    note = " ".join(capsys.readouterr().out.split())
    assert "note sparse is not read: torch._utils._rebuild_sparse_tensor, with 2 tensors in it: it needs code" in note
