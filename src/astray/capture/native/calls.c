// Numbers the calls of a running program and writes their rows: what `Calls` does in capture/calls.py, with its sites
// and open calls.
//
// The GIL is held throughout and given up only where Python code is called, so no lock is needed to number a call.

#include "calls.h"

PyTypeObject *site_type, *open_call_type, *calls_type;
static PyTypeObject *numbers_type;

PyObject *s_forward, *s_backward, *s_update, *s_input, *s_output, *s_parameter;
static PyObject *s_module, *s_optimizer, *s_open_calls, *s_call_row, *s_lanes, *s_wants, *s_admit, *s_follows, *s_outermost;
static PyObject *s_left, *s_failed, *kNotWritten, *kZero;

// ---- sites ---------------------------------------------------------------------------------------------------------

enum { kForward, kBackward, kUpdate, kPhases };

// What is being counted: for each phase, and apart for what is done again, the step, the micro step and the next number.
typedef struct {
    PyObject_HEAD
    long long step[2 * kPhases], micro[2 * kPhases], next[2 * kPhases];
} Numbers;

static void numbers_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot kNumbersSlots[] = {{Py_tp_dealloc, (void *)numbers_dealloc}, {0, NULL}};

static PyType_Spec kNumbersSpec = {
    "astray.capture._calls.Numbers", sizeof(Numbers), 0, Py_TPFLAGS_DEFAULT, kNumbersSlots,
};

static int is_text(PyObject *value, PyObject *text) {
    return value == text || (PyUnicode_Check(value) && PyUnicode_Compare(value, text) == 0);
}

int is_update(PyObject *phase) { return is_text(phase, s_update); }

static int site_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"name", "type", "root", "kind", "module", NULL};
    Site *self = (Site *)object;
    PyObject *name, *type, *root, *kind = s_module, *module = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UUU|UO:Site", names, &name, &type, &root, &kind, &module)) return -1;
    replace(&self->name, name);
    replace(&self->type, type);
    replace(&self->root, root);
    replace(&self->kind, kind);
    replace(&self->module, module == Py_None ? name : module);
    replace(&self->judge, Py_None);
    replace(&self->numbers, Py_None);
    PyObject *inside = PyDict_New();
    if (!inside) return -1;
    put(&self->inside, inside);
    self->wanted = 1;
    self->is_module = (char)is_text(kind, s_module);
    return 0;
}

#define SITE_OBJECTS(X) X(name) X(type) X(root) X(kind) X(module) X(judge) X(numbers) X(inside)
#define CALL_OBJECTS(X) \
    X(site) X(step) X(micro) X(phase) X(parent) X(anchor) X(stack) X(frame) X(seq) X(number) X(adapter) X(inside)
#define ENGINE_OBJECTS(X)                                                                                       \
    X(writer) X(write) X(walk) X(local) X(seq) X(step) X(micro) X(latest_micro) X(passing) X(numbers) X(called) \
    X(selection) X(scope) X(phases) X(lane)

#define VISIT(field) Py_VISIT(self->field);
#define CLEAR(field) Py_CLEAR(self->field);
#define COLLECTED(Type, prefix, OBJECTS)                                              \
    static int prefix##_traverse(PyObject *object, visitproc visit, void *arg) {      \
        Type *self = (Type *)object;                                                  \
        Py_VISIT(Py_TYPE(object));                                                    \
        OBJECTS(VISIT)                                                                \
        return 0;                                                                     \
    }                                                                                 \
    static int prefix##_clear(PyObject *object) {                                     \
        Type *self = (Type *)object;                                                  \
        OBJECTS(CLEAR)                                                                \
        return 0;                                                                     \
    }                                                                                 \
    static void prefix##_dealloc(PyObject *object) { end_object(object, prefix##_clear); }

COLLECTED(Site, site, SITE_OBJECTS)
COLLECTED(OpenCall, open_call, CALL_OBJECTS)
COLLECTED(Calls, calls, ENGINE_OBJECTS)

#define OBJECT(Type, field, flags) {#field, T_OBJECT, offsetof(Type, field), flags, NULL}
#define PRIVATE(Type, field) {"_" #field, T_OBJECT, offsetof(Type, field), 0, NULL}
#define FLAG(Type, field, flags) {#field, T_BOOL, offsetof(Type, field), flags, NULL}

static PyMemberDef kSiteMembers[] = {
    OBJECT(Site, name, READONLY),   OBJECT(Site, type, 0), OBJECT(Site, root, 0), OBJECT(Site, kind, READONLY),
    OBJECT(Site, module, READONLY), OBJECT(Site, judge, 0),       OBJECT(Site, inside, READONLY), FLAG(Site, wanted, 0),
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot kSiteSlots[] = {
    {Py_tp_init, (void *)site_init},   {Py_tp_members, kSiteMembers},         {Py_tp_traverse, (void *)site_traverse},
    {Py_tp_clear, (void *)site_clear}, {Py_tp_dealloc, (void *)site_dealloc}, {0, NULL},
};

static PyType_Spec kSiteSpec = {
    "astray.capture._calls.Site", sizeof(Site), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSiteSlots,
};

// ---- open calls ----------------------------------------------------------------------------------------------------

static void set_call(OpenCall *self, PyObject *site, PyObject *step, PyObject *micro, PyObject *phase, int recompute,
                     PyObject *parent, PyObject *stack, PyObject *frame) {
    replace(&self->site, site);
    replace(&self->step, step);
    replace(&self->micro, micro);
    replace(&self->phase, phase);
    replace(&self->parent, parent);
    replace(&self->anchor, parent);
    replace(&self->stack, stack);
    replace(&self->frame, frame);
    replace(&self->seq, kNotWritten);
    replace(&self->number, kZero);
    replace(&self->adapter, Py_None);
    replace(&self->inside, Py_None);
    self->recompute = (char)recompute;
    self->recorded = self->has_row = 0;
}

static OpenCall *new_call(Calls *engine, Site *site, PyObject *micro, PyObject *phase, int recompute, PyObject *parent,
                          PyObject *stack, PyObject *frame) {
    OpenCall *call = (OpenCall *)PyType_GenericAlloc(open_call_type, 0);
    if (call) set_call(call, (PyObject *)site, engine->step, micro, phase, recompute, parent, stack, frame);
    return call;
}

static int open_call_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"site", "step", "micro", "phase", "recompute", "parent", "stack", "frame", NULL};
    PyObject *site, *step, *micro, *phase, *parent, *stack, *frame = Py_None;
    int recompute;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOpOO|O:OpenCall", names, site_type, &site, &step, &micro, &phase,
                                     &recompute, &parent, &stack, &frame))
        return -1;
    set_call((OpenCall *)self, site, step, micro, phase, recompute, parent, stack, frame);
    return 0;
}

static PyMemberDef kOpenCallMembers[] = {
    OBJECT(OpenCall, site, READONLY), OBJECT(OpenCall, step, 0),        OBJECT(OpenCall, micro, 0),
    OBJECT(OpenCall, phase, 0),       OBJECT(OpenCall, parent, 0),      OBJECT(OpenCall, anchor, 0),
    OBJECT(OpenCall, stack, 0),       OBJECT(OpenCall, frame, 0),       OBJECT(OpenCall, seq, READONLY),
    OBJECT(OpenCall, number, 0),      OBJECT(OpenCall, adapter, 0),     OBJECT(OpenCall, inside, 0),
    FLAG(OpenCall, recorded, 0),      FLAG(OpenCall, recompute, 0),     {NULL, 0, 0, 0, NULL},
};

static PyType_Slot kOpenCallSlots[] = {
    {Py_tp_init, (void *)open_call_init},
    {Py_tp_members, kOpenCallMembers},
    {Py_tp_traverse, (void *)open_call_traverse},
    {Py_tp_clear, (void *)open_call_clear},
    {Py_tp_dealloc, (void *)open_call_dealloc},
    {0, NULL},
};

static PyType_Spec kOpenCallSpec = {
    "astray.capture._calls.OpenCall", sizeof(OpenCall), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kOpenCallSlots,
};

// ---- numbering -----------------------------------------------------------------------------------------------------

static int phase_index(PyObject *phase) {
    if (is_text(phase, s_forward)) return kForward;
    if (is_text(phase, s_backward)) return kBackward;
    if (is_text(phase, s_update)) return kUpdate;
    PyErr_Format(PyExc_KeyError, "%R", phase);
    return -1;
}

// The numbers of a site, which it shares with the others of its name. Borrowed.
static Numbers *numbers_of(Calls *self, Site *site) {
    if (site->numbers == Py_None) {
        PyObject *found = PyDict_GetItemWithError(self->numbers, site->name);
        if (found) {
            replace(&site->numbers, found);
        } else {
            PyObject *fresh = PyErr_Occurred() ? NULL : PyType_GenericAlloc(numbers_type, 0);
            if (!fresh || PyDict_SetItem(self->numbers, site->name, fresh) < 0) {
                Py_XDECREF(fresh);
                return NULL;
            }
            replace(&site->numbers, fresh);
            Py_DECREF(fresh);
        }
    }
    return (Numbers *)site->numbers;
}

// Which call of its site this is, in its micro step: a new reference.
static PyObject *next_number(Calls *self, Site *site, PyObject *micro, int recompute, PyObject *phase) {
    const int index = phase_index(phase);
    const long long step_now = PyLong_AsLongLong(self->step), micro_now = PyLong_AsLongLong(micro);
    Numbers *numbers = index < 0 || PyErr_Occurred() ? NULL : numbers_of(self, site);
    if (!numbers) return NULL;
    const int course = index + (recompute ? kPhases : 0);
    if (numbers->micro[course] != micro_now || numbers->step[course] != step_now) {
        numbers->step[course] = step_now;
        numbers->micro[course] = micro_now;
        numbers->next[course] = 0;
    }
    return PyLong_FromLongLong(numbers->next[course]++);
}

static PyObject *next_seq(Calls *self) {
    PyObject *seq = PyIter_Next(self->seq);
    if (!seq && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "There are no more numbers for calls.");
    return seq;
}

int calls_want(Calls *self, Site *site) {
    if (site->judge == self->selection) return site->wanted;
    PyObject *wanted = CALL((PyObject *)self, s_wants, (PyObject *)site);  // which decides it once
    const int is_true = wanted ? PyObject_IsTrue(wanted) : -1;
    Py_XDECREF(wanted);
    return is_true;
}

// Decides whether a call is recorded, and numbers it.
static int admit(Calls *self, OpenCall *call) {
    Site *site = (Site *)call->site;
    PyObject *number = next_number(self, site, call->micro, call->recompute, call->phase);
    if (!number) return -1;
    put(&call->number, number);
    if (self->scope != Py_None || !self->recording) {  // seldom: Python answers whether it is in scope, and follows
        PyObject *answer = CALL((PyObject *)self, self->scope != Py_None ? s_admit : s_follows, (PyObject *)call);
        const int is_in = answer ? PyObject_IsTrue(answer) : -1;
        Py_XDECREF(answer);
        if (is_in <= 0) return is_in;
    }
    const int wanted = calls_want(self, site);
    if (wanted <= 0) return wanted;
    call->recorded = 1;
    if (PySet_Add(self->called, site->module) < 0) return -1;
    const int has_row = PySequence_Contains(self->phases, call->phase);
    if (has_row <= 0) return has_row;
    PyObject *seq = next_seq(self);
    if (!seq) return -1;
    replace(&call->anchor, seq);
    put(&call->seq, seq);
    call->has_row = 1;
    return 0;
}

// ---- the course of a call ------------------------------------------------------------------------------------------

PyObject *calls_open(Calls *self) {
    PyObject *found = PyObject_GetAttr(self->local, s_open_calls);
    if (found || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
    PyErr_Clear();
    found = PyList_New(0);
    if (found && PyObject_SetAttr(self->local, s_open_calls, found) < 0) Py_CLEAR(found);
    return found;
}

static OpenCall *last_of(PyObject *open) {  // borrowed; NULL when there is none
    const Py_ssize_t size = PyList_Size(open);
    return size ? (OpenCall *)PyList_GetItem(open, size - 1) : NULL;
}

// Takes the last open call off: it no longer holds its frame, which holds everything its function does.
static int drop_last(PyObject *open) {
    OpenCall *last = (OpenCall *)Py_NewRef((PyObject *)last_of(open));
    const Py_ssize_t size = PyList_Size(open);
    const int failed = PyList_SetSlice(open, size - 1, size, NULL);
    replace(&last->frame, Py_None);
    Py_DECREF(last);
    return failed;
}

// The stack of a call, and the open call around it (borrowed), after those that are not on this stack are taken off.
static PyObject *stack_of(Calls *self, PyObject *open, PyObject *frame, OpenCall **outer) {
    while ((*outer = last_of(open))) {
        PyObject *stack = walk_capture(self->walk, frame, (*outer)->frame, (*outer)->stack);
        if (stack != Py_None) return stack;
        Py_DECREF(stack);
        if (drop_last(open) < 0) return NULL;
    }
    return walk_capture(self->walk, frame, Py_None, Py_None);
}

// The micro step that a call is in: a new reference.
static PyObject *micro_of(Calls *self, Site *site, OpenCall *outer, int recompute) {
    if (outer && (!site->is_module || ((Site *)outer->site)->is_module)) return Py_NewRef(outer->micro);
    if (!site->is_module) return Py_NewRef(self->latest_micro);
    return CALL((PyObject *)self, s_outermost, site->root, recompute ? Py_True : Py_False);
}

OpenCall *calls_enter(Calls *self, Site *site, PyObject *frame, PyObject *phase, int recompute, PyObject *micro, int row) {
    PyObject *open = calls_open(self);
    if (!open) return NULL;
    OpenCall *outer = NULL, *call = NULL;
    PyObject *stack = stack_of(self, open, frame, &outer);
    PyObject *counted = !stack ? NULL : micro ? Py_NewRef(micro) : micro_of(self, site, outer, recompute);
    if (counted)
        call = new_call(self, site, counted, phase, recompute, outer ? outer->anchor : Py_None, stack, frame);
    Py_XDECREF(stack);
    Py_XDECREF(counted);
    if (call && ((row && admit(self, call) < 0) || PyList_Append(open, (PyObject *)call) < 0)) Py_CLEAR(call);
    Py_DECREF(open);
    return call;
}

static PyObject *py_enter(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"site", "frame", "phase", "recompute", "micro", "row", NULL};
    PyObject *site, *frame, *phase = s_forward, *micro = Py_None;
    int recompute = 0, row = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|$OpOp:enter", names, site_type, &site, &frame, &phase, &recompute,
                                     &micro, &row))
        return NULL;
    return (PyObject *)calls_enter((Calls *)self, (Site *)site, frame, phase, recompute, micro == Py_None ? NULL : micro,
                                   row);
}

static PyObject *py_enter_backward(PyObject *object, PyObject *args) {
    Calls *self = (Calls *)object;
    PyObject *site, *forward, *micro, *parent = Py_None, *stack = Py_None;
    if (!PyArg_ParseTuple(args, "O!OO:enter_backward", site_type, &site, &forward, &micro)) return NULL;
    if (forward != Py_None) {
        if (Py_TYPE(forward) != open_call_type) return PyErr_Format(PyExc_TypeError, "%R is no open call.", forward);
        parent = ((OpenCall *)forward)->anchor;
        stack = ((OpenCall *)forward)->stack;
    }
    PyObject *open = calls_open(self);
    if (!open) return NULL;
    OpenCall *call = new_call(self, (Site *)site, micro, s_backward, 0, parent, stack, Py_None);
    if (call && (admit(self, call) < 0 || PyList_Append(open, (PyObject *)call) < 0)) Py_CLEAR(call);
    Py_DECREF(open);
    return (PyObject *)call;
}

enum { kCells = 12 };

// Hands a row to the writer.
static int write_row(Calls *self, PyObject *const *cells) {
    const int appended = self->appending ? self->appending->append(self->lane, cells, kCells, self->batch) : 0;
    if (appended) return appended < 0 ? -1 : 0;
    PyObject *row = PyTuple_New(kCells);  // the lane is full, or it is not ours to append to
    for (Py_ssize_t i = 0; row && i < kCells; ++i) PyTuple_SetItem(row, i, Py_NewRef(cells[i]));
    PyObject *written = row ? PyObject_CallFunctionObjArgs(self->write, row, NULL) : NULL;
    Py_XDECREF(row);
    return done(written);
}

int calls_begin(Calls *self, OpenCall *call, PyObject *args) {
    const Site *site = (Site *)call->site;
    PyObject *row[kCells] = {call->seq,    call->step,  call->micro,  site->kind,  site->name, site->type,
                             call->number, call->phase, call->parent, call->stack, args,       call->recompute ? Py_True : Py_False};
    return write_row(self, row);
}

static PyObject *py_begin(PyObject *self, PyObject *args) {
    PyObject *call, *skeleton;
    if (!PyArg_ParseTuple(args, "O!O:begin", open_call_type, &call, &skeleton)) return NULL;
    return calls_begin((Calls *)self, (OpenCall *)call, skeleton) < 0 ? NULL : Py_NewRef(Py_None);
}

int calls_leave(Calls *self, OpenCall *call) {
    PyObject *open = calls_open(self);
    if (!open) return -1;
    int failed = 0;
    if (last_of(open) == call) {
        failed = drop_last(open);
        // What it still refers to never refers back to it, so the garbage collector need not look at it. A thousand of
        // them live from a forward to its backward.
        if (call->adapter == Py_None) PyObject_GC_UnTrack(call);
    } else {
        Py_ssize_t at = PyList_Size(open);
        while (at && PyList_GetItem(open, at - 1) != (PyObject *)call) --at;
        while (at && !failed && PyList_Size(open) >= at) failed = drop_last(open);
    }
    Py_DECREF(open);
    if (!failed && self->scope != Py_None) failed = done(CALL(self->scope, s_left, ((Site *)call->site)->name));
    return failed;
}

static PyObject *py_leave(PyObject *self, PyObject *call) {
    if (Py_TYPE(call) != open_call_type) return PyErr_Format(PyExc_TypeError, "%R is no open call.", call);
    return calls_leave((Calls *)self, (OpenCall *)call) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *py_innermost(PyObject *self, PyObject *site) {
    PyObject *open = calls_open((Calls *)self), *found = Py_None;
    if (!open) return NULL;
    for (Py_ssize_t at = PyList_Size(open); at && found == Py_None; --at) {
        OpenCall *call = (OpenCall *)PyList_GetItem(open, at - 1);
        if (call->site == site) found = (PyObject *)call;
    }
    Py_INCREF(found);
    Py_DECREF(open);
    return found;
}

static PyObject *get_enclosing(PyObject *self, void *Py_UNUSED(closure)) {
    PyObject *open = calls_open((Calls *)self);
    if (!open) return NULL;
    PyObject *last = (PyObject *)last_of(open);
    last = Py_NewRef(last ? last : Py_None);
    Py_DECREF(open);
    return last;
}

int calls_follow_gradients(Calls *self, const OpenCall *call) {
    return call->parent == Py_None ? 1 : PySequence_Contains(self->phases, s_backward);
}

static PyObject *py_follows_gradients(PyObject *self, PyObject *call) {
    if (Py_TYPE(call) != open_call_type) return PyErr_Format(PyExc_TypeError, "%R is no open call.", call);
    const int follows = calls_follow_gradients((Calls *)self, (OpenCall *)call);
    return follows < 0 ? NULL : PyBool_FromLong(follows);
}

static PyObject *py_backward(PyObject *object, PyObject *given) {
    Calls *self = (Calls *)object;
    if (Py_TYPE(given) != open_call_type) return PyErr_Format(PyExc_TypeError, "%R is no open call.", given);
    const OpenCall *forward = (OpenCall *)given;
    const Site *site = (Site *)forward->site;
    if (PyDict_SetItem(self->passing, site->root, forward->micro) < 0) return NULL;
    const int wanted = PySequence_Contains(self->phases, s_backward);
    if (wanted <= 0) return wanted < 0 ? NULL : Py_NewRef(kNotWritten);
    PyObject *seq = next_seq(self);
    if (!seq) return NULL;
    PyObject *row[kCells] = {seq, forward->step, forward->micro, site->kind, site->name, site->type, forward->number,
                             s_backward, forward->has_row ? forward->seq : Py_None, forward->stack, Py_None,
                             forward->recompute ? Py_True : Py_False};
    if (write_row(self, row) < 0) Py_CLEAR(seq);
    return seq;
}

// Whether an event of this site is left out: it is not asked for, or belongs to a module of which nothing was taken.
static int leaves_out(Calls *self, Site *site, PyObject *phase) {
    const int in_phase = PySequence_Contains(self->phases, phase);
    const int wanted = in_phase <= 0 ? in_phase : calls_want(self, site);
    if (wanted <= 0) return wanted < 0 ? -1 : 1;
    if (!self->by_module && !self->forward_ended) return 0;
    const int of_parameter = (is_text(site->kind, s_parameter) || is_text(site->kind, s_optimizer)) &&
                             PyUnicode_Compare(site->module, site->name) != 0;
    const int called = of_parameter ? PySet_Contains(self->called, site->module) : 1;
    return called < 0 ? -1 : !called;
}

// The micro step of an event: that of the backward pass, or else of the last forward. Borrowed; NULL with an error set.
static PyObject *micro_of_event(Calls *self, Site *site, PyObject *phase) {
    if (is_update(phase)) return kZero;
    PyObject *micro = PyDict_GetItemWithError(self->passing, site->root);
    if (!micro && !PyErr_Occurred()) micro = PyDict_GetItemWithError(self->micro, site->root);
    return micro || PyErr_Occurred() ? micro : kZero;
}

static PyObject *py_event(PyObject *object, PyObject *given, PyObject *kwargs) {
    static char *names[] = {"site", "phase", "parent", "stack", "args", NULL};
    Calls *self = (Calls *)object;
    PyObject *place, *phase, *parent = Py_None, *stack = Py_None, *args = Py_None;
    if (!PyArg_ParseTupleAndKeywords(given, kwargs, "O!O|O$OO:event", names, site_type, &place, &phase, &parent, &stack,
                                     &args))
        return NULL;
    Site *site = (Site *)place;
    PyObject *micro = micro_of_event(self, site, phase);
    if (!micro) return NULL;
    Py_INCREF(micro);
    PyObject *seq = NULL, *number = next_number(self, site, micro, 0, phase);
    const int left_out = number ? leaves_out(self, site, phase) : -1;
    if (left_out > 0) {
        seq = Py_NewRef(kNotWritten);
    } else if (left_out == 0 && (seq = next_seq(self))) {
        PyObject *row[kCells] = {seq,    self->step, micro,  site->kind, site->name, site->type,
                                 number, phase,      parent, stack,      args,       Py_False};
        if (write_row(self, row) < 0) Py_CLEAR(seq);
    }
    Py_DECREF(micro);
    Py_XDECREF(number);
    return seq;
}

static PyObject *py_number(PyObject *self, PyObject *args) {
    PyObject *site, *micro, *phase;
    int recompute;
    if (!PyArg_ParseTuple(args, "O!OpO:_number", site_type, &site, &micro, &recompute, &phase)) return NULL;
    return next_number((Calls *)self, (Site *)site, micro, recompute, phase);
}

static PyObject *py_open_calls(PyObject *self, PyObject *Py_UNUSED(nothing)) { return calls_open((Calls *)self); }

int calls_failed(Calls *self, const char *doing, PyObject *of) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    PyObject *text = PyUnicode_FromFormat("%s%S", doing, of);
    PyObject *told = text ? CALL((PyObject *)self, s_failed, text, error) : NULL;
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return done(told);
}

int calls_leave_anyhow(Calls *self, OpenCall *call) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (calls_leave(self, call) < 0 && calls_failed(self, "the end of ", ((Site *)call->site)->name) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        return -1;
    }
    if (!type) return 0;
    PyErr_Restore(type, error, traceback);
    return -1;
}

// ---- as Python sees it ---------------------------------------------------------------------------------------------

// Where rows of calls wait to be written, unless the writer wants to be asked each time.
static int find_lane(Calls *self, PyObject *writer) {
    PyObject *lanes = PyObject_GetAttr(writer, s_lanes), *calls, *tensors;
    const int asks = lanes == Py_None;
    const int found = asks || (lanes && PyArg_ParseTuple(lanes, "OOn", &calls, &tensors, &self->batch));
    if (found && !asks) {
        replace(&self->lane, calls);
        self->appending = find_appending();
        if (self->appending && !self->appending->are_calls(calls)) self->appending = NULL;
    }
    Py_XDECREF(lanes);
    return found ? 0 : -1;
}

static int calls_init(PyObject *object, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Calls *self = (Calls *)object;
    PyObject *writer, *walk, *local, *seq;
    if (!PyArg_ParseTuple(args, "OOOO:Calls", &writer, &walk, &local, &seq)) return -1;
    replace(&self->writer, writer);
    replace(&self->walk, walk);
    replace(&self->local, local);
    replace(&self->seq, seq);
    PyObject **nothing[] = {&self->selection, &self->scope};
    PyObject **zeros[] = {&self->step, &self->latest_micro};
    PyObject **dicts[] = {&self->micro, &self->passing, &self->numbers};
    for (int i = 0; i < 2; ++i) replace(nothing[i], Py_None), replace(zeros[i], kZero);
    for (int i = 0; i < 3; ++i) {
        put(dicts[i], PyDict_New());
        if (!*dicts[i]) return -1;
    }
    put(&self->write, PyObject_GetAttr(writer, s_call_row));
    if (find_lane(self, writer) < 0) return -1;
    put(&self->called, PySet_New(NULL));
    put(&self->phases, PyTuple_New(0));
    self->is_here = 1;
    return self->write && self->called && self->phases ? 0 : -1;
}

static PyMemberDef kMembers[] = {
    PRIVATE(Calls, writer), PRIVATE(Calls, local), PRIVATE(Calls, seq), PRIVATE(Calls, micro), PRIVATE(Calls, passing),
    PRIVATE(Calls, numbers), PRIVATE(Calls, called), PRIVATE(Calls, selection), PRIVATE(Calls, scope),
    PRIVATE(Calls, phases), OBJECT(Calls, step, 0), OBJECT(Calls, latest_micro, 0), FLAG(Calls, recording, 0),
    FLAG(Calls, listening, 0), FLAG(Calls, is_here, 0), FLAG(Calls, paused, 0),
    {"_forward_ended", T_BOOL, offsetof(Calls, forward_ended), 0, NULL},
    {"_by_module", T_BOOL, offsetof(Calls, by_module), 0, NULL}, {NULL, 0, 0, 0, NULL},
};

static PyMethodDef kMethods[] = {
    {"enter", (PyCFunction)(void (*)(void))py_enter, METH_VARARGS | METH_KEYWORDS, NULL},
    {"enter_backward", py_enter_backward, METH_VARARGS, NULL},
    {"begin", py_begin, METH_VARARGS, NULL},
    {"leave", py_leave, METH_O, NULL},
    {"innermost", py_innermost, METH_O, NULL},
    {"follows_gradients", py_follows_gradients, METH_O, NULL},
    {"backward", py_backward, METH_O, NULL},
    {"event", (PyCFunction)(void (*)(void))py_event, METH_VARARGS | METH_KEYWORDS, NULL},
    {"_number", py_number, METH_VARARGS, NULL},
    {"_open_calls", py_open_calls, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef kGetSet[] = {{"enclosing", get_enclosing, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot kSlots[] = {
    {Py_tp_init, (void *)calls_init},   {Py_tp_members, kMembers},
    {Py_tp_methods, kMethods},          {Py_tp_getset, kGetSet},
    {Py_tp_traverse, (void *)calls_traverse}, {Py_tp_clear, (void *)calls_clear},
    {Py_tp_dealloc, (void *)calls_dealloc},   {0, NULL},
};

static PyType_Spec kSpec = {
    "astray.capture._calls.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    kSlots,
};

static int add_type(PyObject *module, const char *name, PyTypeObject **type, PyType_Spec *spec) {
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type ? PyModule_AddObjectRef(module, name, (PyObject *)*type) : -1;
}

int add_calls(PyObject *module) {
    const struct {
        PyObject **place;
        const char *text;
    } texts[] = {
        {&s_forward, "forward"}, {&s_backward, "backward"}, {&s_update, "update"}, {&s_input, "input"},
        {&s_output, "output"}, {&s_parameter, "parameter"}, {&s_module, "module"}, {&s_optimizer, "optimizer"},
        {&s_open_calls, "open_calls"}, {&s_call_row, "call_row"}, {&s_lanes, "lanes"}, {&s_wants, "wants"}, {&s_admit, "_is_in_scope"},
        {&s_follows, "_follows"}, {&s_outermost, "_outermost"}, {&s_left, "left"}, {&s_failed, "failed"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; ++i) {
        *texts[i].place = PyUnicode_InternFromString(texts[i].text);
        if (!*texts[i].place) return -1;
    }
    kNotWritten = PyLong_FromLong(-1);
    kZero = PyLong_FromLong(0);
    numbers_type = (PyTypeObject *)PyType_FromSpec(&kNumbersSpec);
    if (!kNotWritten || !kZero || !numbers_type) return -1;
    return add_type(module, "Site", &site_type, &kSiteSpec) < 0 ||
                   add_type(module, "OpenCall", &open_call_type, &kOpenCallSpec) < 0
               ? -1
               : add_type(module, "Calls", &calls_type, &kSpec);
}
