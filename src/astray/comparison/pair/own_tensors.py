"""The parameters and buffers of a run by their names, as its modules were first called with them.

Reads a run, a recording or a checkpoint; feeds what checks and drafts mappings, and what loads weights from a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.evidence import COUNTS, STATISTICS
from astray.comparison.measure.metrics import equal_but_for_order
from astray.comparison.pair.renaming import OWN, full_name, sites_of_tensors
from astray.graph.keys import one_key
from astray.records import ROOT
from astray.store import CheckpointRank, RankRun, RunData, Table


class OwnTensor(NamedTuple):
    """A parameter or a buffer: where its first row is, and of which module it is."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    module: str
    type: str  # the class of the module; empty where it is not known
    rank: int
    row: int


def own_tensors(run: RunData) -> dict[str, OwnTensor]:
    """Those of all ranks, in the order in which they were first seen. Parameters come before gradients of others."""
    found: dict[str, OwnTensor] = {}
    for rank in run.ranks.values():
        for tensor in _of_rank(rank):
            found.setdefault(tensor.name, tensor)
    return found


def _of_rank(rank: RankRun) -> Iterator[OwnTensor]:
    calls, tensors = rank.calls, rank.tensors
    kind, site, type = (calls.coded(name) for name in ("kind", "site", "type"))
    role, path = tensors.coded("role"), tensors.coded("path")
    known = rank.call_rows >= 0
    of_module = np.append(kind.codes == kind.code("module"), False)[rank.call_rows]
    of_module &= known & np.isin(role.codes, [role.code(name) for name in OWN if name in role.values])
    named = np.append(sites_of_tensors(rank), False)[rank.call_rows] & known
    if not isinstance(rank, CheckpointRank):  # a run of functions alone has its parameters' gradients
        named &= (role.codes == role.code("gradient")) & (path.codes == path.code("grad"))
    for at in (np.flatnonzero(of_module), np.flatnonzero(named)):
        keys = one_key([site.codes[rank.call_rows[at]], path.codes[at]])
        for row in at[np.sort(np.unique(keys, return_index=True)[1])].tolist():
            call = int(rank.call_rows[row])
            place = str(site[call])
            is_own = bool(of_module[row])
            yield OwnTensor(
                full_name(place, str(path[row])) if is_own else place,
                str(role[row]) if is_own or isinstance(rank, CheckpointRank) else "parameter",
                str(tensors["dtype"][row]),
                tuple(tensors["shape"][row] or ()),
                place if is_own else place.rpartition(".")[0] or ROOT,
                str(type[call] or "") if is_own else "",
                rank.rank,
                row,
            )


class Measured(NamedTuple):
    """What is known of the values of one tensor: statistics as columns of one row, and the fingerprint."""

    statistics: dict[str, npt.NDArray[Any]]
    fingerprint: int | None

    @classmethod
    def of(cls, tensors: Table, row: int) -> Measured:
        """Those of one row, without reading whole columns: a checkpoint measures what is asked for."""
        cells = tensors.row(row)
        return cls(
            {
                **{name: np.array([np.nan if cells[name] is None else cells[name]]) for name in STATISTICS},
                **{name: np.array([-1 if cells[name] is None else cells[name]]) for name in COUNTS},
            },
            cells["fingerprint"],
        )

    @classmethod
    def nothing(cls) -> Measured:
        """Where nothing was measured."""
        return cls(
            {**{name: np.array([np.nan]) for name in STATISTICS}, **{name: np.array([-1]) for name in COUNTS}}, None
        )

    def has_elements_of(self, other: Measured) -> bool:
        """Whether both have the same elements, in whatever order, by their statistics."""
        if min(self.statistics["nan"][0], other.statistics["nan"][0]) < 0:  # nothing was measured
            return False
        return bool(equal_but_for_order(self.statistics, other.statistics).all())

    def has_bits_of(self, other: Measured) -> bool:
        """Whether both have the same bits."""
        return self.fingerprint is not None and self.fingerprint == other.fingerprint
