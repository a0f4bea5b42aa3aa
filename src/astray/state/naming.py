"""Names of parameters: selected by a pattern, put into groups, compared between two states, without wrappers.

The same weight is `module.h.0.weight` under DDP and `_orig_mod.h.0.weight` when compiled. Names are left as the model
has them unless `unwrap` is asked for: then states of differently wrapped models have the same names, and combine.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping

from astray.errors import StateError
from astray.wording import counted

Pattern = str | re.Pattern[str]

OTHER = "(other)"
"""The group of the parameters that belong to none."""

_LAYER = r"^((?:[^.]+\.)*?\d+)(?:\.|$)"
"""Everything up to the first part of a name that is a number: `transformer.h.3` of `transformer.h.3.mlp.weight`."""

_SHOWN = 4  # names in a message


def matching(names: Collection[str], pattern: Pattern | None) -> list[str]:
    """The names that a regular expression matches, from their first character on; all of them without one."""
    if pattern is None:
        return list(names)
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise StateError(f"The pattern {pattern!r} is not a regular expression: {error}.") from None
    matched = [name for name in names if expression.match(name)]
    if names and not matched:
        warn(
            f"The pattern {expression.pattern!r} matches none of {counted(len(names), 'name')} such as "
            f"{next(iter(names))!r}. It is matched from the first character on: begin with '.*' to search."
        )
    return matched


def grouped(names: Iterable[str], group: Pattern) -> dict[str, list[str]]:
    r"""The names by what a regular expression captures in them; "layer" takes everything up to the first number.

    Groups come in the order of their first member. Names without a match share the group `(other)`.

    >>> grouped(["h.0.w", "h.0.b", "h.1.w", "ln.w"], r"h\.(\d+)\.")
    {'0': ['h.0.w', 'h.0.b'], '1': ['h.1.w'], '(other)': ['ln.w']}
    """
    try:
        expression = re.compile(_LAYER if group == "layer" else group)
    except re.error as error:
        raise StateError(f"The group {group!r} is not a regular expression: {error}.") from None
    groups: dict[str, list[str]] = {}
    for name in names:
        match = expression.search(name)
        captured = OTHER
        if match is not None:
            captured = ".".join(part for part in match.groups() if part is not None) or match.group()
        groups.setdefault(captured, []).append(name)
    return groups


def check_same(first: Collection[str], second: Collection[str], labels: tuple[str, str]) -> None:
    """Raises a StateError that names what is only in one of two states, unless they have the same names."""
    in_first, in_second = dict.fromkeys(first), dict.fromkeys(second)
    first, second = [name for name in first if name not in in_second], [name for name in second if name not in in_first]
    if not first and not second:
        return
    parts = [
        f"only in {label}: {', '.join(extra[:_SHOWN])}" + (f" and {len(extra) - _SHOWN} more" * (len(extra) > _SHOWN))
        for label, extra in zip(_distinct_labels(labels), (first, second), strict=True)
        if extra
    ]
    wrapped = any(part.startswith(("module.", "_")) for part in (*first, *second))
    hint = "If one model is wrapped, use unwrap()." if wrapped else "Use filter(pattern) on the larger one."
    raise StateError(f"The states have different parameters; {'; '.join(parts)}. {hint}")


def _distinct_labels(names: tuple[str, str]) -> tuple[str, str]:
    return ("the first", "the second") if names[0] == names[1] else (f"{names[0]!r}", f"{names[1]!r}")


def warn(message: str) -> None:
    """Warn, pointing at the innermost line outside astray."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("astray."):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)


# -- names that wrappers change ----------------------------------------------------------------------------------------


PREFIXES = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that only wrappers add, at any position."""

OUTERMOST = ("module.", "_layers.")
"""How names begin in DDP and DataParallel, those of torch and of Paddle. A model may use it for a module of its own, so
it is removed only where every name begins with it."""


def unwrapped(name: str) -> str:
    """A name without the parts that FSDP, torch.compile and activation checkpointing put into it.

    >>> unwrapped("_orig_mod.h.0._checkpoint_wrapped_module.weight")
    'h.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in PREFIXES)


def unwrapped_names(names: Iterable[str]) -> Mapping[str, str]:
    """The names as the model itself has them → the names as they are, in order.

    >>> unwrapped_names(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
    {'fc.weight': 'module._orig_mod.fc.weight', 'fc.bias': 'module._orig_mod.fc.bias'}
    """
    originals = list(names)
    plain = [unwrapped(name) for name in originals]
    # Of a compiled DDP or a DDP of a compiled model, `module` is first once the others are removed.
    while outermost := next((each for each in OUTERMOST if plain and all(name.startswith(each) for name in plain)), ""):
        plain = [name.removeprefix(outermost) for name in plain]
    original_of: dict[str, str] = {}
    for original, name in zip(originals, plain, strict=True):
        if name in original_of:
            raise ValueError(
                f"Without the names of wrappers, {original_of[name]!r} and {original!r} would both be {name!r}. "
                "Keep the names as they are."
            )
        original_of[name] = original
    return original_of
