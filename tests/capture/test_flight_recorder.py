"""A real model recorded into memory: the dump holds what an ordinary recording would."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.cli import main
from astray.recorder import Recorder
from astray.store import BufferedStep, FlightRecorder, RankRun
from recorded_rows import hooks_of, rows

SETTINGS: dict[str, Any] = {"level": ["module", "function"], "optimizer": ["gradient", "update"]}


def train(recorder: Recorder, model: nn.Module, steps: int = 5) -> None:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        recorder.step()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))


class Cockpit:
    """Holds the flight recorder that a `Recorder` makes through it."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def __call__(self, *given: Any, **named: Any) -> FlightRecorder:
        self.flight = FlightRecorder(*given, **named, **self._settings)
        return self.flight


@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_a_dump_compares_as_identical_with_an_ordinary_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: str
) -> None:
    model = build()
    with astray.record(tmp_path / "ordinary", model, keep=keep, **SETTINGS) as ordinary:
        train(ordinary, model)
    seen: list[int] = []

    def look(step: BufferedStep) -> None:
        rank = RankRun(0, step)
        assert (rank.call_rows >= 0).all()
        assert not step.numbers("nan").any()
        seen.append(len(rank.tensors))

    model, cockpit = build(), Cockpit(remember=3, on_step=look)
    with Recorder(tmp_path / "unused", model, writer=cockpit, keep=keep, **SETTINGS) as recorder:
        train(recorder, model)
        assert cockpit.flight.listener.wait_until_shown(4, 60)
        dump = cockpit.flight.dump(tmp_path / "dump", "five steps are done")
    assert hooks_of(model) == 0
    assert not (tmp_path / "unused").exists()
    assert dump.failure is None
    run, whole = astray.open(tmp_path / "dump"), astray.open(tmp_path / "ordinary")
    assert (run.steps, run.complete, run.problems) == ([2, 3, 4], True, [])
    assert rows_between(run) == rows_between(whole)
    assert sum(seen) == len(whole.ranks[0].tensors)
    difference = astray.compare(whole, run, steps="2:5", exact=True)
    assert {verdict for verdict, count in difference.counts.items() if count} == {"identical"}
    assert main(["compare", str(tmp_path / "ordinary"), str(tmp_path / "dump"), "--steps", "2:5", "--exact"]) == 0
    assert main(["show", str(tmp_path / "dump")]) == 0
    assert "3 steps" in capsys.readouterr().out


def rows_between(run: astray.Run) -> list[dict[str, Any]]:
    """The rows of steps 2 to 4, without where they and their values lie."""
    places = dict.fromkeys(("row", "blob_file", "blob_offset"))
    return [{**row, **places} for step in (2, 3, 4) for row in rows(run, step=step)]


def test_a_nan_is_seen_when_its_step_is_over(tmp_path: Path) -> None:
    bad: list[tuple[int, list[str]]] = []

    def look(step: BufferedStep) -> None:
        if step.numbers("nan").any():
            rank = RankRun(0, step)
            sites = rank.calls.coded("site").take(rank.call_rows[rank.tensors.numbers("nan") > 0])
            bad.append((step.step, list(dict.fromkeys(sites.tolist()))))

    model, cockpit = build(), Cockpit(on_step=look)
    writer = functools.partial(cockpit)
    with Recorder(tmp_path / "unused", model, writer=writer, phases="forward", roles="output") as recorder:
        for step in range(3):
            if step == 1:
                model[2].weight.data[0] = torch.nan
            model(torch.randn(4, 6))
            recorder.step()
            assert cockpit.flight.listener.wait_until_shown(step, 60)
            if bad:
                break
    assert bad == [(1, ["2", "3", "<root>"])]


def test_a_recording_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cockpit = Cockpit()
    recorder = Recorder(tmp_path / "unused", build(), writer=cockpit)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(recorder._adapter, "start", fail)
    with pytest.raises(RuntimeError, match="no"):
        recorder.start()
    assert cockpit.flight.nbytes == 0
    assert list(tmp_path.iterdir()) == []
