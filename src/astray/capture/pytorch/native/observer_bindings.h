// The Python binding of `TensorObserver`: see _torch.pyi, and `TorchReader.native_observer` for its arguments.

#pragma once

#include "observer.h"
#include "tensor_observer.h"

namespace astray {
namespace bindings {

inline TensorObserver &of(PyObject *self) { return Object<TensorObserver>::in(self); }

inline void expect(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are expected.", given, expected);
    throw PythonError();
}

inline const c10::Storage &storage_of(PyObject *owner) {
    if (!THPStorage_Check(owner)) raise(PyExc_TypeError, "The owner of a memory is a storage.");
    return THPStorage_Unpack(owner);
}

// True when the tensor holds NaN or infinities, else None.
inline Ref answer(bool bad) { return Ref::shared(bad ? Py_True : Py_None); }

inline PyObject *py_observe(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return to_python([&] {
        expect(count, 4);
        return answer(of(self).observe(Row{integer(args[0]), role_of(args[1]), args[2]}, args[3]));
    });
}

inline PyObject *py_observe_unread(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return to_python([&] {
        expect(count, 4);
        return answer(of(self).observe_unread(Row{integer(args[0]), role_of(args[1]), args[2]}, args[3]));
    });
}

inline PyObject *py_changed(PyObject *self, PyObject *tensor) {
    return to_python([&] {
        of(self).changed(tensor);
        return answer(false);
    });
}

inline PyObject *py_written(PyObject *self, PyObject *tensor) {
    return to_python([&] {
        of(self).written(tensor);
        return answer(false);
    });
}

inline PyObject *py_forget(PyObject *self, PyObject *owner) {
    return to_python([&] {
        of(self).memories.forget(storage_of(owner));
        return answer(false);
    });
}

inline PyObject *py_value_number(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *owner;
        long long version;
        if (!PyArg_ParseTuple(args, "OL", &owner, &version)) throw PythonError();
        Memories &memories = of(self).memories;
        return Ref::made(PyLong_FromLongLong(memories.value(memories.of(storage_of(owner)), version)));
    });
}

inline PyObject *py_written_ahead(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *owner;
        long long version;
        if (!PyArg_ParseTuple(args, "OL", &owner, &version)) throw PythonError();
        of(self).memories.written_ahead(storage_of(owner), version);
        return answer(false);
    });
}

inline PyObject *py_clear(PyObject *self, PyObject *) {
    return to_python([&] {
        TensorObserver &observer = of(self);
        observer.long_lived.expire();
        observer.shared_with_python = false;
        observer.memories.expire();
        return answer(false);
    });
}

inline PyObject *py_renumber(PyObject *self, PyObject *unused) {
    of(self).memories.clear();
    return py_clear(self, unused);
}

inline PyObject *py_next_step(PyObject *self, PyObject *unused) {
    of(self).long_lived.is_due = true;
    return py_renumber(self, unused);
}

inline PyObject *py_take_row_count(PyObject *self, PyObject *) {
    return PyLong_FromLongLong(std::exchange(of(self).rows, 0)); }

inline PyObject *py_apply(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *roles;
        int on, statistics, values, ops;
        if (!PyArg_ParseTuple(args, "pOppp", &on, &roles, &statistics, &values, &ops)) throw PythonError();
        if (!PyFrozenSet_Check(roles)) raise(PyExc_TypeError, "The roles are a frozenset.");
        TensorObserver &observer = of(self);
        observer.roles = 0;
        for (size_t i = 0; i < kRoleNames.size(); ++i)
            if (check(PySet_Contains(roles, role_names()[i]))) observer.roles |= bit_of(static_cast<Role>(i));
        observer.on = on, observer.statistics = statistics, observer.values = values, observer.ops = ops;
        observer.memories.expire();
        return answer(false);
    });
}

inline PyObject *py_report_nonfinite(PyObject *self, PyObject *on) {
    return to_python([&] {
        of(self).reports_nonfinite = is_true(Ref::shared(on));
        return answer(false);
    });
}

inline PyObject *get_launches(PyObject *self, void *) { return PyBool_FromLong(of(self).launching != nullptr); }

inline int init(PyObject *self, PyObject *args, PyObject *) {
    return to_status([&] {
        PyObject *examples, *measuring, *given[16];
        Py_ssize_t batch;
        if (!PyArg_ParseTuple(args, "O!OO!O!OOOOO!OOnOOOOO:TensorObserver", &PyList_Type, &examples, &given[0],
                              &PyDict_Type,
                              &given[1], &PyDict_Type, &given[2], &given[3], &given[4], &measuring, &given[5],
                              &PyDict_Type, &given[6], &given[7], &given[8], &batch, &given[9], &given[10], &given[11],
                              &given[12], &given[13]))
            throw PythonError();
        TensorObserver &observer = of(self);
        Ref *members[] = {&observer.parameter_type, &observer.devices,      &observer.cuda_measurers,      &observer.stream,
                          &observer.measure_together, &observer.make_identity,     &observer.unfilled,
                              &observer.writer,
                          &observer.row_buffer, &observer.slow_observe, &observer.slow_observe_unread,
                          &observer.slow_written,   &observer.slow_changed, &observer.slow_measure};
        for (size_t i = 0; i < std::size(members); ++i) *members[i] = Ref::shared(given[i]);
        observer.batch = batch;
        observer.appending = find_appending();
        if (observer.appending && !observer.appending->are_tensors(observer.row_buffer)) observer.appending = nullptr;
        observer.launching = find_launching();
        if (measuring != Py_None) {
            observer.measuring = static_cast<const Measuring *>(PyCapsule_GetPointer(measuring, MEASURING));
            if (!observer.measuring) throw PythonError();
        }
        for (Py_ssize_t i = 0; i < PyList_Size(examples); ++i) {
            PyObject *tensor, *name;
            if (!PyArg_ParseTuple(PyList_GetItem(examples, i), "OU", &tensor, &name)) throw PythonError();
            if (!THPVariable_CheckExact(tensor)) raise(PyExc_TypeError, "The examples are not all plain tensors.");
            if (!i) observer.tensor_type = Ref::shared(reinterpret_cast<PyObject *>(Py_TYPE(tensor)));
            Dtype &type = observer.types[static_cast<size_t>(THPVariable_Unpack(tensor).scalar_type())];
            type.name = Ref::shared(name);
            type.text = text_of(type.name);
            if (observer.measuring) type.number = observer.measuring->dtype(type.text.data);
        }
    });
}

}  // namespace bindings

inline NativeObserver *as_native(PyObject *observer);

// Makes the type, and adds it to the module.
inline void add_tensor_observer(PyObject *module) {
    using namespace bindings;
    static PyMethodDef methods[] = {
        {"observe", fast(py_observe), METH_FASTCALL, nullptr},
        {"observe_unread", fast(py_observe_unread), METH_FASTCALL, nullptr},
        {"changed", py_changed, METH_O, nullptr},
        {"written", py_written, METH_O, nullptr},
        {"forget", py_forget, METH_O, nullptr},
        {"value_number", py_value_number, METH_VARARGS, nullptr},
        {"written_ahead", py_written_ahead, METH_VARARGS, nullptr},
        {"clear", py_clear, METH_NOARGS, nullptr},
        {"renumber", py_renumber, METH_NOARGS, nullptr},
        {"next_step", py_next_step, METH_NOARGS, nullptr},
        {"take_row_count", py_take_row_count, METH_NOARGS, nullptr},
        {"apply", py_apply, METH_VARARGS, nullptr},
        {"report_nonfinite", py_report_nonfinite, METH_O, nullptr},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyGetSetDef attributes[] = {
        {"launches", get_launches, nullptr, "Whether kernels of a card are launched from here.", nullptr},
        {nullptr, nullptr, nullptr, nullptr, nullptr},
    };
    Object<TensorObserver>::add_to(module, ASTRAY_MODULE ".TensorObserver",
                          {slot(Py_tp_init, init), slot(Py_tp_methods, methods), slot(Py_tp_getset, attributes)});
    find_native_observer = as_native;
}

// The observer's native code, if it is a `TensorObserver`.
inline NativeObserver *as_native(PyObject *observer) {
    return Object<TensorObserver>::is(observer) ? &Object<TensorObserver>::in(observer) : nullptr;
}

// Records a tensor of C++, of which a Python object is made only where it has to be.
inline bool observe_value(const ObserverHandle &tensors, const Row &row, const at::Tensor &tensor) {
    if (NativeObserver *native = tensors.native()) return static_cast<TensorObserver *>(native)->observe(row, tensor);
    return tensors.observe(row, Ref::made(THPVariable_Wrap(tensor)));
}

}  // namespace astray
