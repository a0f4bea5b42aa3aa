r"""Filter expressions: a small language that says which rows of a comparison to show.

    error > 1e-3 and site ~ 'h\.2' and phase == backward
    verdict in (diverged, non-finite) and not (role == parameter or 1e-6 < error <= limit)

Parsed by hand into the tree of `conditions`, which are evaluated a column at a time: a text is looked for among the few
distinct values of its column, not in every row. docs/reports.md explains the language to users.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from astray.comparison.select.columns import Columns
from astray.comparison.select.conditions import (
    MIRRORED,
    AllOf,
    AnyOf,
    Compared,
    Condition,
    Fact,
    Literal,
    Member,
    Not,
)
from astray.errors import UsageError
from astray.store.columns import BoolArray

_TOKEN = re.compile(
    r"""\s*(?:
     (?P<number> [-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]) | [-+]inf\b )
    |(?P<text> '[^']*' | "[^"]*" )
    |(?P<word> \w(?:[\w.]|-(?=[A-Za-z]))* )
    |(?P<sign> == | != | <= | >= | !~ | [<>~()\[\],] )
    |(?P<end> $ )
    )""",
    re.VERBOSE,
)
_SIGNS = (*MIRRORED, "~", "!~")
_CLOSING = {"(": ")", "[": "]"}
_HINTS = {"=": "Write == to ask whether two things are equal.", "&": "Write and.", "|": "Write or.", "!": "Write not."}


@dataclass(frozen=True)
class Filter:
    """An expression that was understood. `words` are those in it that may be columns."""

    text: str
    words: tuple[str, ...]
    condition: Condition

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Understand an expression. Whether its columns exist is seen when it meets a comparison.

        >>> Filter.parse("error > 1e-3 and site ~ 'mlp'").words
        ('error', 'site')
        """
        parser = _Parser(text)
        try:
            condition = parser.whole()
        except RecursionError:
            raise UsageError(f"The filter {text[:40]!r}… is nested too deeply. Use fewer parentheses.") from None
        return cls(text, tuple(dict.fromkeys(parser.words)), condition)

    def mask(self, columns: Columns) -> BoolArray:
        """Which rows fit."""
        return self.condition.mask(columns)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int  # from 0


class _Parser:
    """Reads one expression from left to right: `or` of `and` of `not` of comparisons."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words: list[str] = []
        self._tokens = self._split()
        self._next = 0

    def whole(self) -> Condition:
        found = self._any_of()
        if self._token.kind != "end":
            raise self._unexpected("and, or, or the end")
        return found

    def _any_of(self) -> Condition:
        parts = [self._all_of()]
        while self._took("or"):
            parts.append(self._all_of())
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def _all_of(self) -> Condition:
        parts = [self._one()]
        while self._took("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _one(self) -> Condition:
        if self._took("not"):
            return Not(self._one())
        if self._took("("):
            inside = self._any_of()
            if not self._took(")"):
                raise self._unexpected("a closing parenthesis")
            return inside
        return self._compared()

    def _compared(self) -> Condition:
        left = self._operand()
        if self._token.text == "not" and self._tokens[self._next + 1].text == "in":
            self._next += 2
            return Not(Member(left, self._choices()))
        if self._took("in"):
            return Member(left, self._choices())
        parts: list[Condition] = []
        while self._token.kind == "sign" and self._token.text in _SIGNS:  # 1e-6 < error < 1 is two of them
            sign = self._take().text
            right = self._operand()
            parts.append(Compared(left, sign, right))
            left = right
        if not parts:
            return Fact(left)
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _choices(self) -> tuple[Literal, ...]:
        closing = _CLOSING.get(self._token.text)
        if self._token.kind != "sign" or closing is None:
            raise self._unexpected("a list such as (1, 2)")
        self._next += 1
        found = [self._operand()]
        while self._took(","):
            found.append(self._operand())
        if not self._took(closing):
            raise self._unexpected(f"a comma or {closing}")
        return tuple(found)

    def _operand(self) -> Literal:
        token = self._token
        if token.kind not in ("number", "text", "word") or token.text in ("and", "or", "not", "in"):
            raise self._unexpected("a column, a number or a text")
        self._next += 1
        if token.kind == "text":
            return Literal(token.text[1:-1], quoted=True)
        if token.kind == "word":
            self.words.append(token.text)
        return Literal(token.text)

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def _took(self, text: str) -> bool:
        """Step over the next token if it is this word or sign."""
        there = self._token.kind in ("word", "sign") and self._token.text == text
        self._next += there
        return there

    def _split(self) -> list[_Token]:
        tokens: list[_Token] = []
        at = 0
        while not tokens or tokens[-1].kind != "end":
            found = _TOKEN.match(self.text, at)
            if found is None:
                raise self._not_understood(at + len(self.text[at:]) - len(self.text[at:].lstrip()))
            kind = found.lastgroup or ""
            tokens.append(_Token(kind, found[kind], found.start(kind)))
            at = found.end()
        return tokens

    def _not_understood(self, at: int) -> UsageError:
        sign = self.text[at]
        if sign in "'\"":
            return UsageError(f"In the filter {self.text!r} the quote at character {at + 1} is never closed.")
        hint = _HINTS.get(sign, "Put texts into quotes.")
        return UsageError(f"In the filter {self.text!r} the {sign!r} at character {at + 1} is not understood. {hint}")

    def _unexpected(self, wanted: str) -> UsageError:
        token = self._token
        if token.kind == "end":
            return UsageError(f"The filter {self.text!r} ends where {wanted} is expected.")
        there = f"there is {token.text!r} at character {token.at + 1}"
        return UsageError(f"In the filter {self.text!r} {there}, where {wanted} is expected.")
