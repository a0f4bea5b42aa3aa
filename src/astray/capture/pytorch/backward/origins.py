"""Tells in which module call the backward pass is: the one whose forward made the autograd node that runs now.

Autograd numbers its nodes as they are made. Each module call notes the number at which it starts and ends, so a node's
number says between which of these marks it was born. Needed by the function and op levels, where the backward pass
makes calls of its own.
"""

from __future__ import annotations

import threading
from bisect import bisect_right

import torch
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr

from astray.capture.engine import OpenCall

_MOST = 100_000  # marks of one thread; a program that never ends a step forgets its oldest


class _Marks:
    """The marks of one thread, whose nodes have numbers of their own."""

    __slots__ = ("calls", "numbers")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.calls: list[OpenCall | None] = []


class Origins:
    """From autograd nodes back to the module calls that made them."""

    def __init__(self) -> None:
        self.wanted = False
        self._local = threading.local()
        self._latest = _Marks()  # for backward threads, which made no nodes themselves

    def entered(self, call: OpenCall) -> None:
        """A module call starts."""
        if self.wanted and torch.is_grad_enabled():
            self._mark(call)

    def left(self, enclosing: OpenCall | None) -> None:
        """A module call has ended; `enclosing` is the one around it."""
        if self.wanted and torch.is_grad_enabled():
            self._mark(enclosing)

    def _mark(self, call: OpenCall | None) -> None:
        marks = self._marks()
        marks.numbers.append(_get_sequence_nr())
        marks.calls.append(call)
        if len(marks.numbers) > _MOST:
            del marks.numbers[: _MOST // 2], marks.calls[: _MOST // 2]

    def _marks(self) -> _Marks:
        try:
            marks: _Marks = self._local.marks
        except AttributeError:
            marks = self._local.marks = _Marks()
        self._latest = marks
        return marks

    def current(self) -> OpenCall | None:
        """The call whose forward made the node that the backward pass is at; None outside of modules."""
        node = _current_autograd_node()
        if node is None:
            return None
        marks: _Marks = getattr(self._local, "marks", self._latest)
        index = bisect_right(marks.numbers, node._sequence_nr()) - 1
        return marks.calls[index] if index >= 0 else None

    def clear(self) -> None:
        """Ends the step."""
        self._local = threading.local()
        self._latest = _Marks()
