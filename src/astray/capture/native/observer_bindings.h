// The Python binding of a `TensorObserver`: its methods, as `NativeObserver` in capture/adapters.py has them. The
// framework's `init` reads its arguments.

#pragma once

#include "tensor_observer.h"  // of the framework

namespace astray {
namespace bindings {

inline TensorObserver &of(PyObject *self) { return Object<TensorObserver>::in(self); }

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
        of(self).memories.forget(memory_owner_of(owner));
        return answer(false);
    });
}

inline PyObject *py_value_number(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *owner;
        long long version;
        if (!PyArg_ParseTuple(args, "OL", &owner, &version)) throw PythonError();
        Memories &memories = of(self).memories;
        return Ref::made(PyLong_FromLongLong(memories.value(memories.of(memory_owner_of(owner)), version)));
    });
}

inline PyObject *py_written_ahead(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *owner;
        long long version;
        if (!PyArg_ParseTuple(args, "OL", &owner, &version)) throw PythonError();
        of(self).memories.written_ahead(memory_owner_of(owner), version);
        return answer(false);
    });
}

inline PyObject *py_clear(PyObject *self, PyObject *) {
    return to_python([&] {
        TensorObserver &observer = of(self);
        observer.expire();
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
    of(self).next_step();
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

}  // namespace bindings

inline NativeObserver *as_native(PyObject *observer);

// Makes the type, and adds it to the module. `init` and `attributes` are the framework's.
inline void add_tensor_observer(PyObject *module, initproc init, PyGetSetDef *attributes) {
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
    Object<TensorObserver>::add_to(module, ASTRAY_MODULE ".TensorObserver",
                          {slot(Py_tp_init, init), slot(Py_tp_methods, methods), slot(Py_tp_getset, attributes)});
    find_native_observer = as_native;
}

// The observer's native code, if it is a `TensorObserver`.
inline NativeObserver *as_native(PyObject *observer) {
    return Object<TensorObserver>::is(observer) ? &Object<TensorObserver>::in(observer) : nullptr;
}

}  // namespace astray
