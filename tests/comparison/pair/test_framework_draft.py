"""Drafts of mappings between frameworks: what is written, why, and that it makes two equal programs the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from astray.comparison.comparison import compare
from astray.comparison.pair.framework_names import equivalents
from astray.comparison.pair.mapping_draft import draft
from astray.comparison.setup.differences import setup_differences
from astray.records import Setup

WORDS = {
    "torch": {
        "mean": "running_mean", "var": "running_var", "norm": "BatchNorm2d", "first": "exp_avg", "optimizer": "AdamW",
        "settings": {"eps": 1e-5, "momentum": 0.1, "stride": [1, 1]},
        "adam": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "foreach": None},
        "function": "batch_norm", "path": "kwargs.weight",
    },
    "paddle": {
        "mean": "_mean", "var": "_variance", "norm": "BatchNorm2D", "first": "moment1", "optimizer": "AdamW",
        "settings": {"epsilon": 1e-5, "momentum": 0.9, "stride": 1, "use_global_stats": None},
        "adam": {"lr": 1e-3, "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
        "function": "batch_norm_", "path": "3",
    },
}  # fmt: skip
"""What each framework calls the things of the same program."""


def program(builder, framework: str, layers: int = 2, **fault: Any):
    """A few layers with a normalisation and an optimizer, in the words of a framework; the numbers are the same."""
    random = np.random.default_rng(0)
    words = WORDS[framework]
    setup = [Setup(0, "module", "<root>", {"class": "Net"})]

    def weight(shape: tuple[int, ...], transposed: bool) -> np.ndarray:
        values = random.normal(size=shape).astype(np.float32)
        return values.T if transposed and framework == "paddle" else values

    builder.tensor(builder.call("<root>", "Net"), "output", "out", np.ones((2, 9)))
    for layer in range(layers):
        for name, shape in (("fc", (8, 4)), ("mix", (4, 4)), ("table", (6, 4))):
            type = "Embedding" if name == "table" else "Linear"
            seq = builder.call(f"h.{layer}.{name}", type)
            own = weight(shape, type == "Linear")
            builder.tensor(seq, "parameter", "weight", own)
            builder.tensor(seq, "output", "out", random.normal(size=(2, shape[0])))
            update = builder.call(f"h.{layer}.{name}.weight", str(words["optimizer"]), kind="optimizer", phase="update")
            builder.tensor(update, "output", f"state.{words['first']}", own * np.float32(0.1))
            builder.tensor(update, "output", "state.step" if framework == "torch" else "state.beta1_pow_acc", own[0, 0])
            setup.append(Setup(0, "module", f"h.{layer}.{name}", {"class": type}))
        seq = builder.call(f"h.{layer}.bn", str(words["norm"]))
        for name in ("mean", "var"):
            builder.tensor(seq, "state", str(words[name]), random.normal(size=4))
        scale = random.normal(size=4)
        function = builder.call(f"h.{layer}.bn/{words['function']}", "f", kind="function", parent=seq)
        builder.tensor(function, "input", str(words["path"]), scale)
        builder.tensor(function, "output", "out", np.ones((2, 4)))
        builder.tensor(seq, "output", "out", np.ones((2, 4)))
        settings = {"class": words["norm"], **words["settings"], **fault.get("settings", {})}
        setup.append(Setup(0, "module", f"h.{layer}.bn", settings))
    adam = {"class": words["optimizer"], **words["adam"], **fault.get("adam", {})}
    setup.append(Setup(0, "optimizer", "AdamW/param_groups.0", adam))
    builder.rank().setup = lambda: (setup, [])
    run = builder.run
    run.info = msgspec.structs.replace(run.info, framework=framework)
    return run


@pytest.fixture
def drafted(runs, tmp_path):
    """The draft for the two programs, as text and as a file."""
    text = str(draft(program(runs.Builder(), "torch"), program(runs.Builder(), "paddle")))
    (tmp_path / "map.yaml").write_text(text)
    return text, tmp_path / "map.yaml"


def test_a_draft_has_what_the_two_runs_need_and_no_more(drafted):
    assert yaml.safe_load(drafted[0]) == {
        "types": {"BatchNorm2D": "BatchNorm2d"},
        "functions": {"batch_norm_": "batch_norm"},
        "tensors": {"_mean": "running_mean", "_variance": "running_var", "moment1": "exp_avg"},
        "attributes": {
            "beta1": "betas.0", "beta2": "betas.1", "epsilon": "eps", "BatchNorm2D.momentum": "1 - momentum",
        },
        "paths": {"batch_norm_": {"3": "kwargs.weight"}},
        "layouts": {r"h\.\d+\.fc\.weight": "transpose", r"h\.\d+\.mix\.weight": "transpose"},
        "not compared": ["running_var"],
        "only in reference": ["step"],
        "only in candidate": ["beta1_pow_acc"],
    }  # fmt: skip


def test_labels_of_a_loss_are_paired(runs, tmp_path):
    """They are recorded at calls of their own where only modules are."""

    def noted(framework: str, path: str, labels: np.ndarray):
        builder = runs.Builder()
        builder.tensor(builder.call("<root>", "Net"), "output", "out", np.ones((2, 9)))
        builder.tensor(builder.call("/cross_entropy", "f", kind="custom"), "input", path, labels)
        builder.tensor(builder.call("mine", "", kind="custom"), "output", path, np.ones(3))
        run = builder.run
        run.info = msgspec.structs.replace(run.info, framework=framework)
        return run

    reference = noted("torch", "target", np.array([3, 1]))
    text = str(draft(reference, noted("paddle", "label", np.array([[1], [3]]))))
    assert yaml.safe_load(text)["paths"] == {"cross_entropy": {"label": "target"}}
    assert "paths:" not in str(draft(reference, noted("paddle", "label", np.eye(2, dtype=int))))
    (tmp_path / "map.yaml").write_text(text)
    found = compare(reference, noted("paddle", "label", np.array([[1], [3]])), mapping=tmp_path / "map.yaml")
    assert found.first.site == "/cross_entropy"
    assert (found.first.role, found.first.path) == ("input", "target")


def test_a_draft_says_why(drafted):
    text = drafted[0]
    assert "# The reference is of PyTorch, the candidate of Paddle." in text
    assert "paddle.nn.Linear keeps its weight as [in, out], torch.nn.Linear as [out, in]" in text
    assert "2 of them, h.0.fc.weight: [4, 8] here and [8, 4] in the reference" in text
    assert "not compared:  # torch keeps the variance over n - 1 elements in training, Paddle the one over n" in text
    assert "2 of them, h.0.mix.weight: [4, 4], with the reference's statistics and other bits" in text


def test_with_its_draft_the_same_program_is_the_same(runs, drafted):
    found = compare(program(runs.Builder(), "torch"), program(runs.Builder(), "paddle"), mapping=drafted[1])
    assert found.same
    assert found.setup == ()
    assert not compare(program(runs.Builder(), "torch"), program(runs.Builder(), "paddle")).same


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"settings": {"epsilon": 1e-6}}, "have eps 1e-05 in the reference and 1e-06 in the candidate."),
        ({"settings": {"momentum": 0.99}}, "have momentum 0.1 in the reference and 0.01 in the candidate."),
        ({"settings": {"stride": 2}}, "have stride 1 in the reference and 2 in the candidate."),
        ({"adam": {"beta2": 0.99}}, "steps with betas.1 0.999 in the reference and 0.99 in the candidate."),
        ({"adam": {"lr": 0.1}}, "steps with lr 0.001 in the reference and 0.1 in the candidate."),
    ],
)
def test_what_is_set_differently_is_told_in_the_words_of_the_reference(runs, drafted, fault, said):
    candidate = program(runs.Builder(), "paddle", **fault)
    found = compare(program(runs.Builder(), "torch"), candidate, mapping=drafted[1])
    assert [str(difference).endswith(said) for difference in found.setup] == [True]


def test_settings_that_only_one_framework_has_are_not_told(runs):
    """Nor are those that are not set, or are told in words of another kind."""
    candidate = program(runs.Builder(), "paddle", settings={"stride": "valid", "padding": None})
    found = setup_differences(program(runs.Builder(), "torch"), candidate)
    assert {difference.name for difference in found} == {"class", "momentum"}


def test_the_other_direction_is_drafted_too(runs, tmp_path):
    reference, candidate = program(runs.Builder(), "paddle"), program(runs.Builder(), "torch")
    text = str(draft(reference, candidate))
    rules = yaml.safe_load(text)
    assert rules["tensors"] == {"running_mean": "_mean", "running_var": "_variance", "exp_avg": "moment1"}
    assert rules["attributes"]["BatchNorm2d.momentum"] == "1 - momentum"
    (tmp_path / "map.yaml").write_text(text)
    found = compare(reference, candidate, mapping=tmp_path / "map.yaml")
    assert (found.same, found.setup) == (True, ())


def test_two_runs_of_one_framework_get_no_words(runs):
    found = draft(program(runs.Builder(), "torch"), program(runs.Builder(), "torch"))
    assert yaml.safe_load(str(found)) is None


def test_a_square_weight_of_unknown_order_is_asked_about(runs):
    """Other weights, so that statistics say nothing; a class that is not known, and no other of it."""

    def run(framework: str, weight: np.ndarray):
        builder = runs.Builder()
        seq = builder.call("fc", "Dense")
        builder.tensor(seq, "parameter", "weight", weight)
        builder.tensor(seq, "output", "out", np.ones((2, 4)))
        found = builder.run
        found.info = msgspec.structs.replace(found.info, framework=framework)
        return found

    random = np.random.default_rng(0)
    sides = [run(framework, random.normal(size=(4, 4))) for framework in ("torch", "paddle")]
    text = str(draft(*sides))
    assert "fc.weight is [4, 4]: its shape does not show whether it is transposed." in text
    assert yaml.safe_load(text) is None


@pytest.mark.parametrize(("reference", "candidate"), [("torch", "paddle"), ("paddle", "torch")])
def test_words_lead_back(reference, candidate):
    one, other = equivalents(reference, candidate), equivalents(candidate, reference)
    assert one is not None
    assert other is not None
    for words, back in ((one.types, other.types), (one.tensors, other.tensors), (one.functions, other.functions)):
        for name in (
            "BatchNorm1d",
            "BatchNorm1D",
            "SGD",
            "Momentum",
            "exp_avg",
            "moment1",
            "mul",
            "scale",
            "flash_attn",
        ):
            assert all(name in back(word) for word in words(name))
    assert equivalents("torch", "torch") is None
    assert equivalents("torch", "jax") is None


def test_a_map_is_written_to_a_file(runs, tmp_path: Path):
    """Names with signs that YAML gives a meaning come back as they were."""
    one, other = runs.Builder(), runs.Builder()
    for builder, name in ((one, "it's: a"), (other, "b # {c}")):
        builder.tensor(builder.call(name), "output", "out", np.ones(3))
    assert yaml.safe_load(str(draft(one.run, other.run))) == {"sites": {"b # {c}": "it's: a"}}
