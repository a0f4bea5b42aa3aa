"""`astray replay` as a person meets it: output, exit codes, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.cli import main
from replay import faults


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`right`, three steps of a small model; `wrong`, in which one tile of the second layer is off."""
    folder = tmp_path_factory.mktemp("runs")
    wrong_tile = faults.Fault("addmm.default", 1, faults.wrong_tile, "2/linear")
    for name, fault in (("right", None), ("wrong", faults.Planted(wrong_tile))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
        with astray.record(folder / name, model, level="function", keep="stats,tensors") as recorder:
            for _ in range(3):
                given = torch.randn(48, 32).bfloat16()
                if fault is None:
                    model(given).float().square().mean().backward()
                else:
                    with fault:
                        model(given).float().square().mean().backward()
                recorder.step()
    return folder


def said(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert main(["replay", *words]) == code
    return capsys.readouterr().out


def test_a_healthy_run_says_so_and_exits_with_0(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 0, str(runs / "right"))
    assert "24 of 24 calls replayed" in text
    assert "✓ Nothing stands out" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_what_stands_out_comes_first_and_exits_with_1(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, 1, str(runs / "wrong")).splitlines()
    assert lines[2] == "✗ 1 call gives what its inputs do not explain, first 2/linear#0"
    head, first = lines[5:7]
    assert head.split() == [
        "step", "site", "phase", "tensor", "dtype", "ulps", "plain", "ratio", "surprise", "where"
    ]  # fmt: skip
    assert first.split()[:5] == ["0", "2/linear#0", "forward", "out", "bf16"]
    assert first.endswith("[16:32, 32:48]")
    assert "surprise     how many times as far off as rounding explains" in "\n".join(lines)


def test_one_call_is_shown_in_detail(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 1, str(runs / "wrong"), "2/linear#0", "--steps", "0")
    assert "2/linear#0    torch.nn.functional.linear, step 0, micro step 0, rank 0" in text
    assert "rows 16:32, columns 32:48" in text
    assert "times as far off as rounding explains" in text
    assert text.count("of what rounding explains") == 3  # its gradients
    assert "backward 1" in text


def test_steps_and_sites_narrow_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "8 of 8 calls" in said(capsys, 0, str(runs / "wrong"), "--steps", "1", "--rank", "0")
    assert "3 of 3 calls" in said(capsys, 0, str(runs / "wrong"), "0")
    assert said(capsys, 1, str(runs / "wrong"), "2/linear#0", "--top", "1").count("2/linear#0    torch") == 1
    text = said(capsys, 1, str(runs / "wrong"), "--top", "2")
    assert "… 22 more calls. --top 0 shows all." in text
    assert "more calls" not in said(capsys, 1, str(runs / "wrong"), "--top", "0")


def test_json_has_every_call_and_tensor(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content: dict[str, Any] = json.loads(said(capsys, 1, str(runs / "wrong"), "--json"))
    assert content["stand out"] == 1
    assert content["left out"] == []
    assert len(content["calls"]) == 24
    first = content["calls"][0]
    assert (first["site"], first["call"], first["step"], first["stands out"]) == ("2/linear", 0, 0, True)
    worst = first["tensors"][0]
    assert (worst["phase"], worst["path"], worst["tile"]) == ("forward", "out", [16, 32, 32, 48])
    assert worst["surprise"] > 1 > first["tensors"][1]["surprise"]


BAD = {
    "another site": (["right", "2/lineal"], "has no call '2/lineal'. Did you mean '2/linear'?"),
    "another call": (["right", "2/linear#5"], "has no call '2/linear#5'"),
    "another rank": (["right", "--rank", "1"], "has no rank 1; it has 0."),
    "another step": (["right", "--steps", "7"], "has no calls in step 7; it has steps 0, 1, 2."),
    "no steps": (["right", "--steps", "a:b"], "is not a selection of steps"),
    "negative": (["right", "--top", "-1"], "Give how many calls to show"),
    "no run": (["nothing"], "does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_a_sentence(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run, *words), sentence = BAD[name]
    assert main(["replay", str(runs / run), *words]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert sentence in error
    assert error.startswith("astray replay: ")


def test_without_values_it_exits_with_2_and_says_how_to_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 4)
    with astray.record(tmp_path / "r", model, level="function"):
        model(torch.ones(2, 4))
    text = said(capsys, 2, str(tmp_path / "r"))
    assert "No call could be replayed." in text
    assert "not replayed 2 calls: the values of a tensor were not kept: record with keep=tensors" in text


def test_a_checkpoint_and_a_run_of_another_framework_are_told(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    other = tmp_path / "other"
    other.mkdir()
    info = json.loads((runs / "right" / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(info | {"framework": "paddle"}))
    (other / "rank0").symlink_to(runs / "right" / "rank0")
    for path, fact in ((tmp_path / "model.pt", "no framework"), (other, "recorded from paddle")):
        assert main(["replay", str(path)]) == 2
        error = capsys.readouterr().err
        assert fact in error
        assert "only calls of PyTorch can be replayed" in error.replace("\n", " ")


def test_a_dump_of_another_tool_is_replayed_as_far_as_it_has_values(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(runs / "wrong"), str(tmp_path / "dump"), "--to", "msprobe"]) == 0
    capsys.readouterr()
    text = said(capsys, 1, str(tmp_path / "dump"))
    assert "21 of 24 calls replayed" in text
    assert "first 2/linear#0" in text
    assert "random numbers whose generator was not recorded" in text
