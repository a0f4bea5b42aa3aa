"""Rows of one run that the other has nothing for, as a mapping says: `only in reference`, `only in candidate`.

Reads the pairs of a comparison, feeds `Comparison.same`. The rows stay in the report with their verdict.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from astray.comparison.pair.mapping import Mapping
from astray.comparison.rows import Bools
from astray.comparison.verdict import Verdict
from astray.graph.keys import one_key
from astray.store import Table


def lone_by_mapping(pairs: Table, mapping: Mapping) -> Bools:
    """Which pairs are only in one run, and named in the mapping as such."""
    found = np.zeros(len(pairs), np.bool_)
    for names, only in (
        (mapping.only_in_reference, Verdict.ONLY_IN_REFERENCE),
        (mapping.only_in_candidate, Verdict.ONLY_IN_CANDIDATE),
    ):
        at = np.flatnonzero(pairs.coded("verdict").codes == only) if names else np.empty(0, np.int64)
        if not len(at):
            continue
        site, path = pairs.coded("site"), pairs.coded("path")
        keys = one_key([site.codes[at], path.codes[at]])
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        is_named = [_is_named(str(site[row]), str(path[row] or ""), set(names)) for row in at[first].tolist()]
        found[at] = np.array(is_named, np.bool_)[which.reshape(-1)]
    return found


def _is_named(site: str, path: str, names: Collection[str]) -> bool:
    """By the function that is called there, by the tensor's own name, or by that of the tensor it is about."""
    module, slash, function = site.partition("/")
    return (function if slash else path.rpartition(".")[2]) in names or module.rpartition(".")[2] in names
