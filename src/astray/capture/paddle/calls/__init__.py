"""The calls of layers, functions and collectives."""
