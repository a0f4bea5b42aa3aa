"""Where states come from: models, gradients, optimizers, mappings."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.errors import StateError
from astray.state import StateDict
from state.models import GPT, DistributedDataParallel


def test_a_state_is_a_mapping_in_the_models_order() -> None:
    model = GPT()
    weight = astray.state.from_weight(model)
    assert list(weight) == [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in weight  # tied, and there under its first name
    assert weight.at(0) is not None
    assert torch.equal(weight.at(-1), model.transformer["ln_f"].weight)
    assert weight.name == "GPT_weights"
    with pytest.raises(IndexError, match="15 parameters; there is no number 15"):
        weight.at(15)
    with pytest.raises(KeyError, match=r"no 'transformer.wte.wait'. Did you mean 'transformer.wte.weight'"):
        weight["transformer.wte.wait"]
    with pytest.raises(TypeError, match="'a' would be a str"):
        weight["a"] = "text"  # type: ignore[assignment]


def test_a_state_goes_where_mappings_go() -> None:
    weight = astray.state.from_weight(nn.Linear(3, 2))
    other = nn.Linear(3, 2)
    other.load_state_dict(weight)
    assert astray.state.from_weight(other) == weight
    twin, copied = copy.copy(weight), copy.deepcopy(weight)
    assert pickle.loads(pickle.dumps(copied)) == weight
    twin["weight"] = torch.ones(1)
    weight.zeros_()
    assert weight["weight"].shape == (2, 3)
    assert twin["bias"].tolist() == [0.0, 0.0]
    assert copied == astray.state.from_weight(other)
    assert weight.get("nothing") is None
    assert dict(weight).keys() == weight.keys()


def test_patterns_match_from_the_start() -> None:
    model = GPT()
    assert list(astray.state.from_weight(model, pattern="transformer.w")) == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
    ]
    assert len(astray.state.from_weight(model).filter(r".*ln_\d")) == 4
    with pytest.warns(UserWarning, match="matches none"):
        assert len(astray.state.from_weight(model, "ln")) == 0


def test_clone_device_dtype_and_name() -> None:
    model = nn.Linear(3, 2)
    shared, copied = astray.state.from_weight(model), astray.state.from_weight(model, clone=True)
    half = astray.state.from_weight(model, dtype=torch.bfloat16, device="cpu", name="half")
    with torch.no_grad():
        model.weight += 1
    assert torch.equal(shared["weight"], model.weight)
    assert torch.equal(copied["weight"] + 1, model.weight)
    assert half["weight"].dtype == torch.bfloat16
    assert repr(half).splitlines()[0].startswith("half[L2=")
    assert repr(half).splitlines()[0].endswith(", Numel=8, device=cpu, dtype=torch.bfloat16]")
    assert model.weight.dtype == torch.float32
    assert copied.to(dtype=torch.float64) is copied
    assert copied["weight"].dtype == torch.float64


def test_a_state_follows_a_model_that_is_moved() -> None:
    model = nn.Linear(3, 2)
    weight = astray.state.from_weight(model)
    model.double()  # gives each parameter other memory
    assert weight["weight"].dtype == torch.float64
    assert weight["weight"].data_ptr() == model.weight.data_ptr()


def test_only_what_is_trained() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert list(astray.state.from_weight(model)) == ["weight", "bias"]
    assert list(astray.state.from_weight(model, requires_grad=True)) == ["weight"]


def test_gradients_are_there_between_backward_and_zero_grad() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(9, 9))
    model[1].bias.requires_grad_(False)
    model[:2](torch.ones(1, 3)).sum().backward()
    with pytest.warns(UserWarning, match=r"2 of 5 parameters have no gradient and were left out: 2.weight, 2.bias\."):
        grad = astray.state.from_grad(model)
    assert list(grad) == ["0.weight", "0.bias", "1.weight"]
    assert grad.name == "Sequential_grads"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(astray.state.from_grad(model, pattern="0")["0.bias"], model[0].bias.grad)
    model.zero_grad()
    with pytest.warns(UserWarning, match="None of 5 parameters has a gradient") as told:
        assert len(astray.state.from_grad(model)) == 0
    assert told[0].filename == __file__


def test_optimizer_states_by_the_names_of_parameters() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(StateError, match="AdamW has no state yet"):
        astray.state.from_optimizer_state(model, optimizer, "exp_avg")
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    average = astray.state.from_optimizer_state(model, optimizer, "exp_avg")
    assert torch.equal(average["weight"], optimizer.state[model.weight]["exp_avg"])
    assert average.name == "Linear_exp_avg"
    weight, grad, states = astray.state.from_together(model, optimizer, ["exp_avg", "step"], clone=True)
    assert [list(each) for each in (weight, grad, *states)] == [["weight", "bias"]] * 4
    before = average.clone()
    optimizer.step()
    assert average != before
    assert states[0] == before
    with pytest.raises(StateError, match=r"AdamW keeps no 'momentum'.*it keeps step, exp_avg, exp_avg_sq"):
        astray.state.from_optimizer_state(model, optimizer, "momentum")
    with pytest.raises(StateError, match="Say which state: it keeps step"):
        astray.state.from_optimizer_state(model, optimizer)
    with pytest.raises(StateError, match="none of this model's parameters"):
        astray.state.from_optimizer_state(nn.Linear(1, 1), optimizer, "exp_avg")


def test_a_mapping_of_anything() -> None:
    with pytest.warns(UserWarning, match=r"1 entry.*left out: '_extra_state' \(bytes\)"):
        state = astray.state.from_state_dict({"a": torch.ones(2), "n": 3, "_extra_state": b"x"})
    assert list(state) == ["a", "n"]
    with pytest.raises(StateError, match=r"'model' is a mapping itself.*raw\['model'\]"):
        astray.state.from_state_dict({"model": {}})


def test_states_of_wrapped_models_combine() -> None:
    model = GPT()
    plain, wrapped = astray.state.from_weight(model), astray.state.from_weight(DistributedDataParallel(model))
    compiled = astray.state.from_weight(torch.compile(model, backend="eager"))
    with pytest.raises(StateError, match=r"only in 'DistributedDataParallel_weights': module.*unwrap\(\)"):
        plain - wrapped
    assert (plain - wrapped.unwrap()).abs_max() == 0
    assert next(iter(compiled)).startswith("_orig_mod.")
    assert compiled.unwrap() == plain
    assert list(astray.state.from_weight(DistributedDataParallel(model), unwrap=True)) == list(plain)
    names = ["_orig_mod.module.h.0._checkpoint_wrapped_module.w", "_orig_mod.module._fsdp_wrapped_module.module.w"]
    assert list(StateDict(dict.fromkeys(names, 1.0)).unwrap()) == ["h.0.w", "module.w"]
    with pytest.raises(ValueError, match="would both be 'w'"):
        StateDict({"w": 1.0, "_orig_mod.w": 2.0}).unwrap()


def test_compatible_states_have_the_same_names_and_shapes() -> None:
    one = StateDict({"a": torch.ones(2), "b": torch.ones(3)})
    assert one.is_compatible(StateDict({"b": torch.ones(3), "a": torch.zeros(2)}))
    assert not one.is_compatible(one.filter("a"))
    assert not one.is_compatible(StateDict({"a": torch.ones(2), "b": torch.ones(1, 3)}))


def test_flatten_is_never_stale() -> None:
    model = nn.Linear(2, 1)
    weight = astray.state.from_weight(model)
    first = weight.flatten()
    with torch.no_grad():
        model.weight.zero_()
    assert first.shape == (3,)
    assert weight.flatten()[:2].tolist() == [0.0, 0.0]
    assert weight.flatten(pattern="bias").tolist() == model.bias.tolist()


@pytest.mark.parametrize("make", [astray.state.from_weight, astray.state.from_grad])
def test_what_is_not_a_model_is_answered_in_words(make: Any) -> None:
    with pytest.raises(StateError, match="A dict was given, which has no parameters"):
        make({"a": torch.ones(2)})
