"""The gains of siblings: of the others, of those before, and of what noise runs showed."""

from __future__ import annotations

import numpy as np
import pytest

from astray.comparison.judge.siblings import Families, Gains, largest_of_family, rms_of_family, running_maximum


def plain_others(gain: np.ndarray, family: np.ndarray, site: np.ndarray) -> tuple[list[float], list[int]]:
    """One row after another."""
    largest, count = [], []
    for row in range(len(gain)):
        others = (family == family[row]) & (site != site[row])
        largest.append(float(gain[others].max(initial=0.0)))
        count.append(len(np.unique(site[others])))
    return largest, count


def plain_before(gain: np.ndarray, family: np.ndarray, site: np.ndarray) -> tuple[list[float], list[int]]:
    """The sites of the family whose first row stands before the first row of one's own."""
    largest, count = [], []
    for row in range(len(gain)):
        begins = {
            one: int(np.flatnonzero((site == one) & (family == family[row]))[0]) for one in site[family == family[row]]
        }
        before = [one for one, first in begins.items() if first < begins[site[row]]]
        largest.append(float(gain[(family == family[row]) & np.isin(site, before)].max(initial=0.0)))
        count.append(len(before))
    return largest, count


@pytest.mark.parametrize("seed", range(20))
def test_as_if_one_row_were_looked_at_after_another(seed: int) -> None:
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 60))
    gain = random.integers(0, 6, length).astype(np.float64)  # with ties
    family, site = random.integers(0, 4, length), random.integers(0, 8, length)
    families = Families(family, site)
    others, before = families.others(gain), families.before(gain)
    assert (others.largest.tolist(), others.sites.tolist()) == plain_others(gain, family, site)
    assert (before.largest.tolist(), before.sites.tolist()) == plain_before(gain, family, site)


def test_a_row_does_not_speak_for_its_own_site() -> None:
    """Two calls of one module are not siblings: what is wrong with it is wrong with both."""
    gain, site = np.array([9.0, 8.0, 1.0, 2.0]), np.array([0, 0, 1, 2])
    others = Families(np.zeros(4, int), site).others(gain)
    assert others.largest.tolist() == [2, 2, 9, 9]
    assert others.sites.tolist() == [2, 2, 2, 2]


def test_two_sites_with_the_same_largest_gain_speak_for_each_other() -> None:
    others = Families(np.zeros(3, int), np.arange(3)).others(np.array([5.0, 5.0, 1.0]))
    assert others.largest.tolist() == [5, 5, 5]


def test_what_comes_later_has_no_part_in_what_was_before() -> None:
    before = Families(np.zeros(4, int), np.arange(4)).before(np.array([1.0, 2.0, 100.0, 3.0]))
    assert before.largest.tolist() == [0, 1, 2, 100]
    assert before.sites.tolist() == [0, 1, 2, 3]


def test_a_site_stands_where_its_first_row_does() -> None:
    before = Families(np.zeros(4, int), np.array([7, 3, 7, 3])).before(np.array([1.0, 2.0, 5.0, 4.0]))
    assert before.largest.tolist() == [0, 5, 0, 5]


def test_nothing_at_all() -> None:
    families = Families(np.zeros(0, int), np.zeros(0, int))
    assert len(families.others(np.zeros(0)).largest) == len(families.before(np.zeros(0)).largest) == 0


def test_a_running_maximum_begins_anew_with_each_group() -> None:
    numbers, group = np.array([3.0, 1.0, 5.0, 0.0, 2.0, 1.0]), np.array([0, 0, 0, 1, 1, 1])
    begins = np.array([True, False, False, True, False, False])
    assert running_maximum(numbers, group, begins).tolist() == [0, 3, 3, 0, 0, 2]


def test_the_largest_of_a_family_is_everybodys() -> None:
    assert largest_of_family(np.array([1.0, 5.0, 2.0]), np.array([0, 0, 7])).tolist() == [5, 5, 2]


def test_the_size_of_a_family_is_its_root_mean_square() -> None:
    assert rms_of_family(np.array([1.0, 7.0, 2.0]), np.array([0, 0, 7])).tolist() == [5, 5, 2]


def test_a_noise_run_is_asked_by_row_of_the_reference() -> None:
    by_row, ever = {"norm": np.array([1.0, np.nan, 3.0])}, {"norm": np.array([5.0, np.nan, 7.0])}
    gains = Gains(by_row, ever, rows=np.array([2, 0, -1, 1]))
    found = gains.of("norm", np.array([0, 1, 2, 3]), alone=np.array([False, True, False, False]))
    assert found[:2].tolist() == [3, 5]
    assert np.isnan(found[2:]).all()
