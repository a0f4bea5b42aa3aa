// What other native parts ask of the rows that wait to be written.

#ifndef ASTRAY_COLUMNS_H
#define ASTRAY_COLUMNS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define COLUMNS "astray.store.native._columns"
#define APPENDING COLUMNS ".appending"  // the name of the capsule that holds an `Appending`

typedef struct Appending {
    int (*are_rows)(PyObject *object);  // whether they are `Rows` of this module
    // Appends a row to `Rows`, given as its items: 1, 0 when that would make it `most` rows, −1 with an error set.
    int (*append)(PyObject *rows, PyObject *const *cells, Py_ssize_t count, Py_ssize_t most);
} Appending;

// How to append to a lane of the writer's; NULL, without an error, when its method has to be called.
static inline const Appending *find_appending(PyObject *lane) {
    PyObject *module = PyImport_ImportModule(COLUMNS);  // a capsule's module has to be there before it is asked for
    const Appending *found = module ? (const Appending *)PyCapsule_Import(APPENDING, 0) : NULL;
    Py_XDECREF(module);
    PyErr_Clear();  // not built
    return found && found->are_rows(lane) ? found : NULL;
}

#endif
