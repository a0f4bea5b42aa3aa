"""Models of transformers with random weights, in training: decoders, an encoder-decoder, vision, experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from integration.programs.program import STEPS, Setup, Steps, program

WORDS = 50
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    **TOKENS,
}


def sentences(batch: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch, length))


def small_gpt2(**changes: Any) -> GPT2LMHeadModel:
    """Its embedding and its head are one tensor, and it has dropout."""
    config = GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=2, **TOKENS, **changes)
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


def small_llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **changes))


def small_t5(**changes: Any) -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, **changes,
        )
    )  # fmt: skip


def small_mixtral(**changes: Any) -> MixtralForCausalLM:
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **changes)
    return MixtralForCausalLM(config)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Steps:
    """The plain loop, on sentences to be continued."""
    yield Setup(model, optimizer)
    for _ in range(steps):
        ids = sentences()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@program
def gpt2() -> Steps:
    model = small_gpt2()
    yield from trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


@program
def gpt2_with_written_out_attention() -> Steps:
    model = small_gpt2(attn_implementation="eager")
    yield from trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


@program
def llama() -> Steps:
    model = small_llama()
    yield from trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@program
def t5() -> Steps:
    model = small_t5()
    yield from trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))


@program
def mixture_of_experts() -> Steps:
    model = small_mixtral()
    yield from trained(model, torch.optim.Adam(model.parameters(), lr=1e-3))


@program
def mixture_of_experts_called_one_by_one() -> Steps:
    """Which experts run, and how often, is up to the router."""
    model = small_mixtral(experts_implementation="eager")
    yield from trained(model, torch.optim.Adam(model.parameters(), lr=1e-3))


@program
def vision() -> Steps:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=3, hidden_dropout_prob=0.1,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        loss = model(pixel_values=torch.randn(2, 3, 8, 8), labels=torch.tensor([0, 2])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@program
def gradient_accumulation() -> Steps:
    """Three forwards and backwards for each step of the optimizer, and the gradient clipped at the end."""
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for _ in range(3):
            ids = sentences()
            loss = model(input_ids=ids, labels=ids).loss / 3
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        yield losses, norm
