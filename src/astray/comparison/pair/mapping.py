"""Maps names of the candidate to names of the reference: what a mapping file is for.

A model that was ported has other names for the same modules, and one of another framework stores some weights
transposed. The file maps names of the candidate to names of the reference and says how tensors are laid out;
docs/decides/alignment.md shows one, and `astray map` drafts it. Applied when rows are read, before pairing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from astray.comparison.pair.layouts import EXAMPLES, Layout
from astray.errors import CompareError
from astray.records import ROOT
from astray.safe_text import bounded_loader, check_bounded
from astray.wording import did_you_mean

NAMES = ("sites", "patterns", "types", "functions", "tensors")
"""Sections that map names to names."""

LISTS = {
    "not compared": "not_compared",
    "only in reference": "only_in_reference",
    "only in candidate": "only_in_candidate",
}
"""Sections that list names, and what a `Mapping` calls them."""

SECTIONS = (*NAMES, "attributes", "paths", "layouts", *LISTS)
DRAFT = "Draft one with: astray map REFERENCE CANDIDATE"


AttributeRule = str | Dictionary[str, Dictionary[Any, Any]]
"""What an attribute is called in the reference: a name, "1 - name", or a name with values that stand for each other."""


class LayoutRule(NamedTuple):
    """How tensors are laid out, by the name of one, or by a regular expression that fits whole names."""

    name: str
    layout: Layout


@dataclass(frozen=True)
class Mapping:
    """What things of the candidate are called in the reference.

    >>> mapping = Mapping({"encoder": "model"}, [(r"h\\.(\\d+)\\.attn", r"to.\\1.self")], functions={"mm": "matmul"})
    >>> mapping.site("encoder.ln.weight"), mapping.site("h.3.attn/mm"), mapping.site("head")
    ('model.ln.weight', 'to.3.self/matmul', 'head')

    sites: a module, and everything inside it. "<root>" is the outermost module.
    patterns: regular expressions for the beginning of a name up to a dot or its end, and what to put in its place.
    Of all of these the one wins that covers most of the name; a listed name before a pattern, an earlier pattern before
    a later one.
    types: classes of modules and optimizers. functions: functions and ops, by the last part of their site.
    tensors: parameters, buffers and states of optimizers, by the last part of their names.
    attributes: what modules and optimizers are set to, by name, or by the candidate's class, a dot and the name.
        "1 - momentum" is for a number that the reference has as what is missing to 1; {approximate: {true: tanh}} for
        values that stand for each other.
    paths: places of tensors among the arguments and results of a function, by the candidate's name of the function.
    layouts: what to do to tensors of the candidate so that they are laid out as the reference's.
    not_compared: tensors that the two programs compute in ways of their own, by the last part of the reference's names.
    only_in_reference, only_in_candidate: tensors and functions that the other side has nothing for, by the last part of
        their names.
    """

    sites: Dictionary[str, str] = field(default_factory=dict)
    patterns: Sequence[tuple[str, str]] = ()
    types: Dictionary[str, str] = field(default_factory=dict)
    functions: Dictionary[str, str] = field(default_factory=dict)
    tensors: Dictionary[str, str] = field(default_factory=dict)
    attributes: Dictionary[str, AttributeRule] = field(default_factory=dict)
    paths: Dictionary[str, Dictionary[str, str]] = field(default_factory=dict)
    layouts: Sequence[LayoutRule] = ()
    not_compared: Sequence[str] = ()
    only_in_reference: Sequence[str] = ()
    only_in_candidate: Sequence[str] = ()

    @property
    def is_of_sites(self) -> bool:
        """Whether it has rules for sites alone, so that one that fits no site is of no use."""
        others = (self.types, self.tensors, self.attributes, self.paths, self.layouts)
        return not any((*others, self.not_compared, self.only_in_reference, self.only_in_candidate))

    def site(self, name: str) -> str:
        """The reference's name of a site."""
        module, slash, function = name.partition("/")
        return self._module(module) + slash + self.functions.get(function, function)

    def type(self, name: str) -> str:
        """The reference's name of a class."""
        return self.types.get(name, name)

    def tensor(self, name: str) -> str:
        """The reference's name of a parameter or a buffer. A rule that covers all of the name wins over `tensors`.

        >>> mapping = Mapping({"bn": "norm", "bn.w": "norm.scale"}, tensors={"_mean": "running_mean"})
        >>> mapping.tensor("bn._mean"), mapping.tensor("bn.w"), mapping.tensor("bn.bias")
        ('norm.running_mean', 'norm.scale', 'norm.bias')
        """
        module, _, last = name.rpartition(".")
        if last not in self.tensors or self._best(name)[0] == len(name):
            return self._module(name)
        outer = self._module(module or ROOT)
        return self.tensors[last] if outer == ROOT else f"{outer}.{self.tensors[last]}"

    def state(self, path: str) -> str:
        """The reference's path of what an optimizer keeps for a parameter, such as `state.exp_avg`."""
        outer, dot, last = path.rpartition(".")
        return f"{outer}{dot}{self.tensors.get(last, last)}"

    def attribute(self, name: str, value: Any, type: str = "") -> tuple[str, Any]:
        """The reference's name of what something of a class is set to, and the value as the reference has it.

        >>> mapping = Mapping(attributes={"_momentum": "1 - momentum", "GELU.fast": {"approximate": {True: "tanh"}}})
        >>> mapping.attribute("_momentum", 0.9), mapping.attribute("fast", True, "GELU")
        (('momentum', 0.1), ('approximate', 'tanh'))
        """
        rule = self.attributes.get(f"{type}.{name}", self.attributes.get(name, name))
        if not isinstance(rule, str):
            (target, values), *_ = rule.items()
            return target, values.get(value, value) if isinstance(value, str | int | float) else value
        _, is_rest, rest = rule.partition(COMPLEMENT)
        if not is_rest:
            return rule, value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return rest, round(1 - value, _DIGITS) if is_number else value

    def layout_rule(self, name: str) -> int | None:
        """The place of the rule for a tensor or a site of the candidate: a listed name before an expression."""
        for place, rule in enumerate(self.layouts):
            if rule.name == name:
                return place
        return next((place for place, fits in enumerate(self._expressions) if fits.fullmatch(name)), None)

    @cached_property
    def _expressions(self) -> list[re.Pattern[str]]:
        return [re.compile(rule.name) for rule in self.layouts]

    def _module(self, name: str) -> str:
        if not name or not (self.sites or self.patterns):
            return name
        length, target = self._best(name)
        if target is None:
            return name
        rest = "" if name == ROOT else name[length:].lstrip(".")
        return ".".join(filter(None, ["" if target == ROOT else target, rest])) or ROOT

    def _best(self, name: str) -> tuple[int, str | None]:
        """How much of a name the best rule covers, and what that is called in the reference."""
        length, target = self._known(name)
        for pattern, replacement in self.patterns:
            found = re.match(rf"(?:{pattern})(?=\.|$)", name)
            if found and found.end() > length:
                length, target = found.end(), found.expand(replacement)
        return length, target

    def _known(self, name: str) -> tuple[int, str | None]:
        """How much of a name is listed, and what that is called in the reference. None when nothing of it is."""
        end = 0 if name == ROOT else len(name)
        while end > 0:
            if name[:end] in self.sites:
                return end, self.sites[name[:end]]
            end = max(name.rfind(".", 0, end), 0)
        return 0, self.sites.get(ROOT)


COMPLEMENT = "1 - "

_DIGITS = 12
"""Of 1 − 0.9 so many are right in float64."""

NOTHING = Mapping()
"""Every name is the same in both runs."""


def read_mapping(file: str | Path) -> Mapping:
    """Read a mapping from a YAML or JSON file. Raises CompareError with what is wrong with it."""
    import yaml

    path = Path(file)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=bounded_loader())  # a safe one
        check_bounded(content)
    except OSError as error:
        raise CompareError(f"The mapping {path} cannot be read: {error.strerror}. {DRAFT}") from None
    except UnicodeDecodeError as error:
        raise CompareError(f"The mapping {path} is not text: byte {error.start} is not UTF-8. {DRAFT}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = f"{error.problem} in line {mark.line + 1}" if mark else " ".join(str(error).split())  # type: ignore[attr-defined]
        raise CompareError(f"The mapping {path} is not YAML: {reason}. {DRAFT}") from None
    except (ValueError, RecursionError) as error:  # a day or a number that does not exist; lists without end
        raise CompareError(f"The mapping {path} is not YAML of names: {error}. {DRAFT}") from None
    if not isinstance(content, dict) or not content:
        raise CompareError(f"The mapping {path} is empty. It has sections, such as: sites: {{h.0: layers.0}}")
    for name in content:
        if name not in SECTIONS:
            hint = did_you_mean(str(name), SECTIONS)
            raise CompareError(f"The mapping {path} has a section {name!r}; there are {', '.join(SECTIONS)}.{hint}")
    found: dict[str, Any] = {name: _names(path, name, content.get(name) or {}) for name in NAMES}
    patterns = [(_checked(path, pattern, target), target) for pattern, target in found.pop("patterns").items()]
    paths = content.get("paths") or {}
    if not isinstance(paths, dict):
        raise CompareError(f"paths of the mapping {path} is {paths!r:.80}; {_PATHS}.")
    found["paths"] = {str(name): _names(path, f"paths of {name}", given or {}) for name, given in paths.items()}
    found["attributes"] = _attributes(path, content.get("attributes") or {})
    found["layouts"] = _layouts(path, content.get("layouts") or {})
    found |= {field: _listed(path, section, content.get(section) or []) for section, field in LISTS.items()}
    return Mapping(patterns=patterns, **found)


_PATHS = "it has the names of functions, and for each of them paths, such as: layer_norm: {'1': kwargs.weight}"


def _names(path: Path, section: str, names: Any) -> dict[str, str]:
    if not isinstance(names, dict):
        raise CompareError(
            f"{section} of the mapping {path} is {names!r:.80}; it maps names of the candidate to names."
        )
    return {str(name): str(target) for name, target in names.items()}


def _attributes(path: Path, rules: Any) -> dict[str, AttributeRule]:
    if not isinstance(rules, dict):
        raise CompareError(
            f"attributes of the mapping {path} is {rules!r:.80}; it maps names of the candidate to names."
        )
    for name, rule in rules.items():
        inner = next(iter(rule.values()), None) if isinstance(rule, dict) and len(rule) == 1 else None
        if not isinstance(rule, str) and not isinstance(inner, dict):
            raise CompareError(
                f"The attribute {name!r} of the mapping {path} is {rule!r:.80}; it is a name, '1 - momentum', or a "
                "name with values, such as {approximate: {true: tanh}}."
            )
    return {str(name): rule for name, rule in rules.items()}


def _listed(path: Path, section: str, names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or any(isinstance(name, dict | list) for name in names):
        raise CompareError(f"{section} of the mapping {path} is {names!r:.80}; it is a list of names.")
    return tuple(map(str, names))


def _layouts(path: Path, rules: Any) -> tuple[LayoutRule, ...]:
    if not isinstance(rules, dict):
        raise CompareError(
            f"layouts of the mapping {path} is {rules!r:.80}; it maps names of the candidate's tensors to {EXAMPLES}."
        )
    return tuple(_layout_rule(path, str(name), rule) for name, rule in rules.items())


def _layout_rule(path: Path, name: str, rule: Any) -> LayoutRule:
    try:
        re.compile(name)
        return LayoutRule(name, Layout.parse(rule))
    except re.error as error:
        raise CompareError(f"The name {name!r} in layouts of the mapping {path} is wrong: {error}.") from None
    except ValueError as error:
        raise CompareError(f"The layout of {name!r} in the mapping {path} is wrong: {error}.") from None


def _checked(path: Path, pattern: str, replacement: str) -> str:
    try:
        compiled = re.compile(pattern)
        re.sub(rf"(?:{pattern})|", replacement, "")  # a group that is not there
    except (re.error, IndexError) as error:
        raise CompareError(
            f"The pattern {pattern!r}: {replacement!r} of the mapping {path} is wrong: {error}."
        ) from None
    return compiled.pattern


def check_use(mapping: Mapping, file: str | Path, sites: Sequence[str]) -> None:
    """Raises CompareError when a mapping changes no name at all, for then it is not the one that was meant."""
    if (
        mapping != NOTHING
        and sites
        and mapping.is_of_sites
        and all({mapping.site(site), mapping.tensor(site)} == {site} for site in sites)
    ):
        raise CompareError(
            f"The mapping {file} maps nothing: no rule fits a site of the candidate, such as "
            f"{sites[len(sites) // 2]!r}. Its names on the left are those of the candidate. {DRAFT}"
        )
