"""The arguments of a call, out of its skeleton and its tensors.

The skeleton holds plain values and texts that stand for others (`capture/structure.py` writes it): `<tensor>`,
`torch.bfloat16`, `slice(0, 3, None)`. What only has a description there, such as an object, cannot be made again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from astray.capture.structure import TENSOR
from astray.safe_text import parse_json

LONGEST_TEXT = 200_000
"""Characters of a skeleton. The recorder cuts lists at 64 items, so that those of real calls have a few thousand."""

MOST_ITEMS = 10_000
"""Values in a skeleton: 64 lists of 64 items, and as many again."""

_SLICE = re.compile(r"slice\((None|-?\d{1,18}), (None|-?\d{1,18}), (None|-?\d{1,18})\)")
_SPELLED = re.compile(r"<torch\.(?:dtype|device|layout|memory_format) (.{1,40})>")
_DEVICE = re.compile(r"(?:cpu|cuda|npu|xpu|mps|hpu|mtia|maia|privateuseone)(?::\d{1,4})?")
_NOT_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
_GENERATOR = "<Generator>"
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class NotPlainError(Exception):
    """An argument that cannot be made again; its text says why."""


class Skeleton(NamedTuple):
    """The arguments of a call as they were recorded."""

    args: list[Any]
    kwargs: dict[str, Any]


class Rebuilding(NamedTuple):
    """How arguments are made: `tensor` gives that of a path, `dtype` replaces those of floats, `device` all devices."""

    tensor: Callable[[str], Any]
    dtype: Callable[[torch.dtype], torch.dtype]
    device: str
    tuples: bool  # whether a list as an index is a tuple, which skeletons do not tell
    generator: torch.Generator | None = None


def parse_skeleton(text: str | None) -> Skeleton:
    """The skeleton of a call. Raises NotPlainError where it is none, or larger than a recorder's."""
    if text is None:
        raise NotPlainError("its arguments were not recorded")
    if len(text) > LONGEST_TEXT:
        raise NotPlainError(
            f"its arguments are a text of {len(text):,} characters, and a recorder writes a few thousand"
        )
    try:
        content = parse_json(text)
    except ValueError:
        raise NotPlainError("its arguments are not JSON") from None
    args = content.get("args") if isinstance(content, dict) else None
    kwargs = content.get("kwargs", {}) if isinstance(content, dict) else None
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise NotPlainError("its arguments are not a list and a mapping")
    if (items := _count(args) + _count(kwargs)) > MOST_ITEMS:
        raise NotPlainError(f"its arguments hold {items:,} values, and a recorder writes {MOST_ITEMS:,} at most")
    return Skeleton(args, kwargs)


def _count(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def paths(skeleton: Skeleton) -> list[str]:
    """The paths of the tensors among the arguments."""
    found: list[str] = []

    def note(path: str) -> None:
        found.append(path)

    rebuild(skeleton, Rebuilding(note, lambda dtype: dtype, "cpu", False, torch.default_generator))
    return found


def rebuild(skeleton: Skeleton, how: Rebuilding) -> tuple[list[Any], dict[str, Any]]:
    """The arguments again. Raises NotPlainError for what the skeleton only describes."""
    args = [_value(item, str(index), how) for index, item in enumerate(skeleton.args)]
    if how.tuples and len(args) > 1 and isinstance(args[1], list):
        args[1] = tuple(args[1])
    return args, {name: _value(item, f"kwargs.{name}", how) for name, item in skeleton.kwargs.items()}


def _value(item: Any, path: str, how: Rebuilding) -> Any:
    if isinstance(item, list):
        return [_value(each, f"{path}.{index}", how) for index, each in enumerate(item)]
    if isinstance(item, dict):
        return {name: _value(each, f"{path}.{name}", how) for name, each in item.items()}
    return _text(item, path, how) if isinstance(item, str) else item


def _text(text: str, path: str, how: Rebuilding) -> Any:
    if text == TENSOR:
        return how.tensor(path)
    if spelled := _SPELLED.fullmatch(text):
        text = spelled[1]
    if text == "<ellipsis>":
        return ...
    if text == _GENERATOR and how.generator is not None:
        return how.generator
    if text in _NOT_FINITE:
        return _NOT_FINITE[text]
    if text.startswith("torch."):
        constant = vars(torch).get(text.removeprefix("torch."))
        if isinstance(constant, torch.dtype):
            return how.dtype(constant)
        if isinstance(constant, _CONSTANTS):
            return constant
        raise NotPlainError(f"its argument {path} is {_short(text)}, which this torch does not have")
    if _DEVICE.fullmatch(text):
        return how.device
    if found := _SLICE.fullmatch(text):
        return slice(*(None if each == "None" else int(each) for each in found.groups()))
    if text.startswith(("<", "slice(", "range(")) or text.endswith("…"):
        raise NotPlainError(f"its argument {path} is {_short(text)}, of which no more was recorded")
    return text


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
