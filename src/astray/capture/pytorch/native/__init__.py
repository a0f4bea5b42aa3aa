"""The part of astray that speaks with torch's C++, as sources: build.py compiles them on first use.

module.cpp           what Python sees of it: the module `astray.capture.pytorch._torch`
python.h             Python objects as C++ values
compilers.h          whether torch.compile has to do with a hook
recording.h          how gradients reach the engine
edges.h              where inputs and outputs of a call hang in the autograd graph, and the way between them
call_gradients.h     the gradients of one call, as they come
taps.h               the hooks on autograd nodes
live_gradients.h     puts them in place; every call whose graph is still there
parameter_hooks.h    the hooks on parameters
tensors.h            plain tensors: what they are, what is measured of them, which value each is
taker.h              that, as Python sees it
"""
