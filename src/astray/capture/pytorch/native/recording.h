// How our native code is kept apart from the program: out of sight of its modes, and of compilers.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>

#include "compilers.h"
#include "python.h"

namespace astray {

struct Names {
    Ref added = interned("added"), call_row = interned("call_row"), crowded = interned("crowded"),
        failed = interned("failed"), follows = interned("_follows_recorded"), grad = interned("grad"),
        is_in_scope = interned("_is_in_scope"), lanes = interned("lanes"), left = interned("left"),
        missed = interned("missed"), outermost = interned("_outermost_micro"), remove = interned("remove"),
        wants = interned("wants");
};
inline Names *names;

// What is done in Python: given once by `use`.
struct PythonCallbacks {
    Ref add_up;       // the sum of two gradients of which one is not a plain tensor
    Ref run_uncompiled;        // runs a function where a compiler is about, unless it is tracing
    Ref put_on_leaf;  // puts a hook on a tensor that no graph takes along
};
inline PythonCallbacks *callbacks;

// What is done meanwhile is not part of the program: neither modes nor tensor classes are called for it.
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

// Runs what a hook does, on whatever thread of the backward pass it was called.
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
        python_error error;  // as torch knows it: it is raised where the program has started the backward pass
        error.persist();
        throw error;
    }
}

}  // namespace astray
