// Python objects: tensors as arguments, named tuples as results, and the interpreter lock.

#ifndef ASTRAY_STATS_OBJECTS_H
#define ASTRAY_STATS_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

#include "../_measure.h"
#include "elements.h"
#include "layout.h"

namespace {

constexpr int64_t kReleaseBytes = 32 << 10;  // below this, releasing the interpreter lock costs more than the work

PyObject *statistics_type, *measurement_type, *contrast_type;
PyObject *not_a_number;  // Python's own: tuples compare a NaN by identity, since it does not equal itself
newfunc new_tuple;  // tuple.__new__: makes a named tuple without running its Python-level constructor

class NoInterpreterLock {
    PyThreadState *state_;

  public:
    explicit NoInterpreterLock(bool release) : state_(release ? PyEval_SaveThread() : nullptr) {}
    ~NoInterpreterLock() { if (state_) PyEval_RestoreThread(state_); }
    NoInterpreterLock(const NoInterpreterLock &) = delete;
    NoInterpreterLock &operator=(const NoInterpreterLock &) = delete;
};

// Takes the reference to `fields`, which may be null.
PyObject *make_named(PyObject *type, PyObject *fields) {
    if (!fields) return nullptr;
    PyObject *arguments = PyTuple_New(1);
    if (!arguments) { Py_DECREF(fields); return nullptr; }
    PyTuple_SetItem(arguments, 0, fields);
    PyObject *result = new_tuple(reinterpret_cast<PyTypeObject *>(type), arguments, nullptr);
    Py_DECREF(arguments);
    return result;
}

// Fills a tuple field by field; a field that could not be made leaves null.
class Fields {
    PyObject *tuple_;
    Py_ssize_t next_ = 0;
    bool failed_ = false;

  public:
    explicit Fields(Py_ssize_t n) : tuple_(PyTuple_New(n)) {}
    void add(PyObject *field) {
        if (!field || !tuple_ || PyTuple_SetItem(tuple_, next_++, field)) failed_ = true;
    }
    void real(double value) { add(PyFloat_FromDouble(value)); }
    void integer(int64_t value) { add(PyLong_FromLongLong(value)); }
    void none() { Py_INCREF(Py_None); add(Py_None); }
    void real_if(bool known, double value) { known ? real(value) : none(); }
    PyObject *take() {
        if (failed_) { Py_XDECREF(tuple_); return nullptr; }
        return tuple_;
    }
};

bool read_integer(PyObject *number, int64_t &value) {
    value = PyLong_AsLongLong(number);
    return value != -1 || !PyErr_Occurred();
}

// A tuple field of a tuple; new references are avoided throughout.
PyObject *tuple_at(PyObject *tuple, Py_ssize_t i) {
    PyObject *item = PyTuple_GetItem(tuple, i);
    if (item && !PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "Shapes, strides and offsets must be tuples of int.");
        return nullptr;
    }
    return item;
}

bool read_type(PyObject *name, Type &type, bool &complex) {
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
    if (!text) return false;
    for (const TypeName &known : kNames)
        if (std::strcmp(known.name, text) == 0) {
            type = known.type;
            complex = known.complex;
            return true;
        }
    PyErr_Format(PyExc_ValueError, "Unknown dtype %R.", name);
    return false;
}

bool read_shard(PyObject *shard, PyObject *shape, Layout &layout) {
    PyObject *offset = PyTuple_Check(shard) && PyTuple_Size(shard) == 2 ? tuple_at(shard, 0) : nullptr;
    PyObject *whole = offset ? tuple_at(shard, 1) : nullptr;
    if (!whole) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "A shard is a pair of offset and full shape.");
        return false;
    }
    const Py_ssize_t rank = PyTuple_Size(shape);
    bool inside = PyTuple_Size(offset) == rank && PyTuple_Size(whole) == rank;
    int64_t step = 1;
    for (Py_ssize_t i = rank - 1; inside && i >= 0; --i) {
        int64_t first, full;
        if (!read_integer(PyTuple_GetItem(offset, i), first) || !read_integer(PyTuple_GetItem(whole, i), full))
            return false;
        Dim &dim = layout.dim[rank - 1 - i];
        inside = first >= 0 && first + dim.size <= full;
        dim.step = step;
        layout.origin += static_cast<uint64_t>(first * step);
        step *= full;
    }
    if (!inside)
        PyErr_Format(PyExc_ValueError, "A shard of shape %R at %R does not lie within a tensor of shape %R.", shape,
                     offset, whole);
    return inside;
}

// Counts the elements, and numbers them in row-major order.
void finish_layout(Layout &layout) {
    for (int d = 0; d < layout.rank; ++d) {
        layout.dim[d].step = layout.count;
        layout.count *= layout.dim[d].size;
    }
}

// Complex elements as a dimension of two real numbers.
void as_pairs(Layout &layout) {
    for (int d = layout.rank; d; --d) {
        layout.dim[d] = layout.dim[d - 1];
        layout.dim[d].stride *= 2;
        layout.dim[d].step *= 2;
    }
    layout.dim[0] = {2, 1, 1};
    layout.rank += 1;
    layout.count *= 2;
    layout.origin *= 2;
}

// Reads a Strided, as nested loops over real numbers: a complex element is a dimension of two.
bool read_tensor(PyObject *tensor, PyObject *shard, Layout &layout, Type &type, bool &complex) {
    if (!PyTuple_Check(tensor) || PyTuple_Size(tensor) != 4) {
        PyErr_SetString(PyExc_TypeError, "A tensor is given as Strided(address, dtype, shape, stride).");
        return false;
    }
    if (!read_type(PyTuple_GetItem(tensor, 1), type, complex)) return false;
    PyObject *shape = tuple_at(tensor, 2), *stride = shape ? tuple_at(tensor, 3) : nullptr;
    if (!stride) return false;
    const Py_ssize_t rank = PyTuple_Size(shape);
    if (rank != PyTuple_Size(stride) || rank > kMaxRank - 1) {
        PyErr_Format(PyExc_ValueError, "Shape %R and strides %R do not belong together.", shape, stride);
        return false;
    }
    layout.base = static_cast<const char *>(PyLong_AsVoidPtr(PyTuple_GetItem(tensor, 0)));
    if (!layout.base && PyErr_Occurred()) return false;
    layout.size = size_of(type);
    layout.rank = static_cast<int>(rank);
    for (Py_ssize_t i = 0; i < rank; ++i) {
        Dim &dim = layout.dim[rank - 1 - i];
        if (!read_integer(PyTuple_GetItem(shape, i), dim.size) || !read_integer(PyTuple_GetItem(stride, i), dim.stride))
            return false;
        if (dim.size < 0) {
            PyErr_Format(PyExc_ValueError, "Shape %R has a negative size.", shape);
            return false;
        }
    }
    finish_layout(layout);
    if (shard != Py_None && !read_shard(shard, shape, layout)) return false;
    if (complex) as_pairs(layout);
    return true;
}

bool expect(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return true;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are expected.", given, expected);
    return false;
}

// Runs `work` without the interpreter lock when there is enough of it, and turns C++ exceptions into Python's.
template <class Work> bool unlocked(int64_t bytes, const Work &work) {
    try {
        NoInterpreterLock lock(bytes > kReleaseBytes);
        work();
        return true;
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
        return false;
    }
}

bool read_address(PyObject *number, void *&address) {
    address = PyLong_AsVoidPtr(number);
    return address || !PyErr_Occurred();
}

}  // namespace

#endif
