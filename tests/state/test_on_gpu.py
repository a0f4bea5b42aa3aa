"""States on a GPU: the same statistics as on the CPU, and one wait for a whole table."""

from __future__ import annotations

import warnings

import pytest
import torch

from astray.state import StateDict

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool, torch.complex64]
KEYS = ["name", "numel", "max", "min", "sum", "mean", "std", "skew", "kurtosis", "norm1", "norm2", "abs_max", "abs_min"]


def state() -> StateDict:
    generator = torch.Generator().manual_seed(0)
    values = {str(dtype): (3 * torch.randn(300, 77, generator=generator)).to(dtype) for dtype in DTYPES}
    values["transposed"] = torch.randn(50, 60, generator=generator).t()
    values["large"] = torch.randn(3_000_001, generator=generator) + 1000
    values["empty"], values["one"] = torch.empty(0, 3), torch.tensor(2.5)
    values["bad"] = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    return StateDict(values, name="net")


@pytest.mark.parametrize("keys", [KEYS, ["norm3", "norm-1", "norm0.5"]])
def test_statistics_are_those_of_the_cpu(keys: list[str]) -> None:
    here, there = state(), state().to("cuda")
    for lw in (True, False):
        expected = here.describe(lw=lw, include_keys=keys, display=False)
        found = there.describe(lw=lw, include_keys=keys, display=False)
        for key in keys:
            if key == "name":
                assert found[key] == expected[key]
            else:
                assert found[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-9, nan_ok=True), key


def test_a_whole_table_waits_once() -> None:
    there = state().to("cuda")
    there.describe(lw=True, display=False)  # kernels are compiled and constants made now
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which warns that it is new
        try:
            there.describe(lw=True, include_keys=KEYS, display=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in told if "a synchronizing" in str(each.message)]) == 1


def test_arithmetic_stays_on_the_device() -> None:
    there = state().to("cuda")
    assert repr(there).splitlines()[0].endswith("device=cuda:0, dtype=None]")
    ratio = there / there.norm2(lw=True)
    assert ratio["torch.float32"].is_cuda
    assert ratio["torch.float32"].dtype == torch.float32
    assert ratio.norm2(lw=True)["torch.float32"] == pytest.approx(1.0, rel=1e-6)
