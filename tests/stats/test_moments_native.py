"""What only the native code promises of moments: the same bits from every instruction set and number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from astray.stats import DTYPES, Strided, kernels
from stats.arrays import make


def everything(native: Any, views: list[Any], dtype: str) -> list[Any]:
    tensors = [Strided.from_numpy(view, dtype) for view in views]
    return [(native.moments(tensor), native.powers(tensor, 3.0, 1.0)) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(native: Any, dtype: str) -> None:
    arrays = [make(dtype, (90, 111))]
    if DTYPES[dtype].kind != "bool" and dtype[0] != "u":
        arrays.append(make(dtype, (90, 111), special=DTYPES[dtype].kind != "int"))
    views = [view for array in arrays for view in (array, array[3:, ::3])]
    found = []
    for isa in native.isas():
        native.set_isa(isa)
        found.append(everything(native, views, dtype))
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
def test_threads_do_not_change_a_bit(native: Any, dtype: str) -> None:
    array = make(dtype, (1500, 2000))
    found = []
    for threads in (1, 2, 5):
        kernels.set_threads(threads)
        found.append(everything(native, [array, array.T[1:, ::2]], dtype))
    assert all(other == found[0] for other in found)


def test_flushing_subnormals_in_the_program_changes_nothing(native: Any) -> None:
    arrays = [np.full(1_000_000, 1e-40, np.float32), np.arange(1_000_000) * 1e-312]
    kernels.set_threads(2)
    before = [everything(native, [array], array.dtype.name) for array in arrays]
    assert before[0][0][0][5] == 0, "none of them is zero"
    assert torch.set_flush_denormal(True)
    try:
        assert [everything(native, [array], array.dtype.name) for array in arrays] == before
        assert torch.tensor(1e-40) * 1 == 0, "flushing must still be on afterwards"
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("arguments", [((1, 2),), ((0, "float32", [1], (1,)),), ((0, 5, (1,), (1,)),)])
def test_wrong_arguments_raise(native: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        native.moments(*arguments)
    with pytest.raises(TypeError):
        native.powers(*arguments, 2.0, 1.0)


def test_a_power_must_be_a_number(native: Any) -> None:
    with pytest.raises(TypeError):
        native.powers((0, "float32", (0,), (1,)), "2", 1.0)
