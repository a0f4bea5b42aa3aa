"""Whether calls are paired by their names or by their order, where the user has not said.

Some tools do not tell in which module a function was called. Beside a run that does, names mean nothing; what was
called in which order still does.
"""

from __future__ import annotations

from dataclasses import replace

from astray.comparison.pair.matching import Matching
from astray.comparison.pair.partners import COUNTED
from astray.store import Run


def choose(reference: Run, candidate: Run, matching: Matching) -> tuple[Matching, list[str]]:
    """The matching with `by` decided, and a note where that is not as always."""
    if matching.by != "auto":
        return matching, []
    known = [knows_modules(run) for run in (reference, candidate)]
    if matching.micro == "joined" or set(known) != {True, False}:
        return replace(matching, by="key"), []
    run = (reference, candidate)[known.index(False)]
    note = f"{run.path} does not say in which modules functions were called, so calls are paired by their order."
    return replace(matching, by="order"), [note]


def knows_modules(run: Run) -> bool | None:
    """Whether a run tells in which modules its functions were called; None where it has no functions."""
    functions = False
    for rank in run.ranks.values():
        kinds, sites = rank.calls.coded("kind"), rank.calls.coded("site")
        counted = [kinds.values.index(kind) for kind in COUNTED if kind in kinds.values]
        if "module" in kinds.values:
            return True if counted else None
        for kind in counted:
            functions = True
            of_kind = {sites.values[code] for code in set(sites.codes[kinds.codes == kind].tolist()) if code >= 0}
            if any(not site.startswith("/") for site in of_kind):
                return True
    return False if functions else None
