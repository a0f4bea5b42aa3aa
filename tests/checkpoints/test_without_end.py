"""Small files that ask for endless work, by coming back to the same things: a sentence each, after bounded work.

Each of them would take hours or all memory if it were followed. The bounds are lower here, so that it takes little to
reach them; a limit of computing time ends a test that is not bounded.
"""

from __future__ import annotations

import io
import json
import pickle
import signal
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from astray import checkpoints
from astray.checkpoints import distributed, pickled_entries, pickles
from astray.checkpoints.distributed import TensorChunk
from astray.checkpoints.torch_files import ByteRange
from astray.errors import CheckpointError

SECONDS = 100


@pytest.fixture(autouse=True)
def _bounded_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def ring(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"more than {SECONDS} s of computing")

    monkeypatch.setattr(pickled_entries, "MOST_ENTRIES", 100_000)
    monkeypatch.setattr(pickled_entries, "MOST_VISITED", 1_000_000)
    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def saved(path: Path, pickled: bytes) -> Path:
    """A file of torch.save with this pickle in it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", b"3\n")
    return path


def why(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoints.open(path)
    return str(error.value)


def remembered(number: int, what: bytes) -> bytes:
    """Something that the pickle can come back to."""
    return what + b"r" + struct.pack("<I", number)


def again(number: int) -> bytes:
    return b"j" + struct.pack("<I", number)


def text(content: str) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content.encode()


def laughs(levels: int, inner: bytes) -> bytes:
    """A list of ten times the list before, so many times over, and around them another."""
    found = b"\x80\x02(" + remembered(0, inner)
    for level in range(levels):
        found += remembered(level + 1, b"](" + 10 * again(level) + b"e")
    return found + b"l."


def test_a_billion_laughs(tmp_path: Path) -> None:
    assert "more than 100,000 entries" in why(saved(tmp_path / "a.pt", laughs(20, b"}")))


def test_a_long_list_seen_often(tmp_path: Path) -> None:
    numbers = b"](" + 100_000 * b"K\x01" + b"e"
    content = b"\x80\x02(" + remembered(0, numbers) + 200_000 * again(0) + b"l."
    assert "the same things again and again" in why(saved(tmp_path / "a.pt", content))


def test_a_long_name_said_often(tmp_path: Path) -> None:
    level = b"}(" + remembered(0, text("n" * 100_000)) + remembered(1, b"](" + 50_000 * b"]" + b"e") + b"u"
    assert "names of more than 1,000,000,000 characters" in why(saved(tmp_path / "a.pt", b"\x80\x02" + level + b"."))


def test_modules_that_share_what_they_leave_out(tmp_path: Path) -> None:
    nothing = remembered(0, b"}(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(50_000)) + b"u")
    state = b"}(" + text("_parameters") + again(0) + text("_buffers") + again(0) + text("_modules") + again(0) + b"u"
    module = b"cm\nM\n)R" + state + b"b"
    content = b"\x80\x02(" + nothing + remembered(1, b"](" + module + b"e") + 50_000 * again(1) + b"l."
    assert "the same things again and again" in why(saved(tmp_path / "a.pt", content))


def test_objects_that_share_what_lies_in_them(tmp_path: Path) -> None:
    shared = remembered(0, b"](" + 90_000 * b"]" + b"e")
    content = b"\x80\x02(" + shared + 20_000 * (b"cm\nf\n" + again(0) + b"\x85R") + b"l."
    assert "the same things again and again" in why(saved(tmp_path / "a.pt", content))


def test_a_tensor_inside_of_itself(tmp_path: Path) -> None:
    """The arguments of a subclass are those of a subclass, and so on in a circle."""
    around = b"ctorch._tensor\n_rebuild_from_type_v2\n"
    circle = remembered(0, b"]") + b"(" + around + b"N" + again(0) + b"e"
    content = b"\x80\x02}" + text("a") + around + b"(" + around + b"N" + circle + b"tRs."
    assert "a.pt" in why(saved(tmp_path / "a.pt", content))


def test_the_key_of_a_storage_that_is_a_billion_laughs(tmp_path: Path) -> None:
    key = b""
    for level in range(1, 13):
        key += remembered(level, b"](" + 10 * (b"N" if level == 1 else again(level - 1)) + b"e") + b"0"
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + again(12) + text("cpu") + b"K\x01tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00)) \x89}tR".replace(b" ", b"")
    assert "makes no sense" in why(saved(tmp_path / "a.pt", b"\x80\x02" + key + b"}" + text("a") + tensor + b"s."))


def test_sizes_without_end_seen_often(tmp_path: Path) -> None:
    sizes = remembered(0, b"](" + 100_000 * b"K\x01" + b"e")
    content = b"\x80\x02(" + sizes + b"(" + 100_000 * (b"ctorch\nSize\n" + again(0) + b"\x85R") + b"ll."
    assert "a.pt" in why(saved(tmp_path / "a.pt", content))


def test_keys_that_share_a_hash(tmp_path: Path) -> None:
    largest = (1 << 61) - 1  # of which all multiples have the hash 0
    numbers = b"".join(pickle.dumps(n * largest, 2)[2:-1] + b"N" for n in range(1, 200_000))
    assert "a key is too large a number" in why(saved(tmp_path / "a.pt", b"\x80\x02}(" + numbers + b"u."))


@pytest.mark.parametrize(
    ("content", "most", "said"),
    [
        (b"]" * 2000, "MOST_OBJECTS", "it makes more than 1,000 objects"),
        (b"(" + b"K\x01\x85" * 2000, "MOST_OBJECTS", "it makes more than 1,000 objects"),
        (b"N" + b"\x94" * 2000, "MOST_MEMOISED", "it numbers more than 1,000 things"),
    ],
)
def test_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, most: str, said: str
) -> None:
    monkeypatch.setattr(pickles, most, 1000)
    assert said in why(saved(tmp_path / "a.pt", b"\x80\x02" + content + b"."))


def test_a_header_that_repeats_a_name_at_its_end(tmp_path: Path) -> None:
    names = [*(f"n{n}" for n in range(200_000)), "n199999"]
    raw = ("{" + ",".join(f'"{name}":0' for name in names) + "}").encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    assert "'n199999' is in it twice" in why(tmp_path / "a.safetensors")


def test_a_header_of_many_tensors(tmp_path: Path) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    raw = ("{" + ",".join(f'"n{n}":{entry}' for n in range(20_000)) + "}").encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with checkpoints.open(tmp_path / "a.safetensors") as found:
        assert len(found) == 20_000


def test_an_index_that_names_many_files(tmp_path: Path) -> None:
    weights = {f"n{n}": f"f{n}" for n in range(50_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert "50000 missing (f0, f1, f2 …)" in why(tmp_path)


def test_a_compressed_zip_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(100_000_000))
    assert "is compressed" in why(tmp_path / "a.pt")


def test_parts_of_a_tensor_that_are_too_many_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "MOST_COMPARED", 1_000_000)
    parts = [TensorChunk((0, n), (1, 1), Path("f"), ByteRange(n, 1)) for n in range(20_000)]
    with pytest.raises(ValueError, match="too many parts"):
        distributed._cover((1, 20_000), parts)


def test_embedded_files_that_overlap_many_times_are_refused() -> None:
    chunk = TensorChunk((), (), Path("d/f"), ByteRange(1, 9))
    distributed._check_overlap({(f"{n}", None): chunk for n in range(10)})
    with pytest.raises(CheckpointError, match="9,000 bytes of tensors lie in the first 10 of d/f, over each other"):
        distributed._check_overlap({(f"{n}", None): chunk for n in range(1000)})


def test_a_whole_checkpoint_is_read_as_before(tmp_path: Path) -> None:
    import torch

    state = {"a": torch.nn.Parameter(torch.ones(3)), "n": {1 << 63: torch.ones(2), "s": torch.Size([2, 3])}}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    (tmp_path / "a.pt").write_bytes(buffer.getvalue())
    with checkpoints.open(tmp_path / "a.pt") as found:
        assert found.names == ("a", f"n.{1 << 63}")
        assert found.others["n.s"] == (2, 3)
