"""What `graft` is told in words: `runs/a:h.2.mlp`, `runs/a:h\\..*\\.attn@inputs`, `runs/a`; and what a run says of it.

`settings` checks the words before anything is touched, `Grafts` does what they say. Imports no framework, and nothing
that loads numpy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from astray.errors import UsageError
from astray.process import absolute
from astray.wording import did_you_mean

if TYPE_CHECKING:
    from astray.records import Setup

WHATS = ("outputs", "inputs", "parameters", "gradients")
"""What can be grafted: the results of a call; what flows into it, forward and backward; a module's own parameters and
buffers; the gradients that a call sends to its inputs."""

SUBJECT = "graft"
"""The `subject` of the notes in a run's setup, whose `site` is the text of a graft without its run."""

EVERY_CALL = "every call"
"""The `site` of such a note for a graft of a whole run."""

_SINGLE_STEP = ("inputs", "parameters")
_EXAMPLES = "such as runs/a:h.2.mlp, runs/a:h.2.attn/softmax#1 or 'runs/a:h\\..*\\.mlp@inputs'"


class Graft(NamedTuple):
    """One graft: of which run, at which calls, and what.

    site: a site or a regular expression; empty for every call. call: the number of the calls that are meant, or None.
    """

    run: str
    site: str
    call: int | None
    whats: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Graft:
        """The parts of `RUN`, `RUN:SITE`, `RUN:SITE#CALL@WHAT`. Colons may be in the name of the run, and in a site.

        >>> Graft.read("runs/a:h.2.mlp#1@inputs,parameters")
        Graft(run='runs/a', site='h.2.mlp', call=1, whats=('inputs', 'parameters'))
        >>> Graft.read("runs/a")
        Graft(run='runs/a', site='', call=None, whats=('inputs', 'parameters'))
        """
        run, rest = _split(text)
        if not run:
            raise UsageError(f"graft={text!r} names no run. Give one that kept tensors, and a site, {_EXAMPLES}.")
        if rest is None:
            return cls(run, "", None, _SINGLE_STEP)
        site, whats = _whats(text, rest)
        numbered = re.fullmatch(r"(.+)#(\d{1,9})", site, re.DOTALL)
        site, call = (numbered[1], int(numbered[2])) if numbered else (site, None)
        if not site:
            raise UsageError(f"graft={text!r} names no site. Give one, {_EXAMPLES}; or the run alone for every call.")
        for part in site.rpartition("/")[::2]:
            try:
                re.compile(part)
            except re.error as error:  # noqa: PERF203 - there are two
                raise UsageError(f"graft={text!r}: {site} is not a regular expression: {error}.") from None
        return cls(run, site, call, whats)

    @property
    def is_single_step(self) -> bool:
        """Whether it is of every call."""
        return not self.site

    @property
    def where(self) -> str:
        """The graft without its run: `h.2.mlp#1@inputs`."""
        if self.is_single_step:
            return EVERY_CALL
        number = "" if self.call is None else f"#{self.call}"
        return f"{self.site}{number}@{','.join(self.whats)}"

    def __str__(self) -> str:
        return self.run if self.is_single_step else f"{self.run}:{self.where}"


def with_absolute_run(text: str) -> str:
    """The same graft with the absolute path of its run."""
    run, rest = _split(text)
    return text if not run else str(absolute(run)) + ("" if rest is None else f":{rest}")


def _split(text: str) -> tuple[str, str | None]:
    """The run, and what follows its colon. Of several colons the last one counts behind which a path that exists ends;
    if there is none such, the first.
    """
    colons = [at.start() for at in re.finditer(":", text)]
    if not colons or _exists(text):
        return text, None
    drive = re.match(r"[A-Za-z]:[\\/]", text) is not None
    known = next((at for at in reversed(colons) if _exists(text[:at])), None)
    at = known if known is not None else next(iter(colons[drive:]), None)
    return (text, None) if at is None else (text[:at], text[at + 1 :])


def _exists(path: str) -> bool:
    try:
        return bool(path) and Path(path).exists()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False


def _whats(text: str, rest: str) -> tuple[str, tuple[str, ...]]:
    found = re.fullmatch(r"(.*)@([\w, ]*)", rest, re.DOTALL)
    if found is None:
        return rest, ("outputs",)
    words = [word.strip() for word in found[2].split(",")]
    for word in words:
        if word not in WHATS:
            raise UsageError(
                f"graft={text!r}: {word!r} cannot be grafted. It is {', '.join(WHATS[:-1])} or {WHATS[-1]}, or several "
                f"with commas.{did_you_mean(word, WHATS)}"
            )
    return found[1], tuple(what for what in WHATS if what in words)


def site_matches(pattern: str, site: str) -> bool:
    """Whether a regular expression fits a whole site; of a function, its module and its name each.

    >>> site_matches(r"h\\..*\\.attn/softmax", "h.2.attn/softmax"), site_matches("h.*", "h.2.attn/softmax")
    (True, False)
    """
    module, slash, function = site.rpartition("/")
    module_pattern, wanted_slash, function_pattern = pattern.rpartition("/")
    if slash != wanted_slash:
        return False
    fits_module = not slash or module == module_pattern or re.fullmatch(module_pattern, module) is not None
    return fits_module and re.fullmatch(function_pattern, function) is not None


# -- what a run says of its grafts -------------------------------------------------------------------------------------


class GraftNote(NamedTuple):
    """What became of one graft in one recording.

    where: the graft without its run, `h.2.mlp@outputs` or `every call`. run: whose values were grafted. tensors: how
    many took the place of the program's own; 0 where it is not known, since the recording was killed. differed: how
    many of them had other bits than these. unreached: tensors of the run that no call took.
    """

    where: str
    run: str
    tensors: int
    differed: int
    unreached: int


def graft_notes(setup: Iterable[Setup]) -> list[GraftNote]:
    """The grafts of one rank, from `rank.setup`; none where nothing was grafted.

    >>> graft_notes(run.ranks[0].setup)
    [GraftNote(where='h.2.mlp@outputs', run='/home/me/runs/a', tensors=12, differed=12, unreached=0)]
    """
    found: dict[str, dict[str, object]] = {}
    for note in setup:
        if note.subject == SUBJECT:
            found.setdefault(note.site, {}).update(note.values)
    return [_note(where, values) for where, values in found.items()]


def _note(where: str, values: Mapping[str, object]) -> GraftNote:
    counts = map(values.get, ("tensors", "differed", "unreached"))
    return GraftNote(where, str(values.get("from", "")), *(count if isinstance(count, int) else 0 for count in counts))
