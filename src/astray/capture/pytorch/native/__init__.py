"""What is torch's own beside capture/native/, as C++: tensors, gradients, hooks. build.py compiles both on first use.

module.cpp            the module `astray.capture.pytorch._torch`
compilers.h           whether torch.compile is active where a hook is called
recording.h           keeps our work apart from the program
functions.h           the calls of functions and ops, and the modes that see them
modules.h             the calls of modules, and the hooks on them
origins.h             the module call that the backward pass is in
edges.h               positions of inputs and outputs in the autograd graph, and the walk between them
gradient_tensor.h     what native/call_gradients.h needs to know of gradients
node_gradients.h      the gradients of a call that made one node
node_hooks.h          the hooks on autograd nodes
live_gradients.h      adds them; every call whose graph still exists
parameter_hooks.h     the hooks on parameters
memory_owner.h        what owns the memory of a tensor
long_lived.h          parameters and states on a card, which are measured together
tensor_observer.h     plain tensors: identifies, measures and records them
observer_arguments.h  what a `TensorObserver` is made with
"""
