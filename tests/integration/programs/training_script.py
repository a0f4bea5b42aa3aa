"""A script around `transformers.Trainer`, as it is found everywhere: it knows nothing of astray.

The tests run it as a script, and take `make_trainer` from it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        self.ids = torch.randint(3, 50, (count, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def make_trainer(output: Path, *, callbacks: Any = None, **changes: Any) -> Trainer:
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.1,
            bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )
    )  # fmt: skip
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        **changes,
    }
    arguments = TrainingArguments(output_dir=str(output), **settings)
    return Trainer(
        model, arguments, train_dataset=Sentences(16, 1), eval_dataset=Sentences(4, 2), callbacks=callbacks or []
    )


if __name__ == "__main__":
    trainer = make_trainer(Path(sys.argv[1]))
    trainer.train()
    print([repr(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
    print([repr(parameter.double().sum().item()) for parameter in trainer.model.parameters()])
