"""Which entries of a dump are written, where not all are asked for: by their names, or by what is in them.

An entry that is left out uses up its number all the same, so that the others bear the names they would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from astray.foreign.msprobe.leaves import Leaf, is_finite
from astray.foreign.torch_file import TorchTensor

Asked = Callable[[str, Sequence[str]], bool]
"""Whether an entry is written, by its name and those of the entries around it. Asked once, in the order they begin."""

MakesAsked = Callable[[], Asked]
"""Makes it anew for each step."""


class Choice(NamedTuple):
    """What is written; `translate` explains each."""

    asked: MakesAsked | None = None
    with_values: Callable[[str], bool] | None = None
    most: int | None = None
    extra_info: bool = True

    def keeps_values(self, name: str) -> bool:
        return self.with_values is not None and self.with_values(name)


class Held(NamedTuple):
    """A tensor that waits until it is known whether its entry is written."""

    leaf: Leaf
    file: str
    tensor: TorchTensor | None


class Overflow:
    """Finds the entries of which a result is not finite. The values of an entry are held until its results are known.

    found: their names, in this step. most: how many are looked for, in all of them.
    """

    def __init__(self, most: int | None) -> None:
        self.found: set[str] = set()
        self._most = most
        self._count = 0
        self._held: dict[str, list[Held]] = {}
        self._finite: set[str] = set()  # entries with results that were

    def take(self, name: str, held: Held, is_result: bool) -> list[Held]:
        """One more tensor of an entry. Gives what is to be written now."""
        if is_result and not is_finite(held.leaf) and (self._most is None or self._count < self._most):
            self._count += name not in self.found
            self.found.add(name)
        elif is_result:
            self._finite.add(name)
        self._held.setdefault(name, []).append(held)
        return self._held.pop(name) if name in self.found else []

    def forget(self) -> None:
        """Let go of the entries whose results are there and finite. Those that are still running have none yet."""
        for name in self._finite:
            self._held.pop(name, None)
        self._finite.clear()

    def next_step(self) -> None:
        """A step is over, and names begin anew."""
        self.found.clear()
        self._held.clear()


def of_these(stacks: Mapping[str, Sequence[Sequence[str]]], names: Collection[str]) -> dict[str, list[list[str]]]:
    """The stacks of some entries."""
    kept = [([name for name in called if name in names], list(lines)) for called, lines in stacks.values()]
    return {str(number): [*pair] for number, pair in enumerate(pair for pair in kept if pair[0])}
