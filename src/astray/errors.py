"""What astray raises, and nothing else.

Every message states the fact, the values, and the next step, and the command line prints it as it is.

    AstrayError
    ├── RunError            a run on disk cannot be opened, read or written
    │   ├── CheckpointError a checkpoint cannot be read
    │   ├── RunExists       something is there already, and overwriting was not asked for
    │   └── RunVersionError it was written in a format this astray does not know
    ├── CompareError        two runs cannot be compared at all
    ├── RecordError         a recording cannot start, or was used wrongly
    ├── StateError          states of models do not fit together, or lack what was asked for
    └── UsageError          a command or an option was given a value it cannot take
"""

from __future__ import annotations

__all__ = [
    "AstrayError",
    "CheckpointError",
    "CompareError",
    "RecordError",
    "RunError",
    "RunExists",
    "RunVersionError",
    "StateError",
    "UsageError",
]


class AstrayError(Exception):
    """The base of everything astray raises on purpose."""


class RunError(AstrayError):
    """A run on disk cannot be opened, read or written."""


class CheckpointError(RunError):
    """A checkpoint on disk cannot be read: it is not one, or damaged, or would need code of its own to be run."""


class RunExists(RunError):  # noqa: N818 - reads as the fact it states
    """Something is there already, and overwriting was not asked for."""


class RunVersionError(RunError):
    """The run was written in a format this astray does not know."""


class CompareError(AstrayError):
    """Two runs cannot be compared at all."""


class RecordError(AstrayError):
    """A recording cannot start, or was used wrongly."""


class StateError(AstrayError):
    """States of models do not fit together, or lack what was asked for."""


class UsageError(AstrayError):
    """A command or an option was given a value it cannot take."""
