// What the native taps share: sites, open calls, the part of the engine that numbers them, stacks and structures.
//
// Each type here has a twin in Python, which serves where this could not be built and says why things are as they are:
// capture/calls.py, stacks.py, structure.py, and for torch calls/taking.py, functions.py, ops.py and modules.py. What
// is out of the ordinary is handed over to them.

#ifndef ASTRAY_CALLS_H
#define ASTRAY_CALLS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../../store/native/_columns.h"

// ---- code objects, and what is known of each -----------------------------------------------------------------------

typedef struct {
    PyObject *code;  // held, so that its address stays its own
    int answer;
} KnownCode;

typedef struct {
    KnownCode *slots;
    size_t size, used;  // size is 0 or a power of two
} CodeTable;

enum { kNo = 0, kYes = 1, kNeither = 2 };

// What `classify` says of a code object, asked once: kYes, kNo, or kNeither for None. -1 with an error set.
int code_lookup(CodeTable *table, PyObject *code, PyObject *classify);
void code_clear(CodeTable *table);
int code_visit(CodeTable *table, visitproc visit, void *arg);

// The frame around one; None when there is none. A new reference, or NULL with an error set.
PyObject *frame_back(PyObject *frame);

// ---- calls ---------------------------------------------------------------------------------------------------------

typedef struct {
    PyObject_HEAD
    PyObject *name, *type, *root, *kind, *module, *judge, *numbers, *inside;
    char wanted, is_module;
} Site;

typedef struct {
    PyObject_HEAD
    PyObject *site, *step, *micro, *phase, *parent, *anchor, *stack, *frame, *seq, *number, *adapter, *inside;
    char recompute, recorded, has_row;
} OpenCall;

typedef struct {
    PyObject_HEAD
    PyObject *writer, *write, *walk, *local, *seq, *step, *micro, *latest_micro, *passing, *numbers, *called;
    PyObject *selection, *scope, *phases, *lane;
    const Appending *appending;  // how rows get into the lane; NULL when the writer has to be asked
    Py_ssize_t batch;
    char recording, listening, is_here, forward_ended, by_module, paused;
} Calls;

extern PyTypeObject *site_type, *open_call_type, *calls_type, *walk_type, *structures_type, *taking_type, *modules_type;

// The open calls of this thread: a new reference.
PyObject *calls_open(Calls *self);
// A call starts; see Calls.enter. `micro` is NULL when the calls around tell it. A new reference.
OpenCall *calls_enter(Calls *self, Site *site, PyObject *frame, PyObject *phase, int recompute, PyObject *micro, int row);
int calls_begin(Calls *self, OpenCall *call, PyObject *args);
int calls_leave(Calls *self, OpenCall *call);
// The same whether or not an error is set. -1 when one is then: the one before, or one that is the program's.
int calls_leave_anyhow(Calls *self, OpenCall *call);
// Whether the settings ask for a site; -1 with an error set.
int calls_want(Calls *self, Site *site);
// The same as `follows_gradients`.
int calls_follow_gradients(Calls *self, const OpenCall *call);
// Tells the engine that something went wrong, takes the error off and goes on. -1 when it is no Exception but, say,
// a KeyboardInterrupt: then it stays set.
int calls_failed(Calls *self, const char *doing, PyObject *of);
int is_update(PyObject *phase);

// ---- stacks and structures -----------------------------------------------------------------------------------------

// The id of a stack, None when `outer` is not on it, NULL with an error set.
PyObject *walk_capture(PyObject *walk, PyObject *frame, PyObject *outer, PyObject *outer_id);

// The tensors of arguments as [(path, tensor), …], and their structure; -1 with an error set. `kwargs` may be NULL.
int structures_arguments(PyObject *self, PyObject *args, PyObject *kwargs, PyObject **found, PyObject **skeleton);
PyObject *structures_result(PyObject *self, PyObject *value);

// Each adds its types to the module; -1 with an error set.
int add_calls(PyObject *module);
int add_walk(PyObject *module);
int add_structures(PyObject *module);
int add_taking(PyObject *module);
int add_modules(PyObject *module);
int add_endings(PyObject *module);

// ---- what torch is asked -------------------------------------------------------------------------------------------

extern PyObject *torch_disable, *torch_task, *torch_grad_enabled, *torch_tracing, *torch_sequence;

// What is done in here is no part of the program: no mode and no subclass of somebody else is told of it.
PyObject *aside_enter(void);
void aside_exit(PyObject *aside);  // keeps an error that is set
// Whether a backward pass runs here, or gradients are on; -1 with an error set.
int is_passing(void);
int is_grad_enabled(void);

// ---- small things --------------------------------------------------------------------------------------------------

extern PyObject *s_forward, *s_backward, *s_update, *s_input, *s_output, *s_parameter;

#define CALL0(object, name) PyObject_CallMethodObjArgs(object, name, NULL)
#define CALL(object, name, ...) PyObject_CallMethodObjArgs(object, name, __VA_ARGS__, NULL)

// Forgets what a call gave: 0, or -1 when it gave an error.
static inline int done(PyObject *result) {
    Py_XDECREF(result);
    return result ? 0 : -1;
}

// Whether an attribute is true; -1 with an error set.
static inline int attribute_is_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) return -1;
    const int is_true = value == Py_True ? 1 : value == Py_False || value == Py_None ? 0 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return is_true;
}

static inline void replace(PyObject **place, PyObject *value) {
    PyObject *old = *place;
    Py_INCREF(value);
    *place = value;
    Py_XDECREF(old);
}

// The same for a value that is handed over.
static inline void put(PyObject **place, PyObject *value) {
    PyObject *old = *place;
    *place = value;
    Py_XDECREF(old);
}

// How an object of one of our types ends: `clear` lets go of what it holds.
static inline void end_object(PyObject *self, int (*clear)(PyObject *)) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#endif
