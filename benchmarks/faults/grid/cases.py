"""The cells of the grid: which fault of which model is looked for beside which honest difference, and how.

A case names the runs it compares; runs are shared wherever two cases need the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from faults.declared import ANYWHERE, OPTIMIZER, Culprit, Setting
from faults.grid.catalogue import KINDS
from faults.grid.declared import Kind
from faults.grid.models import MODELS, Model
from faults.grid.training import STEPS
from faults.grid.variants import DIFFERENCES, OTHER_BFLOAT16_KERNELS, Difference, Half, Variant

Keep = Literal["stats", "tensors"]
LEVELS: dict[str, list[str]] = {
    "module": ["module"],
    "function": ["function"],
    "module+function": ["module", "function"],
}
VALUES_BESIDE = OTHER_BFLOAT16_KERNELS
"""The differences beside which values are kept by default: with them a run takes 50 MB, and in float32 100 MB."""
SEEDS = (1, 2)
"""Of the perturbed recordings of a reference."""


@dataclass(frozen=True)
class Recording:
    """One run: a model in one variant, with at most one fault in it."""

    model: str
    variant: Variant
    kind: str | None = None
    steps: int = STEPS
    level: str = "module"
    keep: Keep = "stats"
    perturb: int | None = None
    again: bool = False  # the same once more, for a control without any difference

    @property
    def path(self) -> str:
        """Where it is in the folder of all runs."""
        what = self.kind or ("right" if self.perturb is None else f"perturbed-{self.perturb}")
        what = "again" if self.again else what
        return f"runs/{self.model}/{self.variant.name}/{what}-{self.steps}-{self.level}-{self.keep}"


@dataclass(frozen=True)
class Case:
    """Two runs to compare, and what should be found: `fault` and `culprit` are None for a control.

    reference, candidate, noise_runs: runs, relative to the folder of the index.
    culprit: the best answer that the recording allows; `also` is as good.
    """

    name: str
    model: str
    noise: str
    fault: str | None
    half: Half
    level: str
    keep: Keep
    reference: str
    candidate: str
    noise_runs: tuple[str, ...] = ()
    culprit: Culprit | None = None
    also: tuple[Culprit, ...] = ()

    @property
    def setting(self) -> Setting:
        return setting_of(self.level)

    def is_in(self, folder: Path) -> bool:
        """Whether all its runs are there."""
        return all((folder / run).exists() for run in (self.reference, self.candidate, *self.noise_runs))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, known: dict[str, Any]) -> Case:
        culprit = known["culprit"] and Culprit(**known["culprit"])
        also = tuple(Culprit(**one) for one in known["also"])
        return cls(**(known | {"culprit": culprit, "also": also, "noise_runs": tuple(known["noise_runs"])}))


def setting_of(level: str) -> Setting:
    """How a level is scored."""
    return Setting(level, level, {"level": LEVELS[level]}, functions="function" in LEVELS[level])


def cells(
    models: Collection[str] | None = None,
    noises: Collection[str] | None = None,
    faults: Collection[str] | None = None,
    half: str = "all",
) -> Iterator[tuple[Model, Difference, Kind | None, Half]]:
    """All models with all faults (None for the control) beside all differences, as far as chosen and possible here."""
    for model_number, model in enumerate(MODELS.values()):
        for number, difference in enumerate(DIFFERENCES.values()):
            if not _chosen(model.name, models) or not _chosen(difference.name, noises):
                continue
            if not model.available or not difference.available or difference.kernels not in (None, model.kernels):
                continue
            for kind in (None, *KINDS.values()):
                if not _chosen("control" if kind is None else kind.name, faults):
                    continue
                if kind is not None and not (kind.applies(model) and kind.beside(difference)):
                    continue
                belongs = half_of(model, difference, kind, model_number + number)
                if half in ("all", belongs):
                    yield model, difference, kind, belongs


def half_of(model: Model, difference: Difference, kind: Kind | None, number: int) -> Half:
    """A case is unseen if anything in it is. Of the controls that are left, every second one is unseen too."""
    halves = [model.half, difference.half, "seen" if kind is None else kind.half]
    if kind is None and number % 2:
        halves.append("unseen")
    return "unseen" if "unseen" in halves else "seen"


def cases_of(
    model: Model, difference: Difference, kind: Kind | None, half: Half, levels: Sequence[str], values: Collection[str]
) -> Iterator[tuple[Case, list[Recording]]]:
    """The cases of one cell, each with the runs it needs.

    There is one at each level, by statistics and by values, without and with noise runs. One of functions alone needs a
    run of modules too, which `consequences.py` reads.
    """
    steps = STEPS if kind is None else kind.steps
    for level in levels:
        for keep in ("stats", "tensors"):
            if keep == "tensors" and difference.name not in values:
                continue
            reference = Recording(model.name, difference.reference, None, steps, level, keep)
            candidate = replace(reference, variant=difference.candidate, kind=None if kind is None else kind.name)
            candidate = replace(candidate, again=candidate == reference)
            noise_runs = [replace(reference, perturb=seed) for seed in SEEDS]
            culprit, also = _expected(model, kind, level)
            shown_by = [replace(reference, level="module+function", keep="stats")] if level == "function" else []
            for runs in ([], noise_runs):
                name = [model.name, difference.name, kind.name if kind else "control", level, keep]
                case = Case(
                    "/".join([*name, *(["noise-run"] if runs else [])]),
                    *name[:2],
                    kind.name if kind else None,
                    half,
                    level,
                    keep,
                    reference.path,
                    candidate.path,
                    tuple(run.path for run in runs),
                    culprit,
                    also,
                )
                yield case, [reference, candidate, *runs, *shown_by]


def _expected(model: Model, kind: Kind | None, level: str) -> tuple[Culprit | None, tuple[Culprit, ...]]:
    if kind is None:
        return None, ()
    fault, functions = kind.planted(model), "function" in LEVELS[level]
    expected, also = fault.expected(setting_of(level)), kind.also
    if expected.phase == "update":  # a call that is left out, or one of another optimizer, shows in the next step alone
        also = (*also, *fault.shows)
    if expected.site == OPTIMIZER:
        expected = replace(expected, site=model.optimizer if functions else ANYWHERE)
    return expected, also


def _chosen(name: str, names: Collection[str] | None) -> bool:
    return names is None or name in names
