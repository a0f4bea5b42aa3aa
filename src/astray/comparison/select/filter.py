r"""Filter expressions: a small language that says which rows of a comparison to show.

    error > 1e-3 and site ~ 'h\.2' and phase == backward
    verdict in (diverged, non-finite) and not (role == parameter or 1e-6 < error <= limit)

Parsed by hand into a tree of conditions, each of which gives a mask over the rows, a column at a time: a text is looked
for among the few distinct values of its column, not in every row. What is not known (NaN, a tensor that one run does
not have) fits no comparison but `!=`, `!~` and `== null`: a negated sign is always the exact opposite.
docs/reference/reports.md explains the language to users.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np

from astray.comparison.select.columns import ColumnCells, Columns
from astray.comparison.verdict import AGREEING, BAD, LABELS
from astray.errors import UsageError
from astray.records import Kind, Phase, Role
from astray.store import DictionaryColumn
from astray.store.columns import BoolArray
from astray.wording import did_you_mean


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
        parser = _FilterParser(text)
        try:
            condition = parser.whole()
        except RecursionError:
            raise UsageError(f"The filter {text[:40]!r}… is nested too deeply. Use fewer parentheses.") from None
        return cls(text, tuple(dict.fromkeys(parser.words)), condition)

    def mask(self, columns: Columns) -> BoolArray:
        """Which rows fit."""
        return self.condition.mask(columns)


# -- conditions --------------------------------------------------------------------------------------------------------


ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
OPPOSITES = {"!=": "==", "!~": "~"}
GROUPS = {"wrong": BAD, "agrees": AGREEING}
"""Words that stand for several verdicts."""

_FIXED: dict[str, Sequence[str]] = {
    "verdict": LABELS,
    "kind": get_args(Kind),
    "phase": get_args(Phase),
    "role": get_args(Role),
}
_NULLS = ("null", "none", "nan")


class Literal(NamedTuple):
    """Something written in the expression. Without quotes it is a number, a column, or a text, as the context wants."""

    text: str
    quoted: bool = False

    def is_column(self, columns: Columns) -> bool:
        return not self.quoted and self.text in columns

    @property
    def is_null(self) -> bool:
        return not self.quoted and self.text.lower() in _NULLS

    @property
    def is_number(self) -> bool:
        try:
            float(self.text)
        except ValueError:
            return False
        return not self.quoted


class Condition(Protocol):
    def mask(self, columns: Columns) -> BoolArray: ...


@dataclass(frozen=True)
class AnyOf:
    parts: tuple[Condition, ...]

    def mask(self, columns: Columns) -> BoolArray:
        return reduce(operator.or_, (part.mask(columns) for part in self.parts))


@dataclass(frozen=True)
class AllOf:
    parts: tuple[Condition, ...]

    def mask(self, columns: Columns) -> BoolArray:
        return reduce(operator.and_, (part.mask(columns) for part in self.parts))


@dataclass(frozen=True)
class Not:
    part: Condition

    def mask(self, columns: Columns) -> BoolArray:
        return ~self.part.mask(columns)


@dataclass(frozen=True)
class Flag:
    """A word alone: `wrong`, `agrees`, or a column that is true or false."""

    word: Literal

    def mask(self, columns: Columns) -> BoolArray:
        if self.word.text in GROUPS:
            return np.isin(columns.pairs.coded("verdict").codes, GROUPS[self.word.text])
        if not self.word.is_column(columns):
            raise _no_column(self.word, columns)
        column = columns[self.word.text].column
        if isinstance(column, DictionaryColumn) or column.dtype != np.bool_:
            raise UsageError(f"A filter compares {self.word.text} with something, such as {self.word.text} != null.")
        return column


@dataclass(frozen=True)
class Comparator:
    """Two things and a sign between them, at least one of which must be a column."""

    left: Literal
    sign: str
    right: Literal

    def mask(self, columns: Columns) -> BoolArray:
        if self.sign in OPPOSITES:
            return ~Comparator(self.left, OPPOSITES[self.sign], self.right).mask(columns)
        if self.left.is_column(columns):
            if self.right.is_column(columns) and self.sign != "~":
                return self._two_columns(columns)
            return _against(self.left.text, columns, self.sign, self.right)
        if self.right.is_column(columns) and self.sign in MIRRORED:
            return _against(self.right.text, columns, MIRRORED[self.sign], self.left)
        if self.right.is_column(columns):
            raise UsageError(f"A filter has the column before the {self.sign}: {self.right.text} {self.sign} '...'.")
        for side in (self.left, self.right):
            if not (side.quoted or side.is_number):
                raise _no_column(side, columns)
        raise UsageError(f"Neither {self.left.text!r} nor {self.right.text!r} is a column. A comparison needs one.")

    def _two_columns(self, columns: Columns) -> BoolArray:
        left, right = columns[self.left.text], columns[self.right.text]
        one, other = left.column, right.column
        if isinstance(one, DictionaryColumn) and isinstance(other, DictionaryColumn):
            if self.sign != "==":
                raise UsageError(f"{self.left.text} and {self.right.text} are texts, which {self.sign} cannot order.")
            one, other = _joint(one, other)
        elif isinstance(one, DictionaryColumn) or isinstance(other, DictionaryColumn):
            raise UsageError(
                f"Of {self.left.text} and {self.right.text}, one holds texts and the other numbers. "
                "Put a text that is not a column into quotes."
            )
        mask: BoolArray = ORDERS[self.sign](one, other) & left.known & right.known
        return mask


@dataclass(frozen=True)
class MemberOf:
    """A column and the values it may have."""

    column: Literal
    choices: tuple[Literal, ...]

    def mask(self, columns: Columns) -> BoolArray:
        return AnyOf(tuple(Comparator(self.column, "==", choice) for choice in self.choices)).mask(columns)


def _against(name: str, columns: Columns, sign: str, wanted: Literal) -> BoolArray:
    """A column compared with what is written in the expression."""
    cells = columns[name]
    if wanted.is_null and sign == "==":
        return ~cells.known
    if isinstance(cells.column, DictionaryColumn):
        return _text_against(name, cells.column, sign, wanted)
    if sign == "~":
        raise UsageError(f"{name} is a column of numbers, which ~ cannot search. Compare it with ==, <, <=, > or >=.")
    mask: BoolArray = ORDERS[sign](cells.column, _number(name, cells, wanted, columns)) & cells.known
    return mask


def _text_against(name: str, column: DictionaryColumn[Any], sign: str, wanted: Literal) -> BoolArray:
    if sign == "~":
        pattern = regular_expression(wanted.text)
        fits = [pattern.search(_text(value)) is not None for value in column.values]
    elif sign == "==":
        text = _meant(name, wanted.text)
        fits = [_text(value) == text for value in column.values]
    else:
        raise UsageError(f"{name} is a column of texts, which {sign} cannot order. Use ==, !=, ~, !~ or in (...).")
    return np.array([*fits, False], np.bool_)[column.codes]  # a null has the code −1, which is the last


def _text(value: Any) -> str:
    return "×".join(map(str, value)) or "scalar" if isinstance(value, tuple) else str(value)


def _meant(name: str, text: str) -> str:
    """The text as the column has it: shapes may be typed with an x, verdicts with underscores."""
    if name.startswith("shape_"):
        return re.sub(r"\s*[x,*]\s*", "×", text.strip("()[]")) or "scalar"
    if name not in _FIXED:
        return text
    known = {re.sub(r"[ -]", "_", word): word for word in _FIXED[name]}
    try:
        return known[re.sub(r"[ -]", "_", text)]
    except KeyError:
        listed = ", ".join(_FIXED[name])
        raise UsageError(
            f"There is no {name} {text!r}.{did_you_mean(text, _FIXED[name])} There are {listed}."
        ) from None


def _number(name: str, cells: ColumnCells, wanted: Literal, columns: Columns) -> float | bool:
    """What a column of numbers or booleans is compared with. Fingerprints are written in hexadecimal."""
    kind = cells.column.dtype.kind if isinstance(cells.column, np.ndarray) else ""
    try:
        if kind == "b":
            return {"true": True, "false": False}[wanted.text.lower()]
        return int(wanted.text, 16) if kind == "u" else float(wanted.text)
    except (KeyError, ValueError):
        what = "true or false" if kind == "b" else "a number"
        guess = "" if wanted.quoted else did_you_mean(wanted.text, columns.names)
        raise UsageError(f"{name} can be compared with {what} or a column, not with {wanted.text!r}.{guess}") from None


def regular_expression(text: str) -> re.Pattern[str]:
    """What a user typed as a regular expression. Raises UsageError with what is wrong with it."""
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(
            f"{text!r} is not a regular expression: {error}. Put a backslash before ( ) [ ] . * +"
        ) from None


def _joint(left: DictionaryColumn[Any], right: DictionaryColumn[Any]) -> tuple[Any, Any]:
    """The codes of two columns of texts in one numbering."""
    numbers: dict[Any, int] = {}
    one, other = (
        np.array([*(numbers.setdefault(value, len(numbers)) for value in side.values), -1])[side.codes]
        for side in (left, right)
    )
    return one, other


def _no_column(word: Literal, columns: Columns) -> UsageError:
    known = [*columns.names, *GROUPS]
    return UsageError(
        f"There is no column {word.text!r}.{did_you_mean(word.text, known)} There are {', '.join(columns.names)}; "
        f"and the words {' and '.join(GROUPS)}."
    )


# -- parser ------------------------------------------------------------------------------------------------------------


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


class _Token(NamedTuple):
    kind: str
    text: str
    at: int  # from 0


class _FilterParser:
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
            return Not(MemberOf(left, self._choices()))
        if self._took("in"):
            return MemberOf(left, self._choices())
        parts: list[Condition] = []
        while self._token.kind == "sign" and self._token.text in _SIGNS:  # 1e-6 < error < 1 is two of them
            sign = self._take().text
            right = self._operand()
            parts.append(Comparator(left, sign, right))
            left = right
        if not parts:
            return Flag(left)
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
