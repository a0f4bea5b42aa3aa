"""What is Paddle's own beside capture/native/, as C++: tensors and gradients. build.py compiles both on first use.

module.cpp            the module `astray.capture.paddle._paddle`
paddle_tensors.h      Paddle's tensors, and their Python objects
memory_owner.h        what owns the memory of a tensor
seen_tensors.h        tensors that were seen before
tensor_observer.h     tensors in memory of this process: identifies, measures and records them
observer_arguments.h  what a `TensorObserver` is made with
graph.h               the autograd graph, and which of its nodes were made when
edges.h               positions of inputs and outputs in the graph, and the walk between them
gradient_tensor.h     what native/call_gradients.h needs to know of gradients
node_hooks.h          the hooks on autograd nodes
live_gradients.h      adds them; every call whose graph still exists
parameter_hooks.h     the hook on a parameter
"""
