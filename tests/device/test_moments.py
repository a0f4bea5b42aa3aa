"""The kernel that computes the moments of many tensors at once: by Triton's interpreter, and on a GPU."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from astray.device import moments as device_moments
from astray.stats import Strided
from astray.stats.moments import Moments, merge, moments


def awkward(dtype: torch.dtype) -> list[torch.Tensor]:
    """Sizes around a tile and a stretch, NaN, infinities, nothing finite, a constant, a beginning unlike the rest."""
    torch.manual_seed(0)
    found = [(torch.randn(size) * 3 + 7).to(dtype) for size in (1, 7, 513, 70_000)]
    found[2][3], found[2][4], found[3][5], found[3][9] = math.nan, math.inf, -math.inf, 0.0
    unlike = torch.cat([torch.zeros(600), 1000 + torch.randn(3000)]).to(dtype)
    return [*found, torch.full((3,), math.nan, dtype=dtype), torch.full((700,), 0.1, dtype=dtype), unlike]


def on_cpu(tensor: torch.Tensor) -> Moments:
    name = str(tensor.dtype).removeprefix("torch.")
    return moments(Strided(tensor.data_ptr(), name, tuple(tensor.shape), tensor.stride()))


def assert_as_on_cpu(tensors: Sequence[torch.Tensor], rows: Sequence[Sequence[float]], counts: Sequence[int]) -> None:
    place = 0
    merged = device_moments.merged(np.array(rows), counts).tolist()
    for number, (tensor, count) in enumerate(zip(tensors, counts, strict=True)):
        mine = merge([Moments(*map(int, row[:6]), *row[6:]) for row in rows[place : place + count]])
        at_once = merged[number]
        assert at_once[:13] == pytest.approx(mine[:13], nan_ok=True, rel=1e-14, abs=1e-15 * mine.abssum)
        assert at_once[13:] == pytest.approx(mine[13:16], rel=1e-11, abs=1e-9 * (mine.l2 or 1.0))
        place += count
        reference = on_cpu(tensor)
        assert mine[:6] == reference[:6]
        assert mine[6:10] == pytest.approx(reference[6:10], nan_ok=True, rel=0)
        assert mine[10:13] == pytest.approx(reference[10:13], nan_ok=True, rel=1e-12, abs=1e-13 * reference.abssum)
        spread = math.sqrt(reference.m2 / max(reference.finite, 1))
        for power, (one, other) in enumerate(zip(mine[13:16], reference[13:16], strict=True), start=2):
            assert one == pytest.approx(other, abs=1e-11 * reference.finite * spread**power)
    assert place == len(rows)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]

INTERPRETED = """
import os, pickle, sys
sys.path[:0] = [{folder!r}, {above!r}]
import interpreted
interpreted._mend()
import torch
from astray.device import moments
found = []
for tensors in pickle.loads(sys.stdin.buffer.read()):
    table, counts = moments.stretches([(tensor.data_ptr(), tensor.numel()) for tensor in tensors])
    rows = torch.empty((len(table), 16), dtype=torch.float64)
    moments.launch(torch.from_numpy(table), rows, moments.DTYPES[tensors[0].dtype])
    found.append((rows.tolist(), counts))
sys.stdout.buffer.write(pickle.dumps(found))
"""


def test_interpreted_it_gives_what_the_cpu_gives() -> None:
    pytest.importorskip("triton")
    lists, here = [awkward(dtype) for dtype in DTYPES], Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED.format(folder=str(here), above=str(here.parent))],
        input=pickle.dumps(lists),
        capture_output=True,
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    for tensors, (rows, counts) in zip(lists, pickle.loads(done.stdout), strict=True):
        assert_as_on_cpu(tensors, rows, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_the_gpu_it_gives_what_the_cpu_gives(dtype: torch.dtype) -> None:
    tensors = [*awkward(dtype), torch.randn(40_000_000).to(dtype)]
    there = [tensor.cuda() for tensor in tensors]
    assert all(map(device_moments.can_measure, there))
    rows, counts = device_moments.measure(there)
    assert max(counts) <= device_moments.MOST_ROWS
    assert_as_on_cpu(tensors, rows.tolist(), counts)


def test_what_the_kernel_does_not_take() -> None:
    assert not device_moments.can_measure(torch.ones(3))
