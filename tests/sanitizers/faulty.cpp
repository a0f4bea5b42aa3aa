// What a sanitizer has to find: `test_faults.py` runs each of these in a process of its own.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits>
#include <vector>

namespace {

PyObject *read_behind_the_end(PyObject *, PyObject *) {
    const std::vector<long> few(3);
    volatile size_t count = 4;
    long sum = 0;
    for (size_t i = 0; i < count; ++i) sum += few.data()[i];
    return PyLong_FromLong(sum);
}

PyObject *overflow(PyObject *, PyObject *) {
    volatile int most = std::numeric_limits<int>::max();
    return PyLong_FromLong(most + 1);
}

PyMethodDef methods[] = {
    {"read_behind_the_end", read_behind_the_end, METH_NOARGS, nullptr},
    {"overflow", overflow, METH_NOARGS, nullptr},
    {},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "faulty", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_faulty() { return PyModule_Create(&definition); }
