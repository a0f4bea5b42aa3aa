"""The options of a guard and their checks: those of `astray.guard`, and those of `guard=` in a recording.

The command line checks them before the script runs, so nothing here imports numpy or a framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from astray.capture.settings import Settings, size, whole
from astray.errors import RecordError
from astray.guarding.trip import On
from astray.wording import did_you_mean

if TYPE_CHECKING:
    from astray.store import RankRun

Gradients = Literal["parameters", "all"]
"""Which gradients a guard reads while nothing is wrong."""

Condition = Callable[["RankRun"], str | None]
"""Given the rows of a step, as a rank of a run; returns a text when they should make the guard trip."""


class RecordingGuardOptions(TypedDict, total=False):
    """What the guard of a recording can be set to; `Guard` explains each."""

    on: On
    spike: float | None
    when: Condition | None


GuardSetting = On | RecordingGuardOptions
"""What `guard=` takes: what to do, or a dict with more than that."""

OF_RECORDING = tuple(RecordingGuardOptions.__annotations__)
OF_GUARD = ("gradients", "exact", "remember", "path", "max_memory")


def check_guard(
    on: Any, gradients: Any, exact: bool, remember: Any, spike: Any, when: Any, max_memory: Any
) -> tuple[int, int]:
    """How many steps to remember, and in how many bytes. Raises a RecordError that says what is wrong."""
    _check_on(on)
    if exact and on != "raise":
        raise RecordError(f"exact=True stops the program, and on={on!r} would let it go on. Leave out one of them.")
    if gradients not in (None, *get_args(Gradients)):
        raise RecordError(f"gradients={gradients!r} cannot be read. It is 'parameters' or 'all'.")
    if exact and gradients == "parameters":
        raise RecordError("exact=True looks at every tensor, and gradients='parameters' would leave some out.")
    _check_reasons(spike, when)
    return whole(1)("remember", remember), size(1)("max_memory", max_memory)


def check_recording_guard(setting: Any) -> dict[str, Any]:
    """The options in `guard=` of a recording, as a dict. Raises a RecordError that says what is wrong with it."""
    options = dict(setting) if isinstance(setting, Mapping) else {"on": setting}
    for name, value in options.items():
        if name in OF_GUARD:
            raise RecordError(
                f"{name}={value!r} is for astray.guard, which records into memory. The guard of a recording takes "
                f"{', '.join(OF_RECORDING)}."
            )
        if name not in OF_RECORDING:
            hint = did_you_mean(str(name), OF_RECORDING) or f" It takes {', '.join(OF_RECORDING)}."
            raise RecordError(f"{name}={value!r} is not an option of the guard of a recording.{hint}")
    _check_on(options.get("on", "raise"))
    _check_reasons(options.get("spike"), options.get("when"))
    return options


def check_has_statistics(settings: Settings) -> None:
    """Raises a RecordError when a recording by these settings shows nothing to a guard."""
    if not settings.wants_statistics:
        raise RecordError("keep='fingerprint' counts no NaN and no infinities. A guard needs keep='stats'.")


def _check_on(on: Any) -> None:
    if on not in ("raise", "warn") and not callable(on):
        raise RecordError(f"on={on!r} is not something a guard can do. It is 'raise', 'warn', or a function.")


def _check_reasons(spike: Any, when: Any) -> None:
    is_number = isinstance(spike, int | float) and not isinstance(spike, bool)
    if spike is not None and not (is_number and math.isfinite(spike) and spike > 1):
        raise RecordError(f"spike={spike!r} is not a factor. It is a number above 1: 10 trips at ten times the usual.")
    if when is not None and not callable(when):
        raise RecordError(f"when={when!r} cannot be called. It is a function of the rows of a step.")
