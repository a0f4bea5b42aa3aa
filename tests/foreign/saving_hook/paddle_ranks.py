"""A small Llama trained on several ranks, as the saving hook's documentation shows: run by paddle.distributed.launch.

Trains twice, with DataParallel and with `main_grad`, each into a folder of its own. `expected_R.npz` gets what each
backward of the first step brings alone on rank R. The changed program has another base of its rotary embedding in the
first layer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle

from astray.compat.saving_hook import register_saving_hook
from foreign.saving_hook.paddle_llama import CLASSES, Trainer, build, gradients_of

path, change = Path(sys.argv[1]), sys.argv[2]
paddle.distributed.init_parallel_env()
for kind in ("data_parallel", "main_grad"):
    model = build()
    if change == "changed":
        model.layers[0].self_attn.theta = 1.0
    rank = paddle.distributed.get_rank()
    expected = {
        f"{name}_micro_step_{micro}": gradient
        for micro in range(Trainer.ACCUMULATED)
        for name, gradient in gradients_of(model, micro, rank).items()
    }
    model = register_saving_hook(
        model, path=str(path / kind), target_class_names=CLASSES, max_saved_tensors=100, max_saved_grads=200
    )
    Trainer(model, main_grad=kind == "main_grad").train()
    np.savez(path / kind / f"expected_{rank}.npz", **expected)
