"""Suspects, causes that were set differently, and how sure the answer is, in every report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from astray import Comparison, compare
from astray.cli import main
from astray.records import Call, Setup, Tensor
from astray.report.json import document
from astray.report.text import render, reported_others
from astray.stats.kernels import Strided, measure
from astray.store import RunInfo, RunWriter
from astray.web.overview import overview_of
from astray.web.views import ComparisonView
from astray.web.wire import encode

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/comparison.schema.json").read_text(encoding="utf-8"))
GIVEN = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


def layers(runs: Any, path: str, errors: dict[int, float] | None = None, inputs: float = 0.0) -> Any:
    """Eight layers beside each other and a head, whose results are off by so much."""
    builder = runs.Builder(path)
    for layer in range(9):
        seq = builder.call(f"h.{layer}.mlp") if layer < 8 else builder.call("head", "Head")
        builder.tensor(seq, "input", "0", GIVEN * np.float32(1 + inputs * (layer + 1)))
        off = (errors or {}).get(layer, 0.0)
        builder.tensor(seq, "output", "out", GIVEN * np.float32((layer + 2) * (1 + off)))
    return builder.run


def of_layers(runs: Any, errors: dict[int, float], inputs: float = 0.0) -> Comparison:
    return compare(layers(runs, "runs/good"), layers(runs, "runs/bad", errors, inputs))


def little(**more: float) -> dict[int, float]:
    """Errors of a rounding in all layers."""
    return dict.fromkeys(range(8), 2.0**-22) | {int(name[1:]): value for name, value in more.items()}


def test_the_most_surprising_call_is_told_where_nothing_diverged(runs):
    diff = of_layers(runs, little(h5=2.0**-20))
    assert diff.first is None
    assert diff.suspects[0].site == "h.5.mlp"
    score = diff.suspects[0].score
    assert 0.1 < score < 1
    text = " ".join(render(diff).split())
    assert f"The most surprising call is step 0, forward, h.5.mlp (Linear), output ({score:.2f} of what would" in text
    assert text.count("of what would count as wrong") == 1  # the others are far behind
    assert diff.suspects[0].sureness == "no more than rounding"


def test_nothing_is_suspected_where_all_is_identical(runs):
    diff = of_layers(runs, {})
    assert diff.suspects == ()
    assert "suspects" not in render(diff)
    assert overview_of(ComparisonView(diff))["suspects"] == []


def test_what_is_wrong_beside_the_first_and_was_given_the_same_is_not_a_victim(runs):
    diff = of_layers(runs, {2: 0.01, 8: 0.01})
    assert (diff.first.site, [one.site for one in diff.others]) == ("h.2.mlp", ["head"])
    assert diff.others[0].clean
    text = " ".join(render(diff).split())
    assert "by itself These are not its victims, for their inputs agree: step 0, forward, head (Head), output" in text


def test_inputs_that_merely_agree_do_not_prove_it(runs):
    diff = of_layers(runs, {2: 0.01, 8: 0.01}, inputs=2.0**-22)
    assert [one.site for one in (diff.first, *reported_others(diff))] == ["h.2.mlp", "head"]
    assert not diff.others[0].clean
    text = " ".join(render(diff).split())
    assert "for their inputs agree" not in text
    assert "by itself These are not explained by what they came from: step 0, forward, head (Head), output" in text


def test_suspects_in_json_and_on_the_page(runs):
    for errors in (little(), little(h5=0.01)):
        diff = of_layers(runs, errors)
        found = json.loads(json.dumps(document(diff), allow_nan=False))
        assert list(Draft202012Validator(SCHEMA).iter_errors(found)) == []
        assert [one["site"] for one in found["suspects"]] == [one.site for one in diff.suspects]
        assert found["suspects"][0]["why"] == str(diff.suspects[0])
        assert 0 < len(found["suspects"]) <= 10
        told = json.loads(encode(overview_of(ComparisonView(diff))))["suspects"]
        assert [diff.pairs["site"][one["row"]] for one in told] == [one.site for one in diff.suspects]
    assert (found["first"]["sureness"], found["first"]["rule"], found["first"]["clean"]) == (
        "certain",
        "model",
        True,
    )
    assert found["first"]["judged"]["site"] == "h.5.mlp"
    assert found["differences"][0]["surprise"] == found["suspects"][0]["score"]


@pytest.fixture
def normed(tmp_path: Path) -> tuple[str, str]:
    """Two runs of a norm with another eps, whose results are off by less than rounding could be."""
    paths = []
    for name, eps, off in (("good", 1e-5, 0.0), ("bad", 1e-3, 2.0**-22)):
        with RunWriter(tmp_path / name, info=RunInfo.of_process()) as writer:
            writer.setup(Setup(0, "module", "norm", {"class": "LayerNorm", "eps": eps}))
            writer.call(Call(0, 0, 0, "module", "norm", "LayerNorm", 0, "forward"))
            for role, path, factor in (("input", "0", 1.0), ("output", "out", 1 + off)):
                array = GIVEN * np.float32(factor)
                memory = Strided.from_numpy(array)
                found = measure(memory)
                writer.tensor(Tensor(0, role, path, "float32", memory.shape, memory.stride, "cpu", False, *found))
        paths.append(str(tmp_path / name))
    return paths[0], paths[1]


def test_a_setting_is_the_cause_however_little_it_changes(normed, capsys):
    assert main(["compare", *normed]) == 1
    out = " ".join(capsys.readouterr().out.split())
    sentence = "norm (LayerNorm) has eps 1e-05 in the reference and 0.001 in the candidate."
    assert f"cause {sentence} Its output is the first that it can have changed, and is off by no more" in out
    assert "how sure certain that it was set differently, though the error is no more than rounding" in out


def test_a_setting_that_is_the_cause_in_json_junit_and_on_the_page(normed, tmp_path):
    diff = compare(*normed)
    assert not diff.same
    first = document(diff)["first"]
    assert [one["name"] for one in first["settings"]] == ["eps"]
    assert first["sureness"] == "certain"
    assert list(Draft202012Validator(SCHEMA).iter_errors(document(diff))) == []
    assert 'failures="1"' in diff.to_junit(tmp_path / "junit.xml").read_text(encoding="utf-8")
    told = overview_of(ComparisonView(diff))["first"]
    assert [one["sentence"] for one in told["settings"]] == [first["settings"][0]["sentence"]]
    assert told["settings"][0]["row"] == 0
    assert all(one["text"] != first["settings"][0]["sentence"] for one in told["evidence"])


def test_noise_may_be_given_several_times(normed, capsys):
    good, bad = normed
    assert main(["compare", good, bad, "--noise", good, "--noise", bad]) == 1
    assert "eps 1e-05" in capsys.readouterr().out
    assert main(["compare", good, good, "--noise", good]) == 0
