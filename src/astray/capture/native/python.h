// Calls into Python, the interpreter's lock, and Python types around C++ objects.

#pragma once

#include "../../store/run_format/ref.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <vector>

namespace astray {

template <class... Given>
Ref call(PyObject *function, Given... given) {
    PyObject *all[] = {nullptr, given...};  // the callee may overwrite the first item
    const size_t count = sizeof...(given) | PY_VECTORCALL_ARGUMENTS_OFFSET;
    return Ref::made(PyObject_Vectorcall(function, all + 1, count, nullptr));
}

template <class... Given>
Ref call_method(PyObject *object, PyObject *name, Given... given) {
    PyObject *all[] = {object, given...};
    return Ref::made(PyObject_VectorcallMethod(name, all, sizeof...(given) + 1, nullptr));
}

// Takes the GIL, for a thread of torch that may not hold it.
class HeldGil {
public:
    HeldGil() : state_(PyGILState_Ensure()) {}
    ~HeldGil() { PyGILState_Release(state_); }
    HeldGil(const HeldGil &) = delete;

private:
    PyGILState_STATE state_;
};

// Releases the GIL for its lifetime.
class ReleasedGil {
public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ~ReleasedGil() { PyEval_RestoreThread(state_); }
    ReleasedGil(const ReleasedGil &) = delete;

private:
    PyThreadState *state_;
};

// The Python error that was set, cleared until it is restored or dropped.
class SavedError {
public:
    SavedError() {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        type_ = Ref::owned(type), value_ = Ref::owned(value), trace_ = Ref::owned(trace);
    }
    void restore() { PyErr_Restore(type_.release(), value_.release(), trace_.release()); }

    // The exception itself, with its traceback.
    Ref exception() {
        PyObject *type = type_.release(), *value = value_.release(), *trace = trace_.release();
        PyErr_NormalizeException(&type, &value, &trace);
        type_ = Ref::owned(type), value_ = Ref::owned(value), trace_ = Ref::owned(trace);
        if (trace_) PyException_SetTraceback(value_, trace_);
        return value_;
    }

private:
    Ref type_, value_, trace_;
};

// ---- Python types around C++ objects -------------------------------------------------------------------------------

template <class Function>
PyType_Slot slot(int number, Function function) {
    return {number, reinterpret_cast<void *>(function)};
}

inline void expect(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are expected.", given, expected);
    throw PythonError();
}

inline PyCFunction fast(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline PyCFunction with_names(PyObject *(*function)(PyObject *, PyObject *, PyObject *)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline PyTypeObject *add_type(PyObject *module, const char *name, size_t size, unsigned flags,
                              std::vector<PyType_Slot> slots) {
    slots.push_back({0, nullptr});
    PyType_Spec spec = {name, static_cast<int>(size), 0, static_cast<unsigned>(Py_TPFLAGS_DEFAULT) | flags,
                        slots.data()};
    // Kept for as long as the program runs.
    auto *type = reinterpret_cast<PyTypeObject *>(Ref::made(PyType_FromSpec(&spec)).release());
    check(PyModule_AddType(module, type));
    return type;
}

// A Python object around a C++ one. The garbage collector does not traverse it, so it must not be part of a cycle that
// nothing else breaks.
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
        } catch (...) {  // it holds no value that `dealloc` could destroy
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
    static void add_to(PyObject *module, const char *name, std::vector<PyType_Slot> slots) {
        slots.push_back(slot(Py_tp_dealloc, dealloc));
        type = add_type(module, name, sizeof(Box), 0, std::move(slots));
    }
};

// A Python object that the garbage collector traverses, and that Python classes may inherit from. `Value` is
// default-constructible, and its `each` calls a function with every reference that may be part of a cycle.
template <class Value>
struct Object {
    PyObject_HEAD
    Value value;

    static inline PyTypeObject *type = nullptr;

    static Value &in(PyObject *object) { return reinterpret_cast<Object *>(object)->value; }
    static Value &checked(PyObject *object) {
        if (!is(object)) raise(PyExc_TypeError, "%R is not of type %s.", object, type->tp_name);
        return in(object);
    }
    static bool is(PyObject *object) { return PyObject_TypeCheck(object, type); }
    static PyObject *around(Value &value) {
        return reinterpret_cast<PyObject *>(reinterpret_cast<char *>(&value) - offsetof(Object, value));
    }

    static Ref make() { return Ref::made(create(type, nullptr, nullptr)); }

    static PyObject *create(PyTypeObject *kind, PyObject *, PyObject *) {
        PyObject *self = kind->tp_alloc(kind, 0);
        if (self) new (&in(self)) Value();
        return self;
    }

    static int traverse(PyObject *self, visitproc visit, void *arg) {
        Py_VISIT(Py_TYPE(self));
        int stopped = 0;
        in(self).each([&](Ref &one) {
            if (!stopped && one) stopped = visit(one, arg);
        });
        return stopped;
    }
    static int clear(PyObject *self) {
        in(self).each([](Ref &one) { const Ref gone = std::move(one); });
        return 0;
    }
    static void dealloc(PyObject *self) {
        PyTypeObject *kind = Py_TYPE(self);
        PyObject_GC_UnTrack(self);
        in(self).~Value();
        kind->tp_free(self);
        Ref::made(reinterpret_cast<PyObject *>(kind));  // the reference that it had
    }

    static void add_to(PyObject *module, const char *name, std::vector<PyType_Slot> slots) {
        for (const PyType_Slot &own : {slot(Py_tp_new, create), slot(Py_tp_traverse, traverse),
                                       slot(Py_tp_clear, clear),
                                       slot(Py_tp_dealloc, dealloc)})
            slots.push_back(own);
        type = add_type(module, name, sizeof(Object), Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, std::move(slots));
    }
};

// ---- their attributes ----------------------------------------------------------------------------------------------

inline Ref to_object(const Ref &value) { return value ? value : none(); }
inline Ref to_object(bool value) { return Ref::shared(value ? Py_True : Py_False); }
inline Ref to_object(int64_t value) { return Ref::made(PyLong_FromLongLong(value)); }
inline Ref to_object(const std::optional<int64_t> &value) { return value ? to_object(*value) : none(); }

inline void read_object(PyObject *given, Ref &value) { value = given == Py_None ? Ref() : Ref::shared(given); }
inline void read_object(PyObject *given, bool &value) { value = is_true(given); }
inline void read_object(PyObject *given, int64_t &value) { value = integer(given); }
inline void read_object(PyObject *given, std::optional<int64_t> &value) {
    if (given == Py_None) value.reset();
    else value = integer(given);
}

template <class Work>
int to_status(Work work) noexcept {
    try {
        work();
        return 0;
    } catch (...) {
        set_error();
        return -1;
    }
}

// A Python attribute for a member of the value in an `Object`.
template <class Value, auto member>
PyGetSetDef member_of(const char *name) {
    const getter get = [](PyObject *self, void *) {
        return to_python([&] { return to_object(Object<Value>::in(self).*member); });
    };
    const setter set = [](PyObject *self, PyObject *given, void *) {
        return to_status([&] {
            if (!given) raise(PyExc_AttributeError, "It cannot be deleted.");
            read_object(given, Object<Value>::in(self).*member);
        });
    };
    return {name, get, set, nullptr, nullptr};
}

// A Python function that runs `work`, which must outlive it.
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
