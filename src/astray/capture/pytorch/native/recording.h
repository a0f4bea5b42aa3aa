// Keeps our native code apart from the program: without torch functions and modes, and not compiled.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>

#include "compilers.h"
#include "python.h"

namespace astray {

struct Names {
    Ref added = interned("added"), grad = interned("grad"), missed = interned("missed"), remove = interned("remove");
};
inline Names *names;

// Functions in Python, set once by `set_callbacks`.
struct PythonCallbacks {
    Ref add_up;       // adds two gradients of which one is not a plain tensor
    Ref run_uncompiled;        // runs a function while a compiler is active, unless it is tracing
    Ref put_on_leaf;  // puts a hook on a leaf, which is not freed with a graph
};
inline PythonCallbacks *callbacks;

// Whether a backward pass runs on this thread.
inline bool in_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

// For its lifetime neither function modes nor `__torch_function__` of tensor classes are called: our work is not part
// of the program.
class TorchFunctionOff {
    using Functions = at::impl::PythonTorchFunctionTLS;

public:
    TorchFunctionOff() : before_(Functions::get_disabled_state()) {
        Functions::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    }
    ~TorchFunctionOff() { Functions::set_disabled_state(before_); }
    TorchFunctionOff(const TorchFunctionOff &) = delete;

private:
    at::impl::TorchFunctionDisabledState before_;
};

// Runs the work of a hook, on any thread of the backward pass.
template <class Work>
void run_hook(Work work) {
    const HeldGil gil;
    try {
        if (compilers->are_idle()) {
            work();
        } else {
            std::function<void()> action(work);
            call(callbacks->run_uncompiled, function_of(action).get());
        }
    } catch (const PythonError &) {
        python_error error;  // torch's own type: it is raised where the program has started the backward pass
        error.persist();
        throw error;
    }
}

}  // namespace astray
