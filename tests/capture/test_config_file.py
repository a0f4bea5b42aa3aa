"""Settings in files: three formats with one meaning; errors for wrong files; edits while the program runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from astray.capture import config_file
from astray.capture.config_file import LiveConfig, load
from astray.capture.settings import Settings
from astray.errors import RecordError

YAML = """
level: [module, function]
keep: tensors
steps: 10:20          # not ten minutes and twenty seconds
ranks: 0
match:
  - h\\.0
  - 'attn, proj'
slice: 0:1, ..., :64
max_bytes: 2 GB
max_tensors: 1_000
functions:
  functional: ["*", dropout]
"""
JSON = """
{"level": ["module", "function"], "keep": "tensors", "steps": "10:20", "ranks": 0, "match": ["h\\\\.0", "attn, proj"],
 "slice": "0:1, ..., :64", "max_bytes": 2e9, "max_tensors": 1000, "functions": {"functional": ["*", "dropout"]}}
"""
TOML = """
level = ["module", "function"]
keep = "tensors"
steps = "10:20"
ranks = 0
match = ['h\\.0', "attn, proj"]
slice = "0:1, ..., :64"
max_bytes = 2e9
max_tensors = 1_000
[functions]
functional = ["*", "dropout"]
"""
GIVEN: dict[str, Any] = {
    "level": "module, function",
    "keep": ["tensors"],
    "steps": range(10, 20),
    "ranks": [0],
    "match": [r"h\.0", "attn, proj"],
    "slice": (slice(0, 1), ..., slice(64)),
    "max_bytes": 2_000_000_000,
    "max_tensors": 1000,
    "functions": {"functional": ["*", "dropout"]},
}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.JSON", JSON), ("a.toml", TOML)])
def test_every_format_and_keyword_arguments_say_the_same(name: str, text: str, tmp_path: Path) -> None:
    assert Settings.check(config=written(tmp_path, name, text)) == Settings.check(**GIVEN)


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.toml"])
@pytest.mark.parametrize("text", ["", " \n", "\ufeff"])
def test_an_empty_file_is_the_default(name: str, text: str, tmp_path: Path) -> None:
    assert Settings.check(config=written(tmp_path, name, text)) == Settings()


def test_what_is_given_wins_and_none_is_not_given(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "keep: tensors\nsteps: 3\nmatch: attn\n")
    settings = Settings.check(config=path, keep="stats", steps="all", match=None)
    assert settings == Settings.check(keep="stats", match="attn")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10:20:2", "10:20:2"), ("1:30.5", "1:30.5"), ("2024-01-02", "2024-01-02"), ("010", "010"), ("7", 7),
        ("-7", -7), ("1_000", 1000), ("1e9", 1e9), ("1.5", 1.5), ("1.5e-3", 0.0015), ("true", True), ("null", None),
        ("0x1f", "0x1f"),
    ],
)  # fmt: skip
def test_yaml_numbers_are_those_that_people_mean(text: str, value: object, tmp_path: Path) -> None:
    found = load(written(tmp_path, "a.yaml", f"a: {text}"))["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "kepp: stats", "In {path}: kepp='stats' is not a setting. Did you mean 'keep'?"),
        ("a.yaml", "1: stats", "In {path}: 1='stats' is not a setting. The settings are level, "),
        ("a.yaml", "keep: stat", "In {path}: keep='stat' is not known."),
        ("a.toml", "samples = 2024-01-02", "In {path}: samples=datetime.date(2024, 1, 2) is not a whole number"),
        ("a.yaml", "keep: {a: 1}", "In {path}: keep={{'a': 1}} is not a word."),
        ("a.yaml", "- keep", "In {path}: it holds ['keep']. Settings are written by name, such as `keep: stats`."),
        ("a.json", "3", "In {path}: it holds 3."),
        ("a.yaml", "config: b.yaml", "In {path}: config='b.yaml' names another file."),
        ("a.yaml", "keep: stats\nkeep: tensors", "{path} is not valid YAML: 'keep' stands in it twice."),
        ("a.json", '{{"keep": 1, "keep": 2}}', "{path} is not valid JSON: 'keep' stands in it twice."),
        ("a.yaml", "keep: [stats", "{path} is not valid YAML: expected ',' or ']', but got '<stream end>' in line 1."),
        ("a.yaml", "keep: !!python/name:os.system", "{path} is not valid YAML: could not determine a constructor for"),
        ("a.yaml", "a: \x00", "{path} is not valid YAML: unacceptable character"),
        ("a.yaml", "!!int x", "{path} is not valid YAML: "),
        ("a.json", "{{'keep': 1}}", "{path} is not valid JSON: Expecting property name"),
        ("a.json", "[" * 100_000, "{path} is not valid JSON: "),
        ("a.toml", "keep = ", "{path} is not valid TOML: Invalid value (at end of document)"),
        ("a.ini", "keep = 1", "{path} has the ending '.ini'. Settings are read from .yaml, .yml, .json, .toml."),
        ("a.yaml", "functions: b.yaml", "In {path}: functions='{folder}/b.yaml': There is no file {folder}/b.yaml."),
        ("a.yaml", "functions: {tensors: [add]}", "In {path}: functions has a category 'tensors', which is not known."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_answered_in_words(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, text.replace("{{", "{").replace("}}", "}"))
    with pytest.raises(RecordError, match=f"^{re.escape(said.format(path=path, folder=tmp_path))}"):
        Settings.check(config=path)


def test_files_that_cannot_be_read_are_answered_in_words(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes("keep: größe".encode("latin-1"))
    for name, said in [("folder.yaml", "cannot be read: Is a directory."), ("latin.yaml", "is not a text in UTF-8.")]:
        with pytest.raises(RecordError, match=said):
            Settings.check(config=tmp_path / name)


def test_a_list_of_functions_is_looked_for_beside_the_file_that_names_it(tmp_path: Path) -> None:
    written(tmp_path, "list.yaml", "torch: [matmul]")
    path = written(tmp_path, "a.yaml", "functions: list.yaml")
    assert Settings.check(config=path) == Settings.check(functions={"torch": ["matmul"]})


def test_merged_keys_of_yaml_are_no_repeats(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "<<: {keep: tensors, samples: 3}\nkeep: sample\n")
    assert Settings.check(config=path) == Settings.check(keep="sample", samples=3)


# -- while the program runs --------------------------------------------------------------------------------------------


def edit(path: Path, text: str) -> None:
    """Writes a file so that its time differs, however coarse the clock of the file system is."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text, "utf-8")
    os.utime(path, ns=(before + 1000, before + 1000))


def test_an_edit_is_seen_once(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "keep: stats")
    live = LiveConfig(path, {"steps": "0:3", "config": path})
    assert live.settings == Settings.check(steps="0:3")
    assert live.changed() is None
    edit(path, "keep: tensors\nsteps: 7")
    assert live.changed() == Settings.check(keep="tensors", steps="0:3")  # what was given still wins
    assert live.settings == Settings.check(keep="tensors", steps="0:3")
    assert live.changed() is None
    edit(path, "keep: tensors   # the same in other words\nsteps: 8")
    assert live.changed() is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keep: tens", "In {path}: keep='tens' is not known"),
        ("keep: [", "{path} is not valid YAML"),
        ("", "{path} says nothing now."),
        (None, "There is no file {path}."),
    ],
)
def test_a_broken_edit_is_told_once_and_changes_nothing(text: str | None, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "keep: sample")
    live = LiveConfig(path, {})
    if text is None:
        path.unlink()
    else:
        edit(path, text)
    with pytest.raises(RecordError, match=f"^{re.escape(said.format(path=path))}.* The settings stay as they were."):
        live.changed()
    assert live.settings == Settings.check(keep="sample")
    assert live.changed() is None
    edit(path, "keep: tensors")
    assert live.changed() == Settings.check(keep="tensors")
    edit(path, "keep: tens")
    with pytest.raises(RecordError):  # another version of the file, so it is told again
        live.changed()


def test_a_file_that_is_written_while_it_is_read_is_read_again_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "a.yaml", "keep: stats")
    live = LiveConfig(path, {})
    edit(path, "keep: tens")

    def load_while_written(of: Path) -> Any:
        found = load(of)
        edit(path, "keep: tensors")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(config_file, "load", load_while_written)
        assert live.changed() is None
    assert live.changed() == Settings.check(keep="tensors")


def test_a_program_may_go_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, "a.yaml", "keep: stats")
    written(tmp_path, "list.yaml", "torch: [add]")
    live = LiveConfig("a.yaml", {"functions": "list.yaml"})
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert live.changed() is None
    edit(path, "keep: tensors")
    assert live.changed() == Settings.check(keep="tensors", functions={"torch": ["add"]})


def test_an_unchanged_file_costs_one_stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveConfig(written(tmp_path, "a.yaml", "keep: stats"), {})
    looked: list[Path] = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: (looked.append(path), stat(path, **options))[1])
    monkeypatch.setattr(config_file, "load", lambda _: pytest.fail("it was read"))
    assert live.changed() is None
    assert looked == [tmp_path / "a.yaml"]


def test_a_broken_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no file"):
        LiveConfig(tmp_path / "a.yaml", {})
    with pytest.raises(RecordError, match="Did you mean 'stats'"):
        LiveConfig(written(tmp_path, "a.yaml", ""), {"keep": "stat"})


LAUGHS = "n0: &n0 [x]\n" + "".join(f"n{n}: &n{n} [{', '.join([f'*n{n - 1}'] * 10)}]\n" for n in range(1, 30))
MERGED = "n0: &n0 {x: 1}\n" + "".join(f"n{n}: &n{n} {{<<: [*n{n - 1}, *n{n - 1}]}}\n" for n in range(1, 60))


def test_references_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("keep: &a stats\nphases: *a\n")
    assert load(tmp_path / "a.yaml") == {"keep": "stats", "phases": "stats"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", LAUGHS),
        ("a.yaml", MERGED),
        ("a.yaml", "a: &a [*a]"),
        ("a.yaml", "keep: " + "[" * 5000),
        ("a.json", '{"max_bytes": ' + "9" * 6000 + "}"),
        ("a.json", "[" * 200_000),
        ("a.toml", "max_bytes = " + "9" * 6000),
    ],
)
def test_files_without_end(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecordError, match="is not valid"):
        load(tmp_path / name)


@pytest.mark.parametrize(("written", "size"), [("1GiB", 1 << 30), ("1_000", 1000), ("2e6", 2_000_000)])
def test_sizes_in_files(tmp_path: Path, written: str, size: int) -> None:
    (tmp_path / "a.yaml").write_text(f"max_bytes: {written}\n")
    assert Settings.check(config=tmp_path / "a.yaml").max_bytes == size


def test_sizes_in_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max_bytes: 2 GX\n")
    with pytest.raises(RecordError, match=r"In .*a\.yaml: max_bytes='2 GX' is not a size of at least 1 bytes"):
        Settings.check(config=tmp_path / "a.yaml")
