"""What to record: the one schema behind keyword arguments, YAML, JSON, TOML and the command line.

Everything is checked once, before anything is touched. docs/recording.md explains each setting with examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from astray.capture import checks
from astray.capture.config_file import settings_in
from astray.capture.function_list import FunctionList
from astray.errors import RecordError
from astray.part import Part
from astray.paths import absolute
from astray.steps import Steps
from astray.wording import did_you_mean

if TYPE_CHECKING:
    from types import EllipsisType

    from typing_extensions import Unpack

LEVELS = ("module", "function", "op")
KEEPS = ("stats", "fingerprint", "sample", "tensors")
PHASES = ("forward", "backward", "update")
ROLES = ("input", "output", "parameter", "gradient", "state")
OPTIMIZER = ("gradient", "weight", "state", "update", "calls")
COMPILED = ("modules",)

Words = str | Sequence[str] | AbstractSet[str]
Numbers = str | int | Sequence[int] | range | Steps


class Given(TypedDict, total=False):
    """The settings as a user may write them. None stands for a setting that is not given."""

    level: Words | None
    keep: Words | None
    samples: int | None
    slice: str | int | slice | Sequence[str | int | slice | EllipsisType] | Part | None
    optimizer: Words | None
    compiled: Words | None
    perturb: bool | int | None
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


def _setting(default: Any, check: checks.Check) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class Settings:
    """The settings of one recording, checked.

    >>> Settings.check(keep="tensors", max_bytes="2 GB").max_bytes
    2000000000
    """

    level: tuple[str, ...] = _setting(("module",), checks.ordered_words(LEVELS))
    keep: frozenset[str] = _setting(frozenset({"stats"}), checks.words(KEEPS))
    samples: int = _setting(1024, checks.whole(1))
    slice: Part | None = _setting(None, checks.part)
    optimizer: frozenset[str] = _setting(frozenset(), checks.words(OPTIMIZER, none=True))
    compiled: frozenset[str] = _setting(frozenset(), checks.words(COMPILED, none=True))
    perturb: int | None = _setting(None, checks.seed)
    steps: Steps = _setting(Steps(), checks.steps("step"))
    ranks: Steps = _setting(Steps(), checks.steps("rank"))
    match: tuple[str, ...] = _setting((), checks.patterns)
    ignore: tuple[str, ...] = _setting((), checks.patterns)
    classes: tuple[str, ...] = _setting((), checks.names)
    scope: tuple[str, str] | None = _setting(None, checks.pair)
    phases: frozenset[str] = _setting(frozenset(PHASES), checks.words(PHASES))
    roles: frozenset[str] = _setting(frozenset(ROLES), checks.words(ROLES))
    functions: FunctionList | None = _setting(None, checks.functions)
    max_tensors: int | None = _setting(None, checks.whole(1))
    max_tensors_per_step: int | None = _setting(None, checks.whole(1))
    max_bytes: int | None = _setting(None, checks.size(1))
    queue_bytes: int = _setting(256 << 20, checks.size(1 << 20))

    @classmethod
    def check(cls, **given: Unpack[Given]) -> Settings:
        """Settings from what a user wrote, or a RecordError that names the nearest right word.

        With `config`, those of the file hold for everything that is not given here.
        """
        config = given.get("config")
        in_file = checked(settings_in(config), f"In {config}: ") if config is not None else {}
        return cls(**(in_file | checked(given)))

    @property
    def wants_statistics(self) -> bool:
        return self.keep != {"fingerprint"}

    def as_dict(self) -> dict[str, Any]:
        """For run.json. `Settings.check(**…)` makes the same settings of it."""
        return {name: _plain(getattr(self, name)) for name in CHECKS}


CHECKS: dict[str, Callable[[str, Any], Any]] = {one.name: one.metadata["check"] for one in fields(Settings)}
"""Every setting that a file may hold, with its check. Besides these, `config` names the file."""


def checked(given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values of the settings that were given. where: comes first in an error, such as the name of a file."""
    found = {}
    for name, value in given.items():
        if name not in CHECKS and name != "config":
            known = f"The settings are {', '.join(CHECKS)}."
            raise RecordError(f"{where}{name}={value!r} is no setting.{did_you_mean(name, CHECKS) or f' {known}'}")
        if value is not None and name != "config":
            try:
                found[name] = CHECKS[name](name, value)
            except RecordError as error:
                raise RecordError(f"{where}{error}") from None
    return found


def placed(given: Given) -> Given:
    """The same settings for somebody who reads their files later: a program may go to another folder until then."""
    found = given.copy()
    for name in ("config", "functions"):
        path = found.get(name)
        if isinstance(path, str | os.PathLike):
            found[name] = absolute(path)
    return found


def _plain(value: Any) -> Any:
    """A setting in the form of JSON."""
    if isinstance(value, Steps | Part):
        return str(value)
    if isinstance(value, FunctionList):
        return value.as_given()
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value
