// Paddle's tensors, and their Python objects.

#pragma once

#include <paddle/phi/api/include/tensor.h>
#include <paddle/phi/core/dense_tensor.h>

#include "python.h"

// Of libpaddle, which exports them; Paddle ships no header that declares them.
namespace paddle::pybind {
bool PyCheckTensor(PyObject *object);
paddle::Tensor &CastPyArg2Tensor(PyObject *object, Py_ssize_t position);
PyObject *ToPyObject(const paddle::Tensor &tensor, bool return_none_if_not_initialized);
}  // namespace paddle::pybind

namespace astray {

inline bool is_tensor(PyObject *value) { return paddle::pybind::PyCheckTensor(value); }
inline paddle::Tensor &tensor_in(PyObject *object) { return paddle::pybind::CastPyArg2Tensor(object, 0); }
inline Ref object_of(const paddle::Tensor &tensor) { return Ref::made(paddle::pybind::ToPyObject(tensor, false)); }

// A tensor whose numbers lie in one memory; nullptr for any other.
inline const phi::DenseTensor *dense_in(const paddle::Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_dense_tensor()) return nullptr;
    return static_cast<const phi::DenseTensor *>(tensor.impl().get());
}

// The writes to its memory that are known of. Views share the counter; optimizers, collectives and sums of gradients do
// not raise it.
inline int64_t version_of(const phi::DenseTensor &tensor) {
    return const_cast<phi::DenseTensor &>(tensor).InplaceVersionCounter().CurrentVersion();
}

}  // namespace astray
