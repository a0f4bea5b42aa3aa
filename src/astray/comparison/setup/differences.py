"""What two runs were set to differently: the entry of this package.

Each rank is compared by itself (`of_rank`), in whichever process compares its tensors; `put_together` makes one list of
them, and adds what older runs tell of themselves as wholes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from astray.comparison.pair.matching import Matching
from astray.comparison.setup.arguments import argument_findings
from astray.comparison.setup.folding import differences_of, over_ranks
from astray.comparison.setup.setup_difference import Finding, SetupDifference
from astray.comparison.setup.subjects import findings
from astray.comparison.setup.timelines import read_timelines
from astray.store import CheckpointRank, RankRun, Run

__all__ = ["SetupDifference", "of_rank", "put_together", "setup_differences"]


def setup_differences(reference: Run, candidate: Run, matching: Matching | None = None) -> tuple[SetupDifference, ...]:
    """Everything that was set differently, those first that change results.

    >>> for difference in setup_differences(astray.open("runs/a"), astray.open("runs/b")):
    ...     print(difference)
    h.3.norm (LayerNorm) has eps 1e-05 in the reference and 0.001 in the candidate.
    """
    matching = matching or Matching()
    found: list[SetupDifference] = []
    for rank in matching.ranks_of(reference, candidate):
        found += of_rank(rank, reference.ranks.get(rank), candidate.ranks.get(rank), matching)
    return put_together(found, reference, candidate)


def of_rank(
    rank: int, reference: RankRun | None, candidate: RankRun | None, matching: Matching
) -> list[SetupDifference]:
    """Those of one rank. A checkpoint was set to nothing, and neither was a rank that one run does not have."""
    if reference is None or candidate is None:
        return []
    if isinstance(reference, CheckpointRank) or isinstance(candidate, CheckpointRank):
        return []
    steps = _shared_steps(reference, candidate, matching)
    if not steps:
        return []
    left, right = read_timelines(reference), read_timelines(candidate, matching.mapping, matching.offset)
    found = [*findings(left, right, steps), *argument_findings(reference, candidate, matching, steps)]
    if matching.sites is not None:
        pattern = matching.sites
        found = [one for one in found if not one.site or pattern.search(one.site)]
    return differences_of(rank, found)


def _shared_steps(reference: RankRun, candidate: RankRun, matching: Matching) -> list[int]:
    theirs = {step + matching.offset for step in candidate.account.steps}
    return [step for step in reference.account.steps if step in theirs and step in matching.steps]


def put_together(found: Iterable[SetupDifference], reference: Run, candidate: Run) -> tuple[SetupDifference, ...]:
    """Those of all ranks, and of the runs as wholes where their ranks do not tell."""
    known = list(found)
    ranks = sorted(set(reference.ranks) & set(candidate.ranks))
    if ranks and not (reference.ranks[ranks[0]].setup and candidate.ranks[ranks[0]].setup):
        known += differences_of(ranks[0], _of_wholes(reference, candidate))
    return tuple(over_ranks(known))


def _of_wholes(reference: Run, candidate: Run) -> Iterator[Finding]:
    """What `run.json` tells, for runs that have not recorded their setup."""
    left, right = reference.info, candidate.info
    if left.framework != right.framework:
        return
    for name in sorted(left.versions.keys() & right.versions.keys() - {"astray kernels"}):
        if left.versions[name] != right.versions[name]:
            yield Finding("version", "", "", name, left.versions[name], right.versions[name])
    if left.python and right.python and left.python != right.python:
        yield Finding("version", "", "", "python", left.python, right.python)
    if left.seed is not None and right.seed is not None and left.seed != right.seed:
        yield Finding("seed", "", "", left.framework or "the program", left.seed, right.seed)
    if left.world_size != right.world_size:
        yield Finding("process", "", "", "world_size", left.world_size, right.world_size)
    if left.devices and right.devices and left.devices != right.devices:
        yield Finding("device", "", "", "devices", left.devices, right.devices)
