"""What a guard cannot do it says at once, in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import astray
from guarding.training import Net, batch, hooks_of

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"on": "x"}, "on='x' is not something a guard can do. It is 'raise', 'warn', or a function."),
    ({"on": None}, "on=None is not something a guard can do. It is 'raise', 'warn', or a function."),
    ({"remember": 0}, "remember=0 is not a whole number of at least 1."),
    ({"remember": "3"}, "remember='3' is not a whole number of at least 1."),
    (
        {"remember": 1 << 80},
        f"remember={1 << 80} is not a whole number of at least 1 and at most 4,611,686,018,427,387,904.",
    ),
    ({"max_memory": 0}, "max_memory=0 is not a size of at least 1 bytes. Write a number, '500 MB' or '2 GiB'."),
    ({"max_memory": "x"}, "max_memory='x' is not a size of at least 1 bytes. Write a number, '500 MB' or '2 GiB'."),
    ({"max_memory": [1]}, "max_memory=[1] is not a size of at least 1 bytes. Write a number, '500 MB' or '2 GiB'."),
    ({"spike": -1}, "spike=-1 is not a factor. It is a number above 1: 10 trips at ten times the usual."),
    ({"spike": "a"}, "spike='a' is not a factor. It is a number above 1: 10 trips at ten times the usual."),
    ({"spike": float("nan")}, "spike=nan is not a factor. It is a number above 1: 10 trips at ten times the usual."),
    ({"when": 3}, "when=3 cannot be called. It is a function of the rows of a step."),
    (
        {"exact": True, "on": "warn"},
        "exact=True stops the program, and on='warn' would let it go on. Leave out one of them.",
    ),
    ({"keep": "fingerprint"}, "keep='fingerprint' counts no NaN and no infinities. A guard needs keep='stats'."),
    (
        {"keep": "fingerprint", "exact": True},
        "keep='fingerprint' counts no NaN and no infinities. A guard needs keep='stats'.",
    ),
]


@pytest.mark.parametrize(("asked", "sentence"), REFUSED, ids=[str(asked) for asked, _ in REFUSED])
def test_it_is_refused(asked: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(astray.errors.RecordError) as refused:
        astray.Guard(model, path=tmp_path / "guard", **asked)
    assert str(refused.value) == sentence
    assert (hooks_of(model), list(tmp_path.iterdir())) == (0, [])


def test_a_folder_that_is_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "guard").mkdir()
    astray.Guard(Net(), path=tmp_path / "guard")  # an empty one will do
    (tmp_path / "guard" / "something").touch()
    with pytest.raises(
        astray.errors.RecordError, match=r"is there already\. Choose another path for what this guard may find"
    ):
        astray.guard(Net(), path=tmp_path / "guard")
    with pytest.raises(astray.errors.RecordError, match="is there already"):
        astray.guard(Net(), path=tmp_path / "guard" / "something")


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(astray.errors.RecordError, match="A list was given, which cannot be recorded"):
        astray.guard([nn.Linear(1, 1)], path=tmp_path / "guard")
    with pytest.raises(astray.errors.RecordError, match="'a' is a int, which cannot be recorded"):
        astray.guard({"a": 3}, path=tmp_path / "guard")


def test_a_setting_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(astray.errors.RecordError, match=r"levels='module' is not a setting\. Did you mean"):
        astray.guard(Net(), path=tmp_path / "guard", levels="module")  # type: ignore[call-arg]


@pytest.mark.parametrize("exact", [False, True])
def test_a_guard_that_saw_nothing_says_so(exact: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net(bad=[0])
    with astray.guard(model, path=tmp_path / "guard", match="no such site", exact=exact) as guard:
        model(batch(0))
    reason = "match, ignore, classes or scope leave out all there were, such as <root>, first, second"
    assert guard.unwatched == reason
    assert guard.summary == f"nothing was watched: {reason}"
    assert caplog.messages == [f"The guard has seen nothing: {reason}."]


def test_the_memory_of_a_guard_may_have_a_unit(tmp_path: Path) -> None:
    guard = astray.Guard(Net(), path=tmp_path / "guard", max_memory="1GiB")
    assert guard._max_memory == 1 << 30
