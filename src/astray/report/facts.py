"""What is known of a divergence, as names and values: a column of the workbook."""

from __future__ import annotations

from collections.abc import Iterator

from astray.comparison.divergence import Divergence, Side
from astray.formatting import figures

Fact = tuple[str, str | int | float | None]


def facts_of(first: Divergence) -> Iterator[Fact]:
    """What is known of a divergence, a line each."""
    yield "rank", first.rank
    yield "place", first.place.full
    yield "cause", first.cause
    yield from ((f"evidence {at}", text) for at, text in enumerate(first.evidence, 1))
    yield from ((f"set differently {at}", one.sentence) for at, one in enumerate(first.settings, 1))
    yield "verdict", first.verdict
    yield "how sure", first.sureness
    yield "judged by", first.judged.full
    for name in ("error", "surprise", "measure", "deviation", "limit", "given", "rule", "siblings"):
        yield name, getattr(first, name)
    for name in ("furthest", "magnitude"):
        yield name, getattr(first, name)
    yield "measured by", first.measured_by
    if first.frame is not None:
        yield "line", f"{first.frame.file}:{first.frame.line} in {first.frame.function}"
        yield "code", first.frame.code
    yield "inside", " › ".join(f"{site} ({kind})" if kind else site for site, kind in first.enclosing)
    if first.previous is not None:
        yield "before it", f"{first.previous}: {first.previous.verdict}"
    yield "wrong rows after it", first.victims
    yield from ((f"error at step {step}", error) for step, error in first.growth)
    for label, side in (("reference", first.reference), ("candidate", first.candidate)):
        yield from ((f"{name}, {label}", value) for name, value in _side(side))
    yield from first.metrics.items()


def _side(side: Side) -> Iterator[Fact]:
    yield "dtype", side.dtype
    yield "shape", figures.shape(side.shape)
    yield "device", side.device
    if side.statistics is not None:
        yield from side.statistics._asdict().items()
    if side.fingerprint is not None:
        yield "fingerprint", f"{side.fingerprint:016x}"
