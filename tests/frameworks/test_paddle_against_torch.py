"""One program in PyTorch and in Paddle, from the same weights: it agrees, and a fault on one side is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

import torch  # noqa: E402

import astray  # noqa: E402
from astray.cli import main  # noqa: E402
from frameworks import paddle_twins, torch_twins  # noqa: E402

pytestmark = pytest.mark.paddle

STEPS = 3
OPTIMIZER = ["gradient", "weight", "state", "update"]


class Program(NamedTuple):
    """A model in both frameworks, what it is given, and its optimizers. limit: of the norm to which torch clips."""

    torch_model: Callable[[], Any]
    paddle_model: Callable[[], Any]
    batches: list[tuple[Any, Any]]
    torch_optimizer: Callable[[Any], Any]
    paddle_optimizer: Callable[[Any], Any]
    limit: float | None = None


def transformer(decoupled: bool = True) -> Program:
    random = np.random.default_rng(0)
    ids = [random.integers(0, 13, (4, 6)) for _ in range(STEPS)]
    ours, theirs = (torch.optim.AdamW, "AdamW") if decoupled else (torch.optim.Adam, "Adam")
    return Program(
        torch_twins.Transformer,
        paddle_twins.Transformer,
        [(one, np.roll(one, -1, 1)) for one in ids],
        lambda model: ours(model.parameters(), 1e-3, betas=(0.9, 0.99)),
        lambda model: getattr(paddle.optimizer, theirs)(1e-3, beta2=0.99, parameters=model.parameters()),
    )


def convnet(seed: int = 1) -> Program:
    random = np.random.default_rng(seed)
    batches = [(random.normal(size=(4, 3, 10, 10)).astype(np.float32), random.integers(0, 5, 4)) for _ in range(STEPS)]
    return Program(
        torch_twins.ConvNet,
        paddle_twins.ConvNet,
        batches,
        lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        lambda model: paddle.optimizer.Momentum(0.05, 0.9, parameters=model.parameters()),
    )


def run_torch(path: Path, program: Program, model: Any, **settings: Any) -> None:
    optimizer = program.torch_optimizer(model)
    with astray.record(path, model, optimizer=OPTIMIZER, **settings) as rec:
        for given, wanted in program.batches:
            optimizer.zero_grad()
            made = model(torch.tensor(given))
            loss = torch.nn.functional.cross_entropy(made.flatten(0, -2), torch.tensor(wanted).flatten())
            loss.backward()
            if program.limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), program.limit)
            optimizer.step()
            rec.step()


def run_paddle(path: Path, program: Program, model: Any, **settings: Any) -> None:
    optimizer = program.paddle_optimizer(model)
    with astray.record(path, model, optimizer=OPTIMIZER, **settings) as rec:
        for given, wanted in program.batches:
            made = model(paddle.to_tensor(given))
            made = made.flatten(0, -2) if made.ndim > 2 else made
            paddle.nn.functional.cross_entropy(made, paddle.to_tensor(wanted).flatten()).backward()
            optimizer.step()
            optimizer.clear_grad()
            rec.step()


def compared(
    folder: Path, program: Program, fault: Callable[[Any], None] = lambda _: None, seed: int = 0, **settings: Any
) -> Any:
    """Both programs from the same weights, the Paddle side with a fault, mapped by the draft for these two runs."""
    torch.manual_seed(seed)
    model, layer = program.torch_model(), program.paddle_model()
    astray.load_from(model, layer)
    fault(layer)
    run_torch(folder / "torch", program, model, **settings)
    run_paddle(folder / "paddle", program, layer, **settings)
    paths = [str(folder / name) for name in ("torch", "paddle", "map.yaml")]
    assert main(["map", *paths[:2], "-o", paths[2]]) == 0
    return astray.compare(*paths[:2], mapping=paths[2])


@pytest.mark.parametrize("keep", ["stats", "tensors"])
@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize("program", [transformer, convnet], ids=["transformer", "convnet"])
def test_the_same_program_agrees(tmp_path: Path, program: Callable[[], Program], level: str, keep: str) -> None:
    levels = ["module", "function"] if level == "function" else "module"
    diff = compared(tmp_path, program(), level=levels, keep=["stats", "fingerprint", keep])
    assert diff.first is None, str(diff)
    assert diff.same, _missing(diff)
    assert diff.setup == ()
    assert diff.exit_code == 0
    sites = {*diff.pairs.coded("site").values}
    assert {"h.1.attn.proj.weight", "fc.weight"} & sites, "what optimizers do was compared"


@pytest.mark.parametrize("seed", [2, 5])
def test_biases_before_a_normalisation_agree(tmp_path: Path, seed: int) -> None:
    """Their gradients are nothing but rounding, by which one side moves an element that the other does not."""
    diff = compared(tmp_path, convnet(100 + seed), seed=seed)
    assert diff.same, str(diff)


def _missing(diff: Any) -> str:
    """What has no counterpart, for a test that fails."""
    pairs = diff.pairs
    return "\n".join(
        str([pairs[name][row] for name in ("verdict", "step", "phase", "site", "role", "path")])
        for row in np.flatnonzero(diff.missing).tolist()
    )


@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize("fused", ["both", "torch", "paddle"])
def test_attention_of_one_function_agrees(tmp_path: Path, level: str, fused: str) -> None:
    """On one side or on both, where heads and positions are the other way round."""

    def of(twins: Any, is_fused: bool) -> Callable[[], Any]:
        def made() -> Any:
            model = twins.Transformer()
            for block in model.h if is_fused else ():
                block.attn.__class__ = twins.FusedAttention
            return model

        return made

    program = transformer()._replace(
        torch_model=of(torch_twins, fused != "paddle"), paddle_model=of(paddle_twins, fused != "torch")
    )
    diff = compared(tmp_path, program, level=["module", "function"] if level == "function" else "module")
    assert diff.first is None, str(diff)
    if (fused, level) == ("paddle", "function"):  # it scales the queries, and what is written out the scores
        assert "differ inside calls whose results agree" in " ".join(str(diff).split())
    else:
        assert diff.same, _missing(diff)


def test_adam_without_decoupled_decay_agrees(tmp_path: Path) -> None:
    diff = compared(tmp_path, transformer(decoupled=False))
    assert diff.same, str(diff)


@pytest.mark.parametrize("limit", [0.3, 0.2])
def test_clipped_before_the_step_and_in_it(tmp_path: Path, limit: float) -> None:
    """torch clips before the step, Paddle in it; the gradient that the formula is given is recorded of both."""
    clip = paddle.nn.ClipGradByGlobalNorm(limit)
    program = transformer()._replace(
        limit=0.3,
        paddle_optimizer=lambda model: paddle.optimizer.AdamW(
            1e-3, beta2=0.99, parameters=model.parameters(), grad_clip=clip
        ),
    )
    diff = compared(tmp_path, program)
    if limit == program.limit:
        assert diff.same, str(diff)
    else:
        [setting] = diff.setup
        assert (diff.first.step, diff.first.phase, diff.first.settings) == (0, "update", (setting,))
        assert "are clipped to a norm of 0.3 in the reference and clipped to a norm of 0.2" in str(setting)


@pytest.mark.parametrize("level", ["module", "function"])
def test_a_model_with_other_names_agrees(tmp_path: Path, level: str) -> None:
    """Its first draft is made of other weights; with it the same weights are loaded, and it is compared."""
    program = transformer()._replace(paddle_model=paddle_twins.Renamed)
    levels = ["module", "function"] if level == "function" else "module"
    settings = {"level": levels, "keep": ["stats", "fingerprint", "tensors"]}
    torch.manual_seed(0)
    model, layer = program.torch_model(), program.paddle_model()
    run_torch(tmp_path / "torch", program, model, **settings)
    run_paddle(tmp_path / "first", program, layer, **settings)
    file = str(tmp_path / "map.yaml")
    assert main(["map", str(tmp_path / "torch"), str(tmp_path / "first"), "-o", file]) == 0
    layer = program.paddle_model()
    loaded = astray.load_from(tmp_path / "torch", layer, map=file)
    assert loaded.names["decoder.layers.1.feed_forward.0.weight"] == "h.1.up.weight"
    run_paddle(tmp_path / "paddle", program, layer, **settings)
    diff = astray.compare(tmp_path / "torch", tmp_path / "paddle", mapping=file)
    assert diff.first is None, str(diff)
    assert diff.same, _missing(diff)


# -- faults on the Paddle side -----------------------------------------------------------------------------------------


def test_an_epsilon_is_named(tmp_path: Path) -> None:
    def fault(layer: Any) -> None:
        layer.h[1].ln2._epsilon = 1e-3

    diff = compared(tmp_path, transformer(), fault)
    assert (diff.first.site, diff.first.step, diff.first.phase) == ("h.1.ln2", 0, "forward")
    [setting] = diff.setup
    assert str(setting) == "h.1.ln2 (LayerNorm) has eps 1e-05 in the reference and 0.001 in the candidate."
    assert diff.first.settings == (setting,)


def test_an_epsilon_of_a_normalisation_is_named(tmp_path: Path) -> None:
    def fault(layer: Any) -> None:
        layer.bn2._epsilon = 1e-2

    diff = compared(tmp_path, convnet(), fault)
    assert (diff.first.site, diff.first.step) == ("bn2", 0)
    assert str(diff.setup[0]) == "bn2 (BatchNorm2d) has eps 1e-05 in the reference and 0.01 in the candidate."


@pytest.mark.parametrize("level", ["module", "function"])
def test_the_scale_of_attention_is_named(tmp_path: Path, level: str) -> None:
    def fault(layer: Any) -> None:
        layer.h[0].attn._factor = [16**-0.5]  # of the width, and not of a head

    diff = compared(tmp_path, transformer(), fault, level=["module", "function"] if level == "function" else "module")
    assert diff.first.step == 0
    assert diff.first.phase == "forward"
    if level == "module":  # its code between the modules
        assert diff.first.site == "h.0.attn"
    else:
        assert diff.first.site.partition("/")[0] == "h.0.attn"
        assert diff.first.site.partition("/")[2] in ("mul", "scale", "softmax", "add")


@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_a_weight_that_is_scaled_is_named(tmp_path: Path, keep: str) -> None:
    def fault(layer: Any) -> None:
        weight = layer.h[1].up.weight
        weight.set_value(weight * 1.001)

    diff = compared(tmp_path, transformer(), fault, keep=["stats", "fingerprint", keep])
    assert (diff.first.site, diff.first.cause, diff.first.parameter.path) == ("h.1.up", "parameter", "weight")
    assert diff.first.parameter.error == pytest.approx(1e-3, rel=0.1)


def test_a_weight_that_was_not_transposed_is_named(tmp_path: Path) -> None:
    """A square one, so that nothing fails."""

    def fault(layer: Any) -> None:
        weight = layer.h[0].attn.v.weight
        weight.set_value(weight.T.clone())

    diff = compared(tmp_path, transformer(), fault, keep=["stats", "fingerprint", "tensors"])
    assert (diff.first.site, diff.first.cause, diff.first.parameter.path) == ("h.0.attn.v", "parameter", "weight")
    assert any("loaded without being transposed" in problem for problem in diff.problems)
    assert "was it loaded as it is?" in (tmp_path / "map.yaml").read_text()


def test_a_weight_that_was_not_transposed_is_suspected_by_its_bits(tmp_path: Path) -> None:
    """Statistics do not show the order of elements: the call with that weight is the first that is wrong."""

    def fault(layer: Any) -> None:
        weight = layer.h[0].attn.v.weight
        weight.set_value(weight.T.clone())

    diff = compared(tmp_path, transformer(), fault)
    assert diff.first.site == "h.0.attn.v"
    assert any("has the reference's own bits, though the mapping" in sentence for sentence in diff.first.evidence)


def test_labels_in_another_order_are_named(tmp_path: Path) -> None:
    program = convnet()
    batches = [(given, np.roll(wanted, 1)) for given, wanted in program.batches]
    torch.manual_seed(0)
    model, layer = program.torch_model(), program.paddle_model()
    astray.load_from(model, layer)
    run_torch(tmp_path / "torch", program, model)
    run_paddle(tmp_path / "paddle", program._replace(batches=batches), layer)
    assert main(["map", str(tmp_path / "torch"), str(tmp_path / "paddle"), "-o", str(tmp_path / "map.yaml")]) == 0
    diff = astray.compare(tmp_path / "torch", tmp_path / "paddle", mapping=tmp_path / "map.yaml")
    assert (diff.first.site, diff.first.step, diff.first.path) == ("/cross_entropy", 0, "target")


def test_a_rate_is_named(tmp_path: Path) -> None:
    program = convnet()._replace(
        paddle_optimizer=lambda model: paddle.optimizer.Momentum(0.06, 0.9, parameters=model.parameters())
    )
    diff = compared(tmp_path, program)
    assert str(diff.setup[0]).endswith("steps with lr 0.05 in the reference and 0.06 in the candidate.")
    assert diff.first.settings == (diff.setup[0],)


def test_without_a_mapping_the_transposed_weights_are_named(tmp_path: Path) -> None:
    compared(tmp_path, transformer())
    diff = astray.compare(tmp_path / "torch", tmp_path / "paddle")
    assert not diff.same
    assert any("are transposed in one of the runs" in problem for problem in diff.problems)
    assert any("draft what belongs together with `astray map" in problem for problem in diff.problems)


# -- the same weights --------------------------------------------------------------------------------------------------


def test_weights_of_a_run_of_either_framework(tmp_path: Path) -> None:
    program = transformer()
    torch.manual_seed(0)
    model, layer = program.torch_model(), program.paddle_model()
    run_torch(tmp_path / "torch", program, model, keep="tensors")
    torch.manual_seed(0)
    fresh = program.torch_model()
    loaded = astray.load_from(tmp_path / "torch", layer)
    assert sum(layout == "transpose" for layout in loaded.layouts.values()) == 13
    run_paddle(tmp_path / "paddle", program, layer, keep="tensors")
    back = program.torch_model()
    astray.load_from(tmp_path / "paddle", back)
    for (name, value), other in zip(fresh.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(value, other), name
