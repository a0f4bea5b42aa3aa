"""`generate()` of transformers, recorded: every forward is a micro step, and a fault is found in the word it spoils."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import astray
from astray.store import RunData
from integration.programs import STEPS
from integration.programs.generation import WORDS_MORE
from integration.programs.language_models import sentences, small_llama
from recorded_rows import rows

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATING = ["greedy_generation", "sampled_generation", "generation_with_a_static_cache"]


@pytest.mark.parametrize("name", GENERATING)
def test_each_word_is_a_micro_step(name: str, recorded: Callable[..., RunData]) -> None:
    run = recorded(name)
    calls = rows(run, site="<root>", phase="forward", role="output", path="out.logits")
    assert [(row["step"], row["micro"], row["call"]) for row in calls] == [
        (step, micro, 0) for step in range(STEPS) for micro in range(WORDS_MORE)
    ]


@pytest.mark.parametrize("name", GENERATING)
def test_the_cache_lets_it_see_the_sentence_once_and_then_word_for_word(
    name: str, recorded: Callable[..., RunData]
) -> None:
    inputs = rows(recorded(name), site="<root>", phase="forward", role="input", path="kwargs.input_ids", step=1)
    assert [row["shape"] for row in inputs] == [(2, 4)] + [(2, 1)] * (WORDS_MORE - 1)


@pytest.mark.parametrize("name", GENERATING)
def test_there_is_no_backward_and_nothing_is_missed(name: str, recorded: Callable[..., RunData]) -> None:
    run = recorded(name)
    assert {row["phase"] for row in rows(run)} == {"forward"}
    assert run.ranks[0].end is not None
    assert run.ranks[0].end.missed == []


@pytest.mark.parametrize("name", GENERATING)
def test_the_keys_and_values_of_each_layer_are_told_once_for_each_word(
    name: str, recorded: Callable[..., RunData]
) -> None:
    cached = [row for row in rows(recorded(name), step=1) if ".layers." in row["path"]]
    told = Counter((row["micro"], row["path"].partition(".layers.")[2]) for row in cached if row["role"] == "input")
    told += Counter((row["micro"], row["path"].partition(".layers.")[2]) for row in cached if row["role"] == "output")
    names = [f"{layer}.{what}" for layer in range(2) for what in ("keys", "values")]
    for micro in range(WORDS_MORE):
        for one in names:  # when a forward begins, and when it was written; a new cache has nothing to begin with
            assert 1 <= told[micro, one] <= 2


def test_an_encoder_runs_once_and_its_decoder_for_every_word(recorded: Callable[..., RunData]) -> None:
    run = recorded("generation_by_an_encoder_and_a_decoder")
    encoded = rows(run, site="encoder", role="output", path="out.last_hidden_state")
    assert [(row["step"], row["micro"]) for row in encoded] == [(step, 0) for step in range(STEPS)]
    for step in range(STEPS):
        decoded = rows(run, site="decoder", role="output", path="out.last_hidden_state", step=step)
        assert [row["micro"] for row in decoded] == list(range(1, len(decoded) + 1))
        assert 0 < len(decoded) <= WORDS_MORE


def test_words_generated_between_two_steps_are_micro_steps_of_their_step(recorded: Callable[..., RunData]) -> None:
    run = recorded("training_and_generating_in_turns")
    calls = rows(run, site="<root>", phase="forward", role="output", path="out.logits", step=2)
    assert [(row["micro"], row["requires_grad"]) for row in calls] == [(0, True), (1, False), (2, False), (3, False)]
    assert {row["micro"] for row in rows(run, phase="backward", step=2)} == {0}


def generate(path: Path, fault: Callable[[torch.nn.Module, int], None], **settings: Any) -> None:
    """Generates three times; `fault` may do something to the model before each."""
    torch.manual_seed(0)
    model = small_llama().eval()
    with astray.record(path, model, **settings) as recorder:
        for step in range(3):
            fault(model, step)
            ids = sentences(length=4)
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
            recorder.step()


@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_a_wrong_weight_is_named_in_the_first_forward_that_uses_it(keep: str, tmp_path: Path) -> None:
    def spoil(model: torch.nn.Module, step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.get_submodule("model.layers.1.mlp.up_proj").weight[3] *= 1.01

    generate(tmp_path / "good", lambda model, step: None, keep=keep)
    generate(tmp_path / "bad", spoil, keep=keep)
    first = astray.compare(tmp_path / "good", tmp_path / "bad").first
    assert first is not None
    assert (first.step, first.micro, first.site, first.cause) == (2, 0, "model.layers.1.mlp.up_proj", "parameter")


def test_a_cache_that_was_written_to_is_found_in_the_word_after_which_it_was(tmp_path: Path) -> None:
    """A value in the cache is changed behind the first attention: the next layer is the first to be given it."""

    def fault(model: torch.nn.Module, step: int) -> None:
        if step == 1:
            attention = model.get_submodule("model.layers.0.self_attn")

            def spoil(_module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
                kwargs["past_key_values"].layers[0].values[0, 0, 0] += 1.0
                handle.remove()

            handle = attention.register_forward_hook(spoil, with_kwargs=True)

    generate(tmp_path / "good", lambda model, step: None)
    generate(tmp_path / "bad", fault)
    first = astray.compare(tmp_path / "good", tmp_path / "bad").first
    assert first is not None
    assert (first.step, first.micro, first.site) == (1, 0, "model")
    wrong = first.judged
    assert f"{wrong.site} {wrong.tensor}" == "model.layers.1 input `kwargs.past_key_values.layers.0.values`"
