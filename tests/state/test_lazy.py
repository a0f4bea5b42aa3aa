"""States of checkpoints and of other lazy mappings: nothing is loaded before it is needed, and nothing is kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import astray
from astray.errors import StateError
from astray.state import StateDict


class Stored(Mapping[str, torch.Tensor]):
    """A checkpoint that counts what is loaded, and how much of it is held at once."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self.loaded: list[str] = []
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].clone()
        self.loaded.append(name)
        self.alive.add(tensor)
        self.most = max(self.most, len(self.alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self._tensors[name].shape), self._tensors[name].dtype


def stored() -> Stored:
    generator = torch.Generator().manual_seed(0)
    return Stored(**{f"w{number}": torch.randn(3, 2 + number, generator=generator) for number in range(4)})


def test_a_look_at_it_loads_nothing() -> None:
    source = stored()
    state = StateDict(source, name="ckpt")
    assert state.lazy
    assert repr(state).splitlines()[:3] == [
        "ckpt[L2=unread, Numel=42, device=None, dtype=None]",
        "(",
        "        00: w0 (3, 2)",
    ]
    assert (len(state), state.numel(), state.spec("w1").shape) == (4, 42, (3, 3))
    assert "w0" in state
    assert list(state.filter("w[01]")) == ["w0", "w1"]
    assert state.is_compatible(state * 2)
    assert repr(state.filter("w0") + 1).endswith("00: w0 (3, 2)\n)")
    assert state.to(dtype=torch.float64).spec("w0").dtype == torch.float64
    assert source.loaded == []


def test_statistics_go_tensor_by_tensor() -> None:
    source = stored()
    state = StateDict(source)
    table = state.describe(lw=True, include_keys=["no", "name", "shape", "norm1", "norm2", "std", "max"], display=False)
    assert source.loaded == ["w0", "w1", "w2", "w3"]  # once each, for all columns
    assert source.most == 1
    whole = state.clone()
    assert not whole.lazy
    assert table["norm2"] == list(whole.norm2(lw=True).values())
    source.loaded.clear()
    source.most = 0
    assert state.norm(3) == whole.norm(3)
    assert source.loaded == ["w0", "w1", "w2", "w3"]
    assert source.most == 1


def test_what_is_computed_from_it_is_computed_on_demand() -> None:
    source, other = stored(), stored()
    one, two = StateDict(source), StateDict(other).clone()
    update = torch.sqrt((one - two / 2).abs()) * 2.0
    assert update.lazy
    assert source.loaded == []
    assert update["w1"].tolist() == (torch.sqrt((two["w1"] / 2).abs()) * 2.0).tolist()
    assert source.loaded == ["w1"]
    assert update.spec("w0") == ((3, 2), torch.float32)
    assert (one > 0).spec("w0").dtype == torch.bool
    assert update.norm2() == pytest.approx(update.clone().norm2(), rel=1e-15)
    assert torch.allclose(one, two)
    assert one == two


def test_it_cannot_be_written_to() -> None:
    state = StateDict(stored(), name="ckpt")
    for attempt in (lambda: state.sqrt_(), lambda: state.__setitem__("w0", 1.0), lambda: state.__delitem__("w0")):
        with pytest.raises(StateError, match=r"ckpt are loaded or computed on demand. clone\(\) it first"):
            attempt()
    with pytest.raises(StateError, match="clone"):
        state += 1


def test_shapes_are_checked_without_loading() -> None:
    source = stored()
    with pytest.raises(StateError, match=r"'w0' differ: \(3, 2\) and \(2,\)"):
        StateDict(source) - StateDict({f"w{number}": torch.ones(2) for number in range(4)})
    assert source.loaded == []


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_saved_and_loaded(suffix: str, tmp_path: Path) -> None:
    state = StateDict(stored()).clone()
    part = torch.zeros(1000, 1000)[0, :3]  # would be saved with the rest of its storage
    state["part"] = part
    path = tmp_path / f"step10{suffix}"
    state.save(path)
    assert path.stat().st_size < 10_000
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded = astray.state.load_state(path)
    assert loaded.lazy
    assert loaded.name == "step10"
    assert loaded == state
    assert (loaded - state).abs_max() == 0
    assert loaded.describe(lw=True, pattern="w", display=False)["norm2"] == [
        state.norm2(lw=True)[name] for name in loaded if name.startswith("w")
    ]
    assert loaded.filter("w").unwrap().norm(1) == pytest.approx(state.filter("w").norm1(), rel=1e-15)


def test_a_checkpoint_is_measured_in_blocks_whatever_its_dtypes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 6, generator=generator)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]
    state = StateDict({str(dtype): (3 * values).to(dtype) for dtype in dtypes} | {"empty": torch.empty(0, 3)})
    state.save(tmp_path / "a.pt")
    loaded = astray.state.load_state(tmp_path / "a.pt")
    for key in ("norm1", "norm2", "abs_max", "numel"):
        assert getattr(loaded, key)(lw=True).state_dict() == pytest.approx(
            getattr(state, key)(lw=True).state_dict(), rel=1e-15, nan_ok=True
        )


def test_numbers_are_saved_and_loaded(tmp_path: Path) -> None:
    norms = StateDict(stored()).norm2(lw=True)
    norms.save(tmp_path / "norms.pt")
    assert astray.state.load_state(tmp_path / "norms.pt", "norms") == norms
    with pytest.raises(StateError, match="'w0' is a number"):
        norms.save(tmp_path / "norms.safetensors")
    with pytest.raises(astray.AstrayError, match=r"nothing\.pt"):
        astray.state.load_state(tmp_path / "nothing.pt")


def test_a_dtype_that_safetensors_does_not_know_is_told(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot hold tensors of torch\.complex128\. Save as \.pt instead\.$"):
        StateDict({"w": torch.ones(2, dtype=torch.complex128)}).save(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    StateDict({"a": 1.0}).save(path)

    class Failing(Stored):
        def __getitem__(self, name: str) -> torch.Tensor:
            raise OSError("no such disk")

    with pytest.raises(OSError, match="no such disk"):
        StateDict(Failing(a=torch.ones(1))).save(path)
    assert astray.state.load_state(path) == {"a": 1.0}
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]
