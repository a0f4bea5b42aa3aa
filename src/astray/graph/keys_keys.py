"""Keys as integers, under the name by which this package knows them."""

from __future__ import annotations

from astray.graph.keys import find, mixed_key, number_repeats, one_key, repeats

__all__ = ["find", "mixed_key", "number_repeats", "one_key", "repeats"]
