"""All faults and controls. Importing the modules that plant them declares them; here they get their order."""

from __future__ import annotations

from faults import controls, declared, in_backward, in_data, in_forward, in_update, in_weights
from faults.declared import CONTROLS, Fault

FAULTS: dict[str, Fault] = {
    name: fault
    for module in (in_data, in_weights, in_forward, in_backward, in_update)
    for name, fault in declared.FAULTS.items()
    if fault.plant.__module__ == module.__name__
}
assert len(FAULTS) == len(declared.FAULTS), "a module with faults is not listed here"

__all__ = ["CONTROLS", "FAULTS", "controls"]
