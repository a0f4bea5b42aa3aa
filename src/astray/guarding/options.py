"""Checks the options of a guard before the program begins: those of `astray.guard`, or of a guarded recording."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from astray.capture.settings import Settings, size, whole
from astray.errors import RecordError
from astray.wording import did_you_mean

Gradients = Literal["parameters", "all"]
"""Which gradients a guard reads while nothing is wrong."""

OF_RECORDING = ("on", "spike", "when")
OF_GUARD = ("gradients", "exact", "remember", "path", "max_memory")


def check(
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


def of_recording(guarding: Any) -> dict[str, Any]:
    """What `guard=` of a recording asks for, as a dict. Raises a RecordError that says what is wrong with it."""
    given = dict(guarding) if isinstance(guarding, Mapping) else {"on": guarding}
    for name, value in given.items():
        if name in OF_GUARD:
            raise RecordError(
                f"{name}={value!r} is for astray.guard, which records into memory. The guard of a recording takes "
                f"{', '.join(OF_RECORDING)}."
            )
        if name not in OF_RECORDING:
            hint = did_you_mean(str(name), OF_RECORDING) or f" It takes {', '.join(OF_RECORDING)}."
            raise RecordError(f"{name}={value!r} is nothing that the guard of a recording can be asked.{hint}")
    _check_on(given.get("on", "raise"))
    _check_reasons(given.get("spike"), given.get("when"))
    return given


def _check_on(on: Any) -> None:
    if on not in ("raise", "warn") and not callable(on):
        raise RecordError(f"on={on!r} is nothing a guard can do. It is 'raise', 'warn', or a function.")


def _check_reasons(spike: Any, when: Any) -> None:
    if spike is not None and not _is_factor(spike):
        raise RecordError(f"spike={spike!r} is no factor. It is a number above 1: 10 trips at ten times the usual.")
    if when is not None and not callable(when):
        raise RecordError(f"when={when!r} cannot be asked. It is a function of the rows of a step.")


def check_settings(settings: Settings) -> None:
    """Raises a RecordError when a recording by these settings shows nothing to a guard."""
    if not settings.wants_statistics:
        raise RecordError("keep='fingerprint' counts no NaN and no infinities. A guard needs keep='stats'.")


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 1
