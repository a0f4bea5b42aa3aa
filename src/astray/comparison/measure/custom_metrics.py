"""Metrics that are computed only when asked for by name: a few built-in ones, and the user's own.

Each is a function of two float64 arrays of one shape, the values of reference and candidate, and gives a number; NaN
means that it does not apply to this pair. They are for pairs whose values both runs kept, and become columns of
`pairs`. They play no part in a verdict. One that fails for a pair leaves NaN there, and the report says how often and
why.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.errors import CompareError
from astray.stats import dtypes
from astray.wording import did_you_mean

Array = npt.NDArray[np.float64]
Metric = Callable[[Array, Array], float]

GROUP = "astray.metrics"
"""The entry points of packages that bring metrics of their own."""


def kl(reference: Array, candidate: Array) -> float:
    """The mean over all rows of Σ r·ln(r/c): how far the candidate's distributions are from the reference's.

    NaN unless both are softmax-like: nothing negative, and every row (the last axis) adds up to 1 within a hundredth.
    """
    if not reference.ndim or not reference.size:
        return math.nan
    for side in (reference, candidate):
        if not (np.isfinite(side).all() and (side >= 0).all() and (np.abs(side.sum(-1) - 1) < 0.01).all()):
            return math.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(reference > 0, reference * (np.log(reference) - np.log(candidate)), 0.0)
    return float(terms.sum(-1).mean())


def mean_abs(reference: Array, candidate: Array) -> float:
    """mean |c − r|, over the elements that are finite on both sides."""
    both = np.isfinite(reference) & np.isfinite(candidate)
    return float(np.abs(candidate[both] - reference[both]).mean()) if both.any() else math.nan


OURS: dict[str, Metric] = {"kl": kl, "mean_abs": mean_abs}


Failures = Counter[tuple[str, str]]
"""How often each metric failed, and with what."""


class CustomMetrics:
    """The metrics that were asked for, by name, and what went wrong with them."""

    def __init__(self, metrics: dict[str, Metric]) -> None:
        self._metrics = metrics
        self.failures: Failures = Counter()

    def anew(self) -> CustomMetrics:
        """The same metrics, of which none has failed yet."""
        return CustomMetrics(self._metrics)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._metrics)

    def __call__(self, reference: npt.NDArray[Any], candidate: npt.NDArray[Any], kinds: tuple[str, str]) -> list[float]:
        """What each metric gives for two arrays of raw elements of these dtypes."""
        if not self._metrics:
            return []
        sides = [dtypes.widen(side, kind) for side, kind in zip((reference, candidate), kinds, strict=True)]
        return [self._measure(name, *sides) for name in self._metrics]

    def _measure(self, name: str, reference: Array, candidate: Array) -> float:
        try:
            return float(self._metrics[name](reference.copy(), candidate.copy()))
        except Exception as error:  # noqa: BLE001 - the user's code may fail in any way, and the rest is wanted
            self.failures[name, f"{type(error).__name__}: {error}"] += 1
            return math.nan


def failed(failures: Failures) -> list[str]:
    """What went wrong, a sentence each."""
    return [f"The metric {name} failed for {count:,} pairs: {why}" for (name, why), count in failures.items()]


def find_metrics(wanted: Sequence[str | Metric] | None, taken: Sequence[str]) -> CustomMetrics:
    """Metrics by name, as `package.module:function`, as `file.py:function`, or functions themselves.

    `taken` are the names of columns that exist already. Raises CompareError for what cannot be found.
    """
    metrics: dict[str, Metric] = {}
    for choice in wanted or ():
        name, metric = (getattr(choice, "__name__", "metric"), choice) if callable(choice) else _named(choice)
        if name in taken or name in metrics:
            raise CompareError(f"There is a column {name!r} already: give the metric another name.")
        if not name.isidentifier():
            raise CompareError(f"A metric called {name!r} cannot be a column: give it a name of letters and digits.")
        metrics[name] = metric
    return CustomMetrics(metrics)


def _named(text: str) -> tuple[str, Metric]:
    place, colon, name = text.rpartition(":")
    if not colon:
        return text, _known(text)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    metric = getattr(module, name, None)
    if not callable(metric):
        raise CompareError(f"{place} has no function {name!r} to use as a metric.")
    return name, metric


def _known(name: str) -> Metric:
    if name in OURS:
        return OURS[name]
    brought = {point.name: point for point in entry_points(group=GROUP)}
    if name not in brought:
        known = sorted({*OURS, *brought})
        raise CompareError(
            f"There is no metric {name!r}; there are {', '.join(known)}.{did_you_mean(name, known)} One of your own is "
            "named by its file and function: metrics.py:psnr"
        )
    metric: Metric = brought[name].load()
    return metric


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise CompareError(f"There is no file {path} to take a metric from.")
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def load() -> ModuleType:
        loader.exec_module(module)
        return module

    return _loaded(str(path), load)


def _from_package(name: str) -> ModuleType:
    return _loaded(name, lambda: importlib.import_module(name))


def _loaded(name: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except Exception as error:
        raise CompareError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
