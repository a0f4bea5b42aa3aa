"""`register_saving_hook` and `remove_saving_hook`: their arguments, checked and handed to `hook.py`.

Needs no torch of its own, so that a model of another framework is refused by a sentence and not by an ImportError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from astray.errors import RecordError
from astray.foreign.saving_hook.writer import Limit

Model = TypeVar("Model")


class _ExplicitDefault(int):
    """A limit that holds unless another is given: a number the user wrote is none of these, though it may be equal."""


TENSORS, GRADS = _ExplicitDefault(50), _ExplicitDefault(100)


def register_saving_hook(
    model: Model,
    path: str | os.PathLike[str] = "./tmp_tensors",
    target_class_names: str | Sequence[str] | None = None,
    max_saved_tensors: int = TENSORS,
    max_saved_grads: int = GRADS,
    max_saved_tensors_per_step: int | None = None,
    max_saved_grads_per_step: int | None = None,
) -> Model:
    """Save the outputs of leaf layers and the gradients of their parameters from now on; gives the model back.

    path: where to: a folder for each rank is made in it. What an earlier recording left there is replaced.
    target_class_names: the classes of the layers, by their exact names; all leaf layers by default.
    max_saved_tensors, max_saved_grads: save no more than that; all, if it is not above 0. When there are as many, the
        hooks are taken off.
    max_saved_tensors_per_step, max_saved_grads_per_step: save no more of each micro step, that is, forward of the
        model. Given alone, there is no limit on the whole.

    It goes on until there is enough, the interpreter ends, or `remove_saving_hook` is called.
    """
    _check(model)
    from astray.foreign.saving_hook.hook import save  # which needs torch

    save(
        model,
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
    """End what was registered for this model: no hook is left on it, and all files are written."""
    _check(model)
    from astray.foreign.saving_hook.hook import remove

    remove(model)


def _limit(total: int, per_step: int | None) -> Limit:
    if per_step is None:
        return Limit(int(total))
    return Limit(0 if isinstance(total, _ExplicitDefault) else int(total), int(per_step))


def _check(model: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return
    what = type(model).__name__
    if any(kind.__module__.split(".")[0] == "paddle" for kind in type(model).__mro__):
        raise RecordError(
            f"A {what} of Paddle was given. Models of Paddle cannot be recorded yet, only those of PyTorch. "
            "Dumps that the older hook has made of them can be opened and checked."
        )
    raise RecordError(f"A {what} was given, which cannot be recorded. Pass a torch.nn.Module.")
