"""Records values that a program passes to `rec.save`, nested or not, and the gradients of their tensors.

Numbers and numpy arrays are recorded as tensors too, so that they are compared like everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from astray.capture.engine import Engine
from astray.capture.structure import Flattener, ObjectFlattener

if TYPE_CHECKING:
    from astray.capture.native.core import OpenCall, Site

NUMBERS = (bool, int, float, complex)

Outputs = list[tuple[str, Any]]


class SavedValues:
    """The values of one recording.

    `native` is the compiled module of the adapter, `tensor_type` the framework's class of tensors. `to_tensor` makes
    one of a number or an array; `watch` watches the gradients of what a call has returned, where some are expected.
    """

    def __init__(
        self,
        engine: Engine,
        native: ModuleType,
        tensor_type: type,
        to_tensor: Callable[[Any], Any],
        watch: Callable[[OpenCall, Outputs], None],
    ) -> None:
        self._engine = engine
        self._native = native
        self._tensor_type = tensor_type
        self._to_tensor = to_tensor
        self._watch = watch
        self._flat = Flattener(native, self._has_numbers, ObjectFlattener(native, self._is_array))
        self._sites: dict[str, Site] = {}

    def save(self, name: str, value: Any, gradient: bool, frame: FrameType | None) -> None:
        """Records `value` at the site `name`, as the output of a call that does nothing."""
        engine = self._engine
        site = self._sites.get(name)
        if site is None:
            site = self._sites[name] = self._native.Site(name, type(value).__name__, "", "custom")
        call = engine.enter(site, frame)
        try:
            if not call.recorded:
                return
            outputs = [(path, self._as_tensor(item)) for path, item in self._flat.result(value)]
            engine.begin(call, self._flat.arguments((value,), {})[1])
            for path, tensor in outputs:
                engine.tensors.observe(call.seq, "output", path, tensor)
            if gradient and any(engine.tensors.reader.requires_grad(tensor) for _, tensor in outputs):
                self._watch(call, outputs)
        finally:
            engine.leave(call)

    def _as_tensor(self, value: Any) -> Any:
        return value if isinstance(value, self._tensor_type) else self._to_tensor(value)

    def _has_numbers(self, value: Any) -> bool:
        return self._is_array(value) or type(value) in NUMBERS

    def _is_array(self, value: Any) -> bool:
        """What is recorded of an object's attributes: arrays only, since its plain numbers may be anything, such as a
        use count.
        """
        if isinstance(value, np.ndarray | np.generic):
            return value.dtype.kind in "biufc"
        return isinstance(value, self._tensor_type)
