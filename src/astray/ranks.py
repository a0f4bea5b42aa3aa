"""Which process of a distributed program this is."""

from __future__ import annotations

from collections.abc import Mapping


def rank_and_world_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """As the launcher says in the environment; 0 of 1 for any other program."""
    try:
        rank, world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    except ValueError:
        return 0, 1
    return (rank, world_size) if 0 <= rank < world_size else (0, 1)
