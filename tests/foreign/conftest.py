"""Records built by hand, as the tests of the store have them."""

from row_fixtures import call, info, tensor

__all__ = ["call", "info", "tensor"]
