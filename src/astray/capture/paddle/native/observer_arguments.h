// What a `TensorObserver` is made with: see _paddle.pyi, and `PaddleReader.native_observer`. And what Python asks of the
// memory of a tensor.

#pragma once

#include "observer_bindings.h"

#include <cstring>

namespace astray {
namespace bindings {

// The dtypes that can be measured, by the names that rows have.
constexpr std::pair<phi::DataType, const char *> kDtypes[] = {
    {phi::DataType::BOOL, "bool"},
    {phi::DataType::UINT8, "uint8"},
    {phi::DataType::INT8, "int8"},
    {phi::DataType::UINT16, "uint16"},
    {phi::DataType::INT16, "int16"},
    {phi::DataType::UINT32, "uint32"},
    {phi::DataType::INT32, "int32"},
    {phi::DataType::UINT64, "uint64"},
    {phi::DataType::INT64, "int64"},
    {phi::DataType::FLOAT32, "float32"},
    {phi::DataType::FLOAT64, "float64"},
    {phi::DataType::COMPLEX64, "complex64"},
    {phi::DataType::COMPLEX128, "complex128"},
    {phi::DataType::FLOAT16, "float16"},
    {phi::DataType::BFLOAT16, "bfloat16"},
    {phi::DataType::FLOAT8_E4M3FN, "float8_e4m3fn"},
    {phi::DataType::FLOAT8_E5M2, "float8_e5m2"},
};

inline int read_arguments(PyObject *self, PyObject *args, PyObject *) {
    return to_status([&] {
        PyObject *measuring, *shared[9];
        Py_ssize_t batch;
        if (!PyArg_ParseTuple(args, "OOO!OOnOOOOO:TensorObserver", &measuring, &shared[0], &PyDict_Type, &shared[1],
                              &shared[2], &shared[3], &batch, &shared[4], &shared[5], &shared[6], &shared[7],
                              &shared[8]))
            throw PythonError();
        TensorObserver &observer = of(self);
        observer.use({std::begin(shared), std::end(shared)}, batch, measuring);
        for (const auto &[dtype, name] : kDtypes) observer.name_dtype(static_cast<size_t>(dtype), interned(name));
    });
}

// owner(tensor): the handle of its allocation; None when it has none
inline PyObject *py_owner(PyObject *, PyObject *tensor) {
    return to_python([&] {
        const auto *dense = is_tensor(tensor) ? dense_in(tensor_in(tensor)) : nullptr;
        return dense && dense->Holder() ? allocation_handles->of(dense->Holder()) : none();
    });
}

// capacity(tensor): the bytes of its allocation
inline PyObject *py_capacity(PyObject *, PyObject *tensor) {
    return to_python([&] {
        const auto *dense = is_tensor(tensor) ? dense_in(tensor_in(tensor)) : nullptr;
        return to_object(static_cast<int64_t>(dense && dense->Holder() ? dense->Holder()->size() : 0));
    });
}

// address(tensor): of its first element; 0 when it is not in memory of this process
inline PyObject *py_address(PyObject *, PyObject *tensor) {
    return to_python([&] {
        const auto *dense = is_tensor(tensor) ? dense_in(tensor_in(tensor)) : nullptr;
        const bool is_here = dense && dense->initialized() && dense->place().GetType() == phi::AllocationType::CPU;
        return to_object(is_here ? reinterpret_cast<int64_t>(dense->data()) : int64_t{0});
    });
}

// is_zero(tensor): whether every byte of it is zero; False where that cannot be seen from here
inline PyObject *py_is_zero(PyObject *, PyObject *tensor) {
    return to_python([&] {
        const auto *dense = is_tensor(tensor) ? dense_in(tensor_in(tensor)) : nullptr;
        if (!dense || !dense->initialized() || dense->place().GetType() != phi::AllocationType::CPU)
            return to_object(false);
        const auto *bytes = static_cast<const char *>(dense->data());
        const size_t size = static_cast<size_t>(dense->numel()) * phi::SizeOf(dense->dtype());
        if (!dense->meta().is_contiguous()) return to_object(false);
        return to_object(!size || (!bytes[0] && !std::memcmp(bytes, bytes + 1, size - 1)));
    });
}

inline PyGetSetDef observer_attributes[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace bindings

inline void add_paddle_observer(PyObject *module) {
    add_tensor_observer(module, bindings::read_arguments, bindings::observer_attributes);
}

}  // namespace astray
