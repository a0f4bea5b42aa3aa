"""All kinds of faults. Importing the modules that plant them declares them."""

from __future__ import annotations

from faults.grid import in_backward, in_data, in_forward, in_update, in_weights
from faults.grid.declared import KINDS

__all__ = ["KINDS", "in_backward", "in_data", "in_forward", "in_update", "in_weights"]
