"""`astray.experiment.swap` of callables of the program, inside of modules or not: by their names, and themselves."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.capture.pytorch.experiments import swapped_calls
from astray.errors import UsageError
from astray.experiment import swap
from recorded_rows import rows

HERE = __name__
SOURCE = """
import functools
import math
from math import sqrt
import torch
from torch import softmax

def scaled(x, /, factor=3.0, *, bias=None):
    'Scales.'
    y = torch.softmax(x * factor, -1)
    return y if bias is None else y + bias

def counted(x):
    return scaled(x, bias=torch.ones(1))

def made():
    offset = torch.ones(1)
    def inner(x):
        return x + offset
    return inner

closed = made()
halved = functools.partial(scaled, factor=0.5)

class Base:
    def __init__(self):
        self.scale = torch.full((1,), 2.0)
        self.kinds = []

    def __call__(self, x):
        self.kinds.append((x.dtype, self.scale.dtype))
        return x * self.scale

    @staticmethod
    def stat(x):
        return x, x.dtype

    @classmethod
    def make(cls, x):
        return cls, x.dtype

class Processor(Base):
    def __call__(self, x):
        return super().__call__(x) + 1

    def other(self, x):
        return x.dtype

class Plain(Base):
    pass

processor = Processor()

def produced(x):
    yield x

async def awaited(x):
    return x
"""


@pytest.fixture
def pkg() -> Iterator[Any]:
    """A module of the program, with a second one that has imported its names."""
    module, importer = types.ModuleType("swapped_pkg"), types.ModuleType("swapped_importer")
    sys.modules.update({"swapped_pkg": module, "swapped_importer": importer, "swapped_alias": importer})
    exec(SOURCE, module.__dict__)
    exec("from swapped_pkg import scaled as rescaled, sqrt as root, softmax, Processor", importer.__dict__)
    before = dict(module.__dict__)
    yield module
    assert all(vars(module)[name] is value for name, value in before.items())
    assert not swapped_calls._filled
    for name in ("swapped_pkg", "swapped_importer", "swapped_alias"):
        del sys.modules[name]


X = torch.linspace(-3, 3, 301)[None]


def exact(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
    return torch.softmax(x.double() * factor, -1).float()


def test_a_function_by_its_name_wherever_it_was_imported_to(pkg: Any) -> None:
    plain, code, signature = pkg.scaled(X), pkg.scaled.__code__, inspect.signature(pkg.scaled)
    assert not torch.equal(plain, exact(X))
    with swap(None, "swapped_pkg.scaled", to="float64"):
        for called in (pkg.scaled, sys.modules["swapped_importer"].rescaled):
            assert torch.equal(called(X), exact(X))
        assert torch.equal(pkg.counted(X), exact(X) + 1)
        assert torch.equal(pkg.halved(X), exact(X, 0.5))
        assert (inspect.signature(pkg.scaled), pkg.scaled.__name__, pkg.scaled.__doc__) == (
            signature,
            "scaled",
            "Scales.",
        )
    assert pkg.scaled.__code__ is code
    assert "__signature__" not in vars(pkg.scaled)
    assert torch.equal(pkg.scaled(X), plain)


def test_gradients_of_a_function(pkg: Any) -> None:
    x = X.clone().requires_grad_()
    with swap(None, pkg.scaled, to="float64"):
        (pkg.scaled(x) ** 2).sum().backward()
    y = X.double().requires_grad_()
    soft = torch.softmax(y * 3.0, -1)
    soft.backward((2 * soft.float()).double())
    assert torch.equal(x.grad, y.grad.float())


@pytest.mark.parametrize("what", ["closed", "halved"])
def test_closures_and_partials(pkg: Any, what: str) -> None:
    for each in (f"swapped_pkg.{what}", vars(pkg)[what]):
        with swap(None, each, to="float64"):
            found = vars(pkg)[what](X)
        expected = (X.double() + 1).float() if what == "closed" else exact(X, 0.5)
        assert torch.equal(found, expected)


def test_a_method_of_a_class_with_the_tensors_of_its_object(pkg: Any) -> None:
    first, second = pkg.Processor(), pkg.Processor()
    scale = first.scale
    with swap(None, "swapped_pkg.Processor.__call__", to="float64"):
        result = first(X)
        second(X)
    assert first.kinds == second.kinds == [(torch.float64, torch.float64)]
    assert result.dtype == torch.float32
    assert first.scale is scale
    first(X)
    assert first.kinds[1] == (torch.float32, torch.float32)


def test_a_method_of_one_object_and_an_object_that_is_called(pkg: Any) -> None:
    single, double = (torch.float32, torch.float32), (torch.float64, torch.float64)
    for what in (lambda one: one, lambda one: one.__call__):
        one, other = pkg.Processor(), pkg.Processor()
        with swap(None, what(one), to="float64"):
            one(X), other(X)
        assert (one.kinds, other.kinds) == ([double], [single])
    one = pkg.Plain()  # whose method is inherited
    with swap(None, one, to="float64"):
        one(X), pkg.processor(X)
    assert (one.kinds, pkg.processor.kinds) == ([double], [single])


@pytest.mark.parametrize("name", ["swapped_pkg.processor", "swapped_pkg.processor.__call__"])
def test_an_object_of_a_module_by_its_name(pkg: Any, name: str) -> None:
    other = pkg.Processor()
    with swap(None, name, to="float64"):
        pkg.processor(X), other(X)
        assert type(pkg.processor) is pkg.Processor
    assert pkg.processor.kinds == [(torch.float64, torch.float64)]
    assert other.kinds == [(torch.float32, torch.float32)]


def test_an_inherited_method_of_one_class_only(pkg: Any) -> None:
    one, other = pkg.Plain(), pkg.Processor()
    with swap(None, "swapped_pkg.Plain.__call__", to="float64"):
        one(X), other(X)
    assert one.kinds == [(torch.float64, torch.float64)]
    assert other.kinds == [(torch.float32, torch.float32)]
    assert "__call__" not in vars(pkg.Plain)


def test_static_and_class_methods(pkg: Any) -> None:
    double = torch.float64
    for owner in (pkg.Base, pkg.Plain):
        name = f"swapped_pkg.{owner.__name__}"
        with swap(None, [f"{name}.stat", f"{name}.make"], to="float64"):
            assert owner.stat(X)[1] == owner().stat(X)[1] == double
            assert owner.make(X) == owner().make(X) == (owner, double)
        assert owner.stat(X) == (X, torch.float32)
        assert owner.make(X) == (owner, torch.float32)
    with swap(None, [pkg.Plain.stat, pkg.Plain.make], to="float64"):
        assert pkg.Plain.stat(X)[1] == double
        assert pkg.Plain.make(X) == (pkg.Plain, double)
    assert isinstance(vars(pkg.Base)["stat"], staticmethod)
    assert isinstance(vars(pkg.Base)["make"], classmethod)


def test_a_builtin_under_each_name_that_modules_have_for_it(pkg: Any) -> None:
    calls = []

    def root(x: float, original: Any) -> float:
        calls.append(x)
        return original(x) + 1

    for what in ("math.sqrt", math.sqrt, "swapped_pkg.sqrt"):
        calls.clear()
        with swap(None, what, to=root):
            found = [math.sqrt(4.0), pkg.sqrt(9.0), sys.modules["swapped_alias"].root(16.0)]
        assert found == [3, 4, 5]
        assert calls == [4, 9, 16]  # once each, though one module has two names
    assert math.sqrt(4.0) == 2


def test_functions_and_methods_of_torch_by_their_names() -> None:
    wide = torch.softmax(X.double(), -1).float()
    assert not torch.equal(torch.softmax(X, -1), wide)
    for what in ("torch.nn.functional.softmax", F.softmax, "torch.Tensor.softmax"):
        with swap(None, what, to="float64"):
            assert torch.equal(X.softmax(-1) if what == "torch.Tensor.softmax" else nn.Softmax(-1)(X), wide)
    with swap(None, "torch.softmax", to="float64"):
        assert torch.equal(torch.softmax(X, -1), wide)
    assert "softmax" not in vars(torch.Tensor)


def test_a_function_of_torch_is_swapped_once_however_it_is_recorded(tmp_path: Any) -> None:
    calls = []

    def counted(x: torch.Tensor, *args: Any, original: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(x.dtype)
        return original(x, *args, **kwargs)

    model = nn.Sequential(nn.Softmax(-1))
    with (
        astray.record(tmp_path / "run", model, level=["module", "function"]),
        swap(None, "torch.nn.functional.softmax", to="float64"),
        swap(None, "torch.nn.functional.softmax", to=counted),
    ):
        model(X)
    assert calls == [torch.float32]
    called = rows(astray.open(tmp_path / "run"), site="0/softmax")
    assert {row["dtype"] for row in called} == {"float32"}  # a recording sees the tensors of the program


def test_a_callable_in_its_place(pkg: Any) -> None:
    def instead(x: torch.Tensor, factor: float = 3.0, bias: Any = None) -> Any:
        return "instead", factor, bias

    def around(*args: Any, original: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs), args, kwargs

    with swap(None, pkg.scaled, to=instead):
        assert pkg.scaled(X, 4.0) == ("instead", 4.0, None)
    with swap(None, "swapped_pkg.Processor.other", to=around):
        processor = pkg.Processor()
        assert processor.other(X) == (torch.float32, (processor, X), {})
    with swap(None, "swapped_pkg.closed", to="swapped_pkg.scaled"):
        assert torch.equal(pkg.closed(X), pkg.scaled(X))


def test_a_module_in_another_way() -> None:
    def doubled(x: torch.Tensor, *, original: Any) -> torch.Tensor:
        return 2 * original(x)

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(2, 3)
    plain = model[0](x)
    with swap(model, "0", to=doubled):
        assert torch.equal(model[0](x), 2 * plain)
    with swap(model, "1", to=torch.neg):
        assert torch.equal(model(x), -plain)
    with swap(None, model[1], to=torch.neg):  # a module itself
        assert torch.equal(model(x), -plain)


def test_several_around_each_other_end_in_any_order(pkg: Any) -> None:
    def adding(number: int) -> Any:
        return lambda x, original: original(x) + number

    one, ten = swap(None, "swapped_pkg.closed", to=adding(1)), swap(None, pkg.closed, to=adding(10))
    plain = pkg.closed(X)
    one.__enter__()
    ten.__enter__()
    assert torch.equal(pkg.closed(X), plain + 1 + 10)
    one.__exit__(None, None, None)
    assert torch.equal(pkg.closed(X), plain + 10)
    ten.__exit__(None, None, None)
    assert torch.equal(pkg.closed(X), plain)


def test_everything_is_put_back_after_an_exception(pkg: Any) -> None:
    def run() -> None:
        with swap(None, [pkg.scaled, "swapped_pkg.Plain.__call__", math.sqrt], to="cpu"):
            pkg.counted(None)

    with pytest.raises(TypeError):
        run()
    refused = swap(None, [pkg.scaled, math.sqrt, "swapped_pkg.Base"], to="cpu")
    with pytest.raises(UsageError, match="is a class"), refused:
        pass  # the fixture looks whether the first two are as before


def test_what_is_swapped_is_not_held_afterwards(pkg: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    with swap(None, function, to="float64"):
        function(X)
    reference = weakref.ref(function)
    del function
    gc.collect()
    assert reference() is None


def test_functions_can_be_pickled_meanwhile(pkg: Any) -> None:
    with swap(None, "swapped_pkg.scaled", to="float64"):
        assert pickle.loads(pickle.dumps(pkg.scaled)) is pkg.scaled
        pkg.scaled(X)


def test_as_a_decorator(pkg: Any) -> None:
    @swap(None, "swapped_pkg.scaled", to="float64")
    def run() -> torch.Tensor:
        return pkg.scaled(X)

    for _ in range(2):
        assert torch.equal(run(), exact(X))
        assert not torch.equal(pkg.scaled(X), exact(X))


def test_a_callable_that_is_imported_in_the_block(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "imported_late").mkdir()
    (tmp_path / "imported_late" / "__init__.py").touch()
    (tmp_path / "imported_late" / "sampling.py").write_text("def pick(x):\n    return x.dtype\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    with swap(None, "imported_late.sampling.pick", to="float64"):
        from imported_late.sampling import pick  # type: ignore[import-not-found]

        assert pick(X) == torch.float64
    assert pick(X) == torch.float32
    assert sys.meta_path == finders
    for name in ("imported_late", "imported_late.sampling"):
        del sys.modules[name]


def test_a_call_without_a_tensor_is_said(pkg: Any) -> None:
    moved = swap(None, "math.sqrt", to="cpu")
    said = r"math\.sqrt was called without any tensor that could be moved"
    with pytest.warns(UserWarning, match=said) as caught, moved:
        math.sqrt(2.0)
    assert caught[0].filename == __file__
    cast = swap(None, "swapped_pkg.Base.stat", to="float64")  # only floating point tensors change their dtype
    with pytest.warns(UserWarning, match="without any tensor"), cast:
        assert pkg.Base.stat(torch.arange(3))[1] == torch.int64


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("swapped_pkg.Base", r"swapped_pkg\.Base is a class\. Name the method .* swapped_pkg\.Base\.__call__"),
        ("swapped_pkg.produced", r"swapped_pkg\.produced is a generator or a coroutine"),
        ("swapped_pkg.awaited", r"swapped_pkg\.awaited is a generator or a coroutine"),
        ("swapped_pkg.scalde", r"swapped_pkg has no scalde\. Did you mean scaled\?"),
        ("swapped_pkg.Base.stta", r"swapped_pkg\.Base has no stta\. Did you mean stat\?"),
        ("swapped_pkg.sqrt.x", r"swapped_pkg\.sqrt has no x"),
        ("swapped_pkgs.scaled", r"There is no callable swapped_pkgs\.scaled, and no model was given"),
        ("torch.ops.aten.mm", r"Name it by its site: 'h\.2/aten\.mm'"),
        ("datetime.datetime.now", r"datetime\.now cannot be swapped, since cannot set .* Name what calls it"),
        (functools.partial(math.sqrt), r"is not a Python function, and no module has it under a name"),
        (nn.Linear, r"torch\.nn\.modules\.linear\.Linear is a class"),
        (torch.ops.aten.mm.default, r"is an op of torch"),
    ],
)
def test_what_cannot_be_swapped(pkg: Any, what: Any, message: str) -> None:
    import datetime  # noqa: F401 - one of these names it

    torch.ops.aten.mm  # noqa: B018 - which is looked up when it is first used
    with pytest.raises(UsageError, match=message), swap(None, what, to="cpu"):
        pass


def test_destinations_that_are_not_there(pkg: Any) -> None:
    with pytest.raises(UsageError, match="There is no module nowhere"), swap(None, pkg.scaled, to="nowhere.fix"):
        pass
    with (
        pytest.raises(UsageError, match="swapped_pkg has no callable fix"),
        swap(None, pkg.scaled, to="swapped_pkg.fix"),
    ):
        pass
    with pytest.raises(UsageError, match="is not a destination"), swap(None, pkg.scaled, to=nn.Linear):
        pass
