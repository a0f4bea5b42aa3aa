"""The tensors of a recorded run that a graft takes: which calls they belong to, and their values, read on use.

Feeds `grafting`. One `ReferenceValues` for each graft; only the rows of the current step are in its index.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from astray.capture.graft_words import Graft, site_matches
from astray.capture.pytorch.kept_tensors import kept_tensor
from astray.errors import RecordError
from astray.records import Phase, Role
from astray.store import RankRun, open_run
from astray.wording import did_you_mean

LEVEL_OF = {"module": "module", "function": "function", "op": "op"}
"""The kinds of calls that can be grafted, and the level that sees them. The others are no calls of the model."""

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class CallKey(NamedTuple):
    """A call of one step, as both runs know it. `phase` is that of the call itself, and not of its backward."""

    site: str
    micro: int
    number: int
    phase: Phase
    recompute: bool


class TensorSlot(NamedTuple):
    """Where a tensor belongs in a call, or in the backward of that call."""

    backward: bool
    role: Role
    path: str


Rows = dict[TensorSlot, list[int]]
"""The rows of a call. A place has several where a program goes backward through one graph several times."""


def open_rank(run: str, rank: int) -> RankRun:
    """A rank of the run that is grafted from."""
    opened = open_run(Path(run))
    if rank not in opened.ranks:
        known = ", ".join(map(str, opened.ranks)) or "none"
        raise RecordError(f"{run} has no rank {rank} to graft from; it has {known}. Record it with as many ranks.")
    return opened.ranks[rank]


class ReferenceValues:
    """What one graft takes from a rank. Raises RecordError where there is nothing to take.

    kinds: of the calls that are meant.
    """

    def __init__(self, graft: Graft, rank: RankRun) -> None:
        self._graft = graft
        self._rank = rank
        calls = rank.calls
        self._sites = self._matching(calls.coded("site").values)
        of_call = np.isin(calls.coded("site").codes, [calls.coded("site").code(site) for site in self._sites])
        of_call &= self._has_words("kind", LEVEL_OF)
        if graft.call is not None:
            of_call &= calls.numbers("call") == graft.call
        if not of_call.any():
            raise RecordError(self._why_no_call())
        self.kinds = {str(calls["kind"][row]) for row in np.flatnonzero(of_call)}
        self._rows = self._wanted_rows(of_call)
        if not self._rows.size:
            what = " or ".join(graft.whats)
            raise RecordError(f"{graft.run} has no {what} of {graft.where.partition('@')[0]} to graft.")
        if "blob_file" in rank.tensors and not self._are_kept().any():
            raise RecordError(
                f"{graft.run} keeps no values of {graft.where}, which a graft needs. Record it with keep='tensors'."
            )

    def _matching(self, sites: list[str]) -> list[str]:
        """The sites that are meant. A site of that very name is preferred to a regular expression that fits."""
        graft = self._graft
        if graft.is_single_step:
            return sites
        return [site for site in sites if site == graft.site] or [
            site for site in sites if site_matches(graft.site, site)
        ]

    def _why_no_call(self) -> str:
        graft = self._graft
        if graft.is_single_step:
            return f"{graft.run} has no calls of modules or functions to graft from."
        sites = [site for site in self._rank.calls.coded("site").values if site is not None]
        if graft.call is not None and self._sites:
            return f"{graft.run} has no call {graft.call} of {graft.site}. Calls are counted from 0 in each micro step."
        return f"{graft.run} has no site {graft.site} to graft from.{did_you_mean(graft.site, sites)}"

    def _has_words(self, column: str, words: Iterable[str]) -> Mask:
        coded = self._rank.calls.coded(column)
        return np.asarray(np.isin(coded.codes, [coded.code(word) for word in words]))

    def _wanted_rows(self, of_call: Mask) -> Ints:
        """The rows of tensors that the graft takes, those of one step after those of another."""
        call_rows, tensors, whats = self._rank.call_rows, self._rank.tensors, self._graft.whats
        module = self._has_words("kind", ["module"])[call_rows]
        role = tensors.coded("role")
        has_role = {word: role.codes == role.code(word) for word in ("input", "output", "parameter", "state")}
        wanted = np.zeros(len(tensors), np.bool_)
        if "outputs" in whats:
            wanted |= has_role["output"] & ~self._are_gradients
        if "inputs" in whats:
            wanted |= has_role["input"]
        if "parameters" in whats:
            wanted |= (has_role["parameter"] | has_role["state"]) & module
        if "gradients" in whats:
            wanted |= has_role["output"] & self._are_gradients
        rows = np.flatnonzero(wanted & (call_rows >= 0) & of_call[call_rows])
        return np.asarray(rows[np.argsort(self._steps_of(rows), kind="stable")])

    @cached_property
    def _are_gradients(self) -> Mask:
        """Which rows are of the backward of a call, and not of a call that a backward pass makes.

        What arrives at a result has the path of that result.
        """
        tensors = self._rank.tensors
        path, role = tensors.coded("path"), tensors.coded("role")
        results = [code for code, text in enumerate(path.values) if text == "out" or text.startswith("out.")]
        arrives = np.isin(path.codes, results) == (role.codes == role.code("input"))
        return np.asarray(arrives & self._has_words("phase", ["backward"])[self._rank.call_rows])

    def _steps_of(self, rows: Ints) -> Ints:
        return np.asarray(self._rank.calls.numbers("step")[self._rank.call_rows[rows]], np.int64)

    def _are_kept(self) -> Mask:
        return np.asarray(self._rank.tensors.valid("blob_file")[self._rows])

    @cached_property
    def _steps(self) -> Ints:
        """The step of each row."""
        return self._steps_of(self._rows)

    def of_step(self, step: int) -> dict[CallKey, Rows]:
        """The rows of a step, by their calls."""
        found: dict[CallKey, Rows] = {}
        calls, tensors = self._rank.calls, self._rank.tensors
        begin, end = np.searchsorted(self._steps, [step, step + 1])
        for row in self._rows[begin:end].tolist():
            call = int(self._rank.call_rows[row])
            backward = bool(self._are_gradients[row])
            key = CallKey(
                calls["site"][call],
                int(calls.numbers("micro")[call]),
                int(calls.numbers("call")[call]),
                "forward" if backward else calls["phase"][call],
                bool(calls.numbers("recompute")[call]),
            )
            place = TensorSlot(backward, tensors["role"][row], tensors["path"][row])
            found.setdefault(key, {}).setdefault(place, []).append(row)
        return found

    def value(self, row: int) -> torch.Tensor:
        """The values of a row. Raises NotKeptError where there are none."""
        return kept_tensor(self._rank, row, self._rank.tensors.row(row))
