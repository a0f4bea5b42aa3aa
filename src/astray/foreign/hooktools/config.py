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
"""A configuration: the path of a YAML file, or what would stand in it."""

T = TypeVar("T")
D = TypeVar("D")


class Keys:
    """The keys of a mapping. `error` is what is raised, `where` what a sentence begins with.

    >>> with_keys = Keys({"trace_mode": 7}, "tracer_demo.yaml: ", RecordError)
    >>> with_keys.take("trace_mode", one_of(0, 1, 2, 3), 0)
    RecordError: tracer_demo.yaml: trace_mode is 7; it can be 0, 1, 2, 3.
    """

    def __init__(self, given: Any, where: str, error: type[AstrayError], name: str = "") -> None:
        self._where, self._error, self._name = where, error, name
        if not isinstance(given, Mapping | None):
            raise error(f"{where}{name or 'The configuration'} is {given!r}. It should have keys with values.")
        self._left = {str(key): value for key, value in (given or {}).items()}
        self._known: list[str] = []

    @classmethod
    def of(cls, config: Given, error: type[AstrayError]) -> Keys:
        """Those of a file, or of a dict."""
        if isinstance(config, Mapping):
            return cls(config, "", error)
        try:
            found = load(config)
        except AstrayError as problem:
            raise error(str(problem)) from None
        return cls(found, f"{config}: ", error)

    def take(self, name: str, check: Callable[[Any], T], default: D, *spellings: str) -> T | D:
        """The value of a key, under any of its spellings. One without a value is one that is not there."""
        self._known += [name, *spellings]
        found = {key: self._left.pop(key) for key in (name, *spellings) if key in self._left}
        if len(found) > 1:
            raise self._error(f"{self._where}{' and '.join(found)} are the same key. Leave out one.")
        for key, value in found.items():
            if value is not None:
                try:
                    return check(value)
                except ValueError as error:
                    raise self._error(f"{self._where}{self._name}{key} is {value!r}; {error}.") from None
        return default

    def inside(self, name: str, *spellings: str) -> Keys:
        """The keys of a mapping that is the value of a key."""
        value = self.take(name, lambda given: given, None, *spellings)
        return Keys(value, self._where, self._error, f"{self._name}{name}.")

    def done(self) -> None:
        """Nothing else is known: complain about what is left."""
        for key in self._left:
            known = did_you_mean(key, self._known) or f" There are {', '.join(self._known)}."
            raise self._error(f"{self._where}There is no key {self._name}{key}.{known}")


def one_of(*values: Any) -> Callable[[Any], Any]:
    """Checks for one of these."""

    def check(value: Any) -> Any:
        for one in values:
            if type(one) is type(value) and one == value:
                return one
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
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(one, str) for one in found):
        raise ValueError("it should be a list of texts")
    return tuple(found)


def expressions(value: Any) -> tuple[str, ...]:
    """Checks for regular expressions."""
    found = texts(value)
    try:
        for one in found:
            re.compile(one)
    except re.error as error:
        raise ValueError(f"{error.pattern!r} is no regular expression: {error}") from None
    return found


def truth(value: Any) -> bool:
    """Checks for yes or no."""
    if not isinstance(value, bool) and value not in (0, 1):
        raise ValueError("it should be true or false")
    return bool(value)


def count(value: Any) -> int:
    """Checks for how many."""
    if type(value) is not int or value < 1:
        raise ValueError("it should be a whole number from 1 on")
    return value


def number(value: Any) -> float:
    """Checks for a number, also one that a YAML parser took for a text, as most do with 1e-5."""
    try:
        found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except ValueError:
        found = None
    if found is None:
        raise ValueError("it should be a number, such as 1e-5")
    return found


def similarity(value: Any) -> float:
    """Checks for a number that a cosine can be."""
    found = number(value)
    if found > 1:
        raise ValueError("a similarity is no larger than 1")
    return found


class NumberRange:
    """Epochs or steps by number.

    >>> 7 in Chosen.parse("[0,8)"), 8 in Chosen.parse("[0,8)"), 2 in Chosen.parse("[1,3]"), 5 in Chosen.parse(-1)
    (True, False, False, True)
    """

    def __init__(self, numbers: frozenset[int] | range | None, given: object) -> None:
        self._numbers, self._given = numbers, given

    @classmethod
    def parse(cls, value: Any) -> NumberRange:
        """One number, −1 for all, "[0,8)" for 0 to 7, or a list: [1, 3] or "[1,3]". No list is a range."""
        if isinstance(value, str):
            return cls._of_text(value)
        numbers = [value] if isinstance(value, int) else value
        if not isinstance(numbers, Sequence) or not all(type(one) is int for one in numbers):
            raise ValueError("write one number, -1 for all, a list such as [1, 3], or '[0,8)' for 0 to 7")
        return cls(frozenset(numbers) if list(numbers) not in ([-1], []) else None, value)

    @classmethod
    def _of_text(cls, value: str) -> NumberRange:
        half_open = re.fullmatch(r"\s*([\[(])\s*(-?\d{1,12})\s*,\s*(-?\d{1,12})\s*([\])])\s*", value)
        if half_open and (half_open[1], half_open[4]) != ("[", "]"):
            first = int(half_open[2]) + (half_open[1] == "(")
            return cls(range(first, int(half_open[3]) + (half_open[4] == "]")), value)
        listed = re.fullmatch(r"\s*\[?((?:\s*-?\d{1,12}\s*,?)*)\]?\s*", value)
        return cls.parse([int(one) for one in re.findall(r"-?\d+", listed[1])] if listed else None)

    def __contains__(self, number: int) -> bool:
        return self._numbers is None or number in self._numbers

    def __str__(self) -> str:
        return "all" if self._numbers is None else str(self._given)


ALL = NumberRange(None, -1)


# -- the file of a Comparer --------------------------------------------------------------------------------------------

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
