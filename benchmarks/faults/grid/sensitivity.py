"""The smallest error of one weight that is named: × (1 + 2⁻ᵏ), in the middle of llama-like models of several depths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tables import markdown

import astray
from faults.declared import Culprit
from faults.grid.cases import Keep, setting_of
from faults.grid.models import Model, llama
from faults.grid.recording import record_training
from faults.grid.training import Training
from faults.grid.variants import DIFFERENCES, Difference, Variant
from faults.scoring import score

DEPTHS = (4, 12, 24)
NOISES = ("none", "sdpa", "bf16-same", "bf16-sdpa", "bf16-weights", "autocast")
LARGEST, SMALLEST = 2, 20
"""The exponents k that are tried, one after another, until two in a row are not named."""


@dataclass(frozen=True)
class Point:
    """How small an error is still named, with all larger ones: 2 to the minus `exponent`; None if none is."""

    noise: str
    depth: int
    keep: Keep
    exponent: int | None


def curve(noises: Sequence[str], depths: Sequence[int], keeps: Sequence[Keep]) -> Iterator[Point]:
    """Measure each point; those that are not possible here are left out."""
    for noise in noises:
        difference = DIFFERENCES[noise]
        if not difference.available or difference.kernels == "convolution":
            continue
        for depth in depths:
            for keep in keeps:
                with TemporaryDirectory(prefix="astray-sensitivity-") as folder:
                    yield Point(noise, depth, keep, smallest(Path(folder), difference, depth, keep))


def smallest(folder: Path, difference: Difference, depth: int, keep: Keep) -> int | None:
    """The largest k whose error is named, before the first two that are not."""
    model = llama(f"llama-{depth}", depth, "seen")
    site = model.layout.site("down", depth // 2)
    culprit = Culprit(0, site, "forward", "parameter")
    _record(folder / "reference", model, difference.reference, keep, site, 1.0)
    named, misses = None, 0
    for exponent in range(LARGEST, SMALLEST + 1):
        _record(folder / "candidate", model, difference.candidate, keep, site, 1.0 + 2.0**-exponent)
        first = None
        with suppress(astray.AstrayError):
            first = astray.compare(folder / "reference", folder / "candidate").first
        if score(first, culprit, setting_of("module")) == "exact":
            named, misses = exponent, 0
        else:
            misses += 1
        if misses == 2:
            break
    return named


def _record(path: Path, model: Model, variant: Variant, keep: Keep, site: str, factor: float) -> None:
    training = Training(model, variant)
    training.module(site).weight.data.mul_(factor)
    record_training(training, path, level=["module"], keep=keep)


def curve_table(points: Sequence[Point]) -> str:
    """One line for each difference and way to keep tensors, one column for each depth."""
    depths = list(dict.fromkeys(point.depth for point in points))
    found = {(point.noise, point.keep, point.depth): point.exponent for point in points}
    rows = []
    for noise, keep in dict.fromkeys((point.noise, point.keep) for point in points):
        by = "by values" if keep == "tensors" else "by statistics"
        rows.append([DIFFERENCES[noise].what, by, *(_size(found.get((noise, keep, depth))) for depth in depths)])
    return markdown(["reference → candidate", "judged", *(f"{depth} layers" for depth in depths)], rows, words=2)


def _size(exponent: int | None) -> str:
    return "none" if exponent is None else f"2^-{exponent} ({100 * 2.0**-exponent:.2g} %)"
