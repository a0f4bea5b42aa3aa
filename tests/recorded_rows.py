"""Rows, outlines and hooks of a recording, for the tests of capture."""

from __future__ import annotations

from typing import Any

from torch import nn

from astray.store import RunData


def rows(run: RunData, **wanted: Any) -> list[dict[str, Any]]:
    """The tensor rows of rank 0 with the columns of their calls, in the order they were observed."""
    rank = run.ranks[0]
    found = []
    for index, call in enumerate(rank.call_rows.tolist()):
        row = {**rank.calls.row(call), **rank.tensors.row(index), "row": index}
        if all(row[name] == value for name, value in wanted.items()):
            found.append(row)
    return found


def different(ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """The differences between two lists of rows, a line each, so that a failure on another machine shows its cause."""
    lines = [] if len(ours) == len(others) else [f"{len(ours)} rows and {len(others)}"]
    for one, other in zip(ours, others, strict=False):
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            what = ", ".join(f"{name} {one.get(name)!r} and {other.get(name)!r}" for name in names)
            lines.append(f"{one['site']} {one['phase']} {one['role']} {one['path']} of step {one['step']}: {what}")
    return lines


def outline(run: RunData, **wanted: Any) -> list[str]:
    """The same in one line each."""
    return [f"{row['site']} {row['phase']} {row['role']} {row['path']}" for row in rows(run, **wanted)]


def hooks_of(model: nn.Module) -> int:
    """The number of hooks on a model and its parameters."""
    on_modules = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )
    return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
