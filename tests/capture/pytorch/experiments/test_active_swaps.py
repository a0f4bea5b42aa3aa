"""Recordings note what is swapped while they run, and a comparison says so."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.capture.pytorch.experiments import active_swaps
from astray.experiment import swap


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def record(path: Path, what: Any = None, to: Any = None, steps: tuple[int, ...] = (0, 1), **settings: Any) -> None:
    """Records two steps; in those that are named something is swapped."""
    net = model()
    with astray.record(path, net, **settings) as recorder:
        for step in range(2):
            with swap(net, what, to=to) if what is not None and step in steps else nullcontext():
                net(torch.ones(2, 6)).sum().backward()
            net.zero_grad()
            recorder.step()


def sentences(reference: Path, candidate: Path) -> list[str]:
    return [difference.sentence for difference in astray.compare(reference, candidate).setup]


@pytest.mark.parametrize(
    ("what", "to", "said"),
    [
        ("0", "float64", "0 is as the program has it in the reference and swapped to float64 in the candidate."),
        (
            r"\d/linear",
            "cpu,float64",
            "2 parts (0/linear, 2/linear) are as the program has it in the reference and swapped to cpu, float64 in "
            "the candidate.",
        ),
        (
            "2/aten.addmm",
            torch.float64,
            "2/aten.addmm is as the program has it in the reference and swapped to float64 in the candidate.",
        ),
        ("1", torch.tanh, "1 is as the program has it in the reference and swapped to tanh in the candidate."),
    ],
)
def test_a_comparison_says_what_was_swapped_in_one_run(tmp_path: Path, what: str, to: Any, said: str) -> None:
    record(tmp_path / "plain")
    record(tmp_path / "swapped", what, to)
    assert sentences(tmp_path / "plain", tmp_path / "swapped") == [said]


def test_what_both_runs_have_swapped_is_no_difference(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(tmp_path / name, "0", "float64")
    assert sentences(tmp_path / "a", tmp_path / "b") == []
    record(tmp_path / "c", "0", "bfloat16")
    assert sentences(tmp_path / "a", tmp_path / "c") == [
        "0 is swapped to float64 in the reference and swapped to bfloat16 in the candidate."
    ]


def test_what_was_swapped_in_some_steps_only(tmp_path: Path) -> None:
    record(tmp_path / "plain")
    record(tmp_path / "swapped", "0", "float64", steps=(1,))
    (found,) = astray.compare(tmp_path / "plain", tmp_path / "swapped").setup
    assert (found.site, found.step, found.expected_effect) == ("0", 1, "changes rounding")


def test_every_recording_is_told_of_swaps_that_began_before_it_and_in_it(tmp_path: Path) -> None:
    net = model()
    x = torch.ones(2, 6)
    with swap(net, "0", to="float64"), astray.record(tmp_path / "outer", {"net": net}):
        with astray.record(tmp_path / "inner", {"net": net}), swap(net, "1", to="float64"):
            net(x)
        net(x)
    for name, sites in (("outer", {"0", "1"}), ("inner", {"0", "1"})):
        setup = astray.open(tmp_path / name).ranks[0].setup
        assert {note.site for note in setup if note.subject == "swap"} == sites
    assert not active_swaps._sites
    assert not active_swaps._listeners


def test_a_recording_says_what_was_never_called(tmp_path: Path) -> None:
    net = model()
    both = swap(net, ["0", "1/softmax"], to="float64")
    with astray.record(tmp_path / "run", net), pytest.warns(UserWarning, match="was not swapped"), both:
        net(torch.ones(2, 6))
    end = astray.open(tmp_path / "run").ranks[0].end
    assert end is not None
    assert [missed[:2] for missed in end.missed] == [("the swap of 1/softmax", "it was never called")]
