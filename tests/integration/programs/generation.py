"""`generate()` of transformers: greedy and sampling, with a cache that grows and with one of fixed size."""

from __future__ import annotations

import torch

from integration.programs.language_models import sentences, small_gpt2, small_llama, small_mixtral, small_t5
from integration.programs.program import STEPS, Setup, Steps, program

WORDS_MORE = 4


@program
def greedy_generation() -> Steps:
    model = small_gpt2().eval()
    yield Setup(model)
    for _ in range(STEPS):
        ids = sentences(length=4)
        yield model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=WORDS_MORE, do_sample=False)


@program
def sampled_generation() -> Steps:
    """Draws a random number for each word, so that a number drawn by the recorder would change them all."""
    model = small_llama().eval()
    yield Setup(model)
    for _ in range(STEPS):
        ids = sentences(length=4)
        yield model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=WORDS_MORE, do_sample=True, top_k=20
        )


@program
def generation_with_a_static_cache() -> Steps:
    """The cache is written in place: the same memory, other numbers, at each word."""
    model = small_llama().eval()
    model.generation_config.disable_compile = True  # compiled programs are elsewhere
    yield Setup(model)
    for _ in range(STEPS):
        ids = sentences(length=4)
        yield model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=WORDS_MORE, do_sample=False,
            cache_implementation="static",
        )  # fmt: skip


@program
def generation_by_an_encoder_and_a_decoder() -> Steps:
    model = small_t5().eval()
    yield Setup(model)
    for _ in range(STEPS):
        yield model.generate(sentences(), max_new_tokens=WORDS_MORE, num_beams=2, do_sample=False)


@program
def generation_by_experts() -> Steps:
    model = small_mixtral().eval()
    yield Setup(model)
    for _ in range(STEPS):
        ids = sentences(length=4)
        yield model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)


@program
def training_and_generating_in_turns() -> Steps:
    model = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        ids = sentences()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        words = model.generate(ids[:, :2], attention_mask=torch.ones_like(ids[:, :2]), max_new_tokens=3, do_sample=True)
        model.train()
        yield loss.detach(), words
