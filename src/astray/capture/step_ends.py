"""Where the steps of a program end that does not say so, and what its models are called: the same in every framework.

The first optimizer that steps sets the pace. Each of its steps ends a step, however many forwards came before it
(gradient accumulation) or ran inside it. Where several optimizers take turns in one iteration, what runs after the
first belongs to the next step, in every run alike. A program without an optimizer is one long step, and its forwards
are micro steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from astray.capture.engine import Engine
from astray.records import SKIPPED_UPDATE


class PacingOptimizer:
    """Calls `end_step` as the first optimizer steps, until the program ends its steps itself."""

    def __init__(self, engine: Engine, end_step: Callable[[], None]) -> None:
        self._engine = engine
        self._end_step = end_step
        self._optimizer: weakref.ref[Any] | None = None

    def let_program_end_steps(self) -> None:
        """The program says by itself where steps end."""
        self._end_step = _end_no_step

    def remove(self) -> None:
        self._optimizer = None
        self._end_step = _end_no_step

    def scaled(self) -> bool:
        """A loss has been scaled: gradients may overflow. Returns whether that is recorded."""
        if self._engine.in_own_process:
            self._engine.scaled = True
        return self._engine.in_own_process and self._engine.listening

    def skipped(self, optimizer: Any) -> None:
        """An optimizer has skipped its step, because gradients overflowed."""
        if self._engine.in_own_process and self._engine.listening:
            self._engine.note(SKIPPED_UPDATE, {"optimizer": type(optimizer).__name__})
        self.stepped(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, or has skipped its step."""
        if not self._engine.in_own_process:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self._end_step()  # which guards itself


def _end_no_step() -> None:
    """Ends no step."""


class ModelNames:
    """Names the outermost modules of a program as they are first called.

    The first one with parameters is the model, and its sites carry plain names; any other (a loss, a second network) is
    named by its class: `CrossEntropyLoss`, then `CrossEntropyLoss#2`. `named` are those that have names already.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._roots = {label: weakref.ref(module) for label, module in named.items()}
        self._has_model = "" in self._roots

    def __len__(self) -> int:
        return len(self._roots)

    def add(self, module: Any, kind: str, has_parameters: Callable[[], bool], name: str | None = None) -> str:
        """A name that the same module gets again in the next run. Names of modules that have died are reused.

        kind: its class. name: what it is called in the model of a trainer's step, if it is called there.
        """
        label = self._label(kind, has_parameters, name)
        self._roots[label] = weakref.ref(module)
        return label

    def _label(self, kind: str, has_parameters: Callable[[], bool], given: str | None) -> str:
        self._has_model = self._has_model or given is not None
        if given is None and not self._has_model and has_parameters():
            self._has_model = True
            return ""
        name = kind if given is None else given
        for number in range(1, len(self._roots) + 2):
            label = name if number == 1 else f"{name or kind}#{number}"
            if label not in self._roots or self._roots[label]() is None:
                return label
        return name
