"""A user's own list of functions, by category: which calls of functions, operators and collectives are recorded.

The categories are those of msprobe's `support_wrap_ops.yaml`, so that such a file can be used as it is. Each category
belongs to a kind of call; a list that names any category of a kind replaces what is recorded of that kind by default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from astray.capture.config_file import load
from astray.errors import RecordError
from astray.wording import did_you_mean

KINDS = {
    "functional": "function",
    "tensor": "function",
    "torch": "function",
    "_VF": "function",
    "torch_npu": "function",
    "mindspeed": "function",
    "ops": "function",
    "paddle": "function",
    "aten": "op",
    "distributed": "collective",
    "npu_distributed": "collective",
}
"""Every category, and the kind of call that it is a part of. `ops` are the operators of other libraries, `paddle`
are Paddle's functions."""

ANY = "any"
"""The category of names in a plain list: they match a function of any category."""

_PREFIXES = {
    "torch.nn.functional.": "functional",
    "torch.distributed.": "distributed",
    "torch.ops.aten.": "aten",
    "torch.ops.": "ops",
    "torch.Tensor.": "tensor",
    "torch._VF.": "_VF",
    "torch.": "torch",
    "paddle._C_ops.": "paddle",
    "paddle.Tensor.": "tensor",
    "paddle.nn.functional.": "functional",
    "paddle.distributed.": "distributed",
    "torch_npu.distributed.": "npu_distributed",
    "torch_npu.": "torch_npu",
    "mindspeed.": "mindspeed",
    "Tensor.": "tensor",
    "aten::": "aten",
    "aten.": "aten",
    "F.": "functional",
}
"""The prefix of full names in each category. A longer prefix comes before a shorter one that it begins with."""

_FORM = "Give the path of a YAML file, a dict of categories with lists of names, or a list of names."


@dataclass(frozen=True)
class FunctionList:
    """The functions that are recorded.

    >>> listed = FunctionList.parse({"functional": ["*", "dropout"], "torch": ["matmul", "linalg.*"]})
    >>> listed.wants("torch", "linalg.norm", True), listed.wants("torch", "add", True), listed.wants("aten", "mm", True)
    (True, False, True)

    `*` is everything that is recorded by default. Patterns such as `linalg.*` select from that; a full name is recorded
    in any case.
    """

    names: tuple[tuple[str, tuple[str, ...]], ...]
    _kinds: frozenset[str] = field(init=False, repr=False, compare=False)
    _exact: frozenset[tuple[str, str]] = field(init=False, repr=False, compare=False)
    _patterns: tuple[tuple[str, str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        entries = [(category, name) for category, names in self.names for name in names]
        exact = frozenset((category, _canonical(name)) for category, name in entries if not _is_pattern(name))
        object.__setattr__(self, "_kinds", frozenset(_kind(category) for category, _ in self.names))
        object.__setattr__(self, "_exact", exact)
        object.__setattr__(self, "_patterns", tuple(entry for entry in entries if _is_pattern(entry[1])))

    @classmethod
    def parse(cls, value: Any) -> FunctionList | None:
        """From the path of a file, a dict of categories, or a plain list of names; None when nothing is listed."""
        if isinstance(value, FunctionList):
            return value
        if isinstance(value, str | os.PathLike):
            return cls._read(value)
        if isinstance(value, Mapping):
            entries = [entry for category, names in value.items() for entry in _entries(category, names)]
            by_category: dict[str, dict[str, None]] = {_category(category): {} for category in value}
        elif isinstance(value, list | tuple | set | frozenset):
            entries = [categorise(name) for name in _names(ANY, value)]
            by_category = {}
        else:
            raise RecordError(f"functions={value!r} is not a list. {_FORM}")
        for category, name in entries:
            by_category.setdefault(category, {})[name] = None
        return cls(tuple((category, tuple(names)) for category, names in by_category.items())) if by_category else None

    @classmethod
    def _read(cls, path: str | os.PathLike[str]) -> FunctionList | None:
        try:
            content = load(path)
        except RecordError as error:
            raise RecordError(f"functions={str(path)!r}: {error} {_FORM}") from None
        if isinstance(content, str):  # which would be taken for the path of another file
            raise RecordError(f"In {path}: it holds {content!r}, which is not a list.")
        try:
            return cls.parse([] if content is None else content)
        except RecordError as error:
            raise RecordError(f"In {path}: {error}") from None

    def as_dict(self) -> dict[str, list[str]]:
        """As a dict that `parse` reads."""
        return {category: list(names) for category, names in self.names}

    def wants(self, category: str, name: str, by_default: bool) -> bool:
        """Whether the calls of a function are recorded.

        name: as it stands in its category: `softmax`, `linalg.norm`, `add.Tensor`; `categorise` gives both.
        by_default: whether they would be recorded without a list.
        """
        kind = _kind(category)
        if kind not in self._kinds:
            return by_default
        spellings = _all_spellings(category, name)
        categories = (category, ANY) if kind == "function" else (category,)
        if any((each, spelling) in self._exact for each in categories for spelling in spellings):
            return True
        return by_default and any(
            each in categories and any(fnmatchcase(spelling, pattern) for spelling in spellings)
            for each, pattern in self._patterns
        )


def categorise(full: str) -> tuple[str, str]:
    """The category of a function and its name there, from its full name; "any" when the name has no known prefix.

    >>> categorise("torch.nn.functional.softmax"), categorise("torch.linalg.norm"), categorise("softmax")
    (('functional', 'softmax'), ('torch', 'linalg.norm'), ('any', 'softmax'))
    """
    for prefix, category in _PREFIXES.items():
        if full.startswith(prefix):
            return category, full.removeprefix(prefix)
    return ANY, full


def _kind(category: str) -> str:
    return KINDS.get(category, "function")


def _category(name_given: object) -> str:
    """The category that a user wrote, in any case, or by the full name of its module or class."""
    known = {
        **{home.strip(".:").lower(): to for home, to in _PREFIXES.items()},
        **{name.lower(): name for name in KINDS},
    }
    category = ANY if name_given == ANY else known.get(str(name_given).lower())
    if category is None:
        raise RecordError(
            f"functions has a category {name_given!r}, which is not known. It can be {', '.join(map(repr, KINDS))}."
            f"{did_you_mean(name_given, KINDS)}"
        )
    return category


def _entries(heading: object, names: object) -> list[tuple[str, str]]:
    """The entries under a category, without the prefixes of their names."""
    category = _category(heading)
    entries = []
    for full in _names(heading, names):
        prefix_category, name = categorise(full)
        if category != ANY and prefix_category not in (ANY, category):
            raise RecordError(f"functions has {full!r} under {heading!r}, but that is one of {prefix_category!r}.")
        entries.append((category, name if prefix_category == category else full))
    return entries


def _names(category: object, listed: object) -> list[str]:
    """The names in a list as it is written; None is an empty one."""
    names = [] if listed is None else [listed] if isinstance(listed, str) else listed
    if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in names):
        raise RecordError(f"functions has {listed!r} under {category!r}, which is not a list of names.")
    return sorted(names) if isinstance(names, set | frozenset) else list(names)


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


_BINARY = frozenset(
    ["add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
)
_RENAMED = {"truediv": "div", "mod": "remainder", "floordiv": "floor_divide"}


def _canonical(name: str) -> str:
    """One spelling for equivalent names: `__add__`, `__radd__` and `add`, or `linalg.norm` and `linalg_norm`."""
    operator = re.fullmatch(r"__(\w+)__", name)
    if operator is None:
        return re.sub(r"^(linalg|fft|special)\.", r"\1_", name)
    word = operator[1]
    in_place = word[0] == "i" and word[1:] in _BINARY
    if in_place or (word[0] == "r" and word[1:] in _BINARY):
        word = word[1:]
    return _RENAMED.get(word, word) + "_" * in_place


def _all_spellings(category: str, name: str) -> set[str]:
    """All spellings by which an entry may name a function. Operators match with and without their overload."""
    spellings = {name, _canonical(name)}
    if category in ("aten", "ops"):
        packet = name.split(".")[: 1 if category == "aten" else 2]
        spellings.add(".".join(packet))
        spellings.add(_canonical(".".join(packet)))
    return spellings
