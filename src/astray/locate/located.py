"""What `locate` has found: the comparison it began with, and for each fault what was tried and what it proves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from astray.comparison.divergence import Divergence
from astray.results.comparison import Comparison

Outcome = Literal["proves", "supports", "refutes", "nothing"]
"""What a trial says of a suspect. "nothing": it could not be made, or does not tell."""

Verdict = Literal["agrees", "proven", "not proven", "cannot tell"]

AGREES, DIFFERS, CANNOT_TELL = 0, 1, 125
"""Exit codes. `git bisect run` takes 125 for a commit that cannot be judged."""


class Trial(NamedTuple):
    """Something that was tried, and what came of it.

    name: what, in a word. text: what came of it, in a sentence. run: the recording it was made with.
    """

    name: str
    outcome: Outcome
    text: str
    run: Path | None = None


@dataclass
class Fault:
    """A suspect, and the trials on it.

    divergence: the call that is blamed, as closely as it is known. comparison: of the runs that show it so. rest: the
    first divergence that remains with the reference's tensors in the place of the suspect's; None: nothing remains.
    """

    divergence: Divergence
    comparison: Comparison
    trials: list[Trial] = field(default_factory=list)
    rest: Divergence | None = None

    @property
    def proven(self) -> bool:
        """Whether a trial proves it and none refutes it."""
        outcomes = {trial.outcome for trial in self.trials}
        return "proves" in outcomes and "refutes" not in outcomes


@dataclass
class Located:
    """The result of `locate`.

    comparison: the reference and the candidate as they were first recorded. trials: about the program as a whole.
    faults: the first one, and those that remain when it is mended. doubt: why nothing can be said, if nothing can.
    hints: what would tell more.
    """

    reference: Path
    program: str
    folder: Path
    comparison: Comparison
    trials: list[Trial] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    doubt: str = ""
    hints: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        if self.comparison.same:
            return "agrees"
        if self.doubt:
            return "cannot tell"
        return "proven" if self.faults and self.faults[0].proven else "not proven"

    @property
    def exit_code(self) -> int:
        """0 where they agree, 1 where they differ, 125 where it cannot be told."""
        return {"agrees": AGREES, "cannot tell": CANNOT_TELL}.get(self.verdict, DIFFERS)

    def __str__(self) -> str:
        from astray.locate.report import render

        return render(self)
