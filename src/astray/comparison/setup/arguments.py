"""Compares the plain arguments of calls: what both runs' `args` hold besides tensors.

Most sites have the same distinct texts in both runs; only those of the others are parsed. An argument that differs from
call to call comes from the data, and is not a setting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from astray.comparison.pair.matching import Matching
from astray.comparison.rows import Ints
from astray.comparison.setup.setup_difference import ABSENT, Finding
from astray.safe_text import parse_json
from astray.store import RankRun

MOST_SITES = 500
MOST_TEXTS = 64
"""Of how many sites, and how many different calls of each, the arguments are taken apart."""

FEW = 3
"""A setting has so many values in a run at most; what has more is data."""

NAMES: dict[str, tuple[str, ...]] = {
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "clamp": ("input", "min", "max"),
    "conv1d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv3d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "dropout": ("input", "p", "training", "inplace"),
    "embedding": ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    "gelu": ("input", "approximate"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "leaky_relu": ("input", "negative_slope", "inplace"),
    "log_softmax": ("input", "dim"),
    "masked_fill": ("input", "mask", "value"),
    "masked_fill_": ("input", "mask", "value"),
    "max_pool2d": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "mean": ("input", "dim", "keepdim"),
    "pow": ("input", "exponent"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "roll": ("input", "shifts", "dims"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
    "softmax": ("input", "dim"),
    "sum": ("input", "dim", "keepdim"),
    "to": ("input", "dtype"),
    "transpose": ("input", "dim0", "dim1"),
    "tril": ("input", "diagonal"),
    "triu": ("input", "diagonal"),
}
"""What the positions of functions are called, for those whose settings matter most."""


class CallArguments(NamedTuple):
    """The calls of a rank that have arguments, in order of observation; sites in the reference's names."""

    rank: RankRun
    row: Ints
    site: Ints
    text: Ints
    sites: list[str]
    texts: list[str]
    offset: int

    def texts_of(self) -> dict[str, set[str]]:
        """The distinct texts of each site."""
        width = len(self.texts) + 1
        texts: dict[str, set[str]] = defaultdict(set)
        for key in np.unique(self.site.astype(np.int64) * width + self.text).tolist():
            texts[self.sites[key // width]].add(self.texts[key % width])
        return texts

    def at(self, site: str) -> Ints:
        """Which of them are of a site."""
        return np.flatnonzero(self.site == self.sites.index(site))

    def type(self, site: str) -> str:
        """The class that is called at a site."""
        return str(self.rank.calls["type"][int(self.row[self.at(site)[0]])] or "")

    def by_key(self, site: str) -> Iterator[tuple[tuple[int, ...], str]]:
        """The text of each call of a site, by step, micro step, number, and whether it was made again."""
        at = self.at(site)
        columns = [self.rank.calls.numbers(name)[self.row[at]] for name in ("step", "micro", "call", "recompute")]
        for step, micro, call, again, text in zip(
            *(column.tolist() for column in (*columns, self.text[at])), strict=True
        ):
            yield (step + self.offset, micro, call, again), self.texts[text]


def argument_findings(
    reference: RankRun, candidate: RankRun, matching: Matching, steps: Sequence[int]
) -> Iterator[Finding]:
    """The arguments that were given differently to calls of the same site."""
    if matching.by == "order":  # names mean nothing then
        return
    calls_reference, calls_candidate = _read(reference, matching, steps, False), _read(candidate, matching, steps, True)
    texts_reference, texts_candidate = calls_reference.texts_of(), calls_candidate.texts_of()
    differing = [
        site for site in texts_reference if site in texts_candidate and texts_reference[site] != texts_candidate[site]
    ]
    for site in differing[:MOST_SITES]:
        yield from _of_site(site, calls_reference, calls_candidate, texts_reference[site], texts_candidate[site], steps)


def _read(rank: RankRun, matching: Matching, steps: Sequence[int], mapped: bool) -> CallArguments:
    calls = rank.calls
    kind, site, args = calls.coded("kind"), calls.coded("site"), calls.coded("args")
    offset = matching.offset if mapped else 0
    ours = [name.startswith("astray/") for name in site.values]
    kept = (args.codes >= 0) & (kind.codes != kind.code("optimizer")) & ~np.array([*ours, True])[site.codes]
    if len(steps) < len(rank.summary.steps):
        kept &= np.isin(calls.numbers("step") + offset, steps)
    rows = np.flatnonzero(kept)
    names = [matching.mapping.site(name) for name in site.values] if mapped else list(site.values)
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    return CallArguments(
        rank,
        rows,
        np.array([*(codes[name] for name in names), -1])[site.codes[rows]],
        args.codes[rows],
        list(codes),
        [str(text) for text in args.values],
        offset,
    )


def _of_site(
    site: str,
    reference: CallArguments,
    candidate: CallArguments,
    texts_reference: set[str],
    texts_candidate: set[str],
    steps: Sequence[int],
) -> Iterator[Finding]:
    function = site.rpartition("/")[2] if "/" in site else ""
    if function and not are_of_one_framework(reference.type(site), candidate.type(site)):
        return
    parsed_reference, parsed_candidate = (
        [flattened(text, function) for text in sorted(texts)[:MOST_TEXTS]]
        for texts in (texts_reference, texts_candidate)
    )
    for name in dict.fromkeys(name for arguments in (*parsed_reference, *parsed_candidate) for name in arguments):
        values = [
            _distinct(arguments.get(name, ABSENT) for arguments in side)
            for side in (parsed_reference, parsed_candidate)
        ]
        if values[0] == values[1] or max(map(len, values)) > FEW or min(map(len, values)) > 1:
            continue
        if _is_given_otherwise(name, parsed_reference, parsed_candidate):
            continue
        found = (
            (None, values[0][0], values[1][0])
            if len(values[0]) == len(values[1]) == 1
            else _first(site, name, function, reference, candidate, steps)
        )
        if found is not None and not _is_computed(*found[1:]):
            kind = function or reference.type(site)
            yield Finding("argument", site, kind, name, *found[1:], found[0])


def are_of_one_framework(reference: str, candidate: str) -> bool:
    """Whether two functions take the same arguments, by their full names: those of other frameworks have their own.

    >>> are_of_one_framework("torch.nn.functional.gelu", "torch.Tensor.gelu")
    True
    >>> are_of_one_framework("torch.nn.functional.gelu", "paddle.nn.functional.gelu")
    False
    """
    first, other = (name.partition(".")[0] for name in (reference, candidate))
    return first == other or not ("." in reference and "." in candidate)


def flattened(text: str, function: str = "") -> dict[str, Any]:
    """The arguments in a text by their names; positions that have none by their numbers.

    >>> flattened('{"args":["<tensor>",[8],1e-05],"kwargs":{"dim":-1}}')
    {'0': '<tensor>', '1': [8], '2': 1e-05, 'dim': -1}
    """
    try:
        arguments = parse_json(text)
    except ValueError:
        return {}
    if not isinstance(arguments, dict):
        return {}
    found: dict[str, Any] = {}
    positions, names = arguments.get("args"), NAMES.get(function, ())
    for place, value in enumerate(positions if isinstance(positions, list) else ()):
        _spread(names[place] if place < len(names) else str(place), value, found)
    by_name = arguments.get("kwargs")
    for name, value in by_name.items() if isinstance(by_name, dict) else ():
        _spread(name, value, found)
    return found


def _spread(name: str, value: Any, spread: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _spread(f"{name}.{key}", item, spread)
    elif isinstance(value, list) and any(isinstance(item, dict | list) or item == "<tensor>" for item in value):
        for place, item in enumerate(value):
            _spread(f"{name}.{place}", item, spread)
    else:
        spread[name] = value


def _distinct(values: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if not any(value is known or (type(value) is type(known) and value == known) for known in found):
            found.append(value)
    return found


def _is_given_otherwise(name: str, reference: list[dict[str, Any]], candidate: list[dict[str, Any]]) -> bool:
    """Whether an argument that one run does not name has its value there all the same, by position."""
    for side, other_side in ((reference, candidate), (candidate, reference)):
        if any(name in arguments for arguments in other_side):
            continue
        values = [arguments[name] for arguments in side if name in arguments]
        spare = [value for arguments in other_side for key, value in arguments.items() if key not in side[0]]
        if any(value in spare for value in values):
            return True
    return False


def _is_computed(reference: Any, candidate: Any) -> bool:
    """Whether two numbers look as if they came from data that differs by roundings: close, and with many digits."""
    if not isinstance(reference, float) or not isinstance(candidate, float):
        return False
    is_close = abs(reference - candidate) <= 0.01 * max(abs(reference), abs(candidate))
    return is_close and min(len(repr(reference)), len(repr(candidate))) > 10


def _first(
    site: str, name: str, function: str, reference: CallArguments, candidate: CallArguments, steps: Sequence[int]
) -> tuple[int | None, Any, Any] | None:
    """The first call in which an argument differs that is not the same in all calls of a run."""
    texts_candidate = dict(candidate.by_key(site))
    for key, text in reference.by_key(site):
        if key in texts_candidate and texts_candidate[key] != text:
            one, other = (flattened(found, function).get(name, ABSENT) for found in (text, texts_candidate[key]))
            if one is not other and one != other:
                return (None if key[0] == steps[0] else key[0]), one, other
    return None
