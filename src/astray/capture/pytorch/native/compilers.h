// Whether a compiler is at work where a hook is called, and what dynamo finds of a hook that is a Python object.
//
// dynamo looks for what a hook does in its `__call__`, and has to find Python there, which says that compiled code has
// no part in it. So a hook has two: the one that the interpreter calls is native, and the one that is found by its name
// is a Python function. While dynamo is about, the native one hands over to that, which dynamo knows to leave alone.

#pragma once

#include "python.h"

namespace astray {

struct Compilers {
    Ref flags;     // the names of torch.compiler; empty when this torch has no such flag
    Ref callback;  // says what dynamo does on this thread with functions that start: None for nothing
    Ref flag = interned("_is_compiling_flag");
    Ref call = interned("__call__");

    // Whether none is at work here, neither tracing nor waiting for functions to compile.
    bool are_idle() const {
        if (!flags || PyDict_GetItem(flags, flag) != Py_False) return false;
        return astray::call(callback).get() == Py_None;
    }
};

inline Compilers *compilers;  // made with the module, for as long as the program runs

// What torch calls of a hook with one argument: `run`, or the function in Python where a compiler has to do with it.
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

// set_python_call(type, function): has `function` found by the name `__call__`. Setting it as an attribute would have
// the interpreter call it too; that is what is done should this Python do so in any case.
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
