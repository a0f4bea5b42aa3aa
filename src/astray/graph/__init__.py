"""What made, gave, encloses and follows what in one rank of a run: the call tree and the flow of values.

Reads `store`; comparison, nonfinite, headroom and web ask here. Built once per rank, a column at a time.

graph.py    the `Graph` that answers for single rows
calls.py    the tree of calls: what is around a call, its backward, the module that owns a parameter
flow.py     which rows are one value (the recorded column, or derived from bits), and which result made each
keys.py     many columns as one integer key; equal keys are found by sorting
"""

from __future__ import annotations

from astray.graph.calls import CallTree
from astray.graph.graph import Graph, graph_of

__all__ = ["CallTree", "Graph", "graph_of"]
