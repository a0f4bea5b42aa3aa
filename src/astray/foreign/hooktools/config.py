"""The YAML files of hooktools: how their keys are checked, and what the file of a `Comparer` says.

`Keys` takes the keys of a file one by one, and raises an error for each that is wrong or not known; `tracer.py` reads
its own file with it. `METRICS` maps hooktools' metrics to the columns of a comparison, with the two numbers that
`astray.compare` measures only on request.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from astray.capture.config_file import load
from astray.comparison.measure.custom_metrics import mean_abs
from astray.errors import AstrayError, CompareError
from astray.foreign.hooktools.files import PHASES
from astray.store import Table
from astray.wording import did_you_mean

Given = str | os.PathLike[str] | Mapping[str, Any]
"""A configuration: the path of a YAML file, or a dict with its content."""

T = TypeVar("T")
D = TypeVar("D")


class Keys:
    """Takes the keys of a mapping. `error` is the class of errors, `where` the beginning of their sentences.

    >>> keys = Keys({"trace_mode": 7}, "tracer_demo.yaml: ", RecordError)
    >>> keys.take("trace_mode", one_of(0, 1, 2, 3), 0)
    RecordError: tracer_demo.yaml: trace_mode is 7; it can be 0, 1, 2, 3.
    """

    def __init__(self, given: Any, where: str, error: type[AstrayError], name: str = "") -> None:
        self._where, self._error, self._name = where, error, name
        if not isinstance(given, Mapping | None):
            raise error(f"{where}{name or 'The configuration'} is {given!r}. It should have keys with values.")
        self._remaining = {str(key): value for key, value in (given or {}).items()}
        self._known: list[str] = []

    @classmethod
    def of(cls, config: Given, error: type[AstrayError]) -> Keys:
        """The keys of a file, or of a dict."""
        if isinstance(config, Mapping):
            return cls(config, "", error)
        try:
            content = load(config)
        except AstrayError as problem:
            raise error(str(problem)) from None
        return cls(content, f"{config}: ", error)

    def take(self, name: str, check: Callable[[Any], T], default: D, *spellings: str) -> T | D:
        """The value of a key, under any of its spellings. A key without a value counts as missing."""
        self._known += [name, *spellings]
        values = {key: self._remaining.pop(key) for key in (name, *spellings) if key in self._remaining}
        if len(values) > 1:
            raise self._error(f"{self._where}{' and '.join(values)} are the same key. Leave out one.")
        for key, value in values.items():
            if value is not None:
                try:
                    return check(value)
                except ValueError as error:
                    raise self._error(f"{self._where}{self._name}{key} is {value!r}; {error}.") from None
        return default

    def section(self, name: str, *spellings: str) -> Keys:
        """The keys of the mapping under a key."""
        value = self.take(name, lambda given: given, None, *spellings)
        return Keys(value, self._where, self._error, f"{self._name}{name}.")

    def done(self) -> None:
        """Raise an error if there are keys left, which are not known."""
        for key in self._remaining:
            known = did_you_mean(key, self._known) or f" There are {', '.join(self._known)}."
            raise self._error(f"{self._where}There is no key {self._name}{key}.{known}")


def one_of(*values: Any) -> Callable[[Any], Any]:
    """Checks for one of these."""

    def check(value: Any) -> Any:
        for allowed in values:
            if type(allowed) is type(value) and allowed == value:
                return allowed
        raise ValueError(f"it can be {', '.join(map(str, values))}")

    return check


def text(value: Any) -> str:
    """Checks for a text."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError("it should be a text")
    return os.fspath(value)


def folder_name(value: Any) -> str:
    """Checks for a text that can be the name of a folder."""
    name = text(value)
    if re.search(r"[/\\\0]", name) or name in (".", ".."):
        raise ValueError("it becomes the name of a folder, and cannot lead into another")
    return name


def texts(value: Any) -> tuple[str, ...]:
    """Checks for a text or a list of them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise ValueError("it should be a list of texts")
    return tuple(items)


def expressions(value: Any) -> tuple[str, ...]:
    """Checks for regular expressions."""
    patterns = texts(value)
    try:
        for pattern in patterns:
            re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{error.pattern!r} is not a regular expression: {error}") from None
    return patterns


def truth(value: Any) -> bool:
    """Checks for true or false, also as 1 or 0."""
    if not isinstance(value, bool) and value not in (0, 1):
        raise ValueError("it should be true or false")
    return bool(value)


def count(value: Any) -> int:
    """Checks for a whole number from 1 on."""
    if type(value) is not int or value < 1:
        raise ValueError("it should be a whole number from 1 on")
    return value


def number(value: Any) -> float:
    """Checks for a number, also one that a YAML parser took for a text, as most do with 1e-5."""
    try:
        parsed = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except ValueError:
        parsed = None
    if parsed is None:
        raise ValueError("it should be a number, such as 1e-5")
    return parsed


def similarity(value: Any) -> float:
    """Checks for a possible value of a cosine similarity."""
    cosine = number(value)
    if cosine > 1:
        raise ValueError("a similarity is no larger than 1")
    return cosine


class NumberRange:
    """A selection of epochs or steps by number.

    >>> 7 in NumberRange.parse("[0,8)"), 8 in NumberRange.parse("[0,8)"), 2 in NumberRange.parse("[1,3]")
    (True, False, False)
    """

    def __init__(self, numbers: frozenset[int] | range | None, given: object) -> None:
        self._numbers, self._given = numbers, given

    @classmethod
    def parse(cls, value: Any) -> NumberRange:
        """One number, −1 for all, "[0,8)" for 0 to 7, or a list, [1, 3] or "[1,3]", which is never a range."""
        if isinstance(value, str):
            return cls._of_text(value)
        numbers = [value] if isinstance(value, int) else value
        if not isinstance(numbers, Sequence) or not all(type(item) is int for item in numbers):
            raise ValueError("write one number, -1 for all, a list such as [1, 3], or '[0,8)' for 0 to 7")
        return cls(frozenset(numbers) if list(numbers) not in ([-1], []) else None, value)

    @classmethod
    def _of_text(cls, value: str) -> NumberRange:
        half_open = re.fullmatch(r"\s*([\[(])\s*(-?\d{1,12})\s*,\s*(-?\d{1,12})\s*([\])])\s*", value)
        if half_open and (half_open[1], half_open[4]) != ("[", "]"):
            first = int(half_open[2]) + (half_open[1] == "(")
            return cls(range(first, int(half_open[3]) + (half_open[4] == "]")), value)
        listed = re.fullmatch(r"\s*\[?((?:\s*-?\d{1,12}\s*,?)*)\]?\s*", value)
        return cls.parse([int(digits) for digits in re.findall(r"-?\d+", listed[1])] if listed else None)

    def __contains__(self, number: int) -> bool:
        return self._numbers is None or number in self._numbers

    def __str__(self) -> str:
        return "all" if self._numbers is None else str(self._given)


ALL = NumberRange(None, -1)


# -- the file of a Comparer --------------------------------------------------------------------------------------------

Floats = npt.NDArray[np.float64]

DIRECTORY, FILE, FILE_LIST = 0, 1, 2
SWITCHES = ("verbose", "skip_nn_module", "skip_non_nn_module")
"""Options that may be listed among the metrics."""

WITHOUT_EFFECT = (
    "log_dir", "comparer_name", "compare_nn_module", "compare_non_nn_module", "compare_both_file", "register_signal",
    "registersi_signal", "show_max_error_only",
)  # fmt: skip
"""Keys of existing files that have no effect; docs/coming-from/hooktools.md says why."""


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
        """From a file or a dict. Raises CompareError."""
        keys = Keys.of(config, CompareError)
        mode = keys.take("compare_mode", one_of(DIRECTORY, FILE, FILE_LIST), DIRECTORY)
        keys.take("file_type", one_of("pt"), "pt")
        for name in WITHOUT_EFFECT:
            keys.take(name, lambda value: value, None)
        sections = [keys.section(f"compare_{kind}_options") for kind in ("directory", "file", "filelist")]
        words = ("directory", "file", "filelist")
        sides = [
            [section.take(f"compared_{word}_{side}", _paths, ()) for side in (1, 2)]
            for section, word in zip(sections, words, strict=True)
        ]
        if not all(sides[mode]):
            raise CompareError(
                f"There is nothing to compare: compare_{words[mode]}_options needs compared_{words[mode]}_1 and "
                f"compared_{words[mode]}_2."
            )
        metrics = keys.take("evaluation_metrics", _metrics, {})
        section = sections[mode]

        def flag(name: str) -> bool:
            either = keys.take(name, truth, False), section.take(name, truth, False)
            return any(either) or name in metrics

        only_input, only_output = flag("only_compare_input"), flag("only_compare_output")
        folders = (keys.take("compare_folder_name", _phases, ()), section.take("compare_folder_name", _phases, ()))
        checked = cls(
            mode=mode,
            first=sides[mode][0],
            second=sides[mode][1],
            phases=folders[0] or folders[1] or PHASES,
            epochs=keys.take(
                "compare_epochs", NumberRange.parse, section.take("compare_epochs", NumberRange.parse, ALL)
            ),
            steps=keys.take("compare_steps", NumberRange.parse, section.take("compare_steps", NumberRange.parse, ALL)),
            parts=("input", "kwargs") if only_input else ("output",) if only_output else (),
            metrics=tuple(name for name in metrics if name in METRICS) or ("L1",),
            filters=_filters(keys.section("filter"), metrics),
            skip_modules=flag("skip_nn_module"),
            skip_functions=flag("skip_non_nn_module"),
            by_order=flag("compare_by_order"),
            top=keys.take("top_k", count, 10, "topk"),
            verbose=flag("verbose"),
        )
        for part in (*sections, keys):
            part.done()
        return checked


def _paths(value: Any) -> tuple[str, ...]:
    return texts(value) if isinstance(value, list | tuple) else (text(value),)


def _phases(value: Any) -> tuple[str, ...]:
    return tuple(one_of(*PHASES)(name) for name in texts(value))


def _metrics(value: Any) -> dict[str, float | None]:
    """The listed metrics and switches, with their thresholds where these are given beside them."""
    listed = value if isinstance(value, Mapping) else dict.fromkeys(texts(value))
    thresholds: dict[str, float | None] = {}
    for name, threshold in listed.items():
        one_of(*METRICS, *SWITCHES)(name)
        check = similarity if name == "CS" else number
        thresholds[str(name)] = check(threshold) if threshold is not None and name in METRICS else None
    return thresholds


def _filters(keys: Keys, metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The largest error of each metric that is not shown; that of a similarity is its distance from 1."""
    filters: dict[str, float] = {}
    for_all = keys.take("global_filter", number, None)
    if for_all is not None:
        filters["global"] = for_all
    for name in METRICS:
        threshold = keys.take(f"{name}_filter", similarity if name == "CS" else number, metrics.get(name))
        if threshold is not None:
            filters[name] = 1.0 - threshold if name == "CS" else threshold
    keys.done()
    return filters


def mean_abs_share(reference: Floats, candidate: Floats) -> float:
    """mean |a − b| / mean |a|. 0 when both are zero everywhere, ∞ when only a is.

    a is the reference, b the candidate, in float64, over the elements where both are finite.
    """
    both = np.isfinite(reference) & np.isfinite(candidate)
    size = float(np.abs(reference[both]).mean()) if both.any() else math.nan
    error = mean_abs(reference, candidate)
    return error / size if size else error * math.inf if error else error


class Metric(NamedTuple):
    """One metric. `column` is that of a comparison's pairs; `compute` is set where `astray.compare` has to add it.

    value: the shown value, from that column. error: how wrong a shown value is, 0 being right.
    right: the shown value of equal tensors.
    """

    column: str
    compute: Callable[[Floats, Floats], float] | None = None
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
"""The metrics of hooktools by name, each with the numbers it shows by theirs."""


def custom_metrics(names: tuple[str, ...]) -> list[Callable[[Floats, Floats], float]]:
    """The metrics that a comparison has to compute in addition, for these metrics of hooktools."""
    metrics = (metric for name in names for metric in METRICS[name].values())
    return list({metric.column: metric.compute for metric in metrics if metric.compute is not None}.values())


def shown_values(metric: Metric, pairs: Table) -> Floats:
    """The shown value of every pair. Pairs of equal bits are not measured: they are right.

    NaN where NaN or infinity is on one side only: a number over the other elements would look like agreement.
    """
    verdicts = pairs.coded("verdict")
    identical = np.array([*(label == "identical" for label in verdicts.values), False], np.bool_)[verdicts.codes]
    mismatched = pairs.numbers("nonfinite_mismatch") > 0
    return np.where(identical, metric.right, np.where(mismatched, np.nan, metric.value(pairs.numbers(metric.column))))
