"""Blocks measured one by one say what the whole says; and the memory that it takes to read a large file."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from astray.checkpoints.checkpoint import measure_blocks, merge_statistics
from astray.checkpoints.stored_tensor import TensorSpec, boxes
from astray.records import Statistics
from astray.stats import Strided, measure

MEGABYTE = 1 << 20


def cut(values: np.ndarray, size: int) -> list[np.ndarray]:
    return [values[begin : begin + size] for begin in range(0, values.size, size)]


@pytest.mark.parametrize("size", [1, 7, 300])
@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(1000, 1, 500).astype(np.float32),
        np.array([np.nan, 1, -np.inf, 0, -3, np.nan, np.nan, 1e300, -1e299] * 3),
        np.full(11, np.nan),
        np.full(11, 2.5, np.float16),
        np.arange(-50, 50, dtype=np.int16),
        (np.arange(40) % 3 == 0),
        np.arange(20).astype(np.complex64) * (1 - 2j),
    ],
    ids=["normal", "special", "nan", "constant", "integers", "booleans", "complex"],
)
def test_blocks_say_what_the_whole_says(values: np.ndarray, size: int) -> None:
    spec = TensorSpec(values.dtype.name, values.shape)
    found, whole = measure_blocks(cut(values, size), spec), measure(Strided.from_numpy(values))
    assert found.fingerprint == whole.fingerprint
    assert found.statistics is not None
    assert whole.statistics is not None
    for name, one, other in zip(Statistics._fields, found.statistics, whole.statistics, strict=True):
        tolerance = 1e-9 if name == "std" else 1e-12
        assert one == (other if other is None else pytest.approx(other, rel=tolerance, abs=1e-12, nan_ok=True)), name


def test_nothing_is_measured_too() -> None:
    assert measure_blocks([], TensorSpec("bfloat16", (0, 3))).statistics == Statistics(*[None] * 6, 0, 0, 0, 0)
    empty = Statistics(None, None, None, None, None, None, 0, 2, 0, 2)
    assert merge_statistics([empty, empty]) == empty._replace(nan=4, count=4)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 4), (1, 7, 1, 2), (4, 0, 2)])
@pytest.mark.parametrize("most", [1, 2, 5, 8, 100])
def test_boxes_follow_each_other_and_fit(shape: tuple[int, ...], most: int) -> None:
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    seen: list[int] = []
    for offset, size in boxes(shape, most):
        part = numbers[tuple(slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))]
        assert 0 < part.size <= most
        seen += part.reshape(-1).tolist()
    assert seen == list(range(numbers.size))


def write_sparse(path: Path, shapes: dict[str, list[int]], seed: int) -> None:
    """A file of float32 that takes no room on the disk but for some numbers at the start of each tensor."""
    begins = np.cumsum([0, *(4 * int(np.prod(shape)) for shape in shapes.values())]).tolist()
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        for (name, shape), begin, end in zip(shapes.items(), begins[:-1], begins[1:], strict=True)
    }
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + begins[-1])
        for begin in begins[:-1]:
            file.seek(8 + len(raw) + begin)
            file.write(np.random.default_rng(seed).random(1000, np.float32).tobytes())


@pytest.mark.slow
def test_four_gigabytes_take_less_than_one_of_memory(tmp_path: Path) -> None:
    shapes = {"huge": [640, 1024, 1024], **{f"h.{i}": [4096, 4096] for i in range(24)}}
    for name, seed in (("a", 0), ("b", 1)):
        write_sparse(tmp_path / f"{name}.safetensors", shapes, seed)
    assert (tmp_path / "a.safetensors").stat().st_size > 4 << 30
    script = (
        "import sys\nfrom astray.cli import main\nassert main(sys.argv[1:]) in (0, 1)\n"
        # Not ru_maxrss: a new process begins with that of the one that has started it.
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    for words in (["show", "a.safetensors", "--sort", "l2"], ["compare", "a.safetensors", "b.safetensors"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            check=True, capture_output=True, text=True, cwd=tmp_path, timeout=500,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        megabytes = int(done.stdout.split()[-1]) // 1024
        assert megabytes < 400, f"{words[0]} took {megabytes} MB"  # a gigabyte is promised
