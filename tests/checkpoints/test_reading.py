"""Every format gives back the tensors that were saved, bit by bit, one at a time."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from astray import checkpoints
from astray.checkpoints.stored_tensor import Unread
from astray.errors import CheckpointError
from astray.stats import Strided, measure
from saved_checkpoints import same, save_distributed, write_index

Tensors = dict[str, torch.Tensor]


def flat(state: Any, name: str = "") -> Tensors:
    """The tensors of nested dictionaries and lists, by dotted names."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {key: value for one, inner in items for key, value in flat(inner, f"{name}.{one}".lstrip(".")).items()}


def check(checkpoint: checkpoints.Checkpoint, expected: Tensors) -> None:
    assert set(checkpoint) == set(expected) == set(checkpoint.names)
    for name, tensor in expected.items():
        spec = checkpoint.spec(name)
        assert (f"torch.{spec.dtype}", spec.shape) == (str(tensor.dtype), tuple(tensor.shape)), name
        assert same(checkpoint[name], tensor), name
        values, dtype, shape = checkpoint.read(name)
        assert (values.shape, dtype, shape) == (spec.shape, spec.dtype, spec.shape)
        blocks = list(checkpoint.blocks(name, 16))
        assert all(block.ndim == 1 and block.nbytes <= 16 for block in blocks)
        assert b"".join(block.tobytes() for block in blocks) == values.tobytes(), name
        assert checkpoint.measure(name) == measure(Strided.from_numpy(values, dtype)), name


# ---- formats -------------------------------------------------------------------------------------------------------


def test_safetensors(tmp_path: Path, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    with checkpoints.open(tmp_path / "a.safetensors") as found:
        check(found, tensors)
        assert found.format == "safetensors"
        assert found.others == {"__metadata__.format": "pt"}
        assert found.nbytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(tmp_path: Path, tensors: Tensors, trained: dict[str, Any], zipped: bool) -> None:
    state = {**trained, **tensors}
    if not zipped:  # torch cannot write these in its old format
        state = {name: value for name, value in state.items() if name not in ("eight", "wide")}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with checkpoints.open(tmp_path / "a.pt") as found:
        check(found, flat(state))
        assert found.names[:2] == ("model.0.weight", "model.0.bias")
        assert "optimizer.state.0.exp_avg" in found
        assert found.others["epoch"] == 3
        assert found.others["optimizer.param_groups.0.lr"] == 0.001
        assert found.others["optimizer.param_groups.0.params"] == [0, 1, 2, 3, 4, 5]


def test_views_are_read_as_they_are_seen(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    state = {
        "base": base,
        "transposed": base.permute(2, 0, 1),
        "cut": base[1:, ::2, 1:4],
        "row": base[2, 3],
        "repeated": torch.ones(1).expand(6, 2),
        "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "tied": base,
    }
    torch.save(state, tmp_path / "a.pt")
    with checkpoints.open(tmp_path / "a.pt") as found:
        check(found, state)
        assert found.place("base") == found.place("tied") != found.place("transposed")


def test_sparse_views_of_a_large_storage_are_read_in_short_pieces(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("astray.checkpoints.stored_tensor._SMALL", 64)
    monkeypatch.setattr("astray.checkpoints.stored_tensor.BLOCK_BYTES", 512)
    base = torch.arange(40 * 50.0).reshape(40, 50)
    state = {"transposed": base.t(), "column": base[:, 7], "corner": base[30:, 40:], "steps": base[::7, ::9]}
    torch.save(state, tmp_path / "a.pt")
    with checkpoints.open(tmp_path / "a.pt") as found:
        for name, tensor in state.items():
            assert same(found[name], tensor)


def test_parameters_subclasses_and_what_lies_in_containers(tmp_path: Path) -> None:
    marked = torch.nn.Parameter(torch.ones(2))
    marked.tag = "mine"  # type: ignore[attr-defined]
    state = OrderedDict(
        plain=torch.nn.Parameter(torch.zeros(3)),
        marked=marked,
        frozen=torch.nn.Parameter(torch.ones(2), requires_grad=False),
        listed=[torch.ones(1), (torch.zeros(2), {"deep": torch.ones(4)})],
    )
    torch.save(state, tmp_path / "a.pt")
    with checkpoints.open(tmp_path / "a.pt") as found:
        assert found.names == ("plain", "marked", "frozen", "listed.0", "listed.1.0", "listed.1.1.deep")
        assert found["listed.1.1.deep"].tolist() == [1, 1, 1, 1]
        assert found["marked"].tolist() == [1, 1]


def test_a_lone_tensor(tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "a.pt")
    with checkpoints.open(tmp_path / "a.pt") as found:
        check(found, {"tensor": torch.arange(3)})


def test_a_module_that_was_pickled_as_a_whole_gives_its_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    torch.save({"model": model}, tmp_path / "a.pt")
    with checkpoints.open(tmp_path / "a.pt") as found:
        check(found, flat({"model": model.state_dict()}))


def test_hugging_face_folders(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=4, bos_token_id=0, eos_token_id=0)
    )
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="2KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for path in (tmp_path / "one", tmp_path / "many", tmp_path / "many" / "model.safetensors.index.json"):
        with checkpoints.open(path) as found:
            check(found, expected)


def test_a_folder_with_shards_of_torch(tmp_path: Path, tensors: Tensors) -> None:
    halves = dict(list(tensors.items())[:6]), dict(list(tensors.items())[6:])
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, half in zip(names, halves, strict=True):
        torch.save(half, tmp_path / name)
    listed = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    write_index(tmp_path / "pytorch_model.bin.index.json", listed)
    with checkpoints.open(tmp_path) as found:
        check(found, tensors)
        assert found.format == "torch, 2 files"


def test_the_cache_of_a_hub_is_made_of_links(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    save_file(tensors, tmp_path / "blobs" / "4f2a")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4f2a")
    with checkpoints.open(snapshot) as found:
        check(found, tensors)


def test_distributed(tmp_path: Path, tensors: Tensors, trained: dict[str, Any]) -> None:
    state = {"model": trained["model"], "optimizer": trained["optimizer"], **tensors, "view": tensors["weight"].t()}
    with checkpoints.open(save_distributed(state, tmp_path / "dcp")) as found:
        check(found, flat(state))
        assert isinstance(found.others["optimizer.param_groups.0.lr"], Unread)
        assert not found.unread


@pytest.mark.slow
def test_a_sharded_tensor_is_put_together(tmp_path: Path) -> None:
    program = Path(__file__).with_name("save_sharded.py")
    subprocess.run([sys.executable, program, tmp_path / "dcp"], check=True, capture_output=True, timeout=120)
    whole = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    with checkpoints.open(tmp_path / "dcp") as found:
        check(found, {"rows": whole, "columns": whole, "replicated": whole, "bfloat": whole.to(torch.bfloat16)})
        assert len({file.name for file in found.files}) == 3


# ---- the mapping ---------------------------------------------------------------------------------------------------


def test_it_is_a_mapping_that_loads_on_access(tmp_path: Path, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    found = checkpoints.open(str(tmp_path / "a.safetensors"))
    assert len(found) == len(tensors)
    assert "weight" in found
    assert "none" not in found
    assert found.get("none") is None
    first = found["weight"]
    first.zero_()  # its own memory, in which anything may be done
    assert same(found["weight"], tensors["weight"])
    with pytest.raises(KeyError, match=r"has no tensor 'wieght'\. Did you mean 'weight'\?"):
        found["wieght"]
    assert repr(found) == f"<Checkpoint {tmp_path}/a.safetensors: safetensors, 13 tensors, 425 bytes>"
    found.close()
    assert found.spec("weight").nbytes == 140
    with pytest.raises(CheckpointError, match=r"a\.safetensors was closed with its checkpoint\. Open that again\."):
        found["weight"]


def test_no_file_stays_open(tmp_path: Path, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    before = list(Path("/proc/self/fd").iterdir())
    with checkpoints.open(tmp_path / "a.safetensors") as found:
        found.read("weight")
    checkpoints.open(tmp_path / "a.safetensors").read("weight")  # and this one is never closed
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astray.checkpoints.stored_tensor.MOST_OPEN", 2)
    names = {f"t{i}": f"model-{i}.safetensors" for i in range(6)}
    for i, (name, file) in enumerate(names.items()):
        save_file({name: torch.full((2,), float(i))}, tmp_path / file)
    write_index(tmp_path / "model.safetensors.index.json", names)
    with checkpoints.open(tmp_path) as found:
        assert [found[f"t{i}"][0].item() for i in (0, 5, 1, 4, 0)] == [0, 5, 1, 4, 0]


def test_reading_needs_no_framework(tmp_path: Path, trained: dict[str, Any]) -> None:
    torch.save(trained, tmp_path / "a.pt")
    save_distributed(trained["model"], tmp_path / "dcp")
    script = (
        "import sys, astray.checkpoints as c\n"
        "for path in sys.argv[1:]:\n"
        "    with c.open(path) as found:\n"
        "        print(sum(found.measure(name).statistics.count for name in found))\n"
        "print('torch' in sys.modules)"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "a.pt"), str(tmp_path / "dcp")]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    model = sum(tensor.numel() for tensor in trained["model"].values())
    every = sum(tensor.numel() for tensor in flat(trained).values())
    assert done.stdout.split() == [str(every), str(model), "False"]


# ---- what is not a tensor -------------------------------------------------------------------------------------------


class Harmful:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_pickle_is_run(tmp_path: Path, zipped: bool) -> None:
    state = {
        "weight": torch.ones(2),
        "harm": Harmful(tmp_path / "harm"),
        "args": argparse.Namespace(lr=1.0),
        "numbers": np.arange(3),
    }
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with checkpoints.open(tmp_path / "a.pt") as found:
        assert found.names == ("weight",)
        assert str(found.others["harm"]).startswith("posix.mkdir: it needs code to be made, and astray runs none")
        assert found.unread == {}
        assert found["weight"].tolist() == [1, 1]
    assert not (tmp_path / "harm").exists()


def test_tensors_in_what_is_not_read_are_counted(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    torch.save({"weight": torch.ones(2), "sparse": sparse, "bag": argparse.Namespace(a=torch.ones(1))}, tmp_path / "a")
    with checkpoints.open(tmp_path / "a") as found:
        assert {name: what.tensors for name, what in found.unread.items()} == {"sparse": 2, "bag": 1}
        assert str(found.unread["bag"]).startswith("argparse.Namespace, with 1 tensor in it: it needs code")


def test_only_code_is_refused_with_a_way_out(tmp_path: Path) -> None:
    torch.save(Harmful(tmp_path / "harm"), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"posix\.mkdir: it needs code .* torch\.save\(model\.state_dict\(\)"):
        checkpoints.open(tmp_path / "a.pt")
    assert not (tmp_path / "harm").exists()


def test_views_that_are_to_be_turned_are_not_read_wrongly(tmp_path: Path) -> None:
    values = torch.complex(torch.ones(2), torch.ones(2))
    torch.save({"plain": values, "conjugated": values.conj()}, tmp_path / "a.pt")
    with checkpoints.open(tmp_path / "a.pt") as found:
        assert found.names == ("plain",)
        assert "conjugated view" in str(found.unread["conjugated"])
