"""The tensors of the call that made NaN or infinity are in the run, on a CPU: kept when it returned, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import astray
from guarding.training import Net, guarded, tripped

HERE = Path(__file__).parent


def kept(path: Path | None) -> dict[tuple[int, str, str, str], list[float]]:
    """The values in a run, by step, site, role and path."""
    assert path is not None
    rank = astray.open(path).ranks[0]
    found = {}
    for row, call in enumerate(rank.call_rows.tolist()):
        values = rank.values(row)
        if values is not None:
            site, step = str(rank.calls["site"][call]), int(rank.calls["step"][call])
            found[step, site, str(rank.tensors["role"][row]), str(rank.tensors["path"][row])] = values.ravel().tolist()
    return found


LEVELS: dict[Any, list[tuple[int, str, str, str]]] = {
    "function": [
        (2, "<root>/log", "input", "0"),
        (2, "<root>/log", "output", "out"),
        (2, "second/linear", "input", "0"),
        (2, "second/linear", "input", "1"),
        (2, "second/linear", "input", "2"),
        (2, "second/linear", "output", "out"),
    ],
    "module": [
        (2, "second", "input", "0"),
        (2, "second", "parameter", "weight"),
        (2, "second", "parameter", "bias"),
        (2, "second", "output", "out"),
    ],
    "op": [
        (2, "<root>/aten.log", "input", "0"),
        (2, "<root>/aten.log", "output", "out"),
        (2, "second/aten.addmm", "input", "0"),
        (2, "second/aten.addmm", "input", "1"),
        (2, "second/aten.addmm", "input", "2"),
        (2, "second/aten.addmm", "output", "out"),
    ],
}


@pytest.mark.parametrize("level", LEVELS)
def test_what_it_was_given_and_what_it_gave_are_there(level: str, tmp_path: Path) -> None:
    with tripped("element \\[0, 0\\]") as caught:
        guarded(Net(bad=[2]), tmp_path / "guard", level=level)
    found = kept(caught.value.trip.path)
    # The same memory is a tensor of the calls around, too.
    own = {key: values for key, values in found.items() if not key[1].startswith("<root>") or "/" in key[1]}
    assert list(own) == LEVELS[level]
    assert np.isnan(own[LEVELS[level][-1]]).any()


def test_the_values_are_those_that_the_program_had(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 0.0]))

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x * self.weight)

    model, x = Scaled(), torch.tensor([[1.0, 0.5, 2.0, 4.0]])
    with tripped("element \\[0, 1\\] of output is nan") as caught, astray.guard(model, path=tmp_path / "guard"):
        model(x)
    found = kept(caught.value.trip.path)
    assert found[0, "<root>", "input", "0"] == [1.0, 0.5, 2.0, 4.0]
    assert found[0, "<root>", "parameter", "weight"] == [1.0, -2.0, 3.0, 0.0]
    assert np.isnan(found[0, "<root>", "output", "out"]).tolist() == [False, True, False, False]


def test_an_input_that_the_call_has_written_to_is_not_taken_for_what_it_was(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1).log_()

    model = InPlace()
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", level="function"):
        model(torch.zeros(3))
    found = kept(caught.value.trip.path)
    assert [key[2:] for key in found if "log_" in key[1]] == [("output", "out")]


def test_nothing_is_kept_while_all_is_finite_or_meant(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x).masked_fill(x > 0, float("-inf"))
            return torch.where(h.isinf(), torch.zeros(()), h)

    def look(step: int, _: object) -> None:
        if step == 3:
            raise LookupError

    with pytest.raises(LookupError):
        guarded(Masked(), tmp_path / "guard", level="function", between=look)
    (run,) = (tmp_path / "guard").iterdir()
    assert kept(run) == {}


def test_each_step_keeps_its_own_and_spoilt_weights_keep_nothing(tmp_path: Path) -> None:
    guard = guarded(Net(bad=[1]), tmp_path / "guard", on="warn", level="function", when=lambda rows: "a look")
    (last,) = [trip.path for trip in guard.trips if trip.step == 3 and trip.what == "condition"]
    assert {key[0] for key in kept(last)} == {1}


def test_with_all_tensors_kept_none_is_kept_twice(tmp_path: Path) -> None:
    with tripped() as caught:
        guarded(Net(bad=[1]), tmp_path / "guard", level="function", keep=["stats", "tensors"], remember=1)
    assert caught.value.trip.path is not None
    end = astray.open(caught.value.trip.path).ranks[0].end
    assert end is not None
    assert not [one for one in end.missed if "values" in one.what]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["module", "function", "op"])
def test_the_oracle_keeps_the_same(level: str, tmp_path: Path) -> None:
    script = (
        "import sys, contextlib, astray, tensor_oracle\nfrom guarding.training import Net, train\n"
        "model = Net(bad=[2])\n"
        "by = tensor_oracle.using() if sys.argv[3] == 'oracle' else contextlib.nullcontext()\n"
        "try:\n    with by, astray.guard(model, path=sys.argv[1], level=sys.argv[2]):\n        train(model)\n"
        "except astray.Tripped as tripped:\n    print(tripped.trip.path)\n"
    )
    found = []
    for by in ("native", "oracle"):
        paths = os.pathsep.join([str(Path(astray.__file__).parents[1]), str(HERE.parent)])
        environment = os.environ | {"PYTHONPATH": paths}
        command = [sys.executable, "-c", script, str(tmp_path / by), level, by]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.append(repr(kept(Path(done.stdout.strip()))))
    assert found[0] == found[1]
    assert "nan" in found[0]
