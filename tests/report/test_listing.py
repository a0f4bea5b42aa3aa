"""What `astray show` prints of one run."""

from __future__ import annotations

import re

import numpy as np
import pytest

from astray.errors import UsageError
from astray.records import MissedTensor
from astray.report.listing import ListingOptions, render
from astray.steps import StepSelection
from astray.store import End
from astray.store.run_info import Flight

ONES = np.ones(8, np.float32)


@pytest.fixture
def run(runs):
    return runs.program(runs.Builder())


def table(text: str) -> list[list[str]]:
    """The cells of the table, its head first."""
    body = text.split("\n\n")[1].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in body]


def test_the_header_says_what_the_run_is(run):
    lines = render(run, ListingOptions()).splitlines()
    assert lines[0] == "runs/good        3 steps · 1 rank · 36 calls · 69 tensors · complete"
    assert lines[1].split() == ["recorded", "with", "no", "framework"]


def test_settings_and_command_are_shown(runs):
    builder = runs.Builder()
    builder.tensor(builder.call("layer"), "output", "out", ONES)
    run = builder.run
    run.info.framework, run.info.versions = "torch", {"torch": "2.13"}
    run.info.created = "2026-01-01T00:00:00+00:00"
    run.info.command = ["train.py", "--lr", "0.1"]
    run.info.settings = {"level": "module", "keep": ["stats", "fingerprint"]}
    assert render(run, ListingOptions()).splitlines()[1:4] == [
        "  recorded   2026-01-01T00:00:00+00:00 with torch 2.13",
        "  command    train.py --lr 0.1",
        "  settings   level module, keep stats+fingerprint",
    ]


def test_a_perturbed_run_says_so(runs):
    builder = runs.Builder()
    builder.tensor(builder.call("layer"), "output", "out", ONES)
    run = builder.run
    run.info.settings = {"level": "module", "perturb": 3}
    assert render(run, ListingOptions()).splitlines()[2:4] == [
        "  perturbed  its inputs, by roundings (seed 3): for astray compare --noise",
        "  settings   level module",
    ]


def test_a_flight_recording_says_why_it_was_written(runs):
    builder = runs.Builder()
    builder.tensor(builder.call("layer"), "output", "out", ONES)
    run = builder.run
    written = "2026-01-01T00:00:05+00:00"
    run.info.flight = Flight(why="a NaN in step 412", rank=0, written=written, remember=5, max_bytes=1 << 20)
    assert render(run, ListingOptions()).splitlines()[2] == f"  written    {written} from memory: a NaN in step 412"
    run.info.flight.rank, run.info.world_size = 3, 4
    assert (
        render(run, ListingOptions()).splitlines()[2]
        == f"  written    {written} from memory, by rank 3: a NaN in step 412"
    )


def test_what_was_missed_and_what_is_wrong_is_shown(runs):
    builder = runs.Builder()
    builder.tensor(builder.call("layer"), "output", "out", ONES)
    builder.rank().end = End(complete=True, missed=[MissedTensor("calls of layer", "they were compiled", 3)])
    builder.rank().problems.append("Something is not there.")
    text = render(builder.run, ListingOptions())
    assert "  note       Something is not there.\n" in text
    assert "  missed     calls of layer: they were compiled (3×)\n" in text


def test_rows_are_in_order_of_observation(run):
    head, first, second, *rest = table(render(run, ListingOptions()))
    assert head == ["step", "phase", "site", "tensor", "kind", "mean", "std", "min", "max", "l2"]
    assert first[:5] == ["0", "forward", "<root>", "input 0", "f32 4×8"]
    assert second[2] == "mlp"
    assert len(rest) == 23


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [
        (ListingOptions(top=0), 69),
        (ListingOptions(top=0, steps=StepSelection.parse("1:3")), 46),
        (ListingOptions(top=0, match=r"proj$"), 15),
        (ListingOptions(top=0, match=r"proj$", phase="backward"), 6),
        (ListingOptions(top=0, role="gradient"), 6),
        (ListingOptions(top=0, rank=0), 69),
        (ListingOptions(top=5), 5),
    ],
)
def test_filters(run, wanted, rows):
    assert len(table(render(run, wanted))) == rows + 1


def test_more_rows_than_shown_are_counted(run):
    assert "… 64 more rows. Narrow them" in render(run, ListingOptions(top=5))
    assert "… 1 more row. Narrow them" in render(run, ListingOptions(top=68))
    assert "…" not in render(run, ListingOptions(top=69))


def test_nothing_found_says_what_was_looked_for(run):
    text = render(run, ListingOptions(match="nowhere", role="state", phase="forward", steps=StepSelection.parse("7")))
    assert text.endswith(
        "No tensor is in phase forward and in the role state and at a site like 'nowhere' and in steps 7."
    )


def test_an_empty_run(runs):
    assert render(runs.Builder().run, ListingOptions()).endswith("It holds no tensor.")


def test_wrong_wishes(run):
    with pytest.raises(UsageError, match=r"has no rank 4\. It has 0"):
        render(run, ListingOptions(rank=4))
    with pytest.raises(UsageError, match="is not a regular expression"):
        render(run, ListingOptions(match="("))


def test_sorting_is_by_magnitude_with_the_unmeasured_last(runs):
    builder = runs.Builder()
    for site, value in (("small", 1), ("negative", -3), ("nothing", None), ("large", 2)):
        rest = {"keep": {"fingerprint"}} if value is None else {}
        builder.tensor(builder.call(site), "output", "out", ONES * np.float32(value or 0), **rest)
    sites = [row[2] for row in table(render(builder.run, ListingOptions(sort="mean")))[1:]]
    assert sites == ["negative", "large", "small", "nothing"]


def test_several_ranks_have_a_column(runs):
    builder = runs.Builder(world_size=2)
    for rank in range(2):
        runs.program(builder, rank=rank, steps=1)
    head, first, *rest = table(render(builder.run, ListingOptions(top=0)))
    assert (head[0], first[0], rest[-1][0]) == ("rank", "0", "1")
    assert {row[0] for row in table(render(builder.run, ListingOptions(rank=1, top=0)))[1:]} == {"1"}


def test_what_is_not_finite_and_notes_stand_at_the_end(runs):
    builder = runs.Builder()
    values = ONES.copy()
    values[:3] = np.nan, np.nan, np.inf
    builder.tensor(builder.call("broken", call=2, micro=1, recompute=True), "output", "out", values)
    builder.tensor(builder.call("odd"), "output", "out", ONES, note="a view", keep={"fingerprint"})
    _, broken, odd = table(render(builder.run, ListingOptions()))
    assert broken[:3] == ["0.1", "forward again", "broken #2"]
    assert broken[-1] == "2 NaN, 1 Inf from [0]"
    assert odd[-2:] == ["–", "a view"]


def deep(runs):
    builder = runs.Builder("runs/a_rather_long_name_of_a_run")
    site = "transformer.decoder.layers.11.feed_forward.down_projection"
    builder.tensor(builder.call(site), "output", "out", (ONES / 12345).astype(np.float32))
    values = ONES.copy()
    values[0] = np.nan
    builder.tensor(builder.call(site), "input", "kwargs.attention_mask", values)
    builder.tensor(builder.call("odd"), "output", "out", ONES, note="not measured: " + "a long story " * 5)
    builder.rank().problems.append("The file of this run is not there, and this is a long sentence about that. " * 2)
    for _ in range(3):
        builder.tensor(builder.call("more"), "output", "out", ONES)
    return builder.run


@pytest.mark.parametrize(("width", "numbers"), [(60, 0), (100, 1), (200, 5)])
def test_lines_keep_to_the_width(runs, width, numbers):
    text = render(deep(runs), ListingOptions(top=4), width=width)
    assert max(map(len, text.splitlines())) <= width
    head = table(text)[0]
    shown = [name for name in head if name in ("mean", "std", "min", "max", "l2")]
    assert shown == ["mean", "std", "min", "max", "l2"][:numbers]
    assert "1 NaN" in text
    assert ("transformer.decoder.layers.11.feed_forward.down_projection" in text) == (width == 200)


def test_a_narrow_table_keeps_its_numbers_where_there_is_room(run):
    assert table(render(run, ListingOptions(), width=80))[0][-3:] == ["kind", "mean", "std"]


def test_colour_only_when_asked_and_never_in_the_text(runs):
    plain, coloured = (render(deep(runs), ListingOptions(), colour=colour) for colour in (False, True))
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_what_it_is_sorted_by_is_shown_even_on_a_narrow_terminal(runs) -> None:
    run = runs.program(runs.Builder())
    for width in (60, 100):
        text = render(run, ListingOptions(sort="absmax", top=3), width=width)
        assert "absmax" in text
        assert max(map(len, text.splitlines())) <= width
