"""The backward pass → gradients.

gradients.py      of a call: what arrives at its outputs, and its own share of what its inputs get
watching.py       the same in plain Python, which also says how; _gradients.c is the native part
parameters.py     of parameters, as they accumulate
origins.py        from an autograd node back to the module call that made it
roots.py          starts a backward pass so that a function mode stays on
"""
