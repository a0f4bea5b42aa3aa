// Python objects as C++ values: owned references, and errors as exceptions.
//
// No other file of our native code counts references. An error of Python's is thrown as a `PythonError` while it stays
// set on the thread; `to_python` ends the throwing where the interpreter has called us. Only what the stable ABI has.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <new>
#include <utility>

namespace astray {

struct PythonError {};

class Ref {
public:
    Ref() = default;
    Ref(const Ref &other) : object_(other.object_) { Py_XINCREF(object_); }
    Ref(Ref &&other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref &operator=(Ref other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }

    // Owns what a function has just made; nullptr means that it has set an error.
    static Ref made(PyObject *object) {
        if (!object) throw PythonError();
        return Ref(object);
    }
    // The same where nullptr stands for nothing.
    static Ref owned(PyObject *object) { return Ref(object); }
    // Shares an object that something else owns.
    static Ref shared(PyObject *object) {
        Py_XINCREF(object);
        return Ref(object);
    }

    PyObject *get() const { return object_; }
    operator PyObject *() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }
    PyObject *release() { return std::exchange(object_, nullptr); }

private:
    explicit Ref(PyObject *object) : object_(object) {}
    PyObject *object_ = nullptr;
};

inline Ref none() { return Ref::shared(Py_None); }
inline Ref interned(const char *text) { return Ref::made(PyUnicode_InternFromString(text)); }
inline Ref attribute(PyObject *object, PyObject *name) { return Ref::made(PyObject_GetAttr(object, name)); }

// The result of a function that sets an error and returns a negative number.
inline int check(int done) {
    if (done < 0) throw PythonError();
    return done;
}

[[noreturn]] inline void raise(PyObject *type, const char *sentence) {
    PyErr_SetString(type, sentence);
    throw PythonError();
}

template <class... Given>
[[noreturn]] void raise(PyObject *type, const char *format, Given... given) {
    PyErr_Format(type, format, given...);
    throw PythonError();
}

inline bool is_true(PyObject *value) { return check(PyObject_IsTrue(value)); }

// A number; throws Python's error for an object that is none, or does not fit.
inline int64_t integer(PyObject *value) {
    const long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) throw PythonError();
    return number;
}

// Sets the Python error that a C++ exception stands for. To be called in a `catch (...)`.
inline void set_error() {
    try {
        throw;
    } catch (const PythonError &) {  // it is set
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "an unknown C++ exception");
    }
}

// What the interpreter gets from `work`: a reference, or nullptr with an error set.
template <class Work>
PyObject *to_python(Work work) noexcept {
    try {
        return work().release();
    } catch (...) {
        set_error();
        return nullptr;
    }
}

}  // namespace astray
