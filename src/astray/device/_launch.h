// The interface of the launcher for other native parts.

#ifndef ASTRAY_LAUNCH_H
#define ASTRAY_LAUNCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pythread.h>

#include <stdint.h>

enum { kMaxArguments = 48 };

// The slots of the open segment; see `PythonSlots`. Everything but the lock is accessed only while the lock is held.
typedef struct Slots {
    PyObject_HEAD
    PyThread_type_lock lock;
    long long number, count, used;      // of the segment; of its measurements; of their partial rows
    long long most, partials;           // how many measurements and partial rows there may be
    unsigned long long rows_at, table_at;  // addresses on the device
    unsigned long long stream;          // one that may launch, if any
    char has_stream;
} Slots;

#define LAUNCHER "astray.device._launch"
#define LAUNCHING LAUNCHER ".launching"  // the name of the capsule that holds a `Launching`

typedef struct Launching {
    int (*are_slots)(PyObject *object);
    // The number of words that a kernel of this module takes; −1 when it is none.
    int (*words)(PyObject *kernel);
    // Launches; `words` is written to. Releases the GIL. 0, −1 while the stream is being captured, or the driver's error.
    int (*launch)(PyObject *kernel, uint64_t programs, uint64_t stream, uint64_t words[kMaxArguments]);
} Launching;

// The functions that launch; NULL, without an error, when the extension was not built.
static inline const Launching *find_launching(void) {
    PyObject *module = PyImport_ImportModule(LAUNCHER);  // a capsule can only be imported once its module is loaded
    const Launching *found = module ? (const Launching *)PyCapsule_Import(LAUNCHING, 0) : NULL;
    Py_XDECREF(module);
    PyErr_Clear();
    return found;
}

#endif
