"""The states of random generators, kept with the calls that draw from them: nothing is drawn, and nothing compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.capture.pytorch.calls.generators import may_draw
from astray.comparison.rows import RowReader, StringTable, Vocabularies, read_rows
from astray.records import GENERATOR
from astray.results.run import Run
from recorded_rows import rows


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.line(x))
        return F.dropout(x, 0.5, training=False) + torch.rand(8, generator=OWN)


OWN = torch.Generator()


def recorded(folder: Path, seed: int = 0, **options: Any) -> tuple[torch.Tensor, Run]:
    """What the program computes and draws afterwards, and the run."""
    torch.manual_seed(seed)
    OWN.manual_seed(4)
    model = Drops()
    given = torch.ones(2, 8)
    options = {"level": "function", "keep": "stats,tensors"} | options
    with astray.record(folder, model, **options) as recorder:
        out = model(given)
        recorder.step()
    return torch.cat([out.detach().flatten(), torch.rand(4), torch.rand(4, generator=OWN)]), astray.open(folder)


def states(run: Run) -> list[str]:
    return [f"{row['site']} {row['path']}" for row in rows(run, role="state")]


def test_calls_that_draw_have_the_states_of_their_generator_and_others_none(tmp_path: Path) -> None:
    _, run = recorded(tmp_path / "r")
    assert states(run) == [f"{site} {path}" for site in ("drop/dropout", "<root>/rand") for path in GENERATOR]
    torch.manual_seed(0)
    Drops()
    before, after = (row["row"] for row in rows(run, role="state", site="drop/dropout"))
    values = run.ranks[0].verified(before)
    assert values is not None
    assert torch.equal(torch.from_numpy(values.copy()), torch.get_rng_state())
    F.dropout(torch.ones(2, 8), 0.5)
    assert bytes(run.ranks[0].verified(after)) == bytes(torch.get_rng_state().numpy())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "stats"}, {"keep": "stats,sample"}, {"level": "module"}, {"level": "op"}, {"roles": "input,output"},
        {"match": "line"},
    ],
    ids=str,
)  # fmt: skip
def test_elsewhere_nothing_is_kept_and_no_bit_changes(options: dict[str, str], tmp_path: Path) -> None:
    expected, _ = recorded(tmp_path / "a")
    found, run = recorded(tmp_path / "b", **options)
    assert torch.equal(found, expected)
    assert not states(run)


def test_a_recording_draws_nothing(tmp_path: Path) -> None:
    found, _ = recorded(tmp_path / "r")
    torch.manual_seed(0)
    OWN.manual_seed(4)
    out = Drops()(torch.ones(2, 8))
    assert torch.equal(found, torch.cat([out.detach().flatten(), torch.rand(4), torch.rand(4, generator=OWN)]))


def test_states_are_no_part_of_a_comparison(tmp_path: Path) -> None:
    _, run = recorded(tmp_path / "a")
    _, other = recorded(tmp_path / "b", seed=1)
    _, without = recorded(tmp_path / "c", keep="stats")
    read = read_rows(run.ranks[0], Vocabularies(StringTable), RowReader())
    assert len(read) == len(run.ranks[0].tensors) - 4
    same, differing = astray.compare(run, without), astray.compare(run, other)
    assert same.first is None
    assert not len(same.select("role == state"))
    assert not len(differing.select("role == state"))


def test_a_generator_that_cannot_be_read_is_noted_and_the_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("it has no state")

    monkeypatch.setattr("astray.capture.pytorch.calls.generators._generators", fails)
    expected, _ = recorded(tmp_path / "a", keep="stats")
    found, run = recorded(tmp_path / "b")
    assert torch.equal(found, expected)
    assert not states(run)
    end = run.ranks[0].end
    assert end is not None
    assert [(each.what, each.why, each.count) for each in end.missed] == [
        ("the state of a random generator", "RuntimeError: it has no state", 3)
    ]


DRAWING = [
    torch.rand, torch.randn_like, torch.randperm, torch.normal, torch.multinomial, torch.bernoulli, F.dropout,
    F.dropout2d, F.alpha_dropout, F.rrelu, F.gumbel_softmax, F.scaled_dot_product_attention, torch.lstm, torch.poisson,
    torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.random_, F.multi_head_attention_forward,
]  # fmt: skip
NOT_DRAWING = [torch.add, F.linear, F.gelu, torch.Tensor.__getitem__, torch.Tensor.view, torch.softmax, F.batch_norm]


@pytest.mark.parametrize("function", DRAWING, ids=lambda each: each.__name__)
def test_functions_that_may_draw(function: Callable[..., Any]) -> None:
    assert may_draw(function)


@pytest.mark.parametrize("function", NOT_DRAWING, ids=lambda each: each.__name__)
def test_functions_that_do_not(function: Callable[..., Any]) -> None:
    assert not may_draw(function)
