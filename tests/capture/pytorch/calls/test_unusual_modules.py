"""Modules that cannot be watched, or whose attributes and methods raise or mislead: the others are recorded all the
same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.capture.identity_map import IdentityMap, IdentitySet, same
from astray.cli import main
from astray.records import MissedTensor
from astray.store import RunData, open_run
from recorded_rows import rows

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Lazy modules are a new feature")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


class RefusalError(RuntimeError):
    pass


def _refuses(*_: Any, **__: Any) -> Any:
    raise RefusalError("not to be asked")


class EqRaises(Plain):
    __eq__ = _refuses
    __hash__ = nn.Module.__hash__


class EqIsATensor(Plain):
    def __eq__(self, _other: object) -> Any:
        return torch.zeros(3)

    __hash__ = nn.Module.__hash__


class AllEqual(Plain):
    """As a dataclass is: two of them with the same fields are equal, and have one hash."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return 1


class Unhashable(Plain):
    __hash__ = None  # type: ignore[assignment]
    __eq__ = _refuses


class HashRaises(Plain):
    __hash__ = _refuses


class Untrue(Plain):
    __bool__ = __len__ = __iter__ = __contains__ = _refuses


class NoAttributes(Plain):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else _refuses()


class Properties(Plain):
    config = cfg = device = dtype = extra = property(_refuses)
    __constants__ = ("extra",)


class OtherNames(Plain):
    named_modules = modules = named_children = children = named_parameters = parameters = _refuses
    register_forward_hook = register_forward_pre_hook = _refuses


class Unrepresentable(Plain):
    __repr__ = __str__ = _refuses


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["frozen"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "frozen" in self.__dict__:
            _refuses()
        super().__setattr__(name, value)


class Lazy(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LazyLinear(3)


class Nameless(type):
    """A module whose class name cannot be read."""

    __name__ = property(_refuses)  # type: ignore[assignment]
    __eq__ = _refuses
    __hash__ = None  # type: ignore[assignment]


class OfANamelessClass(Plain, metaclass=Nameless):
    pass


def scripted() -> nn.Module:
    return torch.jit.script(Plain())  # type: ignore[no-any-return]


def traced() -> nn.Module:
    return torch.jit.trace(Plain(), torch.ones(2, 3))  # type: ignore[no-any-return]


class Around(nn.Module):
    """Two unusual modules among others."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.odd = make()
        self.odds = nn.ModuleList([make()])
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.odds[0](self.odd(self.first(x))))  # type: ignore[no-any-return]


ODD: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        EqRaises, EqIsATensor, AllEqual, Unhashable, HashRaises, Untrue, NoAttributes, Properties, OtherNames,
        Unrepresentable, Frozen, Lazy, scripted, traced,
    )
}  # fmt: skip
TORCHSCRIPT = ("scripted", "traced")
LEVELS = [("module",), ("module", "function"), ("module", "op")]


def weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Of which no module is asked."""
    yield from (one for one in module._parameters.values() if one is not None)
    for child in module._modules.values():
        if child is not None:
            yield from weights(child)


def train(make: Callable[[], nn.Module], started: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    """Results, gradients and weights of three steps."""
    torch.manual_seed(0)
    model = Around(make)
    found = []
    with started(model) as watching:
        for _ in range(3):
            result = model(torch.linspace(-1, 1, 6).view(2, 3))
            result.square().sum().backward()
            found += [result.detach().clone()]
            with torch.no_grad():
                for weight in weights(model):
                    assert weight.grad is not None
                    found += [weight.grad.clone()]
                    weight -= 0.1 * weight.grad
                    weight.grad = None
            watching.step()
    return found + [weight.detach().clone() for weight in weights(model)]


class Bare:
    def __init__(self, _model: nn.Module) -> None:
        pass

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self) -> None:
        pass


def missed(run: RunData) -> list[MissedTensor]:
    end = run.ranks[0].end
    assert end is not None
    return list(end.missed)


def sites(run: RunData) -> list[str]:
    return list(dict.fromkeys(row["site"] for row in rows(run, step=2, role="output", phase="forward")))


@pytest.mark.parametrize("level", LEVELS, ids="+".join)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_module_is_recorded_like_any_other(tmp_path: Path, name: str, level: tuple[str, ...]) -> None:
    bare = train(ODD[name], Bare)
    recorded = train(ODD[name], lambda model: astray.record(tmp_path / "run", model, level=level))
    assert all(map(torch.equal, bare, recorded))
    run = open_run(tmp_path / "run")
    assert run.complete
    seen = [site for site in sites(run) if "/" not in site]
    if name in TORCHSCRIPT:  # what is inside them is said not to be seen
        assert seen == ["first", "odd", "odds.0", "last", "<root>"]
        inside = [f"calls inside {odd}" for odd in ("odd", "odds.0")]
        assert [(one.what, one.why) for one in missed(run)] == [
            (what, "TorchScript makes them, past all hooks") for what in inside
        ]
        assert rows(run, site="odd.inner.weight", phase="backward")  # the gradients of their weights are
    else:
        assert seen == ["first", "odd.inner", "odd", "odds.0.inner", "odds.0", "last", "<root>"]
        assert missed(run) == []


@pytest.mark.parametrize("name", ODD)
def test_a_guard_watches_around_an_odd_module(tmp_path: Path, name: str) -> None:
    def started(model: nn.Module) -> Any:
        watching.append(astray.guard(model, on="warn", path=tmp_path / "found", level="function"))
        return watching[0]

    watching: list[astray.Guard] = []
    assert all(map(torch.equal, train(ODD[name], Bare), train(ODD[name], started)))
    expected = "no alarm in 3 steps"
    if name in TORCHSCRIPT:
        expected += "; not watched: calls inside odd (TorchScript makes them, past all hooks), and 1 more"
    assert watching[0].summary == expected


@pytest.mark.parametrize("name", [*ODD, "OfANamelessClass"])
def test_an_odd_module_may_be_the_outermost(tmp_path: Path, name: str) -> None:
    model = ODD.get(name, OfANamelessClass)()
    with astray.record(tmp_path / "run", model) as recorder:
        model(torch.ones(2, 3)).sum().backward()
        recorder.step()
    run = open_run(tmp_path / "run")
    if name == "OfANamelessClass":
        assert [(one.what, one.why) for one in missed(run)] == [
            ("calls of <root>", "it cannot be watched (RefusalError: not to be asked)")
        ]
    else:
        assert rows(run, site="<root>", role="output")


def test_a_module_that_cannot_be_watched_is_listed_and_the_rest_is_seen(tmp_path: Path) -> None:
    bare = train(OfANamelessClass, Bare)
    recorded = train(OfANamelessClass, lambda model: astray.record(tmp_path / "run", model))
    assert all(map(torch.equal, bare, recorded))
    run = open_run(tmp_path / "run")
    assert sites(run) == ["first", "odd.inner", "odds.0.inner", "last", "<root>"]
    assert {(one.what, one.why) for one in missed(run)} == {
        (f"calls of {odd}", "it cannot be watched (RefusalError: not to be asked)") for odd in ("odd", "odds.0")
    }


@pytest.mark.parametrize("name", ["Unhashable", "OtherNames", "AllEqual"])
def test_layers_that_are_replaced_are_found_by_what_they_are(tmp_path: Path, name: str) -> None:
    model = Around(ODD[name])
    with astray.record(tmp_path / "run", model) as recorder:
        model(torch.ones(2, 3))
        recorder.step()
        model.odd = ODD[name]()
        model(torch.ones(2, 3))
        recorder.step()
    run = open_run(tmp_path / "run")
    for step in (0, 1):
        assert [row["call"] for row in rows(run, site="odd.inner", role="output", step=step)] == [0]


def test_a_monitor_sees_the_weights_of_an_odd_module(tmp_path: Path) -> None:
    model = Around(EqRaises)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with astray.state.Monitor(model, optimizer, every=1, path=tmp_path / "run"):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert rows(open_run(tmp_path / "run"), site="odd.inner.weight")


SCRIPT = """
import torch
from torch import nn

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x)

model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(Inner()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


def test_check_says_what_was_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "script.py").write_text(SCRIPT)
    assert main(["check", "script.py"]) == 0
    told = capsys.readouterr().err
    assert (
        "astray check: no alarm in 2 steps; not watched: calls inside 1 (TorchScript makes them, past all hooks)."
        in told
    )


def test_a_second_guard_of_the_same_second_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "2026-01-01-000000")
    found = []
    for _ in range(2):
        with astray.guard(nn.Linear(3, 3), on="warn") as guard:
            pass
        with astray.guard(model := nn.Linear(3, 3), on="warn") as guard:
            model(torch.full((2, 3), float("nan")))
            guard.step()
        found.append(guard.trips[0].path)
    assert len(set(found)) == 2


def test_an_identity_map_asks_nothing_and_forgets_the_dead() -> None:
    known: IdentityMap[nn.Module, int] = IdentityMap()
    modules = [Unhashable(), Unhashable()]
    for number, module in enumerate(modules):
        known[module] = number
    assert [known.get(module) for module in modules] == [0, 1]
    assert modules[0] in known
    assert known.pop(modules[0]) == 0
    assert known.pop(modules[0]) is None
    assert known.get(modules[0], 7) == 7
    del modules, module
    assert known.items() == []
    assert not known._entries


def test_an_identity_set_and_sameness() -> None:
    first, second = Unhashable(), Unhashable()
    assert first in IdentitySet([first])
    assert second not in IdentitySet([first])
    assert same([first, second], (first, second))
    assert not same([first], [second])
    assert not same([first], [first, second])
