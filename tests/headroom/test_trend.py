"""What is called steady growth, and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from astray.headroom.measures import Growth, growth, student


def of(*series: np.ndarray) -> Growth:
    """The growth of some series of equal length, one value per step."""
    owner = np.repeat(np.arange(len(series)), [len(one) for one in series])
    steps = np.concatenate([np.arange(len(one)) for one in series])
    return growth(owner, steps, np.concatenate(series), len(series))


def test_the_rate_and_its_interval_are_those_of_least_squares() -> None:
    random = np.random.default_rng(3)
    steps = np.arange(40)
    y = 0.2 * steps + random.normal(size=40) * 0.3
    found = of(y)
    slope, intercept = np.polyfit(steps, y, 1)
    residual = y - slope * steps - intercept
    alike = max(0.0, (residual[1:] @ residual[:-1]) / (residual @ residual))
    free = 40 * (1 - alike) / (1 + alike) - 2
    error = np.sqrt(residual @ residual / free / ((steps - steps.mean()) ** 2).sum()) * student(np.array([free]))[0]
    assert found.rate[0] == pytest.approx(slope, rel=1e-9)
    assert (found.low[0], found.high[0]) == pytest.approx((slope - error, slope + error), rel=1e-9)
    assert (found.steps[0], found.span[0]) == (40, 39)


def test_the_quantile_is_that_of_the_tables() -> None:
    free, tabled = np.array([3, 4, 5, 10, 30, 120.0]), np.array([5.841, 4.604, 4.032, 3.169, 2.750, 2.617])
    assert student(free) == pytest.approx(tabled, rel=0.04)
    assert student(free)[3:] == pytest.approx(tabled[3:], rel=1e-3)


def test_a_perfect_line_has_no_interval() -> None:
    found = of(np.arange(8.0))
    assert (found.rate[0], found.low[0], found.high[0]) == pytest.approx((1, 1, 1))


@pytest.mark.parametrize(
    "series",
    [
        np.arange(5.0),  # too few
        np.zeros(20),
        -np.arange(20.0),
        0.01 * np.arange(20),  # a fifth of a bit in all
        np.minimum(np.arange(20.0), 6),  # it has stopped
        np.append(np.zeros(19), 9.0),  # one spike
        np.tile([0.0, 5.0], 10),
    ],
)
def test_what_does_not_grow_steadily_has_no_rate(series: np.ndarray) -> None:
    found = of(series)
    assert np.isnan([found.rate[0], found.low[0], found.high[0]]).all()


def test_noise_and_random_walks_are_seldom_taken_for_growth() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(size=(2000, 30))
    assert np.mean(~np.isnan(of(*noise).rate)) < 0.01
    assert np.mean(~np.isnan(of(*noise.cumsum(axis=1)).rate)) < 0.12  # the textbook's interval would say 0.4
    assert np.mean(~np.isnan(of(*(noise * 0.3 + 0.3 * np.arange(30))).rate)) > 0.99


def test_points_in_any_order_the_largest_of_a_step_and_gaps() -> None:
    steps = np.array([0, 0, 10, 20, 30, 40, 50, 60, 70, 70])
    values = np.array([0, -9, 1, 2, 3, 4, 5, 6, 7, -np.inf])
    order = np.random.default_rng(1).permutation(10)
    found = growth(np.ones(10, np.int64), steps[order], values[order].astype(float), 3)
    assert found.rate[1] == pytest.approx(0.1)
    assert (found.steps.tolist(), found.span.tolist()) == ([0, 8, 0], [0, 70, 0])
    assert np.isnan(found.rate[[0, 2]]).all()


def test_nothing_at_all() -> None:
    empty = np.zeros(0, np.int64)
    assert np.isnan(growth(empty, empty, np.zeros(0), 2).rate).all()
