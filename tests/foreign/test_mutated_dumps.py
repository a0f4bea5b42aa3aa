"""Dumps of every format, damaged in three hundred ways: a sentence each, no code run, nothing read outside of them."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray.cli import main
from astray.errors import AstrayError
from astray.store.formats import FOREIGN

SEEDS = [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 75))]  # of each format
OUTSIDE = "secret"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = torch.nn.functional.relu(self.one(x))
        return {"logits": self.two(hidden), "hidden": hidden if mask is None else hidden * mask}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small training as each of the tools would have dumped it."""
    home = tmp_path_factory.mktemp("dumps")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with astray.record(home / "run", model, level=["module", "function"], keep="tensors") as recorder:
        for _ in range(2):
            model(torch.randn(5, 4), mask=torch.ones(3))["logits"].sum().backward()
            optimizer.step()
            recorder.step()
    for name in FOREIGN:
        astray.convert(home / "run", home / name, to=name)
    return {name: home / name for name in FOREIGN}


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.place,)


# -- what can happen to a dump ---------------------------------------------------------------------------------------

Mutation = Callable[[random.Random, Path, Path], None]


def files_of(dump: Path, *endings: str) -> list[Path]:
    return sorted(path for path in dump.rglob("*") if path.is_file() and path.name.endswith(endings))


def cut(chance: random.Random, dump: Path, _: Path) -> None:
    path = chance.choice(files_of(dump, ""))
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size + 1)])


def flip(chance: random.Random, dump: Path, _: Path) -> None:
    path = chance.choice(files_of(dump, ""))
    content = bytearray(path.read_bytes() or b"x")
    for _ in range(chance.choice((1, 1, 3, 20))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(content))


def lose(chance: random.Random, dump: Path, _: Path) -> None:
    path = chance.choice(files_of(dump, ""))
    path.unlink()


def empty(chance: random.Random, dump: Path, _: Path) -> None:
    chance.choice(files_of(dump, "")).write_bytes(b"")


def rename(chance: random.Random, dump: Path, _: Path) -> None:
    path = chance.choice(files_of(dump, ""))
    name = chance.choice(("%s.bak", "x" * 200 + "%s", "\x1b[31m%s", "%s " * 3, "..%s", "micro_step_%s", "-1_%s"))
    path.rename(path.with_name(name.replace("%s", path.name)[:250]))


def wrong_types(chance: random.Random, dump: Path, _: Path) -> None:
    """Something in a JSON becomes something else."""
    texts = files_of(dump, ".json", ".jsonl", ".pkl")
    if not texts:
        return flip(chance, dump, dump)
    path = chance.choice(texts)
    lines = [path.read_text()] if path.name.endswith(".json") else path.read_text().splitlines()
    at = chance.randrange(len(lines) or 1)
    try:
        lines[at] = json.dumps(_changed(chance, json.loads(lines[at])))
    except (ValueError, IndexError):
        lines = ["[" * chance.choice((3, 5000))]
    path.write_text("\n".join(lines))
    return None


ODD: list[Any] = [
    None, -1, 1 << 80, 1e400, float("nan"), "", "../../secret", "/etc/passwd", "\x00", "torch.float99", [], {},
    [[[[1]]]], {"type": "torch.Tensor"}, {"shape": [1 << 40] * 3}, True, "NaN", ["a", 1, None], "é" * 5000,
]  # fmt: skip


def _changed(chance: random.Random, value: Any) -> Any:
    inside = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inside or chance.random() < 0.15:
        return chance.choice(ODD)
    key = chance.choice(inside)
    changed = dict(value) if isinstance(value, dict) else list(value)
    if isinstance(value, dict) and chance.random() < 0.2:
        changed[str(chance.choice(ODD))] = changed.pop(key)
    elif chance.random() < 0.1:
        del changed[key]
    else:
        changed[key] = _changed(chance, value[key])
    return changed


def tokens(chance: random.Random, dump: Path, _: Path) -> None:
    """Numbers become NaN, Infinity, or too large for any float."""
    texts = files_of(dump, ".json", ".jsonl", ".pkl")
    if not texts:
        return flip(chance, dump, dump)
    path = chance.choice(texts)
    words = path.read_text().split(" ")
    for _ in range(5):
        words[chance.randrange(len(words))] = chance.choice(("NaN,", "Infinity,", "-Infinity,", "1e999,", "nul,"))
    path.write_text(" ".join(words))
    return None


def lead_out(chance: random.Random, dump: Path, outside: Path) -> None:
    """A file, or a folder, becomes a link to somewhere else."""
    inside = [path for path in sorted(dump.rglob("*")) if path != dump]
    path = chance.choice(inside)
    if path.is_dir():
        shutil.rmtree(path)
        path.symlink_to(outside)
    else:
        path.unlink()
        path.symlink_to(chance.choice([outside / "secret.npy", outside / "secret.json", outside, path]))


def explode(chance: random.Random, dump: Path, outside: Path) -> None:
    """Values become a pickle that runs code."""
    path = chance.choice(files_of(dump, ".pt", ".npy", ".pkl") or files_of(dump, ""))
    bomb = Bomb(str(outside / "exploded"))
    if path.suffix == ".npy" and chance.random() < 0.5:
        np.save(path, np.array([bomb], object), allow_pickle=True)
    elif path.suffix == ".pt" and chance.random() < 0.5:
        torch.save({"input": bomb, "output": torch.ones(2)}, path)
    else:
        path.write_bytes(pickle.dumps(bomb))


def other_values(chance: random.Random, dump: Path, _: Path) -> None:
    """Values of another shape and type than the dump says."""
    path = chance.choice(files_of(dump, ".pt", ".npy") or files_of(dump, ""))
    array = np.zeros(chance.choice(((), (0,), (7, 1), (2, 2, 2))), chance.choice(("f8", "i1", "c8", "?")))
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".pt":
        torch.save(torch.from_numpy(array), path)
    else:
        path.write_bytes(array.tobytes())


MUTATIONS: list[Mutation] = [
    cut, flip, lose, empty, rename, wrong_types, wrong_types, wrong_types, tokens, lead_out, explode, other_values,
]  # fmt: skip


# -- what may not happen ---------------------------------------------------------------------------------------------

_watched: list[Path] = []
_opened: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str):
        place = os.path.realpath(arguments[0])
        if any(place.startswith(str(folder)) for folder in _watched):
            _opened.append(f"{event} {place}")


sys.addaudithook(_audit)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder without read permission."""
    folder = tmp_path / OUTSIDE
    folder.mkdir()
    np.save(folder / "secret.npy", np.full(3, 42.0, np.float32))
    (folder / "secret.json").write_text('{"data": {"secret": 42}}')
    yield folder
    _watched.clear()
    _opened.clear()


def use(path: Path, original: Path) -> list[str]:
    """Everything one does with a run; gives every sentence that was said."""
    try:
        run = astray.open(path)
    except AstrayError as error:
        return [str(error)]
    said: list[str] = []
    for rank in run.ranks.values():
        for row in range(len(rank.tensors)):
            rank.tensors.row(row)
            try:
                rank.values(row)
            except AstrayError as error:
                said.append(str(error))
        for row in range(len(rank.calls)):
            stack = rank.calls.row(row)["stack"]
            rank.stack(-1 if stack is None else stack)
    repr(run)
    for command in (["show", str(path), "--top", "3"], ["compare", str(original), str(path)]):
        told = io.StringIO()
        with redirect_stdout(told), redirect_stderr(told):
            code = main(command)
        assert "Traceback" not in told.getvalue(), told.getvalue()
        assert code in (0, 1, 2)
    return [*said, *run.problems]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_dump_as_it_is(dumps: dict[str, Path], name: str) -> None:
    run = astray.open(dumps[name])
    assert run.problems == []
    assert run.info.settings["format"] == name
    assert len(run.table()) > 10


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_dump(dumps: dict[str, Path], name: str, seed: int, tmp_path: Path, outside: Path) -> None:
    chance = random.Random(f"{name} {seed}")
    path = tmp_path / name
    if dumps[name].is_dir():
        shutil.copytree(dumps[name], path)
    else:
        path.mkdir()
        shutil.copy(dumps[name], path / dumps[name].name)
    alone = not dumps[name].is_dir()  # a link that is given by itself is followed
    ways = [mutation for mutation in MUTATIONS if not (alone and mutation is lead_out)]
    for mutation in chance.sample(ways, chance.choice((1, 1, 2))):
        if files_of(path, ""):
            mutation(chance, path, outside)
    target = path if dumps[name].is_dir() else next(iter(sorted(path.iterdir())), path)
    _watched.append(outside)
    said = use(target, dumps[name])
    _watched.clear()
    assert _opened == []
    assert all(sentence.endswith(".") for sentence in said), said
    assert not (outside / "exploded").exists()
