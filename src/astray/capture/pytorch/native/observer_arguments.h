// What a `TensorObserver` is made with: see _torch.pyi, and `TorchReader.native_observer`.

#pragma once

#include "observer_bindings.h"

namespace astray {
namespace bindings {

inline int read_arguments(PyObject *self, PyObject *args, PyObject *) {
    return to_status([&] {
        PyObject *examples, *measuring, *own[5], *shared[9];
        Py_ssize_t batch;
        if (!PyArg_ParseTuple(args, "O!OO!O!OOOOO!OOnOOOOO:TensorObserver", &PyList_Type, &examples, &own[0],
                              &PyDict_Type, &own[1], &PyDict_Type, &own[2], &own[3], &own[4], &measuring, &shared[0],
                              &PyDict_Type, &shared[1], &shared[2], &shared[3], &batch, &shared[4], &shared[5],
                              &shared[6], &shared[7], &shared[8]))
            throw PythonError();
        TensorObserver &observer = of(self);
        Ref *members[] = {&observer.parameter_type, &observer.devices, &observer.cuda_measurers, &observer.stream,
                          &observer.measure_together};
        for (size_t i = 0; i < std::size(members); ++i) *members[i] = Ref::shared(own[i]);
        observer.use({std::begin(shared), std::end(shared)}, batch, measuring);
        observer.launching = find_launching();
        for (Py_ssize_t i = 0; i < PyList_Size(examples); ++i) {
            PyObject *tensor, *name;
            if (!PyArg_ParseTuple(PyList_GetItem(examples, i), "OU", &tensor, &name)) throw PythonError();
            if (!THPVariable_CheckExact(tensor)) raise(PyExc_TypeError, "The examples are not all plain tensors.");
            if (!i) observer.tensor_type = Ref::shared(reinterpret_cast<PyObject *>(Py_TYPE(tensor)));
            observer.name_dtype(static_cast<size_t>(THPVariable_Unpack(tensor).scalar_type()), name);
        }
    });
}

inline PyObject *get_launches(PyObject *self, void *) { return PyBool_FromLong(of(self).launching != nullptr); }

inline PyGetSetDef observer_attributes[] = {
    {"launches", get_launches, nullptr, "Whether kernels of a card are launched from here.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace bindings

inline void add_torch_observer(PyObject *module) {
    add_tensor_observer(module, bindings::read_arguments, bindings::observer_attributes);
}

}  // namespace astray
