"""A checkpoint on disk, tensor by tensor: safetensors, Hugging Face folders, torch and Paddle, distributed checkpoints.

    with astray.checkpoints.open("model.safetensors") as weights:
        weights.spec("h.0.mlp.weight")       shape and dtype; nothing is loaded
        weights["h.0.mlp.weight"]            a torch.Tensor, loaded now
        weights.measure("h.0.mlp.weight")    statistics and fingerprint, a few megabytes at a time

Formats are recognised by their content. A framework is needed for `[name]` only, and no pickle is ever executed.

checkpoint.py          `Checkpoint`, and the statistics of its tensors
opening.py             recognises the format; Hugging Face folders
safetensors_files.py   safetensors
torch_files.py         files of `torch.save`
paddle_files.py        files of `paddle.save`
distributed.py         folders of torch.distributed.checkpoint
pickles.py             the content of a pickle, read as data
pickled_entries.py     its entries by dotted names
torch_objects.py       the tensors of torch in it
numpy_objects.py       the arrays of numpy in it, which Paddle's tensors are there
stored_tensor.py       where a tensor is in its files, and how it is read; `CheckpointContents`, and the open `Files`
"""

from __future__ import annotations

from astray.checkpoints.checkpoint import Checkpoint
from astray.checkpoints.opening import ENDINGS, recognises
from astray.checkpoints.opening import open_checkpoint as open
from astray.checkpoints.stored_tensor import TensorSpec

__all__ = ["ENDINGS", "Checkpoint", "TensorSpec", "open", "recognises"]
