"""A reference with inputs that are changed by roundings, to learn how far right results get apart.

inputs.py      which tensors of a running program are inputs, and the hooks that change them
ulps.py        one tensor → the same with some elements one rounding up or down
"""
