"""What of two runs is compared, and how their tensors are paired: the options of `compare`, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from astray.comparison.pair.mapping import NOTHING, Mapping, check_use, read_mapping
from astray.comparison.rows import RowReader
from astray.comparison.select.filter import regular_expression
from astray.errors import CompareError
from astray.steps import StepSelection
from astray.store import RunData
from astray.wording import did_you_mean

BY = ("auto", "key", "order")
SHAPES = ("judged", "same", "loose")
MICRO = ("paired", "joined")
FARTHEST = 1 << 53  # steps of a run end there


class MatchingOptions(TypedDict, total=False):
    """What `compare` can be asked for.

    steps: which steps to look at ("0:10", 7, [1, 3]), as the reference counts them; all by default.
    ranks: which ranks to look at. sites: only sites that this regular expression is found in.
    mapping: a file that says what the candidate's modules, classes and functions are called in the reference.
    by: "key", or "order": pair calls by the order of execution and what was called, whatever their sites' names. By
        default the first, and the second where only one of the runs says in which modules its functions were called.
    shapes: "judged": tensors of different shapes are a pair with the verdict `shape`; "same": they are not a pair;
        "loose": dimensions of size 1 do not count.
    micro: "paired": micro steps are compared one by one; "joined": all of a step are laid end to end along the batch,
        for runs that cut the same batch into different numbers of them.
    offset: what to add to the candidate's step numbers to get the reference's.
    """

    steps: str | int | Sequence[int] | range | StepSelection | None
    ranks: int | Sequence[int] | None
    sites: str | None
    mapping: str | os.PathLike[str] | Mapping | None
    by: str
    shapes: str
    micro: str
    offset: int


@dataclass(frozen=True)
class Matching:
    """What `compare` was asked for; `astray help alignment` explains each."""

    steps: StepSelection = StepSelection()
    ranks: tuple[int, ...] | None = None
    sites: re.Pattern[str] | None = None
    mapping: Mapping = NOTHING
    file: str | None = None
    by: str = "key"
    shapes: str = "judged"
    micro: str = "paired"
    offset: int = 0
    across_frameworks: bool = False

    @classmethod
    def check(
        cls,
        *,
        steps: str | int | Sequence[int] | range | StepSelection | None = None,
        ranks: int | Sequence[int] | None = None,
        sites: str | None = None,
        mapping: str | os.PathLike[str] | Mapping | None = None,
        by: str = "auto",
        shapes: str = "judged",
        micro: str = "paired",
        offset: int = 0,
    ) -> Matching:
        """Raises CompareError with what is wrong with an argument."""
        for name, value, known in (("by", by, BY), ("shapes", shapes, SHAPES), ("micro", micro, MICRO)):
            if value not in known:
                raise CompareError(f"{name} is {value!r}; it is one of {', '.join(known)}.{did_you_mean(value, known)}")
        if micro == "joined" and by == "order":
            raise CompareError(
                "Micro steps are joined by the names of their calls, and --by order says that names mean nothing. "
                "Draft what belongs together with `astray map REFERENCE CANDIDATE`, and give it with --map."
            )
        if not isinstance(offset, int) or abs(offset) > FARTHEST:
            raise CompareError(
                f"offset is {offset!r:.40}; it is added to step numbers, so it is a whole number up to {FARTHEST:,}."
            )
        given = mapping if isinstance(mapping, Mapping) or mapping is None else read_mapping(Path(mapping))
        return cls(
            steps=StepSelection.parse(steps),
            ranks=None if ranks is None else (ranks,) if isinstance(ranks, int) else tuple(ranks),
            sites=None if sites is None else regular_expression(sites),
            mapping=given or NOTHING,
            file=str(mapping) if isinstance(mapping, str | os.PathLike) else None,
            by=by,
            shapes=shapes,
            micro=micro,
            offset=offset,
        )

    def of_runs(self, reference: RunData, candidate: RunData) -> Matching:
        """The same for these runs: whether they are of two frameworks."""
        frameworks = {run.info.framework for run in (reference, candidate)} - {None, ""}
        return replace(self, across_frameworks=len(frameworks) > 1)

    def ranks_of(self, reference: RunData, candidate: RunData) -> list[int]:
        """Those to compare. Raises CompareError when one that was asked for is in neither run."""
        known = sorted({*reference.ranks, *candidate.ranks})
        for rank in self.ranks or ():
            if rank not in known:
                raise CompareError(f"Neither run has a rank {rank}; they have {', '.join(map(str, known))}.")
        return known if self.ranks is None else sorted(self.ranks)

    def of_reference(self) -> RowReader:
        return RowReader(self.steps, self.sites, self.shapes != "loose")

    def of_candidate(self) -> RowReader:
        """With the mapping and the offset."""
        return RowReader(self.steps, self.sites, self.shapes != "loose", self.mapping, self.offset)

    def check_mapping(self, candidate: RunData) -> None:
        """Raises CompareError if the mapping maps nothing. Reads no more ranks than it takes to know."""
        if self.mapping == NOTHING or not self.mapping.is_of_sites:
            return
        sites: set[str] = set()
        for rank in candidate.ranks.values():
            named = rank.calls.coded("site").values
            if any({self.mapping.site(site), self.mapping.tensor(site)} != {site} for site in named):
                return
            sites.update(named)
        check_use(self.mapping, self.file or "that was given", sorted(sites))
