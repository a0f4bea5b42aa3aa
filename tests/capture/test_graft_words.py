"""What grafts are told in words, and what a run says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from astray.capture.graft_words import Graft, GraftNote, graft_notes, site_matches, with_absolute_run
from astray.capture.settings import Settings, with_absolute_paths
from astray.errors import RecordError, UsageError
from astray.records import Setup

SINGLE = ("inputs", "parameters")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/a", Graft("runs/a", "", None, SINGLE)),
        ("runs/a:h.2.mlp", Graft("runs/a", "h.2.mlp", None, ("outputs",))),
        ("runs/a:h.2.mlp#3", Graft("runs/a", "h.2.mlp", 3, ("outputs",))),
        ("runs/a:/log_softmax@inputs", Graft("runs/a", "/log_softmax", None, ("inputs",))),
        ("runs/a:h.2@gradients, inputs", Graft("runs/a", "h.2", None, ("inputs", "gradients"))),
        (r"runs/a:h\.(?:1|2)\..*/softmax", Graft("runs/a", r"h\.(?:1|2)\..*/softmax", None, ("outputs",))),
        (r"C:\runs\a:h.2", Graft(r"C:\runs\a", "h.2", None, ("outputs",))),
        (r"C:\runs\a", Graft(r"C:\runs\a", "", None, SINGLE)),
    ],
)
def test_a_text_has_parts(text: str, expected: Graft) -> None:
    assert Graft.read(text) == expected


def test_a_run_may_have_colons_in_its_name(tmp_path: Path) -> None:
    run = tmp_path / "at 12:30"
    run.mkdir()
    assert Graft.read(str(run)) == Graft(str(run), "", None, SINGLE)
    assert Graft.read(f"{run}:(?:h|g).2#1") == Graft(str(run), "(?:h|g).2", 1, ("outputs",))
    assert str(Graft.read(f"{run}:h.2#1")) == f"{run}:h.2#1@outputs"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (":h.2", "names no run"),
        ("runs/a:", "names no site"),
        ("runs/a:@inputs", "names no site"),
        ("runs/a:h.2@input", r"'input' cannot be grafted\..*Did you mean 'inputs'\?"),
        ("runs/a:h.(2", r"h\.\(2 is not a regular expression"),
    ],
)
def test_a_wrong_text_is_answered(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Graft.read(text)
    with pytest.raises(RecordError, match=says):
        Settings.check(graft=text)


def test_settings_have_absolute_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = (f"{tmp_path}/runs/a:h.2@inputs", f"{tmp_path}/runs/b")
    settings = Settings.check(graft=["runs/a:h.2@inputs", "runs/b"])
    assert settings.graft == texts == with_absolute_paths({"graft": ["runs/a:h.2@inputs", "runs/b"]})["graft"]
    assert Settings.check(**settings.as_dict()) == settings
    assert with_absolute_run(texts[0]) == texts[0]
    with pytest.raises(RecordError, match="neither a graft"):
        Settings.check(graft=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "site", "fits"),
    [
        (r"h\..*\.attn", "h.2.attn", True),
        (r"h\..*\.attn", "h.2.attn.proj", False),
        (r"h\..*", "h.2.attn/softmax", False),
        (r"h\..*/soft.*", "h.2.attn/softmax", True),
        ("/softmax", "/softmax", True),
        ("/softmax", "h.2.attn/softmax", False),
        ("h.2.attn/aten.mm", "h.2.attn/aten.mm", True),
    ],
)
def test_a_pattern_fits_whole_sites(pattern: str, site: str, fits: bool) -> None:
    assert site_matches(pattern, site) is fits


def test_notes_are_read_back() -> None:
    setup = [
        Setup(0, "torch", "", {"from": "no"}),
        Setup(0, "graft", "h.2@outputs", {"from": "/runs/a"}),
        Setup(0, "graft", "every call", {"from": "/runs/b"}),
        Setup(3, "graft", "h.2@outputs", {"tensors": 4, "differed": 3, "unreached": 1}),
    ]
    assert graft_notes(setup) == [
        GraftNote("h.2@outputs", "/runs/a", 4, 3, 1),
        GraftNote("every call", "/runs/b", 0, 0, 0),
    ]
