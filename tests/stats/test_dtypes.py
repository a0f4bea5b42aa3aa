from __future__ import annotations

import numpy as np
import pytest
import torch

from astray.stats.dtypes import DTYPES, decode, decode_table, find, widen
from stats.arrays import decoded

FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]


@pytest.mark.parametrize("name", FLOATS)
def test_limits_agree_with_torch(name: str) -> None:
    dtype, info = DTYPES[name], torch.finfo(getattr(torch, name))
    assert (dtype.max, dtype.tiny, 8 * dtype.itemsize) == (info.max, info.tiny, info.bits)
    if name != "float8_e5m2fnuz":  # torch says 0.125 there, as if it had three bits of mantissa
        assert dtype.eps == info.eps


@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if d.itemsize == 1 and d.kind == "float"])
def test_decode_tables_agree_with_torch(name: str) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).to(torch.float64).numpy()
    np.testing.assert_array_equal(decode_table(name), expected)
    np.testing.assert_array_equal(decode(np.arange(256, dtype=np.uint8), name), expected)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_16_bit_pattern_is_decoded_exactly(name: str) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16)
    values = decode(raw.view(DTYPES[name].storage), name)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, decoded(raw.view(DTYPES[name].storage), name))


@pytest.mark.parametrize(("name", "values"), [("int8", [-128, 127]), ("uint8", [0, 255]), ("bool", [False, True])])
def test_small_integers_are_decoded(name: str, values: list[int]) -> None:
    assert decode(np.array(values, DTYPES[name].storage), name).tolist() == values


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_complex_is_decoded_as_parts(name: str) -> None:
    dtype = DTYPES[name]
    parts = np.array([[1.5, -2.0], [0.0, 4.0]], DTYPES[dtype.part].storage)
    assert decode(parts.view(dtype.storage)[:, 0], name).tolist() == parts.tolist()


def test_safetensors_names_are_those_of_its_own_writer() -> None:
    from safetensors.torch import save

    for name, dtype in DTYPES.items():
        if dtype.safetensors is not None:
            header = save({"t": torch.zeros(2, dtype=torch.uint8).to(getattr(torch, name))})
            assert f'"dtype":"{dtype.safetensors}"'.encode() in header


def test_decode_refuses_the_wrong_size() -> None:
    with pytest.raises(ValueError, match="2 bytes"):
        decode(np.zeros(3, np.float32), "bfloat16")


def test_an_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"float7.*float64"):
        find("float7")


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 0x7F81), ("float16", 0x7C01), ("float32", 0x7F800001)])
def test_a_signalling_nan_is_widened_in_silence(dtype: str, bits: int) -> None:
    storage = find(dtype).storage
    raw = np.array([bits], f"u{storage.itemsize}").view(storage)
    found = widen(raw, dtype)
    assert found.dtype == np.float64
    assert np.isnan(found).all()
