"""Measures tensors where they lie, on their device, without waiting for it."""
