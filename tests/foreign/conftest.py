"""Records built by hand, as the tests of the store have them."""

from store.conftest import call, info, tensor

__all__ = ["call", "info", "tensor"]
