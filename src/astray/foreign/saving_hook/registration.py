"""`register_saving_hook` and `remove_saving_hook`: their arguments, checked and handed to `hook.py`.

Imports no framework before it has been given a model, whose program has imported it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from astray.errors import RecordError
from astray.foreign.saving_hook.writer import Limit

if TYPE_CHECKING:
    from astray.foreign.saving_hook.hook import Framework

Model = TypeVar("Model")


class _DefaultLimit(int):
    """A default limit; its type distinguishes it from an equal number that the user passes."""


TENSORS, GRADS = _DefaultLimit(50), _DefaultLimit(100)


def register_saving_hook(
    model: Model,
    path: str | os.PathLike[str] = "./tmp_tensors",
    target_class_names: str | Sequence[str] | None = None,
    max_saved_tensors: int = TENSORS,
    max_saved_grads: int = GRADS,
    max_saved_tensors_per_step: int | None = None,
    max_saved_grads_per_step: int | None = None,
) -> Model:
    """Save the outputs of leaf layers and the gradients of their parameters from now on. Returns the model.

    path: the folder, in which each rank gets one of its own. Files of an earlier recording there are replaced.
    target_class_names: the classes of the layers, by their exact names; all leaf layers by default.
    max_saved_tensors, max_saved_grads: the most files to save; no limit if not above 0. When it is reached, the hooks
        are removed.
    max_saved_tensors_per_step, max_saved_grads_per_step: the most files of each micro step, that is, forward of the
        model. Without max_saved_tensors or max_saved_grads there is no limit on the whole then.

    Saving goes on until the limits are reached, the interpreter ends, or `remove_saving_hook` is called.
    """
    framework = _framework_of(model)
    from astray.foreign.saving_hook.hook import save

    save(
        model,
        framework,
        Path(path).absolute(),
        [target_class_names] if isinstance(target_class_names, str) else target_class_names,
        {
            "tensors": _limit(max_saved_tensors, max_saved_tensors_per_step),
            "grads": _limit(max_saved_grads, max_saved_grads_per_step),
        },
    )
    return model


register_hook = register_saving_hook


def remove_saving_hook(model: Any) -> None:
    """End what was registered for this model: its hooks are removed, and all files are written."""
    _framework_of(model)
    from astray.foreign.saving_hook.hook import remove

    remove(model)


def _limit(total: int, per_step: int | None) -> Limit:
    if per_step is None:
        return Limit(int(total))
    return Limit(0 if isinstance(total, _DefaultLimit) else int(total), int(per_step))


def _framework_of(model: Any) -> Framework:
    """The framework of a model. Raises RecordError for anything else."""
    torch, paddle = (sys.modules.get(name) for name in ("torch", "paddle"))
    if torch is not None and isinstance(model, torch.nn.Module):
        from astray.foreign.saving_hook.torch_modules import TorchModules

        return TorchModules()
    if paddle is not None and isinstance(model, paddle.nn.Layer):
        from astray.foreign.saving_hook.paddle_layers import PaddleLayers

        return PaddleLayers()
    raise RecordError(
        f"A {type(model).__name__} was given, which cannot be recorded. Pass a paddle.nn.Layer or a torch.nn.Module."
    )
