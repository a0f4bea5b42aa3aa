// What native/call_gradients.h needs to know of the gradients of Paddle.

#pragma once

#include <paddle/phi/api/include/api.h>

#include "tensor_observer.h"

namespace astray {

using Gradient = paddle::Tensor;

// Nothing of the program sees what is called natively: only functions in Python are replaced.
struct NotOfProgram {
    NotOfProgram() {}
};

inline bool is_defined(const Gradient &gradient) { return gradient.defined() && gradient.initialized(); }

// The sum of two gradients, in memory of its own; undefined where they are not plain tensors.
inline Gradient add_up(const Gradient &one, const Gradient &other) {
    if (!dense_in(one) || !dense_in(other)) return Gradient();
    const ReleasedGil no_gil;
    return paddle::experimental::add(one, other);
}

}  // namespace astray
