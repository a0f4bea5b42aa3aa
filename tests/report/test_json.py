"""JSON: one documented object, and never a bare NaN."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from astray import compare
from astray.comparison.verdict import LABELS
from astray.report import json as report

ONES = np.ones(4, np.float32)
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/comparison.schema.json").read_text(encoding="utf-8"))


def closed(schema):
    """The schema without room for fields that it does not name: what is written must be documented."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: closed(part) for name, part in schema.items()} | (
        {"additionalProperties": False} if isinstance(schema.get("properties"), dict) and "type" in schema else {}
    )


def check(document) -> None:
    errors = list(Draft202012Validator(closed(SCHEMA)).iter_errors(document))
    assert [f"{error.json_path}: {error.message[:200]}" for error in errors] == []


def load(path):
    def refuse(token: str):
        raise AssertionError(f"a bare {token}")

    found = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    check(found)
    return found


def test_the_schema_is_one_and_names_every_verdict():
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema"]["const"] == report.SCHEMA
    assert SCHEMA["properties"]["differences"]["maxItems"] == report.MOST_DIFFERENCES
    assert SCHEMA["$defs"]["verdict"]["enum"] == LABELS


@pytest.mark.parametrize("fault", ["data", "init", "between", "residual", "loss", "weight_gradient", "rate"])
@pytest.mark.parametrize("keep", ["stats,fingerprint", "fingerprint", "stats,fingerprint,tensors"])
def test_every_kind_of_divergence_fits_the_schema(runs, tmp_path, fault, keep):
    sides = runs.program(runs.Builder(keep=keep)), runs.program(runs.Builder(keep=keep), **{fault: 1.5})
    assert load(compare(*sides).to_json(tmp_path / "diff.json"))["first"] is not None


def test_the_check_itself_finds_what_is_wrong(runs):
    document = report.document(compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.1)))
    check(document)
    for damage in ({"same": "no"}, {"schema": 2}, {"surprise": 1}, {"first": {**document["first"], "rank": None}}):
        with pytest.raises(AssertionError):
            check(document | damage)


def test_document(runs, tmp_path):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder("runs/bad"), proj=1.001))
    found = load(diff.to_json(tmp_path / "new" / "diff.json"))
    documented = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*) {2,}", report.__doc__, re.MULTILINE)
    assert list(found) == [name for names in documented for name in names.split(", ")]
    assert (found["schema"], found["reference"], found["candidate"], found["same"]) == (
        1,
        "runs/good",
        "runs/bad",
        False,
    )
    assert (found["tensors"], found["calls"], found["steps"]) == (69, 36, [0, 1, 2])
    assert found["counts"] == diff.counts
    first = found["first"]
    assert (first["step"], first["site"], first["cause"], first["verdict"]) == (
        1,
        "mlp.proj",
        "computation",
        "diverged",
    )
    assert first["reference"]["fingerprint"] == f"{diff.first.reference.fingerprint:016x}"
    assert first["reference"]["statistics"]["count"] == 32
    assert first["stack"][0]["line"] == 7
    assert first["previous"]["site"] == "mlp.act"
    assert found["firsts"] == [first]
    assert found["differences_total"] == diff.counts["diverged"] == len(found["differences"])
    assert found["differences"][0]["site"] == "mlp.proj"


def test_a_call_none_of_whose_tensors_is_wrong(runs, tmp_path):
    sides = []
    for factor in (1, 2):
        builder = runs.Builder()
        outer = builder.call("net", "Net")
        builder.tensor(outer, "input", "0", ONES)
        builder.tensor(builder.call("net.layer", parent=outer), "input", "0", ONES * np.float32(factor))
        sides.append(builder.run)
    first = load(compare(*sides).to_json(tmp_path / "seen.json"))["first"]
    assert (first["site"], first["type"], first["role"], first["path"], first["error"]) == ("net", "Net", "", "", 1)
    assert (first["seen"]["site"], first["seen"]["role"], first["victims"]) == ("net.layer", "input", 0)


def test_a_slice_is_named(runs, tmp_path):
    one, other = (runs.Builder(keep="stats,tensors") for _ in range(2))
    for builder, factor in ((one, 1), (other, 3)):
        builder.tensor(builder.call("a"), "output", "out", ONES * np.float32(factor), part=":2")
        builder.tensor(builder.call("b"), "output", "out", ONES * np.float32(factor))
    found = load(compare(one.run, other.run).to_json(tmp_path / "slice.json"))
    assert list(found["sources"].items()) == [("values", 1), ("values of the slice :2", 1)]
    assert found["first"]["measured_by"] == found["differences"][0]["source"] == "values of the slice :2"


def test_no_divergence(runs, tmp_path):
    found = load(compare(runs.program(runs.Builder()), runs.program(runs.Builder())).to_json(tmp_path / "same.json"))
    assert (found["same"], found["first"], found["differences"]) == (True, None, [])


def test_unknown_is_null_and_infinite_is_a_string(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    for builder, factor in ((one, 0), (other, 1)):
        builder.tensor(builder.call("zeros"), "output", "out", ONES * np.float32(factor))
        builder.tensor(builder.call("bits"), "output", "out", ONES * np.float32(factor), keep={"fingerprint"})
        builder.tensor(builder.call("nan"), "output", "out", ONES * np.float32(factor) / np.float32(factor or np.nan))
    found = load(compare(one.run, other.run).to_json(tmp_path / "odd.json"))
    assert [row["error"] for row in found["differences"]] == ["inf", None, 0.0]
