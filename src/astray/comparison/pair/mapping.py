"""Maps names of the candidate to names of the reference: what a mapping file is for.

A model that was ported has other names for the same modules. The file maps names of the candidate to names of the
reference; docs/decides/alignment.md shows one, and `astray map` drafts it. Applied when rows are read, before pairing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astray.errors import CompareError
from astray.records import ROOT
from astray.safe_text import bounded_loader, check_bounded
from astray.wording import did_you_mean

SECTIONS = ("sites", "patterns", "types", "functions")
DRAFT = "Draft one with: astray map REFERENCE CANDIDATE"


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
    types: classes of modules. functions: functions and ops, by the last part of their site.
    """

    sites: Dictionary[str, str] = field(default_factory=dict)
    patterns: Sequence[tuple[str, str]] = ()
    types: Dictionary[str, str] = field(default_factory=dict)
    functions: Dictionary[str, str] = field(default_factory=dict)

    def site(self, name: str) -> str:
        """The reference's name of a site."""
        module, slash, function = name.partition("/")
        return self._module(module) + slash + self.functions.get(function, function)

    def type(self, name: str) -> str:
        """The reference's name of a class."""
        return self.types.get(name, name)

    def _module(self, name: str) -> str:
        if not name or not (self.sites or self.patterns):
            return name
        length, target = self._known(name)
        for pattern, replacement in self.patterns:
            found = re.match(rf"(?:{pattern})(?=\.|$)", name)
            if found and found.end() > length:
                length, target = found.end(), found.expand(replacement)
        if target is None:
            return name
        rest = "" if name == ROOT else name[length:].lstrip(".")
        return ".".join(filter(None, ["" if target == ROOT else target, rest])) or ROOT

    def _known(self, name: str) -> tuple[int, str | None]:
        """How much of a name is listed, and what that is called in the reference. None when nothing of it is."""
        end = 0 if name == ROOT else len(name)
        while end > 0:
            if name[:end] in self.sites:
                return end, self.sites[name[:end]]
            end = max(name.rfind(".", 0, end), 0)
        return 0, self.sites.get(ROOT)


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
    found = {name: _names(path, name, content.get(name) or {}) for name in SECTIONS}
    patterns = [(_checked(path, pattern, target), target) for pattern, target in found.pop("patterns").items()]
    return Mapping(patterns=patterns, **found)


def _names(path: Path, section: str, names: Any) -> dict[str, str]:
    if not isinstance(names, dict):
        raise CompareError(
            f"{section} of the mapping {path} is {names!r:.80}; it maps names of the candidate to names."
        )
    return {str(name): str(target) for name, target in names.items()}


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
    if mapping != NOTHING and sites and all(mapping.site(site) == site for site in sites) and not mapping.types:
        raise CompareError(
            f"The mapping {file} maps nothing: no rule fits a site of the candidate, such as "
            f"{sites[len(sites) // 2]!r}. Its names on the left are those of the candidate. {DRAFT}"
        )
