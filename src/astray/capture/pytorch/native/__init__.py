"""What every call, tensor and gradient of a recording goes through, as C++: build.py compiles it on first use.

module.cpp           what Python sees of it: the module `astray.capture.pytorch._torch`
python.h             calls into Python, and Python types around C++ objects
compilers.h          whether torch.compile has to do with a hook
recording.h          how our work is kept apart from the program
sites.h              where calls happen, and calls that have started
stacks.h             Python stacks, each known again
calls.h              numbers calls, and writes their rows
structure.h          tensors among arguments and results
objects.h            tensors in the attributes of an object
functions.h          the calls of functions and ops, and the modes that are told of them
modules.h            the calls of modules, and the hooks on them
origins.h            in which call the backward pass is
edges.h              where inputs and outputs of a call hang in the autograd graph, and the way between them
call_gradients.h     the gradients of one call, as they come
taps.h               the hooks on autograd nodes
live_gradients.h     puts them in place; every call whose graph is still there
parameter_hooks.h    the hooks on parameters
tensors.h            plain tensors: what they are, what is measured of them, which value each is
taker.h              that, as Python sees it
ending.h             does something when an object goes, and loses no exception
"""
