"""What is declared of each planted fault and of each control, by hand, beside the code that plants it.

A culprit is declared as the program has it, and not as some recording shows it. `Fault.expected` says what of it the
best possible answer could name, given what a setting records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from faults.training import Program, Training

Phase = Literal["forward", "backward", "update"]
Cause = Literal["computation", "parameter", "input"]
Plant = Callable[[Training], object]

PLAIN = Program()
OUTSIDE = ""
"""The site of functions that are called outside of every module."""
LOSS = "/cross_entropy"
"""The loss, of which every recording has the labels."""
ANYWHERE = "*"
"""The site of what is wrong in every parameter at once: which of them shows it first is the order of the model."""
ROOT = "<root>"
OPTIMIZER = "AdamW"


@dataclass(frozen=True)
class Culprit:
    """Where a program goes wrong first.

    site: a module, a parameter (for its gradient or update), OPTIMIZER for all that it updates, OUTSIDE
        or ANYWHERE.
    cause: the site computes wrongly, starts from a wrong parameter or buffer, or is given a wrong input from outside.
    function: which function of the site's own code is wrong, where it is one that the reference calls too.
    setting: the name of what is set differently (`eps`, `lr`, …), where that is the cause.
    """

    step: int
    site: str
    phase: Phase
    cause: Cause
    function: str | None = None
    setting: str | None = None

    def __str__(self) -> str:
        site = self.site if self.function is None else f"{self.site}/{self.function}"
        return f"step {self.step} {self.phase} {site}: {self.cause}"


@dataclass(frozen=True)
class Setting:
    """How much is recorded, and beside what.

    background: a control that all candidates have in them, so that the fault is not the only difference. Without one,
        the runs are bit-identical until the fault.
    """

    name: str
    what: str
    options: dict[str, Any] = field(default_factory=dict)
    background: str | None = None
    functions: bool = False
    optimizer: bool = False

    def sees(self, culprit: Culprit) -> bool:
        """Whether the culprit's own call is among those recorded."""
        if culprit.phase == "update":
            return self.functions or self.optimizer
        return self.functions or culprit.site != OUTSIDE


UPDATE = {"optimizer": ["gradient", "weight", "state", "update"]}
FUNCTIONS = {"level": ["module", "function"], "optimizer": "calls"}
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("modules", "statistics of modules"),
        Setting("functions", "statistics of modules and functions", FUNCTIONS, functions=True),
        Setting("tensors", "tensors of modules", {"keep": "tensors"}),
        Setting("updates", "statistics of modules and updates", UPDATE, optimizer=True),
        Setting("noise", "statistics of modules, with other roundings everywhere", background="blocking"),
        Setting(
            "noise-tensors", "tensors of modules, with other roundings", {"keep": "tensors"}, background="blocking"
        ),
    )
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in the candidate, and the culprit that a comparison should name.

    shows: where it shows first in a recording that does not see the culprit itself, and then in one that sees less yet.
    """

    name: str
    what: str
    plant: Plant
    culprit: Culprit
    shows: tuple[Culprit, ...] = ()
    program: Program = PLAIN

    def expected(self, setting: Setting) -> Culprit:
        """The best answer that a recording with this setting allows."""
        seen = next((one for one in (self.culprit, *self.shows) if setting.sees(one)), None)
        assert seen is not None, f"{self.name} does not declare where it shows at the setting {setting.name}"
        if seen.phase == "update" and not setting.optimizer:
            return replace(seen, site=OPTIMIZER)  # its functions are recorded, but not whose parameter they are given
        return seen


@dataclass(frozen=True)
class Control:
    """Another way to compute the same, which must give no alarm."""

    name: str
    what: str
    plant: Plant
    program: Program = PLAIN


FAULTS: dict[str, Fault] = {}
CONTROLS: dict[str, Control] = {}


def fault(what: str, culprit: Culprit, *shows: Culprit, program: Program | None = None) -> Callable[[Plant], Plant]:
    """Declares the decorated function as what plants a fault; its name is the fault's."""

    def declare(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", "-")
        FAULTS[name] = Fault(name, what, plant, culprit, shows, program or PLAIN)
        return plant

    return declare


def control(what: str, *, program: Program | None = None) -> Callable[[Plant], Plant]:
    """Declares the decorated function as what makes a control; its name is the control's."""

    def declare(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", "-")
        CONTROLS[name] = Control(name, what, plant, program or PLAIN)
        return plant

    return declare
