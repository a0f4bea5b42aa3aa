// Tensors that were seen before, in the version they are in: see native/objects.h.

#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>

#include "python.h"

namespace astray {

class SeenTensors {
public:
    static bool is_tensor(PyObject *value) { return THPVariable_Check(value); }

    // Adds a tensor. Returns false if it was seen in this version; always true for what is not a tensor of torch.
    bool add(PyObject *value) {
        if (!is_tensor(value)) return true;
        const at::Tensor &tensor = THPVariable_Unpack(value);
        const int64_t version = tensor.is_inference() ? -1 : static_cast<int64_t>(tensor._version());
        const auto [place, added] = seen_.try_emplace(
            tensor.unsafeGetTensorImpl(), Seen{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                                               version});
        const bool is_another = added || place->second.version != version;
        place->second.version = version;
        return is_another;
    }

    void clear() { seen_.clear(); }
    void drop_dead() {
        if (seen_.size() <= kMany) return;
        for (auto one = seen_.begin(); one != seen_.end();)
            one = one->second.tensor.expired() ? seen_.erase(one) : std::next(one);
    }

private:
    static constexpr size_t kMany = 4096;

    struct Seen {
        c10::weak_intrusive_ptr<c10::TensorImpl> tensor;  // so that the address is not reused
        int64_t version;
    };

    std::unordered_map<c10::TensorImpl *, Seen> seen_;
};

}  // namespace astray
