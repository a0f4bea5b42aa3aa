"""A draft of a mapping as a file to read and edit: its rules, why they are there, and what they do not cover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from astray.comparison.pair.framework_names import PADDLE, TORCH, UNLIKE
from astray.wording import printable

if TYPE_CHECKING:
    from astray.comparison.pair.mapping_draft import Draft

_NAMES = {TORCH: "PyTorch", PADDLE: "Paddle"}


def draft_lines(draft: Draft) -> Iterator[str]:
    """The lines of the file."""
    mapping, known = draft.mapping, draft.known
    yield (
        f"# {'Modules' if draft.of_modules else 'Tensors'} of the candidate that have a partner: "
        f"{len(draft.pairs)} of {len(draft.pairs) + len(draft.only_candidate)}."
    )
    yield "# Each line is a name of the candidate and what the reference calls it."
    if known is not None:
        yield (
            f"# The reference is of {_NAMES[known.reference]}, the candidate of {_NAMES[known.candidate]}. "
            "Read every line before you use it."
        )
    yield from _section("sites", "", mapping.sites.items())
    yield from _section("patterns", "", mapping.patterns)
    yield from _section("types", "classes, by modules that are in the same place", mapping.types.items())
    yield from _section("functions", "by the last part of their sites", mapping.functions.items())
    yield from _section(
        "tensors", "parameters, buffers and states of optimizers, by the last part of their names",
        mapping.tensors.items(),
    )  # fmt: skip
    yield from _section("attributes", "what modules and optimizers are set to", mapping.attributes.items())
    yield from _paths(mapping.paths.items())
    yield from _layouts(draft)
    yield from _lists(draft)
    if not mapping.sites and not mapping.patterns:
        yield from ("", "# All names are the same." if known is None else "# All modules have the same names.")
    for side, lone in (("reference", draft.only_reference), ("candidate", draft.only_candidate)):
        if lone:
            yield from ("", f"# Only in the {side}:", *(f"#   {printable(module.label)}" for module in lone))


def _section(name: str, about: str, rules: Iterable[tuple[str, Any]]) -> list[str]:
    written = [f"  {_quoted(old)}: {_value(new)}" for old, new in rules]
    return ["", f"{name}:{f'  # {about}' if about else ''}", *written] if written else []


def _paths(rules: Iterable[tuple[str, Any]]) -> Iterator[str]:
    written = [f"  {_quoted(name)}: {_value(paths)}" for name, paths in rules]
    if written:
        yield from ("", "paths:  # where arguments and results of the candidate's functions are in the reference")
        yield from written


def _layouts(draft: Draft) -> Iterator[str]:
    """The rules with their reasons, and what to look at."""
    rules = draft.mapping.layouts
    if rules:
        yield from ("", "layouts:  # what to do to the candidate's tensor; its gradients and moments go with it")
        yield from (f"  # {reason}" for reason in draft.reasons)
    for rule in rules:
        yield f"  {_quoted(rule.name)}: {rule.layout}  # {printable(draft.why.get(rule.name, ''))}"
    if draft.unknown:
        yield from ("", "# No layout was found for these. If one is needed, add it to layouts:")
        yield from (f"#   {printable(sentence)}" for sentence in draft.unknown)


def _lists(draft: Draft) -> Iterator[str]:
    mapping, alone = draft.mapping, "the other side keeps nothing of the kind"
    for section, names, why in (
        ("not compared", mapping.not_compared, "; ".join({UNLIKE[name]: 0 for name in mapping.not_compared})),
        ("only in reference", mapping.only_in_reference, alone),
        ("only in candidate", mapping.only_in_candidate, alone),
    ):
        if names:
            yield from ("", f"{section}:  # {why}", f"  {_value(names)}")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, int | float):
        return str(value)
    return f"{{{', '.join(f'{_value(old)}: {_value(new)}' for old, new in value.items())}}}"


def _quoted(name: str) -> str:
    """In single quotes, in which YAML takes a backslash for a backslash; in double ones where signs need escapes."""
    if not name.isprintable():
        return '"' + printable(name.replace("\\", "\\\\").replace('"', '\\"')) + '"'
    return "'" + name.replace("'", "''") + "'"
