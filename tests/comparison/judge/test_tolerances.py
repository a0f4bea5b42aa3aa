"""What decides how far off a tensor may be: a tolerance before a noise run before siblings before the model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.comparison.comparison import compare
from astray.comparison.judge.tolerances import Tolerances
from astray.errors import CompareError
from astray.report.text import render


def run(runs, off: dict[str, float], steps: int = 2, keep: str = "stats,fingerprint", dtype: type = np.float32):
    """Each site is given ones and gives numbers that are off by so much; `a@1` is off in step 1 only."""
    builder = runs.Builder(keep=keep)
    for step in range(steps):
        for site in ("a", "b"):
            wrong = off.get(f"{site}@{step}", off.get(site, 0.0))
            seq = builder.call(site, step=step)
            builder.tensor(seq, "input", "0", np.ones(3, dtype))
            builder.tensor(seq, "output", "out", np.array([1, 2, 3 + 3 * wrong], dtype))
    return builder.run


def verdicts(found) -> dict[str, list[tuple[str, str]]]:
    """Of the results."""
    rows = zip(*(found.pairs[name] for name in ("site", "role", "verdict", "rule")), strict=True)
    sites: dict[str, list[tuple[str, str]]] = {}
    for site, role, verdict, rule in rows:
        if role == "output":
            sites.setdefault(site, []).append((verdict, rule))
    return sites


def test_the_model_decides_when_nobody_else_does(runs):
    found = verdicts(compare(run(runs, {}), run(runs, {"a": 1e-7, "b": 1e-3})))
    assert found == {"a": [("rounding", "model")] * 2, "b": [("diverged", "model")] * 2}
    assert verdicts(compare(run(runs, {}), run(runs, {})))["a"] == [("identical", "bits")] * 2


def test_a_noise_run_allows_what_it_shows(runs):
    reference, candidate = run(runs, {}), run(runs, {"a": 2e-3, "b": 2e-3})
    assert verdicts(compare(reference, candidate))["a"] == [("diverged", "model")] * 2
    found = verdicts(compare(reference, candidate, noise=run(runs, {"a": 1e-3})))
    assert found["a"] == [("drifting", "noise run")] * 2
    assert [verdict for verdict, _ in found["b"]] == ["diverged"] * 2
    beyond = compare(reference, run(runs, {"a": 0.1}), noise=run(runs, {"a": 1e-3}))
    assert verdicts(beyond)["a"] == [("diverged", "noise run")] * 2


def test_several_noise_runs_allow_the_most_that_one_of_them_shows(runs):
    reference, candidate = run(runs, {}), run(runs, {"a": 2e-3, "b": 2e-3})
    noise = [run(runs, {"a": 1e-3}), run(runs, {"b": 1e-3})]
    assert compare(reference, candidate, noise=noise).first is None
    assert compare(reference, candidate, noise=noise[:1]).first.site == "b"


def test_what_a_noise_run_shows_in_any_step_holds_in_all(runs):
    reference, again = run(runs, {}), run(runs, {"a@1": 1e-3})
    assert compare(reference, run(runs, {"a@0": 2e-3}), noise=again).first is None


def test_a_perturbed_run_is_taken_for_noise_and_warned_of_elsewhere(runs):
    reference, perturbed = run(runs, {}), run(runs, {"a": 1e-3})
    perturbed.info.settings = {"perturb": 4}
    found = compare(reference, run(runs, {"a": 2e-3}), noise=perturbed)
    assert verdicts(found)["a"] == [("drifting", "noise run")] * 2
    assert found.problems == ()
    advice = "Compare a run of the program as it is, and give this one as --noise."
    for sides in ((perturbed, reference), (reference, perturbed)):
        side = "reference" if sides[0] is perturbed else "candidate"
        assert compare(*sides).problems == (
            f"The {side} {perturbed.path} was recorded with perturbed inputs (seed 4). {advice}",
        )


def test_what_the_second_recording_has_not_is_left_to_the_model(runs):
    reference = run(runs, {})
    builder = runs.Builder()
    seq = builder.call("a")
    builder.tensor(seq, "input", "0", np.ones(3, np.float32))
    builder.tensor(seq, "output", "out", np.array([1, 2, 3], np.float32) * np.float32(1.001))
    found = verdicts(compare(reference, run(runs, {"a": 1e-3, "b": 1e-7}), noise=builder.run))
    assert found["a"] == [("drifting", "noise run"), ("diverged", "model")]  # of which step 1 was not recorded again
    assert {rule for _, rule in found["b"]} == {"model"}


def test_a_tolerance_wins_both_ways(runs):
    reference, candidate = run(runs, {}), run(runs, {"a": 1e-2, "b": 1e-7})
    found = verdicts(compare(reference, candidate, tolerances={"^a$": 0.02, "^b$": 1e-9}, noise=candidate))
    assert found == {"a": [("rounding", "tolerance")] * 2, "b": [("diverged", "tolerance")] * 2}
    found = verdicts(compare(reference, candidate, tolerances={"float32": 0.02, "b": 0.0}))
    assert found == {"a": [("rounding", "tolerance")] * 2, "b": [("diverged", "tolerance")] * 2}


def test_a_tolerance_is_for_integers_too(runs):
    sides = [run(runs, off, dtype=np.int64, keep="stats,tensors") for off in ({}, {"a": 1.0})]
    assert verdicts(compare(*sides))["a"] == [("diverged", "model")] * 2
    assert verdicts(compare(*sides, tolerances={"a": 2.0}))["a"] == [("rounding", "tolerance")] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": -1.0}, "The tolerance of 'a' is -1.0; it is a relative error"),
        ({"a": math.inf}, "The tolerance of 'a' is inf"),
        ({"a": "1e-3"}, "The tolerance of 'a' is '1e-3'"),
        ({"(": 1e-3}, "'(' is neither a dtype nor a regular expression for sites"),
    ],
)
def test_what_is_not_a_tolerance_is_told(given, said):
    with pytest.raises(CompareError) as caught:
        Tolerances.check(given)
    assert said in str(caught.value)


@pytest.mark.parametrize("keep", ["fingerprint", "stats,fingerprint", "stats,fingerprint,tensors", "stats,tensors"])
def test_exact_means_every_bit(runs, keep):
    reference, candidate = run(runs, {}, keep=keep), run(runs, {"b@1": 1e-7}, keep=keep)
    found = compare(reference, candidate, exact=True)
    assert (found.first.step, found.first.site) == (1, "b")
    assert found.counts["diverged"] == 1
    assert found.pairs["rule"][7] == "bits"
    assert compare(reference, run(runs, {}, keep=keep), exact=True).same
    assert (compare(reference, candidate).first is None) == (keep != "fingerprint")


@pytest.mark.parametrize(
    ("keep", "which"),
    [
        ("fingerprint", "fingerprints differ, so at least one bit does. The same program"),
        ("stats,fingerprint", "fingerprints differ, so at least one bit does. Without --exact it passes as rounding."),
        (
            "stats,fingerprint,tensors",
            "1 of 3 elements has other bits, by up to 1 representable number. Without --exact it passes as",
        ),
    ],
)
def test_the_report_says_why_bits_count(runs, keep, which):
    reference, candidate = run(runs, {}, keep=keep), run(runs, {"b@1": 1e-7}, keep=keep)
    report = render(compare(reference, candidate, exact=True), width=1000)
    (said,) = [line for line in report.splitlines() if line.strip().startswith("exact ")]
    assert which in said
    assert said.endswith("one that differs has a cause, however small.")
    assert "fingerprints differ by rounding as well" not in report
    assert "    exact " not in render(compare(reference, candidate), width=1000)


def test_nan_needs_no_word_about_bits(runs):
    found = compare(run(runs, {}), run(runs, {"b@1": math.nan}), exact=True)
    assert found.first is not None
    assert "    exact " not in render(found, width=1000)
