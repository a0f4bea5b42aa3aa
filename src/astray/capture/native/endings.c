// `Ending(callback)`: calls something when it goes, and loses no exception on the way.
//
// Python drops what is raised in a `__del__`. A signal handler of the program may raise in any line of Python, so also in
// one that runs because an object goes: then the callback is run again, to the end, and the exception is raised in the
// program at its next instruction.

#include "calls.h"

typedef struct {
    PyObject_HEAD
    PyObject *callback;
} Ending;

static int raise_now(void *error) {
    PyErr_SetObject((PyObject *)Py_TYPE((PyObject *)error), error);
    Py_DECREF((PyObject *)error);
    return -1;
}

// Has an exception raised by the interpreter, as soon as it runs Python again.
static void raise_later(PyObject *error) {
    if (!Py_AddPendingCall(raise_now, error)) return;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);  // there is no room for more of them
    PyErr_WriteUnraisable(NULL);
    Py_DECREF(error);
}

// The exception that is set, which is not set any more then.
static PyObject *taken_error(void) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}

static void ending_dealloc(PyObject *object) {
    PyObject *callback = ((Ending *)object)->callback, *type, *error, *trace;
    PyTypeObject *own = Py_TYPE(object);
    PyErr_Fetch(&type, &error, &trace);
    PyObject *done = callback ? PyObject_CallNoArgs(callback) : Py_NewRef(Py_None);
    if (!done) {
        PyObject *first = taken_error();
        done = PyObject_CallNoArgs(callback);
        if (!done) PyErr_WriteUnraisable(callback);
        raise_later(first);  // last: it is raised in the next line of Python that runs
    }
    Py_XDECREF(done);
    Py_XDECREF(callback);
    PyErr_Restore(type, error, trace);
    ((freefunc)PyType_GetSlot(own, Py_tp_free))(object);
    Py_DECREF(own);
}

static PyObject *ending_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *callback;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O:Ending", &callback)) return NULL;
    Ending *self = (Ending *)PyType_GenericAlloc(type, 0);
    if (self) self->callback = Py_NewRef(callback);
    return (PyObject *)self;
}

static PyType_Slot kSlots[] = {
    {Py_tp_new, (void *)ending_new},
    {Py_tp_dealloc, (void *)ending_dealloc},
    {0, NULL},
};

static PyType_Spec kSpec = {"astray.capture._calls.Ending", sizeof(Ending), 0, Py_TPFLAGS_DEFAULT, kSlots};

int add_endings(PyObject *module) {
    PyObject *type = PyType_FromSpec(&kSpec);
    const int done = type ? PyModule_AddObjectRef(module, "Ending", type) : -1;
    Py_XDECREF(type);
    return done;
}
