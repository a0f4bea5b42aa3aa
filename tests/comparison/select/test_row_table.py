"""The table of rows beneath the answer: what it shows, and that it fits."""

from __future__ import annotations

import re

import numpy as np
import pytest

from astray.comparison.comparison import compare
from astray.comparison.select.row_table import render

LONG = "model.decoder.layers.{}.self_attention.query_key_value.projection"
ONES = np.ones((2, 4), np.float32)


@pytest.fixture
def diff(runs):
    return compare(runs.program(runs.Builder()), runs.program(runs.Builder("runs/bad"), proj=1.001))


def table(text: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in text.split("\n\n")[1].splitlines()]


def test_the_rows_asked_for(diff):
    text = render(diff.select("wrong and phase == forward", "-error", 2))
    wrong = len(diff.select("wrong and phase == forward"))
    assert text.startswith(f"2 of {wrong} rows where wrong and phase == forward, sorted by -error\n\n")
    assert table(text) == [
        ["step", "phase", "site", "tensor", "verdict", "error", "surprise", "form"],
        ["1", "forward", "mlp.proj", "output out", "diverged", "1.0e-03", "241", "f32 4×8"],
        ["1", "forward", "mlp", "output out", "diverged", "1.0e-03", "–", "f32 4×8"],
    ]


def test_columns_that_the_filter_or_the_order_speak_of_are_shown(diff):
    head, row = table(render(diff.select("wrong and kind == module", "absmax_reference", 1)))
    assert head == ["step", "phase", "site", "tensor", "verdict", "error", "surprise", "absmax ref", "kind", "form"]
    smallest = diff.select("wrong and kind == module", "absmax_reference")["absmax_reference"].column[0]
    assert row[-3:-1] == [f"{smallest:.4g}", "module"]


def test_without_being_told_it_shows_the_first_few(diff):
    assert str(diff.table()).startswith("25 of 69 rows\n")
    assert len(render(diff.table(), most=None).splitlines()) == 69 + 3


def test_no_row(diff):
    assert render(diff.select("error > 5 and step == 1")) == "There is no row where error > 5 and step == 1."


@pytest.fixture
def wide(runs):
    """Long names, repeated calls, different kinds, a note."""
    sides = []
    for path, factor in (("runs/good", 1), ("runs/bad", 0)):
        builder = runs.Builder(path, world_size=2)
        for rank in (0, 1):
            rows = builder.rank(rank)
            for layer in range(3):
                call = rows.call(LONG.format(layer), "Linear", micro=layer, call=layer, recompute=layer == 1)
                dtype = np.float32 if factor or layer else np.float64
                rows.tensor(call, "input", "kwargs.attention_mask.0", (ONES * factor).astype(dtype))
                if factor:
                    rows.tensor(call, "output", "out", ONES)
        sides.append(builder.run)
    return compare(*sides)


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_it_fits_the_terminal(wide, width):
    for sort in (None, "-cosine", "-error,source", *(["absmax_candidate,mean_reference"] if width >= 100 else [])):
        text = render(wide.select("not agrees", sort), width=width)
        assert max(map(len, text.splitlines())) <= width, text
        assert "\x1b" not in text
    assert all(".projection" in line for line in render(wide.table(), width=120).splitlines()[3:] if "input" in line)


def test_each_row_is_told_apart(wide):
    text = render(wide.table(), width=250)
    head, *rows = table(text)
    assert head[:4] == ["rank", "step", "phase", "site"]
    assert rows[0][:5] == ["0", "0", "forward", LONG.format(0), "input kwargs.attention_mask.0"]
    assert [row[1] for row in rows[:3:2]] == ["0", "0.1"]
    assert rows[2][2:4] == ["forward again", f"{LONG.format(1)} #1"]
    assert "f32 2×4 → f64 2×4" in text
    assert "only in reference" in text


def test_colours_are_of_the_verdict_alone(diff):
    plain, painted = (render(diff.select("wrong", top=1), colour=colour) for colour in (False, True))
    assert "\x1b[31mdiverged\x1b[0m" in painted
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == plain
