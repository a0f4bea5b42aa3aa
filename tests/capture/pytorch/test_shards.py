"""The positions of the parts of distributed tensors: this process takes the role of every rank of a mesh in turn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import astray
from astray.capture.adapters import TensorReading
from astray.capture.pytorch.shards import add_up
from astray.capture.pytorch.tensors import TorchReader
from astray.stats import Strided, measure, merge_fingerprints


def playing(*mesh_shape: int) -> Iterator[DeviceMesh]:
    """The mesh as each of its ranks sees it. Nothing is communicated: the group is a fake one."""
    names = ("dp", "tp", "cp")[: len(mesh_shape)]
    for rank in range(prod(mesh_shape)):
        dist.init_process_group("fake", rank=rank, world_size=prod(mesh_shape), store=FakeStore())
        try:
            yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        finally:
            dist.destroy_process_group()


def read(tensor: torch.Tensor) -> TensorReading:
    return TorchReader().read(tensor, None, True)


def fingerprint(reading: TensorReading) -> int | None:
    assert reading.memory is not None
    return measure(reading.box or reading.memory, statistics=False, shard=reading.shard).fingerprint


def whole_fingerprint(tensor: torch.Tensor) -> int | None:
    return fingerprint(read(tensor))


def indices(placement: dict[str, Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Which elements of the whole tensor a part holds, computed from the text alone as docs/reference/format.md
    describes.
    """
    runs = {int(dim): found for dim, found in placement.get("runs", {}).items()}
    along = []
    for dim, (first, size) in enumerate(zip(placement["offset"], shape, strict=True)):
        stretches = runs.get(dim, [[first, size]])
        along.append(list(itertools.chain(*(range(start, start + length) for start, length in stretches))))
    return np.ix_(*along)


def values(reading: TensorReading) -> np.ndarray[Any, Any]:
    assert reading.memory is not None
    return reading.memory.view().copy()


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


LAYOUTS = [
    pytest.param((2,), [Shard(0)], (6, 4), id="even"),
    pytest.param((4,), [Shard(0)], (10, 3), id="uneven"),
    pytest.param((4,), [Shard(1)], (3, 2, 5), id="ranks without a part"),
    pytest.param((2,), [Shard(0)], (1,), id="one element"),
    pytest.param((2,), [Shard(0)], (0, 3), id="nothing at all"),
    pytest.param((2, 2), [Shard(0), Shard(1)], (5, 7), id="two dimensions"),
    pytest.param((2, 2), [Shard(0), Shard(0)], (10, 6), id="one dimension cut twice"),
    pytest.param((2, 2), [Shard(1), Shard(1)], (2, 7), id="one dimension cut twice, unevenly"),
    pytest.param((2, 2), [strided(0, 2), Shard(0)], (12, 3), id="FSDP after tensor parallelism"),
    pytest.param((2, 2), [strided(0, 2), Shard(0)], (7, 3), id="FSDP after tensor parallelism, unevenly"),
    pytest.param((2, 3), [strided(1, 3), Shard(1)], (2, 13, 2), id="the same on a middle dimension"),
    pytest.param((2, 2, 2), [strided(0, 4), strided(0, 2), Shard(0)], (16, 2), id="three cuts from the right"),
    pytest.param((2,), [strided(0, 3)], (12, 2), id="interleaved"),
    pytest.param((2,), [strided(1, 3)], (4, 12), id="interleaved columns"),
    pytest.param((2, 2), [Shard(0), strided(0, 2)], (16, 2), id="interleaved within a part"),
]


@pytest.mark.parametrize(("mesh_shape", "placements", "shape"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parts_are_those_of_the_whole(
    mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    put_together, prints = np.zeros(shape, values(read(whole)).dtype), []
    for mesh in playing(*mesh_shape):
        reading = read(distribute_tensor(whole, mesh, placements, src_data_rank=None))
        placement = json.loads(reading.placement or "")
        assert reading.note is None
        assert placement["shape"] == list(shape)
        assert placement["coordinate"] == list(mesh.get_coordinate() or ())
        put_together[indices(placement, reading.shape)] = values(reading)
        prints.append(fingerprint(reading))
    assert put_together.tobytes() == values(read(whole)).tobytes()
    assert merge_fingerprints(prints) == whole_fingerprint(whole)


def test_the_text_says_all_there_is_to_know() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    texts = [
        read(distribute_tensor(whole, mesh, [Replicate(), Shard(1)], src_data_rank=None)).placement
        for mesh in playing(2, 2)
    ]
    assert texts == [
        f'{{"mesh":[2,2],"names":["dp","tp"],"coordinate":[{dp},{tp}],"placements":["Replicate()","Shard(1)"],'
        f'"shape":[4,6],"offset":[0,{3 * tp}]}}'
        for dp in (0, 1)
        for tp in (0, 1)
    ]


def test_interleaved_parts_say_which_indices_they_hold() -> None:
    whole = torch.arange(8.0)
    (first, second) = (read(distribute_tensor(whole, mesh, [strided(0, 2)], src_data_rank=None)) for mesh in playing(2))
    assert values(first).tolist() == [0, 1, 4, 5]
    assert json.loads(first.placement or "")["runs"] == {"0": [[0, 2], [4, 2]]}
    assert json.loads(second.placement or "")["offset"] == [2]
    assert (first.shape, first.memory and first.memory.shape) == ((4,), (4,))


def test_a_mesh_without_names_has_none_in_the_text() -> None:
    for _ in playing(2):
        mesh = init_device_mesh("cpu", (2,))
        placement = json.loads(read(distribute_tensor(torch.ones(2), mesh, [Shard(0)], src_data_rank=None)).placement)
        assert "names" not in placement


def test_the_order_in_which_a_dimension_was_cut_is_followed() -> None:
    """A DTensor may state the order in which its mesh dimensions split, instead of using strided placements."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    whole, prints = torch.arange(8.0), []
    for mesh in playing(2, 2):
        left, right = mesh.get_coordinate() or (0, 0)
        local = whole.chunk(2)[right].chunk(2)[left]  # the second mesh dimension cut first
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        order = (ShardOrderEntry(0, (1, 0)),)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
        reading = read(DTensor(local, spec, requires_grad=False))
        assert json.loads(reading.placement or "")["offset"] == [int(local[0])]
        prints.append(fingerprint(reading))
    assert merge_fingerprints(prints) == whole_fingerprint(whole)


def test_partial_values_are_those_of_this_process() -> None:
    for mesh in playing(2):
        reading = read(DTensor.from_local(torch.full((2, 3), 5.0), mesh, [Partial()], run_check=False))
        assert json.loads(reading.placement or "")["placements"] == ["Partial(sum)"]
        assert json.loads(reading.placement or "")["offset"] == [0, 0]
        assert values(reading).tolist() == [[5.0] * 3] * 2


def test_placements_of_every_kind_have_a_name() -> None:
    found = []
    for mesh in playing(2):
        for placement in (Partial("avg"), _MaskPartial("sum"), Replicate(), Shard(0), strided(0, 2)):
            reading = read(DTensor.from_local(torch.ones(2), mesh, [placement], run_check=False))
            found += json.loads(reading.placement or "")["placements"]
        break
    assert found == ["Partial(avg)", "_MaskPartial(sum)", "Replicate()", "Shard(0)", "_StridedShard(0, 2)"]


def test_a_part_of_another_size_than_its_placement_says_is_recorded_without_a_place() -> None:
    odd = torch.arange(5.0)
    for mesh in playing(2):
        tensor = DTensor.from_local(odd, mesh, [Shard(0)], run_check=False, shape=torch.Size([8]), stride=(1,))
        reading = read(tensor)
        assert json.loads(reading.placement or "")["offset"] is None
        assert reading.note == "its place in the whole tensor is unknown, so the fingerprint is of itself alone"
        assert reading.shard is None
        assert fingerprint(reading) == whole_fingerprint(odd)


def test_uneven_interleaved_parts_say_that_their_fingerprint_is_their_own() -> None:
    whole = torch.arange(9.0)
    for mesh in playing(2):
        tensor = distribute_tensor(whole, mesh, [strided(0, 2)], src_data_rank=None)
        reading = read(tensor)
        placement = json.loads(reading.placement or "")
        assert reading.note == "its place in the whole tensor is unknown, so the fingerprint is of itself alone"
        assert whole.numpy()[indices(placement, reading.shape)].tolist() == values(reading).tolist()
        assert fingerprint(reading) == whole_fingerprint(tensor._local_tensor)


def test_a_process_outside_of_the_mesh_holds_nothing() -> None:
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        reading = read(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None))
        placement = json.loads(reading.placement or "")
        assert (placement["coordinate"], placement["offset"], placement["shape"]) == (None, None, [4, 2])
        assert reading.shape == (0,)
    finally:
        dist.destroy_process_group()


def test_a_tensor_that_is_still_on_its_way_is_waited_for_and_stays_as_it_was() -> None:
    pending = AsyncCollectiveTensor(torch.arange(3.0))
    assert values(read(pending)).tolist() == [0, 1, 2]
    assert not pending.completed
    for mesh in playing(2):
        reading = read(DTensor.from_local(pending, mesh, [Shard(0)], run_check=False))
        assert values(reading).tolist() == [0, 1, 2]
        assert json.loads(reading.placement or "")["shape"] == [6]


def test_a_sum_is_made_of_the_parts_that_are_here() -> None:
    for mesh in playing(2):
        one, other = (DTensor.from_local(torch.full((2,), x), mesh, [Partial()], run_check=False) for x in (1.0, 2.0))
        total = add_up(one, other)
        assert isinstance(total, DTensor)
        assert (total._local_tensor.tolist(), total.placements) == ([3.0, 3.0], (Partial(),))
        elsewhere = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
        assert add_up(one, elsewhere) is None  # to make them alike takes a collective
        assert add_up(one, torch.ones(2)) is None


def test_one_memory_that_is_part_of_two_tensors_is_two_tensors() -> None:
    local, reader = torch.arange(4.0), TorchReader()
    for mesh in playing(2):
        cut = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        same = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        whole = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        identities = [reader.identity(tensor) for tensor in (cut, same, whole)]
        first, second, third = (identity and (identity.owner, identity.key) for identity in identities)
        assert first == second != third
        local.add_(1)  # as an optimizer does
        changed = reader.identity(cut)
        assert changed is not None
        assert changed.key != identities[0].key  # type: ignore[union-attr]


@pytest.mark.parametrize("keep", ["tensors", "sample"])
def test_rows_of_a_recording_hold_the_part_and_its_place(keep: str, tmp_path: Path) -> None:
    whole = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    model = nn.Sequential(nn.Identity())
    for mesh in playing(2):
        with astray.record(tmp_path / "run", model, keep=keep):
            model(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    run = astray.open(tmp_path / "run")
    assert run.problems == []
    prints = []
    for rank, local in enumerate(whole.chunk(2)):
        tensors = run.ranks[rank].tensors
        assert len(tensors) == 4
        for row in map(tensors.row, range(len(tensors))):
            assert (row["shape"], row["stride"]) == (tuple(local.shape), (4, 1))
            assert json.loads(row["placement"])["offset"] == [3 * rank, 0]
            assert row["mean"] == pytest.approx(local.double().mean().item(), rel=1e-12)
        kept = run.values(rank, 0)
        assert kept is not None
        np.testing.assert_array_equal(kept.reshape(-1), local.numpy().reshape(-1))
        prints.append(row["fingerprint"])
    assert merge_fingerprints(prints) == measure(Strided.from_numpy(whole.numpy())).fingerprint
