"""Finds the tensors among arguments and results of Paddle."""

from __future__ import annotations

from collections.abc import Callable

import paddle

from astray.capture.paddle.native.core import _paddle
from astray.capture.paddle.tensors import DTYPE, PLAIN, is_tensor
from astray.capture.structure import Flattener, ObjectFlattener

Tensors = list[tuple[str, paddle.Tensor]]


def flattener(objects: ObjectFlattener | None = None, too_large: Callable[[str], None] = lambda _: None) -> Flattener:
    return Flattener(_paddle, is_tensor, objects, too_large, PLAIN, (DTYPE, paddle.CPUPlace))
