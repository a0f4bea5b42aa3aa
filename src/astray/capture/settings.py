"""What to record: the one schema behind keyword arguments, YAML, JSON, TOML and the command line.

Every setting has a check, which turns what a user wrote into its value or into a RecordError that says what would be
right. All run once, before anything is touched. docs/reference/settings.md explains each setting with examples.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from astray.capture.config_file import settings_in
from astray.capture.function_list import FunctionList
from astray.capture.graft_words import Graft, with_absolute_run
from astray.errors import RecordError, UsageError
from astray.part import Part
from astray.process import absolute
from astray.steps import StepSelection
from astray.wording import did_you_mean

if TYPE_CHECKING:
    from types import EllipsisType

    from typing_extensions import Unpack


Check = Callable[[str, Any], Any]
"""Takes the name of a setting and the given value, and returns the checked value, which passes the same check
unchanged.
"""

MOST = 1 << 62
"""The largest count or size: it is passed to code that stores it in 63 bits."""

LARGEST_SEED = 2**32 - 1
"""numpy's global generator takes no larger seed, and neither does Python's hash."""

_UNITS: dict[str, int] = {
    "": 1, "b": 1,
    **{f"{letter}{b}": 1000**power for power, letter in enumerate("kmgt", 1) for b in ("", "b")},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}  # fmt: skip


def words(known: tuple[str, ...], *, none: bool = False) -> Check:
    """One or more of the known words, as a list or separated by commas. none: whether an empty list is allowed."""
    choice = f"It can be {', '.join(map(repr, known))}, or several of them."

    def check(name: str, value: Any) -> frozenset[str]:
        if not isinstance(value, str | list | tuple | set | frozenset):
            raise RecordError(f"{name}={value!r} is not a word. {choice}")
        selected = [word.strip() for word in value.split(",")] if isinstance(value, str) else list(value)
        for word in selected:
            if word not in known:
                raise RecordError(f"{name}={word!r} is not known. {choice}{did_you_mean(word, known)}")
        if not selected and not none:
            raise RecordError(f"{name} is empty. {choice}")
        return frozenset(selected)

    return check


def ordered_words(known: tuple[str, ...]) -> Check:
    """The same, as a tuple in the order of `known`."""
    check = words(known)
    return lambda name, value: tuple(word for word in known if word in check(name, value))


def names(name: str, value: Any) -> tuple[str, ...]:
    """Names of any kind, as a list or separated by commas."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list | tuple | set | frozenset) or not all(isinstance(entry, str) for entry in listed):
        raise RecordError(f"{name}={value!r} is neither a name nor a list of names.")
    return tuple(sorted({entry.strip() for entry in listed} - {""}))


def patterns(name: str, value: Any) -> tuple[str, ...]:
    """One regular expression, or a list of several."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(pattern, str) for pattern in listed):
        raise RecordError(f"{name}={value!r} is neither a regular expression nor a list of them.")
    for pattern in listed:
        _compile(name, pattern)
    return tuple(listed)


def grafts(name: str, value: Any) -> tuple[str, ...]:
    """One graft, or a list of several, with the absolute paths of their runs."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(text, str) for text in listed):
        raise RecordError(f"{name}={value!r} is neither a graft, such as 'runs/a:h.2.mlp', nor a list of them.")
    try:
        for text in listed:
            Graft.read(text)
    except UsageError as error:
        raise RecordError(str(error)) from None
    return tuple(map(with_absolute_run, listed))


def pair(name: str, value: Any) -> tuple[str, str]:
    """Two names, the first and the last."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(site, str) for site in value):
        raise RecordError(
            f"{name}={value!r} is not two sites. Give the first and the last, such as ['h.0', 'h.3.mlp']."
        )
    return value[0], value[1]


def whole(least: int) -> Check:
    """A whole number."""

    def check(name: str, value: Any) -> int:
        number = _number(value)
        if number is None or not least <= number <= MOST:
            raise RecordError(f"{name}={_short(value)} is not a whole number of at least {least:,}{_most(number)}.")
        return number

    return check


def seed(name: str, value: Any) -> int | None:
    """A seed; True means seed 0, and False means none."""
    if isinstance(value, bool):
        return 0 if value else None
    number = _number(value)
    if number is None or not 0 <= number <= LARGEST_SEED:
        raise RecordError(f"{name}={value!r} is not a seed. It is True, or a whole number from 0 to {LARGEST_SEED:,}.")
    return number


def size(least: int) -> Check:
    """A number of bytes, with a unit or without."""

    def check(name: str, value: Any) -> int:
        number = _bytes(value) if isinstance(value, str) else _number(value)
        if number is None or not least <= number <= MOST:
            raise RecordError(
                f"{name}={_short(value)} is not a size of at least {least:,} bytes{_most(number)}. Write a number, "
                "'500 MB' or '2 GiB'."
            )
        return number

    return check


def step_selection(of: str) -> Check:
    """A selection of steps or ranks."""

    def check(name: str, value: Any) -> StepSelection:
        try:
            return StepSelection.parse(value, of)
        except UsageError as error:
            raise RecordError(f"{name}={error}") from None

    return check


def part(name: str, value: Any) -> Part:
    """A part of a tensor."""
    try:
        return Part.parse(value)
    except UsageError as error:
        raise RecordError(f"{name}={error}") from None


def functions(_: str, value: Any) -> FunctionList | None:
    """A list of functions."""
    return FunctionList.parse(value)


def _compile(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise RecordError(
            f"{name}={pattern!r} is not a regular expression: {error}. Put a backslash before a sign that is meant as "
            "it is."
        ) from None


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out numbers without end
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}…"


def _most(number: int | None) -> str:
    return f" and at most {MOST:,}" if number is not None and number > MOST else ""


def _number(value: object) -> int | None:
    """A whole number; 1e9 is one too, which TOML and JSON read as a fraction."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bytes(value: str) -> int | None:
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?) *([a-z]*)", value.strip().lower())
    if match is None or match[2] not in _UNITS:
        return None
    try:
        return round(float(match[1]) * _UNITS[match[2]])
    except (ValueError, OverflowError):  # 1__0, and what no float can hold
        return None


LEVELS = ("module", "function", "op")
KEEPS = ("stats", "fingerprint", "sample", "tensors")
PHASES = ("forward", "backward", "update")
ROLES = ("input", "output", "parameter", "gradient", "state")
OPTIMIZER = ("gradient", "weight", "state", "update", "calls")
COMPILED = ("modules",)

Words = str | Sequence[str] | AbstractSet[str]
Numbers = str | int | Sequence[int] | range | StepSelection


class RecordingOptions(TypedDict, total=False):
    """The settings as a user may write them. None means that a setting is not given."""

    level: Words | None
    keep: Words | None
    samples: int | None
    slice: str | int | slice | Sequence[str | int | slice | EllipsisType] | Part | None
    optimizer: Words | None
    compiled: Words | None
    perturb: bool | int | None
    graft: str | Sequence[str] | None
    steps: Numbers | None
    ranks: Numbers | None
    match: str | Sequence[str] | None
    ignore: str | Sequence[str] | None
    classes: Words | None
    scope: Sequence[str] | None
    phases: Words | None
    roles: Words | None
    functions: str | os.PathLike[str] | Mapping[str, Sequence[str]] | Sequence[str] | FunctionList | None
    max_tensors: int | None
    max_tensors_per_step: int | None
    max_bytes: int | str | None
    queue_bytes: int | str | None
    config: str | os.PathLike[str] | None


def _setting(default: Any, check: Check) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class Settings:
    """The settings of one recording, checked.

    >>> Settings.check(keep="tensors", max_bytes="2 GB").max_bytes
    2000000000
    """

    level: tuple[str, ...] = _setting(("module",), ordered_words(LEVELS))
    keep: frozenset[str] = _setting(frozenset({"stats"}), words(KEEPS))
    samples: int = _setting(1024, whole(1))
    slice: Part | None = _setting(None, part)
    optimizer: frozenset[str] = _setting(frozenset(), words(OPTIMIZER, none=True))
    compiled: frozenset[str] = _setting(frozenset(), words(COMPILED, none=True))
    perturb: int | None = _setting(None, seed)
    graft: tuple[str, ...] = _setting((), grafts)
    steps: StepSelection = _setting(StepSelection(), step_selection("step"))
    ranks: StepSelection = _setting(StepSelection(), step_selection("rank"))
    match: tuple[str, ...] = _setting((), patterns)
    ignore: tuple[str, ...] = _setting((), patterns)
    classes: tuple[str, ...] = _setting((), names)
    scope: tuple[str, str] | None = _setting(None, pair)
    phases: frozenset[str] = _setting(frozenset(PHASES), words(PHASES))
    roles: frozenset[str] = _setting(frozenset(ROLES), words(ROLES))
    functions: FunctionList | None = _setting(None, functions)
    max_tensors: int | None = _setting(None, whole(1))
    max_tensors_per_step: int | None = _setting(None, whole(1))
    max_bytes: int | None = _setting(None, size(1))
    queue_bytes: int = _setting(256 << 20, size(1 << 20))

    @classmethod
    def check(cls, **options: Unpack[RecordingOptions]) -> Settings:
        """Settings from what a user wrote, or a RecordError that names the nearest right word.

        With `config`, the file's settings apply where none is given here.
        """
        config = options.get("config")
        in_file = checked(settings_in(config), f"In {config}: ") if config is not None else {}
        return cls(**(in_file | checked(options)))

    @property
    def wants_statistics(self) -> bool:
        return self.keep != {"fingerprint"}

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON for run.json. `Settings.check(**…)` restores them."""
        return {name: _plain(getattr(self, name)) for name in CHECKS}


CHECKS: dict[str, Callable[[str, Any], Any]] = {one.name: one.metadata["check"] for one in fields(Settings)}
"""Every setting that a file may hold, with its check. Besides these, `config` names the file."""


def checked(options: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The checked values of the given settings. where: a prefix for errors, such as the name of a file."""
    values = {}
    for name, value in options.items():
        if name not in CHECKS and name != "config":
            known = f"The settings are {', '.join(CHECKS)}."
            raise RecordError(f"{where}{name}={value!r} is not a setting.{did_you_mean(name, CHECKS) or f' {known}'}")
        if value is not None and name != "config":
            try:
                values[name] = CHECKS[name](name, value)
            except RecordError as error:
                raise RecordError(f"{where}{error}") from None
    return values


def with_absolute_paths(options: RecordingOptions) -> RecordingOptions:
    """The same settings with absolute paths: a program may change its folder before the files are read."""
    settings = options.copy()
    for name in ("config", "functions"):
        path = settings.get(name)
        if isinstance(path, str | os.PathLike):
            settings[name] = absolute(path)
    if settings.get("graft"):
        settings["graft"] = grafts("graft", settings["graft"])
    return settings


def _plain(value: Any) -> Any:
    """A setting as JSON."""
    if isinstance(value, StepSelection | Part):
        return str(value)
    if isinstance(value, FunctionList):
        return value.as_dict()
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value
