"""What is computed here is not part of the program: functions called in the block are not recorded."""

from __future__ import annotations

import threading
from types import TracebackType

_local = threading.local()


def is_unobserved() -> bool:
    """Whether this thread is in such a block."""
    return getattr(_local, "depth", 0) > 0


class Unobserved:
    """A block of ours. Gradients are not followed in it either: it makes no nodes."""

    __slots__ = ("_no_grad",)

    def __enter__(self) -> None:
        import paddle

        _local.depth = getattr(_local, "depth", 0) + 1
        self._no_grad = paddle.no_grad()
        self._no_grad.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._no_grad.__exit__(kind, error, trace)
        _local.depth -= 1
