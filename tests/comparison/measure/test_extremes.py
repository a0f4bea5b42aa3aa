"""Numbers at the ends of float64: their products are not floats, and no computation with them warns or raises."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray.results.run import Run
from astray.web.detail import detail_of
from astray.web.overview import overview_of
from astray.web.views import ComparisonView, ResultView, RunView
from astray.web.wire import encode, pack
from record_builders import Builder

NUMBERS = {
    "largest": (1e308, -1e308, 1.7976931348623157e308, -1.7976931348623157e308),
    "smallest": (5e-324, -5e-324, 1e-310, 0.0),
    "both": (1e308, 5e-324, 1.0, -1e-300),
    "squares": (1e160, -1e160, 1e-160),
    "infinite": (float("inf"), 1e308, -1e308),
}
KEPT = ("stats,fingerprint", "stats,tensors", "stats,sample")
WAYS: list[dict[str, Any]] = [{}, {"exact": True}, {"by": "order"}, {"micro": "joined"}, {"metrics": ["kl"]}]


def built(chance: random.Random, keep: str) -> Run:
    """Three steps of two micro steps of a module, its backward and its optimizer, all of such numbers."""
    rows = Builder(keep=keep)

    def add(seq: int, role: str, path: str, shape: tuple[int, ...], dtype: str = "float64") -> None:
        numbers = chance.choice(list(NUMBERS.values()))
        rows.tensor(seq, role, path, np.array([chance.choice(numbers) for _ in range(6)], dtype).reshape(shape))

    for step in range(3):
        for micro in range(2):
            seq = rows.call("h", step=step, micro=micro)
            for role, path in (("input", "0"), ("parameter", "weight"), ("output", "out")):
                add(seq, role, path, (3, 2))
            seq = rows.call("h", phase="backward", step=step, micro=micro)
            for role, path in (("input", "out"), ("output", "0")):
                add(seq, role, path, (3, 2), chance.choice(("float64", "complex128")))
        seq = rows.call("h.weight", "AdamW", kind="optimizer", phase="update", step=step)
        for role, path in (("parameter", "weight"), ("input", "grad"), ("output", "weight"), ("output", "update")):
            add(seq, role, path, (3, 2))
    return rows.run


def looked_at(view: ResultView) -> None:
    encode(overview_of(view))
    pack(view.table)
    for row in range(0, len(view), 5):
        encode(detail_of(view, row))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep", KEPT)
def test_runs_of_such_numbers(tmp_path: Path, keep: str, seed: int) -> None:
    chance = random.Random(seed)
    reference, candidate = built(chance, keep), built(chance, keep)
    for number, way in enumerate([*WAYS, {"noise": candidate}]):
        found = astray.compare(reference, candidate, processes=1, **way)
        assert str(found)
        found.to_json(tmp_path / f"{number}.json")
        looked_at(ComparisonView(found))
    looked_at(RunView(reference))
    assert str(reference.alarms())
    assert str(reference.risk(what_if="float16"))
    for format in ("astray", "msprobe", *(("torch_npu", "hooktools") if "tensors" in keep else ())):
        astray.convert(reference, tmp_path / format, to=format)
        assert astray.open(tmp_path / format).steps
