from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from astray.errors import RunError
from astray.records import MissedTensor
from astray.store.run_info import FORMAT, End, RunInfo, read_json, write_json


def test_it_describes_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "caf\udce9"])
    info = RunInfo.of_process(framework="torch", seed=3)
    assert info.command == ["train.py", "--data", "caf?"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", info.created)
    assert info.python.startswith("3.")
    assert (info.framework, info.seed, info.world_size, info.format) == ("torch", 3, 1, FORMAT)


def test_documents_come_back(tmp_path: Path) -> None:
    info = RunInfo.of_process(settings={"steps": [0, 2], "match": None, "lr": 1e-3})
    write_json(tmp_path / "run.json", info)
    assert read_json(tmp_path / "run.json", RunInfo) == info
    end = End(complete=True, missed=[MissedTensor("a", "ß", 2)])
    write_json(tmp_path / "end.json", end)
    assert read_json(tmp_path / "end.json", End) == end
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end.json", "run.json"]


def test_settings_may_be_anything(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", RunInfo.of_process(settings={"where": Path("x"), "limit": float("nan")}))
    assert read_json(tmp_path / "run.json", RunInfo).settings == {"where": "x", "limit": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"\(0 bytes\) is not whole JSON: Input data was truncated\.$"),
        (b"\xff{}", r"\(3 bytes\) is not whole JSON: .*\.$"),
        (b"[]", r"does not hold what it should: Expected `object`, got `array`\.$"),
        (b"{}", r"does not hold what it should: Object missing required field `complete`\.$"),
        (b'{"complete": true, "missed": [["a"]]}', r"Expected `array` of .*`\$\.missed\[0\]`\.$"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "end.json").write_bytes(content)
    with pytest.raises(RunError, match=message):
        read_json(tmp_path / "end.json", End)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"x cannot be read: No such file or directory\."):
        read_json(tmp_path / "x", End)


def test_settings_nested_without_end(tmp_path: Path) -> None:
    nested = "[" * 500 + "]" * 500
    (tmp_path / "run.json").write_text(f'{{"astray": "0", "created": "", "settings": {{"keep": {nested}}}}}')
    with pytest.raises(RunError, match=r"does not hold what it should: it is nested more than 100 levels deep\.$"):
        read_json(tmp_path / "run.json", RunInfo)


def test_words_of_a_setting() -> None:
    for said, words in (("stats", ["stats"]), (["stats", 3, None], ["stats"]), (None, []), ({"a": 1}, []), (True, [])):
        assert RunInfo(astray="", created="", settings={"keep": said}).words("keep") == words
