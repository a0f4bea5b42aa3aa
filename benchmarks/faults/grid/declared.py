"""What is declared of each kind of fault of the grid: where it goes, and what a comparison should name.

A kind is planted in every model that has the part it is about. Which layer it takes is fixed, so that it is the same
each time; layers are counted from the first again where a model has fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from faults.declared import ANYWHERE, OPTIMIZER, Cause, Culprit, Fault, Phase
from faults.grid.models import Layout, Model
from faults.grid.training import STEPS, Training
from faults.grid.variants import Difference, Half

Plant = Callable[[Training, str], object]
"""Plants a fault at a site."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    parts: the part of a layer that it is planted in: the first of these that a model has. Empty: the site is given.
    layer: which layer, or None for all of them, of which the first is the culprit.
    site: where it is planted if not in a part of a layer.
    culprit_part: the part of the layer that is to blame, if it is not the one that is changed.
    suffix: of the culprit's site: ".weight" for the gradient of a weight.
    shows: where it shows first in a recording that does not see the culprit.
    also: what else is exact, because it cannot be told from the culprit.
    features: what a model must have for it.
    models: the only models it is for.
    steps: how many steps it takes until it shows.
    coarse: False if it is itself a rounding to bfloat16, so that beside bfloat16 it is not a fault.
    """

    name: str
    what: str
    plant: Plant
    half: Half
    parts: tuple[str, ...] = ()
    layer: int | None = None
    site: str | None = None
    culprit_part: str | None = None
    suffix: str = ""
    step: int = 0
    phase: Phase = "forward"
    cause: Cause = "computation"
    function: str | None = None
    setting: str | None = None
    shows: tuple[Culprit, ...] = ()
    also: tuple[Culprit, ...] = ()
    features: frozenset[str] = frozenset()
    models: tuple[str, ...] | None = None
    optimizer: str | None = None
    steps: int = STEPS
    coarse: bool = True

    def applies(self, model: Model) -> bool:
        """Whether a model has what this is about."""
        if self.models is not None and model.name not in self.models:
            return False
        if self.optimizer is not None and model.optimizer != self.optimizer:
            return False
        return self.features <= model.features and (not self.parts or self._part(model.layout) is not None)

    def beside(self, difference: Difference) -> bool:
        """Whether it is a fault where two runs differ in this way."""
        coarse = any(
            variant.dtype == "bfloat16" or variant.autocast or variant.tf32
            for variant in (difference.reference, difference.candidate)
        )
        return self.coarse or not coarse

    def planted(self, model: Model) -> Fault:
        """The fault in one model, with its culprit."""
        sites = self._sites(model.layout)
        blamed = sites[0]
        if self.culprit_part is not None:
            assert self.layer is not None
            blamed = model.layout.site(self.culprit_part, self.layer)
        culprit = Culprit(self.step, blamed + self.suffix, self.phase, self.cause, self.function, self.setting)

        def plant(training: Training) -> None:
            for site in sites:
                self.plant(training, site)

        shows = tuple(
            Culprit(one.step, one.site or sites[0], one.phase, one.cause, one.function, self.setting)
            for one in self.shows
        )
        return Fault(f"{model.name}/{self.name}", self.what, plant, culprit, shows)

    def _part(self, layout: Layout) -> str | None:
        return next((part for part in self.parts if part in layout.parts), None)

    def _sites(self, layout: Layout) -> list[str]:
        if self.site is not None:
            return [self.site]
        part = self._part(layout)
        assert part is not None
        return layout.sites(part) if self.layer is None else [layout.site(part, self.layer)]


KINDS: dict[str, Kind] = {}


def kind(
    what: str, *parts: str, features: str = "", half: Half = "seen", **declared: object
) -> Callable[[Plant], Plant]:
    """Declares the decorated function as what plants a kind of fault.

    half: "unseen" until someone has looked at how it is judged, in any model.
    """

    def declare(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", "-")
        needed = frozenset(features.split(",") if features else ())
        KINDS[name] = Kind(name, what, plant, half, parts, features=needed, **declared)  # type: ignore[arg-type]
        return plant

    return declare


def updated(step: int = 0, setting: str | None = None, shows: int = 1) -> dict[str, object]:
    """A fault of the optimizer in one step: recorded modules show it as weights of the next, or so many steps later."""
    return {
        "site": OPTIMIZER,
        "step": step,
        "phase": "update",
        "setting": setting,
        "shows": (Culprit(step + shows, ANYWHERE, "forward", "parameter"),),
    }
