"""The files of single tensors, read at once or with care: the same elements, and the same words where one is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from astray import checkpoints
from astray.errors import AstrayError
from astray.foreign import array_files
from astray.foreign.msprobe import files
from astray.foreign.msprobe.files import read_tensor


def with_care(path: Path) -> np.ndarray:  # type: ignore[type-arg]
    with checkpoints.open(path) as found:
        return found.read(found.names[0])[0]


TENSORS = {
    "plain": torch.randn(2, 3),
    "other shape": torch.randn(3, 2),
    "transposed": torch.randn(2, 3).t(),
    "slice": torch.randn(8)[2:5],
    "number": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "bfloat16": torch.randn(3).bfloat16(),
    "bool": torch.tensor([True, False]),
    "leaf": torch.randn(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_elements_are_those_that_care_reads(name: str, tmp_path: Path) -> None:
    for number in range(3):  # the second is known by the first
        tensor = TENSORS[name].detach() + 0 if number else TENSORS[name]
        torch.save(tensor, tmp_path / f"{number}.pt")
        found = read_tensor(str(tmp_path / f"{number}.pt"))
        expected = with_care(tmp_path / f"{number}.pt")
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def test_files_of_ours_are_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_known", {})
    for number in range(3):
        array = np.full((2, 2), number, np.float32)
        array_files.write_torch_file(tmp_path / f"{number}.pt", array_files.TorchTensor(array, "float32"))
    assert read_tensor(str(tmp_path / "0.pt")).tolist() == [[0, 0], [0, 0]]
    monkeypatch.setattr(files, "_read_checked", None)  # which is not needed any more
    assert [read_tensor(str(tmp_path / f"{number}.pt")).tolist()[0][0] for number in (1, 2)] == [1, 2]


def answer(read: Callable[[], np.ndarray]) -> object:  # type: ignore[type-arg]
    try:
        return read().tobytes()
    except AstrayError as error:
        return str(error)


def test_damage_is_answered_for_in_the_words_of_care(tmp_path: Path) -> None:
    torch.save(torch.randn(4), tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    read_tensor(str(tmp_path / "whole.pt"))
    rng = np.random.default_rng(0)
    for number in range(300):
        damaged = bytearray(whole)
        if number % 3:
            for place in rng.integers(len(damaged), size=1 + number % 7):
                damaged[place] ^= 1 << rng.integers(8)
        else:
            del damaged[rng.integers(len(damaged)) :]
        path = tmp_path / "damaged.pt"
        path.write_bytes(damaged)
        assert answer(partial(read_tensor, str(path))) == answer(partial(with_care, path)), number


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(AstrayError, match="not a plain file"):
        read_tensor(str(tmp_path / "pipe.pt"))
    with pytest.raises(AstrayError):
        read_tensor(str(tmp_path / "nothing.pt"))
