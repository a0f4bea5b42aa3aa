"""Statistics of a state: one number for all of it, for each parameter, or for each group of parameters.

    weight.std()                        of all elements
    weight.std(lw=True)                 of each parameter: a state of numbers
    weight.std(group=r"h\\.(\\d+)\\.")     of each layer

Every one is computed from the same measurement, in float64. That is over finite elements, and counts the others; the
formulas take these into account, so that NaN and infinity give what numpy gives for the same numbers. Of an empty
state, sums and norms are 0 and all others NaN; of one element `std` and `var` are NaN, as numpy's are with a ddof of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from astray.errors import StateError
from astray.state.mapping import StateMapping, Value
from astray.state.measuring import MomentsMeasurement, measure, unite
from astray.state.naming import Pattern, grouped, matching
from astray.stats.moments import Moments

if TYPE_CHECKING:
    from astray.state.state_dict import StateDict


# -- formulas: statistics from what was measured -----------------------------------------------------------------------


Formula = Callable[[MomentsMeasurement], float]


def signed(formula: Callable[[Moments], float]) -> Formula:
    """A statistic that depends on signs; NaN for complex numbers, of which only magnitudes are measured."""
    return lambda measured: math.nan if measured.magnitudes else formula(measured.moments)


def norm_of(measured: MomentsMeasurement, p: float) -> float:
    """(Σ|x|ᵖ)^(1/p); the number of elements other than 0 for p = 0."""
    each = measured.moments
    infinite = each.posinf + each.neginf
    if p == 0:
        return float(each.count - each.zeros)
    if not each.count:
        return 0.0
    if each.nan:
        return math.nan
    if math.isinf(p):
        return _abs_max(each) if p > 0 else _abs_min(each)
    if p > 0 and infinite:
        return math.inf
    if p < 0 and each.zeros:
        return 0.0
    if p == 1:
        return each.abssum
    if p == 2:
        return each.l2
    unit, total = measured.powers[p]
    if not total:  # only infinities, to a negative power
        return math.inf if infinite else 0.0
    return unit * float(total ** (1 / p))


def _sum(each: Moments) -> float:
    if each.nan or (each.posinf and each.neginf):
        return math.nan
    return math.inf if each.posinf else -math.inf if each.neginf else each.sum


def _mean(each: Moments) -> float:
    total = _sum(each)
    # The mean is right where the sum exceeds float64, and NaN where there is no element.
    return each.mean if each.finite == each.count else total


def _max(each: Moments) -> float:
    if each.nan or not each.count:
        return math.nan
    return math.inf if each.posinf else each.max if each.finite else -math.inf


def _min(each: Moments) -> float:
    if each.nan or not each.count:
        return math.nan
    return -math.inf if each.neginf else each.min if each.finite else math.inf


def _abs_max(each: Moments) -> float:
    if each.nan or not each.count:
        return math.nan
    return math.inf if each.posinf or each.neginf else each.absmax


def _abs_min(each: Moments) -> float:
    if each.nan or not each.count:
        return math.nan
    return each.absmin if each.finite else math.inf


def _of_finite(formula: Callable[[Moments], float]) -> Callable[[Moments], float]:
    """A statistic of differences from the mean; NaN where an element is not finite."""
    return lambda each: formula(each) if each.finite == each.count else math.nan


FORMULAS: dict[str, Formula] = {
    "max": signed(_max),
    "min": signed(_min),
    "sum": signed(_sum),
    "mean": signed(_mean),
    "var": signed(_of_finite(lambda each: each.var(ddof=1))),
    "std": signed(_of_finite(lambda each: each.std(ddof=1))),
    "skew": signed(_of_finite(lambda each: each.skew)),
    "kurtosis": signed(_of_finite(lambda each: each.kurtosis)),
    "norm1": lambda measured: norm_of(measured, 1),
    "norm2": lambda measured: norm_of(measured, 2),
    "norm1_mean": lambda measured: (
        norm_of(measured, 1) / measured.moments.count if measured.moments.count else math.nan
    ),
    "abs_max": lambda measured: _abs_max(measured.moments),
    "abs_min": lambda measured: _abs_min(measured.moments),
}


# -- reductions, and the methods of states made of them ----------------------------------------------------------------


class Reduction(NamedTuple):
    """A statistic: a formula over the measurement, or the user's own function of the tensor itself.

    `power` is the p of the norm whose sum of powers it needs.
    """

    name: str
    formula: Callable[[MomentsMeasurement], float] | None = None
    power: float | None = None
    own: Callable[[torch.Tensor], Any] | None = None


REDUCTIONS: dict[str, Reduction] = {name: Reduction(name, formula) for name, formula in FORMULAS.items()}
"""Every statistic by name, except `numel`, which needs no values, and norms of other powers."""


def register_reduction(name: str, function: Callable[[torch.Tensor], Any]) -> None:
    """Add a statistic of your own: a method of every state, and a column of `describe`.

    >>> astray.state.register_reduction("sparsity", lambda tensor: (tensor == 0).double().mean())
    >>> weight.sparsity(lw=True)
    >>> weight.describe(lw=True, include_keys=["name", "sparsity"])

    The function takes a tensor and returns a number. For a whole state it gets a copy of all elements as one flat
    tensor.
    """
    from astray.state.state_dict import StateDict

    known = REDUCTIONS.get(name)
    if not name.isidentifier() or (known is None and hasattr(StateDict, name)) or (known and known.own is None):
        raise ValueError(f"{name!r} cannot be the name of a reduction: it is taken, or not a word. Choose another.")
    REDUCTIONS[name] = Reduction(name, own=function)


def norm_reduction(p: float) -> Reduction:
    """The p-norm; 1, 2 and the infinite ones need no sum of powers."""
    power = None if p in (0, 1, 2) or math.isinf(p) else p
    return Reduction(f"norm{p:g}", lambda measured: norm_of(measured, p), power)


def reduce(
    state: StateMapping, reductions: Sequence[Reduction], groups: Mapping[str, Sequence[str]]
) -> list[list[float]]:
    """The statistics of each group of names: a list for each reduction. Every value is read once."""
    own = CustomResults([reduction for reduction in reductions if reduction.own is not None], groups)
    united: dict[str, MomentsMeasurement] = {}
    if any(reduction.formula is not None for reduction in reductions):
        exponents = {reduction.power for reduction in reductions if reduction.power is not None}
        names = [name for members in groups.values() for name in members]
        measured = measure(state.source, names, sorted(exponents), own.visit if own.wanted else None)
        united = {label: unite([measured[name] for name in members]) for label, members in groups.items()}
    own.finish(state)
    return [
        [
            reduction.formula(united[label]) if reduction.formula is not None else own.results[reduction.name, label]
            for label in groups
        ]
        for reduction in reductions
    ]


class CustomResults:
    """The results of the user's functions for each group: of one tensor while it is measured, of several afterwards."""

    def __init__(self, wanted: Sequence[Reduction], groups: Mapping[str, Sequence[str]]) -> None:
        self.wanted = wanted
        self.results: dict[tuple[str, str], float] = {}
        self._groups = groups
        self._single = {names[0]: label for label, names in groups.items() if len(names) == 1}

    def visit(self, name: str, value: Value) -> None:
        if name in self._single:
            self._call(self._single[name], value)

    def finish(self, state: StateMapping) -> None:
        if self.wanted:
            for label, names in self._groups.items():
                if (self.wanted[0].name, label) not in self.results:
                    values = [state[name] for name in names]
                    self._call(label, values[0] if len(values) == 1 else flat_tensor(values))

    def _call(self, label: str, value: Value) -> None:
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
        for name, _, _, function in self.wanted:
            assert function is not None
            try:
                self.results[name, label] = float(function(tensor))
            except Exception as error:
                raise StateError(f"The reduction {name!r} failed for {label!r}: {error}") from error


def flat_tensor(values: Sequence[Value]) -> torch.Tensor:
    """All elements in one tensor, which is a copy."""
    parts = [
        value.reshape(-1) if isinstance(value, torch.Tensor) else torch.tensor([float(value)], dtype=torch.float64)
        for value in values
    ]
    return torch.cat(parts) if parts else torch.empty(0)


class Statistic:
    """A method of states that is a reduction; all have the same arguments."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, state: None, owner: type) -> Statistic: ...
    @overload
    def __get__(self, state: Reductions, owner: type) -> BoundReduction: ...
    def __get__(self, state: Reductions | None, owner: type) -> Statistic | BoundReduction:
        return self if state is None else BoundReduction(state, REDUCTIONS[self._name])


class BoundReduction:
    """A reduction of one state, to be called."""

    def __init__(self, state: Reductions, reduction: Reduction) -> None:
        self._state = state
        self._reduction = reduction

    @overload
    def __call__(self, lw: Literal[False] = False, pattern: Pattern | None = None) -> float: ...
    @overload
    def __call__(self, lw: Literal[True], pattern: Pattern | None = None) -> StateDict: ...
    @overload
    def __call__(self, lw: bool = False, pattern: Pattern | None = None, *, group: Pattern) -> StateDict: ...
    def __call__(
        self, lw: bool = False, pattern: Pattern | None = None, *, group: Pattern | None = None
    ) -> float | StateDict:
        """For all elements; for each parameter (`lw`); for each group that a regular expression captures in names.

        pattern: only parameters that this regular expression matches, from the first character on.
        """
        return self._state._reduced(self._reduction, lw, pattern, group)


class Reductions(StateMapping):
    """The statistics of a state."""

    max = Statistic("The largest element.")
    min = Statistic("The smallest element.")
    sum = Statistic("The sum of the elements.")
    mean = Statistic("The mean of the elements.")
    var = Statistic("The variance of the elements, as of a sample: divided by their number less one.")
    std = Statistic("The standard deviation of the elements, as of a sample: ddof is 1.")
    skew = Statistic("The skewness of the elements, m3 / m2^1.5 of central moments; NaN where all are equal.")
    kurtosis = Statistic("The excess kurtosis of the elements, m4 / m2² − 3; NaN where all are equal.")
    norm1 = Statistic("The sum of magnitudes.")
    norm2 = Statistic("The root of the sum of squares.")
    norm1_mean = Statistic("The mean of magnitudes.")
    abs_max = Statistic("The largest magnitude.")
    abs_min = Statistic("The smallest magnitude.")

    @overload
    def norm(self, p: float = 2, lw: Literal[False] = False, pattern: Pattern | None = None) -> float: ...
    @overload
    def norm(self, p: float, lw: Literal[True], pattern: Pattern | None = None) -> StateDict: ...
    @overload
    def norm(self, p: float = 2, *, lw: Literal[True], pattern: Pattern | None = None) -> StateDict: ...
    @overload
    def norm(self, p: float = 2, lw: bool = False, pattern: Pattern | None = None, *, group: Pattern) -> StateDict: ...
    def norm(
        self, p: float = 2, lw: bool = False, pattern: Pattern | None = None, *, group: Pattern | None = None
    ) -> float | StateDict:
        """The p-norm, (Σ|x|ᵖ)^(1/p); 0 counts what is not 0, and infinity gives the largest magnitude."""
        return self._reduced(norm_reduction(float(p)), lw, pattern, group)

    @overload
    def numel(self, lw: Literal[False] = False, pattern: Pattern | None = None) -> int: ...
    @overload
    def numel(self, lw: Literal[True], pattern: Pattern | None = None) -> StateDict: ...
    def numel(self, lw: bool = False, pattern: Pattern | None = None) -> int | StateDict:
        """The number of elements. Nothing is read for it."""
        counts = {name: self.spec(name).numel for name in matching(self, pattern)}
        return self._with_values(counts, f"{self.name}_stat") if lw else sum(counts.values())

    def apply_reduction(
        self, function: Callable[[torch.Tensor], Any], *, lw: bool = False, pattern: Pattern | None = None
    ) -> float | StateDict:
        """The result of a function of yours for all elements in one flat tensor, or for each tensor."""
        return self._reduced(Reduction(getattr(function, "__name__", "reduction"), own=function), lw, pattern, None)

    def __getattr__(self, name: str) -> BoundReduction:
        reduction = REDUCTIONS.get(name)
        if reduction is None:
            raise AttributeError(f"A state has no {name!r}. Add a statistic of your own with register_reduction.")
        return BoundReduction(self, reduction)

    def _reduced(
        self, reduction: Reduction, lw: bool, pattern: Pattern | None, group: Pattern | None
    ) -> float | StateDict:
        names = matching(self, pattern)
        if group is None and not lw:
            return reduce(self, [reduction], {self.name: names})[0][0]
        groups = {name: [name] for name in names} if group is None else grouped(names, group)
        results = reduce(self, [reduction], groups)[0]
        return self._with_values(dict(zip(groups, results, strict=True)), f"{self.name}_stat")
