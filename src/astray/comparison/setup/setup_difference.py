"""A difference in how two runs were set up, the raw finding that it is made of, and what it may do to numbers.

Read by the other modules of `setup`, and by the reports. All judgements of effects are made here. A name that is not
listed changes results if it is a module's, an optimizer's or an argument's, for these are what a model is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from astray.stats import dtypes

DifferenceKind = Literal[
    "optimizer",
    "module",
    "argument",
    "precision",
    "data type",
    "kernel",
    "environment",
    "version",
    "device",
    "layout",
    "seed",
]
Effect = Literal["changes results", "changes rounding", "none known"]

ABSENT: Any = type("_Absent", (), {"__repr__": lambda _: "absent"})()
"""The value of what only the other run has."""


@dataclass(frozen=True)
class SetupDifference:
    """Something that was set differently in the two runs.

    rank, ranks: the first rank where it is so, and all of them.
    step: the first step in which it is so; None when it is from the start.
    subject: what was set: "optimizer AdamW, group 0", "module h.3.norm (RMSNorm)", "torch", "environment".
    site, sites: the first module, parameter or call that it is about, and all of them; empty when it is about all.
    name: what it is called: "eps", "lr", "dtype".
    reference, candidate: the two values; None for what is not set or not there.
    expected_effect: whether results change, or only their rounding, or neither as far as is known.
    epsilon: the unit roundoff of the coarser side, where the difference is one of precision: 2⁻⁸ for bfloat16.
    sentence: all of this in words.
    """

    rank: int
    step: int | None
    subject: str
    site: str
    name: str
    reference: Any
    candidate: Any
    kind: DifferenceKind
    expected_effect: Effect
    sentence: str
    epsilon: float | None = None
    sites: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """In how many places it is so."""
        return max(1, len(self.sites))

    def __str__(self) -> str:
        return self.sentence


class Finding(NamedTuple):
    """One value that differs in one place. `subject` is that of the recorded row, or "argument" or "parameter".

    `type` is the class of a module, the name of a function, or the optimizer's and its group.
    """

    subject: str
    site: str
    type: str
    name: str
    reference: Any
    candidate: Any
    step: int | None = None


# -- effects -----------------------------------------------------------------------------------------------------------

HARMLESS = {
    "module": {"inplace", "gradient_checkpointing", "device", "use_cache", "return_dict", "output_attentions"},
    "config": {
        "use_cache", "return_dict", "output_hidden_states", "output_attentions", "initializer_range", "dtype",
        "torch_dtype", "bos_token_id", "eos_token_id", "problem_type", "max_position_embeddings",
    },
    "optimizer": {"capturable", "differentiable", "initial_lr"},
    "argument": {"inplace", "use_cache", "return_dict", "output_hidden_states", "output_attentions", "non_blocking"},
    "torch": {"interop_threads"},
    "scaler": {"growth_interval", "growth_factor", "backoff_factor"},
    "process": {"backend"},
    "version": {"python", "numpy", "astray"},
    "seed": {"PYTHONHASHSEED"},
}  # fmt: skip
"""What is not known to change a number, by subject."""

ROUNDING = {
    "optimizer": {"foreach", "fused"},
    "config": {"_attn_implementation", "_experts_implementation"},
}
"""What changes roundings and nothing else, where other names of its subject change results."""

UNMOVED = {
    "Linear", "LayerNorm", "RMSNorm", "GroupNorm", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ReLU", "GELU", "SiLU",
    "Tanh", "Sigmoid", "Softmax", "Identity", "Sequential", "ModuleList", "ModuleDict", "MaxPool2d", "AvgPool2d",
    "AdaptiveAvgPool2d", "Flatten", "Bilinear", "CrossEntropyLoss", "MSELoss",
}  # fmt: skip
"""Classes of torch that do the same in training and in evaluation."""

_KINDS: dict[str, DifferenceKind] = {
    "module": "module",
    "config": "module",
    "optimizer": "optimizer",
    "argument": "argument",
    "autocast": "precision",
    "scaler": "precision",
    "environment": "environment",
    "version": "version",
    "device": "device",
    "process": "layout",
    "seed": "seed",
    "swap": "kernel",
    "graft": "kernel",
}

_UNITS = {"ieee": 2.0**-24, "highest": 2.0**-24, "off": 2.0**-24, "tf32": 2.0**-11, "high": 2.0**-11,
          "bf16": 2.0**-8, "medium": 2.0**-8}  # fmt: skip
"""Unit roundoffs: half the spacing of the numbers just above 1."""


def kind_of(finding: Finding) -> DifferenceKind:
    """What kind of difference it is."""
    subject, name = finding.subject, finding.name
    if subject == "parameter":
        kinds: dict[str, DifferenceKind] = {"dtype": "data type", "placement": "layout"}
        return kinds.get(name, "module")
    if subject in ("module", "config", "argument"):
        if name.endswith("_implementation"):
            return "kernel"
        if name == "wrapped in":
            return "layout"
        if name == "device" or (subject == "argument" and _are_devices(finding)):
            return "device"
        if _are_dtypes(finding):
            return "data type"
    if subject == "torch":
        precise = name.endswith("precision") or "reduced" in name or name in ("default_dtype", "fp16_accumulation")
        return "precision" if precise else "kernel"
    return _KINDS[subject]


def effect_of(finding: Finding) -> Effect:
    """What it may do to numbers."""
    subject, name = finding.subject, finding.name
    if name in HARMLESS.get(subject, ()):
        return "changes rounding" if name == "device" else "none known"
    if subject in ("parameter", "module", "config", "argument", "optimizer"):
        if name in ROUNDING.get(subject, ()) or kind_of(finding) in ("device", "kernel"):
            return "changes rounding"
        if _are_dtypes(finding):
            return "changes rounding" if _are_floats(finding) else "changes results"
        if name == "training" and finding.type in UNMOVED:
            return "none known"
        if name == "placement":
            return "changes rounding"
        if name == "wrapped in":
            return "none known"
        in_one_run = ABSENT in (finding.reference, finding.candidate)
        return "none known" if in_one_run and subject == "module" and name != "class" else "changes results"
    if subject in ("process", "seed", "graft") or (subject == "swap" and _is_a_callable(finding)):
        return "changes results"
    return "changes rounding"


def epsilon_of(finding: Finding) -> float | None:
    """The unit roundoff of the coarser side; None where the difference is not one of precision."""
    units = [unit_of(value) for value in (finding.reference, finding.candidate)]
    if None in units or effect_of(finding) == "none known":
        return None
    return max(unit for unit in units if unit is not None)


def unit_of(value: Any) -> float | None:
    """The unit roundoff that a word stands for, be it a dtype or a mode; None for other words."""
    if not isinstance(value, str):
        return None
    words = [word.removeprefix("torch.") for word in value.replace(",", " ").split()]
    found = [_UNITS[word] for word in words if word in _UNITS]
    found += [dtypes.find(word).eps / 2 for word in words if word in dtypes.DTYPES and dtypes.find(word).eps]
    return max(found) if found else None


def _are_dtypes(finding: Finding) -> bool:
    return all(
        isinstance(value, str) and value.removeprefix("torch.") in dtypes.DTYPES
        for value in (finding.reference, finding.candidate)
    )


def _are_floats(finding: Finding) -> bool:
    names = (str(value).removeprefix("torch.") for value in (finding.reference, finding.candidate))
    return all(dtypes.find(name).kind in ("float", "complex") for name in names)


def _is_a_callable(finding: Finding) -> bool:
    """Whether a callable was called instead in one of the runs. Those have dotted names, and no other word does."""
    return any(isinstance(value, str) and "." in value for value in (finding.reference, finding.candidate))


def _are_devices(finding: Finding) -> bool:
    known = ("cpu", "cuda", "mps", "xpu", "npu", "hpu", "meta")
    return all(
        isinstance(value, str) and value.partition(":")[0] in known for value in (finding.reference, finding.candidate)
    )
