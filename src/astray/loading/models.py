"""What loading needs of a framework's models and tensors; chooses the framework of a given one.

No framework is imported here: a model can only exist where its framework is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from astray.comparison.pair.framework_names import PADDLE, TORCH
from astray.comparison.pair.own_tensors import OwnTensor
from astray.errors import StateError

Array = npt.NDArray[Any]


class Model(Protocol):
    """The parameters and persistent buffers of a model."""

    framework: str

    def tensors(self) -> dict[str, OwnTensor]:
        """What is known of each, by name; the type is the framework's own class, also of a subclass of it."""

    def state(self) -> Mapping[str, Any]:
        """The tensors themselves. Several names may have one."""

    def why_not(self, name: str) -> str:
        """Why a tensor cannot be written; empty where it can."""

    def write(self, name: str, values: Array) -> None:
        """Writes values into a tensor, in place, in its own dtype and on its own device. No gradient is recorded."""


def is_model(value: Any) -> bool:
    """Whether something is a module of torch or a layer of Paddle."""
    return _framework_of(value) is not None


def model_of(model: Any) -> Model:
    """The parameters and buffers of a model. Raises StateError for anything that is not one."""
    framework = _framework_of(model)
    if framework == TORCH:
        from astray.loading.torch_models import TorchModel

        return TorchModel(model)
    if framework == PADDLE:
        from astray.loading.paddle_models import PaddleModel

        return PaddleModel(model)
    raise StateError(
        f"A {type(model).__name__} was given to load weights into. Give a torch.nn.Module or a paddle.nn.Layer."
    )


def array_of(value: Any) -> Array:
    """The values of a tensor of any framework, in a dtype that numpy knows."""
    framework = framework_of_tensor(value)
    if framework == TORCH:
        from astray.loading.torch_models import array
    elif framework == PADDLE:
        from astray.loading.paddle_models import array
    else:
        return np.asarray(value)
    return array(value)


def framework_of_tensor(value: Any) -> str | None:
    """The framework of a tensor, by the home of its class or of one that it inherits from; None for other arrays."""
    homes = [kind.__module__.partition(".")[0] for kind in type(value).__mro__]
    return next((name for name in (TORCH, PADDLE) if name in homes), None)


def _framework_of(model: Any) -> str | None:
    for framework, kind in ((TORCH, "Module"), (PADDLE, "Layer")):
        base = getattr(getattr(sys.modules.get(framework), "nn", None), kind, None)
        if isinstance(base, type) and isinstance(model, base):
            return framework
    return None


def class_within(kind: type, home: str) -> str:
    """The name of the first class that a class inherits from and that lies in a module of a framework.

    >>> class_within(bool, "builtins")
    'bool'
    """
    own = (base.__name__ for base in kind.__mro__ if base.__module__ == home or base.__module__.startswith(f"{home}."))
    return next(own, kind.__name__)
