"""Healthy programs that no threshold was set beside: models of transformers with random weights, a step of each.

They were recorded when every number of `judging` was in place, and none has been changed for them since.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import astray
from astray.results.run import Run

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def gpt2() -> nn.Module:
    """Dropout is on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **SMALL))


def mixtral() -> nn.Module:
    """Experts, and the router's loss."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=128, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, **SMALL
    )
    return MixtralForCausalLM(config)


def bert() -> nn.Module:
    """Dropout is on; attention is masked."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=128, max_position_embeddings=32, **SMALL))


def t5() -> nn.Module:
    """Two stacks, relative positions, dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=8, **SMALL))


def tokens(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(2, 128, (2, 24))
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def padded(model: nn.Module) -> torch.Tensor:
    ids, mask = torch.randint(2, 128, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[1, 15:] = 0
    loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    return loss


def images(model: nn.Module) -> torch.Tensor:
    pixels = torch.randn(4, 3, 32, 32).to(next(model.parameters()).dtype)
    loss: torch.Tensor = model(pixel_values=pixels, labels=torch.randint(0, 8, (4,))).loss
    return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]] = {
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "mixtral": (mixtral, tokens),
    "bert": (bert, padded),
    "t5": (t5, padded),
    "vit": (vit, images),
}


def record(path: Path, name: str, dtype: torch.dtype, seed: int = 7, fault: Any = None) -> Run:
    """A training step with clipped gradients and AdamW, recorded; with the mode `fault` around it."""
    make, loss = MODELS[name]
    torch.manual_seed(seed)
    model = make().to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with astray.record(path, model, level="function", keep="stats,tensors") as recorder:
        if fault is None:
            loss(model).backward()
        else:
            with fault:
                loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recorder.step()
    return astray.open(path)
