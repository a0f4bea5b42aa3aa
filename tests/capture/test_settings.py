"""The schema of settings: what a user may write, the checked value, and the errors for wrong values."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from astray.cli.settings import settings_of

from astray.capture.settings import CHECKS, RecordingOptions, Settings
from astray.cli import parser
from astray.errors import RecordError
from astray.part import Part
from astray.recorder import Recorder
from astray.steps import StepSelection

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"

EVERYTHING: dict[str, Any] = {
    "level": ["op", "module"],
    "keep": "tensors, fingerprint",
    "samples": 7,
    "slice": "0, ..., :64",
    "optimizer": "weight,update",
    "compiled": "modules",
    "perturb": 5,
    "steps": "0:10:2",
    "ranks": [0, 3],
    "match": [r"h\.0", "attn,proj"],
    "ignore": "drop",
    "classes": "Linear, softmax",
    "scope": ["h.0", "h.1/softmax"],
    "phases": ["backward"],
    "roles": {"input", "output"},
    "functions": {"functional": ["*"], "aten": ["mm"]},
    "max_tensors": 1000,
    "max_tensors_per_step": 50,
    "max_bytes": "1.5 GB",
    "queue_bytes": 1 << 21,
}


def test_nothing_given_is_the_default() -> None:
    assert Settings.check() == Settings()
    assert Settings.check(**dict.fromkeys(RecordingOptions.__optional_keys__)) == Settings()


def test_what_is_given_becomes_values() -> None:
    settings = Settings.check(**EVERYTHING)
    assert settings.level == ("module", "op")
    assert settings.keep == {"tensors", "fingerprint"}
    assert settings.slice == Part.parse("0, ..., :64")
    assert settings.optimizer == {"weight", "update"}
    assert settings.compiled == {"modules"}
    assert settings.perturb == 5
    assert settings.steps == StepSelection.parse("0:10:2")
    assert [rank for rank in range(5) if rank in settings.ranks] == [0, 3]
    assert settings.match == (r"h\.0", "attn,proj")  # a comma may be part of a regular expression
    assert settings.ignore == ("drop",)
    assert settings.classes == ("Linear", "softmax")
    assert settings.scope == ("h.0", "h.1/softmax")
    assert settings.phases == {"backward"}
    assert settings.roles == {"input", "output"}
    assert settings.functions is not None
    assert settings.functions.as_dict() == {"functional": ["*"], "aten": ["mm"]}
    assert settings.max_tensors == 1000
    assert settings.max_bytes == 1_500_000_000
    assert settings.queue_bytes == 2_097_152


@pytest.mark.parametrize("given", [{}, EVERYTHING, {"functions": ["softmax", "torch.linalg.*"]}, {"slice": "-1, ::2"}])
def test_run_json_gives_the_same_settings_back(given: dict[str, Any]) -> None:
    settings = Settings.check(**given)
    written = json.loads(json.dumps(settings.as_dict()))
    assert list(written) == list(CHECKS)
    assert Settings.check(**written) == settings
    assert hash(Settings.check(**written)) == hash(settings)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (5, 5), ("5", 5), ("1_000", 1000), ("1e6", 1_000_000), (1e6, 1_000_000), ("64k", 64_000),
        ("2 GB", 2_000_000_000), ("500MB", 500_000_000), ("1GiB", 1 << 30), ("1.5 kib", 1536), ("12 B", 12),
        ("3T", 3_000_000_000_000),
    ],
)  # fmt: skip
def test_sizes(written: Any, size: int) -> None:
    assert Settings.check(max_bytes=written).max_bytes == size


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kepp": "stats"}, "kepp='stats' is not a setting. Did you mean 'keep'?"),
        ({"rank": 0}, "rank=0 is not a setting. Did you mean 'ranks'?"),
        ({"zzz": 1}, "zzz=1 is not a setting. The settings are level, keep, "),
        ({"keep": "stat"}, "keep='stat' is not known. It can be 'stats', 'fingerprint', 'sample', 'tensors', or "
         "several of them. Did you mean 'stats'?"),
        ({"level": "functions"}, "Did you mean 'function'?"),
        ({"level": 1}, "level=1 is not a word. It can be 'module', 'function', 'op', or several of them."),
        ({"keep": []}, "keep is empty. It can be 'stats',"),
        ({"phases": ["forward", "backwards"]}, "phases='backwards' is not known. It can be 'forward', 'backward', "
         "'update', or several of them. Did you mean 'backward'?"),
        ({"roles": "inputs"}, "Did you mean 'input'?"),
        ({"optimizer": "weights"}, "Did you mean 'weight'?"),
        ({"optimizer": True}, "optimizer=True is not a word."),
        ({"perturb": -1}, "perturb=-1 is not a seed. It is True, or a whole number from 0 to 4,294,967,295."),
        ({"perturb": "yes"}, "perturb='yes' is not a seed."),
        ({"steps": "3:1"}, "steps='3:1' selects no step. Write begin:end"),
        ({"steps": True}, "steps=True is not a selection of steps."),
        ({"ranks": "a"}, "ranks='a' is not a selection of ranks."),
        ({"ranks": [-1]}, "ranks=[-1] selects no rank."),
        ({"match": "h.(0"}, "match='h.(0' is not a regular expression: missing ), unterminated subpattern"),
        ({"ignore": 3}, "ignore=3 is neither a regular expression"),
        ({"match": [["a"]]}, "match=[['a']] is neither a regular expression"),
        ({"classes": [1]}, "classes=[1] is neither a name nor a list"),
        ({"scope": "h.0"}, "scope='h.0' is not two sites."),
        ({"scope": ["h.0"]}, "scope=['h.0'] is not two sites."),
        ({"samples": 0}, "samples=0 is not a whole number of at least 1."),
        ({"samples": "many"}, "samples='many' is not a whole number"),
        ({"max_tensors": 2.5}, "max_tensors=2.5 is not a whole number"),
        ({"max_tensors": True}, "max_tensors=True is not a whole number"),
        ({"max_tensors_per_step": -1}, "max_tensors_per_step=-1 is not a whole number"),
        ({"max_bytes": "2 GX"}, "max_bytes='2 GX' is not a size of at least 1 bytes."),
        ({"max_bytes": "2,5 GB"}, "max_bytes='2,5 GB' is not a size"),
        ({"max_bytes": float("nan")}, "max_bytes=nan is not a size"),
        ({"max_bytes": "1e999 GB"}, "max_bytes='1e999 GB' is not a size of at least 1 bytes."),
        ({"max_bytes": "1__0"}, "max_bytes='1__0' is not a size of at least 1 bytes."),
        ({"max_bytes": "9" * 5000}, f"max_bytes='{'9' * 76}… is not a size of at least 1 bytes."),
        ({"max_bytes": 10**5000}, "max_bytes=a number of thousands of digits is not a size of at least 1 bytes and "),
        ({"queue_bytes": 1 << 63}, "queue_bytes=9223372036854775808 is not a size of at least 1,048,576 bytes and at "
         "most 4,611,686,018,427,387,904. Write a number, '500 MB' or '2 GiB'."),
        ({"samples": 1 << 70}, f"samples={1 << 70} is not a whole number of at least 1 and at most "),
        ({"queue_bytes": "1 kB"}, "queue_bytes='1 kB' is not a size of at least 1,048,576 bytes."),
        ({"slice": "a"}, "slice='a' is not a part of a tensor"),
        ({"slice": {"a": 1}}, "slice={'a': 1} is not a part of a tensor"),
        ({"functions": 3}, "functions=3 is not a list."),
        ({"config": "nowhere.yaml"}, "There is no file nowhere.yaml."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_answered_in_words(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=f"^{re.escape(said)}|{re.escape(said)}$"):
        Settings.check(**given)


def test_a_seed_may_be_left_to_us() -> None:
    assert Settings.check(perturb=True).perturb == 0
    assert Settings.check(perturb=False).perturb is None
    assert Settings.check(perturb=2**32 - 1).perturb == 2**32 - 1


def test_statistics_are_left_out_for_fingerprints_alone() -> None:
    assert not Settings.check(keep="fingerprint").wants_statistics
    assert Settings.check(keep="fingerprint,sample").wants_statistics


def test_every_place_that_lists_the_settings_lists_them_all() -> None:
    every = {*CHECKS, "config"}
    assert RecordingOptions.__optional_keys__ == every
    described = re.findall(r"^    (\w+): ", Recorder.__doc__ or "", re.MULTILINE)
    assert sorted(described) == sorted({*every, "path", "model", "overwrite", "guard", "writer"})
    table = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert [name for name, _ in table] == [*CHECKS, "config"]
    assert all(name == target for name, target in table)
    headings = re.findall(r"^### (\w+)$", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert headings == [name for name, _ in table]


def test_the_examples_in_the_documentation_mean_the_same_in_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = REFERENCE.read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"^# (\w+\.yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        Path(name).write_text(content)
    examples = re.findall(
        r"^### (\w+)$.*?\|---\|---\|---\|\n\| `(.*?)` \| (?:`(.*?)`)? ?\| `(.*?)` \|$", text, re.MULTILINE | re.DOTALL
    )
    assert [name for name, *_ in examples] == [*CHECKS, "config"]
    for name, python, yaml, command in examples:
        call = ast.parse(f"f({python})", mode="eval").body
        assert isinstance(call, ast.Call)
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        assert list(given) == [name]
        settings = Settings.check(**given)
        assert settings != Settings(), name
        if yaml:
            Path("one.yaml").write_text(yaml)
            assert Settings.check(config="one.yaml") == settings, yaml
        options = parser().parse_args(["run", "-o", "runs/a", *shlex.split(command), "train.py"])
        assert Settings.check(**settings_of(options)) == settings, command
    blocks = re.findall(r"^```(yaml|json|toml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    first = Settings.check(config="astray.yaml")
    assert [ending for ending, _ in blocks] == ["yaml", "yaml", "json", "toml"]
    for ending, content in blocks[2:]:
        Path(f"same.{ending}").write_text(content)
        assert Settings.check(config=f"same.{ending}") == first
