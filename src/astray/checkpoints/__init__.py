"""A checkpoint on disk, tensor by tensor: safetensors, Hugging Face folders, torch files, distributed checkpoints.

    with astray.checkpoints.open("model.safetensors") as weights:
        weights.spec("h.0.mlp.weight")       shape and dtype; nothing is loaded
        weights["h.0.mlp.weight"]            a torch.Tensor, loaded now
        weights.measure("h.0.mlp.weight")    statistics and fingerprint, a few megabytes at a time

Formats are recognised by looking. No framework is needed but for `[name]`, and no pickle is ever executed: `pickles`
reads what one says as data, and `torch_objects` knows which parts of that are tensors.
"""

from __future__ import annotations

from astray.checkpoints.checkpoint import Checkpoint
from astray.checkpoints.opening import ENDINGS, recognises
from astray.checkpoints.opening import open_checkpoint as open
from astray.checkpoints.stored_tensor import TensorSpec

__all__ = ["ENDINGS", "Checkpoint", "TensorSpec", "open", "recognises"]
