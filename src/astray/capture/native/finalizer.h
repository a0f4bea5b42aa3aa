// `Finalizer(callback)`: calls a function when it is destroyed, and loses no exception.
//
// Python discards exceptions raised in a `__del__`. A signal handler of the program may raise in any line of Python,
// also in one that runs because an object is destroyed: then the callback is run again, to the end, and the exception
// is raised in the program at its next instruction.

#pragma once

#include "python.h"

namespace astray {

inline int raise_now(void *given) {
    const Ref error = Ref::made(static_cast<PyObject *>(given));
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.get())), error);
    return -1;
}

// Schedules an exception, which the interpreter raises as soon as it runs Python code again.
inline void raise_later(Ref error) {
    PyObject *given = error.release();
    if (!Py_AddPendingCall(raise_now, given)) return;
    raise_now(given);  // there is no room for more of them
    PyErr_WriteUnraisable(nullptr);
}

class Finalizer {
public:
    explicit Finalizer(PyObject *callback) : callback_(Ref::shared(callback)) {}

    ~Finalizer() {
        SavedError before;
        try {
            call(callback_);
        } catch (const PythonError &) {
            Ref first = SavedError().exception();
            try {
                call(callback_);
            } catch (const PythonError &) {
                PyErr_WriteUnraisable(callback_);
            }
            raise_later(std::move(first));  // last: it is raised in the next line of Python that runs
        }
        before.restore();
    }

    static PyObject *make(PyTypeObject *, PyObject *args, PyObject *) {
        return to_python([&] {
            PyObject *callback;
            if (!PyArg_ParseTuple(args, "O:Finalizer", &callback)) throw PythonError();
            return Box<Finalizer>::make(callback);
        });
    }

private:
    Ref callback_;
};

inline void add_finalizer(PyObject *module) {
    Box<Finalizer>::add_to(module, ASTRAY_MODULE ".Finalizer", {slot(Py_tp_new, Finalizer::make)});
}

}  // namespace astray
