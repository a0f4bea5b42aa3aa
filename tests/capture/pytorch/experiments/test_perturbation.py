"""`perturb`: inputs change by a rounding, and nothing else in the program does."""

from __future__ import annotations

import logging
import threading
import zlib
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import astray
from astray.capture.pytorch.experiments import perturbation
from recorded_rows import hooks_of, rows

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WORDS = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])


def changed(tensor: Tensor, seed: int = 0, step: int = 0) -> Tensor:
    return perturbation.perturbed(tensor, perturbation.key(seed, step))[0]


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


# -- one tensor ------------------------------------------------------------------------------------------------------


def drawn(bits: np.ndarray, seed: int, step: int) -> np.ndarray:
    """What `ulps` says it draws, in unsigned numbers of 32 bits."""
    with np.errstate(over="ignore"):
        mixed = bits.astype(np.uint32) ^ np.uint32(zlib.crc32(f"{seed} {step}".encode()))
        factor = np.uint32(1)
        for places in np.indices(bits.shape, dtype=np.uint32):
            factor *= np.uint32(0x9E3779B9)
            mixed += places * factor
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed ^= mixed >> np.uint32(shift)
            mixed *= np.uint32(factor)
    return ((mixed >> np.uint32(16)) % 3).astype(np.int64) - 1


@pytest.mark.parametrize("shape", [(), (7,), (40, 25), (3, 4, 5, 6)])
def test_each_element_goes_up_or_down_by_an_ulp_or_stays(shape: tuple[int, ...]) -> None:
    x = some(*shape)
    signs = drawn(x.numpy().view(np.uint32), 5, 9)
    expected = x.numpy() * (1 + signs.astype(np.float32) * np.float32(2.0**-23))
    assert np.array_equal(changed(x, 5, 9).numpy(), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_third_each_in_every_dtype(dtype: torch.dtype) -> None:
    x, eps = some(200, 300, dtype=dtype), torch.finfo(dtype).eps
    y = changed(x)
    assert y.dtype == dtype
    assert torch.all((y == x) | (y == x * (1 + eps)) | (y == x * (1 - eps)))
    for share in ((y == x), (y.abs() > x.abs()), (y.abs() < x.abs())):
        assert share.double().mean().item() == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_ones_infinities_nan_and_the_largest_numbers_stay(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, largest, -largest], dtype=dtype)
    y = changed(x.repeat(64, 1))
    assert torch.isfinite(y).sum() == 6 * 64
    kept, now = (one.contiguous().view(torch.uint8) for one in (x.repeat(64, 1)[:, :6], y[:, :6]))
    assert torch.equal(kept, now)
    assert torch.all(y[:, 6].isnan())
    assert torch.all(y[:, 7:].abs() <= largest)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.complex32])
def test_both_parts_of_a_complex_number_are_changed_apart(dtype: torch.dtype) -> None:
    x = torch.complex(some(30, 30), torch.zeros(30, 30)).to(dtype)
    y = changed(x)
    assert torch.equal(y.real, changed(x.real))
    assert not torch.equal(y.real, x.real)
    assert torch.equal(y.imag, x.imag)
    assert torch.equal(changed(x.conj()).resolve_conj().real, y.real)


def test_seed_and_step_and_place_and_value_decide() -> None:
    x = some(100)
    assert torch.equal(changed(x), changed(x.clone()))
    assert not torch.equal(changed(x), changed(x, seed=1))
    assert not torch.equal(changed(x), changed(x, step=1))
    assert not torch.equal(changed(x).flip(0), changed(x.flip(0)))
    assert len(set(changed(torch.full((50,), 0.3)).tolist())) == 3


def test_strides_do_not_matter_and_are_kept() -> None:
    x = some(6, 4, 8)
    for view in (x.transpose(0, 2), x[:, ::2], x[:1].expand(5, 4, 8)):
        assert torch.equal(changed(view), changed(view.contiguous()))
    assert changed(x.transpose(0, 2)).stride() == x.transpose(0, 2).stride()


def test_gradients_pass_as_they_are() -> None:
    x = some(50).requires_grad_()
    weight = some(50)
    (changed(x) * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)


def test_a_distributed_tensor_is_changed_by_its_parts() -> None:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = some(4, 6)
        for placement in (Shard(0), Replicate()):
            part = DTensor.from_local(local, mesh, [placement], run_check=False).requires_grad_()
            assert perturbation.why_unchanged(part) is None
            y = changed(part)
            assert isinstance(y, DTensor)
            assert y.placements == (placement,)
            assert torch.equal(y.to_local(), changed(local))  # whatever the rank
            y.to_local().sum().backward()
            assert part.grad is not None
        partial = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        assert perturbation.why_unchanged(partial) == "its parts have yet to be added up"
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_changed_says_why() -> None:
    class Own(Tensor):
        pass

    assert perturbation.why_unchanged(some(3)) is None
    assert perturbation.why_unchanged(some(3).to(torch.float8_e4m3fn)) == "float8_e4m3fn is too coarse"
    assert perturbation.why_unchanged(some(3, 3).to_sparse()) == "its layout is sparse_coo"
    assert perturbation.why_unchanged(some(3).as_subclass(Own)) == "it is a Own"
    assert perturbation.why_unchanged(torch.empty(3, device="meta")) == "it has no memory"
    seen: list[str | None] = []
    torch.func.vmap(lambda x: seen.append(perturbation.why_unchanged(x)) or x)(some(3))
    assert seen == ["it is inside a functorch transform"]


# -- what is an input ------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Held:
    value: Any
    name: str = "held"


class Watched(nn.Module):
    """Keeps its arguments, and calls a layer with the first of them."""

    def __init__(self, look: Callable[..., Tensor]) -> None:
        super().__init__()
        self.look = look
        self.layer = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return self.layer(self.look(*args, **kwargs))


NESTS: dict[str, tuple[Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]], Callable[..., Tensor]]] = {
    "by position": (lambda x: ((x,), {}), lambda x: x),
    "by name": (lambda x: ((), {"x": x}), lambda x: x),
    "in a list": (lambda x: (([3, x],), {}), lambda given: given[1]),
    "in a named tuple": (lambda x: ((Pair(None, (x,)),), {}), lambda given: given.right[0]),
    "in a dict": (lambda x: ((), {"batch": {"x": x, "n": 1}}), lambda batch: batch["x"]),
    "in a mapping": (lambda x: ((UserDict(x=x),), {}), lambda batch: batch["x"]),
    "in a dataclass": (lambda x: ((Held(x),), {}), lambda held: held.value),
    "packed": (
        lambda x: ((pack_padded_sequence(x[:, None], torch.tensor([len(x)])),), {}),
        lambda packed: packed.data,
    ),
}


@pytest.mark.parametrize("name", NESTS)
def test_what_an_outermost_module_is_given_is_changed_and_recorded_so(name: str, tmp_path: Path) -> None:
    nest, look = NESTS[name]
    x = some(3, 4)
    args, kwargs = nest(x)
    model = Watched(look)
    with astray.record(tmp_path / "run", model, perturb=3, keep="tensors"):
        model(*args, **kwargs)
    assert torch.equal(x, some(3, 4))
    seen = look(*model.seen[0][0], **model.seen[0][1])
    assert torch.equal(seen, changed(x, seed=3))
    assert not torch.equal(seen, x)
    run = astray.open(tmp_path / "run")
    stored = [row["fingerprint"] for row in rows(run, role="input") if row["dtype"] == "float32"]
    assert len(stored) == 2
    assert len(set(stored)) == 1  # of the model and of the layer in it
    recorded = run.tensor(astray.Key(0, 0, "layer", 0, "forward", "input", "0"))
    assert np.array_equal(recorded, seen.numpy())


def test_what_comes_from_inside_is_not_changed_again(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Identity(), nn.Identity()), some(3, 4)
    with astray.record(tmp_path / "run", model, perturb=True):
        y = model(x)
    assert torch.equal(y, changed(x))


def test_the_same_tensor_given_twice_stays_one_and_parameters_stay(tmp_path: Path) -> None:
    model = Watched(lambda x, *_: x)
    x, weight = some(3, 4), nn.Parameter(some(4))
    with astray.record(tmp_path / "run", model, perturb=True):
        model(x, x, WORDS, weight)
    (first, second, words, parameter), _ = model.seen[0]
    assert first is second
    assert first is not x
    assert words is WORDS
    assert parameter is weight


def test_what_a_model_writes_to_its_input_reaches_the_program(tmp_path: Path) -> None:
    def fill(cache: Tensor, x: Tensor) -> Tensor:
        cache[0] = 7.0
        return x

    model, cache = Watched(fill), some(2, 4)
    before = cache.clone()
    with astray.record(tmp_path / "run", model, perturb=True):
        model(cache, some(3, 4))
    assert torch.equal(cache[0], torch.full((4,), 7.0))
    assert torch.equal(cache[1], changed(before)[1])


class Language(nn.Module):
    """Looks up words and positions in embeddings, by modules or by functions."""

    def __init__(self, tables: bool, again: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(6, 4), nn.Embedding(4, 4)
        self.layer, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 6)
        self.tables, self.again = tables, again

    def look_up(self, words: Tensor) -> Tensor:
        places = torch.arange(4)
        if self.tables:
            return self.words(words) + self.places(places)
        return F.embedding(words, self.words.weight) + F.embedding(places, self.places.weight)

    def forward(self, words: Tensor) -> Tensor:
        if not self.again:
            return self.head(self.layer(self.look_up(words)))
        x = checkpoint(self.look_up, words, use_reentrant=False)
        return self.head(checkpoint(self.layer, x, use_reentrant=False))


def language(**choices: Any) -> Language:
    torch.manual_seed(0)
    return Language(**choices)


def trained(path: Path, model: nn.Module, **settings: Any) -> list[Tensor]:
    """The gradients of all steps."""
    found: list[Tensor] = []
    with astray.record(path, model, **settings) as rec:
        for _ in range(2):
            model.zero_grad()
            model(WORDS).square().sum().backward()
            found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            rec.step()
    return found


def values(run: Path, site: str, role: str, step: int = 0) -> np.ndarray:
    path = "0" if role == "input" else "out"
    return astray.open(run).tensor(astray.Key(step, 0, site, 0, "forward", role, path))


def test_what_a_table_makes_of_integers_is_changed_and_recorded_so(tmp_path: Path) -> None:
    model = language(tables=True)
    trained(tmp_path / "run", model, keep="tensors", perturb=2)
    for step in (0, 1):
        for site, ids in (("words", WORDS), ("places", torch.arange(4))):
            right = changed(model.get_submodule(site).weight.detach()[ids], 2, step).numpy()
            assert np.array_equal(values(tmp_path / "run", site, "output", step), right)
    first, second = (values(tmp_path / "run", "words", "output", step) for step in (0, 1))
    assert not np.array_equal(first, second)
    with torch.no_grad():
        logits = model.head(torch.tensor(values(tmp_path / "run", "head", "input")))
    assert np.array_equal(values(tmp_path / "run", "<root>", "output"), logits.numpy())  # not changed once more


def test_what_a_model_looks_up_by_itself_is_changed_where_a_module_takes_it(tmp_path: Path) -> None:
    model = language(tables=False)
    trained(tmp_path / "run", model, keep="tensors", perturb=2)
    with torch.no_grad():
        right = changed(model.look_up(WORDS), 2).numpy()
    assert np.array_equal(values(tmp_path / "run", "layer", "input"), right)
    assert np.array_equal(values(tmp_path / "run", "layer.0", "input"), right)


@pytest.mark.parametrize("tables", [True, False])
def test_a_forward_computed_again_gets_what_it_got_before(tables: bool, tmp_path: Path) -> None:
    once = trained(tmp_path / "once", language(tables=tables), perturb=True)
    again = trained(tmp_path / "again", language(tables=tables, again=True), perturb=True)
    assert len(once) == len(again) == 12
    assert all(torch.equal(left, right) for left, right in zip(once, again, strict=True))


@pytest.mark.parametrize("level", ["module", "function", "op"])
def test_the_rows_are_those_of_the_program_as_it_is(level: str, tmp_path: Path) -> None:
    kinds = []
    for name, settings in (("plain", {}), ("perturbed", {"perturb": True})):
        trained(tmp_path / name, language(tables=True), level=level, **settings)
        columns = ("step", "kind", "site", "call", "phase", "role", "path", "shape", "dtype")
        kinds.append([tuple(row[name] for name in columns) for row in rows(astray.open(tmp_path / name))])
    assert kinds[0] == kinds[1]


def test_one_seed_gives_the_same_bits_and_no_random_number_is_drawn(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        runs[name] = trained(tmp_path / name, language(tables=True), perturb=seed)
        torch.manual_seed(0)
    assert all(torch.equal(one, other) for one, other in zip(runs["a"], runs["b"], strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(runs["a"], runs["c"], strict=True))
    torch.set_rng_state(before)
    model = nn.Linear(4, 4)
    state = torch.get_rng_state()
    with astray.record(tmp_path / "d", model, perturb=True):
        model(some(3, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_steps_that_are_not_recorded_are_perturbed_too(tmp_path: Path) -> None:
    chosen = trained(tmp_path / "chosen", language(tables=True), perturb=True, steps="1")
    every = trained(tmp_path / "every", language(tables=True), perturb=True)
    assert all(torch.equal(one, other) for one, other in zip(chosen, every, strict=True))


def test_nothing_stays_and_nothing_is_there_without_it(tmp_path: Path) -> None:
    from torch.nn.modules import module as torchs

    hooks = torchs._global_forward_pre_hooks, torchs._global_forward_hooks
    model = language(tables=True)
    with astray.record(tmp_path / "plain", model):
        assert not any(hooks)
    with astray.record(tmp_path / "perturbed", model, perturb=True):
        assert all(len(one) == 1 for one in hooks)
        model(WORDS)
    assert not any(hooks)
    assert hooks_of(model) == 0


def test_threads_do_not_mix_their_calls(tmp_path: Path) -> None:
    inside, model = threading.Event(), nn.Sequential(nn.Identity(), nn.Identity())
    results: dict[str, Tensor] = {}

    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: results.update(other=model(some(5, 4))))
            thread.start()
            thread.join()
            inside.set()
            return x

    outer = Waiting()
    with astray.record(tmp_path / "run", {"outer": outer, "inner": model}, perturb=True):
        results["own"] = outer(some(3, 4))
    assert inside.is_set()
    assert torch.equal(results["own"], changed(some(3, 4)))
    assert torch.equal(results["other"], changed(some(5, 4)))


def test_after_an_exception_the_next_call_is_outermost_again(tmp_path: Path) -> None:
    model = Watched(lambda x: x if x.shape[0] == 3 else 1 / 0)
    with astray.record(tmp_path / "run", model, perturb=True):
        with pytest.raises(ZeroDivisionError):
            model(some(2, 4))
        model(some(3, 4))
    assert torch.equal(model.seen[1][0][0], changed(some(3, 4)))


# -- what the run says -----------------------------------------------------------------------------------------------


def test_the_run_says_that_it_was_perturbed(tmp_path: Path) -> None:
    for name, settings in (("plain", {}), ("perturbed", {"perturb": 7})):
        trained(tmp_path / name, language(tables=True), **settings)
    assert astray.open(tmp_path / "plain").info.perturbed is None
    assert astray.open(tmp_path / "perturbed").info.perturbed == 7


def test_where_nothing_could_be_changed_it_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Counts(nn.Module):
        def forward(self, words: Tensor) -> Tensor:
            return words + 1

    said = "no call was given floating-point tensors that could be changed, or made them of integers"
    for name, model, given in (("integers", Counts(), WORDS), ("ones", nn.Identity(), torch.ones(3))):
        caplog.clear()
        with caplog.at_level(logging.WARNING), astray.record(tmp_path / name, model, perturb=True):
            model(given)
        assert [record.getMessage() for record in caplog.records] == [
            f"astray perturbed nothing: {said}. As --noise this run shows no more than a second recording of the same."
        ]
        end = astray.open(tmp_path / name).ranks[0].end
        assert end is not None
        assert [(missed.what, missed.why) for missed in end.missed] == [("any perturbation", said)]


def test_what_was_left_alone_is_listed(tmp_path: Path) -> None:
    model = Watched(lambda x, _: x)
    with astray.record(tmp_path / "run", model, perturb=True):
        model(some(3, 4), some(3, 4).to_sparse())
    end = astray.open(tmp_path / "run").ranks[0].end
    assert end is not None
    assert ("the perturbation of an input", "its layout is sparse_coo") in [(one.what, one.why) for one in end.missed]


def test_a_failure_of_ours_is_noted_and_the_program_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(perturbation, "perturbed", fail)
    model, x = nn.Identity(), some(3)
    with astray.record(tmp_path / "run", model, perturb=True):
        assert model(x) is x
    end = astray.open(tmp_path / "run").ranks[0].end
    assert end is not None
    assert end.missed[0].what == "the perturbation of what Identity is given"
    assert end.missed[0].why == "RuntimeError: not today"
