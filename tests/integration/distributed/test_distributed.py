"""Programs on two processes, recorded: one folder per rank, shards with their place, and not a bit changed.

The programs are in `programs.py`. `worker.py` runs them under torchrun, bare and recorded, and fails there when
anything differs or remains; the tests here look at what it recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray.capture.settings import LEVELS
from astray.stats import Strided, measure, merge_fingerprints
from astray.store import RunData
from integration.distributed.launching import HERE, torchrun

ALL = "+".join(LEVELS)
QUICK = ("plain", "ddp", "fsdp", "fsdp_late", "tensor_parallel", "collectives")
DATA_PARALLEL = ("plain", "ddp", "ddp_accumulating", "ddp_unused", "ddp_static", "ddp_bucket_views")
SHARDED = (
    "fsdp",
    "fsdp_keeping",
    "fsdp_bfloat16",
    "fsdp_accumulating",
    "fsdp_stepping_twice",
    "fsdp_late",
    "fsdp_refilling",
)
TENSOR_PARALLEL = (
    "tensor_parallel", "tensor_parallel_uneven", "tensor_parallel_stepping_twice", "sequence_parallel",
    "embedding_parallel",
)  # fmt: skip

Row = dict[str, Any]


def run_all(folder: Path, levels: tuple[str, ...], programs: tuple[str, ...], processes: int = 2) -> Path:
    torchrun(HERE / "worker.py", folder, ",".join(levels), *programs, processes=processes)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(tmp_path_factory.mktemp("quick"), ("module", ALL), QUICK)


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(tmp_path_factory.mktemp("data_parallel"), LEVELS, DATA_PARALLEL)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(tmp_path_factory.mktemp("sharded"), LEVELS, SHARDED)


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(tmp_path_factory.mktemp("tensor_parallel"), LEVELS, TENSOR_PARALLEL)


def rows(run: RunData, rank: int, **wanted: Any) -> list[Row]:
    """The tensor rows of a rank with the columns of their calls, in the order they were observed."""
    one = run.ranks[rank]
    found = []
    for index, call in enumerate(one.call_rows.tolist()):
        row = {**one.calls.row(call), **one.tensors.row(index), "row": index}
        if all(row[name] == value for name, value in wanted.items()):
            found.append(row)
    return found


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("step", "micro", "site", "type", "call", "phase", "role", "path"))


def keys(run: RunData, rank: int, **wanted: Any) -> list[tuple[Any, ...]]:
    found = [key(row) for row in rows(run, rank, **wanted)]
    assert len(set(found)) == len(found)
    return sorted(found)


def whole_print(folder: Path, program: str, tensor: str) -> int | None:
    """The fingerprint of a whole tensor, as the bare program had it."""
    with np.load(folder / f"{program}.npz") as saved:
        return measure(Strided.from_numpy(np.ascontiguousarray(saved[tensor])), statistics=False).fingerprint


def merged(run: RunData, **wanted: Any) -> Iterator[tuple[Row, int, set[str]]]:
    """Each tensor of all ranks together: its row on rank 0, the sum of its distinct parts, and how it is placed."""
    everywhere: dict[tuple[Any, ...], list[Row]] = {}
    for rank in sorted(run.ranks):
        for row in rows(run, rank, **wanted):
            everywhere.setdefault(key(row), []).append(row)
    for parts in everywhere.values():
        assert len(parts) == len(run.ranks)
        distinct: dict[str, int] = {}
        placements = set()
        for row in parts:
            placement = json.loads(row["placement"]) if row["placement"] else {"placements": [], "offset": []}
            placements |= set(placement["placements"])
            part = f"{placement['offset']} {row['shape']}"
            assert distinct.setdefault(part, row["fingerprint"]) == row["fingerprint"]
        yield parts[0], merge_fingerprints(distinct.values()), placements


# -- what every program must show ------------------------------------------------------------------------------------


def check_every_run(folder: Path, programs: tuple[str, ...], levels: tuple[str, ...], processes: int = 2) -> None:
    for name in programs:
        for level in levels:
            run = astray.open(folder / f"{name}-{level}")
            assert run.complete, name
            assert (run.problems, sorted(run.ranks)) == ([], list(range(processes)))
            if level == "module":
                assert [one.end.missed for one in run.ranks.values()] == [[]] * processes, name
            notes = {row["note"] for rank in run.ranks for row in rows(run, rank)}
            assert notes <= ({None} if level == "module" else {None, "only a part of it has been filled yet"}), notes
        assert sorted(path.name for path in (folder / f"{name}-rank0").glob("rank*")) == ["rank0"]
        assert (folder / f"{name}-rank0" / "rank0" / "end.json").is_file()


def test_no_bit_changes_and_each_rank_has_a_whole_folder(quick: Path) -> None:
    check_every_run(quick, QUICK, ("module", ALL))


@pytest.mark.slow
def test_every_way_of_data_parallel_training_at_every_level(data_parallel: Path) -> None:
    check_every_run(data_parallel, DATA_PARALLEL, LEVELS)


@pytest.mark.slow
def test_every_way_of_sharded_training_at_every_level(sharded: Path) -> None:
    check_every_run(sharded, SHARDED, LEVELS)


@pytest.mark.slow
def test_every_way_of_tensor_parallel_training_at_every_level(tensor_parallel: Path) -> None:
    check_every_run(tensor_parallel, TENSOR_PARALLEL, LEVELS)


@pytest.mark.parametrize("program", ["ddp", "fsdp", "fsdp_late", "tensor_parallel"])
def test_sites_are_called_as_in_the_program_on_one_process(program: str, quick: Path) -> None:
    plain, distributed = astray.open(quick / "plain-module"), astray.open(quick / f"{program}-module")
    assert keys(distributed, 0) == keys(distributed, 1) == keys(plain, 0)


# -- data parallel ---------------------------------------------------------------------------------------------------


def test_ddp_gradients_are_those_of_the_rank_before_they_are_averaged(quick: Path) -> None:
    plain, ddp = astray.open(quick / "plain-module"), astray.open(quick / "ddp-module")
    for phase in ("forward", "backward"):
        first = {key(row): row["fingerprint"] for row in rows(plain, 0, step=0, phase=phase)}
        assert {key(row): row["fingerprint"] for row in rows(ddp, 0, step=0, phase=phase)} == first
    own = [row["fingerprint"] for row in rows(ddp, 1, step=0, role="gradient")]
    assert own != [row["fingerprint"] for row in rows(ddp, 0, step=0, role="gradient")]


def check_averages(folder: Path, program: str) -> None:
    run = astray.open(folder / f"{program}-module")
    for rank in (0, 1):
        averaged = rows(run, rank, phase="update", role="input", path="grad")
        assert len(averaged) == 5 * 15
        for row in averaged:
            whole = f"gradient {row['step']} {row['site']}"
            assert row["fingerprint"] == whole_print(folder, program, whole), row["site"]


def test_the_optimizer_gets_the_average(quick: Path) -> None:
    check_averages(quick, "ddp")


@pytest.mark.slow
def test_gradients_averaged_where_they_lie_are_read_again(data_parallel: Path) -> None:
    check_averages(data_parallel, "ddp_bucket_views")


@pytest.mark.slow
def test_ddp_by_any_option_is_the_same_program(data_parallel: Path) -> None:
    ddp = data_parallel / "ddp-module"
    static = astray.compare(ddp, data_parallel / "ddp_static-module")
    assert static.counts["identical"] == len(static.pairs) > 500


@pytest.mark.slow
def test_accumulated_gradients_are_seen_after_each_micro_step(data_parallel: Path) -> None:
    run = astray.open(data_parallel / "ddp_accumulating-module")
    for rank in (0, 1):
        found = rows(run, rank, site="head.bias", role="gradient", step=0)
        assert [(row["micro"], row["path"]) for row in found] == [
            (0, "grad"), (1, "added"), (1, "grad"), (2, "added"), (2, "grad")
        ]  # fmt: skip
        values = [float(run.values(rank, row["row"])[0]) for row in found]
        assert values[2] == np.float32(values[0]) + np.float32(values[1])
        assert values[4] == np.float32(values[2]) + np.float32(values[3])


@pytest.mark.slow
def test_parameters_that_were_not_used_have_no_gradient_row(data_parallel: Path) -> None:
    run = astray.open(data_parallel / "ddp_unused-module")
    for step in range(5):
        used = f"layers.{(step + 1) % 2}"
        assert {row["site"] for row in rows(run, 0, step=step, role="gradient")} == {f"{used}.weight", f"{used}.bias"}


# -- fully sharded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["fsdp", "fsdp_late"])
def test_reduced_gradients_are_shards_that_add_up_to_the_whole(program: str, quick: Path) -> None:
    run = astray.open(quick / f"{program}-module")
    found = list(merged(run, role="gradient"))
    assert len(found) == 5 * 15
    for row, fingerprint, placements in found:
        assert placements == {"Shard(0)"}
        assert fingerprint == whole_print(quick, program, f"gradient {row['step']} {row['site']}"), row["site"]


def test_uneven_and_empty_shards_are_recorded_as_they_are(quick: Path) -> None:
    run = astray.open(quick / "fsdp-module")
    shapes = []
    for site in ("blocks.0.up.weight", "head.bias"):
        for rank in (0, 1):
            (row,) = rows(run, rank, step=0, site=site, role="gradient")
            shapes.append((row["shape"], json.loads(row["placement"])["offset"]))
    assert shapes == [((4, 6), [0, 0]), ((3, 6), [4, 0]), ((1,), [0]), ((0,), [1])]


def test_parameters_of_a_call_are_whole_and_the_same_on_every_rank(quick: Path) -> None:
    run = astray.open(quick / "fsdp-module")
    for rank in (0, 1):
        for row in rows(run, rank, step=0, phase="forward", role="parameter"):
            name = row["path"] if row["site"] == "<root>" else f"{row['site']}.{row['path']}"
            assert row["placement"] is None
            assert row["fingerprint"] == whole_print(quick, "fsdp", f"weight {name}"), name


def test_weights_and_gradients_of_the_optimizer_are_shards_too(quick: Path) -> None:
    run = astray.open(quick / "fsdp-module")
    for row, fingerprint, _ in merged(run, phase="update", role="input", path="grad"):
        assert fingerprint == whole_print(quick, "fsdp", f"gradient {row['step']} {row['site']}")
    for row, fingerprint, _ in merged(run, step=0, phase="update", role="parameter", path="weight"):
        assert fingerprint == whole_print(quick, "fsdp", f"weight {row['site']}")


@pytest.mark.slow
def test_memory_that_is_filled_again_is_measured_again(sharded: Path) -> None:
    """Two updates in one step of the recording, with the same tensors at the same addresses, in two recordings."""
    often, twice = (astray.open(sharded / f"{name}-module") for name in ("fsdp", "fsdp_stepping_twice"))
    for step in (0, 1):
        for micro in (0, 1):
            expected = rows(often, 0, step=2 * step + micro, phase="forward", role="parameter")
            found = rows(twice, 0, step=step, micro=micro, phase="forward", role="parameter")
            assert [(row["site"], row["path"], row["fingerprint"]) for row in found] == [
                (row["site"], row["path"], row["fingerprint"]) for row in expected
            ]
    changed = [rows(twice, 0, step=0, micro=micro, phase="forward", role="parameter") for micro in (0, 1)]
    assert all(one["fingerprint"] != other["fingerprint"] for one, other in zip(*changed, strict=True))


@pytest.mark.slow
def test_the_same_memory_with_other_weights_is_never_taken_for_the_same(sharded: Path) -> None:
    run = astray.open(sharded / "fsdp_refilling-module")
    for rank in (0, 1):
        found = rows(run, rank, step=1, site="0", phase="forward", role="parameter", path="weight")
        assert [row["micro"] for row in found] == [0, 1, 2, 3]
        assert len({row["fingerprint"] for row in found}) == 4


@pytest.mark.slow
def test_weights_that_stay_gathered_make_no_difference(sharded: Path) -> None:
    diff = astray.compare(sharded / "fsdp-module", sharded / "fsdp_keeping-module")
    assert diff.counts["identical"] == len(diff.pairs) > 500


@pytest.mark.slow
def test_mixed_precision_shows_what_each_part_computes_in(sharded: Path) -> None:
    run = astray.open(sharded / "fsdp_bfloat16-module")
    assert {row["dtype"] for row in rows(run, 0, phase="forward", role="parameter")} == {"bfloat16"}
    assert {row["dtype"] for row in rows(run, 0, role="gradient")} == {"float32"}
    kinds = {(row["role"], row["dtype"]) for row in rows(run, 0, site="<root>", phase="forward")}
    assert kinds == {("input", "bfloat16"), ("parameter", "bfloat16"), ("output", "float32")}
    for row, fingerprint, _ in merged(run, role="gradient"):
        assert fingerprint == whole_print(sharded, "fsdp_bfloat16", f"gradient {row['step']} {row['site']}")


@pytest.mark.slow
def test_gradients_are_reduced_in_the_last_micro_step_only(sharded: Path) -> None:
    run = astray.open(sharded / "fsdp_accumulating-module")
    assert {row["micro"] for row in rows(run, 0, role="gradient")} == {1}
    for row, fingerprint, _ in merged(run, role="gradient"):
        assert fingerprint == whole_print(sharded, "fsdp_accumulating", f"gradient {row['step']} {row['site']}")


# -- tensor parallel -------------------------------------------------------------------------------------------------


def check_parallel_weights(folder: Path, program: str) -> set[str]:
    """The parameters at the start; gives the placements that were among them."""
    run = astray.open(folder / f"{program}-module")
    seen = set()
    for row, fingerprint, placements in merged(run, step=0, micro=0, phase="forward", role="parameter"):
        name = row["path"] if row["site"] == "<root>" else f"{row['site']}.{row['path']}"
        assert fingerprint == whole_print(folder, program, f"weight {name}"), name
        seen |= placements
    return seen


def test_parts_of_parallel_weights_add_up_to_the_whole(quick: Path) -> None:
    assert check_parallel_weights(quick, "tensor_parallel") == {"Shard(0)", "Shard(1)", "Replicate()"}
    run = astray.open(quick / "tensor_parallel-module")
    for row, fingerprint, _ in merged(run, role="gradient"):
        assert fingerprint == whole_print(quick, "tensor_parallel", f"gradient {row['step']} {row['site']}"), row[
            "site"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("program", TENSOR_PARALLEL)
def test_parts_add_up_in_every_parallel_program(program: str, tensor_parallel: Path) -> None:
    assert "Shard(0)" in check_parallel_weights(tensor_parallel, program)


@pytest.mark.slow
def test_weights_that_an_optimizer_wrote_to_without_a_trace_are_recorded_again(tensor_parallel: Path) -> None:
    run = astray.open(tensor_parallel / "tensor_parallel_stepping_twice-module")
    found = rows(run, 0, step=1, site="<root>", phase="forward", role="parameter", path="weight")
    assert [row["micro"] for row in found] == [0, 1]
    assert found[0]["fingerprint"] != found[1]["fingerprint"]


@pytest.mark.slow
def test_activations_cut_along_the_sequence_add_up_too(tensor_parallel: Path) -> None:
    run = astray.open(tensor_parallel / "sequence_parallel-module")
    cut = {}
    for row, fingerprint, placements in merged(run, step=0, phase="forward", path="out"):
        cut[row["site"]] = (placements, fingerprint)
    assert cut["blocks.0"][0] == {"Shard(1)"}
    assert cut["blocks.0.up"][0] == {"Shard(2)"}
    (entering,) = rows(run, 0, step=0, phase="forward", site="<root>", role="input")
    assert entering["placement"] is None
    (scaled,) = [print_ for row, print_, _ in merged(run, step=0, phase="forward", site="blocks.0", role="input")]
    assert scaled == entering["fingerprint"]  # `scale` is all ones at first


@pytest.mark.slow
def test_sums_that_are_still_to_be_made_say_so(tensor_parallel: Path) -> None:
    run = astray.open(tensor_parallel / "sequence_parallel-module")
    (partial,) = rows(run, 0, step=0, site="blocks.0.norm.weight", role="gradient")
    assert json.loads(partial["placement"])["placements"] == ["Partial(sum)"]
    with np.load(tensor_parallel / "sequence_parallel.npz") as saved:
        whole = saved["gradient 0 blocks.0.norm.weight"]
    (other,) = rows(run, 1, step=0, site="blocks.0.norm.weight", role="gradient")
    parts = run.values(0, partial["row"]), run.values(1, other["row"])
    np.testing.assert_array_equal(parts[0] + parts[1], whole)


@pytest.mark.slow
def test_a_dimension_cut_by_tensor_parallelism_and_then_by_fsdp(tmp_path: Path) -> None:
    run_all(tmp_path, ("module",), ("sharded_and_parallel",), processes=4)
    check_every_run(tmp_path, ("sharded_and_parallel",), ("module",), processes=4)
    run = astray.open(tmp_path / "sharded_and_parallel-module")
    seen = set()
    for row, fingerprint, placements in merged(run, role="gradient"):
        seen |= placements
        whole = f"gradient {row['step']} {row['site']}"
        assert fingerprint == whole_print(tmp_path, "sharded_and_parallel", whole), row["site"]
    assert "_StridedShard(0, 2)" in seen


# -- collectives -----------------------------------------------------------------------------------------------------


class Talk:
    """What the program `collectives` said in its first forward pass: values of inputs and outputs, by name and call."""

    def __init__(self, run: RunData) -> None:
        self._said: dict[tuple[int, str, int, str], dict[str, Any]] = {}
        self.args: dict[tuple[str, int], Any] = {}
        for rank in (0, 1):
            for row in rows(run, rank, step=0, kind="collective"):
                name = row["site"].removeprefix("<root>/")
                values = run.values(rank, row["row"])
                self._said.setdefault((rank, name, row["call"], row["role"]), {})[row["path"]] = values
                self.args[name, row["call"]] = json.loads(row["args"])["kwargs"]

    def given(self, rank: int, name: str, call: int = 0) -> list[Any]:
        return list(self._said.get((rank, name, call, "input"), {}).values())

    def got(self, rank: int, name: str, call: int = 0) -> list[Any]:
        return list(self._said.get((rank, name, call, "output"), {}).values())


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def test_collectives_are_calls_with_what_each_rank_gave_and_got(quick: Path) -> None:
    talk = Talk(astray.open(quick / f"collectives-{ALL}"))
    x = [talk.given(rank, "all_reduce")[0] for rank in (0, 1)]
    halves = [np.split(one, 2) for one in x]
    for rank in (0, 1):
        assert equal(talk.got(rank, "all_reduce", 0), [x[0] + x[1]])
        assert equal(talk.got(rank, "all_reduce", 1), [np.maximum(*x)])
        assert equal(talk.got(rank, "broadcast"), [x[1]])
        assert equal(talk.got(rank, "all_gather"), x)
        assert equal(talk.got(rank, "all_gather_single"), [np.concatenate(x)])
        assert equal(talk.got(rank, "reduce_scatter_single"), [halves[0][rank] + halves[1][rank]])
        assert equal(talk.given(rank, "reduce_scatter"), halves[rank])
        assert equal(talk.got(rank, "reduce_scatter"), [halves[0][rank] + halves[1][rank]])
        assert equal(talk.got(rank, "all_to_all_single"), [np.concatenate([halves[0][rank], halves[1][rank]])])
        assert equal(talk.got(rank, "scatter"), [x[0] + np.float32(rank)])
        assert equal(talk.given(rank, "gather"), [x[rank]])
    assert equal(talk.got(0, "reduce"), [x[0] + x[1]])
    assert equal(talk.got(0, "gather"), x)
    assert equal(talk.given(0, "send"), [x[0]])
    assert equal(talk.got(1, "recv"), [x[0]])


def test_buffers_that_hold_nothing_yet_are_not_recorded(quick: Path) -> None:
    talk = Talk(astray.open(quick / f"collectives-{ALL}"))
    assert talk.given(0, "broadcast") == []
    assert equal(talk.given(1, "broadcast"), talk.got(0, "broadcast"))
    assert talk.given(1, "scatter") == talk.got(1, "gather") == talk.got(1, "reduce") == talk.given(1, "recv") == []


def test_results_under_way_are_recorded_when_the_program_has_waited(quick: Path) -> None:
    talk = Talk(astray.open(quick / f"collectives-{ALL}"))
    x = [talk.given(rank, "all_reduce", 2)[0] for rank in (0, 1)]
    for rank in (0, 1):
        assert equal(talk.got(rank, "all_reduce", 2), [x[0] + x[1]])  # and not what the program adds to it right after
        assert equal(talk.got(rank, "all_gather_single", 1), [np.concatenate(x)])
        assert equal(talk.given(rank, "isend"), [x[rank]])
        assert equal(talk.got(rank, "irecv"), [x[1 - rank]])


def test_the_arguments_of_a_collective_name_its_ranks(quick: Path) -> None:
    talk = Talk(astray.open(quick / f"collectives-{ALL}"))
    assert talk.args["all_reduce", 1] == {"tensor": "<tensor>", "op": "MAX", "group": [0, 1], "async_op": False}
    assert talk.args["all_reduce", 2]["async_op"] is True
    assert talk.args["broadcast", 0]["src"] == 1
