"""Which entries of a dump are asked for, by their names: `list`, `scope`, `tensor_list`, `white_list` and `black_list`.

Names are known only where they are given, in the writer of the dump: an entry that is left out uses up its number all
the same. It asks once for each entry, in the order in which they start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from astray.foreign.msprobe.configuration import Configuration

_FORWARD = re.compile(r"\.forward(\.\d+)?$")
_GRADIENT = re.compile(r"(.+)\.parameters_grad(?:\.(\d+))?")


class Wanted:
    """Answers for the entries of one step.

    >>> wanted = Wanted(Configuration(Path("dump"), level="mix", names=("fc1",)))
    >>> wanted("Module.fc1.Linear.forward.0"), wanted("Functional.linear.0.forward", ["Module.fc1.Linear.forward.0"])
    (True, True)
    """

    def __init__(self, configuration: Configuration) -> None:
        self._names = configuration.names
        self._scope = configuration.scope
        self._whole = configuration.level == "mix"  # a module stands for what is inside it
        self._white, self._black = frozenset(configuration.white), frozenset(configuration.black)
        self._forward = "forward" in configuration.phases
        self._open = self._closing = False

    @staticmethod
    def is_needed(configuration: Configuration) -> bool:
        """False when everything is asked for."""
        asked = (configuration.names, configuration.scope, configuration.white, configuration.black)
        return any(asked) or "forward" not in configuration.phases

    def __call__(self, name: str, around: Sequence[str] = ()) -> bool:
        """Whether an entry is dumped. around: the entries of the modules around it."""
        is_in_scope = self._is_in_scope(name, around)  # which must hear of every entry
        return is_in_scope and self._is_of_phase(name) and self._is_listed(name, around) and self._is_checked(name)

    def _is_in_scope(self, name: str, around: Sequence[str]) -> bool:
        """From the start of the first entry to the end of the last, whatever is inside it included."""
        if self._scope is None:
            return True
        begin, end = self._scope
        if self._closing and name != end and end not in around:
            self._open = self._closing = False
        if name == begin:
            self._open, self._closing = True, False
        if name == end and self._open:
            self._closing = True
        return self._open

    def _is_of_phase(self, name: str) -> bool:
        """The calls of the forward must be recorded, or those of the backward would have no numbers."""
        return self._forward or not _FORWARD.search(name)

    def _is_listed(self, name: str, around: Sequence[str]) -> bool:
        if not self._names:
            return True
        gradient = _GRADIENT.fullmatch(name)  # goes with the backward of its module
        told = [name, f"{gradient[1]}.backward.{gradient[2] or 0}"] if gradient else [name]
        if self._whole:
            told += around
        return any(part in one for one in told for part in self._names)

    def _is_checked(self, name: str) -> bool:
        if not self._white and not self._black:
            return True
        function = ".".join(name.split(".")[1:-2])
        return function not in self._black and (not self._white or function in self._white)


def holds_one(parts: Sequence[str], name: str) -> bool:
    """Whether one of these texts is in a name."""
    return any(part in name for part in parts)
