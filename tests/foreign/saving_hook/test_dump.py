"""Folders of the saving hook: what their names say, as runs, and written from recordings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.errors import RunError, RunExists
from astray.foreign.saving_hook import Limit, SavingTranslator, open_dump, recognises, translate
from astray.foreign.saving_hook.files import FOLDERS, FileName, FolderName, compose, parse
from astray.records import Key
from astray.store import RunData, RunInfo, RunWriter, open_run
from astray.store.convert import StepBatches
from astray.store.run_info import End
from small_models import same_bits

CASES = Path(__file__).parents[2] / "cases" / "precision_checker"


def save(path: Path, name: str, values: Any, folder: str = "tensors", rank: int = 0) -> Path:
    home = path / folder / f"rank_{rank}"
    home.mkdir(parents=True, exist_ok=True)
    np.save(home / name, np.asarray(values))
    return home / name


def output(index: int, layer: str, micro: int = 0, kind: str = "Linear") -> str:
    return f"tensor_idx_{index}_layer_class_{kind}_layer_name_{layer}_micro_step_{micro}.npy"


def gradient(index: int, name: str, micro: int = 0) -> str:
    return f"grad_idx_{index}_of_param_name_{name}_micro_step_{micro}.npy"


def keys(run: RunData, rank: int = 0) -> list[tuple[Any, ...]]:
    """Every tensor of a run by its key, in order, with its class."""
    one = run.ranks[rank]
    calls = [one.calls.row(row) for row in one.call_rows.tolist()]
    return [
        (call["step"], call["micro"], call["site"], call["type"], call["call"], call["phase"], role, path)
        for call, role, path in zip(calls, one.tensors["role"], one.tensors["path"], strict=True)
    ]


# --- names ---

TRAP = "_micro_step_7_layer_name_x_of_param_name_"


@pytest.mark.parametrize(
    ("folder", "name", "saved"),
    [
        ("tensors", output(3, "linear_0", 2), FileName(3, "linear_0", "Linear", 2, "out")),
        ("tensors", output(0, "model.layers.0.fc_1", 11), FileName(0, "model.layers.0.fc_1", "Linear", 11, "out")),
        ("tensors", output(0, "x", 0, "My_layer_class_Net"), FileName(0, "x", "My_layer_class_Net", 0, "out")),
        ("tensors", output(0, f"a{TRAP}b", 1), FileName(0, f"a{TRAP}b", "Linear", 1, "out")),
        ("tensors", output(0, "lstm@1.0"), FileName(0, "lstm", "Linear", 0, "out.1.0")),
        ("tensors", output(0, ""), FileName(0, "<root>", "Linear", 0, "out")),
        ("tensors", output(0, "%40a%2Fb%25@k%40"), FileName(0, "@a/b%", "Linear", 0, "out.k@")),
        ("grads", gradient(9, "linear_1.w_0", 4), FileName(9, "linear_1.w_0", "Parameter", 4, "grad")),
        ("grads", "tensor_idx_9_of_param_name_w_micro_step_4.npy", FileName(9, "w", "Parameter", 4, "grad")),
        ("grads", output(2, "fc", 1), FileName(2, "fc", "Linear", 1, "grad")),
        ("grads", gradient(0, f"a{TRAP}b"), FileName(0, f"a{TRAP}b", "Parameter", 0, "grad")),
        ("tensors", gradient(0, "w"), None),
        ("tensors", output(0, "x").replace(".npy", ".npz"), None),
        ("tensors", output(0, "x", -1), None),
        ("tensors", output(10**12, "x"), None),
        ("tensors", "notes.txt", None),
    ],
)  # fmt: skip
def test_a_name_says_what_was_saved(folder: FolderName, name: str, saved: FileName | None) -> None:
    assert parse(folder, name) == saved


@pytest.mark.parametrize("site", ["fc", "<root>", "a.b_0", "with/slash", "at@sign", "100%", "%2F", "nul\0", "ä"])
@pytest.mark.parametrize("path", ["out", "out.0", "out.1.0", "out.a@b/c", "out.%40"])
def test_a_name_that_was_written_is_read_again(site: str, path: str) -> None:
    saved = FileName(7, site, "Some_Class", 3, path)
    name = compose("tensors", saved)
    assert name is not None
    assert "/" not in name
    assert parse("tensors", name) == saved


def test_a_name_that_no_file_can_have_is_not_made() -> None:
    assert compose("grads", FileName(0, "x" * 300, "Parameter", 0, "grad")) is None
    assert compose("grads", FileName(0, "ä" * 120, "Parameter", 0, "grad")) is None  # bytes are counted
    assert compose("grads", FileName(0, "x" * 190, "Parameter", 0, "grad")) is not None


# --- reading ---


def test_a_real_dump_is_a_run() -> None:
    run = astray.open(CASES / "A")
    assert repr(run).endswith("A: no framework, 1 step, 2 ranks, 54 calls, 54 tensors, complete>")
    assert run.problems == []
    assert run.info.settings == {"format": "saving_hook"}
    assert run.info.world_size == 2
    first = [
        (0, 0, "linear_0", "Linear", 0, "forward", "output", "out"),
        (0, 0, "layer_norm_0", "LayerNorm", 0, "forward", "output", "out"),
        (0, 0, "linear_1", "Linear", 0, "forward", "output", "out"),
        (0, 0, "linear_1.b_0", "Parameter", 0, "backward", "gradient", "grad"),
        (0, 0, "linear_1.w_0", "Parameter", 0, "backward", "gradient", "grad"),
        (0, 0, "layer_norm_0.b_0", "Parameter", 0, "backward", "gradient", "grad"),
        (0, 0, "layer_norm_0.w_0", "Parameter", 0, "backward", "gradient", "grad"),
        (0, 0, "linear_0.b_0", "Parameter", 0, "backward", "gradient", "grad"),
        (0, 0, "linear_0.w_0", "Parameter", 0, "backward", "gradient", "grad"),
    ]
    later = [(*key[:1], micro, *key[2:-1], key[-1].replace("grad", "added")) for micro in (1, 2) for key in first]
    for rank in (0, 1):
        assert keys(run, rank) == first + later
    kinds = run.ranks[0].calls["kind"]
    assert [kinds[row] for row in (0, 3)] == ["module", "parameter"]


def test_values_and_statistics_are_those_of_the_files() -> None:
    run = astray.open(CASES / "B")
    name = output(4, "layer_norm_0", 1, "LayerNorm")
    expected = np.load(CASES / "B" / "tensors" / "rank_1" / name)
    values = run.tensor(Key(0, 1, "layer_norm_0", 0, "forward", "output", "out", rank=1))
    assert values.tobytes() == expected.tobytes()
    row = run.ranks[1].tensors.row(10)
    assert (row["dtype"], row["shape"]) == ("float32", (2, 3))
    assert row["mean"] == pytest.approx(expected.astype(np.float64).mean(), rel=1e-14)


def test_two_dumps_are_compared_like_any_runs() -> None:
    comparison = astray.compare(CASES / "A", CASES / "B")
    assert comparison.first is not None
    assert comparison.first.place.site == "linear_0"
    assert len(comparison.pairs) == 54
    assert astray.compare(CASES / "A", CASES / "A").first is None


def test_results_of_the_checker_are_no_rank(tmp_path: Path) -> None:
    save(tmp_path, output(0, "a"), [1.0])
    (tmp_path / "tensors" / "compare_rst").mkdir()
    (tmp_path / "tensors" / "compare_rst" / "rank_0_rst.csv").write_text("tensor_name\n")
    run = open_dump(tmp_path)
    assert list(run.ranks) == [0]
    assert run.problems == []


def test_what_does_not_belong_is_said(tmp_path: Path) -> None:
    save(tmp_path, output(0, "a"), [1.0])
    home = tmp_path / "tensors" / "rank_0"
    (home / "notes.txt").write_text("mine")
    (home / f".{output(1, 'b')}.4711").write_bytes(b"low")
    (tmp_path / "tensors" / "rank_x").mkdir()
    (tmp_path / "tensors" / "rank_1").write_text("a file")
    run = open_dump(tmp_path)
    assert run.problems == [
        f"{tmp_path / 'tensors'} holds entries that are not folders of ranks, and were not read: rank_1, rank_x.",
        f"{home} holds files of another form, which were not read: notes.txt.",
        f"{home} holds 1 file not finished when the program ended.",
    ]
    assert len(run.ranks[0].tensors) == 1


def test_damaged_files_are_said_and_the_rest_is_there(tmp_path: Path) -> None:
    cut = save(tmp_path, output(0, "a"), np.arange(100.0))
    cut.write_bytes(cut.read_bytes()[:200])
    objects = save(tmp_path, output(1, "a"), [1.0])
    np.save(objects, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    save(tmp_path, output(2, "a"), [1.0, 2.0])
    save(tmp_path, output(3, "a"), [1.0]).write_bytes(b"no array")
    (tmp_path / "tensors" / "rank_0" / output(4, "a")).mkdir()
    run = open_dump(tmp_path)
    assert len(run.problems) == 4
    assert "was cut" in run.problems[0]
    assert "a pickle would have to be run" in run.problems[1]
    assert "is not a numpy array" in run.problems[2]
    assert "is not a plain file" in run.problems[3]
    assert keys(run) == [(0, 0, "a", "Linear", 2, "forward", "output", "out")]  # those before it keep their numbers


def test_names_that_are_no_text_are_said(tmp_path: Path) -> None:
    save(tmp_path, output(0, "a"), [1.0])
    home = tmp_path / "tensors" / "rank_0"
    Path(os.fsdecode(os.fsencode(home) + b"/" + output(1, "?").encode().replace(b"?", b"\xff"))).write_bytes(b"")
    run = open_dump(tmp_path)
    assert len(run.problems) == 1
    assert run.problems[0].startswith(f"{home} holds files of another form")


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "secret.npy"
    np.save(outside, np.ones(3))
    dump = tmp_path / "dump"
    real = save(dump, output(0, "a"), [1.0])
    (real.parent / output(1, "b")).symlink_to(outside)
    elsewhere = tmp_path / "elsewhere"
    save(elsewhere, output(0, "c"), [1.0])
    (dump / "tensors" / "rank_1").symlink_to(elsewhere / "tensors" / "rank_0")
    (dump / "grads").symlink_to(elsewhere / "tensors")
    run = open_dump(dump)
    assert list(run.ranks) == [0]
    assert [key[2] for key in keys(run)] == ["a"]
    assert run.problems == [
        f"{dump / 'tensors'} holds entries that are not folders of ranks, and were not read: rank_1.",
        f"{dump / 'grads'} leads out of {dump}, and was not read.",
        f"{dump / 'tensors' / 'rank_0'} has links that lead out of it, and are not read: {output(1, 'b')}.",
    ]


def test_missing_and_doubled_indices_are_said(tmp_path: Path) -> None:
    for name in (output(0, "a"), output(3, "a"), output(3, "b")):
        save(tmp_path, name, [1.0])
    home = tmp_path / "tensors" / "rank_0"
    problems = open_dump(tmp_path).problems
    assert problems[0].startswith(f"{home} has more than one file of index 3:")
    assert problems[1].startswith(f"{home} lacks 2 files below index 3.")


def test_calls_are_told_apart(tmp_path: Path) -> None:
    """A layer called twice, one with two outputs called twice in a row, and one whose outputs are not always there."""
    for index, layer in enumerate(["a", "a", "b", "a", "t@0", "t@1", "t@0", "t@1", "t@1", "b"]):
        save(tmp_path, output(index, layer), [float(index)])
    assert [(key[2], key[4], key[7]) for key in keys(open_dump(tmp_path))] == [
        ("a", 0, "out"), ("a", 1, "out"), ("b", 0, "out"), ("a", 2, "out"), ("t", 0, "out.0"), ("t", 0, "out.1"),
        ("t", 1, "out.0"), ("t", 1, "out.1"), ("t", 2, "out.1"), ("b", 1, "out"),
    ]  # fmt: skip


def test_ten_comes_after_nine(tmp_path: Path) -> None:
    for index in range(12):
        save(tmp_path, output(index, f"layer{index}"), [1.0])
    assert [key[2] for key in keys(open_dump(tmp_path))] == [f"layer{index}" for index in range(12)]


def test_what_is_not_a_dump(tmp_path: Path) -> None:
    assert not recognises(tmp_path)
    assert not recognises(tmp_path / "missing")
    (tmp_path / "tensors").mkdir()
    assert not recognises(tmp_path)
    with pytest.raises(RunError, match="no folder of a rank, such as tensors/rank_0"):
        open_dump(tmp_path)
    save(tmp_path, gradient(0, "w"), [1.0], "grads")
    assert recognises(tmp_path)
    assert keys(open_run(tmp_path)) == [(0, 0, "w", "Parameter", 0, "backward", "gradient", "grad")]


# --- writing ---


class Branching(nn.Module):
    """Leaves of every kind: one called twice, one with a tuple, one in bfloat16; and a parameter of no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.lstm = nn.LSTM(4, 4)
        self.low = nn.Linear(4, 2, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(self.block(self.block(x)))
        return self.low(y.bfloat16()).float() * self.scale


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Two steps, the first with gradient accumulation over two micro steps."""
    path = tmp_path_factory.mktemp("saving_hook") / "native"
    torch.manual_seed(0)
    model = Branching()
    with astray.record(path, model, keep="tensors", level=["module", "function"]) as recorder:
        for micros in (2, 1):
            model.zero_grad()
            for _ in range(micros):
                model(torch.randn(3, 4)).sum().backward()
            recorder.step()
    return open_run(path)


def convert(run: RunData, path: Path, overwrite: bool = False, **options: Any) -> SavingTranslator:
    translator = translate(path, 0, run.info, overwrite=overwrite, **options)
    rows = StepBatches(run.ranks[0])
    for step in run.steps:
        translator.take(step, rows.of(step))
        translator.end_step(step)
    translator.close(End(complete=True))
    return translator


@pytest.fixture(scope="module")
def written(native: RunData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SavingTranslator]:
    path = tmp_path_factory.mktemp("saving_hook") / "written"
    return path, convert(native, path)


def test_leaf_outputs_and_gradients_are_written(written: tuple[Path, SavingTranslator]) -> None:
    of_forward = ["block.0", "block.1", "block.0", "block.1", "lstm@0", "lstm@1.0", "lstm@1.1", "low"]
    kinds = ["Linear", "ReLU", "Linear", "ReLU", "LSTM", "LSTM", "LSTM", "Linear"]
    there = {file.name for file in (written[0] / "tensors" / "rank_0").iterdir()}
    assert there == {
        output(8 * micro + index, layer, micro, kind)
        for micro in range(3)
        for index, (layer, kind) in enumerate(zip(of_forward, kinds, strict=True))
    }
    gradients = [parse("grads", file.name) for file in (written[0] / "grads" / "rank_0").iterdir()]
    found = sorted(saved for saved in gradients if saved is not None)
    assert [saved.idx for saved in found] == list(range(27))
    of_backward = {"scale", "low.weight", "low.bias", "block.0.weight", "block.0.bias"}
    of_backward |= {f"lstm.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    for micro in range(3):
        assert {saved.site for saved in found if saved.micro == micro} == of_backward


def test_what_is_lost_is_counted(written: tuple[Path, SavingTranslator]) -> None:
    lost = written[1].lost
    assert lost["where a step begins"] == 1
    assert lost["the dtype bfloat16, stored as float32"] == 3 + 2 * 3
    assert lost["a gradient that has accumulated"] == 9  # of the second micro step of the first step
    assert lost["an output of a module with others in it"] == 3 * 3  # block twice and the root
    assert {"an input", "a parameter", "a tensor of a function", "a gradient of a module's inputs or outputs"} <= set(
        lost
    )
    assert not any("not known" in what or "not recorded" in what for what in lost)


def test_it_reads_like_the_recording_it_was_made_of(native: RunData, written: tuple[Path, SavingTranslator]) -> None:
    run = open_run(written[0])
    assert run.problems == []
    of_dump = {Key(*key[:3], *key[4:]): at for at, key in enumerate(keys(run))}
    of_native = {Key(*key[:3], *key[4:]): at for at, key in enumerate(keys(native))}
    in_first_step = [key for key in of_dump if key.micro < 2]
    assert len(in_first_step) == 2 * (8 + 9)
    for key in in_first_step:
        assert key in of_native
        one, other = native.tensor(key), run.tensor(key)
        assert one.astype(other.dtype).tobytes() == other.tobytes(), key
    comparison = astray.compare(native, run)
    assert comparison.first is None


def test_steps_are_laid_end_to_end(native: RunData, written: tuple[Path, SavingTranslator]) -> None:
    run = open_run(written[0])
    later = native.tensor(Key(1, 0, "lstm", 0, "forward", "output", "out.1.0"))
    assert run.tensor(Key(0, 2, "lstm", 0, "forward", "output", "out.1.0")).tobytes() == later.tobytes()


@pytest.mark.parametrize("pieces", [1, 7, 50])
def test_rows_may_come_in_pieces(
    native: RunData, written: tuple[Path, SavingTranslator], tmp_path: Path, pieces: int
) -> None:
    """As from a running program, where a call's row may come long before those of its tensors."""
    translator = translate(tmp_path, 0, native.info, overwrite=False)
    for step in native.steps:
        whole = StepBatches(native.ranks[0]).of(step)
        for rows in np.array_split(np.arange(len(whole.tensors)), pieces):
            translator.take(step, _Piece(whole, rows))
        translator.end_step(step)
    assert translator.lost == written[1].lost
    for folder in FOLDERS:
        homes = [path / folder / "rank_0" for path in (tmp_path, written[0])]
        mine, theirs = ({file.name: file.read_bytes() for file in home.iterdir()} for home in homes)
        assert mine == theirs


class _Piece:
    """Some tensors of a step, and the calls up to the last of them."""

    def __init__(self, whole: Any, rows: Any) -> None:
        last = whole.tensors.numbers("seq")[: rows[-1] + 1].max() if len(rows) else -1
        self.tensors = whole.tensors.take(rows)
        self.calls = whole.calls.take(whole.calls.numbers("seq") <= last)
        self._whole, self._rows = whole, rows

    def values(self, row: int) -> Any:
        return self._whole.values(int(self._rows[row]))


def test_limits(native: RunData, tmp_path: Path) -> None:
    limits: dict[FolderName, Limit] = {"tensors": Limit(total=10), "grads": Limit(per_step=2)}
    translator = convert(native, tmp_path, limits=limits)
    count = {folder: len(list((tmp_path / folder / "rank_0").iterdir())) for folder in FOLDERS}
    assert count == {"tensors": 10, "grads": 6}
    assert not translator.is_full  # more gradients may come
    assert convert(native, tmp_path / "b", limits={"tensors": Limit(total=10)}).is_full
    assert not (tmp_path / "b" / "grads").exists()
    run = open_run(tmp_path)
    assert run.problems == []
    assert [key[1] for key in keys(run) if key[6] == "gradient"] == [0, 0, 1, 1, 2, 2]


def test_an_older_dump_is_not_mixed_with(native: RunData, tmp_path: Path) -> None:
    convert(native, tmp_path)
    save(tmp_path, output(0, "old"), [1.0], rank=5)
    kept = tmp_path / "tensors" / "rank_0" / "notes.txt"
    kept.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunExists, match=r"rank_0 already holds 24 files of a recording\. Choose another folder"):
        convert(native, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    convert(native, tmp_path, overwrite=True, limits={"tensors": Limit(3), "grads": Limit(3)})
    assert kept.read_text() == "mine"
    assert len(list(kept.parent.iterdir())) == 4
    assert not list((tmp_path / "tensors" / "rank_5").iterdir())  # a rank that this recording does not have


def test_a_place_that_cannot_be_written_to_is_said(native: RunData, tmp_path: Path) -> None:
    (tmp_path / "tensors").write_text("a file")
    with pytest.raises(RunError, match="cannot be recorded into"):
        convert(native, tmp_path)


def test_values_that_are_not_there_are_lost_and_said(
    tmp_path: Path, info: RunInfo, call: Callable[..., Any], tensor: Callable[..., Any]
) -> None:
    with RunWriter(tmp_path / "native", info=info) as writer:
        writer.call(call(0, step=0))
        writer.tensor(tensor(0))
        writer.call(call(1, step=0))
        writer.tensor(tensor(1), np.zeros(2, np.float32), 2)
        writer.call(call(2, step=0))
        writer.tensor(tensor(2), np.zeros((1, 3), np.float32), part="0:1")
        writer.call(call(3, step=0, recompute=True))
        writer.tensor(tensor(3), np.zeros((2, 3), np.float32))
        writer.call(call(4, step=0, site="x" * 250))
        writer.tensor(tensor(4), np.zeros((2, 3), np.float32))
    translator = convert(open_run(tmp_path / "native"), tmp_path / "out")
    assert dict(translator.lost) == {
        "a tensor whose values were not recorded": 1,
        "a tensor of which only some values were recorded": 2,
        "an output that was computed again for the backward": 1,
        "a tensor whose file would have a name of more than 240 bytes": 1,
    }


@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64"]
)
def test_every_dtype_is_stored_exactly(
    tmp_path: Path, dtype: str, info: RunInfo, call: Callable[..., Any], tensor: Callable[..., Any]
) -> None:
    values = torch.tensor([[0.0, 1.0, 2.0], [0.5, 3.0, 4.0]]).to(getattr(torch, dtype))
    raw = np.frombuffer(bytes(values.untyped_storage()), np.uint8)
    with RunWriter(tmp_path / "native", info=info) as writer:
        writer.call(call(0))
        writer.tensor(tensor(0, dtype=dtype, path="out"), raw)
    convert(open_run(tmp_path / "native"), tmp_path / "out")
    (file,) = (tmp_path / "out" / "tensors" / "rank_0").iterdir()
    found = torch.from_numpy(np.load(file))
    assert found.dtype == (torch.float32 if dtype in ("bfloat16", "float8_e4m3fn") else values.dtype)
    assert same_bits(found, values.to(found.dtype))
