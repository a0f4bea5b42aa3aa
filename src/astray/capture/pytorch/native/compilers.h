// Whether a compiler is active where a hook is called, and what dynamo sees of a hook that is a Python object.
//
// dynamo looks up a hook's `__call__`, and has to find a Python function there that is marked as never compiled. So a
// hook has two: the interpreter calls the native one (`tp_call`), and looking up the name finds a Python function.
// While dynamo is active, the native one calls the Python function, which dynamo skips.

#pragma once

#include "python.h"

namespace astray {

struct Compilers {
    Ref flags;     // the names of torch.compiler; empty when this torch has no such flag
    Ref callback;  // returns dynamo's callback on this thread for functions that start; None when it compiles nothing
    Ref flag = interned("_is_compiling_flag");
    Ref call = interned("__call__");

    // Whether none is active on this thread, neither tracing nor waiting for functions to compile.
    bool are_idle() const {
        if (!flags || PyDict_GetItem(flags, flag) != Py_False) return false;
        return astray::call(callback).get() == Py_None;
    }
};

inline Compilers *compilers;  // made with the module, for as long as the program runs

// The calls of a hook with one argument: `run`, or its Python function while a compiler is active.
template <class Hook, Ref (*run)(Hook &, PyObject *)>
struct TensorHook {
    static PyObject *call(PyObject *self, PyObject *args, PyObject *kwargs) {
        return to_python([&] {
            const Ref alive = Ref::shared(self);  // what it does may take it off
            if (kwargs || PyTuple_Size(args) != 1 || !compilers->are_idle())
                return Ref::made(PyObject_Call(attribute(self, compilers->call), args, kwargs));
            return run(Box<Hook>::in(self), PyTuple_GetItem(args, 0));
        });
    }
    static PyObject *py_run(PyObject *self, PyObject *given) {
        return to_python([&] {
            const Ref alive = Ref::shared(self);
            return run(Box<Hook>::in(self), given);
        });
    }
    static inline PyMethodDef method = {"run", py_run, METH_O, nullptr};
};

// set_python_call(type, function): makes looking up `__call__` find `function`, without changing `tp_call`. If this
// version of Python changes `tp_call` as well, the attribute is set in the ordinary way.
inline PyObject *set_python_call(PyObject *, PyObject *args) {
    return to_python([&] {
        PyObject *object, *function;
        if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &object, &function)) throw PythonError();
        auto *type = reinterpret_cast<PyTypeObject *>(object);
        const auto native = type->tp_call;
        if (PyObject_GenericSetAttr(object, compilers->call, function) < 0) PyErr_Clear();
        PyType_Modified(type);
        const bool shown = attribute(object, compilers->call).get() == function && type->tp_call == native;
        if (!shown && PyObject_SetAttr(object, compilers->call, function) < 0) throw PythonError();
        return none();
    });
}

}  // namespace astray
