"""Pickles of numpy arrays, as `paddle.save` writes them: made by hand, so that Paddle is not needed."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astray import checkpoints
from astray.checkpoints import paddle_files, stored_tensor
from astray.errors import CheckpointError

LONG = np.random.default_rng(0).standard_normal((600, 7), dtype=np.float32)
ARRAYS = {
    "weight": LONG,
    "bias": np.arange(3, dtype=np.float32),
    "half": np.arange(4, dtype=np.float16),
    "double": np.arange(700, dtype=np.float64),
    "counts": np.arange(5),
    "small": np.array([1, 2, 255], np.uint8),
    "signed": np.array([-1, 2], np.int8),
    "mask": np.array([True, False]),
    "complex": np.array([1 + 2j], np.complex64),
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 3), np.float32),
    "nan": np.array([np.nan, np.inf, -0.0], np.float32),
    "across": np.asfortranarray(LONG[:100]),
    "one": np.array([200], np.uint8),
}


def saved(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoints.open(path)
    return str(error.value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_dtype_shape_and_order_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    with checkpoints.open(saved(tmp_path / "a.pdparams", ARRAYS, protocol)) as found:
        assert found.names == tuple(ARRAYS)
        assert found.format == "paddle"
        for name, array in ARRAYS.items():
            values, dtype, shape = found.read(name)
            assert (dtype, shape) == (str(array.dtype), array.shape)
            assert values.tobytes() == array.tobytes(), name
            blocks = list(found.blocks(name, 64))
            assert b"".join(block.tobytes() for block in blocks) == array.tobytes()


def test_a_text_is_decoded_from_the_block_it_is_needed_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensor.EncodedBytes, "_BLOCK", 100)
    array = np.random.default_rng(1).integers(0, 256, 5000, np.uint8)
    with checkpoints.open(saved(tmp_path / "a.pdparams", {"a": array}, 2)) as found:
        assert found.read("a")[0].tobytes() == array.tobytes()
        assert b"".join(block.tobytes() for block in found.blocks("a", 37)) == array.tobytes()


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_stay_in_the_file_until_they_are_needed(tmp_path: Path, protocol: int) -> None:
    path = saved(tmp_path / "a.pdparams", {"a": np.ones(4_000_000), "b": np.ones(4_000_000)}, protocol)
    tracemalloc.start()
    try:
        with checkpoints.open(path) as found:
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            statistics = found.measure("b").statistics
            assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert statistics is not None
    assert statistics.mean == 1


def test_uint16_is_bfloat16_in_files_of_paddle_alone(tmp_path: Path) -> None:
    array = np.array([0x3F80, 0x4000], np.uint16)
    for name, content, dtype in (
        ("a.pdparams", {"w": array}, "bfloat16"),
        ("a.pkl", {"w": array, paddle_files.NAMES: {"w": "linear_0.w_0"}}, "bfloat16"),
        ("a.pkl", {"w": array}, "uint16"),
    ):
        with checkpoints.open(saved(tmp_path / name, content)) as found:
            assert found.spec("w").dtype == dtype
            assert found.format == ("paddle" if dtype == "bfloat16" else "pickle of numpy arrays")
            statistics = found.measure("w").statistics
            assert statistics is not None
            assert statistics.max == (2.0 if dtype == "bfloat16" else 0x4000)


def test_what_is_beside_the_arrays(tmp_path: Path) -> None:
    content = {
        "w": np.ones(2),
        "LR_Scheduler": {"last_epoch": 3, "last_lr": np.float64(0.5), "flag": np.bool_(True)},
        paddle_files.NAMES: {"w": "linear_0.w_0"},
        "notes": "x" * 5000,
        "objects": np.array([{}, None], object),
        "text": np.array(["a"]),
        "big endian": np.ones(2, ">f4"),
    }
    with checkpoints.open(saved(tmp_path / "a.pdopt", content)) as found:
        assert found.names == ("w",)
        assert found.others["LR_Scheduler.last_epoch"] == 3
        assert found.others["LR_Scheduler.last_lr"] == 0.5
        assert found.others["LR_Scheduler.flag"] is True
        assert found.others[f"{paddle_files.NAMES}.w"] == "linear_0.w_0"
        assert str(found.others["notes"]) == "5,000 bytes"
        assert set(found.unread) == {"objects", "text", "big endian"}
        assert "the byte order of a big-endian machine" in str(found.unread["big endian"])


def test_one_array_under_two_names_and_two_equal_ones(tmp_path: Path) -> None:
    tied = np.zeros(2)
    with checkpoints.open(saved(tmp_path / "a.pdparams", {"a": tied, "b": tied, "c": np.zeros(2)})) as found:
        assert found.place("a") == found.place("b") != found.place("c")
        assert found.nbytes == 32


@pytest.mark.parametrize("shape", [(60,), (6, 10), (3, 4, 5), (60, 1), (1, 60), (2, 3, 2, 5)])
@pytest.mark.parametrize("cuts", [[20, 40], [7, 8, 53], [1], [59], [12, 36]])
def test_tensors_in_slices_are_put_together(tmp_path: Path, shape: tuple[int, ...], cuts: list[int]) -> None:
    array = np.arange(60.0).reshape(shape)
    parts = {f"w@@.{i}": part for i, part in enumerate(np.split(array.reshape(-1), cuts))}
    described = {"w": {"OriginShape": shape, "slices": list(parts)}}
    content = {"b": np.ones(2), **parts, paddle_files.SLICED: described, paddle_files.NAMES: {"w": "w_0"}}
    with checkpoints.open(saved(tmp_path / "a.pdparams", content, 2)) as found:
        assert set(found.names) == {"b", "w"}
        assert found.spec("w").shape == shape
        assert np.array_equal(found.read("w")[0], array)
        assert b"".join(block.tobytes() for block in found.blocks("w", 56)) == array.tobytes()


@pytest.mark.parametrize(
    ("described", "why"),
    [
        ({"w": {"OriginShape": (4,), "slices": ["w@@.0", "w@@.1"]}}, "in 2 slices, and not all of them are there"),
        ({"w": {"OriginShape": (8,), "slices": ["w@@.0", "w@@.0"]}}, "one of them is used twice"),
        ({"w": {"OriginShape": (4,), "slices": ["flat"]}}, "one of them is not flat"),
        ({"w": {"OriginShape": (8,), "slices": ["w@@.0", "half"]}}, "their dtypes differ"),
        ({"half": {"OriginShape": (4,), "slices": ["w@@.0"]}}, "another entry has its name"),
        ({"w": {"OriginShape": (4,), "slices": []}}, "in 0 slices, and not all of them are there"),
        ({"w": {"OriginShape": (5,), "slices": ["w@@.0"]}}, "in 1 slices, and they have 4 elements"),
        ({"w": {"OriginShape": (-4,), "slices": ["w@@.0"]}}, "does not say how its tensors are sliced"),
        ({"w": {"slices": ["w@@.0"]}}, "does not say how its tensors are sliced"),
        ([3], "does not say how its tensors are sliced"),
    ],
)
def test_slices_that_make_no_sense(tmp_path: Path, described: Any, why: str) -> None:
    content = {"w@@.0": np.ones(4), "flat": np.ones((2, 2), order="F"), "half": np.ones(4, np.float16)}
    path = saved(tmp_path / "a.pdparams", content | {paddle_files.SLICED: described})
    assert why in refused(path)


# ---- damaged and malicious files -------------------------------------------------------------------------------------


class Call:
    """Something that a pickle says to call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def write(path: str) -> None:
    Path(path).write_text("executed")


def test_no_code_is_run(tmp_path: Path) -> None:
    """Calls stay what they are, also those of the two functions that Paddle's own files call."""
    mark = tmp_path / "executed"
    content = {
        "w": np.ones(2),
        "named": Call(tuple, ("linear_0.w_0", np.ones(3))),
        "static": Call(eval, "data", {"data": np.ones(4)}),
        "call": Call(write, str(mark)),
        "eval": Call(eval, f"open({str(mark)!r}, 'w')", {"data": np.ones(4)}),
        "exec": Call(exec, f"open({str(mark)!r}, 'w')"),
        "short": Call(eval, f"open({str(mark)!r}, 'w')"),
    }
    with checkpoints.open(saved(tmp_path / "a.pdparams", content)) as found:
        assert found.names == ("w", "named", "static")
        assert found.read("static")[2] == (4,)
        assert "astray runs none that comes with a file" in str(found.others["eval"])
        assert set(found.others) == {"call", "eval", "exec", "short"}
        assert not found.others["short"].tensors  # type: ignore[attr-defined]
    assert not mark.exists()


def test_arrays_whose_parts_make_no_sense(tmp_path: Path) -> None:
    whole = pickle.dumps({"a": np.ones((2, 500)), "b": np.ones(2)}, 4)
    for old, new, why in (
        (b"M\xf4\x01", b"M\xf5\x01", "'a' is float64 of shape [2, 501], which takes 8,016 bytes, and it has 8,000."),
        (b"M\xf4\x01", b"M\xf3\x01", "'a' is float64 of shape [2, 499], which takes 7,984 bytes, and it has 8,000."),
    ):
        assert old in whole
        (tmp_path / "a.pdparams").write_bytes(whole.replace(old, new))
        assert why in refused(tmp_path / "a.pdparams")
    (tmp_path / "a.pdparams").write_bytes(whole.replace(b"M\xf4\x01", b"J\xff\xff\xff\xff"))
    with checkpoints.open(tmp_path / "a.pdparams") as found:
        assert found.names == ("b",)
        assert "what the file says of it makes no sense" in str(found.unread["a"])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("é".encode() * 2000, "é".encode() * 1999 + b"x\xc3", "stands for no bytes"),
        ("é".encode() * 2000, "é".encode() * 1999 + "ŵ".encode(), "stands for no bytes"),
        (b"M\xd0\x07", b"M\x9f\x0f", "stands for 2,000 bytes, before 1,999 that belong to a tensor"),
    ],
)
def test_texts_that_are_not_the_bytes_of_their_array(tmp_path: Path, old: bytes, new: bytes, why: str) -> None:
    whole = pickle.dumps({"a": np.full(2000, 0xE9, np.uint8)}, 2)
    assert old in whole
    (tmp_path / "a.pdparams").write_bytes(whole.replace(old, new))
    with checkpoints.open(tmp_path / "a.pdparams") as found, pytest.raises(CheckpointError, match=why):
        found.read("a")


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_that_was_cut_anywhere(tmp_path: Path, protocol: int) -> None:
    path = saved(tmp_path / "a.pdparams", {"a": np.ones(500), "b": np.ones(2)}, protocol)
    whole = path.read_bytes()
    for size in range(0, len(whole), 23):
        path.write_bytes(whole[:size])
        assert "a.pdparams" in refused(path)
    path.write_bytes(whole + b"more")
    with checkpoints.open(path) as found:
        assert str(found.others["(end)"]) == "4 bytes behind the end of the pickle"


@pytest.mark.parametrize("protocol", [2, 4])
def test_damaged_bytes_never_end_in_a_traceback(tmp_path: Path, protocol: int) -> None:
    whole = pickle.dumps({"a": np.ones(300), "b": np.ones(2), "c": {"d": np.arange(700)}}, protocol)
    chance = random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 1, 1, 5, 50])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (tmp_path / "a.pdparams").write_bytes(damaged)
        try:
            with checkpoints.open(tmp_path / "a.pdparams") as found:
                for name in found:
                    assert found.read(name)[0].nbytes == found.spec(name).nbytes < 1 << 30
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 5, outcomes


def test_more_opcodes_than_any_checkpoint_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astray.checkpoints.pickles.MOST_READ", 1 << 20)
    path = tmp_path / "a.pdparams"
    path.write_bytes(b"\x80\x04" + b"N0" * (1 << 20) + b"N.")
    assert "it has more than 1,048,576 bytes beside long ones" in refused(path)
    path.write_bytes(b"\x80\x04\x8b" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20) + b".")
    assert "something at byte 7 is 1,048,576 bytes long" in refused(path)


def test_other_files_of_paddle(tmp_path: Path) -> None:
    (tmp_path / "a.pdiparams").write_bytes(bytes(100))
    assert "is of a program for inference, whose weights have no names there." in refused(tmp_path / "a.pdiparams")
    saved(tmp_path / "none.pdparams", {"w": [1.0, 2.0]})
    assert "none that torch.save or paddle.save wrote of tensors" in refused(tmp_path / "none.pdparams")
    folder = tmp_path / "distributed"
    folder.mkdir()
    saved(folder / "0_0.distcp", ARRAYS)
    saved(folder / "0.metadata", {})
    assert "is a distributed checkpoint of Paddle" in refused(folder)
    assert len(checkpoints.open(folder / "0_0.distcp")) == len(ARRAYS)


def test_a_folder_of_paddle(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    saved(tmp_path / "model_state.pdparams", {"w": np.ones(2)})
    saved(tmp_path / "optimizer.pdopt", {"w_0_moment1_0": np.ones(2)})
    assert checkpoints.recognises(tmp_path)
    assert checkpoints.open(tmp_path).names == ("w",)
