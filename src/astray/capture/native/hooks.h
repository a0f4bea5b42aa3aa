// How torch calls a native hook: at once, unless a compiler has to do with it.
//
// dynamo looks for what a hook does in its `__call__`, and has to find Python there, which says that compiled code has
// no part in it. So a hook has two: the one that the interpreter calls is native, and the one that is found by its name
// is a Python function. While dynamo is about, the native one hands over to that, which dynamo knows to leave alone.

#ifndef ASTRAY_HOOKS_H
#define ASTRAY_HOOKS_H

#include <Python.h>

static PyObject *hook_flags;  // the names of torch.compiler; NULL when this torch has no such flag
static PyObject *hook_callback;  // says what dynamo does on this thread with functions that start: None for nothing
static PyObject *hook_flag, *hook_name;

static int hooks_prepare(void) {
    hook_flag = PyUnicode_InternFromString("_is_compiling_flag");
    hook_name = PyUnicode_InternFromString("__call__");
    return hook_flag && hook_name ? 0 : -1;
}

// Whether no compiler is at work here, neither tracing nor waiting for functions to compile.
static int hook_is_alone(void) {
    if (!hook_flags || PyDict_GetItem(hook_flags, hook_flag) != Py_False) return 0;
    PyObject *callback = PyObject_CallObject(hook_callback, NULL);
    if (!callback) PyErr_Clear();
    Py_XDECREF(callback);
    return callback == Py_None;
}

static PyObject *hook_in_python(PyObject *self, PyObject *args, PyObject *kwargs) {
    PyObject *call = PyObject_GetAttr(self, hook_name);
    PyObject *result = call ? PyObject_Call(call, args, kwargs) : NULL;
    Py_XDECREF(call);
    return result;
}

// beside_compilers(flags, callback): how to ask whether a compiler is at work; until then, one always may be.
static PyObject *beside_compilers(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *flags, *callback;
    if (!PyArg_ParseTuple(args, "O!O", &PyDict_Type, &flags, &callback)) return NULL;
    hook_flags = Py_NewRef(flags);  // for as long as the program runs
    hook_callback = Py_NewRef(callback);
    return Py_NewRef(Py_None);
}

// shown_as(type, function): has `function` found by the name `__call__`. Setting it as an attribute would have the
// interpreter call it too; that is what is done should this Python do so in any case.
static PyObject *shown_as(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *type, *function;
    if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &function)) return NULL;
    void *native = PyType_GetSlot((PyTypeObject *)type, Py_tp_call);
    if (PyObject_GenericSetAttr(type, hook_name, function) < 0) PyErr_Clear();
    PyType_Modified((PyTypeObject *)type);
    PyObject *found = PyObject_GetAttr(type, hook_name);
    if (!found) PyErr_Clear();
    Py_XDECREF(found);
    if (found == function && PyType_GetSlot((PyTypeObject *)type, Py_tp_call) == native) return Py_NewRef(Py_None);
    return PyObject_SetAttr(type, hook_name, function) < 0 ? NULL : Py_NewRef(Py_None);
}

#define HOOK_FUNCTIONS                                                \
    {"beside_compilers", beside_compilers, METH_VARARGS, NULL},       \
        {"shown_as", shown_as, METH_VARARGS, NULL},

#endif
