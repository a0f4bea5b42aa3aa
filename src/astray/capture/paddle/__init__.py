"""The Paddle adapter: the only place that imports Paddle and touches its hooks.

adapter.py           what the recorder calls; puts the modules below in place
tensors.py           a Paddle tensor → what the engine needs to measure it
unobserved.py        what is computed here is not part of the program
patches.py           functions that are watched at every level: of clipping, of losses
discovery.py         the models of a program that knows nothing of astray, and scalers that skip a step
gradients.py         the gradients of parameters, also where mixed precision clears them
optimizer_steps.py   what optimizers do to parameters
setup_capture.py     what layers, configurations and optimizers are set to
paddle_flags.py      what Paddle itself is set to
experiments.py       without dropout, and with a seed
_paddle.pyi          what native/ looks like from Python
calls/               forward calls: layers, functions, collectives
native/              tensors and the gradients of calls, in C++, built on first use
"""
