"""Files that were cut, damaged or made to harm get a sentence: no traceback, no wrong values, nothing elsewhere."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from astray import checkpoints
from astray.errors import CheckpointError
from saved_checkpoints import same, save_distributed, write_index


def refused(path: Path) -> str:
    """Why a checkpoint cannot be opened."""
    with pytest.raises(CheckpointError) as error:
        checkpoints.open(path)
    return str(error.value)


# ---- safetensors ---------------------------------------------------------------------------------------------------

PLAIN = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def write_safetensors(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(**changed: Any) -> dict[str, Any]:
    return {"a": PLAIN["a"] | changed}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (entry(data_offsets=[0, 80]), "was cut: 'a' lies at 0–80 of its values, and 8 bytes of them are there"),
        (entry(data_offsets=[-8, 0]), "'a' lies at -8–0"),
        (entry(data_offsets=[8, 0]), "'a' lies at 8–0"),
        (entry(data_offsets=[0, 4]), "which takes 8 bytes, and it has 4"),
        (entry(data_offsets=[0]), "it does not say where 'a' lies"),
        (entry(data_offsets=[0.0, 8.0]), "it does not say where 'a' lies"),
        (entry(data_offsets=[False, 8]), "it does not say where 'a' lies"),
        (entry(data_offsets="0:8"), "it does not say where 'a' lies"),
        (entry(shape=[-2]), "'a' has an impossible shape"),
        (entry(shape=[1 << 62, 1 << 62]), "'a' has an impossible shape"),
        (entry(shape=[2] + [1] * 70), "'a' has an impossible shape"),
        (entry(shape="2"), "'a' has an impossible shape"),
        (entry(shape=[1 << 40]), "which takes 4,398,046,511,104 bytes, and it has 8"),
        ({"a": 3}, "it does not say where 'a' lies"),
        ({"__metadata__": []}, "it holds no tensors"),
        (PLAIN | {"b": PLAIN["a"]}, "'b' begins inside of another tensor"),
        (b'{"a": 1, "a": 2}', "'a' is in it twice"),
        (b"[1, 2]", "not a checkpoint: it begins neither like safetensors"),
        (b'{"a"', "The header of"),
        (b"{" + b'"a":{' * 100_000, "The header of"),
        (b'{"\xff": 1}', "The header of"),
    ],
)
def test_headers_that_make_no_sense(tmp_path: Path, header: Any, why: str) -> None:
    path = write_safetensors(tmp_path / "a.bin", header)
    assert why in refused(path)


def test_a_file_that_was_cut_anywhere(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "a.safetensors").write_bytes(whole[:size])
        assert "a.safetensors" in refused(tmp_path / "a.safetensors")


def test_an_unknown_dtype_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    header = PLAIN | {"b": {"dtype": "F4", "shape": [2], "data_offsets": [8, 9]}}
    with checkpoints.open(write_safetensors(tmp_path / "a.safetensors", header, bytes(9))) as found:
        assert found.names == ("a",)
        assert str(found.unread["b"]) == "a tensor of F4 and shape [2]: astray does not know this dtype"


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    save_file({"a": torch.ones(300)}, tmp_path / "a.safetensors")
    with checkpoints.open(tmp_path / "a.safetensors") as found:
        os.truncate(tmp_path / "a.safetensors", 800)
        with pytest.raises(CheckpointError, match="ends after 800 bytes, before 472 that belong to a tensor"):
            found["a"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty."),
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            "a pointer of Git LFS and not the file itself. Fetch that",
        ),
        (b"GGUF\x03\0\0\0", "is a GGUF file, which astray does not read"),
        (b"\x93NUMPY\x01\x00", "is a numpy array"),
        (b"\x1f\x8b\x08", "is compressed by gzip. Unpack it first."),
        (
            b"hello, world",
            "is not a checkpoint: it begins neither like safetensors nor like a file of torch.save or paddle.save.",
        ),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    assert why in refused(tmp_path / "a.bin")


def test_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    assert refused(tmp_path / "pipe.pt").endswith("pipe.pt is not a plain file, so it is not read.")
    assert refused(tmp_path / "none.pt").endswith("none.pt does not exist.")
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    assert "loop.pt" in refused(tmp_path / "loop.pt")


# ---- torch ---------------------------------------------------------------------------------------------------------


def rezip(path: Path, change: Callable[[str, bytes], bytes | None], compression: int = zipfile.ZIP_STORED) -> Path:
    """The same archive with other records."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            changed = change(name.partition("/")[2], content)
            if changed is not None:
                archive.writestr(name, changed)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"weight": torch.arange(8.0), "bias": torch.ones(2)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda name, raw: None if name == "data/0" else raw,
            "'weight' needs 32 bytes of storage '0', which is not there",
        ),
        (lambda name, raw: raw[:20] if name == "data/0" else raw, "storage '0', which has 20 bytes"),
        (lambda name, raw: None if name == "data.pkl" else raw, "none that torch.save wrote: it has no data.pkl"),
        (lambda name, raw: raw[:40] if name == "data.pkl" else raw, "data.pkl in"),
        (lambda name, raw: b"" if name == "data.pkl" else raw, "is damaged: it ends too early"),
        (lambda name, raw: b"big" if name == "byteorder" else raw, "was written on a big-endian machine"),
    ],
)
def test_archives_that_lack_something(saved: Path, change: Any, why: str) -> None:
    assert why in refused(rezip(saved, change))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_archives_of_others(saved: Path, tmp_path: Path) -> None:
    assert "is compressed, so its tensors cannot be read one by one" in refused(
        rezip(saved, lambda _, raw: raw, zipfile.ZIP_DEFLATED)
    )
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "script.pt")
    assert "is a TorchScript program, not a checkpoint" in refused(tmp_path / "script.pt")
    with (tmp_path / "p.pkl").open("wb") as file:
        pickle.dump({"weight": [1, 2]}, file)
    assert "is a pickle, but none that torch.save or paddle.save wrote" in refused(tmp_path / "p.pkl")


@pytest.mark.parametrize("zipped", [True, False])
def test_numbers_without_end_are_no_sizes(tmp_path: Path, zipped: bool) -> None:
    """Python refuses to write out numbers of more than 4,300 digits, also in the sentence about them."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(70)[11:][:7]}, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    if zipped:
        with zipfile.ZipFile(path) as archive:
            held = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    endless = b"\x8b" + (3000).to_bytes(4, "little") + b"\x7f" * 3000
    for number in (b"K\x46", b"K\x0b", b"K\x07"):  # elements of the storage, offset and size
        if zipped:
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in held.items():
                    archive.writestr(name, data.replace(number, endless) if name.endswith(".pkl") else data)
        else:
            path.write_bytes(content.replace(number, endless))
        refused(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_that_was_cut_anywhere(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.arange(8.0)}, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert "a.pt" in refused(path)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "distributed"])
def test_damaged_bytes_never_end_in_a_traceback(tmp_path: Path, kind: str) -> None:
    """Bytes are changed at random: there is an error in words, or tensors of which all that is said can be read."""
    state = {"model": {"weight": torch.arange(12.0).reshape(3, 4).t(), "bias": torch.ones(2)}, "epoch": 3}
    path = victim = tmp_path / "a"
    if kind == "safetensors":
        save_file({"weight": torch.arange(8.0), "bias": torch.ones(2)}, path)
    elif kind == "distributed":
        victim = save_distributed(state, path) / ".metadata"
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    whole = victim.read_bytes()
    chance = random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(120):
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 1, 1, 5, 50])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        victim.write_bytes(damaged)
        try:
            with checkpoints.open(path) as found:
                for name in found:
                    assert found.read(name)[0].nbytes == found.spec(name).nbytes < 1 << 30
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 5, outcomes


def pickled(content: Any, path: Path, storages: dict[str, bytes]) -> Path:
    """An archive like those of torch.save, around any pickle."""
    raw = content if isinstance(content, bytes) else pickle.dumps(content, 2)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", raw)
        for name, storage in storages.items():
            archive.writestr(f"a/data/{name}", storage)
    return path


class Persistent(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.id if isinstance(value, Id) else None


class Id:
    def __init__(self, *id: Any) -> None:
        self.id = id


class Call:
    """Something that is made by a call."""

    def __init__(self, what: Any, *args: Any) -> None:
        self.what, self.args = what, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.what, self.args


def view(*args: Any, count: Any = 8, cls: Any = torch.FloatStorage, key: str = "0") -> bytes:
    """A pickle of one tensor: offset, size, stride, as given."""
    out = io.BytesIO()
    storage = Id("storage", cls, key, "cpu", count)
    Persistent(out, 2).dump({"weight": Call(torch._utils._rebuild_tensor_v2, storage, *args, False, {})})
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (view(0, (9,), (1,)), "'weight' needs 36 bytes of storage '0', which has 32 bytes"),
        (view(5, (4,), (1,)), "'weight' needs 36 bytes of storage '0'"),
        (view(0, (4,), (3,)), "'weight' needs 40 bytes of storage '0'"),
        (view(0, (2,), (1,), key="../../../../etc/passwd"), "storage '../../../../etc/passwd', which is not there"),
        (view(0, (1 << 50,), (0,)), "it repeats 32 bytes to 4,503,599,627,370,496"),
        (view(-1, (4,), (1,)), "what the file says of it makes no sense"),
        (view(0, (4,), (-1,)), "what the file says of it makes no sense"),
        (view(0, (4, 2), (1,)), "what the file says of it makes no sense"),
        (view(0, ("4",), (1,)), "what the file says of it makes no sense"),
        (view(0, 4, (1,)), "what the file says of it makes no sense"),
        (view(True, (4,), (1,)), "what the file says of it makes no sense"),
        (view(0, (1,) * 65, (1,) * 65), "what the file says of it makes no sense"),
        (view(0, (4,), (1,), count=-8), "what the file says of it makes no sense"),
        (view(0, (4,), (1,), cls=torch.QInt8Storage), "astray does not know this kind of storage"),
        (pickle.dumps([1, 2, 3], 2), "has no tensors; it has tensor"),
        (b"\x80\x02}q\x00.", "has no tensors."),
        (b"\x80\x02ccos\nsystem\nX\x02\x00\x00\x00idR.", "is damaged"),
        (b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R.", "posix.system: it needs code"),
        (b"\x80\x02]q\x00h\x00a.", "has no tensor"),
        (b"\x80\x02h\x05.", "byte 4 makes no sense (KeyError)"),
        (b"\x80\x02K\x01a.", "is damaged"),
        (b"\x80\x02K\x01K\x02s.", "is damaged"),
        (b"\x80\x02(K\x01u.", "is damaged"),
        (b"\x80\x02t.", "is damaged"),
        (b"\x80\x02.", "is damaged"),
        (b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "it ends too early"),
        (b"\x80\x02\x8b\xff\xff\xff\xff.", "it ends too early"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "has no tensors"),  # a memory of four billion entries, if it were a list
        (b"\x80\x02I1\n.", "is b'I', which is not read here"),
        (b"\x80\x02" + b")" + b"\x85" * 20_000 + b"}" + b"N.", "has no tensors"),
        (b"\x80\x02}" + b")" + b"\x85" * 20_000 + b"Ns.", "a key is nested too deep or too long"),
        (b"\x80\x02" + b")" + b"\x85" * 20_000 + b")R.", "something: it needs code"),  # a name without end
        (b"\x80\x02" + b")" + b")R" * 20_000 + b".", "something: it needs code"),
        (b"\x80\x02}\x8b\x00\x00\x01\x00" + b"\x77" * 65536 + b"Ns.", "a key is too large a number"),
        (b"\x80\x02}K\x01C\x041\x1b[2s.", "has no tensors"),
        (b"\x80\x02cm\x1b[2J\nred\n)R.", "m\\x1b[2J.red: it needs code"),
        (b"\x80\x02" + b"]" * 200 + b"a" * 199 + b".", "has more than 100 containers in each other"),
    ],
)
def test_pickles_that_are_meant_to_harm(tmp_path: Path, content: bytes, why: str) -> None:
    assert why in refused(pickled(content, tmp_path / "a.pt", {"0": bytes(32)}))


def test_a_file_that_holds_itself_over_and_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astray.checkpoints.pickled_entries.MOST_ENTRIES", 10_000)
    laughs: Any = ["ha", {}]
    for _ in range(30):
        laughs = [laughs] * 10
    assert "has more than 10,000 entries" in refused(pickled(laughs, tmp_path / "a.pt", {}))


def test_two_entries_of_one_name(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tmp_path / "a.pt")
    assert "has two entries called 'a.b'" in refused(tmp_path / "a.pt")


# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    for number in (1, 2):
        save_file({f"t{number}": torch.full((2,), float(number))}, folder / f"model-{number}.safetensors")
    save_file({"t9": torch.ones(1)}, tmp_path / "outside.safetensors")
    write_index(folder / "model.safetensors.index.json", {"t1": "model-1.safetensors", "t2": "model-2.safetensors"})
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors", "x/../../outside.safetensors", "..\\outside.safetensors", "/etc/passwd", "..", ".",
        "", "a\0b", 3, None, ["x"],
    ],
)  # fmt: skip
def test_an_index_that_leads_elsewhere(sharded: Path, name: Any) -> None:
    write_index(sharded / "model.safetensors.index.json", {"t9": name})
    assert "An index may name nothing but files beside it, so that is not followed" in refused(sharded)


@pytest.mark.parametrize("name", ["x" * 300, "a\ud800", "\x1b[31m"])
def test_an_index_that_names_what_no_file_is_called(sharded: Path, name: str) -> None:
    write_index(sharded / "model.safetensors.index.json", {"t1": "model-1.safetensors", "t9": name})
    said = refused(sharded)
    assert "names 2 files, and not all are there: 1 missing" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": ["a"]}', b"\xff\xfe"]
)
def test_an_index_that_is_none(sharded: Path, content: bytes) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(content)
    assert "is not an index: it has no whole weight_map" in refused(sharded)


def test_shards_that_are_not_there_or_not_of_one_checkpoint(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    write_index(index, {"t1": "model-1.safetensors", "t2": "model-3.safetensors"})
    message = refused(sharded)
    assert "names 2 files, and not all are there: 1 missing (model-3.safetensors). Copy the rest too." in message
    assert message.endswith(f"such as {sharded}/model-1.safetensors.")
    write_index(index, {"t1": "model-1.safetensors", "t7": "model-2.safetensors"})
    assert "'t7' is in model-2.safetensors, and it is not" in refused(sharded)
    save_file({"t1": torch.ones(1)}, sharded / "model-2.safetensors")
    write_index(index, {"x": "model-1.safetensors", "y": "model-2.safetensors"})
    assert "has 't1' in two files" in refused(sharded)


def test_folders_without_one_checkpoint(tmp_path: Path) -> None:
    assert refused(tmp_path).endswith("holds no checkpoint: it is empty.")
    (tmp_path / "notes.txt").touch()
    assert refused(tmp_path).endswith("holds no checkpoint: it has notes.txt.")
    (tmp_path / "__0_0.distcp").touch()
    assert "has the parts of a distributed checkpoint, but no .metadata" in refused(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"t": torch.ones(1)}, tmp_path / name)
    assert "has several files of weights and no index. Give one: a.safetensors, b.safetensors." in refused(tmp_path)


# ---- distributed ---------------------------------------------------------------------------------------------------


class Chunked:
    """A distributed checkpoint by hand: a tensor of 4×4 in chunks, described by torch's own classes."""

    def __init__(self, folder: Path, boxes: list[tuple[int, int, int, int]]) -> None:
        from torch.distributed.checkpoint import metadata as m
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        folder.mkdir()
        self.folder = folder
        self.whole = torch.arange(16.0).reshape(4, 4)
        out = io.BytesIO()
        chunks, self.places = [], {}
        for row, column, rows, columns in boxes:
            start = out.tell()
            torch.save(self.whole[row : row + rows, column : column + columns].clone(), out)
            chunks.append(m.ChunkStorageMetadata(torch.Size([row, column]), torch.Size([rows, columns])))
            index = m.MetadataIndex("weight", [row, column])
            self.places[index] = _StorageInfo("__0_0.distcp", start, out.tell() - start)
        (folder / "__0_0.distcp").write_bytes(out.getvalue())
        properties = m.TensorProperties(torch.float32)
        self.listed = {"weight": m.TensorStorageMetadata(properties, torch.Size([4, 4]), chunks)}
        self.metadata = m.Metadata(self.listed, storage_data=self.places)
        self.write()

    def write(self) -> None:
        with (self.folder / ".metadata").open("wb") as file:
            pickle.dump(self.metadata, file)


QUARTERS = [(0, 0, 2, 2), (0, 2, 2, 2), (2, 0, 2, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize(
    "boxes", [QUARTERS, [(0, 0, 4, 1), (0, 1, 4, 3)], [(2, 0, 2, 4), (0, 0, 2, 4)], [(0, 0, 4, 4)]]
)
def test_chunks_are_put_together(tmp_path: Path, boxes: list[tuple[int, int, int, int]]) -> None:
    chunked = Chunked(tmp_path / "dcp", boxes)
    with checkpoints.open(chunked.folder) as found:
        assert same(found["weight"], chunked.whole)
        assert torch.cat([torch.from_numpy(block) for block in found.blocks("weight", 24)]).tolist() == list(range(16))


@pytest.mark.parametrize(
    "boxes", [QUARTERS[:3], [*QUARTERS[:3], (2, 0, 2, 2)], [(0, 0, 4, 2), (0, 1, 4, 2)], [(1, 0, 4, 4)]]
)
def test_chunks_that_do_not_make_up_the_whole(tmp_path: Path, boxes: list[tuple[int, int, int, int]]) -> None:
    chunked = Chunked(tmp_path / "dcp", boxes)
    assert "weight is a tensor of float32 and shape [4, 4]: its parts do not" in refused(chunked.folder)


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd", "a/../../b"])
def test_metadata_that_leads_elsewhere(tmp_path: Path, path: str) -> None:
    chunked = Chunked(tmp_path / "dcp", QUARTERS)
    next(iter(chunked.places.values())).relative_path = path
    chunked.write()
    assert f"leads to {path!r}, outside of its folder. That is not followed." in refused(chunked.folder)


@pytest.mark.parametrize(
    ("path", "bits"), [("a\ud800", 0), ("x" * 300, 0), ("__0_0.distcp", 63), ("__0_0.distcp", 20_000)]
)
def test_metadata_that_names_what_no_file_has(tmp_path: Path, path: str, bits: int) -> None:
    chunked = Chunked(tmp_path / "dcp", QUARTERS)
    for place in chunked.places.values():
        place.relative_path, place.offset = path, 1 << bits
    chunked.write()
    with pytest.raises(CheckpointError, match=r"\.$"), checkpoints.open(chunked.folder) as found:
        found["weight"]


def test_data_of_a_distributed_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    chunked = Chunked(tmp_path / "dcp", QUARTERS)
    data = chunked.folder / "__0_0.distcp"
    whole = data.read_bytes()
    for content, why in (
        (whole[:-10], "before a part of 'weight' at"),
        (whole[::-1], "cannot be read as a zip file"),
    ):
        data.write_bytes(content)
        with checkpoints.open(chunked.folder) as found, pytest.raises(CheckpointError, match=why):
            found["weight"]
    data.unlink()
    with (
        checkpoints.open(chunked.folder) as found,
        pytest.raises(CheckpointError, match="cannot be read: No such file"),
    ):
        found["weight"]
    data.write_bytes(whole)
    one, other, *_ = chunked.places.values()
    one.offset, one.length = other.offset, other.length
    chunked.listed["weight"].properties.dtype = torch.float64
    chunked.write()
    other_dtype = pytest.raises(
        CheckpointError, match=r"float64 of shape \[2, 2\], and holds float32 of shape \[2, 2\]"
    )
    with checkpoints.open(chunked.folder) as found, other_dtype:
        found["weight"]


def test_metadata_that_is_none(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert "is not what torch.distributed.checkpoint writes" in refused(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(os.mkdir, str(tmp_path / "harm"))))
    assert "is not what torch.distributed.checkpoint writes" in refused(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_a_changed_form_is_refused(tmp_path: Path) -> None:
    chunked = Chunked(tmp_path / "dcp", QUARTERS)
    next(iter(chunked.places.values())).transform_descriptors = ["zstd"]
    chunked.write()
    assert "in a form that an extension gave it, which astray does not read" in refused(chunked.folder)


@pytest.mark.parametrize("key", [1 << 20_000, [[]], None, {}], ids=["digits", "list", "none", "dict"])
def test_a_key_of_a_storage_that_cannot_be_written_out(tmp_path: Path, key: object) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.arange(8.0)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    keys = pickle.dumps([next(iter(pickle_keys(whole)))], 2)
    assert keys in whole
    path.write_bytes(whole.replace(keys, pickle.dumps([key], 2)))
    assert "a.pt" in refused(path)


def pickle_keys(whole: bytes) -> list[str]:
    """The keys of the storages, which the fifth pickle of an old file lists."""
    stream = io.BytesIO(whole)
    for _ in range(3):
        pickle.load(stream)
    from astray.checkpoints.pickles import read_pickle

    _, place = read_pickle(whole, "a", stream.tell())
    return pickle.loads(whole[place:])


@pytest.mark.parametrize("shape", [[0, 1 << 59, 1 << 59], [1 << 59, 0]])
def test_a_tensor_without_elements_of_a_shape_that_none_has(tmp_path: Path, shape: list[int]) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "has an impossible shape" in refused(path)
