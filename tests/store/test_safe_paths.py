"""A reader stays in its folder; numpy arrays are read without executing anything."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from astray.errors import RunError
from astray.foreign import array_files as npy
from astray.store.safe_paths import entries, inside, read_text_file


def test_names_and_links_that_lead_out(tmp_path: Path) -> None:
    home = tmp_path / "dump"
    (home / "data").mkdir(parents=True)
    (tmp_path / "secret.npy").write_text("mine")
    (home / "out.npy").symlink_to(tmp_path / "secret.npy")
    (home / "within.npy").symlink_to(home / "data")
    (home / "loop").symlink_to(home / "loop")
    (home / "plain.npy").write_text("x")
    assert inside(home, "plain.npy") == home / "plain.npy"
    assert inside(home, "data/../plain.npy").exists()
    for name in ("../secret.npy", str(tmp_path / "secret.npy"), "out.npy", "data/../../secret.npy", "loop", "a\0b"):
        with pytest.raises(RunError):
            inside(home, name)
    assert [path.name for path in entries(home)] == ["data", "plain.npy", "within.npy"]
    with pytest.raises(RunError, match="cannot be read"):
        entries(home / "nothing")


def test_only_plain_texts_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert read_text_file(tmp_path / "a.json") == b"{}"
    with pytest.raises(RunError, match="is not a plain file"):
        read_text_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="is not a plain file"):
        read_text_file(tmp_path / "pipe")


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.arange(6.0).reshape(2, 3).T,
    np.zeros((0, 3), np.float16),
    np.array(3, ">i4"),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    np.array(7, np.uint16),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_arrays(tmp_path: Path, array: np.ndarray) -> None:
    npy.write_npy(tmp_path / "a.npy", array)
    spec = npy.describe(tmp_path / "a.npy")
    assert (spec.dtype, spec.shape) == (array.dtype.newbyteorder("=").name, array.shape)
    read = npy.read(tmp_path / "a.npy")
    assert read.shape == array.shape
    assert np.array_equal(read, array)
    assert read.dtype == array.dtype.newbyteorder("=")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.npy"]


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


def test_damaged_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.npy"
    np.save(path, np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(RunError, match="holds Python objects, for which a pickle would have to be run"):
        npy.read(path)
    np.save(path, np.array(["text"]))
    with pytest.raises(RunError, match="holds <U4, which is not a type of tensors"):
        npy.read(path)
    npy.write_npy(path, np.arange(100.0))
    whole = path.read_bytes()
    for end in (0, 5, 60, 200, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(RunError):
            npy.read(path)
    path.write_bytes(whole.replace(b"(100,)", b"(1000000000000,)"))
    with pytest.raises(RunError, match=r"it was cut|is not a numpy array"):
        npy.read(path)
    with pytest.raises(RunError, match="cannot be read"):
        npy.describe(tmp_path / "b.npy")
    assert not (tmp_path / "exploded").exists()
