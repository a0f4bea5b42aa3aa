"""The YAML files that the command writes: complete, right as they are, and never in the way of one that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from astray.compat.hooktools import Tracer
from astray.foreign.hooktools.comparer import main
from astray.foreign.hooktools.config import Keys
from astray.foreign.hooktools.tracer import TracerConfig


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def traced(scale: float) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    model.weight.data *= scale
    tracer = Tracer("tracer_demo.yaml", model)
    tracer.trace(epoch=0, step=0)
    model(torch.ones(2, 3)).sum().backward()
    tracer.untrace()
    return tracer.folder


def test_a_tracer_works_by_the_file_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    assert capsys.readouterr().out.startswith("Wrote tracer_demo.yaml. Edit it;")
    files = sorted(file.parent.parent.parent.name for file in traced(1.0).rglob("*.pt"))
    assert files == ["backward", "forward"]


def test_a_comparer_works_once_it_is_told_the_folders(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "tracer"]) == main(["demo", "comparer"]) == 0
    good = traced(1.0).rename("good")
    bad = traced(1.01).rename("bad")
    assert (good.name, bad.name) == ("good", "bad")
    capsys.readouterr()
    assert main(["compare", "comparer_demo.yaml"]) == 0
    said = capsys.readouterr().out
    assert "The worst" in said
    assert "l1_error" in said


def test_every_key_of_a_tracer_is_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    take = Keys.take

    def noting(self: Keys, name: str, *rest: Any) -> Any:
        asked.add(name)
        return take(self, name, *rest)

    monkeypatch.setattr(Keys, "take", noting)
    main(["demo"])
    TracerConfig.read("tracer_demo.yaml")
    keys = {line.split(":")[0].strip() for line in Path("tracer_demo.yaml").read_text().splitlines() if ":" in line}
    assert asked <= keys


def test_a_file_that_is_there_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tracer_demo.yaml").write_text("mine")
    assert main(["demo"]) == 2
    assert "tracer_demo.yaml is there already" in capsys.readouterr().err
    assert Path("tracer_demo.yaml").read_text() == "mine"
    assert main(["demo", "-o", "other.yaml"]) == main(["demo", "--force"]) == 0
    assert Path("other.yaml").read_text() == Path("tracer_demo.yaml").read_text() != "mine"


def test_a_file_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "none.yaml"]) == 2
    assert "none.yaml" in capsys.readouterr().err
