// Tensors that were seen before, in the version they are in: see native/objects.h.

#pragma once

#include <unordered_map>

#include "paddle_tensors.h"

namespace astray {

class SeenTensors {
public:
    static bool is_tensor(PyObject *value) { return astray::is_tensor(value); }

    // Adds a tensor. Returns false if it was seen in this version; always true for what is not a tensor of Paddle.
    bool add(PyObject *value) {
        const auto *dense = is_tensor(value) ? dense_in(tensor_in(value)) : nullptr;
        if (!dense) return true;
        const int64_t version = version_of(*dense);
        Seen &seen = seen_[dense];
        const bool is_another = seen.tensor.expired() || seen.version != version;
        seen = {tensor_in(value).impl(), version};
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
        std::weak_ptr<phi::TensorBase> tensor;  // another at this address is not taken for it
        int64_t version = 0;
    };

    std::unordered_map<const phi::DenseTensor *, Seen> seen_;
};

}  // namespace astray
