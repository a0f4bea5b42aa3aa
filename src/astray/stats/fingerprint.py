"""The fingerprint of a tensor: its definition, and how fingerprints of shards add up.

Lay the elements out in row-major order as little-endian bytes, pad with zeros to a multiple of 4, and read 32-bit
words. The fingerprint is Σ word_w × mix(w) modulo 2⁶⁴, where mix hashes the word's index to 32 bits.

What follows from that:

- `mix` is a bijection of the low 32 bits of the index, and 0 only at 2³² − 1. Below 16 GiB every word therefore has
  its own factor: one changed word always changes the fingerprint, and so does swapping any two words that differ.
- A narrow element adds (bits << 8·(byte & 3)) × mix(byte >> 2) on its own, with no carry into its neighbours. So the
  fingerprints of shards, each computed with the indices of the whole tensor, add up to that of the whole, wherever
  the cuts run.
- Only the logical order counts: memory layout, strides and devices do not.

It is a sum, not a cryptographic hash: two changes can be arranged to cancel. By accident they hardly will: the factors
are nearly as free of simple ratios and repeated differences as random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1

# Odd, so that multiplying by one is a bijection of the 32-bit numbers. 2³² / golden ratio keeps neighbours apart; the
# other two are known from the xxHash and lowbias32 families of hashes to spread bits well.
STEP = 0x9E3779B1
STEP_HIGH = 0x85EBCA6B
SPREAD = 0x7FEB352D
FLIP = (
    0x61C8864F  # −STEP: an xor breaks up the ratios of a plain product, and this one puts the only 0 at index 2³² − 1
)


def merge_fingerprints(parts: Iterable[int]) -> int:
    """The fingerprint of a whole tensor from those of its shards, in any order.

    >>> hex(merge_fingerprints([0xFFFFFFFFFFFFFFFF, 2]))
    '0x1'
    """
    return sum(parts) & MASK


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash word indices to their factors, 32 bits each."""
    low = words.astype(np.uint32)
    high = (words >> np.uint64(32)).astype(np.uint32)
    x = (low * np.uint32(STEP) + high * np.uint32(STEP_HIGH)) ^ np.uint32(FLIP)
    x ^= x >> np.uint32(16)
    x *= np.uint32(SPREAD)
    x ^= x >> np.uint32(15)
    return x.astype(np.uint64)
