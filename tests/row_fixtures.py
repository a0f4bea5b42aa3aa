"""Fixtures for rows by hand, for the folders that name them in their conftest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from astray.records import Call, Statistics, Tensor
from astray.store import RunInfo

__all__ = ["call", "info", "make_call", "make_tensor", "tensor"]


def make_call(seq: int = 0, **fields: Any) -> Call:
    plain = Call(seq, seq // 4, 0, "module", f"layers.{seq % 4}", "Linear", 0, "forward")
    return plain._replace(**fields)


def make_tensor(seq: int = 0, **fields: Any) -> Tensor:
    statistics = Statistics(-1.0, 2.0, 0.5, 1.0, 3.0, 2.0, 1, 0, 0, 6)
    plain = Tensor(seq, "output", "0", "float32", (2, 3), (3, 1), "cpu", False, statistics, 2**64 - 1 - seq)
    return plain._replace(**fields)


@pytest.fixture
def call() -> Callable[..., Call]:
    return make_call


@pytest.fixture
def tensor() -> Callable[..., Tensor]:
    return make_tensor


@pytest.fixture
def info() -> RunInfo:
    return RunInfo.of_process(framework="torch", versions={"torch": "2.13"}, seed=7)
