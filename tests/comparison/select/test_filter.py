"""The language of filters: what fits, and what is said of an expression that cannot be understood."""

from __future__ import annotations

import re

import numpy as np
import pytest

from astray.comparison.comparison import compare
from astray.comparison.select.filter import Filter
from astray.errors import UsageError

ONES = np.ones((2, 4), np.float32)


@pytest.fixture
def diff(runs):
    """Rows whose verdicts are known: identical, diverged by 1 and by 3, non-finite, and one in each run only."""
    sides = []
    for path, same, b, c, d, alone in (("runs/good", 1, 1, 1, 1, "e"), ("runs/bad", 1, 2, 4, np.inf, "f")):
        builder = runs.Builder(path)
        for step, (site, factor) in enumerate(zip("abcd", (same, b, c, d), strict=True)):
            call = builder.call(f"h.{site}", "Linear" if site != "c" else "GELU", step=step)
            builder.tensor(call, "output", "0", ONES * np.float32(factor), keep={"stats", "fingerprint"})
        builder.tensor(builder.call(alone, "Linear", step=9, phase="backward", recompute=True), "input", "x", ONES[0])
        sides.append(builder.run)
    return compare(*sides)


def fitting(diff, text: str) -> str:
    """The last letters of the sites that fit."""
    return "".join(sorted(site[-1] for site in diff.select(text)["site"].column))


@pytest.mark.parametrize(
    ("text", "sites"),
    [
        ("step == 1", "b"),
        ("step != 1", "acdef"),
        ("error > 0.5", "bc"),
        ("error >= 1 and error < 3", "b"),
        ("1 < error <= 3", "c"),
        ("0.5 < error", "bc"),
        ("error > limit", "bc"),
        ("not error > 0.5", "adef"),
        ("error == null", "ef"),
        ("error != null", "abcd"),
        ("limit == NaN", "adef"),
        (r"site ~ 'h\.[bc]'", "bc"),
        ("site ~ '[bc]$'", "bc"),
        ('site !~ "^h"', "ef"),
        ("site == h.b", "b"),
        ("site == 'h.b' or type == GELU", "bc"),
        ("verdict == diverged", "bc"),
        ("verdict in (non-finite, 'only in reference')", "de"),
        ("verdict in [non_finite, only_in_candidate]", "df"),
        ("verdict not in (diverged, identical)", "def"),
        ("wrong", "bcd"),
        ("agrees", "a"),
        ("not (wrong or agrees)", "ef"),
        ("recompute", "ef"),
        ("recompute == false and wrong", "bcd"),
        ("path == 0", "abcd"),
        ("path == '0' and step in (0, 3)", "ad"),
        ("phase == backward and not site == e", "f"),
        ("wrong and step < 3 or site == e", "bce"),
        ("wrong and (step > 2 or error > 2)", "cd"),
        ("shape_reference == 2x4", "abcd"),
        ("shape_reference == '2×4' and shape_candidate == '2, 4'", "abcd"),
        ("shape_candidate == 4", "f"),
        ("shape_candidate == '(2, 4)'", "abcd"),
        ("shape_candidate in (scalar, '[]')", ""),
        ("dtype_reference == dtype_candidate", "abcd"),
        ("dtype_reference != dtype_candidate", "ef"),
        ("absmax_candidate > 1.5", "bc"),
        ("inf_candidate == 8", "d"),
        ("max_reference == max_candidate", "a"),
        ("fingerprint_reference == fingerprint_candidate", "a"),
        ("error == inf", ""),
        ("error > -inf", "abcd"),
        ("row_reference == null", "f"),
    ],
)
def test_what_fits(diff, text, sites):
    assert fitting(diff, text) == sites


def test_a_fingerprint_is_written_as_in_the_reports(diff):
    seen = int(diff.columns["fingerprint_reference"].column[1])
    assert fitting(diff, f"fingerprint_reference == {seen:016x} and site == h.b") == "b"


def test_a_negation_is_always_the_opposite(diff):
    for sign, opposite in (("==", "!="), ("~", "!~")):
        for column in ("site", "reason", "dtype_reference"):
            fits, others = (diff.select(f"{column} {s} 'float32'").rows.tolist() for s in (sign, opposite))
            assert sorted(fits + others) == list(range(len(diff.pairs)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "The filter '' ends where a column, a number or a text is expected."),
        ("error >", "The filter 'error >' ends where a column, a number or a text is expected."),
        ("error = 3", "the '=' at character 7 is not understood. Write == to ask whether two things are equal."),
        ("error > 3 & wrong", "the '&' at character 11 is not understood. Write and."),
        ("site == 'a", "the quote at character 9 is never closed."),
        ("(error > 3", "ends where a closing parenthesis is expected."),
        ("error > 3 site", "there is 'site' at character 11, where and, or, or the end is expected."),
        ("step in 3", "there is '3' at character 9, where a list such as (1, 2) is expected."),
        ("step in (1, 2", "ends where a comma or ) is expected."),
        ("step in (1, 2]", "there is ']' at character 14, where a comma or ) is expected."),
        ("site ~ [bc]", "there is '[' at character 8, where a column, a number or a text is expected."),
        ("step == and", "there is 'and' at character 9"),
        ("(" * 5000 + "wrong", "is nested too deeply. Use fewer parentheses."),
    ],
)
def test_what_cannot_be_understood_is_said_without_any_run(text, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        Filter.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("eror > 3", "There is no column 'eror'. Did you mean 'error'? There are rank, step, micro, phase,"),
        ("3 < eror", "There is no column 'eror'. Did you mean 'error'?"),
        ("foo", "There is no column 'foo'. There are rank, step,"),
        ("error > limt", "error can be compared with a number or a column, not with 'limt'. Did you mean 'limit'?"),
        ("recompute == 3", "recompute can be compared with true or false or a column, not with '3'."),
        ("site > 3", "site is a column of texts, which > cannot order. Use ==, !=, ~, !~ or in (...)."),
        ("error ~ 3", "error is a column of numbers, which ~ cannot search."),
        ("site < path", "site and path are texts, which < cannot order."),
        ("site == step", "Of site and step, one holds texts and the other numbers."),
        ("'h' ~ site", "A filter has the column before the ~: site ~ '...'."),
        ("kind == modul", "There is no kind 'modul'. Did you mean 'module'?"),
        ("1 < 2", "Neither '1' nor '2' is a column. A comparison needs one."),
        ("site", "A filter compares site with something, such as site != null."),
        ("site ~ '('", "'(' is not a regular expression:"),
        (
            "verdict == divergd",
            "There is no verdict 'divergd'. Did you mean 'diverged'? There are identical, rounding,",
        ),
        ("phase == 'sideways'", "There is no phase 'sideways'. There are forward, backward, update."),
    ],
)
def test_what_does_not_suit_the_columns_is_said(diff, text, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        diff.select(text)


def test_nothing_is_ever_executed(diff):
    for text in ("__import__('os')", "error.__class__ == 1", "site == `ls`", "[].append(1)", "error > 1; wrong"):
        with pytest.raises(UsageError):
            diff.select(text)
