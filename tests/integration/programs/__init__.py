"""Programs as people write them, small enough to run in a fraction of a second: one module for each family.

Importing this package fills `PROGRAMS`.
"""

from integration.programs import (
    checkpointing,
    compiled,
    generation,
    graphs,
    language_models,
    layers,
    loading,
    precision,
    several,
    sharing,
)
from integration.programs.program import PROGRAMS, STEPS, Program, Setup, state_after

__all__ = [
    "PROGRAMS",
    "STEPS",
    "Program",
    "Setup",
    "checkpointing",
    "compiled",
    "generation",
    "graphs",
    "language_models",
    "layers",
    "loading",
    "precision",
    "several",
    "sharing",
    "state_after",
]
