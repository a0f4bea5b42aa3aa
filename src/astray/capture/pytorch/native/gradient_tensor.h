// What native/call_gradients.h needs to know of the gradients of torch.

#pragma once

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/utils/disable_torch_function.h>

#include "recording.h"
#include "tensor_observer.h"

namespace astray {

using Gradient = at::Tensor;
using NotOfProgram = TorchFunctionOff;

inline bool is_defined(const Gradient &gradient) { return gradient.defined(); }

// Whether a tensor can be added without running code of the program or communicating with another process.
inline bool is_plain(const at::Tensor &tensor) {
    using c10::DispatchKey;
    const auto keys = tensor.unsafeGetTensorImpl()->key_set();
    return tensor.layout() == at::kStrided && !keys.has(DispatchKey::Python) &&
           !keys.has(DispatchKey::FuncTorchBatched) && !keys.has(DispatchKey::FuncTorchGradWrapper);
}

// The sum of two gradients, with every mode off; undefined when it would take communication.
inline at::Tensor add_up(const at::Tensor &one, const at::Tensor &other) {
    if (is_plain(one) && is_plain(other)) {
        const ReleasedGil no_gil;
        const torch::autograd::AutoGradMode without_gradients(false);
        const torch::DisableTorchDispatch without_modes;
        return one.add(other);
    }
    const TorchFunctionOff torch_function_off;
    const Ref first = Ref::made(THPVariable_Wrap(one)), second = Ref::made(THPVariable_Wrap(other));
    const Ref sum = call(callbacks->add_up, first.get(), second.get());
    return sum.get() == Py_None ? Gradient() : THPVariable_Unpack(sum.get());
}

}  // namespace astray
