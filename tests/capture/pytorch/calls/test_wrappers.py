"""Sites keep their names behind wrappers, and follow a model that changes while it is recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import astray
from astray.capture.pytorch.calls.wrappers import chains, is_compiled, type_name
from astray.store import RunData
from recorded_rows import hooks_of, outline, rows
from small_models import Residual, build, same_bits, train

TORCHS_OWN = "ignore:The .grad attribute of a Tensor that is not a leaf"
"""What torch.compile itself makes torch warn of, with and without astray."""


class Stack(nn.Module):
    """Layers in a list, which is never called itself, and a child with the name that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.module = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.module(x)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one process."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def data_parallel(model: nn.Module) -> nn.Module:
    wrapper = DataParallel(model, device_ids=[0])
    wrapper.device_ids, wrapper.module = [], model.cpu()  # one that has a device to itself would use it
    return wrapper


def fsdp(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def around_a_layer(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def put(model: Any) -> nn.Module:
        model.layers[1] = wrap(model.layers[1])
        return model

    put.__name__ = f"{wrap.__name__} around a layer"
    return put


def nested(*wraps: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def put(model: nn.Module) -> nn.Module:
        for wrap in wraps:
            model = wrap(model)
        return model

    put.__name__ = " in ".join(wrap.__name__ for wrap in wraps)
    return put


EAGER = [
    DistributedDataParallel,
    data_parallel,
    AveragedModel,
    checkpoint_wrapper,
    around_a_layer(checkpoint_wrapper),
    around_a_layer(DistributedDataParallel),
    nested(around_a_layer(checkpoint_wrapper), checkpoint_wrapper, DistributedDataParallel, data_parallel),
]
COMPILED = [
    compiled,
    nested(compiled, DistributedDataParallel),
    nested(DistributedDataParallel, compiled),
    nested(checkpoint_wrapper, compiled, AveragedModel),
]


def recorded(path: Path, model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor] | None = None) -> RunData:
    """One step; the input is always the same."""
    hooks = hooks_of(model)
    with astray.record(path, model, keep="fingerprint"):
        (call or model)(torch.linspace(-1, 1, 18).view(3, 6)).square().sum().backward()
    assert hooks_of(model) == hooks
    return astray.open(path)


def seen(run: RunData) -> set[tuple[Any, ...]]:
    """What was recorded, with the bits of it, apart from what checkpointing did again."""
    names = ("site", "type", "call", "micro", "kind", "phase", "role", "path", "fingerprint")
    return {tuple(row[name] for name in names) for row in rows(run, recompute=False)}


@pytest.mark.parametrize("wrap", EAGER, ids=lambda wrap: wrap.__name__)
@pytest.mark.usefixtures("alone")
def test_a_wrapped_model_is_recorded_as_the_bare_one(wrap: Callable[[Any], nn.Module], tmp_path: Path) -> None:
    bare = recorded(tmp_path / "bare", build(Stack))
    run = recorded(tmp_path / "wrapped", wrap(build(Stack)))
    assert seen(run) == seen(bare)
    assert run.ranks[0].end.missed == []


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*NO_SHARD")
@pytest.mark.usefixtures("alone")
def test_flat_parameters_of_fsdp_are_recorded_and_their_gradients_said_to_be_missed(tmp_path: Path) -> None:
    bare = recorded(tmp_path / "bare", build(Stack))
    run = recorded(tmp_path / "wrapped", nested(around_a_layer(fsdp), fsdp)(build(Stack)))
    assert seen(run) == {row for row in seen(bare) if row[6] != "gradient"}
    names = [missed.what for missed in run.ranks[0].end.missed]
    assert names == [f"the gradients of the parameters in {name}" for name in ("<root>", "layers.1")]


@pytest.mark.filterwarnings(TORCHS_OWN)
@pytest.mark.parametrize("wrap", COMPILED, ids=lambda wrap: wrap.__name__)
@pytest.mark.usefixtures("alone")
def test_a_compiled_wrapper_is_one_call_of_the_module_in_it(wrap: Callable[[Any], nn.Module], tmp_path: Path) -> None:
    bare = recorded(tmp_path / "bare", build(Stack))
    run = recorded(tmp_path / "wrapped", wrap(build(Stack)))
    boundary = {row for row in seen(bare) if row[0] == "<root>" or row[4] == "parameter"}
    assert {row for row in seen(run) if row[6] not in ("parameter", "state")} == boundary
    names = [row["path"] for row in rows(run, site="<root>", role="parameter")]
    assert names == [name for name, _ in build(Stack).named_parameters()]


@pytest.mark.usefixtures("alone")
def test_fsdp_and_parametrizations_put_other_classes_in_place_and_types_stay(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = build(Stack)
    nn.utils.parametrizations.weight_norm(model.layers[0].inner)
    fully_shard(model.layers[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    run = recorded(tmp_path / "run", model)
    types = {row["site"]: row["type"] for row in rows(run, kind="module")}
    assert {name: types[name] for name in ("<root>", "layers.1", "layers.0.inner", "module")} == {
        "<root>": "Stack",
        "layers.1": "Residual",
        "layers.0.inner": "Linear",
        "module": "Linear",
    }


def test_a_lazy_layer_has_the_type_that_it_becomes() -> None:
    assert [type_name(layer) for layer in (nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(1, 1))] == [
        "Linear",
        "BatchNorm1d",
        "Linear",
    ]


def test_a_users_class_that_only_looks_like_torchs_keeps_its_name() -> None:
    class FSDPLinear(nn.Linear):
        pass

    assert type_name(FSDPLinear(1, 1)) == "FSDPLinear"


def test_torch_compiler_disable_is_not_a_compiled_wrapper() -> None:
    model: Any = torch.compiler.disable(nn.Linear(2, 2))
    (chain,) = chains(model)
    assert not is_compiled(model)
    assert chain.recorder is chain.inner


@pytest.mark.filterwarnings(TORCHS_OWN)
def test_a_module_and_its_compiled_twin_are_one_site(tmp_path: Path) -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Residual()
            self.fast = compiled(self.layer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fast(self.layer(x))

    run = recorded(tmp_path / "run", Twins())
    outputs = [(row["site"], row["call"]) for row in rows(run, phase="forward", role="output")]
    assert outputs == [("layer.norm", 0), ("layer.inner", 0), ("layer", 0), ("layer", 1), ("<root>", 0)]


def test_a_compiled_model_called_past_its_wrapper_is_recorded_in_full(tmp_path: Path) -> None:
    model = compiled(build(Stack))
    run = recorded(tmp_path / "run", model, model._orig_mod)
    assert seen(run) >= seen(recorded(tmp_path / "bare", build(Stack)))


def test_one_call_each_where_compiling_falls_back(tmp_path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):
        run = recorded(tmp_path / "run", compiled(build(Stack)))
    assert seen(run) >= seen(recorded(tmp_path / "bare", build(Stack)))
    assert len(rows(run, site="<root>", phase="forward", role="output")) == 1
    assert run.ranks[0].end.missed == []


def test_a_module_that_calls_itself_behind_a_wrapper_is_called_each_time(tmp_path: Path) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self(x + 1, depth - 1) if depth else x

    model = compiled(Recursive())
    with torch.compiler.set_stance("force_eager"), astray.record(tmp_path / "run", model):
        model(torch.zeros(1))
    run = astray.open(tmp_path / "run")
    assert [row["max"] for row in rows(run, role="input")] == [0, 1, 2]
    assert [row["call"] for row in rows(run, role="output")] == [2, 1, 0]


# -- models that change ------------------------------------------------------------------------------------------


def sites(run: RunData, step: int) -> set[str]:
    return {row["site"] for row in rows(run, step=step, kind="module")}


def test_a_layer_added_to_a_list_is_recorded_from_the_next_call_on(tmp_path: Path) -> None:
    model = build(Stack)
    with astray.record(tmp_path / "run", model) as rec:
        model(torch.ones(1, 6))
        rec.step()
        model.layers.append(Residual())
        model(torch.ones(1, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    assert sites(run, 1) - sites(run, 0) == {"layers.2", "layers.2.norm", "layers.2.inner"}
    assert {"layers.2.inner.weight", "layers.2.inner.bias"} <= {row["site"] for row in rows(run, role="gradient")}
    assert hooks_of(model) == 0


def test_a_layer_made_in_the_first_forward_is_recorded_in_the_second(tmp_path: Path) -> None:
    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(6, 6)
            return self.layer(x)

    model = Late()
    with astray.record(tmp_path / "run", model) as rec:
        for _ in range(2):
            model(torch.ones(1, 6)).sum().backward()
            rec.step()
    run = astray.open(tmp_path / "run")
    assert [sites(run, 0), sites(run, 1)] == [{"<root>"}, {"<root>", "layer"}]
    assert {row["step"] for row in rows(run, site="layer.weight", role="gradient")} == {1}


def test_a_replaced_layer_takes_over_the_name_and_the_old_one_is_let_go(tmp_path: Path) -> None:
    model = build(Stack)
    old = model.module
    with astray.record(tmp_path / "run", model) as rec:
        model(torch.ones(1, 6)).sum().backward()
        rec.step()
        model.module = nn.Sequential(nn.Linear(6, 6))
        model(torch.ones(1, 6)).sum().backward()
        assert hooks_of(old) == 0
        assert not old.weight._backward_hooks
        old(torch.ones(1, 6))
    run = astray.open(tmp_path / "run")
    types = {(row["step"], row["site"]): row["type"] for row in rows(run, kind="module")}
    assert (types[0, "module"], types[1, "module"], types[1, "module.0"]) == ("Linear", "Sequential", "Linear")
    assert [row["site"] for row in rows(run, step=1, kind="module", role="output", phase="forward")][-3:] == [
        "module.0",
        "module",
        "<root>",
    ]
    assert "module.0.weight" in {row["site"] for row in rows(run, step=1, role="gradient")}


def test_a_layer_replaced_between_two_calls_of_a_step_is_counted_on(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.block(x)
            self.block[0] = nn.Linear(2, 2)
            return self.block(x)

    with astray.record(tmp_path / "run", Twice()) as rec:
        rec._adapter._models[""](torch.ones(1, 2))
    outputs = rows(astray.open(tmp_path / "run"), site="block.0", role="output")
    assert [row["call"] for row in outputs] == [0, 1]


def test_a_layer_wrapped_in_another_moves_to_its_new_name(tmp_path: Path) -> None:
    class Adapted(nn.Module):
        """A low-rank change of a layer that stays as it is."""

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(6, 1, bias=False), nn.Linear(1, 6, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    model = build(Stack)
    with astray.record(tmp_path / "run", model) as rec:
        model(torch.ones(1, 6)).sum().backward()
        rec.step()
        for layer in model.layers:
            layer._modules["inner"] = Adapted(layer.inner)  # as libraries do it, past `__setattr__`
        model(torch.ones(1, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    inside = {name for name in sites(run, 1) if name.startswith("layers.0.inner")}
    assert inside == {f"layers.0.inner{rest}" for rest in ("", ".base", ".down", ".up")}
    gradients = {row["site"] for row in rows(run, step=1, role="gradient") if row["site"].startswith("layers.0.inner")}
    assert gradients == {"layers.0.inner.down.weight", "layers.0.inner.up.weight"}


@pytest.mark.filterwarnings(TORCHS_OWN)
def test_a_layer_compiled_while_recording_stays_one_site(tmp_path: Path) -> None:
    model = build(Stack)
    with astray.record(tmp_path / "run", model) as rec:
        for step in range(3):
            model(torch.ones(1, 6)).sum().backward()
            rec.step()
            if step == 0:
                model.layers[1] = compiled(model.layers[1])
    run = astray.open(tmp_path / "run")
    calls = [[row["site"] for row in rows(run, step=s, role="output", phase="forward")] for s in range(3)]
    inside = ["layers.1.norm", "layers.1.inner"]
    assert calls[1] == calls[2] == [name for name in calls[0] if name not in inside]
    assert {missed.what for missed in run.ranks[0].end.missed} == {"calls inside layers.1"}


def test_a_parameter_tied_to_a_layer_that_leaves_is_watched_on(tmp_path: Path) -> None:
    model = build(Stack)
    model.layers[1].inner.weight = model.module.weight
    with astray.record(tmp_path / "run", model) as rec:
        model(torch.ones(1, 6)).sum().backward()
        rec.step()
        model.layers[1] = nn.Identity()
        model(torch.ones(1, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    named = [{row["site"] for row in rows(run, step=s, role="gradient")} for s in range(2)]
    assert "layers.1.inner.weight" in named[0]
    assert "module.weight" not in named[0]
    assert "module.weight" in named[1]


def test_changing_models_train_to_the_same_bits(tmp_path: Path) -> None:
    def changing(model: Any, rec: Any = None) -> dict[str, Any]:
        results = []
        for step in range(3):
            results.append(train(model, steps=1, after_step=rec.step if rec else None))
            model.layers.append(build(Residual, seed=step))
            model.layers[0].inner = build(lambda: nn.Linear(6, 6), seed=step)
        return {"results": results}

    bare = changing(build(Stack))
    model = build(Stack)
    with astray.record(tmp_path / "run", model) as rec:
        watched = changing(model, rec)
    assert same_bits(bare, watched)
    assert hooks_of(model) == 0


def test_recording_keeps_no_module_alive(tmp_path: Path) -> None:
    model = build(Stack)
    gc.collect()
    gc.disable()  # a module must go by itself, with no circle for the collector to find
    try:
        with astray.record(tmp_path / "run", model):
            model(torch.ones(1, 6))
            gone = weakref.ref(model.layers[1])
            del model.layers[1]
            model(torch.ones(1, 6))
            assert gone() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torch_jit_script_is_told_what_to_do(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model), pytest.raises(AttributeError, match="Script the model before"):
        torch.jit.script(model)
    missed = [missed.what for missed in astray.open(tmp_path / "run").ranks[0].end.missed]
    assert "torch.jit.script of <root>" in missed


def test_outlines_with_and_without_a_wrapper_are_in_the_same_order(tmp_path: Path) -> None:
    runs = [recorded(tmp_path / str(i), model) for i, model in enumerate((build(Stack), AveragedModel(build(Stack))))]
    assert outline(runs[0]) == outline(runs[1])
