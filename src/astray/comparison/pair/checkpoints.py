"""What is particular about comparing two checkpoints: there is no order of execution, and names may be wrapped.

Without an order nothing can be blamed for the rest, so in place of a first divergence there is the largest, and after
it the others in the order of their size. Names that differ only because one model was wrapped, or saved inside of
something, are paired, and the report says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from astray.comparison.blame.first import side_of
from astray.comparison.divergence import Divergence, Side, TensorPlace
from astray.comparison.measure.metrics import BOUNDS, METRICS, SLICES
from astray.comparison.pair.mapping import NOTHING, Mapping
from astray.comparison.pair.matching import Matching
from astray.comparison.rows import Ints
from astray.comparison.verdict import BAD, Verdict
from astray.errors import CompareError
from astray.store import CheckpointData, RankRun, RunData, Table
from astray.wording import counted

MOST = 20
"""So many tensors are named after the one that is furthest off; the rows have all."""

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What DDP, compile, FSDP and activation checkpointing put into the names of what they wrap."""

DEEPEST_PREFIX = 3
"""How many parts a name has at most of what a model was saved inside of, such as `state_dict.model.`"""

Rewording = Callable[[str], str]

# -- names -------------------------------------------------------------------------------------------------------------


def pair_names(reference: RunData, candidate: RunData, matching: Matching) -> tuple[Matching, list[str]]:
    """The matching, with names paired that differ by wrappers alone; and what to say about it.

    Raises CompareError for a checkpoint and a run, and for options that only runs have.
    """
    kinds = [isinstance(run, CheckpointData) for run in (reference, candidate)]
    if not any(kinds):
        return matching, []
    if not all(kinds):
        which, run = (reference, candidate) if kinds[0] else (candidate, reference)
        raise CompareError(
            f"{which.path} is a checkpoint and {run.path} is a recording, which cannot be compared. Compare two "
            "checkpoints, or save one where the recording was made."
        )
    if matching.micro != "paired":
        raise CompareError("Checkpoints have no micro steps: --micro is for recordings.")
    if matching.mapping != NOTHING or matching.by != "key":
        return matching, []
    names_reference, names_candidate = _names(reference), _names(candidate)
    found = find_renaming(names_reference, names_candidate)
    if not found.names and not set(names_reference) & set(names_candidate):
        raise CompareError(_nothing_shared(reference, names_reference, candidate, names_candidate))
    if not found.names:
        return matching, []
    return replace(matching, mapping=Mapping(sites=found.names)), [found.sentence]


def _nothing_shared(
    reference: RunData, names_reference: list[str], candidate: RunData, names_candidate: list[str]
) -> str:
    have = "; ".join(
        f"{run.path} has {counted(len(names), 'tensor')}, such as {names[len(names) // 2]}"
        for run, names in ((reference, names_reference), (candidate, names_candidate))
    )
    return (
        f"There is nothing to compare: no tensor has the same name in both checkpoints. {have}. Draft what belongs "
        f"together with `astray map {reference.path} {candidate.path} > map.yaml`, and give it with --map map.yaml."
    )


def _names(run: RunData) -> list[str]:
    return [name for rank in run.ranks.values() for name in rank.calls.coded("site").values]


class Renaming(NamedTuple):
    """What names of the candidate are called in the reference, and a sentence about it."""

    names: dict[str, str]
    sentence: str


def find_renaming(reference: list[str], candidate: list[str]) -> Renaming:
    """Pair names that have no partner and differ by wrappers, or by one prefix.

    >>> find_renaming(["h.0.weight"], ["module.h.0.weight"]).names
    {'module.h.0.weight': 'h.0.weight'}
    """
    unmatched = _Unmatched(_without(reference, candidate), _without(candidate, reference))
    names: dict[str, str] = {}
    sentences: list[str] = []
    wrapped = unmatched.pairs(_unwrapped, _unwrapped)
    if wrapped:
        names |= wrapped
        wrappers_reference, wrappers_candidate = (_wrappers(_without(side, other)) for side, other in _sides(wrapped))
        which = [
            f"{_listed(found)} of the {side}"
            for side, found in (("reference", wrappers_reference), ("candidate", wrappers_candidate))
            if found
        ]
        sentences.append(f"without {' and '.join(which)}")
        unmatched = unmatched.without(wrapped)
    side, prefix = unmatched.best_prefix()
    if prefix:
        rewordings: list[Rewording] = [_unwrapped, _unwrapped]
        rewordings[side] = lambda name: _cut(_unwrapped(name), prefix)
        names |= unmatched.pairs(*rewordings)
        sentences.append(f"without the prefix {prefix} of the {('reference', 'candidate')[side]}")
    if not names:
        return Renaming({}, "")
    new, old = next(iter(names.items()))
    return Renaming(
        names,
        f"Names are paired {', and '.join(sentences)}: {counted(len(names), 'tensor')}, such as {new} with {old}. A "
        "mapping given with --map pairs them in another way.",
    )


class _Unmatched(NamedTuple):
    """Names that only one side has."""

    reference: list[str]
    candidate: list[str]

    def pairs(self, reference: Rewording, candidate: Rewording) -> dict[str, str]:
        """Names of the candidate and of the reference that are the same and unique once both are reworded."""
        names, names_candidate = _unique(self.reference, reference), _unique(self.candidate, candidate)
        return {names_candidate[name]: names[name] for name in names_candidate if name in names}

    def without(self, paired: dict[str, str]) -> _Unmatched:
        return _Unmatched(_without(self.reference, paired.values()), _without(self.candidate, paired))

    def best_prefix(self) -> tuple[int, str]:
        """The side and the prefix without which most names are those of the other side; none if that is not half."""
        sides = [[_unwrapped(name) for name in side] for side in self]
        best, found = 0, (0, "")
        for side in (0, 1):
            others = set(sides[1 - side])
            counts = Counter(
                prefix for name in sides[side] for prefix in _prefixes(name) if name.removeprefix(prefix) in others
            )
            for prefix, count in counts.items():
                if count > best:
                    best, found = count, (side, prefix)
        return found if 2 * best >= max(min(map(len, sides)), 1) else (0, "")


def _unique(names: Iterable[str], reworded: Rewording) -> dict[str, str]:
    """Names by what they are reworded to, where that is of one name alone. A slash has a meaning in mappings."""
    found: dict[str, list[str]] = {}
    for name in names:
        if "/" not in name:
            found.setdefault(reworded(name), []).append(name)
    return {new: old[0] for new, old in found.items() if len(old) == 1 and new}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _cut(name: str, prefix: str) -> str:
    """The name without the prefix; nothing for a name that has another."""
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) + "." for depth in range(1, min(len(parts), DEEPEST_PREFIX + 1))]


def _wrappers(names: Iterable[str]) -> list[str]:
    """The wrappers that occur in names."""
    parts = {part for name in names for part in name.split(".")}
    return [f"{wrapper}." for wrapper in WRAPPERS if wrapper in parts]


def _sides(paired: dict[str, str]) -> tuple[tuple[list[str], list[str]], tuple[list[str], list[str]]]:
    return (list(paired.values()), list(paired)), (list(paired), list(paired.values()))


def _without(names: Iterable[str], left_out: Iterable[str]) -> list[str]:
    known = set(left_out)
    return [name for name in names if name not in known]


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# -- differences -------------------------------------------------------------------------------------------------------


def find_worst(pairs: Table, rank: int, reference: RankRun, candidate: RankRun) -> list[Divergence]:
    """The tensors that differ, those that are furthest off first; none when none does."""
    bad = np.flatnonzero(np.isin(pairs.coded("verdict").codes, BAD))
    verdict, error = pairs.coded("verdict").codes[bad], np.nan_to_num(pairs.numbers("error")[bad], nan=0.0)
    error = np.where(verdict == Verdict.DIVERGED, error, np.inf)  # NaN, or another shape or kind of number: no size
    worst = bad[np.argsort(-error, kind="stable")]
    found = [
        _divergence(pairs, rank, reference, candidate, row, at) for at, row in enumerate(worst[: MOST + 1].tolist())
    ]
    if found:
        first = found[0]
        found[0] = replace(
            first,
            evidence=(first.evidence[0], *_company(pairs, worst), *first.evidence[1:]),
            victims=len(worst) - 1,
            other_parameters=len(worst) - 1,
        )
    return found


def _divergence(pairs: Table, rank: int, reference: RankRun, candidate: RankRun, row: int, at: int) -> Divergence:
    place = TensorPlace.of(pairs, row)
    side_reference = side_of(reference, int(pairs.numbers("row_reference")[row]))
    side_candidate = side_of(candidate, int(pairs.numbers("row_candidate")[row]))
    known = {name: float(pairs.numbers(name)[row]) for name in (*METRICS, *SLICES, *BOUNDS)}
    measured = {name: value for name, value in known.items() if not np.isnan(value)}
    return Divergence(
        rank=rank,
        place=place,
        cause="parameter",
        limit=float(pairs.numbers("limit")[row]),
        magnitude=measured.get("max_abs", np.nan),
        measured_by=pairs["source"][row] or "none",
        metrics=measured,
        reference=side_reference,
        candidate=side_candidate,
        parameter=place,
        evidence=(
            f"Its values differ by more than rounding ({place.verdict}).",
            *_clues(side_reference, side_candidate, measured),
        ),
        order=(0, at),
    )


def _company(pairs: Table, worst: Ints) -> list[str]:
    """What the tensors that differ have in common."""
    if len(worst) == 1:
        return ["It is the only one that differs."]
    sites = pairs.coded("site")
    names = [str(sites[row]) for row in worst.tolist()]
    matched = int(np.sum((pairs.numbers("row_reference") >= 0) & (pairs.numbers("row_candidate") >= 0)))
    if len(worst) == matched:
        return ["Every tensor differs."]
    shared = _shared_prefix(names)
    if len(shared) > len(_shared_prefix([str(name) for name in sites.values])):
        return [f"All that differ are in {'.'.join(shared)}."]
    last = {name.rpartition(".")[2] for name in names}
    return [f"All that differ are called {last.pop()}."] if len(last) == 1 else []


def _shared_prefix(names: Sequence[str]) -> list[str]:
    """The parts with which all names begin."""
    parts = [name.split(".") for name in (min(names), max(names))]  # all others lie between these
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False))]


def _clues(reference: Side, candidate: Side, measured: dict[str, float]) -> list[str]:
    """What the difference looks like."""
    if reference.shape != candidate.shape:
        return ["One is the other transposed."] if reference.shape == candidate.shape[::-1] else []
    one, other = reference.statistics, candidate.statistics
    if one is None or other is None or not one.l2 or not other.l2 or one.nan + one.inf + other.nan + other.inf:
        return []
    times = math.copysign(other.l2 / one.l2, measured.get("cosine", 0.0))
    # One is a multiple of the other where nothing is left of their distance but what the factor makes.
    exactly = math.isclose(measured.get("rel_l2", math.nan), abs(times - 1), rel_tol=1e-3)
    return [f"The candidate is {times:.4g} times the reference."] if exactly else []
