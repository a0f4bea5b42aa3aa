"""Statistics of other tools: without a std, without counts, summed in the tensor's own precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray.comparison.measure import metrics
from astray.foreign.dump_rows import DumpRank, DumpRows
from astray.records import Statistics
from astray.store import RunData, RunInfo

OURS = Statistics(-1.0, 2.0, 0.5, 1.0, math.sqrt(1.25 * 64), 2.0, 3, 0, 0, 64)
THEIRS = OURS._replace(std=None, zeros=-1, nan=-1, inf=-1)


def run(
    statistics: Statistics | None, *, prints: str = "astray", fingerprint: int | None = None, dtype: str = "float32"
) -> RunData:
    """A run of one call, whose output this is."""
    rows = DumpRows()
    seq = rows.call("layer", "Linear")
    rows.tensor(seq, "output", "out", dtype, (8, 8), statistics=statistics, fingerprint=fingerprint)
    rank = DumpRank(0, rows.source())
    rank.fingerprints = prints
    return RunData(Path("run"), RunInfo(astray="", created=""), {0: rank})


def verdict(reference: RunData, candidate: RunData) -> tuple[str, float]:
    pairs = astray.compare(reference, candidate).pairs
    return pairs.row(0)["verdict"], pairs.row(0)["error"]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "identical"),
        ({"mean": None, "l2": None}, "identical"),  # msprobe has neither of integers
        ({"mean": 0.5 * (1 + 2e-7), "l2": OURS.l2 * (1 - 2e-7)}, "rounding"),  # summed in float32
        ({"max": 2.002}, "diverged"),
        ({"l2": OURS.l2 * 1.001}, "diverged"),
        ({"mean": 0.501}, "diverged"),
        ({"max": None, "mean": None, "l2": None, "absmax": None}, "non-finite"),
        ({"min": None, "max": None, "mean": None, "l2": None, "absmax": None}, "non-finite"),
    ],
)  # fmt: skip
def test_what_is_not_told_is_not_a_difference(changed: dict[str, Any], expected: str, turned: bool) -> None:
    sides = run(OURS), run(THEIRS._replace(**changed))
    assert verdict(*(reversed(sides) if turned else sides))[0] == expected


def test_both_sides_may_tell_little() -> None:
    assert verdict(run(THEIRS), run(THEIRS)) == ("identical", 0.0)
    infinite = THEIRS._replace(max=None, mean=None, l2=None, absmax=None)
    assert verdict(run(infinite), run(infinite))[0] == "identical"
    assert verdict(run(infinite), run(THEIRS))[0] == "non-finite"


def test_a_count_on_one_side_agrees_with_an_extreme_that_is_not_there() -> None:
    counted = OURS._replace(inf=2, first_bad=0, first_bad_value=math.inf)
    infinite = THEIRS._replace(max=None, mean=None, l2=None, absmax=None)
    assert verdict(run(counted), run(infinite))[0] in ("identical", "rounding")


def test_whole_numbers_must_be_equal_where_they_are_told() -> None:
    bare = THEIRS._replace(mean=None, l2=None)
    assert verdict(run(OURS, dtype="int64"), run(bare, dtype="int64"))[0] == "identical"
    assert verdict(run(OURS, dtype="int64"), run(bare._replace(max=3.0), dtype="int64"))[0] == "diverged"


def test_a_mean_is_bounded_without_a_std() -> None:
    columns = {name: np.array([getattr(OURS, name)], np.float64) for name in (*Statistics._fields[:6], "nan", "inf")}
    without = columns | {"std": np.array([math.nan])}
    other = without | {"mean": np.array([0.6])}
    found = metrics.bounds(without, other, np.array([64]))
    assert found["bound_mean"][0] == pytest.approx(0.1 / math.sqrt(1.25))
    assert math.isnan(found["bound_std"][0])


def test_the_slack_for_sums_grows_with_the_tensor_and_is_not_ours() -> None:
    eps = np.array([2.0**-24])
    ours = {"nan": np.array([0.0])}
    theirs = {"nan": np.array([-1.0])}
    assert metrics.summing_slack(ours, ours, eps, np.array([1 << 24]))[0] == 0.0
    for count, seen in ((1 << 24, 6.5e-4), (1 << 26, 5e-3)):  # errors of torch's norm in float32, on a CPU
        assert seen < metrics.summing_slack(ours, theirs, eps, np.array([count]))[0] < 0.1


def test_checksums_of_other_tools_are_compared_among_themselves() -> None:
    assert verdict(run(None, fingerprint=7), run(None, fingerprint=7))[0] == "identical"
    assert verdict(run(OURS, fingerprint=7), run(OURS, fingerprint=8))[0] != "identical"
    ours, theirs = run(OURS, fingerprint=7), run(THEIRS, fingerprint=8, prints="msprobe crc32")
    assert verdict(ours, theirs)[0] == "identical"  # by statistics: 7 and 8 are not alike
    other = run(THEIRS._replace(max=9.0, absmax=9.0), fingerprint=7, prints="msprobe crc32")
    assert verdict(run(OURS, fingerprint=7), other)[0] == "diverged"
    with pytest.raises(astray.errors.CompareError, match="nothing"):
        astray.compare(run(None, fingerprint=7), run(None, fingerprint=7, prints="msprobe crc32"))
