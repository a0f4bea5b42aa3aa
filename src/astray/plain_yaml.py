"""YAML that is read safely, and bounded: by references (`*name`) a few lines may stand for more than memory holds."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

MOST = 100_000
"""Values in a file of settings or names, each counted as often as it is referred to."""


@functools.cache
def bounded_loader() -> type[yaml.SafeLoader]:
    """A safe loader that does not follow `<<` without end."""
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MOST:
                raise ValueError(_TOO_MANY)

    return Loader


_TOO_MANY = f"by its references it stands for more than {MOST:,} values"


def check_bounded(content: Any) -> None:
    """Raises ValueError where what was read has more values than any such file, counting what is referred to."""
    todo, seen = [content], 0
    while todo:
        one = todo.pop()
        inside = [*one, *one.values()] if isinstance(one, dict) else list(one) if isinstance(one, list) else []
        seen += len(inside)
        if seen > MOST:
            raise ValueError(_TOO_MANY)
        todo += inside
