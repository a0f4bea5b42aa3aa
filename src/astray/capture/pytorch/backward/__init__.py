"""The backward pass → gradients.

gradients.py      of a call: what arrives at its outputs, and its own share of what its inputs get; in C++, in native/
last_nodes.py     of the last node of a function, for files of msprobe
parameters.py     of parameters, as they accumulate
origins.py        from an autograd node back to the module call that made it
roots.py          starts a backward pass so that a function mode stays on
"""
