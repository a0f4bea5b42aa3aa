// Calls into Python, the interpreter's lock, and Python types around C++ objects.

#pragma once

#include "../../../store/native/ref.h"

#include <functional>
#include <vector>

namespace astray {

template <class... Given>
Ref call(PyObject *function, Given... given) {
    PyObject *all[] = {nullptr, given...};  // the callee may use the first place for itself
    const size_t count = sizeof...(given) | PY_VECTORCALL_ARGUMENTS_OFFSET;
    return Ref::made(PyObject_Vectorcall(function, all + 1, count, nullptr));
}

template <class... Given>
Ref call_method(PyObject *object, PyObject *name, Given... given) {
    PyObject *all[] = {object, given...};
    return Ref::made(PyObject_VectorcallMethod(name, all, sizeof...(given) + 1, nullptr));
}

// Holds the interpreter, for a thread of torch's that may not have it.
class WithPython {
public:
    WithPython() : state_(PyGILState_Ensure()) {}
    ~WithPython() { PyGILState_Release(state_); }
    WithPython(const WithPython &) = delete;

private:
    PyGILState_STATE state_;
};

// Lets other threads have the interpreter meanwhile.
class WithoutPython {
public:
    WithoutPython() : state_(PyEval_SaveThread()) {}
    ~WithoutPython() { PyEval_RestoreThread(state_); }
    WithoutPython(const WithoutPython &) = delete;

private:
    PyThreadState *state_;
};

// A Python object around a C++ one. The garbage collector does not look into it, so it must not be part of a circle
// that nobody else takes apart.
template <class Value>
struct Box {
    PyObject_HEAD
    Value value;

    static inline PyTypeObject *type = nullptr;

    template <class... Given>
    static Ref make(Given &&...given) {
        Ref box = Ref::made(type->tp_alloc(type, 0));
        try {
            new (&reinterpret_cast<Box *>(box.get())->value) Value(std::forward<Given>(given)...);
        } catch (...) {  // there is nothing in it that its `dealloc` could destroy
            type->tp_free(box.release());
            Ref::made(reinterpret_cast<PyObject *>(type));  // the reference that the object had
            throw;
        }
        return box;
    }

    static Value &in(PyObject *object) { return reinterpret_cast<Box *>(object)->value; }

    static void dealloc(PyObject *self) {
        const Ref held = Ref::made(reinterpret_cast<PyObject *>(Py_TYPE(self)));  // the reference that it had
        in(self).~Value();
        Py_TYPE(self)->tp_free(self);
    }

    // Makes the type, and adds it to the module under the last part of its name.
    static void add_to(PyObject *module, const char *name, std::initializer_list<PyType_Slot> slots) {
        std::vector<PyType_Slot> all(slots);
        all.push_back({Py_tp_dealloc, reinterpret_cast<void *>(dealloc)});
        all.push_back({0, nullptr});
        PyType_Spec spec = {name, static_cast<int>(sizeof(Box)), 0, Py_TPFLAGS_DEFAULT, all.data()};
        type = reinterpret_cast<PyTypeObject *>(Ref::made(PyType_FromSpec(&spec)).release());  // for good
        if (PyModule_AddType(module, type) < 0) throw PythonError();
    }
};

template <class Function>
PyType_Slot slot(int number, Function function) {
    return {number, reinterpret_cast<void *>(function)};
}

// A Python function that does `work` and must not be called once that has gone.
inline Ref function_of(std::function<void()> &work) {
    static PyMethodDef method = {
        "work",
        [](PyObject *self, PyObject *) {
            return to_python([&] {
                (*static_cast<std::function<void()> *>(PyCapsule_GetPointer(self, nullptr)))();
                return none();
            });
        },
        METH_NOARGS, nullptr};
    const Ref place = Ref::made(PyCapsule_New(&work, nullptr, nullptr));
    return Ref::made(PyCFunction_New(&method, place));
}

}  // namespace astray
