"""`astray.experiment.swap` of modules and functions: one of them in another dtype; everything else is unchanged.

There is one device here, so dtypes stand for devices, and `meta`, a device without numbers, for where things went.
"""

from __future__ import annotations

import copy
import inspect
import io
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import astray
from astray.errors import UsageError
from recorded_rows import hooks_of, rows
from small_models import MODELS, Attending, Noisy, Residual, Shared, build


class Watching(nn.Module):
    """Keeps its input and returns the result of a function of it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor([3.0]))
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return self.function(*args, **kwargs)


def test_the_module_computes_in_float64_and_its_result_comes_back_in_float32() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(300, 300)
    model = nn.Sequential(nn.Tanh(), layer)
    x = torch.randn(4, 300)
    exact = F.linear(x.tanh().double(), layer.weight.double(), layer.bias.double())
    plain = model(x)
    with astray.experiment.swap(model, "1", to="float64"):
        found = model(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, exact.float())
    assert not torch.equal(found, plain)
    assert torch.equal(model(x), plain)


def test_gradients_reach_the_original_parameters_and_inputs_as_if_computed_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 5))
    x = torch.randn(4, 300, requires_grad=True)
    with astray.experiment.swap(model, "1", to=torch.float64):
        model(x).square().sum().backward()
    assert model[1].weight.is_leaf

    h = F.linear(x, model[0].weight, model[0].bias).detach()
    weight = model[1].weight.detach().double().requires_grad_()
    h64 = h.double().requires_grad_()
    y = F.linear(h64, weight, model[1].bias.detach().double()).float()
    y.backward(2 * y.detach())
    assert torch.equal(model[1].weight.grad, weight.grad.float())
    assert x.grad is not None
    own = torch.autograd.grad(F.linear(x, model[0].weight, model[0].bias), x, h64.grad.float())[0]
    assert torch.equal(x.grad, own)


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_runs_wholly_elsewhere_and_is_as_before_afterwards(kind: type[nn.Module]) -> None:
    model = build(kind)
    before = {name: (id(value), value._version) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    x = torch.randn(5, 6)
    torch.manual_seed(3)
    expected = copy.deepcopy(model).double()(x.double())
    torch.manual_seed(3)
    with astray.experiment.swap(model, "<root>", to="float64"):
        found = model(x)
        found.sum().backward()
    assert torch.equal(found, expected.float())
    assert "forward" not in model.__dict__
    now = {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    assert now == {name: number for name, (number, _) in before.items()}
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    model(x).sum().backward()


@pytest.mark.parametrize("what", [".*", ".*/.*", r".*/aten\..*"])
@pytest.mark.parametrize("kind", MODELS)
def test_to_the_own_dtype_and_device_no_bit_changes_and_nothing_remains(kind: type[nn.Module], what: str) -> None:
    x = torch.randn(5, 6)
    model, twin = build(kind), build(kind)
    attributes = set(vars(model))
    for each, around in ((twin, nullcontext()), (model, astray.experiment.swap(model, what, to="cpu,float32"))):
        torch.manual_seed(3)
        with around:
            each(x).sum().backward()
    for own, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(own, other)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    assert set(vars(model)) == attributes
    assert hooks_of(model) == 0


def test_keywords_and_nested_arguments_and_results_go_and_come_back() -> None:
    class Pair(NamedTuple):
        left: torch.Tensor
        right: torch.Tensor | None

    @dataclass(frozen=True)
    class Bag:
        x: torch.Tensor
        rest: dict[str, Any]

    ids, marker, plain = torch.tensor([1, 2]), object(), [1, 2]
    inner = Watching(lambda bag, pair, *, mask, plain: {"y": bag.x * 2, "ids": bag.rest["ids"], "pair": pair})
    x, y = torch.ones(2), torch.full((2,), 5.0)
    bag = Bag(x, {"ids": ids, "marker": marker, "deep": [x, (x,)]})
    with astray.experiment.swap({"m": nn.Sequential(inner)}, "m.0", to="float64"):
        result = inner(bag, Pair(y, None), mask=y, plain=plain)
    (taken, pair), keywords = inner.seen
    assert (taken.x.dtype, pair.left.dtype, keywords["mask"].dtype) == (torch.float64,) * 3
    assert pair.right is None
    assert keywords["mask"] is pair.left  # one tensor stays one
    assert taken.rest["deep"][0] is taken.rest["deep"][1][0] is taken.x
    assert taken.rest["ids"] is ids
    assert taken.rest["marker"] is marker
    assert keywords["plain"] is plain
    assert bag.x is x
    assert result["y"].dtype == torch.float32
    assert result["ids"] is ids
    assert result["pair"].left is y  # handed on, so the very same


def test_running_statistics_are_updated_in_the_original() -> None:
    model, twin = build(Noisy), build(Noisy)
    norm, x = model.norm, torch.randn(5, 6)
    buffers = dict(norm.named_buffers())
    with astray.experiment.without_dropout():
        with astray.experiment.swap(model, "norm", to="float64"):
            model(x)
        twin(x)
    assert dict(norm.named_buffers()).keys() == buffers.keys()
    assert all(dict(norm.named_buffers())[name] is buffer for name, buffer in buffers.items())
    assert norm.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_mean, twin.norm.running_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(norm.running_var, twin.norm.running_var, rtol=1e-6, atol=1e-7)
    assert not torch.equal(norm.running_mean, torch.zeros(4))


def test_running_statistics_in_inference_mode() -> None:
    norm = nn.BatchNorm1d(3)
    with torch.inference_mode(), astray.experiment.swap(norm, "<root>", to="float64"):
        norm(torch.randn(4, 3) + 5)
    assert norm.running_mean.min() > 0.3


def test_buffers_and_attributes_that_the_module_puts_in_place_come_home() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))
            self.constant = torch.full((2,), 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = x * self.constant
            self.last = x
            return self.mean + 1

    model = Keeping()
    x, constant = torch.ones(2), model.constant
    with astray.experiment.swap(model, "<root>", to="float64"):
        model(x)
    assert model.mean.dtype == torch.float32
    assert model.mean.tolist() == [2, 2]
    assert model.last is x
    assert model.constant is constant


def test_what_a_module_writes_into_its_input_is_written_in_the_original() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4)
    h = model[0](x)
    with astray.experiment.swap(model, "1", to="float64"):
        y = model[1](h)
    assert y is h
    assert h.min() == 0
    y.square().sum().backward()
    twin(x).square().sum().backward()
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad)


def test_a_shared_module_is_elsewhere_under_each_of_its_names_and_the_other_layers_are_not() -> None:
    model = build(Shared)
    seen: list[torch.dtype] = []
    linear = F.linear

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is linear:
                seen.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    with astray.experiment.swap(model, "layer", to="float64"), Spy():
        model(torch.randn(2, 6))
    assert seen == [torch.float64] * 3 + [torch.float32]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_which_keep_a_list_of_their_weights(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer = kind(4, 4, 2)
    x = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]))
    expected, _ = copy.deepcopy(layer).double()(x.to(torch.float64))
    with astray.experiment.swap(layer, "<root>", to="float64"):
        found, _ = layer(x)
        found.data.sum().backward()
    assert torch.equal(found.data, expected.data.float())
    assert all(flat is own for flat, own in zip(layer._flat_weights, layer.parameters(), strict=True))
    assert pad_packed_sequence(layer(x)[0])[0].dtype == torch.float32
    assert layer.weight_ih_l0.grad is not None


def test_weights_that_a_hook_computes_go_along() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weight_norm has a successor, and says so
        old = nn.utils.weight_norm(nn.Linear(3, 3))
    new = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    for layer in (old, new):
        with astray.experiment.swap(layer, "<root>", to="float64"):
            layer(torch.ones(1, 3)).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())


def test_one_function_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Softened(), Softened()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) * 7)

    class Softened(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kinds = [(y := F.softmax(x @ x.T, -1)).dtype, (z := torch.softmax(x, 0)).dtype, x.softmax(1).dtype]
            return y @ x + z

    model = Net()
    x = torch.randn(6, 6)

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        return F.softmax((x @ x.T).double(), -1).float() @ x + torch.softmax(x.double(), 0).float()

    first = model.a(x)
    with astray.experiment.swap(model, "b/softmax", to="float64"):
        found = model(x)
    assert torch.equal(found, by_hand(first * 7))
    assert model.b.kinds == [torch.float32] * 3
    with astray.experiment.swap(model, r"[ab]/matmul", to="float64"):  # which `@` calls too
        found = model.a(x)
    scores = (x.double() @ x.T.double()).float()
    assert torch.equal(found, (F.softmax(scores, -1).double() @ x.double()).float() + torch.softmax(x, 0))


def test_a_function_that_writes_where_it_is_told() -> None:
    target, x = torch.zeros(3), torch.tensor([1.0, -2.0, 3.0])
    model = Watching(lambda x, target: (torch.neg(x, out=target), x.relu_()))
    with astray.experiment.swap(model, "<root>/neg", to="float64"):
        negated, _ = model(x.clone(), target)
    assert negated is target
    assert target.tolist() == [-1, 2, -3]
    with astray.experiment.swap(model, "<root>/relu_", to="float64"):
        _, positive = model(x, target)
    assert positive is x
    assert x.tolist() == [1, 0, 3]


def test_gradients_through_one_function() -> None:
    layer = nn.Linear(50, 50)
    x = torch.randn(3, 50)
    with astray.experiment.swap(layer, "<root>/linear", to="float64"):
        layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, x.double().sum(0).float().expand(50, 50))


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("0.norm", ["0.norm"]),
        (r".*\.norm", ["0.norm", "1.norm"]),
        (re.compile(r"[01]\.inner"), ["0.inner", "1.inner"]),
        (["1.norm", r"0\..*"], ["0.inner", "0.norm", "1.norm"]),
    ],
)
def test_sites_by_name_by_expression_and_several(site: Any, expected: list[str]) -> None:
    model = nn.Sequential(Residual(), Residual())
    with astray.experiment.swap(model, site, to="float64"):
        covered = sorted(name for name, module in model.named_modules() if "forward" in module.__dict__)
        model(torch.randn(2, 6))
    assert covered == expected
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_another_device() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Watching(lambda x: x.sum(1)), nn.ReLU())
    with pytest.raises(NotImplementedError, match="meta"), astray.experiment.swap(model, "1", to="meta"):
        model(torch.ones(2, 3))  # nothing comes back from there, for there are no numbers
    ((taken,), _) = model[1].seen
    assert (taken.device.type, taken.dtype) == ("meta", torch.float32)
    assert model[1].scale.device.type == "cpu"
    assert model(torch.ones(2, 3)).shape == (2,)


def test_autocast_does_not_undo_the_dtype() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        with astray.experiment.swap(layer, "<root>", to="float32"):
            found = layer(x)
    assert torch.equal(found, layer(x))


def test_checkpointed_and_recorded_at_the_same_time(tmp_path: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Net()
    with astray.experiment.swap(model, "inner.norm", to="float64"), astray.record(tmp_path / "run", model):
        model(torch.randn(2, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    assert {row["dtype"] for row in rows(run)} == {"float32"}  # what is around it sees only what it should
    assert hooks_of(model) == 0
    assert model.inner.norm.weight.grad is not None


def test_everything_is_as_before_after_an_exception_inside_the_module() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), Watching(lambda x: x / None))
    weights = list(map(id, model.parameters()))
    with pytest.raises(TypeError), astray.experiment.swap(model, "<root>", to="float64"):
        model(torch.randn(4, 3))
    assert list(map(id, model.parameters())) == weights
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model[0].running_mean.dtype == torch.float32
    assert not torch.equal(model[0].running_mean, torch.zeros(3))  # as it would be without
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_forward_of_the_modules_own_is_put_back() -> None:
    model = nn.Linear(2, 2)
    own = lambda x: x * 5  # noqa: E731
    model.forward = own
    with astray.experiment.swap(model, "<root>", to="float64"):
        assert model(torch.ones(1, 2)).tolist() == [[5, 5]]
    assert model.forward is own


def test_a_model_copied_or_saved_meanwhile_takes_nothing_along() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    signature = inspect.signature(model[0].forward)
    with astray.experiment.swap(model, "0", to="float64"):
        assert inspect.signature(model[0].forward) == signature
        copied = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        model(torch.ones(1, 2))
    saved.seek(0)
    for other in (copied, torch.load(saved, weights_only=False)):
        assert other[0].forward.__self__ is other[0]
        assert other[0].forward.__func__ is nn.Linear.forward
        assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of dynamo, which looks at every tensor it meets
def test_what_was_compiled_before_goes_along_and_is_as_before_afterwards() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 5))
    x = torch.randn(4, 300)
    plain = model(x)
    with astray.experiment.swap(model, "0", to="float64"):
        moved = model(x)
    assert not torch.equal(moved, plain)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), plain)
    for what in ("0", "0/linear"):
        with astray.experiment.swap(model, what, to="float64"):
            assert torch.equal(compiled(x), moved)
        assert torch.equal(compiled(x), plain)


def test_two_at_once_each_on_its_own_module() -> None:
    model = nn.Sequential(Watching(lambda x: x + 1), Watching(lambda x: x + 1))
    with (
        astray.experiment.swap(model, "0", to="float64"),
        astray.experiment.swap(model, "1", to="bfloat16"),
    ):
        assert model(torch.zeros(1)).tolist() == [2]
    assert [layer.seen[0][0].dtype for layer in model] == [torch.float64, torch.bfloat16]


def test_a_module_that_nobody_called_is_said() -> None:
    model, x = build(Attending), torch.randn(2, 6)
    unused = astray.experiment.swap(model, "attn.out_proj", to="float64")
    with pytest.warns(UserWarning, match=r"attn\.out_proj was not swapped: nothing called it") as caught, unused:
        model(x)
    assert caught[0].filename == __file__
    unused = astray.experiment.swap(model, "attn/erf", to="float64")
    with pytest.warns(UserWarning, match="attn/erf was not swapped: nothing called it"), unused:
        model(x)


@pytest.mark.parametrize(
    ("what", "to", "message"),
    [
        ("0", torch.int32, r"to=torch.int32 is not a floating point dtype"),
        ("0", "flaot64", r"to='flaot64' is neither a device nor a floating point dtype nor the dotted name"),
        ("0", 3, r"to=3 is not a destination"),
        ("0", (), r"to=\(\) is not one destination"),
        ("0", ("cpu", "cuda"), r"to=\('cpu', 'cuda'\) is not one destination"),
        ("0", "eager,float64", r"is not one destination"),
        ("0.nrom", "cpu", r"No module is called 0\.nrom\. Did you mean 0\.norm"),
        ("0.nrom/softmax", "cpu", r"No module is called 0\.nrom\. Did you mean 0\.norm"),
        ("xyzzy", "cpu", r"No module is called xyzzy\. There are <root>, 0, 0\.norm"),
        ("0.(", "cpu", r"neither a name nor a regular expression"),
        ("", "cpu", r"what='' is empty"),
        ([], "cpu", r"what=\[\] names nothing"),
        (3, "cpu", r"what=3 is nothing that can be swapped"),
        ("0/softmax", "eager", r"name one of these with to='eager'"),
        ("inspect.signaturr", "cpu", r"inspect has no signaturr\. Did you mean signature\?"),
        ("inspect.Signature", "cpu", r"inspect\.Signature is a class"),
        ("inspect.CO_NESTED", "cpu", r"inspect\.CO_NESTED is of type int, and is not called"),
        ("os.fwalk", "cpu", r"os\.fwalk is a generator"),
        (torch.ops.aten.mm, "cpu", r"Name it by its site"),
    ],
)
def test_what_cannot_be_is_answered_with_what_can(what: Any, to: Any, message: str) -> None:
    model = nn.Sequential(Residual())
    with pytest.raises(UsageError, match=message), astray.experiment.swap(model, what, to=to):
        pass
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_its_former_name() -> None:
    with pytest.raises(AttributeError, match=r"no 'elsewhere' any more\. It is swap\(model, site, to='cpu'\)"):
        astray.experiment.elsewhere  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no 'swapp'\. It offers seed_all, swap, without_dropout\."):
        astray.experiment.swapp  # noqa: B018


def test_a_model_that_is_none() -> None:
    with (
        pytest.raises(UsageError, match=r"list is not a torch\.nn\.Module"),
        astray.experiment.swap([], "0", to="cpu"),
    ):
        pass
    with pytest.raises(UsageError, match="no model was given"), astray.experiment.swap(None, "head", to="cpu"):
        pass
