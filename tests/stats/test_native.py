"""What only the native kernels promise: the same bits from every instruction set and number of threads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from astray.stats import DTYPES, Strided, kernels, numpy_kernels
from stats.arrays import LAYOUTS, encode, nearby, random_values, ratio_precision

native_kernels = pytest.importorskip(
    "astray.stats.native_kernels", reason="the native kernels are not built", exc_type=ImportError
)


@pytest.fixture(autouse=True)
def _use_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_backend", native_kernels)


def results(dtype: str, count: int) -> list[Any]:
    """Everything the kernels tell about two tensors of a dtype, in several layouts, with and without NaN."""
    found: list[Any] = []
    for special in (False, True):
        for offset in (0.0, 1000.0):
            x = np.abs(random_values(count, 1, special=special)) + offset
            y = np.abs(nearby(x, 2))
            if DTYPES[dtype].kind in ("int", "bool"):
                x, y = (np.nan_to_num(v, posinf=1, neginf=0) % 100 for v in (x, y))
            one, other = encode(x, dtype), encode(y, dtype)
            one, other = (a[: a.size // 50 * 50].reshape(-1, 50) for a in (one, other))
            for layout in ("contiguous", "transposed", "strided"):
                views = [LAYOUTS[layout](a) for a in (one, other)]
                tensors = [Strided.from_numpy(view, dtype) for view in views]
                found += [kernels.measure(tensors[0]), kernels.contrast(*tensors)]
                found += [str(kernels.slice_errors(*tensors, 1.0))]  # of complex numbers a part is NaN
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(native: Any, dtype: str) -> None:
    found = []
    for isa in native.isas():
        native.set_isa(isa)
        found.append(results(dtype, 9937))
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "uint8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float64", "bfloat16", "int64"))],
)
def test_threads_do_not_change_a_bit(native: Any, dtype: str) -> None:
    x = np.abs(random_values(3_000_000, 1, special=True))
    y = np.abs(nearby(x, 2))
    if DTYPES[dtype].kind == "int":
        x, y = (np.nan_to_num(v, posinf=1, neginf=0) for v in (x, y))
    one, other = (encode(v, dtype).reshape(1500, 2000) for v in (x, y))
    found = []
    for threads in (1, 2, 3, 8):
        kernels.set_threads(threads)
        for a, b in ((one, other), (one.T, other.T)):
            tensors = Strided.from_numpy(a, dtype), Strided.from_numpy(b, dtype)
            results = kernels.measure(tensors[0]), kernels.contrast(*tensors), kernels.slice_errors(*tensors, 1.0)
            found.append((*results, kernels.pack(tensors[0]).tobytes()))
    assert all(found[i] == found[i % 2] for i in range(len(found)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_gives_the_same(dtype: str) -> None:
    """Random bytes, so every kind of number: integers and extremes exactly, sums to 1e-12 (of narrow ratios 1e-6)."""
    kind = DTYPES[dtype]
    data = np.random.default_rng(0).integers(0, 256, (2, 5000 * kind.itemsize), dtype=np.uint8)
    if dtype == "bool":
        data &= 1
    data[1, ::2] = data[0, ::2]
    one, other = (Strided.from_numpy(row.view(kind.storage), dtype) for row in data)
    pairs = [
        (kernels.measure(one).statistics, numpy_kernels.measure(one, True, True, None).statistics),
        (kernels.contrast(one, other), numpy_kernels.contrast(one, other, 1e-5, 1e-8)),
    ]
    assert kernels.measure(one).fingerprint == numpy_kernels.measure(one, True, True, None).fingerprint
    for native_result, numpy_result in pairs:
        assert native_result is not None
        assert numpy_result is not None
        for name, a, b in zip(native_result._fields, native_result, numpy_result, strict=True):
            if isinstance(a, float) and not name.startswith(("min", "max", "absmax", "first_bad")):
                close = ratio_precision(dtype) if name == "sum_rel_error" else 1e-12
                assert a == pytest.approx(b, rel=close, abs=1e-13 if name == "cosine" else 0.0), name
            else:
                assert a is b or a == b, name


FLUSHED = """
import numpy as np, torch
from astray.stats import Strided, contrast, measure, set_threads
x = np.full(3_000_000, 1e-40, np.float32)
y = np.full(3_000_000, 1e-310)
z = np.arange(1024, dtype=np.uint16).view(np.float16)
w = z[::-1].copy()
tensors = [Strided.from_numpy(a) for a in (x, y, z, w)]
def everything():
    return [measure(t) for t in tensors] + [contrast(tensors[0], tensors[1]), contrast(tensors[2], tensors[3])]
set_threads(2)
before = everything()
assert torch.set_flush_denormal(True)
assert everything() == before
assert torch.tensor(1e-40) * 1 == 0, "flushing must still be on afterwards"
assert before[0].statistics.zeros == 0 and before[0].statistics.l2 > 0
"""


def test_flushing_subnormals_in_the_program_changes_nothing() -> None:
    subprocess.run([sys.executable, "-c", FLUSHED], check=True)


def test_a_forked_child_computes(native: Any) -> None:
    code = """
import os, numpy as np
from astray.stats import Strided, measure, set_threads
set_threads(4)
x = np.ones(4_000_000, np.float32)
expected = measure(Strided.from_numpy(x))
child = os.fork()
if child == 0:
    os._exit(0 if measure(Strided.from_numpy(x)) == expected else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_results_are_the_named_tuples(native: Any) -> None:
    array = np.ones(3)
    measured = kernels.measure(Strided.from_numpy(array))
    assert measured._fields == ("statistics", "fingerprint")
    assert measured.statistics is not None
    assert measured.statistics._asdict()["count"] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ((1, 2), True, True, None),
        ((0, "float32", [1], (1,)), True, True, None),
        ((0, 5, (1,), (1,)), True, True, None),
        (("x", "float32", (1,), (1,)), True, True, None),
        ((0, "float32", ("x",), (1,)), True, True, None),
        ((0, "float32", (0,), (1,)), True, True, 3),
        ((0, "float32", (0,), (1,)), True, True),
    ],
)
def test_wrong_arguments_raise(native: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        native.measure(*arguments)


@pytest.mark.parametrize(("shape", "stride"), [((2, 3), (1,)), ((-1,), (1,)), ((1,) * 80, (1,) * 80)])
def test_impossible_shapes_raise(native: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="hape"):
        native.measure((0, "float32", shape, stride), True, True, None)
