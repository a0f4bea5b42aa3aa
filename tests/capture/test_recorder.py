"""`Recorder`: save, pause, forward_end, settings that change while the program runs, and selections."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from recorded_rows import hooks_of, outline, rows
from small_models import Residual, build


def sites(run: astray.Run, **wanted: Any) -> list[str]:
    return list(dict.fromkeys(row["site"] for row in rows(run, **wanted)))


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_anything_can_be_saved_with_its_gradient(tmp_path: Path) -> None:
    model = chain()
    with astray.record(tmp_path / "run", model) as rec:
        hidden = model[:2](torch.randn(2, 4))
        rec.save("hidden", {"mine": hidden, "extra": [np.arange(3), 2.5, "text", None]})
        rec.save("hidden", hidden, gradient=False)
        model[2](hidden).sum().backward()
    run = astray.open(tmp_path / "run")
    assert outline(run, kind="custom") == [
        "hidden forward output out.mine",
        "hidden forward output out.extra.0",
        "hidden forward output out.extra.1",
        "hidden forward output out",
        "hidden backward input out.mine",
    ]
    saved = rows(run, kind="custom")
    assert [row["call"] for row in saved] == [0, 0, 0, 1, 0]
    assert saved[1]["dtype"] == "int64"
    assert saved[2]["mean"] == 2.5
    assert json.loads(saved[0]["args"]) == {
        "args": [{"mine": "<tensor>", "extra": ["<tensor>", "<tensor>", "text", None]}]
    }
    (arrived,) = rows(run, site="2", phase="backward", role="output")
    assert saved[4]["fingerprint"] == arrived["fingerprint"]


def test_saving_happens_where_it_is_said_and_never_breaks_the_program(tmp_path: Path) -> None:
    class Odd:
        def __iter__(self) -> Any:
            raise RuntimeError("not today")

    model = chain()
    with astray.record(tmp_path / "run", model) as rec:
        rec.save("odd", Odd())
        rec.save("huge", 10**40)
        rec.save("object", object())
    rec.save("late", 1.0)
    run = astray.open(tmp_path / "run")
    assert outline(run, kind="custom") == ["huge forward output out"]
    assert [run.ranks[0].calls.row(i)["site"] for i in range(3)] == ["odd", "huge", "object"]


def test_nothing_is_recorded_while_paused_and_numbers_go_on(tmp_path: Path) -> None:
    model, x = chain(), torch.randn(2, 4)
    with astray.record(tmp_path / "run", model, level=["module", "function"]) as rec:
        model(x)
        with rec.pause():
            assert not rec.recording
            assert hooks_of(model) == 0
            model(x)
            torch.exp(x)
            rec.save("quiet", x)
        model(x)
        rec.pause()
        rec.resume()
        model(x)
    run = astray.open(tmp_path / "run")
    assert [row["micro"] for row in rows(run, site="<root>", role="output")] == [0, 1, 2]
    assert not rows(run, site="/exp")
    assert not rows(run, site="quiet")


def test_gradients_of_calls_before_a_pause_are_not_recorded_during_it(tmp_path: Path) -> None:
    model, x = chain(), torch.randn(2, 4)
    with astray.record(tmp_path / "run", model) as rec:
        loss = model(x).sum()
        with rec.pause():
            loss.backward()
    assert not rows(astray.open(tmp_path / "run"), phase="backward")


@pytest.mark.parametrize("level", [["module"], ["module", "function"], ["op"]])
def test_only_what_ran_before_the_end_of_the_forward_is_recorded(level: list[str], tmp_path: Path) -> None:
    model, x = chain(), torch.randn(2, 4)
    with astray.record(tmp_path / "run", model, level=level) as rec:
        for _ in range(2):
            hidden = model[0](x)
            rec.forward_end()
            model[2](model[1](hidden)).sum().backward()
            rec.step()
    run = astray.open(tmp_path / "run")
    names = {site.split("/")[0] for site in sites(run)}
    assert names - {"0.weight", "0.bias"} == {"0"}
    for step in (0, 1):
        assert sites(run, phase="forward", step=step)
        assert sites(run, phase="backward", step=step)
        assert {row["site"] for row in rows(run, role="gradient", step=step)} == {"0.weight", "0.bias"}


def test_settings_change_when_their_file_is_edited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tmp_path / "astray.yaml"
    config.write_text("match: '^0'\n")
    model, x = chain(), torch.randn(2, 4)
    with astray.record(tmp_path / "run", model, config=config, keep="tensors") as rec:
        rewrite = iter(["level: function\n", "match: ''\nlevel: [\n", "keep: stats\nmatch: '^1'\n"])
        for _ in range(4):
            model(x)
            text = next(rewrite, None)
            if text is not None:
                config.write_text(text)
                os.utime(config, ns=(rec._engine.step + 1, rec._engine.step + 1))
            with caplog.at_level(logging.WARNING, "astray"):
                rec.step()
    run = astray.open(tmp_path / "run")
    assert sites(run, step=0) == ["0"]
    assert sites(run, step=1) == sites(run, step=2) == ["0/linear", "1/tanh", "2/linear"]
    assert sites(run, step=3) == ["1"]
    assert {row["blob_file"] for row in rows(run)} == {0}  # what was given in the program wins over the file
    assert "stay as they were" in caplog.text
    changes = [run.ranks[0].calls.row(i) for i in range(len(run.ranks[0].calls))]
    changes = [
        (call["step"], json.loads(call["args"])["level"]) for call in changes if call["site"] == "astray/settings"
    ]
    assert changes == [(1, ["function"]), (3, ["module"])]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"match": r"^[02]$"}, ["0", "2"]),
        ({"match": r"\d", "ignore": "1"}, ["0", "2"]),
        ({"classes": "Tanh"}, ["1"]),
        ({"scope": ("0", "1")}, ["0", "1"]),
        ({"classes": ["Tanh", "Sequential"]}, ["1", "<root>"]),
        ({"level": "function", "classes": "linear"}, ["0/linear", "2/linear"]),
        ({"level": "op", "classes": "aten.tanh"}, ["1/aten.tanh"]),
        ({"level": ["module", "function"], "scope": ("1", "1")}, ["1", "1/tanh"]),
    ],
)
def test_sites_are_selected(settings: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    model, x = chain(), torch.randn(2, 4)
    with astray.record(tmp_path / "run", model, **settings) as rec:
        for _ in range(2):
            model(x).sum().backward()
            rec.step()
    run = astray.open(tmp_path / "run")
    assert sorted(sites(run, phase="forward", step=1)) == expected
    assert {site for site in sites(run, phase="backward") if "." not in site or "/" in site} <= set(expected)


@pytest.mark.parametrize(
    ("settings", "met"),
    [
        ({"match": "nosuch"}, "<root>, 0, 1, 2"),
        ({"scope": ("h.0", "h.1")}, "<root>, 0, 1, 2"),
        ({"level": "function", "classes": "softmax"}, "/ones, 0/linear, 1/tanh, 2/linear"),
    ],
)
def test_a_selection_that_fits_nothing_is_answered_with_what_there_was(
    settings: dict[str, Any], met: str, tmp_path: Path
) -> None:
    model = chain()
    with astray.record(tmp_path / "run", model, **settings) as rec:
        model(torch.ones(1, 4))
    (missed,) = astray.open(tmp_path / "run").ranks[0].end.missed
    assert missed.what == "any call"
    assert missed.why.endswith(f"such as {met}")
    assert missed.why in rec.summary()


def test_phases_and_roles_are_selected(tmp_path: Path) -> None:
    model, x = chain(), torch.randn(2, 4)
    for name, settings in {"a": {"phases": "backward"}, "b": {"roles": ["output", "gradient"]}}.items():
        with astray.record(tmp_path / name, model, **settings):
            model(x).sum().backward()
    backward = rows(astray.open(tmp_path / "a"))
    assert {row["phase"] for row in backward} == {"backward"}
    assert {row["site"] for row in backward} == {"<root>", "0", "1", "2", "0.weight", "0.bias", "2.weight", "2.bias"}
    assert {row["role"] for row in rows(astray.open(tmp_path / "b"))} == {"output", "gradient"}


def test_limits_hold_and_what_they_left_out_is_written_down(tmp_path: Path) -> None:
    model, x = chain(), torch.randn(2, 4)
    limits = {"max_tensors_per_step": 10, "max_tensors": 25, "max_bytes": 300, "keep": "tensors"}
    with astray.record(tmp_path / "run", model, **limits) as rec:
        for _ in range(4):
            model(x)
            rec.step()
    run = astray.open(tmp_path / "run")
    found = rows(run)
    assert [sum(row["step"] == step for row in found) for step in range(4)] == [10, 10, 5, 0]
    end = run.ranks[0].end
    assert end.value_bytes <= 300
    assert {(missed.what, missed.why) for missed in end.missed} == {
        ("tensors", "beyond max_tensors_per_step=10"),
        ("tensors", "beyond max_tensors=25"),
        ("the values of tensors", "beyond max_bytes=300"),
    }


def test_only_the_slice_is_kept_and_the_statistics_are_of_the_whole(tmp_path: Path) -> None:
    model, x = chain(), torch.arange(8.0).view(2, 4)
    with astray.record(tmp_path / "run", model, keep="tensors", slice="0, ..., :2", level="function"):
        model(x)
        x.view(4, 2).exp()
    run = astray.open(tmp_path / "run")
    first = rows(run, site="0/linear", role="input")[0]
    assert run.values(0, first["row"]).tolist() == [[0.0, 1.0]]
    assert first["max"] == 7.0
    again = rows(run, site="/exp", role="input")[0]  # the same memory in another shape has another slice
    assert run.values(0, again["row"]).tolist() == [[0.0, 1.0]]
    assert rows(run, site="/exp", role="output")[0]["part"] == "0:1, ..., :2"


def test_a_rank_that_is_left_out_runs_bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = chain()
    with astray.record(tmp_path / "run", model, ranks=[0]) as rec:
        assert hooks_of(model) == 0
        assert not rec.recording
        model(torch.ones(1, 4))
        rec.save("x", 1)
        rec.forward_end()
        rec.step()
        rec.flush()
    assert "leaves this one out" in rec.summary()
    assert not (tmp_path / "run").exists()


def test_steps_that_are_not_asked_for_have_no_hooks(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model, steps="1") as rec:
        for step in range(3):
            assert (hooks_of(model) > 0) == (step == 1)
            model(torch.randn(2, 6)).sum().backward()
            rec.step()
    assert astray.open(tmp_path / "run").steps == [1]
