"""Weights into a model: from every kind of source, by a mapping and without, all of them or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.comparison.pair.layouts import Layout
from astray.comparison.pair.mapping import LayoutRule, Mapping
from astray.errors import CompareError, StateError


class Net(nn.Module):
    """Square and other weights, a buffer, and a module inside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.h = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)])
        self.bn = nn.BatchNorm1d(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.h:
            x = layer(x)
        return self.bn(x)


class Turned(nn.Module):
    """A linear layer that keeps its weight as [in, out]."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(given, made))
        self.bias = nn.Parameter(torch.randn(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class TurnedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Turned(4, 4), Turned(4, 8)])


class Renamed(Net):
    """The same with another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.h
        del self.h

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.bn(x)


TO_RENAMED = Mapping({"h": "layers"}, layouts=[LayoutRule(r"h\.\d+\.weight", Layout.parse("transpose"))])
IDS = torch.tensor([1, 5, 2, 0])


def net(seed: int = 0, kind: type[Net] = Net) -> Any:
    torch.manual_seed(seed)
    return kind()


def same(one: nn.Module, other: nn.Module) -> bool:
    one.eval()
    other.eval()
    return torch.allclose(one(IDS), other(IDS), atol=1e-6)


def recorded(path: Path, model: nn.Module, **settings: Any) -> Path:
    with astray.record(path, model, **{"keep": "tensors", **settings}) as rec:
        model(IDS).sum().backward()
        rec.step()
    return path


def saved(path: Path, model: nn.Module) -> Path:
    torch.save(model.state_dict(), path)
    return path


SOURCES = {
    "run": lambda folder, model: recorded(folder / "run", model),
    "open run": lambda folder, model: astray.open(recorded(folder / "run", model)),
    "checkpoint": lambda folder, model: saved(folder / "weights.pt", model),
    "open checkpoint": lambda folder, model: astray.open(saved(folder / "weights.pt", model)),
    "state_dict": lambda folder, model: model.state_dict(),
    "StateDict": lambda folder, model: astray.state.from_state_dict(model.state_dict()),
    "model": lambda folder, model: model,
    "arrays": lambda folder, model: {name: value.numpy() for name, value in model.state_dict().items()},
}


@pytest.mark.parametrize("kind", SOURCES)
def test_weights_come_from_any_source(tmp_path: Path, kind: str) -> None:
    source, model = net(), net(1)
    weights = {name: value.clone() for name, value in source.state_dict().items()}
    of_model = [*model.parameters(), *model.buffers()]
    given = SOURCES[kind](tmp_path, source)
    if kind in ("StateDict", "arrays"):  # what it was made of is not known
        loaded = astray.load_from(given, model, map=Mapping())
    else:
        loaded = astray.load_from(given, model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert [*map(id, model.parameters()), *map(id, model.buffers())] == [*map(id, of_model)], (
        "they were written in place"
    )
    assert loaded.names == {name: name for name in weights}
    assert (loaded.layouts, loaded.kept, loaded.unused) == ({}, (), ())
    assert f"{len(weights)} tensors of Net were loaded from" in str(loaded)


@pytest.mark.parametrize("kind", ["run", "checkpoint", "model"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_mapping_says_how_weights_lie_in_either_direction(tmp_path: Path, kind: str, backward: bool) -> None:
    """It was drafted for a candidate with transposed weights, which is the model, or else the source."""
    source, model = (net(0, TurnedNet), net(1, Renamed)) if backward else (net(0, Renamed), net(1, TurnedNet))
    source.eval()  # a step of training would change its running statistics
    loaded = astray.load_from(SOURCES[kind](tmp_path, source), model, map=TO_RENAMED)
    assert same(source, model)
    assert [*loaded.layouts.values()] == ["transpose"] * 2
    assert "2 of them laid out anew" in str(loaded)


def test_a_mapping_file_of_a_comparison_will_do(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(r"layouts: {'h\.\d+\.weight': transpose}")
    source, model = net(), net(1, TurnedNet)
    astray.load_from(source, model, map=tmp_path / "map.yaml")
    assert same(source, model)
    with pytest.raises(CompareError, match="cannot be read"):
        astray.load_from(source, model, map=tmp_path / "none.yaml")


def test_the_weights_of_a_run_are_those_of_its_first_step(tmp_path: Path) -> None:
    source = net()
    before = {name: value.clone() for name, value in source.named_parameters()}
    optimizer = torch.optim.SGD(source.parameters(), 0.5)
    with astray.record(tmp_path / "run", source, keep="tensors") as rec:
        for _ in range(2):
            source(IDS).square().sum().backward()
            optimizer.step()
            rec.step()
    model = net(1)
    astray.load_from(tmp_path / "run", model)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_dtypes_stay_and_what_is_converted_is_said() -> None:
    source, model = net(), net(1).to(torch.bfloat16)
    loaded = astray.load_from(source, model)
    assert model.h[0].weight.dtype == torch.bfloat16
    assert torch.equal(model.h[0].weight, source.h[0].weight.to(torch.bfloat16))
    assert loaded.converted["h.0.weight"] == "float32 to bfloat16"
    assert "converted" in str(loaded)
    back = net(2)
    astray.load_from(model, back)
    assert torch.equal(back.h[0].weight, model.h[0].weight.float())


def untouched(model: nn.Module, load: Any, said: str) -> None:
    """A load that fails, and leaves the model as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StateError, match=said):
        load()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_everything_that_is_missing_or_does_not_fit_is_told_at_once() -> None:
    model = net(1)
    state = {name: value for name, value in net().state_dict().items() if name != "bn.running_var"}
    state["h.1.bias"] = torch.zeros(9)
    state["embed.weight"] = torch.zeros(7, 4, dtype=torch.int64)
    state["spare"] = torch.zeros(3)
    untouched(
        model,
        lambda: astray.load_from(state, model),
        r"Nothing was loaded: embed.weight is float32 and embed.weight is int64; h.1.bias is \[8\] and h.1.bias is "
        r"\[9\]; bn.running_var \[8\] is not in the source. The source also has spare.",
    )


def test_a_rule_that_does_not_fit_is_told() -> None:
    model = net(1)
    rules = Mapping(layouts=[LayoutRule("h.1.weight", Layout.parse("transpose")), LayoutRule("bn.weight", TURN)])
    said = r"h.1.weight is \[4, 8\] and h.1.weight is \[8, 4\] \(by the layout transpose\); the layout of bn.weight"
    untouched(model, lambda: astray.load_from(net(), model, map=rules), said)


TURN = Layout.parse({"transpose": [0, 1]})


def test_a_run_without_values_is_told(tmp_path: Path) -> None:
    model = net(1)
    statistics = recorded(tmp_path / "statistics", net(), keep="stats")
    untouched(model, lambda: astray.load_from(statistics, model), "kept statistics and no values of embed.weight")
    part = recorded(tmp_path / "part", net(), slice=":1")
    untouched(model, lambda: astray.load_from(part, model), "kept some values only of embed.weight")
    nothing = recorded(tmp_path / "nothing", net(), level="function", phases="forward")
    untouched(model, lambda: astray.load_from(nothing, model), "has no weights")


def test_what_cannot_give_or_take_weights_is_told() -> None:
    for source, said in (
        (3, "taken from a int"),
        ({}, "without tensors"),
        ({"a": {"b": 1}}, "'a' is a mapping itself"),
    ):
        with pytest.raises(StateError, match=said):
            astray.load_from(source, net())
    with pytest.raises(StateError, match=r"A str was given to load weights into. Give a torch.nn.Module or"):
        astray.load_from(net(), "model")
    with pytest.raises(StateError, match="has no parameters and no buffers"):
        astray.load_from(net(), nn.ReLU())
    with pytest.raises(StateError, match=r"embed.weight of the model cannot be written: it is on the meta device"):
        astray.load_from(net(), net().to("meta"))


def test_wrappers_and_prefixes_in_names_do_not_matter() -> None:
    source, model = net(), net(1)
    loaded = astray.load_from({f"module.{name}": value for name, value in source.state_dict().items()}, model)
    assert same(source, model)
    assert {*loaded.how.values()} == {"by name without wrappers"}


def test_other_names_are_paired_by_shape_and_that_is_said() -> None:
    source, model = net(), net(1)
    state = {name.replace("embed", "tokens"): value for name, value in source.state_dict().items()}
    loaded = astray.load_from(state, model)
    assert same(source, model)
    assert loaded.names["embed.weight"] == "tokens.weight"
    assert "check these   embed.weight from tokens.weight" in str(loaded)


def test_a_square_weight_of_an_unknown_framework_is_asked_about() -> None:
    """Nothing else of its class shows how it lies."""
    source, model = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    arrays = {name: value.numpy() for name, value in source.state_dict().items()}
    untouched(model, lambda: astray.load_from(arrays, model), "0.weight is .4, 4., and it is not known which framework")
    astray.load_from(arrays, model, map=Mapping())
    assert torch.equal(model[0].weight, source[0].weight)


def test_a_square_weight_lies_as_others_of_its_class() -> None:
    """Paddle's state as arrays: the weight that is not square shows that both are transposed."""
    source, model = net(), net(1)
    arrays = {name: value.numpy() for name, value in source.state_dict().items()}
    turned = {name: value.T if name in ("h.0.weight", "h.1.weight") else value for name, value in arrays.items()}
    astray.load_from(turned, model)
    assert same(source, model)


def test_tied_weights_must_be_given_one_value() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 4), nn.Linear(3, 4)
            self.other.weight = self.one.weight

    source, model = Tied(), Tied()
    astray.load_from(source, model)
    assert torch.equal(source.one.weight, model.other.weight)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    state["other.weight"] += 1
    untouched(model, lambda: astray.load_from(state, model), "one.weight and other.weight are one tensor of the model")


def test_values_that_were_damaged_are_not_loaded(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", net())
    [file] = path.rglob("values-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-len(content) // 2 :] = bytes(len(content) // 2)
    file.write_bytes(content)
    model = net(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(astray.AstrayError, match="the file was changed or damaged"):
        astray.load_from(path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nothing_of_a_load_stays_in_the_graph() -> None:
    model = net(1)
    astray.load_from(net(), model)
    assert all(parameter.grad_fn is None and parameter.requires_grad for parameter in model.parameters())
    assert np.isfinite(model(IDS).detach().numpy()).all()
