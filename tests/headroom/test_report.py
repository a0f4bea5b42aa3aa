"""What `astray show RUN --risk` prints."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from astray.errors import UsageError
from astray.headroom.report import SORTS, RiskOptions, render
from astray.headroom.risk import risk

ONES = np.ones(8, np.float32)


def table(text: str) -> list[list[str]]:
    """The cells of the table, its head first."""
    body = text.split("\n\n")[1].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in body]


@pytest.fixture
def troubled(runs):
    """One place for each cause, by hand: eight steps, one rank."""
    builder = runs.Builder("runs/troubled")
    bf16 = (np.array([1.0, -1.5, 2.0, 3.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for step in range(8):
        head = np.array([1.0, -40_000.0], np.float16)
        bad = ONES.copy()
        bad[: max(0, step - 4)] = np.nan
        values = {
            "broken": bad,
            "near": head,
            "growing": np.array([1.0, 2.0 ** (step + 2)], np.float16),
            "mask": np.array([0.0, -65504.0], np.float16),
            "small": np.array([1e-6, -2e-6, 3e-6], np.float16),
            "calm": ONES * np.float32(step + 1),
        }
        for site, array in values.items():
            builder.tensor(builder.call(site, step=step), "output", "out", array)
        layer = builder.call("layer", step=step)
        builder.tensor(layer, "parameter", "weight", bf16, dtype="bfloat16")
        event = builder.call("layer.weight", "Parameter", step=step, kind="parameter", phase="backward")
        builder.tensor(event, "gradient", "grad", bf16, dtype="bfloat16")
        zeros = builder.call("dead", step=step, phase="backward")
        builder.tensor(zeros, "input", "out", np.zeros(4, np.float16))
        builder.tensor(builder.call("numbers", step=step), "output", "out", np.arange(3))
    return builder.run


def test_the_whole_text(troubled, golden):
    golden("risk.txt", render(risk(troubled)))


def test_the_whole_text_of_other_dtypes(troubled, golden):
    golden("risk_as.txt", render(risk(troubled, what_if="bfloat16,float8_e4m3fn"), width=120))


def test_the_worst_comes_first_and_each_level_is_counted(troubled):
    said = "8 steps · 1 rank; 1 non-finite · 2 overflow · 1 stuck · 1 underflow · 2 tight · 2 calm"
    assert render(risk(troubled), width=140).splitlines()[0] == f"runs/troubled        {said}"
    assert render(risk(troubled), width=100).splitlines()[:2] == ["runs/troubled", said]
    levels = [row[0] for row in table(render(risk(troubled)))[1:]]
    assert levels == ["non-finite", "overflow", "overflow", "stuck", "underflow", "tight", "tight", "calm", "calm"]


def test_why_says_what_it_is(troubled):
    said = {row[1]: row[-1] for row in table(render(risk(troubled), width=140))[1:]}
    assert said["broken"] == "1 NaN (in 3 of 8 rows)"
    assert said["near"] == "the dtype ends at 65504"
    assert said["growing"] == "+1 bits/step: ~7 steps left"
    assert said["layer"] == "no bit changed in 7 of 7 steps"
    assert said["small"] == "100 % below 6.1e-05 in step 0"
    assert said["mask"] == "exactly the limit: mask or clip?"
    assert said["dead"] == "nothing but zeros: vanished?"


def test_the_last_line_says_what_is_not_shown(troubled):
    text = render(risk(troubled), RiskOptions(top=4), width=140)
    assert text.splitlines()[-1] == (
        "Not shown: 5 more places (1 underflow, 2 tight, 2 calm; --top 0 shows all); 8 tensors of integers or booleans."
    )
    assert len(table(render(risk(troubled), RiskOptions(top=0)))) == 10


def test_places_that_show_one_tensor_are_one_row(runs):
    run = runs.program(runs.Builder())
    text = render(risk(run), RiskOptions(top=0))
    rows = table(text)[1:]
    places = len(risk(run))
    assert f"Not shown: {places - len(rows)} that show the same tensors again." in text.replace("\n", " ")
    assert Counter(row[1] for row in rows)["mlp.act"] > 0
    narrowed = table(render(risk(run), RiskOptions(top=0, match=r"^mlp$", phase="forward", role="input")))
    assert [row[1] for row in narrowed[1:]] == ["mlp"]  # it hides only behind what is shown


@pytest.mark.parametrize("sort", SORTS)
def test_every_order(troubled, sort):
    text = render(risk(troubled), RiskOptions(sort=sort), width=140)
    first = table(text)[1][1]
    assert first == {
        "absmax": "mask", "headroom": "mask", "growth": "growing", "zeros": "dead", "subnormal": "small",
        "unmoved": "layer", "update": "broken", "gradient": "layer",
    }[sort]  # fmt: skip
    head = table(text)[0]
    shown = {"growth": "growth", "update": "update/weight", "gradient": "gradient/weight", "unmoved": "unmoved"}
    assert sort not in shown or shown[sort] in head


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("targets", ["", "float16"])
def test_lines_keep_to_the_width(runs, troubled, width, targets):
    builder = runs.Builder("runs/" + "long_" * 20)
    site = "transformer.decoder.layers.11.feed_forward.down_projection"
    builder.tensor(builder.call(site), "output", "hidden_states", np.array([1.0, 60000.0], np.float16))
    for run in (troubled, builder.run):
        text = render(risk(run, what_if=targets), width=width)
        assert max(len(line) for line in text.splitlines() if "long_" not in line) <= width


def test_colour_only_when_asked_and_never_in_the_text(troubled):
    plain, coloured = (render(risk(troubled), colour=colour) for colour in (False, True))
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_several_ranks_have_a_column(runs):
    builder = runs.Builder(world_size=2)
    for number in range(2):
        rank = builder.rank(number)
        rank.tensor(rank.call("layer", micro=2, call=1), "output", "out", ONES * np.float32(number + 1))
    head, row = table(render(risk(builder.run)))
    assert dict(zip(head, row, strict=False))["rank"] == "1"
    assert row[1] == "layer #1"
    assert "0.2" in row


def test_nothing_to_tell_is_one_sentence(runs):
    bare = runs.Builder(keep="fingerprint")
    bare.tensor(bare.call("layer"), "output", "out", ONES)
    assert render(risk(bare.run), width=200) == (
        "runs/good: it was recorded without statistics, from which head-room is computed. Record it with keep='stats'."
    )
    assert render(risk(runs.Builder().run)) == "runs/good: it holds no tensor."
    whole = runs.Builder()
    whole.tensor(whole.call("layer"), "output", "out", np.arange(3))
    whole.tensor(whole.call("layer"), "output", "out", np.zeros(0, np.float32))
    assert render(risk(whole.run), width=200) == (
        "runs/good: no tensor has a head-room: 1 tensor of integers or booleans, 1 tensor without elements."
    )
    assert render(risk(whole.run, steps="7")) == "runs/good: it holds no tensor in the steps and ranks asked for."


def test_nothing_found_and_wrong_wishes(troubled):
    found = risk(troubled)
    wanted = RiskOptions(match="nowhere", phase="update", role="state")
    assert render(found, wanted).endswith(
        "No place is in phase update and in the role state and at a site like 'nowhere'."
    )
    with pytest.raises(UsageError, match="is not a regular expression"):
        render(found, RiskOptions(match="("))


def test_a_loss_scale_is_told_where_it_helps(runs):
    builder = runs.Builder()
    random = np.random.default_rng(0)
    for step in range(2):
        backward = builder.call("layer", step=step, phase="backward")
        builder.tensor(backward, "input", "out", (random.normal(size=500) * 1e-9).astype(np.float32))
        builder.tensor(backward, "output", "0", (random.normal(size=500) * 1e-6).astype(np.float32))
        builder.tensor(builder.call("layer", step=step), "output", "out", np.array([1e6, 1.0], np.float32))
    text = render(risk(builder.run, what_if="float16,bfloat16"), width=140)
    said = " ".join(text.split("\n\n")[0].split())
    assert (
        "as float16: 1 of 3 places would overflow; of 2 with gradients 2 would lose 1 % or more to zero, and 0 with a "
        "loss scale of 2^34, the largest that fits all." in said
    )
    assert "as bfloat16: 0 of 3 places would overflow." in said
    cells = {tuple(row[:2]): row[-2:] for row in table(text)[1:]}
    assert cells["layer", "forward"] == ["overflows 15×", "fits"]
    assert [row[-2] for row in table(text)[2:]] == ["100 % lost (fits ×2^34)", "~2.5 % lost (fits ×2^34)"]


def test_print_and_repr(troubled):
    found = risk(troubled)
    assert str(found) == render(found)
    assert repr(found) == ("<Risk of runs/troubled: 1 non-finite, 2 overflow, 1 stuck, 1 underflow, 2 tight, 2 calm>")
