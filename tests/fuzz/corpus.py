"""Small real runs, dumps and checkpoints: what the fuzzer damages. Made once, by real recordings of a real model.

Every entry is a pair: what is damaged, and another of its kind to compare it with.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

HERE = Path(__file__).parents[1]
NATIVE = ("modules", "levels", "sampled", "sliced", "ranks", "format3")
"""Runs of our own format, which are damaged more often than others."""

LATE = ("real-debug-tensor", "hub-torch", "monitor", "flight", "lines")
"""What came late, and only late seeds choose."""


def names(home: Path) -> list[str]:
    """What there is to damage."""
    found = json.loads((home / "corpus.json").read_text())
    assert isinstance(found, dict)
    return list(found)


def pair(home: Path, name: str) -> tuple[Path, Path]:
    """What is to be damaged, and what it is compared with."""
    one, other = json.loads((home / "corpus.json").read_text())[name]
    return home / one, home / other


def build(home: Path) -> None:
    """Make everything there is to damage below `home`."""
    pairs = {
        **_recordings(home),
        **_dumps(home),
        **_checkpoints(home),
    }
    (home / "corpus.json").write_text(json.dumps(pairs))


def _recordings(home: Path) -> dict[str, tuple[str, str]]:
    import torch

    import astray

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(4, 6)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(2)])
            self.norm = torch.nn.BatchNorm1d(6)
            self.head = torch.nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            hidden = self.embed(x)
            for layer in self.layers:
                hidden = hidden + torch.nn.functional.relu(layer(hidden))
            hidden = self.norm(hidden)
            return {"logits": self.head(hidden), "hidden": hidden if mask is None else hidden * mask}

    def train(
        name: str, seed: int = 0, scale: float = 1.0, spoilt: bool = False, micro: int = 1, **settings: str | list[str]
    ) -> None:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1 * scale)
        torch.manual_seed(seed)
        with astray.record(home / name, model, **settings) as recorder:  # type: ignore[arg-type]
            for step in range(3):
                for _ in range(micro):
                    x = torch.randn(5, 4)
                    if spoilt and step == 1:
                        x[2, 1] = float("inf")
                    model(x, mask=torch.full((6,), scale))["logits"].sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()

    train("modules", keep=["stats", "fingerprint", "tensors"], optimizer=["gradient", "weight", "state", "update"])
    train(
        "modules-other",
        scale=1.01,
        keep=["stats", "fingerprint", "tensors"],
        optimizer=["gradient", "weight", "state", "update"],
    )
    levels = ["module", "function", "op"]
    train("levels", level=levels, spoilt=True, micro=2, keep=["stats", "fingerprint", "tensors"])
    train("levels-other", level=levels, scale=1.5, micro=1, keep=["stats", "fingerprint", "tensors"])
    train("sampled", keep=["stats", "sample"], level=["module", "function"], spoilt=True)
    train("sampled-other", keep=["stats", "sample"], level=["module", "function"], scale=2.0)
    train("sliced", keep=["stats", "tensors"], slice="0:2")
    train("sliced-other", keep=["stats", "tensors"], slice="0:2", scale=2.0)
    for number, run in enumerate(("ranks", "ranks-other")):
        for rank in range(2):
            settings = {
                "keep": ["stats", "fingerprint", "tensors"],
                "optimizer": ["gradient", "weight", "state", "update"],
            }
            train(f"{run}.{rank}", seed=rank, scale=1 + number * rank, **settings)  # type: ignore[arg-type]
        shutil.move(home / f"{run}.0", home / run)
        shutil.move(home / f"{run}.1" / "rank0", home / run / "rank1")
        info = json.loads((home / run / "run.json").read_text())
        (home / run / "run.json").write_text(json.dumps(info | {"world_size": 2}))
    for name, scale in (("monitor", 1.0), ("monitor-other", 1.5)):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1 * scale)
        with astray.state.Monitor(model, optimizer, path=home / name):
            for _ in range(3):
                model(torch.ones(5, 4))["logits"].sum().backward()
                optimizer.step()
    for name, scale in (("flight", 1.0), ("flight-other", 1.5)):
        torch.manual_seed(0)
        model = Net()
        with astray.guard(model, on=lambda _: None, path=home / f"{name}-dumps") as guard:
            for value in (1.0, float("inf")):
                model(torch.full((5, 4), scale * value))["logits"].sum().backward()
                guard.step()
        written = guard.trips[0].path
        assert written is not None
        shutil.move(written, home / name)
    shutil.copytree(HERE / "store" / "run_format" / "format3", home / "format3")
    pairs = {name: (name, f"{name}-other") for name in NATIVE[:-1]}
    late = {name: (name, f"{name}-other") for name in ("monitor", "flight")}
    return pairs | {"format3": ("format3", "format3")} | late


def _dumps(home: Path) -> dict[str, tuple[str, str]]:
    """What our writers make of a run, and what the tools themselves have written."""
    import astray
    from astray.store.formats import FOREIGN

    found = {}
    for name in FOREIGN:
        for run in ("modules", "modules-other"):
            astray.convert(home / run, home / f"{name}-{run}", to=name)
        found[name] = tuple(f"{name}-{run}" for run in ("modules", "modules-other"))
    for run in ("modules", "modules-other"):
        astray.convert(home / run, home / f"{run}.pkl", to="torch_npu")
    found["lines"] = ("modules.pkl", "modules-other.pkl")
    cases = HERE / "cases"
    for name in ("L0-tensor", "L1-md5", "mix-statistics", "debug-tensor"):
        shutil.copytree(cases / "msprobe" / name, home / f"real-{name}")
        found[f"real-{name}"] = (f"real-{name}", f"real-{name}")
    for side in "AB":
        shutil.copytree(cases / "precision_checker" / side, home / f"real-{side}")
    found["real-saving-hook"] = ("real-A", "real-B")
    for side in "ab":
        shutil.copy(cases / "torch_npu_hooks" / f"full_{side}.pkl", home)
    found["real-torch-npu"] = ("full_a.pkl", "full_b.pkl")
    return found  # type: ignore[return-value]


def _checkpoints(home: Path) -> dict[str, tuple[str, str]]:
    import torch
    from safetensors.torch import save_file

    from saved_checkpoints import save_distributed, write_index

    for side in "ab":
        torch.manual_seed(ord(side))
        state = {
            f"h.{n}.{w}": torch.randn(4, 3, dtype=d)
            for n, d in enumerate((torch.float32, torch.bfloat16))
            for w in "wb"
        }
        save_file(state, home / f"plain-{side}.safetensors")
        torch.save({"model": state, "optimizer": {"step": 3, "state": {0: torch.ones(2)}}}, home / f"saved-{side}.pt")
        torch.save(state, home / f"legacy-{side}.pt", _use_new_zipfile_serialization=False)
        save_distributed({"model": state}, home / f"dcp-{side}")
        folder = home / f"hub-{side}"
        folder.mkdir()
        halves = {"model-1.safetensors": list(state)[:2], "model-2.safetensors": list(state)[2:]}
        for file, chosen in halves.items():
            save_file({name: state[name] for name in chosen}, folder / file)
        weights = {name: file for file, chosen in halves.items() for name in chosen}
        write_index(folder / "model.safetensors.index.json", weights)
        folder = home / f"hub-torch-{side}"
        folder.mkdir()
        for file, chosen in halves.items():
            file = file.replace("safetensors", "bin")
            torch.save({name: state[name] for name in chosen}, folder / file)
        weights = {name: file.replace("safetensors", "bin") for name, file in weights.items()}
        write_index(folder / "pytorch_model.bin.index.json", weights)
    return {
        "safetensors": ("plain-a.safetensors", "plain-b.safetensors"),
        "torch-save": ("saved-a.pt", "saved-b.pt"),
        "torch-legacy": ("legacy-a.pt", "legacy-b.pt"),
        "distributed": ("dcp-a", "dcp-b"),
        "hub": ("hub-a", "hub-b"),
        "hub-torch": ("hub-torch-a", "hub-torch-b"),
    }
