"""Classes of tensors: gradients keep their types and bits in a recording, and the classes get the same calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.masked import masked_tensor
from torch.utils import _pytree as pytree

import astray
from astray.capture.pytorch.calls.sites import is_overriding

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of MaskedTensors", "ignore:It is not recommended to create a MaskedTensor"
)

LEVELS = ["module", "function", "op", ("module", "function", "op")]
told: list[str] = []
"""The calls for which the `__torch_function__` of tensor classes ran."""


class Named(torch.Tensor):
    """A subclass without changes."""


class Told(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told.append(str(getattr(func, "__name__", func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Leaving(torch.Tensor):
    """Results are plain tensors, as those of torchvision's images."""

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told.append(str(getattr(func, "__name__", func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Wrapping(torch.Tensor):
    """Wraps another tensor, which has the numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told.append(f"{func} {torch._C._is_torch_function_enabled()}")
        args, kwargs = pytree.tree_map_only(Wrapping, lambda one: one.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


class Quantised(torch.Tensor):
    """Eight bits and a scale, as torchao has them: made whole again where it is used."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    bits: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, bits: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(cls, bits.size(), dtype=scale.dtype, device=bits.device)
        made.bits, made.scale = bits, scale
        return made  # type: ignore[no-any-return]

    @classmethod
    def of(cls, whole: torch.Tensor) -> Quantised:
        scale = whole.detach().abs().max() / 127
        return cls((whole.detach() / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told.append(str(func))
        if func is torch.ops.aten.detach.default:
            return cls(args[0].bits, args[0].scale)
        args, kwargs = pytree.tree_map_only(Quantised, lambda one: one.bits * one.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


class OwnParameter(nn.Parameter):
    pass


class Model(nn.Module):
    """Uses its input before and after a layer, so that the backward pass meets it again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 4))
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x * self.scale)) * x


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


def parameters_of(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], tuple[nn.Module, torch.Tensor]]:
    def build() -> tuple[nn.Module, torch.Tensor]:
        model = Model()
        model.layer.weight = make(model.layer.weight.detach())  # type: ignore[assignment]
        return model, batch().requires_grad_()

    return build


def input_of(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], tuple[nn.Module, torch.Tensor]]:
    return lambda: (Model(), make(batch()))


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "named": input_of(lambda x: x.as_subclass(Named)),
    "named, with a gradient": input_of(lambda x: x.as_subclass(Named).requires_grad_()),
    "told": input_of(lambda x: x.as_subclass(Told)),
    "told, with a gradient": input_of(lambda x: x.as_subclass(Told).requires_grad_()),
    "leaving": input_of(lambda x: x.as_subclass(Leaving)),
    "leaving, with a gradient": input_of(lambda x: x.as_subclass(Leaving).requires_grad_()),
    "wrapping": input_of(Wrapping),
    "wrapping, with a gradient": input_of(lambda x: Wrapping(x).requires_grad_()),
    "parameter of a class": parameters_of(OwnParameter),
    "parameter of named": parameters_of(lambda x: nn.Parameter(x.as_subclass(Named))),
    "quantised": parameters_of(lambda x: nn.Parameter(Quantised.of(x), requires_grad=False)),
}


def numbers(tensor: Any) -> Any:
    """The bits, whatever holds them."""
    if isinstance(tensor, Wrapping):
        return numbers(tensor.inner)
    if hasattr(tensor, "to_local"):
        return numbers(tensor.to_local())
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor).view(-1).tolist()


def seen(tensor: Any) -> Any:
    return None if tensor is None else (type(tensor).__name__, numbers(tensor), tensor.requires_grad)


def plain_loss(result: torch.Tensor) -> torch.Tensor:
    """Of a class that has no say in what its backward does."""
    whole = result.to_local() if hasattr(result, "to_local") else result
    while isinstance(whole, Wrapping):
        return whole.square().sum()
    return whole.as_subclass(torch.Tensor).square().sum()


def train(build: Callable[[], tuple[nn.Module, torch.Tensor]], started: Callable[[nn.Module], Any]) -> list[Any]:
    """The types and bits of all tensors of a program, and the calls that its tensor classes have seen."""
    model, x = build()
    told.clear()
    found: list[Any] = []
    with started(model) as watching:
        for _ in range(2):
            result = model(x)
            loss = plain_loss(result)
            found += [seen(result), seen(loss)]
            leaves = [one for one in (x, *model.parameters()) if one.requires_grad]
            calls = len(told)
            arrived: list[Any] = []
            handles = [leaf.register_hook(arrived.append) for leaf in leaves]  # type: ignore[no-untyped-call]
            gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
            loss.backward()  # type: ignore[no-untyped-call]
            found.append(told[calls:])
            for handle in handles:
                handle.remove()
            found += [seen(one) for one in (*gradients, *arrived, *(leaf.grad for leaf in leaves))]
            if watching is not None:
                watching.step()
    return [*found, list(told)]


def bare(_model: nn.Module) -> Any:
    return contextlib.nullcontext()


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_recording_changes_no_type_no_bit_and_no_call(tmp_path: Path, case: str, level: Any) -> None:
    def recorded(model: nn.Module) -> Any:
        return astray.record(tmp_path / "run", model, level=level, optimizer="gradient")

    assert train(CASES[case], recorded) == train(CASES[case], bare)
    assert len(astray.open(tmp_path / "run").ranks[0].tensors)


@pytest.mark.parametrize("case", CASES)
def test_a_guard_changes_no_type_no_bit_and_no_call(tmp_path: Path, case: str) -> None:
    def guarded(model: nn.Module) -> Any:
        return astray.guard(model, on="warn", level=("function", "op"), path=tmp_path / "found")

    assert train(CASES[case], guarded) == train(CASES[case], bare)


def test_steps_that_are_not_recorded_are_as_without_a_recording(tmp_path: Path) -> None:
    def recorded(model: nn.Module) -> Any:
        return astray.record(tmp_path / "run", model, level="op", steps="7")

    assert train(CASES["told"], recorded) == train(CASES["told"], bare)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_distributed_tensors_stay_what_they_are(tmp_path: Path, mesh: Any, level: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    def build() -> tuple[nn.Module, torch.Tensor]:
        model = distribute_module(Model(), mesh)
        model.layer.weight = nn.Parameter(
            distribute_tensor(model.layer.weight.full_tensor().detach(), mesh, [Shard(0)])
        )
        return model, distribute_tensor(batch(), mesh, [Replicate()])

    def recorded(model: nn.Module) -> Any:
        return astray.record(tmp_path / "run", model, level=level)

    assert train(build, recorded) == train(build, bare)


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_masked_tensors_stay_what_they_are(tmp_path: Path, level: Any) -> None:
    def train_masked(started: Callable[[nn.Module], Any]) -> list[Any]:
        model = Model()
        with started(model) as watching:
            masked = masked_tensor(batch(), batch() > 0, requires_grad=True)
            result = model(batch()) + 0
            product = (masked * masked).sum()
            product.backward()
            result.sum().backward()
            if watching is not None:
                watching.step()
        gradient = masked.grad
        found = [type(gradient), gradient.get_data().tolist(), gradient.get_mask().tolist(), type(product)]
        return found + [seen(one.grad) for one in model.parameters()]

    def recorded(model: nn.Module) -> Any:
        return astray.record(tmp_path / "run", model, level=level)

    assert repr(train_masked(recorded)) == repr(train_masked(bare))


def test_which_classes_are_told_of_calls() -> None:
    kinds = [torch.Tensor, nn.Parameter, OwnParameter, Quantised, Named, Told, Leaving, int, torch.dtype]
    assert [kind for kind in kinds if is_overriding(kind)] == [Named, Told, Leaving]
