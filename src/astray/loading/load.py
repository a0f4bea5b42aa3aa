"""`load_from`: reads the weights of a source, checks that all of them fit a model, and writes them into it."""

from __future__ import annotations

import os
from collections.abc import Mapping as Dictionary
from pathlib import Path
from typing import Any

import numpy as np

from astray.comparison.pair.mapping import Mapping, read_mapping
from astray.errors import StateError
from astray.loading.loaded import LoadedWeights
from astray.loading.models import Array, Model, model_of
from astray.loading.plan import Assignment, plan_by_looks, plan_by_mapping
from astray.loading.weights import Weights, weights_of


def load_from(source: Any, model: Any, map: str | os.PathLike[str] | Mapping | None = None) -> LoadedWeights:
    """Loads weights into a model, so that two programs start from the same ones, also in two frameworks.

    >>> print(astray.load_from("runs/torch", paddle_layer))
    148 tensors of GPT were loaded from runs/torch: 148 by name; 49 of them laid out anew.
      transpose     h.0.attn.qkv.weight, h.0.attn.proj.weight, …

    source: the path of a run that was recorded with keep="tensors", whose first step's weights are taken; that of a
        checkpoint (.pt, .safetensors, .pdparams, a folder); an open run or checkpoint; a state_dict or a `StateDict`;
        or another model.
    model: a torch.nn.Module or a paddle.nn.Layer. Its parameters and persistent buffers are written in place, without
        gradients; their dtypes and devices stay. What is written is in memory once before that.
    map: a mapping file as for `compare`, in either direction. Without it tensors are paired by name, by what the
        frameworks call them, and at last by shape, and the weights that they store transposed are transposed; the
        `LoadedWeights` that are returned say what was paired, and print as a report.

    Nothing is written unless every tensor of the model gets its values: StateError names all that are missing, or of
    another shape or kind.
    """
    weights, target = weights_of(source), model_of(model)
    tensors = target.tensors()
    if not tensors:
        raise StateError(f"{type(model).__name__} has no parameters and no buffers to load weights into.")
    of_source = {name: weight.tensor for name, weight in weights.tensors.items()}
    if map is None:
        plan = plan_by_looks(of_source, tensors, (weights.framework, target.framework))
    else:
        plan = plan_by_mapping(of_source, tensors, map if isinstance(map, Mapping) else read_mapping(Path(map)))
    for assignment in plan.assignments:
        if why := target.why_not(assignment.target.name):
            raise StateError(f"Nothing was loaded: {assignment.target.name} of the model cannot be written: {why}.")
    values = {one.target.name: _values(one, weights) for one in plan.assignments}
    _check_tied(values, target.state())
    _write(values, target)
    return LoadedWeights.of(type(model).__name__, weights.name, plan.assignments, plan.kept, plan.unused)


def _values(assignment: Assignment, weights: Weights) -> Array:
    """What is written into a tensor, laid out as the model has it."""
    values = weights.tensors[assignment.source.name].read().reshape(assignment.source.shape)
    layout = assignment.layout
    if layout is None:
        return values
    return layout.undo(values, assignment.target.shape) if assignment.is_from_model else layout.apply(values)


def _check_tied(values: Dictionary[str, Array], state: Dictionary[str, Any]) -> None:
    """Raises StateError where one tensor of the model would get two values."""
    first: dict[int, str] = {}
    for name in values:
        other = first.setdefault(id(state[name]), name)
        is_float = values[name].dtype.kind in "fc"
        if other != name and not np.array_equal(values[other], values[name], equal_nan=is_float):
            raise StateError(
                f"Nothing was loaded: {other} and {name} are one tensor of the model, and differ in the source."
            )


def _write(values: Dictionary[str, Array], target: Model) -> None:
    for name, array in values.items():
        target.write(name, array)
