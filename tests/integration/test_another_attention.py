"""One model with two implementations of attention: other calls, other shapes, other roundings, and nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import astray

transformers = pytest.importorskip("transformers")


def record(path: Path, attention: str, level: str, *, scaled: bool = False) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=64, vocab_size=200, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if scaled:
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight.mul_(1.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with astray.record(path, model, level=level) as rec:
        for step in range(3):
            tokens = torch.randint(0, 200, (4, 32), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.step()
    return path


@pytest.mark.parametrize("level", ["module", "function", "op"])
def test_another_attention_is_not_a_divergence_and_a_scaled_weight_behind_it_is(level: str, tmp_path: Path) -> None:
    eager, fused, wrong = (
        record(tmp_path / "eager", "eager", level),
        record(tmp_path / "fused", "sdpa", level),
        record(tmp_path / "wrong", "sdpa", level, scaled=True),
    )
    assert astray.compare(eager, fused).first is None
    first = astray.compare(eager, wrong).first
    assert first is not None
    assert (first.step, first.phase, first.site.partition("/")[0]) == (0, "forward", "transformer.h.1.mlp.c_fc")
