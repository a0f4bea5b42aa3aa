"""What stands in a comparer's YAML file: what to compare, by which metrics, and what is too little to be shown.

`METRICS` has hooktools' names for what `astray.compare` measures, and the two numbers that it measures only when asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.custom_metrics import mean_abs
from astray.errors import CompareError
from astray.foreign.hooktools.config_keys import (
    ALL,
    Given,
    Keys,
    NumberRange,
    count,
    number,
    one_of,
    similarity,
    text,
    texts,
    truth,
)
from astray.foreign.hooktools.layout import PHASES
from astray.store import Table

Floats = npt.NDArray[np.float64]

DIRECTORY, FILE, FILE_LIST = 0, 1, 2
SWITCHES = ("verbose", "skip_nn_module", "skip_non_nn_module")
"""Words that may stand among the metrics."""

WITHOUT_EFFECT = (
    "log_dir", "comparer_name", "compare_nn_module", "compare_non_nn_module", "compare_both_file", "register_signal",
    "registersi_signal", "show_max_error_only",
)  # fmt: skip
"""Keys that people have in their files, and that change nothing here; docs/coming-from/hooktools.md says why."""


@dataclass(frozen=True)
class ComparerConfig:
    """What stands in a comparer's YAML file, checked."""

    mode: int
    first: tuple[str, ...]
    second: tuple[str, ...]
    phases: tuple[str, ...]
    epochs: NumberRange
    steps: NumberRange
    parts: tuple[str, ...]
    metrics: tuple[str, ...]
    filters: Mapping[str, float]
    skip_modules: bool
    skip_functions: bool
    by_order: bool
    top: int
    verbose: bool

    @classmethod
    def read(cls, config: Given) -> ComparerConfig:
        """From a file or a dict. A CompareError says what is wrong, and what would be right."""
        keys = Keys.of(config, CompareError)
        mode = keys.take("compare_mode", one_of(DIRECTORY, FILE, FILE_LIST), DIRECTORY)
        keys.take("file_type", one_of("pt"), "pt")
        for name in WITHOUT_EFFECT:
            keys.take(name, lambda value: value, None)
        rooms = [keys.inside(f"compare_{kind}_options") for kind in ("directory", "file", "filelist")]
        words = ("directory", "file", "filelist")
        sides = [
            [room.take(f"compared_{word}_{side}", _paths, ()) for side in (1, 2)]
            for room, word in zip(rooms, words, strict=True)
        ]
        if not all(sides[mode]):
            raise CompareError(
                f"There is nothing to compare: compare_{words[mode]}_options needs compared_{words[mode]}_1 and "
                f"compared_{words[mode]}_2."
            )
        asked = keys.take("evaluation_metrics", _metrics, {})
        room = rooms[mode]

        def flag(name: str) -> bool:
            either = keys.take(name, truth, False), room.take(name, truth, False)
            return any(either) or name in asked

        only_input, only_output = flag("only_compare_input"), flag("only_compare_output")
        folders = (keys.take("compare_folder_name", _phases, ()), room.take("compare_folder_name", _phases, ()))
        found = cls(
            mode=mode,
            first=sides[mode][0],
            second=sides[mode][1],
            phases=folders[0] or folders[1] or PHASES,
            epochs=keys.take("compare_epochs", NumberRange.parse, room.take("compare_epochs", NumberRange.parse, ALL)),
            steps=keys.take("compare_steps", NumberRange.parse, room.take("compare_steps", NumberRange.parse, ALL)),
            parts=("input", "kwargs") if only_input else ("output",) if only_output else (),
            metrics=tuple(name for name in asked if name in METRICS) or ("L1",),
            filters=_filters(keys.inside("filter"), asked),
            skip_modules=flag("skip_nn_module"),
            skip_functions=flag("skip_non_nn_module"),
            by_order=flag("compare_by_order"),
            top=keys.take("top_k", count, 10, "topk"),
            verbose=flag("verbose"),
        )
        for part in (*rooms, keys):
            part.done()
        return found


def _paths(value: Any) -> tuple[str, ...]:
    return texts(value) if isinstance(value, list | tuple) else (text(value),)


def _phases(value: Any) -> tuple[str, ...]:
    return tuple(one_of(*PHASES)(name) for name in texts(value))


def _metrics(value: Any) -> dict[str, float | None]:
    """The metrics and switches that were asked for, with their thresholds where these stand beside them."""
    given = value if isinstance(value, Mapping) else dict.fromkeys(texts(value))
    found: dict[str, float | None] = {}
    for name, threshold in given.items():
        one_of(*METRICS, *SWITCHES)(name)
        check = similarity if name == "CS" else number
        found[str(name)] = check(threshold) if threshold is not None and name in METRICS else None
    return found


def _filters(keys: Keys, asked: Mapping[str, float | None]) -> dict[str, float]:
    """The largest error of each metric that is not shown. That of a similarity is how far it may be from 1."""
    found: dict[str, float] = {}
    everywhere = keys.take("global_filter", number, None)
    if everywhere is not None:
        found["global"] = everywhere
    for name in METRICS:
        beside = asked.get(name)
        threshold = keys.take(f"{name}_filter", similarity if name == "CS" else number, beside)
        if threshold is not None:
            found[name] = 1.0 - threshold if name == "CS" else threshold
    keys.done()
    return found


def mean_abs_share(reference: Floats, candidate: Floats) -> float:
    """mean |a − b| / mean |a|. 0 when both are zero everywhere, ∞ when only a is.

    a is the reference, b the candidate, in float64, where both are finite.
    """
    both = np.isfinite(reference) & np.isfinite(candidate)
    size = float(np.abs(reference[both]).mean()) if both.any() else math.nan
    error = mean_abs(reference, candidate)
    return error / size if size else error * math.inf if error else error


class Metric(NamedTuple):
    """One metric. `column` is of a comparison's pairs; `own` computes it where there is no such column.

    value: what is shown, of that column. error: of what is shown, how bad it is; 0 is right.
    """

    column: str
    own: Callable[[Floats, Floats], float] | None = None
    value: Callable[[Floats], Floats] = lambda column: column
    error: Callable[[Floats], Floats] = lambda value: value
    right: float = 0.0


METRICS: dict[str, dict[str, Metric]] = {
    "L1": {"l1_error": Metric("mean_abs", mean_abs), "rel_error": Metric("mean_abs_share", mean_abs_share)},
    "AE": {"AE": Metric("max_abs")},
    "MAE": {"MAE": Metric("mean_abs", mean_abs)},
    "MSE": {"MSE": Metric("rmse", value=np.square)},
    "RMSE": {"RMSE": Metric("rmse")},
    "MAPE": {"MAPE": Metric("mape", value=lambda share: 100.0 * share)},
    "CS": {"CS": Metric("cosine", error=lambda cosine: 1.0 - cosine, right=1.0)},
}
"""By hooktools' names, the numbers of each metric by theirs."""


def own(names: tuple[str, ...]) -> list[Callable[[Floats, Floats], float]]:
    """What a comparison has to be asked for besides, to have these metrics."""
    found = {one.column: one.own for name in names for one in METRICS[name].values() if one.own is not None}
    return list(found.values())


def column(metric: Metric, pairs: Table) -> Floats:
    """What is shown of every pair. Of pairs with the same bits nothing was measured: they are right.

    NaN where NaN or infinity stands on one side only: a number over the other elements would look like agreement.
    """
    verdicts = pairs.coded("verdict")
    same = np.array([*(label == "identical" for label in verdicts.values), False], np.bool_)[verdicts.codes]
    odd = pairs.numbers("nonfinite_mismatch") > 0
    return np.where(same, metric.right, np.where(odd, np.nan, metric.value(pairs.numbers(metric.column))))
