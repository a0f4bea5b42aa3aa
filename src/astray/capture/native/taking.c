// Takes the calls of functions and ops into a recording: what `Taking` does in pytorch/calls/taking.py, with the part of
// `Places` that every call goes through, and the two modes that are told of calls.
//
// Speaks to torch by way of its Python objects alone.

#include "calls.h"

PyTypeObject *taking_type;
PyObject *torch_disable, *torch_task, *torch_grad_enabled, *torch_tracing, *torch_sequence;

static PyObject *s_enter, *s_exit, *s_is_plain, *s_is_only_view, *s_inputs, *s_outputs, *s_not_read, *s_written, *s_makes_buffers, *s_type;
static PyObject *s_observe_inputs, *s_observe_unread, *s_changed, *s_watch, *s_out, *s_name_place, *s_is_elsewhere;
static PyObject *s_enter_backward, *s_abandon, *s_sees_ops, *s_sees_functions, *s_is_running, *s_run, *s_waiting;
static PyObject *kNothing;

// ---- what torch is asked -------------------------------------------------------------------------------------------

PyObject *aside_enter(void) {
    PyObject *aside = PyObject_CallNoArgs(torch_disable);
    if (aside && done(CALL0(aside, s_enter)) < 0) Py_CLEAR(aside);
    return aside;
}

void aside_exit(PyObject *aside) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (done(CALL(aside, s_exit, Py_None, Py_None, Py_None)) < 0) PyErr_Clear();
    PyErr_Restore(type, error, traceback);
    Py_DECREF(aside);
}

int is_passing(void) {
    PyObject *task = PyObject_CallNoArgs(torch_task);
    if (!task) return -1;
    const long long number = PyLong_AsLongLong(task);
    Py_DECREF(task);
    return number == -1 && PyErr_Occurred() ? -1 : number >= 0;
}

int is_grad_enabled(void) {
    PyObject *enabled = PyObject_CallNoArgs(torch_grad_enabled);
    Py_XDECREF(enabled);
    return enabled ? enabled == Py_True : -1;
}

// ---- where a call is -----------------------------------------------------------------------------------------------

typedef struct {
    PyObject_HEAD
    Calls *engine;
    PyObject *taking;  // the Python twin, for what is out of the ordinary
    PyObject *places, *outside, *tensors, *flat, *gradients, *edges, *is_machinery;
    CodeTable codes;
} Taking;

// Whether the innermost frame of a call belongs to torch's own machinery; -1 with an error set.
static int is_infrastructure(Taking *self, PyObject *frame) {
    int answer = kNeither;
    Py_INCREF(frame);
    while (frame != Py_None) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        answer = code_lookup(&self->codes, code, self->is_machinery);
        Py_DECREF(code);
        if (answer != kNeither) break;
        PyObject *back = frame_back(frame);
        Py_DECREF(frame);
        frame = back;
        if (!frame) return -1;
    }
    Py_DECREF(frame);
    return answer == kNeither ? kNo : answer;
}

// The site of a callee inside a call, or outside of all: a new reference.
static PyObject *find_site(Taking *self, OpenCall *outer, PyObject *callee) {
    PyObject *site = PyDict_GetItemWithError(outer ? ((Site *)outer->site)->inside : self->outside, callee);
    if (site) return Py_NewRef(site);
    if (PyErr_Occurred()) return NULL;
    return CALL(self->places, s_name_place, outer ? (PyObject *)outer : Py_None, callee);
}

// Opens a call: a new reference, None when it is not for this recording.
static PyObject *open_call(Taking *self, PyObject *callee, PyObject *frame) {
    Calls *engine = self->engine;
    const int machinery = engine->is_here ? is_infrastructure(self, frame) : 1;
    if (machinery) return machinery < 0 ? NULL : Py_NewRef(Py_None);
    const int passing = is_passing();
    PyObject *open = passing < 0 ? NULL : calls_open(engine), *call = NULL;
    if (!open) return NULL;
    const Py_ssize_t depth = PyList_Size(open);
    OpenCall *outer = depth ? (OpenCall *)PyList_GetItem(open, depth - 1) : NULL;
    if (passing && (!outer || !outer->recompute)) {
        call = CALL(self->places, s_enter_backward, callee, frame);
    } else {
        PyObject *elsewhere = outer ? NULL : CALL0(self->places, s_is_elsewhere);
        if (elsewhere == Py_True) {
            call = Py_NewRef(Py_None);
        } else if (outer || elsewhere) {
            PyObject *site = find_site(self, outer, callee);
            const int wanted = site ? calls_want(engine, (Site *)site) : -1;
            PyObject *phase = outer && is_update(outer->phase) ? s_update : s_forward;
            if (wanted == 0) call = Py_NewRef(Py_None);
            if (wanted > 0) call = (PyObject *)calls_enter(engine, (Site *)site, frame, phase, passing, NULL, 1);
            Py_XDECREF(site);
        }
        Py_XDECREF(elsewhere);
    }
    Py_DECREF(open);
    if (call && call != Py_None && Py_TYPE(call) != open_call_type) {
        PyErr_Format(PyExc_TypeError, "%R is no open call.", call);
        Py_CLEAR(call);
    }
    return call;
}

// ---- what goes in and comes out ------------------------------------------------------------------------------------

enum { kOther = 0, kPlain = 1, kView = 2 };

// kPlain when all that a call does is to read its arguments and to return its result, kView when it only looks at its
// first argument in another way; -1 with an error set.
static int nature(PyObject *callee, PyObject *kwargs) {
    const int has_out = kwargs ? PyDict_Contains(kwargs, s_out) : 0;
    if (has_out) return has_out < 0 ? -1 : kOther;
    const int plain = attribute_is_true(callee, s_is_plain);
    if (plain) return plain;
    const int view = attribute_is_true(callee, s_is_only_view);
    return view > 0 ? kView : view;
}

// What a view does not read: its first argument, when that is a tensor. A new reference.
static PyObject *unread_of_view(PyObject *args, PyObject *inputs) {
    PyObject *first = PyTuple_Size(args) && PyList_Size(inputs) ? PyTuple_GetItem(args, 0) : NULL;
    if (!first || PyTuple_GetItem(PyList_GetItem(inputs, 0), 1) != first) return Py_NewRef(kNothing);
    PyObject *list = PyList_New(1);
    if (list) PyList_SetItem(list, 0, Py_NewRef(first));
    return list;
}

static PyObject *or_empty(PyObject *kwargs) { return kwargs ? Py_NewRef(kwargs) : PyDict_New(); }

// Takes the inputs of a call that is recorded. -1 with an error set.
static int take_inputs(Taking *self, OpenCall *call, PyObject *callee, PyObject *args, PyObject *kwargs) {
    int watched = 0;
    if (self->gradients != Py_None && PyUnicode_Compare(call->phase, s_forward) == 0) watched = is_grad_enabled();
    if (watched < 0 || (!watched && !call->has_row)) return watched;
    const int plain = nature(callee, kwargs);
    if (plain < 0) return -1;
    PyObject *inputs = NULL, *skeleton = NULL, *unread = Py_NewRef(kNothing);
    int failed = -1;
    if (plain) {
        if (structures_arguments(self->flat, args, kwargs, &inputs, &skeleton) < 0) goto end;
        if (plain == kView) put(&unread, unread_of_view(args, inputs));
        if (!unread) goto end;
    } else {
        PyObject *given = or_empty(kwargs);
        PyObject *found = given ? CALL(callee, s_inputs, self->flat, args, given) : NULL;
        if (found && call->has_row) put(&unread, CALL(callee, s_not_read, args, given));
        Py_XDECREF(given);
        if (found && unread && PyTuple_Check(found) && PyTuple_Size(found) == 2) {
            inputs = Py_NewRef(PyTuple_GetItem(found, 0));
            skeleton = Py_NewRef(PyTuple_GetItem(found, 1));
        }
        Py_XDECREF(found);
        if (!inputs || !unread) goto end;
    }
    if (call->has_row && (calls_begin(self->engine, call, skeleton) < 0 ||
                          done(CALL(self->tensors, s_observe_inputs, call->seq, inputs, unread)) < 0))
        goto end;
    if (watched) {
        PyObject *edges = PyObject_CallFunctionObjArgs(self->edges, inputs, NULL);
        if (!edges) goto end;
        put(&call->adapter, edges);
    }
    failed = 0;
end:
    Py_XDECREF(inputs);
    Py_XDECREF(skeleton);
    Py_XDECREF(unread);
    return failed;
}

// A call starts: a new reference, None when it is not for us, NULL only for what is no Exception.
static PyObject *begin(Taking *self, PyObject *callee, PyObject *args, PyObject *kwargs, PyObject *frame) {
    PyObject *aside = aside_enter(), *call = aside ? open_call(self, callee, frame) : NULL;
    int failed = !call;
    if (call && call != Py_None && ((OpenCall *)call)->recorded)
        failed = take_inputs(self, (OpenCall *)call, callee, args, kwargs) < 0;
    if (aside) aside_exit(aside);
    if (!failed) return call;
    PyObject *type, *error, *traceback, *name;
    PyErr_Fetch(&type, &error, &traceback);
    name = PyObject_GetAttr(callee, s_type);
    PyErr_Restore(type, error, traceback);
    const int told = calls_failed(self->engine, "a call of ", name ? name : Py_None);
    Py_XDECREF(name);
    // It is left, or whatever follows would seem to be inside it.
    if (call && told == 0 && calls_leave(self->engine, (OpenCall *)call) < 0) PyErr_Clear();
    Py_XDECREF(call);
    return told < 0 ? NULL : Py_NewRef(Py_None);
}

// Takes what a call gave: the tensors with their paths, None when nobody asked for them. A new reference.
static PyObject *take_outputs(Taking *self, OpenCall *call, PyObject *callee, PyObject *args, PyObject *kwargs,
                              PyObject *result) {
    const int plain = nature(callee, kwargs), makes_buffers = attribute_is_true(callee, s_makes_buffers);
    if (plain < 0 || makes_buffers < 0) return NULL;
    PyObject *given = plain ? NULL : or_empty(kwargs), *outputs = NULL;
    if (!plain) {
        PyObject *written = given ? CALL(callee, s_written, args, given) : NULL;
        const Py_ssize_t count = written ? PyList_Size(written) : -1;
        int failed = count < 0;
        for (Py_ssize_t i = 0; !failed && i < count; ++i)
            failed = done(CALL(self->tensors, s_written, PyList_GetItem(written, i))) < 0;
        Py_XDECREF(written);
        if (failed) {
            Py_XDECREF(given);
            return NULL;
        }
    }
    if (!call->has_row && call->adapter == Py_None && !makes_buffers) {
        Py_XDECREF(given);
        return Py_NewRef(Py_None);
    }
    outputs = plain ? structures_result(self->flat, result)
                    : CALL(callee, s_outputs, self->flat, args, given, result);
    Py_XDECREF(given);
    const Py_ssize_t count = outputs ? PyList_Size(outputs) : -1;
    int failed = count < 0;
    for (Py_ssize_t i = 0; !failed && i < count && (call->has_row || makes_buffers); ++i) {
        PyObject *one = PyList_GetItem(outputs, i), *path = PyTuple_GetItem(one, 0);
        PyObject *tensor = path ? PyTuple_GetItem(one, 1) : NULL;
        failed = !tensor;
        if (tensor && call->has_row)
            failed = done(CALL(self->tensors, s_observe_unread, call->seq, s_output, path, tensor)) < 0;
    }
    for (Py_ssize_t i = 0; !failed && makes_buffers && i < count; ++i)
        failed = done(CALL(self->tensors, s_changed, PyTuple_GetItem(PyList_GetItem(outputs, i), 1))) < 0;
    if (!failed && count && call->adapter != Py_None && self->gradients != Py_None)
        failed = done(CALL(self->gradients, s_watch, (PyObject *)self->engine, (PyObject *)call, call->adapter, outputs)) < 0;
    if (failed) Py_CLEAR(outputs);
    return outputs;
}

// A call has returned: what was taken, None when nobody asked; NULL only for what is no Exception.
static PyObject *end(Taking *self, OpenCall *call, PyObject *callee, PyObject *args, PyObject *kwargs, PyObject *result) {
    PyObject *taken = Py_None;
    Py_INCREF(taken);
    if (call->recorded) {
        PyObject *aside = aside_enter();
        put(&taken, aside ? take_outputs(self, call, callee, args, kwargs, result) : NULL);
        if (aside) aside_exit(aside);
        if (!taken) {
            PyObject *type, *error, *traceback, *name;
            PyErr_Fetch(&type, &error, &traceback);
            name = PyObject_GetAttr(callee, s_type);
            PyErr_Restore(type, error, traceback);
            if (calls_failed(self->engine, "the result of ", name ? name : Py_None) == 0) taken = Py_NewRef(Py_None);
            Py_XDECREF(name);
        }
    }
    replace(&call->adapter, Py_None);
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (calls_leave(self->engine, call) < 0) PyErr_Clear();
    PyErr_Restore(type, error, traceback);
    return taken;
}

// A call has raised: Python says so, and the program's own error goes on.
static void abandon(Taking *self, OpenCall *call) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    if (done(CALL(self->taking, s_abandon, (PyObject *)call, error)) < 0) PyErr_Clear();
    PyErr_Restore(type, error, traceback);
}

// ---- the modes -----------------------------------------------------------------------------------------------------

// The frame that called the mode's method, which called us. None where there is none, as on autograd's own threads.
static PyObject *caller(void) {
    PyObject *own = (PyObject *)PyEval_GetFrame();  // borrowed
    return own ? frame_back(own) : Py_NewRef(Py_None);
}

static PyObject *call_it(Taking *self, PyObject *func, PyObject *args, PyObject *kwargs, int is_op) {
    const int told = is_op ? attribute_is_true(self->places, s_sees_functions) : 0;
    if (told < 0) return NULL;
    if (!told) return PyObject_Call(func, args, kwargs);
    PyObject *given = or_empty(kwargs);
    PyObject *result = given ? CALL(self->places, s_run, func, args, given) : NULL;
    Py_XDECREF(given);
    return result;
}

// Runs a function or op and takes its call. `taken` is set to what came out of it, to be let go of.
static PyObject *run_and_take(Taking *self, PyObject *func, PyObject *callee, PyObject *args, PyObject *kwargs, int is_op,
                              PyObject **taken) {
    PyObject *frame = caller();
    PyObject *call = frame ? begin(self, callee, args, kwargs, frame) : NULL;
    Py_XDECREF(frame);
    if (!call) return NULL;
    PyObject *result = call_it(self, func, args, kwargs, is_op);
    if (call != Py_None) {
        if (!result) {
            abandon(self, (OpenCall *)call);
        } else if (!(*taken = end(self, (OpenCall *)call, callee, args, kwargs, result))) {
            Py_CLEAR(result);
        }
    }
    Py_DECREF(call);
    return result;
}

// function(func, args, kwargs, known, plain, underway, other): what a function mode does when it is told of a call.
// `known` has what is known of functions, `plain` is the type of those that are taken here, `other` takes the rest.
static PyObject *py_function(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    Taking *self = (Taking *)object;
    if (count != 7) return PyErr_Format(PyExc_TypeError, "`function` takes 7 arguments, not %zd.", count);
    PyObject *func = given[0], *args = given[1], *kwargs = given[2] == Py_None ? NULL : given[2];
    PyObject *known = given[3], *plain = given[4], *underway = given[5], *other = given[6];
    PyObject *function = PyDict_GetItemWithError(known, func);
    if (!function && PyErr_Occurred()) return NULL;
    if (function == Py_None || !self->engine->listening) return PyObject_Call(func, args, kwargs);
    int is_ours = function && (PyObject *)Py_TYPE(function) == plain;
    if (is_ours) {
        PyObject *waiting = PyObject_GetAttr(underway, s_waiting);
        if (!waiting) return NULL;
        is_ours = PyList_Size(waiting) == 0;
        Py_DECREF(waiting);
    }
    if (is_ours) {
        const int sees_ops = attribute_is_true(self->places, s_sees_ops);
        if (sees_ops < 0) return NULL;
        if (sees_ops) {
            PyObject *running = CALL(self->places, s_is_running, func);
            Py_XDECREF(running);
            if (!running) return NULL;
            if (running == Py_True) return PyObject_Call(func, args, kwargs);
        }
    } else {
        PyObject *empty = or_empty(kwargs);
        PyObject *result = empty ? PyObject_CallFunctionObjArgs(other, func, args, empty, NULL) : NULL;
        Py_XDECREF(empty);
        return result;
    }
    Py_INCREF(function);
    PyObject *taken = NULL, *result = run_and_take(self, func, function, args, kwargs, 0, &taken);
    if (result && taken && PyList_Check(taken) && !PyList_Size(taken) && PyDict_SetItem(known, func, Py_None) < 0)
        PyErr_Clear();  // it tells something about a tensor; not worth recording again
    Py_XDECREF(taken);
    Py_DECREF(function);
    return result;
}

// op(func, args, kwargs, known, plain, other): the same for an op mode. `known` has (op, what is known) by its id.
static PyObject *py_op(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    Taking *self = (Taking *)object;
    if (count != 6) return PyErr_Format(PyExc_TypeError, "`op` takes 6 arguments, not %zd.", count);
    PyObject *func = given[0], *args = given[1], *kwargs = given[2] == Py_None ? NULL : given[2];
    PyObject *known = given[3], *plain = given[4], *other = given[5];
    if (!self->engine->listening) return PyObject_Call(func, args, kwargs);
    PyObject *id = PyLong_FromVoidPtr(func), *pair = id ? PyDict_GetItemWithError(known, id) : NULL;
    Py_XDECREF(id);
    if (!pair && PyErr_Occurred()) return NULL;
    PyObject *op = pair ? PyTuple_GetItem(pair, 1) : NULL;
    if (op == Py_None) return call_it(self, func, args, kwargs, 1);
    if (!op || (PyObject *)Py_TYPE(op) != plain) {
        PyObject *empty = or_empty(kwargs);
        PyObject *result = empty ? PyObject_CallFunctionObjArgs(other, func, args, empty, NULL) : NULL;
        Py_XDECREF(empty);
        return result;
    }
    Py_INCREF(op);
    PyObject *taken = NULL, *result = run_and_take(self, func, op, args, kwargs, 1, &taken);
    Py_XDECREF(taken);
    Py_DECREF(op);
    return result;
}

// ---- as Python sees it ---------------------------------------------------------------------------------------------

static PyObject *equip(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *disable, *task, *enabled, *tracing, *sequence;
    if (!PyArg_ParseTuple(args, "OOOOO:equip", &disable, &task, &enabled, &tracing, &sequence)) return NULL;
    replace(&torch_disable, disable);
    replace(&torch_task, task);
    replace(&torch_grad_enabled, enabled);
    replace(&torch_tracing, tracing);
    replace(&torch_sequence, sequence);
    return Py_NewRef(Py_None);
}

static PyMethodDef kEquip = {"equip", equip, METH_VARARGS, NULL};

static PyMethodDef kMethods[] = {
    {"function", (PyCFunction)(void (*)(void))py_function, METH_FASTCALL, NULL},
    {"op", (PyCFunction)(void (*)(void))py_op, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static int taking_init(PyObject *object, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Taking *self = (Taking *)object;
    PyObject *engine, *taking, *places, *outside, *tensors, *flat, *gradients, *edges, *is_machinery;
    if (!PyArg_ParseTuple(args, "O!OOO!OO!OOO:Taking", calls_type, &engine, &taking, &places, &PyDict_Type, &outside,
                          &tensors, structures_type, &flat, &gradients, &edges, &is_machinery))
        return -1;
    if (!torch_disable) {
        PyErr_SetString(PyExc_RuntimeError, "Call `equip` first: it says how torch is asked.");
        return -1;
    }
    replace((PyObject **)&self->engine, engine);
    replace(&self->taking, taking);
    replace(&self->places, places);
    replace(&self->outside, outside);
    replace(&self->tensors, tensors);
    replace(&self->flat, flat);
    replace(&self->gradients, gradients);
    replace(&self->edges, edges);
    replace(&self->is_machinery, is_machinery);
    return 0;
}

static int taking_traverse(PyObject *object, visitproc visit, void *arg) {
    Taking *self = (Taking *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->engine);
    Py_VISIT(self->taking);
    Py_VISIT(self->places);
    Py_VISIT(self->outside);
    Py_VISIT(self->tensors);
    Py_VISIT(self->flat);
    Py_VISIT(self->gradients);
    Py_VISIT(self->edges);
    Py_VISIT(self->is_machinery);
    return code_visit(&self->codes, visit, arg);
}

static int taking_clear(PyObject *object) {
    Taking *self = (Taking *)object;
    Py_CLEAR(self->engine);
    Py_CLEAR(self->taking);
    Py_CLEAR(self->places);
    Py_CLEAR(self->outside);
    Py_CLEAR(self->tensors);
    Py_CLEAR(self->flat);
    Py_CLEAR(self->gradients);
    Py_CLEAR(self->edges);
    Py_CLEAR(self->is_machinery);
    code_clear(&self->codes);
    return 0;
}

static void taking_dealloc(PyObject *self) { end_object(self, taking_clear); }

static PyType_Slot kSlots[] = {
    {Py_tp_init, (void *)taking_init},   {Py_tp_methods, kMethods},
    {Py_tp_traverse, (void *)taking_traverse}, {Py_tp_clear, (void *)taking_clear},
    {Py_tp_dealloc, (void *)taking_dealloc},   {0, NULL},
};

static PyType_Spec kSpec = {
    "astray.capture._calls.Taking", sizeof(Taking), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots,
};

int add_taking(PyObject *module) {
    const struct {
        PyObject **place;
        const char *text;
    } texts[] = {
        {&s_enter, "__enter__"}, {&s_exit, "__exit__"}, {&s_is_plain, "is_plain"}, {&s_is_only_view, "is_only_view"}, {&s_inputs, "inputs"},
        {&s_outputs, "outputs"}, {&s_not_read, "not_read"}, {&s_written, "written"}, {&s_makes_buffers, "makes_buffers"},
        {&s_type, "type"}, {&s_observe_inputs, "observe_inputs"}, {&s_observe_unread, "observe_unread"},
        {&s_changed, "changed"}, {&s_watch, "watch"}, {&s_out, "out"}, {&s_name_place, "_site"},
        {&s_is_elsewhere, "_is_elsewhere"}, {&s_enter_backward, "_enter_backward"}, {&s_abandon, "abandon"},
        {&s_sees_ops, "sees_ops"}, {&s_sees_functions, "sees_functions"}, {&s_is_running, "is_running"}, {&s_run, "run"},
        {&s_waiting, "_waiting"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; ++i) {
        *texts[i].place = PyUnicode_InternFromString(texts[i].text);
        if (!*texts[i].place) return -1;
    }
    kNothing = PyList_New(0);
    taking_type = (PyTypeObject *)PyType_FromSpec(&kSpec);
    PyObject *function = PyCFunction_New(&kEquip, NULL);
    if (!kNothing || !taking_type || !function) return -1;
    if (PyModule_AddObject(module, "equip", function) < 0) return -1;
    return PyModule_AddObjectRef(module, "Taking", (PyObject *)taking_type);
}
