"""JUnit XML: the culprit fails, and nothing else does; what continuous integration counts agrees with the exit code."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from astray import compare
from astray.report.junit import MOST_CASES, grouped, write_failure

ONES = np.ones(4, np.float32)


def suite_of(file) -> ElementTree.Element:
    suites = ElementTree.parse(file).getroot()
    assert suites.tag == "testsuites"
    (suite,) = suites
    cases = suite.findall("testcase")
    assert suite.attrib["tests"] == str(len(cases))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert suite.attrib[name] == str(sum(case.find(tag) is not None for case in cases))
    return suite


def results(suite) -> dict[str, tuple[str, str]]:
    """Of each case, what came of it and what was said."""
    found = {}
    for case in suite.findall("testcase"):
        outcome = case[0] if len(case) else None
        found[case.attrib["name"]] = ("passed", "") if outcome is None else (outcome.tag, outcome.attrib["message"])
    return found


def test_the_culprit_fails_and_what_follows_is_skipped(runs, tmp_path):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder("runs/bad"), weight_gradient=1.01, at=2))
    suite = suite_of(diff.to_junit(tmp_path / "new" / "junit.xml"))
    found = results(suite)
    assert suite.attrib["name"] == "runs/good → runs/bad"
    assert list(found) == [
        "<root>", "mlp", "mlp.fc", "mlp.act", "mlp.proj", "mlp.proj.weight", "mlp.fc.weight",
    ]  # fmt: skip
    assert [name for name, (outcome, _) in found.items() if outcome == "failure"] == [diff.first.site]
    said = found[diff.first.site][1]
    assert said.startswith(f"First divergence: {diff.first.place.full}. ")
    assert said.endswith(f"{diff.first.evidence[0]} How sure: certain.")
    assert suite.find("system-out").text == str(diff)
    assert {each.attrib["name"]: each.attrib["value"] for each in suite.iter("property")}["diverged"] == "1"


def test_victims_say_how_far_off_they_are(runs, tmp_path):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.001))
    found = results(suite_of(diff.to_junit(tmp_path / "junit.xml")))
    assert found["mlp.proj"][0] == "failure"
    outcome, said = found["mlp"]
    assert outcome == "skipped"
    wrong = len(diff.select("wrong and site == mlp"))
    assert said == (
        f"{wrong} tensors wrong, first step 1, forward, mlp (MLP), output (diverged, 1.0e-03), "
        "which the first divergence may explain."
    )


def test_runs_that_agree_pass(runs, tmp_path):
    suite = suite_of(compare(runs.program(runs.Builder()), runs.program(runs.Builder())).to_junit(tmp_path / "j.xml"))
    assert {outcome for outcome, _ in results(suite).values()} == {"passed"}


def test_tensors_in_one_run_only_fail(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    for builder, sites in ((one, "ab"), (other, "bc")):
        for site in sites:
            builder.tensor(builder.call(site), "output", "out", ONES)
    diff = compare(one.run, other.run)
    found = results(suite_of(diff.to_junit(tmp_path / "j.xml")))
    assert found["b"] == ("passed", "")
    said = "1 tensor in one run only, first step 0, forward, a (Linear), output (only in reference)."
    assert found["a"] == ("failure", said)
    assert found["c"][0] == "failure"


def test_what_could_not_be_compared_is_skipped(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    for builder, keep in ((one, {"stats"}), (other, {"fingerprint"})):
        builder.tensor(builder.call("a"), "output", "out", ONES)
        builder.tensor(builder.call("b"), "output", "out", ONES, keep=keep)
    diff = compare(one.run, other.run)
    found = results(suite_of(diff.to_junit(tmp_path / "j.xml")))
    assert diff.exit_code == 0
    assert found["a"] == ("passed", "")
    assert found["b"][0] == "skipped"
    assert found["b"][1].startswith("Could not be compared: ")


def test_each_rank_that_diverges_by_itself_fails(runs, tmp_path):
    one, other = runs.Builder(world_size=2), runs.Builder(world_size=2)
    for builder, faults in ((one, ({}, {})), (other, ({"proj": 1.1}, {"data": 1.1}))):
        for rank, fault in enumerate(faults):
            runs.program(builder, rank=rank, **fault)
    diff = compare(one.run, other.run)
    found = results(suite_of(diff.to_junit(tmp_path / "j.xml")))
    failed = {name: said for name, (outcome, said) in found.items() if outcome == "failure"}
    assert sorted(failed) == sorted({first.site for first in diff.firsts})
    assert all(f"First divergence on rank {first.rank}: " in failed[first.site] for first in diff.firsts)


@pytest.mark.parametrize("fault", ["none", "data", "init", "between", "residual", "loss", "weight_gradient", "rate"])
def test_failures_are_there_exactly_when_the_exit_code_says_so(runs, tmp_path, fault):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), **{fault: 1.5}))
    assert bool(int(suite_of(diff.to_junit(tmp_path / "j.xml")).attrib["failures"])) == bool(diff.exit_code)


def test_many_sites_are_grouped_by_the_modules_around_them():
    sites = [f"h.{layer}.mlp/op{number}" for layer in range(10) for number in range(100)]
    assert set(grouped(sites, MOST_CASES).values()) == {f"h.{layer}.mlp" for layer in range(10)}
    deep = [f"h.{layer}.mlp.{number}" for layer in range(20) for number in range(50)]
    assert set(grouped(deep, MOST_CASES).values()) == {f"h.{layer}.mlp" for layer in range(20)}
    assert set(grouped([f"layer{number}" for number in range(11)], 10).values()) == {"all sites"}
    few = [f"a.{number}" for number in range(10)]
    assert grouped(few, 10) == {site: site for site in few}
    assert grouped(["/relu", "/gelu", "a"], most=2)["/relu"] == "all sites"


def test_a_group_fails_with_the_name_of_the_site_in_it(runs, tmp_path, monkeypatch):
    from astray.report import junit

    monkeypatch.setattr(junit, "MOST_CASES", 3)
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.001))
    found = results(suite_of(diff.to_junit(tmp_path / "j.xml")))
    assert list(found) == ["<root>", "mlp"]
    assert found["mlp"][0] == "failure"
    assert "call 0 of mlp.proj (Linear)" in found["mlp"][1]


def test_what_xml_cannot_hold_is_replaced(runs, tmp_path):
    one, other = runs.Builder("runs/\x00good"), runs.Builder()
    for builder in (one, other):
        builder.tensor(builder.call("a\x1b<&\"'"), "output", "out", ONES)
    suite = suite_of(compare(one.run, other.run).to_junit(tmp_path / "j.xml"))
    assert list(results(suite)) == ["a�<&\"'"]
    assert suite.attrib["name"].startswith("runs/�good")


def test_runs_that_cannot_be_compared_are_an_error(tmp_path):
    suite = suite_of(write_failure("runs/a", "runs/b", "There is no run.", tmp_path / "new" / "j.xml"))
    assert results(suite) == {"compare": ("error", "There is no run.")}
