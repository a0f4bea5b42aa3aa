"""How well calls are paired by their order when some are missing: `python benchmarks/streams.py`.

A stream of equal layers, as the ops of a model are, against itself with calls left out at random and others put in.
What a call has besides its kind and its shapes decides: nothing, a name, or the size of its numbers. Prints a markdown
table for RESULTS.md.
"""

from __future__ import annotations

import time

import numpy as np
from tables import markdown, provenance

from astray.comparison.pair.sequence_alignment import CallStream, pair_streams

PER_LAYER, KINDS, SHAPES, LAYERS = 40, 18, 8, 24
KNOWN = ("kinds and shapes", "and names", "and sizes")


def main() -> None:
    print(provenance({}))
    rows = []
    for calls in (2_000, 20_000, 100_000):
        for share in (0.0, 0.05, 0.2, 0.5):
            found = [trial(calls, share, known) for known in KNOWN]
            longest = max(seconds for _, seconds in found)
            rows.append([f"{calls:,}", f"{share:.0%}", *(f"{right:.3f}" for right, _ in found), f"{longest:.1f}"])
    heads = ["calls", "left out", *KNOWN, "seconds at most"]
    print("\nShare of the calls left that found their true partner.\n")
    print(markdown(heads, rows))


def trial(calls: int, share: float, known: str) -> tuple[float, float]:
    """The share of true pairs that are found, and the seconds it took."""
    random = np.random.default_rng(0)
    whole = stream(calls, random)
    truth = np.flatnonzero(random.random(len(whole)) >= share)
    kept = CallStream(*(column[truth] for column in whole))
    at = np.flatnonzero(random.random(len(kept)) < share / 4)  # others that were put in
    other = CallStream(
        random.integers(0, KINDS, len(at)),
        random.integers(0, SHAPES, len(at)),
        -at - 1,
        random.normal(size=len(at)) * 2,
    )
    candidate = CallStream(*(np.insert(column, at, more) for column, more in zip(kept, other, strict=True)))
    truth = np.insert(truth, at, -1)
    sides = [only(side, known) for side in (whole, candidate)]
    started = time.perf_counter()
    left, right = pair_streams(*sides)
    seconds = time.perf_counter() - started
    return float(np.sum(truth[right] == left) / np.sum(truth >= 0)), seconds


def stream(calls: int, random: np.random.Generator) -> CallStream:
    """Steps of equal layers between a few calls of their own."""
    kinds, shapes = random.integers(0, KINDS, PER_LAYER), random.integers(0, SHAPES, PER_LAYER)
    step = [np.concatenate([[90, 91], np.tile(one, LAYERS), [92, 93, 94]]) for one in (kinds, shapes)]
    count = max(calls // len(step[0]), 1)
    kind, detail = (np.tile(one, count) for one in step)
    return CallStream(kind, detail, np.arange(len(kind)), random.normal(size=len(kind)) * 2)


def only(side: CallStream, known: str) -> CallStream:
    name = side.name if known == "and names" else np.zeros(len(side), np.int64)
    size = side.size if known == "and sizes" else np.full(len(side), np.nan)
    return CallStream(side.kind, side.detail, name, size)


if __name__ == "__main__":
    main()
