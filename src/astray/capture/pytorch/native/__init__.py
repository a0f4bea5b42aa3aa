"""What every call, tensor and gradient of a recording goes through, as C++: build.py compiles it on first use.

module.cpp           the module `astray.capture.pytorch._torch`
python.h             calls into Python, and Python types around C++ objects
compilers.h          whether torch.compile is active where a hook is called
recording.h          keeps our work apart from the program
sites.h              sites of calls, and calls that have started
stacks.h             Python stacks, each with an id
calls.h              numbers calls, and writes their rows
structure.h          tensors among arguments and results
objects.h            tensors in the attributes of an object
functions.h          the calls of functions and ops, and the modes that see them
modules.h            the calls of modules, and the hooks on them
origins.h            the module call that the backward pass is in
edges.h              positions of inputs and outputs in the autograd graph, and the walk between them
call_gradients.h     the gradients of one call
node_hooks.h         the hooks on autograd nodes
live_gradients.h     adds them; every call whose graph still exists
parameter_hooks.h    the hooks on parameters
memories.h           what was measured of each memory, and which value it holds
tensor_observer.h    plain tensors: identifies, measures and records them
observer_bindings.h  the same for Python
finalizer.h          calls a function when an object is destroyed, and loses no exception
"""
