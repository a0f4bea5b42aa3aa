"""Values on their way from a device to the disk: those of the moment, in bounded memory, whatever happens next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from astray.device.staging import NotStagedError, Staged, Staging, boxes  # noqa: E402
from astray.device.streams import SynchronousDevice  # noqa: E402
from astray.records import MissedTensor, Tensor  # noqa: E402
from astray.store import RunInfo, RunWriter, open_run  # noqa: E402

CPU = torch.device("cpu")
SMALL = 4 << 20  # of memory: four chunks


class Delayed(SynchronousDevice):
    """A device that copies to the host at the last moment: when a stream or a thread waits for it."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.stream = "main"
        self.made: list[int] = []
        self.captures = False
        self.failure: str | None = None
        self._happening = threading.Lock()

    def is_capturing(self) -> bool:
        return self.captures

    def current(self) -> str:
        return self.stream

    def allocate_device(self, nbytes: int) -> Any:
        self.made.append(nbytes)
        return super().allocate_device(nbytes)

    def allocate_host(self, nbytes: int) -> Any:
        self.made.append(nbytes)
        return super().allocate_host(nbytes)

    def fetch(self, host: Any, device: Any, after: Any) -> Any:
        return [(host, device)]

    def wait_event(self, stream: Any, event: Any) -> None:
        self._happen(event)

    def wait(self, event: Any) -> None:
        if self.failure is not None:
            raise RuntimeError(self.failure)
        self._happen(event)

    def _happen(self, event: Any) -> None:
        with self._happening:
            while event:
                host, device = event.pop()
                host.copy_(device)


def bytes_of(staged: Staged) -> bytes:
    """What the writer would get."""
    found = b""
    for piece in staged.pieces():
        if piece is not None:
            assert piece.ready is not None
            assert piece.release is not None
            piece.ready()
            found += bytes(piece.data)
            piece.release()
    return found


def plain_bytes(tensor: Any) -> bytes:
    """The bytes of a tensor in row-major order, by another way."""
    storage = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().untyped_storage()
    return torch.tensor(storage, dtype=torch.uint8).numpy().tobytes()


def row(seq: int, tensor: Any) -> Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Tensor(seq, "output", "0", dtype, tuple(tensor.shape), tensor.stride(), "device", False)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    with RunWriter(tmp_path / "run", info=RunInfo.of_process()) as writer:
        yield writer


def record(writer: RunWriter, staging: Staging, tensor: Any, seq: int) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = writer.values(staging.take(tensor), f"{seq}.output.0", dtype, tuple(tensor.shape))
    writer.tensor(row(seq, tensor), values)


def tensors(device: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 5, 4, generator=generator).to(device)
    return {
        "float32": whole,
        "a leaf": torch.randn(9, generator=generator).to(device).requires_grad_(),
        "bfloat16": whole.to(torch.bfloat16),
        "float8": whole.to(torch.float8_e4m3fn),
        "bool": whole > 0,
        "int64": torch.arange(7, device=device),
        "complex64": torch.complex(whole, -whole),
        "complex128": torch.complex(whole.double(), -whole.double()),
        "conjugate": torch.complex(whole, -whole).conj(),
        "negative": torch.complex(whole, -whole).conj().imag,
        "transposed": whole.permute(2, 0, 1),
        "strided": whole[::2, :, 1::2],
        "expanded": whole[0, 0].expand(3, 4),
        "complex strided": torch.complex(whole.double(), whole.double())[:, ::2],
        "a number": torch.tensor(2.5, device=device),
        "nothing": torch.zeros(0, 3, device=device),
        "NaN with a payload": torch.tensor([0x7FC12345, -0x3EDCBB], dtype=torch.int32).view(torch.float32).to(device),
    }


@pytest.mark.parametrize("name", tensors(CPU))
def test_every_bit_arrives(name: str) -> None:
    tensor = tensors(CPU)[name]
    staging = Staging(CPU, host_bytes=SMALL, operations=Delayed())
    staged = staging.take(tensor)
    assert staged.nbytes == tensor.numel() * tensor.element_size()
    staged.finish(lambda: None)
    assert bytes_of(staged) == plain_bytes(tensor)


def test_the_numbers_are_those_of_the_moment() -> None:
    staging = Staging(CPU, host_bytes=SMALL, operations=Delayed())
    tensor = torch.arange(1000.0)
    before = plain_bytes(tensor)
    staged = staging.take(tensor)
    tensor.zero_()
    again = staging.take(tensor)
    assert bytes_of(staged) == before
    assert bytes_of(again) == plain_bytes(tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8", "bool", "complex64", "complex128", "transposed"])
def test_a_sample_is_gathered_by_row_major_position(dtype: str) -> None:
    tensor = tensors(CPU)[dtype]
    staging = Staging(CPU, host_bytes=SMALL, operations=Delayed())
    positions = np.array([0, 7, 8, 41, 119])
    for _ in range(2):  # positions are kept
        staged = staging.take(tensor, positions)
        assert bytes_of(staged) == plain_bytes(tensor.reshape(-1)[torch.from_numpy(positions)])


def test_memory_is_bounded_and_used_again(writer: RunWriter, tmp_path: Path) -> None:
    device = Delayed()
    staging = Staging(CPU, host_bytes=SMALL, device_bytes=SMALL, operations=device)
    sizes = [16, 3000, 50_000, 70_000, 3 << 18, 10]
    for seq in range(300):
        record(writer, staging, torch.full((sizes[seq % 6],), seq, dtype=torch.int32), seq)
    writer.close()
    staging.close()
    assert sum(device.made) <= 2 * SMALL
    run = open_run(tmp_path / "run")
    assert run.complete
    for seq in range(300):
        assert (run.values(0, seq) == seq).all()
        assert len(run.values(0, seq)) == sizes[seq % 6]


@pytest.mark.parametrize("shape", [(1 << 22,), (64, 64, 1024)])
def test_a_tensor_larger_than_all_memory_goes_in_pieces(
    writer: RunWriter, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    waited: list[float] = []
    staging = Staging(CPU, host_bytes=SMALL, device_bytes=SMALL, operations=Delayed(), waited=waited.append)
    flat = torch.arange(1 << 22, dtype=torch.int32).view(shape)
    tensor = flat if len(shape) == 1 else flat.transpose(0, 1)
    record(writer, staging, tensor, 0)
    writer.close()
    assert np.array_equal(open_run(tmp_path / "run").values(0, 0), tensor.numpy())
    assert waited
    assert all(seconds >= 0 for seconds in waited)


def test_waiting_is_counted(writer: RunWriter) -> None:
    staging = Staging(CPU, host_bytes=SMALL, operations=Delayed(), waited=writer.waited)
    record(writer, staging, torch.zeros(1 << 22), 0)
    writer.close()
    assert writer.waited_seconds > 0
    assert writer.failure is None


def test_small_tensors_share_a_copy() -> None:
    device = Delayed()
    copies: list[int] = []
    fetch = device.fetch
    device.fetch = lambda host, memory, after: (copies.append(host.numel()), fetch(host, memory, after))[1]  # type: ignore[method-assign]
    staging = Staging(CPU, host_bytes=SMALL, operations=device)
    staged = [staging.take(torch.full((5,), float(i))) for i in range(20)]
    assert copies == []
    assert [bytes_of(each) for each in staged] == [plain_bytes(torch.full((5,), float(i))) for i in range(20)]
    assert copies == [19 * 64 + 20]


def test_a_graph_capture_is_left_alone() -> None:
    device = Delayed()
    staging = Staging(CPU, host_bytes=SMALL, operations=device)
    device.captures = True
    with pytest.raises(NotStagedError, match="CUDA graph"):
        staging.take(torch.zeros(3))
    assert device.made == []


def test_bytes_that_never_come_cost_only_their_values(writer: RunWriter, tmp_path: Path) -> None:
    device = Delayed()
    staging = Staging(CPU, host_bytes=SMALL, operations=device)
    record(writer, staging, torch.ones(100), 0)
    writer.flush()
    device.failure = "an illegal memory access was encountered"
    record(writer, staging, torch.ones(30_000), 1)
    writer.flush()
    device.failure = None
    record(writer, staging, torch.ones(100), 2)
    writer.close()
    run = open_run(tmp_path / "run")
    assert run.complete
    assert run.ranks[0].tensors.valid("blob_file").tolist() == [True, False, True]
    assert (run.values(0, 2) == 1).all()
    assert run.ranks[0].end is not None
    why = "RuntimeError: an illegal memory access was encountered"
    assert run.ranks[0].end.missed == [MissedTensor("the values of a tensor", why, 1)]
    assert run.ranks[0].end.values == 2


def test_a_failure_in_the_middle_of_a_tensor_ends_in_a_note(writer: RunWriter, tmp_path: Path) -> None:
    class Broken(Delayed):
        marks = 0

        def record_event(self, stream: Any, event: Any = None) -> Any:
            self.marks += 1
            if self.marks > 12:  # two for each new chunk, of which there are four
                raise RuntimeError("out of memory")
            return super().record_event(stream, event)

    staging = Staging(CPU, host_bytes=SMALL, device_bytes=SMALL, operations=Broken())
    record(writer, staging, torch.ones(1 << 22), 0)
    writer.close()
    run = open_run(tmp_path / "run")
    assert run.values(0, 0) is None
    assert run.ranks[0].end is not None
    assert [missed.why for missed in run.ranks[0].end.missed] == ["RuntimeError: out of memory"]


def test_nothing_waits_for_a_writer_that_is_gone(writer: RunWriter) -> None:
    device = Delayed()
    staging = Staging(CPU, host_bytes=SMALL, device_bytes=SMALL, operations=device)
    writer.close()
    for seq in range(50):
        record(writer, staging, torch.zeros(1 << 17 if seq % 2 else 1 << 21), seq)
    assert len(device.made) <= 8


def test_threads_and_streams_take_at_once(writer: RunWriter, tmp_path: Path) -> None:
    staging = Staging(CPU, host_bytes=4 * SMALL, operations=Delayed())

    def work(start: int) -> None:
        for seq in range(start, start + 50):
            record(writer, staging, torch.full((seq * 97 % 40_000,), seq), seq)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    run = open_run(tmp_path / "run")
    found = run.ranks[0].tensors["seq"]
    assert len(found) == 200
    for place, seq in enumerate(found.tolist()):
        assert run.values(0, place).tolist() == [seq] * (seq * 97 % 40_000)


def test_large_tensors_of_several_threads_get_through_together(writer: RunWriter, tmp_path: Path) -> None:
    """Each holds memory that another waits for, and a flush waits for everything to be written."""
    staging = Staging(CPU, host_bytes=SMALL, device_bytes=SMALL, operations=Delayed())

    def work(start: int) -> None:
        for seq in range(start, start + 10):
            record(writer, staging, torch.full((3 << 20,), seq, dtype=torch.int16), seq)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 10, 20)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert writer.flush()
    writer.close()
    run = open_run(tmp_path / "run")
    found = run.ranks[0].tensors["seq"].tolist()
    assert sorted(found) == list(range(30))
    assert all((run.values(0, place) == seq).all() for place, seq in enumerate(found))


@pytest.mark.parametrize("most", [1, 3, 4, 20, 59, 1000])
def test_boxes_follow_one_another(most: int) -> None:
    tensor = torch.arange(120).view(2, 3, 4, 5).permute(3, 0, 2, 1)
    found = list(boxes(tensor, most))
    assert torch.equal(torch.cat([box.reshape(-1) for box in found]), tensor.reshape(-1))
    assert all(box.numel() <= most for box in found)


# -- on the card -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> Any:
    return torch.device("cuda", 0)


@pytest.mark.gpu
def test_every_bit_arrives_from_the_card(cuda: Any) -> None:
    staging = Staging(cuda)
    for name, tensor in tensors(cuda).items():
        staged = staging.take(tensor)
        staged.finish(lambda: None)
        assert bytes_of(staged) == plain_bytes(tensor), name
    staging.close()


@pytest.mark.gpu
def test_a_sample_from_the_card(cuda: Any) -> None:
    staging = Staging(cuda)
    positions = np.array([0, 7, 8, 41, 119])
    for name in ("float32", "bfloat16", "float8", "bool", "complex64", "complex128", "transposed"):
        tensor = tensors(cuda)[name]
        expected = plain_bytes(tensor.reshape(-1)[torch.from_numpy(positions).to(cuda)])
        assert bytes_of(staging.take(tensor, positions)) == expected, name
    staging.close()


@pytest.mark.gpu
def test_overwritten_and_freed_right_after(cuda: Any) -> None:
    """The device is kept busy, so that nothing has been copied yet when the tensor changes."""
    staging = Staging(cuda, host_bytes=64 << 20, device_bytes=32 << 20)
    busy = torch.randn(4096, 4096, device=cuda)
    staged = []
    for i in range(8):
        for _ in range(20):
            busy = busy @ busy * 1e-4
        tensor = torch.full((1 << 19,), float(i), device=cuda)
        staged.append(staging.take(tensor))
        tensor.fill_(-1.0)
        del tensor
        torch.full((1 << 19,), -2.0, device=cuda)  # takes the memory that was freed
    for i, each in enumerate(staged):
        assert bytes_of(each) == np.full(1 << 19, i, np.float32).tobytes()
    staging.close()


@pytest.mark.gpu
def test_rounds_without_growth(cuda: Any, tmp_path: Path) -> None:
    sizes = [16, 3000, 70_000, 1 << 20, 5 << 20, 40 << 20]
    with RunWriter(tmp_path / "run", info=RunInfo.of_process()) as writer:
        staging = Staging(cuda, host_bytes=64 << 20, device_bytes=32 << 20, waited=writer.waited)
        kept = [torch.empty(size, dtype=torch.uint8, device=cuda) for size in sizes]
        used = []
        for step in range(50):
            for place, tensor in enumerate(kept):
                tensor.fill_(step)
                record(writer, staging, tensor, step * len(sizes) + place)
            used.append(torch.cuda.memory_allocated(cuda))
    assert staging.device_bytes <= 32 << 20
    assert max(used[10:]) == used[10]  # less, when others let go of something
    run = open_run(tmp_path / "run")
    for seq in range(0, 50 * len(sizes), 7):
        values = run.values(0, seq)
        assert values.min() == values.max() == seq // len(sizes)
    staging.close()


@pytest.mark.gpu
def test_backward_threads_and_side_streams(cuda: Any, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", info=RunInfo.of_process()) as writer:
        staging = Staging(cuda, host_bytes=64 << 20, device_bytes=32 << 20)
        expected: dict[int, bytes] = {}

        def take(seq: int, tensor: Any) -> None:
            record(writer, staging, tensor, seq)
            expected[seq] = plain_bytes(tensor)

        side = torch.cuda.Stream(cuda)
        x = torch.randn(512, 512, device=cuda, requires_grad=True)
        for step in range(5):
            y = x * step
            y.register_hook(lambda gradient, seq=3 * step: take(seq, gradient))
            y.square().sum().backward()
            side.wait_stream(torch.cuda.current_stream(cuda))
            with torch.cuda.stream(side):
                z = x.detach() + step
                record(writer, staging, z, 3 * step + 1)
            z.record_stream(side)
            torch.cuda.current_stream(cuda).wait_stream(side)
            expected[3 * step + 1] = plain_bytes(z)
            take(3 * step + 2, x.detach() - step)
    staging.close()
    run = open_run(tmp_path / "run")
    seqs = run.ranks[0].tensors["seq"].tolist()
    assert sorted(seqs) == list(range(15))
    for place, seq in enumerate(seqs):
        assert run.values(0, place).tobytes() == expected[seq]


@pytest.mark.gpu
def test_a_capture_on_the_card_is_refused_and_not_broken(cuda: Any, tmp_path: Path) -> None:
    static = torch.zeros(1 << 20, device=cuda)
    static.add_(1)
    with RunWriter(tmp_path / "run", info=RunInfo.of_process()) as writer:
        staging = Staging(cuda, host_bytes=64 << 20, device_bytes=32 << 20)
        for seq in range(40):  # still under way while the graph is captured
            record(writer, staging, torch.full((1 << 20,), float(seq), device=cuda), seq)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.add_(1)
            with pytest.raises(NotStagedError, match="CUDA graph"):
                staging.take(static)
        graph.replay()
        writer.flush()
    torch.cuda.synchronize()
    assert (static == 2).all()
    run = open_run(tmp_path / "run")
    assert all((run.values(0, seq) == seq).all() for seq in range(40))
    staging.close()
