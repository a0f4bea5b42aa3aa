"""A difference in words: its subject, and the sentence that a report says first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from astray.comparison.setup.setup_difference import ABSENT, Finding
from astray.records import ROOT
from astray.wording import counted

_SHOWN = 3
_DEEPEST = 8  # lists in lists that are shown; settings have two, and a damaged file has any number
_SUBJECTS = {
    "torch": "torch",
    "scaler": "GradScaler",
    "environment": "environment",
    "version": "versions",
    "device": "devices",
    "process": "ranks",
    "seed": "seeds",
}


CLIPPED = {"clip_grad_norm": "a norm", "clip_grad_value": "values"}
"""Settings of optimizers that are made before they step."""

WRITTEN = "written_gradient"
"""Whether a gradient was written to before a step, unlike the others of its optimizer."""


def subject_text(value: Any, deep: int = 0) -> str:
    """A value as a sentence has it. `deep`: in so many lists.

    >>> subject_text([0.9, 0.999]), subject_text(True), subject_text("high"), subject_text(1e-06)
    ('(0.9, 0.999)', 'True', 'high', '1e-06')
    """
    if value is ABSENT:
        return "nothing"
    if isinstance(value, list):
        return f"({', '.join(subject_text(one, deep + 1) for one in value)})" if deep < _DEEPEST else "(…)"
    return value.removeprefix("torch.") if isinstance(value, str) else str(value)


def subject_of(findings: Sequence[Finding]) -> str:
    """What was set: of many places, how many and of which kind."""
    first = findings[0]
    if first.subject in _SUBJECTS:
        return _SUBJECTS[first.subject]
    if first.subject == "autocast" and len(findings) == 1 and first.site == ROOT:
        return "autocast"
    if first.subject == "optimizer":
        return "parameters" if first.name == "parameters" else f"optimizer {_groups(findings)}"
    noun = {"config": "configuration", "autocast": "module", "argument": "call"}.get(first.subject, first.subject)
    if len(findings) == 1:
        has_class = first.type and first.subject in ("module", "autocast")
        return f"{noun} {first.site}" + (f" ({first.type})" if has_class else "")
    return f"{counted(len(findings), noun)}{_types(findings)}"


def sentence_of(findings: Sequence[Finding], step: int | None) -> str:
    """The difference in a sentence."""
    text = _sentence(findings)
    if step is None:
        return text
    begin = f"In step {step}" if findings[0].name == WRITTEN else f"From step {step} on"
    return f"{begin}, {text if text[:2].isupper() or not _is_word(text) else text[0].lower() + text[1:]}"


def _is_word(text: str) -> bool:
    """Whether a sentence begins with a plain word, and not with a name of the program's."""
    return text.startswith(("The ", "Autocast "))


def _sentence(findings: Sequence[Finding]) -> str:
    first, several = findings[0], len(findings) > 1
    reference, candidate = subject_text(first.reference), subject_text(first.candidate)
    has, is_ = ("have", "are") if several else ("has", "is")
    things = _named(findings)
    if first.subject == "optimizer":
        return _of_optimizer(findings, things, is_)
    if first.subject == "autocast":
        where = "" if first.site == ROOT and not several else f" for {things}"
        return (
            f"Autocast is {_autocast(reference)} in the reference and {_autocast(candidate)} in the candidate{where}."
        )
    if first.subject == "argument":
        if "<tensor>" in (first.reference, first.candidate):
            reference, candidate = (_argument_value(value) for value in (first.reference, first.candidate))
        called = "are called" if several else "is called"
        name = _argument(first.name)
        return f"{things} {called} with {name} {reference} in the reference and {candidate} in the candidate."
    if first.subject == "parameter" and first.name == "tensor":
        return _only_in_one_run(findings, things, is_)
    if first.subject == "parameter" and first.name == "requires_grad":
        reference, candidate = ("trained" if value else "frozen" for value in (first.reference, first.candidate))
        return f"{things} {is_} {reference} in the reference and {candidate} in the candidate."
    if first.subject == "parameter":
        return f"{things} {is_} {reference} in the reference and {candidate} in the candidate."
    if first.subject in ("module", "config"):
        return _of_module(findings, things, has, is_)
    if first.subject == "swap":
        sides = f"{_swapped(first.reference)} in the reference and {_swapped(first.candidate)} in the candidate"
        return f"{things} {is_} {sides}."
    if first.subject == "graft":
        return f"{things} {is_} grafted {_grafted(first)}."
    return _of_program(first, reference, candidate)


def _grafted(finding: Finding) -> str:
    """From which run, and in which of the two."""
    reference, candidate = subject_text(finding.reference), subject_text(finding.candidate)
    if finding.reference is None:
        return f"from {candidate} in the candidate, and not in the reference"
    if finding.candidate is None:
        return f"from {reference} in the reference, and not in the candidate"
    return f"from {reference} in the reference and from {candidate} in the candidate"


def _swapped(to: Any) -> str:
    return "as the program has it" if to is None else f"swapped to {subject_text(to)}"


def _of_module(findings: Sequence[Finding], things: str, has: str, is_: str) -> str:
    first = findings[0]
    reference, candidate = subject_text(first.reference), subject_text(first.candidate)
    if first.name == "class" and ABSENT in (first.reference, first.candidate):
        return _only_in_one_run(findings, things, is_)
    if first.name == "class":
        return f"{things} {is_} {reference} in the reference and {candidate} in the candidate."
    if first.name == "training":
        reference, candidate = ("training" if value else "evaluation" for value in (first.reference, first.candidate))
        return f"{things} {is_} in {reference} mode in the reference and in {candidate} mode in the candidate."
    if first.name == "device":
        return f"{things} {is_} on {reference} in the reference and on {candidate} in the candidate."
    if first.name == "wrapped in":
        return f"{things} {is_} wrapped in {reference} in the reference and in {candidate} in the candidate."
    if ABSENT in (first.reference, first.candidate):
        side, other, value = (
            ("candidate", "reference", candidate)
            if first.reference is ABSENT
            else ("reference", "candidate", reference)
        )
        return f"{things} {has} {first.name} {value} in the {side} and no such attribute in the {other}."
    return f"{things} {has} {first.name} {reference} in the reference and {candidate} in the candidate."


def _of_optimizer(findings: Sequence[Finding], things: str, is_: str) -> str:
    first = findings[0]
    reference, candidate = subject_text(first.reference), subject_text(first.candidate)
    if first.name == "class":
        return f"The optimizer is {reference} in the reference and {candidate} in the candidate."
    if first.name == "parameters":
        reference, candidate = (
            "not optimized" if value is ABSENT else f"optimized by {value}"
            for value in (first.reference, first.candidate)
        )
        return f"{things} {is_} {reference} in the reference and {candidate} in the candidate."
    if first.name in CLIPPED:
        reference, candidate = (f"clipped to {CLIPPED[first.name]} of {text}" if value != "off" else "not clipped"
                       for value, text in ((first.reference, reference), (first.candidate, candidate)))  # fmt: skip
        return (
            f"The gradients of {_groups(findings)} are {reference} in the reference and {candidate} in the candidate."
        )
    if first.name == WRITTEN:
        side, other = ("reference", "candidate") if first.reference else ("candidate", "reference")
        gradient = "gradient" if len(findings) == 1 else "gradients"
        return f"The {gradient} of {things} {is_} changed between backward and step in the {side}, not in the {other}."
    steps = f"{_groups(findings)} steps with {first.name}"
    return f"{steps} {reference} in the reference and {candidate} in the candidate."


def _of_program(first: Finding, reference: str, candidate: str) -> str:
    if first.subject == "environment":
        reference, candidate = ("not set" if value is None else text for value, text in
                       ((first.reference, reference), (first.candidate, candidate)))  # fmt: skip
        return f"{first.name} is {reference} in the reference and {candidate} in the candidate."
    if first.subject == "seed" and first.name != "PYTHONHASHSEED":
        if _is_random(first.reference) and _is_random(first.candidate):
            return f"No seed of {first.name} is set in either run, so their random numbers differ."
        reference, candidate = ("not set" if _is_random(value) else text for value, text in
                       ((first.reference, reference), (first.candidate, candidate)))  # fmt: skip
    if first.subject == "seed":
        what = "PYTHONHASHSEED" if first.name == "PYTHONHASHSEED" else f"The seed of {first.name}"
        return f"{what} is {reference} in the reference and {candidate} in the candidate."
    if first.subject == "device":
        words = {"cpu": "The processor", "cpu.instructions": "The instructions that torch uses", "cuda": "The GPU"}
        what = words.get(first.name, f"The device's {first.name}")
        return f"{what} is {reference} in the reference and {candidate} in the candidate."
    if first.subject == "process":
        return f"The {first.name.replace('_', ' ')} is {reference} in the reference and {candidate} in the candidate."
    if first.subject == "version":
        return f"{first.name} is {reference} in the reference and {candidate} in the candidate."
    return f"{_SUBJECTS[first.subject]}: {first.name} is {reference} in the reference and {candidate} in the candidate."


def _is_random(seed: Any) -> bool:
    """Whether a seed is one that torch has drawn for itself, of 64 bits; people's own are smaller."""
    return isinstance(seed, int) and seed >= 1 << 48


def _only_in_one_run(findings: Sequence[Finding], things: str, is_: str) -> str:
    return f"{things} {is_} only in the {'candidate' if findings[0].reference is ABSENT else 'reference'}."


def _named(findings: Sequence[Finding]) -> str:
    """The modules, calls or parameters that a sentence is about: the first few by name."""
    first = findings[0]
    nouns = {"argument": "call", "config": "configuration", "optimizer": "parameter", "swap": "part", "graft": "graft"}
    if len(findings) == 1:
        if first.subject == "config":
            return f"The configuration of {first.site}"
        with_class = first.type and first.subject in ("module", "autocast") and first.name != "class"
        return f"{first.site} ({first.type})" if with_class else first.site
    names = ", ".join(finding.site for finding in findings[:_SHOWN]) + (", …" if len(findings) > _SHOWN else "")
    noun = nouns.get(first.subject, "module")
    many = f"{len(findings):,} parameters and buffers" if first.subject == "parameter" else counted(len(findings), noun)
    kinds = "" if first.name == "class" else _types(findings).strip(" ()")
    return f"{many} ({f'{kinds}: ' if kinds else ''}{names})"


def _types(findings: Sequence[Finding]) -> str:
    kinds = list(dict.fromkeys(finding.type for finding in findings if finding.type))
    if not kinds or findings[0].subject in ("parameter", "config"):
        return ""
    return f" ({', '.join(kinds[:_SHOWN])}{', …' if len(kinds) > _SHOWN else ''})"


def _groups(findings: Sequence[Finding]) -> str:
    """Which groups of which optimizer: `AdamW, group 0`."""
    places = list(dict.fromkeys(finding.type for finding in findings))
    label = places[0].partition(", ")[0]
    numbers = [place.rpartition(" ")[2] for place in places if ", group " in place]
    if not numbers:
        return label
    return f"{label}, group {numbers[0]}" if len(numbers) == 1 else f"{label}, groups {', '.join(numbers)}"


def _argument(name: str) -> str:
    return f"argument {name}" if name.partition(".")[0].isdigit() else name


def _argument_value(value: Any) -> str:
    return "a tensor" if value == "<tensor>" else subject_text(value)


def _autocast(state: str) -> str:
    if state == "off":
        return state
    return f"on ({state})"
