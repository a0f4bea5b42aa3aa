"""Changes what the attention of one layer computes, whichever implementation it uses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from faults.grid.training import Training


class Attending(NamedTuple):
    """What an attention works on. Queries, keys and values are of batch × heads × length × width of a head."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None  # added to the scores
    scale: float


Change = Callable[[Attending], Attending]


def change_attention(training: Training, site: str, change: Change) -> None:
    """Let the attention at a site work on something else."""
    if training.declared.plain_torch:
        training.override(site, "attend", lambda original, *given: original(*change(Attending(*given))))
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACES

    def with_change(attend: Callable[..., Any]) -> Callable[..., Any]:
        def changed(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **named: Any) -> Any:
            given = change(Attending(query, key, value, mask, named.pop("scaling")))
            groups = given.query.shape[1] // given.key.shape[1]
            like = SimpleNamespace(num_key_value_groups=groups, training=module.training, is_causal=module.is_causal)
            return attend(like, *given[:4], scaling=given.scale, **named)

        return changed

    def forward(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        get = INTERFACES.get_interface
        INTERFACES.get_interface = lambda *asked: with_change(get(*asked))
        try:
            return original(*arguments, **named)
        finally:
            del INTERFACES.get_interface

    training.override(site, "forward", forward)


def later_key_visible(given: Attending) -> Attending:
    """The causal mask is off by one: each query sees the key after it."""
    length = given.query.shape[-2]
    hidden = torch.full((length, length), -torch.inf, device=given.query.device, dtype=given.query.dtype)
    return given._replace(mask=hidden.triu(2))


def heads_repeated(given: Attending) -> Attending:
    """Keys and values are repeated as a whole (0 1 0 1) and not one by one (0 0 1 1)."""
    groups = given.query.shape[1] // given.key.shape[1]
    return given._replace(key=given.key.repeat(1, groups, 1, 1), value=given.value.repeat(1, groups, 1, 1))
