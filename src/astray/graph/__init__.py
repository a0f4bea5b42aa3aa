"""Who made, gave, encloses and follows whom in one rank of a run: the call tree and the flow of values.

Reads `store`; compare, alarms, risk and the page ask here. Built once per rank, a column at a time.

calls.py    the tree of calls: what is around a call, its backward, the module that owns a parameter
values.py   which rows are one value: the recorded column, or derived from bits where there is none
flow.py     which result made each value; graph.py: the `Graph` that answers for single rows
"""

from __future__ import annotations

from astray.graph.calls import CallTree
from astray.graph.graph import Graph, graph_of

__all__ = ["CallTree", "Graph", "graph_of"]
