"""Objects to be told of something later, such as a fork, held weakly and without callbacks.

A `WeakSet` removes what has died in a callback written in Python. The garbage collector runs it, and when a signal
comes meanwhile, the exception of the program's handler is raised there and lost. This one forgets the dead when it is
added to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """The living among the objects that were added.

    >>> recordings = WeakRegistry()
    >>> recordings.add(recording)
    >>> [one for one in recordings]
    [<recording>]
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, member: T) -> None:
        living = [reference for reference in self._references if reference() is not None]
        self._references = [*living, weakref.ref(member)]

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            member = reference()
            if member is not None:
                yield member
