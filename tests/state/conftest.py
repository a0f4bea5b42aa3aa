"""What the tests of states share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")  # of a folder that is not a Python package, "package" means the session
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much on a machine that is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
