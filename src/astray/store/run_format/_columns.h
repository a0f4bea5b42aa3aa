// The interface of rows that wait to be written, for other native parts: to append one of plain values.

#ifndef ASTRAY_COLUMNS_H
#define ASTRAY_COLUMNS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "../../stats/_measure.h"

#define COLUMNS "astray.store.run_format._columns"
#define APPENDING COLUMNS ".appending"  // the name of the capsule that holds an `Appending`

typedef struct Text {
    const char *data;  // UTF-8; NULL for no text
    int64_t size;
} Text;

// A row of `CALLS`. −1 stands for a missing number.
typedef struct CallRow {
    int64_t seq, step;
    int32_t micro, call;
    Text kind, site, type, phase, args;
    int64_t parent, stack;
    int recompute;
} CallRow;

// A row of `TENSORS`, before its values are on the disk. −1 stands for a missing number.
typedef struct TensorRow {
    int64_t seq;
    Text role, path, dtype;
    const int64_t *shape, *stride;
    int64_t dims;
    Text device;
    int requires_grad;
    int64_t ticket;               // of a deferred measurement
    const Measurement *measured;  // NULL when there is no measurement, or none yet
    int has_statistics;           // or only a fingerprint
    PyObject *values;             // `TensorBytes`, or None
    Text placement, note;
    int64_t value;
} TensorRow;

typedef struct Appending {
    int (*are_calls)(PyObject *object);    // whether they are rows of `CALLS`, in this module's columns
    int (*are_tensors)(PyObject *object);  // or of `TENSORS`
    // Append a row: returns their number, 0 where rows are not accepted any more, −1 with an error set.
    Py_ssize_t (*append_call)(PyObject *rows, const CallRow *row);
    Py_ssize_t (*append_tensor)(PyObject *rows, const TensorRow *row);
} Appending;

// The functions that append rows; NULL, without an error, where the extension was not built.
static inline const Appending *find_appending(void) {
    PyObject *module = PyImport_ImportModule(COLUMNS);  // a capsule can only be imported once its module is loaded
    const Appending *appending = module ? (const Appending *)PyCapsule_Import(APPENDING, 0) : NULL;
    Py_XDECREF(module);
    PyErr_Clear();
    return appending;
}

#endif
