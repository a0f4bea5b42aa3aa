"""Recording changes no bit of a Paddle program, and leaves nothing behind in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

paddle = pytest.importorskip("paddle")

import astray  # noqa: E402
from capture.paddle.paddle_programs import PROGRAMS, Program  # noqa: E402

pytestmark = pytest.mark.paddle

SETTINGS: dict[str, dict[str, Any]] = {
    "modules": {},
    "functions": {"level": "module,function", "optimizer": "gradient,state,update,weight"},
    "values": {"level": "module,function", "keep": "stats,tensors", "optimizer": "gradient,state,update,weight,calls"},
}


def run(program: Program, path: Path | None = None, **settings: Any) -> tuple[list[Any], Any]:
    paddle.seed(3)
    recorders: list[Any] = []

    def begin(model: Any) -> None:
        if path is not None:
            recorders.append(astray.record(path, model, **settings))

    numbers = program(begin, lambda: recorders[0].step() if recorders else None)
    for recorder in recorders:
        recorder.stop()
    return numbers, recorders[0] if recorders else None


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_bit_changes(name: str, settings: str, tmp_path: Path) -> None:
    plain, _ = run(PROGRAMS[name])
    recorded, recorder = run(PROGRAMS[name], tmp_path / "run", **SETTINGS[settings])
    assert len(plain) == len(recorded)
    for before, after in zip(plain, recorded, strict=True):
        assert before.tobytes() == after.tobytes()
    assert recorder.calls > 10
    missed = json.loads((tmp_path / "run/rank0/end.json").read_text())["missed"]
    assert not [entry for entry in missed if "Error" in entry[1]]
