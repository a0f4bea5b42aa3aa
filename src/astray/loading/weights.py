"""Where weights come from: a run with values, a checkpoint, a mapping of tensors, a model. Feeds `plan` and `load`.

Each weight is known by name, dtype and shape, and read when it is wanted, as a plain array: no framework is needed for
runs and checkpoints, and of a mapping's tensors that of the tensors alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from astray.checkpoints import Checkpoint
from astray.comparison.pair.mapping_draft import framework_of
from astray.comparison.pair.own_tensors import OwnTensor, own_tensors
from astray.errors import StateError
from astray.loading.models import Array, array_of, framework_of_tensor, is_model, model_of
from astray.store import CheckpointData, RunData, open_run
from astray.store.run import to_numpy_dtype


class Weight(NamedTuple):
    """A tensor that can be loaded. `read` gives it in a dtype of numpy: bfloat16 and 8-bit floats are widened."""

    tensor: OwnTensor
    read: Callable[[], Array]


class Weights(NamedTuple):
    """The weights of one source by name. name: what the source is called. framework: None where it is not known."""

    name: str
    framework: str | None
    tensors: dict[str, Weight]


def weights_of(source: Any) -> Weights:
    """The weights of a path, an open run or checkpoint, a mapping of tensors, or a model. Raises StateError."""
    if isinstance(source, str | os.PathLike):
        return _of_run(open_run(source))
    if isinstance(source, RunData):
        return _of_run(source)
    if isinstance(source, Checkpoint):
        return _of_run(CheckpointData(source))
    if is_model(source):
        return _of_model(source)
    if isinstance(source, Mapping):
        return _of_mapping(source)
    raise StateError(
        f"Weights cannot be taken from a {type(source).__name__}. Give the path of a run or a checkpoint, an open one, "
        "a state_dict, or a model."
    )


def _of_model(source: Any) -> Weights:
    model = model_of(source)
    state = model.state()
    weights = {name: Weight(tensor, _value_reader(state, name)) for name, tensor in model.tensors().items()}
    return Weights(f"another {type(source).__name__}", model.framework, weights)


# -- runs --------------------------------------------------------------------------------------------------------------


def _of_run(run: RunData) -> Weights:
    """The weights that the modules of a run were first called with, or those of a checkpoint."""
    found = own_tensors(run)
    if not isinstance(run, CheckpointData):
        _check_kept(run, found)
    weights = {name: Weight(tensor, _reader(run, tensor)) for name, tensor in found.items()}
    return Weights(str(run.path), framework_of(run), weights)


def _check_kept(run: RunData, found: Mapping[str, OwnTensor]) -> None:
    if not found:
        raise StateError(
            f"{run.path} has no weights: no parameter of a module was recorded. Record it with level='module' and "
            "keep='tensors'."
        )
    for tensor in found.values():
        tensors = run.ranks[tensor.rank].tensors
        cells = tensors.row(tensor.row)
        if cells["blob_file"] is None or cells["blob_file"] < 0:
            why = "statistics and no values"
        elif cells["part"] is not None or (cells["sampled"] or -1) >= 0:
            why = "some values only"
        elif cells.get("placement") is not None:
            why = "this rank's part of it only"
        else:
            continue
        raise StateError(
            f"{run.path} kept {why} of {tensor.name}. Record the first step of it with keep='tensors', or load a "
            "checkpoint."
        )


def _reader(run: RunData, tensor: OwnTensor) -> Callable[[], Array]:
    def read() -> Array:
        values = run.ranks[tensor.rank].verified(tensor.row)
        if values is None:
            raise StateError(f"The values of {tensor.name} in {run.path} are not there any more.")
        return to_numpy_dtype(values, tensor.dtype)

    return read


# -- tensors in memory -------------------------------------------------------------------------------------------------


def _of_mapping(source: Mapping[str, Any]) -> Weights:
    """Those of a state_dict, a `StateDict`, or arrays of numpy by name."""
    is_state = type(source).__module__.startswith("astray.")  # whose tensors are torch's, whatever the model is of
    tensors: dict[str, Weight] = {}
    frameworks: set[str | None] = set()
    for name in source:
        spec = source.spec(name) if hasattr(source, "spec") else source[name]
        if isinstance(spec, Mapping):
            raise StateError(f"{name!r} is a mapping itself. Give the one that has the tensors, such as raw[{name!r}].")
        if getattr(spec, "dtype", None) is not None and hasattr(spec, "shape"):
            tensors[name] = Weight(_tensor(name, spec), _value_reader(source, name))
            frameworks.add(None if is_state else framework_of_tensor(spec))
    if not tensors:
        raise StateError("Weights cannot be taken from a mapping without tensors.")
    framework = frameworks.pop() if len(frameworks) == 1 else None
    return Weights(str(getattr(source, "name", "the state")), framework, tensors)


def _tensor(name: str, spec: Any) -> OwnTensor:
    dtype = str(spec.dtype).rpartition(".")[2]
    return OwnTensor(name, "parameter", dtype, tuple(map(int, spec.shape)), name.rpartition(".")[0], "", 0, -1)


def _value_reader(source: Mapping[str, Any], name: str) -> Callable[[], Array]:
    return lambda: array_of(source[name])
