// Takes the calls of functions and ops into a recording: what `Taking` does in pytorch/calls/taking.py, with the part of
// `Places` that every call goes through, and the two modes that are told of calls.
//
// Speaks to torch by way of its Python objects alone.

#include "calls.h"

#include <limits.h>

PyTypeObject *taking_type;
PyObject *torch_disable, *torch_task, *torch_grad_enabled, *torch_tracing, *torch_sequence;

static PyObject *s_enter, *s_exit, *s_is_plain, *s_is_only_view, *s_inputs, *s_outputs, *s_not_read, *s_written, *s_makes_buffers, *s_type;
static PyObject *s_observe_inputs, *s_observe_unread, *s_changed, *s_watch, *s_gave_bad, *s_out, *s_name_place, *s_is_elsewhere;
static PyObject *s_enter_backward, *s_abandon, *s_sees_ops, *s_sees_functions, *s_is_running, *s_run, *s_run_mode;
static PyObject *s_waiting, *s_observe, *s_local, *s_marks, *s_latest, *s_numbers, *s_calls, *s_current, *s_sequence_nr;
static PyObject *s_op, *s_compiling;
static PyObject *kNothing, *torch_node, *torch_op, *torch_compiler, *torch_watching, *torch_overriding;

// ---- what torch is asked -------------------------------------------------------------------------------------------

static PyObject *spare_asides[8];  // that nobody is in, to be entered again
static int spares;

PyObject *aside_enter(void) {
    PyObject *aside = spares ? spare_asides[--spares] : PyObject_CallNoArgs(torch_disable);
    if (aside && done(CALL0(aside, s_enter)) < 0) Py_CLEAR(aside);
    return aside;
}

void aside_exit(PyObject *aside) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    const int failed = done(CALL(aside, s_exit, Py_None, Py_None, Py_None)) < 0;
    if (failed) PyErr_Clear();
    PyErr_Restore(type, error, traceback);
    if (!failed && spares < (int)(sizeof spare_asides / sizeof *spare_asides)) spare_asides[spares++] = aside;
    else Py_DECREF(aside);
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
    PyObject *places, *outside, *tensors, *flat, *gradients, *edges, *is_machinery, *origins;
    PyObject *traits;      // of callees
    PyObject *overriding;  // which classes of tensors have a `__torch_function__` of their own
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

// Where in a sorted list the numbers begin that are larger than `number`; -1 with an error set.
static Py_ssize_t number_after(PyObject *numbers, long long number) {
    Py_ssize_t low = 0, high = PyList_Size(numbers);
    while (low < high) {
        const Py_ssize_t middle = (low + high) / 2;
        const long long there = PyLong_AsLongLong(PyList_GetItem(numbers, middle));
        if (there == -1 && PyErr_Occurred()) return -1;
        if (there > number) high = middle;
        else low = middle + 1;
    }
    return low;
}

// The call that was running when autograd made its node of this number; NULL, with or without an error, when the marks
// are not as we know them. A new reference.
static PyObject *origin_of(Taking *self, long long number) {
    PyObject *local = PyObject_GetAttr(self->origins, s_local), *marks = local ? PyObject_GetAttr(local, s_marks) : NULL;
    Py_XDECREF(local);
    if (local && !marks) {  // a thread that made no nodes itself
        PyErr_Clear();
        marks = PyObject_GetAttr(self->origins, s_latest);
    }
    PyObject *numbers = marks ? PyObject_GetAttr(marks, s_numbers) : NULL, *origin = NULL;
    PyObject *calls = numbers ? PyObject_GetAttr(marks, s_calls) : NULL;
    if (calls && PyList_Check(numbers) && PyList_Check(calls) && PyList_Size(numbers) == PyList_Size(calls)) {
        const Py_ssize_t after = number_after(numbers, number);
        if (after >= 0) origin = Py_NewRef(after ? PyList_GetItem(calls, after - 1) : Py_None);
    }
    Py_XDECREF(marks);
    Py_XDECREF(numbers);
    Py_XDECREF(calls);
    return origin;
}

// The call whose forward made the node that the backward pass is at, None outside of modules. A new reference.
static PyObject *current_origin(Taking *self) {
    PyObject *node = PyObject_CallNoArgs(torch_node);
    if (!node || node == Py_None) return node;
    PyObject *given = CALL0(node, s_sequence_nr), *origin = NULL;
    Py_DECREF(node);
    long long number = given ? PyLong_AsLongLong(given) : -1;
    Py_XDECREF(given);
    if (number == -1 && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        number = LLONG_MAX;  // a node that comes after all others, such as one that sums up a parameter's gradient
    }
    if (number != -1) origin = origin_of(self, number);
    if (!origin) {
        PyErr_Clear();
        origin = CALL0(self->origins, s_current);
    }
    if (origin && origin != Py_None && Py_TYPE(origin) != open_call_type) {
        PyErr_Format(PyExc_TypeError, "%R is no open call.", origin);
        Py_CLEAR(origin);
    }
    return origin;
}

// The backward pass calls a function, outside of any module that runs. As `open_call`.
static PyObject *open_backward(Taking *self, PyObject *callee, PyObject *frame) {
    Calls *engine = self->engine;
    PyObject *found = current_origin(self), *call = NULL;
    if (!found) return NULL;
    OpenCall *origin = found == Py_None ? NULL : (OpenCall *)found;
    PyObject *site = find_site(self, origin, callee);
    const int wanted = site ? calls_want(engine, (Site *)site) : -1;
    if (wanted == 0) call = Py_NewRef(Py_None);
    if (wanted > 0) {
        const int again = frame == Py_None ? 0 : is_grad_enabled();  // checkpointing runs a part of the forward again
        PyObject *micro = origin ? origin->micro : engine->latest_micro;
        if (again > 0)
            call = (PyObject *)calls_enter(engine, (Site *)site, frame, s_forward, 1, origin ? micro : NULL, 1);
        else if (again == 0)
            call = CALL((PyObject *)engine, s_enter_backward, site, found, micro);
    }
    Py_XDECREF(site);
    Py_DECREF(found);
    return call;
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
        call = open_backward(self, callee, frame);
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

enum { kPlain = 1, kView = 2, kMakesBuffers = 4 };

// What a callee says of itself; asked once of each, for it stays what it is.
static int traits_of(Taking *self, PyObject *callee) {
    PyObject *known = PyDict_GetItemWithError(self->traits, callee);
    if (known || PyErr_Occurred()) return known ? (int)PyLong_AsLong(known) : -1;
    const int plain = attribute_is_true(callee, s_is_plain), view = attribute_is_true(callee, s_is_only_view);
    const int makes_buffers = attribute_is_true(callee, s_makes_buffers);
    if (plain < 0 || view < 0 || makes_buffers < 0) return -1;
    const int traits = (plain ? kPlain : view ? kView : 0) | (makes_buffers ? kMakesBuffers : 0);
    PyObject *number = PyLong_FromLong(traits);
    const int failed = !number || PyDict_SetItem(self->traits, callee, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : traits;
}

// What a call is: kPlain when all it does is to read its arguments and to return its result, kView when it only looks at
// its first argument in another way, neither with `out`; with kMakesBuffers, or without. -1 with an error set.
static int nature(Taking *self, PyObject *callee, PyObject *kwargs) {
    const int traits = traits_of(self, callee), has_out = traits < 0 ? -1 : kwargs ? PyDict_Contains(kwargs, s_out) : 0;
    return has_out < 0 ? -1 : has_out ? traits & kMakesBuffers : traits;
}

// Observes the inputs of a view, which does not read its first argument. -1 with an error set.
static int observe_inputs_of_view(Taking *self, OpenCall *call, PyObject *args, PyObject *inputs) {
    PyObject *first = PyTuple_Size(args) ? PyTuple_GetItem(args, 0) : NULL;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(inputs); ++i) {
        PyObject *one = PyList_GetItem(inputs, i), *path = PyTuple_GetItem(one, 0);
        PyObject *tensor = path ? PyTuple_GetItem(one, 1) : NULL;
        PyObject *observe = tensor == first ? s_observe_unread : s_observe;
        failed = !tensor || done(CALL(self->tensors, observe, call->seq, s_input, path, tensor)) < 0;
    }
    return failed ? -1 : 0;
}

static PyObject *or_empty(PyObject *kwargs) { return kwargs ? Py_NewRef(kwargs) : PyDict_New(); }

// Takes the inputs of a call that is recorded. -1 with an error set.
static int take_inputs(Taking *self, OpenCall *call, PyObject *callee, PyObject *args, PyObject *kwargs, int *is) {
    int watched = 0;
    if (self->gradients != Py_None && PyUnicode_Compare(call->phase, s_forward) == 0)
        watched = calls_follow_gradients(self->engine, call);
    if (watched > 0) watched = is_grad_enabled();
    if (watched < 0 || (!watched && !call->has_row)) return watched;
    if ((*is = nature(self, callee, kwargs)) < 0) return -1;
    PyObject *inputs = NULL, *skeleton = NULL, *unread = Py_NewRef(kNothing);
    int failed = -1;
    if (*is & (kPlain | kView)) {
        if (structures_arguments(self->flat, args, kwargs, &inputs, &skeleton) < 0) goto end;
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
    if (call->has_row) {
        if (calls_begin(self->engine, call, skeleton) < 0) goto end;
        if (*is & kView ? observe_inputs_of_view(self, call, args, inputs) < 0
                           : done(CALL(self->tensors, s_observe_inputs, call->seq, inputs, unread)) < 0)
            goto end;
    }
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

// A call starts: a new reference, None when it is not for us, NULL only for what is no Exception. `is` is set to what it
// is, when that was asked.
static PyObject *begin(Taking *self, PyObject *callee, PyObject *args, PyObject *kwargs, PyObject *frame, int *is) {
    PyObject *aside = aside_enter(), *call = aside ? open_call(self, callee, frame) : NULL;
    int failed = !call;
    if (call && call != Py_None && ((OpenCall *)call)->recorded)
        failed = take_inputs(self, (OpenCall *)call, callee, args, kwargs, is) < 0;
    if (aside) aside_exit(aside);
    if (!failed) return call;
    PyObject *type, *error, *traceback, *name;
    PyErr_Fetch(&type, &error, &traceback);
    name = PyObject_GetAttr(callee, s_type);
    PyErr_Restore(type, error, traceback);
    int told = calls_failed(self->engine, "a call of ", name ? name : Py_None);
    Py_XDECREF(name);
    // It is left, or whatever follows would seem to be inside it.
    if (call && call != Py_None) told = calls_leave_anyhow(self->engine, (OpenCall *)call);
    Py_XDECREF(call);
    return told < 0 ? NULL : Py_NewRef(Py_None);
}

// Takes what a call gave: the tensors with their paths, None when nobody asked for them. A new reference.
static PyObject *take_outputs(Taking *self, OpenCall *call, PyObject *callee, PyObject *args, PyObject *kwargs,
                              PyObject *result, int is) {
    if (is < 0 && (is = nature(self, callee, kwargs)) < 0) return NULL;
    const int plain = is & (kPlain | kView), makes_buffers = is & kMakesBuffers;
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
    int failed = count < 0, bad = 0;
    for (Py_ssize_t i = 0; !failed && i < count && (call->has_row || makes_buffers); ++i) {
        PyObject *one = PyList_GetItem(outputs, i), *path = PyTuple_GetItem(one, 0);
        PyObject *tensor = path ? PyTuple_GetItem(one, 1) : NULL;
        failed = !tensor;
        if (tensor && call->has_row) {
            PyObject *seen = CALL(self->tensors, s_observe_unread, call->seq, s_output, path, tensor);
            bad |= seen == Py_True;
            failed = done(seen) < 0;
        }
    }
    if (!failed && bad) {  // somebody wants to know
        PyObject *named = or_empty(kwargs);
        failed = !named || done(CALL(self->taking, s_gave_bad, (PyObject *)call, callee, args, named, outputs)) < 0;
        Py_XDECREF(named);
    }
    for (Py_ssize_t i = 0; !failed && makes_buffers && i < count; ++i)
        failed = done(CALL(self->tensors, s_changed, PyTuple_GetItem(PyList_GetItem(outputs, i), 1))) < 0;
    if (!failed && count && call->adapter != Py_None && self->gradients != Py_None)
        failed = done(CALL(self->gradients, s_watch, (PyObject *)self->engine, (PyObject *)call, call->adapter, outputs)) < 0;
    if (failed) Py_CLEAR(outputs);
    return outputs;
}

// A call has returned: what was taken, None when nobody asked; NULL only for what is no Exception.
static PyObject *end(Taking *self, OpenCall *call, PyObject *callee, PyObject *args, PyObject *kwargs, PyObject *result,
                     int is) {
    PyObject *taken = Py_None;
    Py_INCREF(taken);
    if (call->recorded) {
        PyObject *aside = aside_enter();
        put(&taken, aside ? take_outputs(self, call, callee, args, kwargs, result, is) : NULL);
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
    if (calls_leave_anyhow(self->engine, call) < 0) Py_CLEAR(taken);
    return taken;
}

// A call has raised: Python says so, and the program's own error goes on.
static void abandon(Taking *self, OpenCall *call) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    if (done(CALL(self->taking, s_abandon, (PyObject *)call, error)) < 0 &&
        calls_failed(self->engine, "the end of ", ((Site *)call->site)->name) < 0) {  // a signal handler's error comes first
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        return;
    }
    PyErr_Restore(type, error, traceback);
}

// ---- the modes -----------------------------------------------------------------------------------------------------

// What a mode is told of. The modes are classes of torch and Python: this is their other base, which answers for the
// method that torch calls without a line of Python. Whoever looks into the class, as dynamo does when it traces a mode,
// finds that method written in Python.
typedef struct {
    PyObject_HEAD
    PyObject *native;        // the method as torch gets it, NULL where it is to get the one in Python
    PyObject *name;          // of that method
    Taking *taking;          // NULL until `attach`
    PyObject *known, *plain, *underway;
    char is_op;
} Told;

// The frame that called us; with `behind`, the one that called that, for then it is the mode's own method. None where
// there is none, as on autograd's own threads. A new reference.
static PyObject *caller(int behind) {
    PyObject *own = (PyObject *)PyEval_GetFrame();  // borrowed
    return !own ? Py_NewRef(Py_None) : behind ? frame_back(own) : Py_NewRef(own);
}

// Whether a class of tensors has a `__torch_function__` of its own; asked once of each class. -1 with an error set.
static int class_overrides(Taking *self, PyObject *type) {
    PyObject *known = PyDict_GetItemWithError(self->overriding, type);
    if (known) return known == Py_True;
    if (PyErr_Occurred()) return -1;
    known = PyObject_CallFunctionObjArgs(torch_overriding, type, NULL);
    const int failed = !known || PyDict_SetItem(self->overriding, type, known) < 0, found = known == Py_True;
    Py_XDECREF(known);
    return failed ? -1 : found;
}

// Whether one of these arguments, or of the lists among them, is a tensor of such a class; -1 with an error set.
static int overrides(Taking *self, PyObject *one) {
    if (PyTuple_CheckExact(one) || PyList_CheckExact(one)) {
        const int is_list = PyList_CheckExact(one);
        int found = 0;
        for (Py_ssize_t i = 0; !found && i < (is_list ? PyList_Size(one) : PyTuple_Size(one)); ++i)
            found = overrides(self, is_list ? PyList_GetItem(one, i) : PyTuple_GetItem(one, i));
        return found;
    }
    if (one == Py_None || PyLong_Check(one) || PyFloat_Check(one) || PyUnicode_Check(one)) return 0;
    return class_overrides(self, (PyObject *)Py_TYPE(one));
}

static int call_overrides(Taking *self, PyObject *args, PyObject *kwargs) {
    int found = overrides(self, args);
    Py_ssize_t at = 0;
    PyObject *value;
    while (!found && kwargs && PyDict_Next(kwargs, &at, NULL, &value)) found = overrides(self, value);
    return found;
}

// `Places.run` does the same in Python: it sees to ops that a function mode is told of, or a class of tensors would be.
static PyObject *call_it(Taking *self, PyObject *func, PyObject *args, PyObject *kwargs, int is_op) {
    int told = is_op ? attribute_is_true(self->places, s_sees_functions) : 0;
    if (is_op && !told) told = call_overrides(self, args, kwargs);
    if (told < 0) return NULL;
    if (!told && (PyObject *)Py_TYPE(func) == torch_op) {  // whose own method does nothing but this
        PyObject *op = PyObject_GetAttr(func, s_op), *result = op ? PyObject_Call(op, args, kwargs) : NULL;
        Py_XDECREF(op);
        return result;
    }
    if (!told) return PyObject_Call(func, args, kwargs);
    PyObject *given = or_empty(kwargs);
    PyObject *result = given ? CALL(self->places, s_run, func, args, given) : NULL;
    Py_XDECREF(given);
    return result;
}

// Runs a function or op and takes its call. `taken` is set to what came out of it, to be let go of.
static PyObject *run_and_take(Told *mode, PyObject *func, PyObject *callee, PyObject *args, PyObject *kwargs, int behind,
                              PyObject **taken) {
    Taking *self = mode->taking;
    PyObject *frame = caller(behind);
    int is = -1;
    PyObject *call = frame ? begin(self, callee, args, kwargs, frame, &is) : NULL;
    Py_XDECREF(frame);
    if (!call) return NULL;
    PyObject *result = call_it(self, func, args, kwargs, mode->is_op);
    if (call != Py_None) {
        if (!result) {
            abandon(self, (OpenCall *)call);
        } else if (!(*taken = end(self, (OpenCall *)call, callee, args, kwargs, result, is))) {
            Py_CLEAR(result);
        }
    }
    Py_DECREF(call);
    return result;
}

// Hands a call over to the mode's own method in Python.
static PyObject *run_in_python(Told *self, PyObject *func, PyObject *args, PyObject *kwargs, int behind) {
    PyObject *given = or_empty(kwargs), *frame = given ? caller(behind) : NULL;
    PyObject *result = frame ? CALL((PyObject *)self, s_run_mode, func, args, given, frame) : NULL;
    Py_XDECREF(given);
    Py_XDECREF(frame);
    return result;
}

// A function mode is told of a call.
static PyObject *take_function(Told *self, PyObject *func, PyObject *args, PyObject *kwargs, int behind) {
    PyObject *function = PyDict_GetItemWithError(self->known, func), *places = self->taking->places;
    if (!function && PyErr_Occurred()) return NULL;
    if (function == Py_None || !self->taking->engine->listening) return PyObject_Call(func, args, kwargs);
    int is_ours = function && (PyObject *)Py_TYPE(function) == self->plain;
    if (is_ours) {
        PyObject *waiting = PyObject_GetAttr(self->underway, s_waiting);
        if (!waiting) return NULL;
        is_ours = PyList_Size(waiting) == 0;
        Py_DECREF(waiting);
    }
    if (!is_ours) return run_in_python(self, func, args, kwargs, behind);
    const int sees_ops = attribute_is_true(places, s_sees_ops);
    if (sees_ops < 0) return NULL;
    if (sees_ops) {
        PyObject *running = CALL(places, s_is_running, func);
        Py_XDECREF(running);
        if (!running) return NULL;
        if (running == Py_True) return PyObject_Call(func, args, kwargs);
    }
    Py_INCREF(function);
    PyObject *taken = NULL, *result = run_and_take(self, func, function, args, kwargs, behind, &taken);
    if (result && taken && PyList_Check(taken) && !PyList_Size(taken) && PyDict_SetItem(self->known, func, Py_None) < 0 &&
        calls_failed(self->taking->engine, "a call of ", func) < 0)
        Py_CLEAR(result);  // it tells something about a tensor; not worth recording again
    Py_XDECREF(taken);
    Py_DECREF(function);
    return result;
}

// An op mode is told of a call.
static PyObject *take_op(Told *self, PyObject *func, PyObject *args, PyObject *kwargs, int behind) {
    if (!self->taking->engine->listening) return call_it(self->taking, func, args, kwargs, 1);
    PyObject *id = PyLong_FromVoidPtr(func), *pair = id ? PyDict_GetItemWithError(self->known, id) : NULL;
    Py_XDECREF(id);
    if (!pair && PyErr_Occurred()) return NULL;
    PyObject *op = pair ? PyTuple_GetItem(pair, 1) : NULL;
    if (op == Py_None) return call_it(self->taking, func, args, kwargs, 1);
    if (!op || (PyObject *)Py_TYPE(op) != self->plain) return run_in_python(self, func, args, kwargs, behind);
    Py_INCREF(op);
    PyObject *taken = NULL, *result = run_and_take(self, func, op, args, kwargs, behind, &taken);
    Py_XDECREF(taken);
    Py_DECREF(op);
    return result;
}

static PyObject *take_told(Told *self, PyObject *func, PyObject *args, PyObject *kwargs, int behind) {
    if (kwargs == Py_None) kwargs = NULL;
    if (!PyTuple_Check(args) || (kwargs && !PyDict_Check(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "A mode is told of a call by its function, a tuple and a dict of arguments.");
        return NULL;
    }
    return (self->is_op ? take_op : take_function)(self, func, args, kwargs, behind);
}

// Whether a compiler traces what runs now, or compiles each function that starts.
static int is_compiler_near(void) {
    PyObject *tracing = PyDict_GetItemWithError(torch_compiler, s_compiling);
    if (tracing != Py_False) return 1;
    PyObject *callback = PyObject_CallNoArgs(torch_watching);
    Py_XDECREF(callback);
    return callback != Py_None;
}

// The mode's method in Python, for a call that is not as torch makes it, or where a compiler is near.
static PyObject *tell_python(Told *self, PyObject *const *given, Py_ssize_t count, PyObject *names) {
    PyObject *method = PyObject_GenericGetAttr((PyObject *)self, self->name), *result = NULL;
    PyObject *args = method ? PyTuple_New(count) : NULL, *kwargs = args ? PyDict_New() : NULL;
    int failed = !kwargs;
    for (Py_ssize_t i = 0; !failed && i < count; ++i) failed = PyTuple_SetItem(args, i, Py_NewRef(given[i])) < 0;
    for (Py_ssize_t i = 0; !failed && names && i < PyTuple_Size(names); ++i)
        failed = PyDict_SetItem(kwargs, PyTuple_GetItem(names, i), given[count + i]) < 0;
    if (!failed) result = PyObject_Call(method, args, kwargs);
    Py_XDECREF(method);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return result;
}

// The mode's method as torch calls it: (func, types, args, kwargs), without the last when there are none.
static PyObject *tell(PyObject *object, PyObject *const *given, Py_ssize_t count, PyObject *names) {
    Told *self = (Told *)object;
    if ((count == 3 || count == 4) && !names && !is_compiler_near())
        return take_told(self, given[0], given[2], count == 4 ? given[3] : NULL, 0);
    PyErr_Clear();
    return tell_python(self, given, count, names);
}

static PyMethodDef kTell = {"tell", (PyCFunction)(void (*)(void))tell, METH_FASTCALL | METH_KEYWORDS, NULL};

// attach(name, is_op, taking, known, plain, underway): from now on calls are taken. `known` has what is known of
// functions, of ops as pairs by their ids; `plain` is the type of those that are taken here, `_run` takes the rest.
static PyObject *told_attach(PyObject *object, PyObject *args) {
    Told *self = (Told *)object;
    PyObject *name, *taking, *known, *plain, *underway;
    int is_op;
    if (!PyArg_ParseTuple(args, "UpO!O!OO:attach", &name, &is_op, taking_type, &taking, &PyDict_Type, &known, &plain,
                          &underway))
        return NULL;
    replace(&self->name, name);
    replace((PyObject **)&self->taking, taking);
    replace(&self->known, known);
    replace(&self->plain, plain);
    replace(&self->underway, underway);
    self->is_op = (char)is_op;
    if (torch_compiler != Py_None && torch_watching != Py_None) {
        PyObject *native = PyCFunction_New(&kTell, object);
        if (!native) return NULL;
        put(&self->native, native);
    }
    return Py_NewRef(Py_None);
}

// _take(func, args, kwargs): the same for the method in Python, which calls this and nothing else does.
static PyObject *told_take(PyObject *object, PyObject *given) {
    PyObject *func, *args, *kwargs;
    if (!PyArg_ParseTuple(given, "OOO:_take", &func, &args, &kwargs)) return NULL;
    if (((Told *)object)->taking) return take_told((Told *)object, func, args, kwargs, 1);
    PyErr_SetString(PyExc_RuntimeError, "Call `attach` first: it says who takes calls.");
    return NULL;
}

static PyObject *told_getattr(PyObject *object, PyObject *name) {
    const Told *self = (Told *)object;
    if (self->native && (name == self->name || (PyUnicode_Check(name) && PyUnicode_Compare(name, self->name) == 0)))
        return Py_NewRef(self->native);
    return PyObject_GenericGetAttr(object, name);
}

static int told_traverse(PyObject *object, visitproc visit, void *arg) {
    Told *self = (Told *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->native);
    Py_VISIT(self->taking);
    Py_VISIT(self->known);
    Py_VISIT(self->plain);
    Py_VISIT(self->underway);
    return 0;
}

static int told_clear(PyObject *object) {
    Told *self = (Told *)object;
    Py_CLEAR(self->native);
    Py_CLEAR(self->name);
    Py_CLEAR(self->taking);
    Py_CLEAR(self->known);
    Py_CLEAR(self->plain);
    Py_CLEAR(self->underway);
    return 0;
}

static void told_dealloc(PyObject *self) { end_object(self, told_clear); }

static PyMethodDef kToldMethods[] = {
    {"attach", told_attach, METH_VARARGS, NULL},
    {"_take", told_take, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kToldSlots[] = {
    {Py_tp_getattro, (void *)told_getattr}, {Py_tp_methods, kToldMethods},
    {Py_tp_traverse, (void *)told_traverse}, {Py_tp_clear, (void *)told_clear},
    {Py_tp_dealloc, (void *)told_dealloc}, {0, NULL},
};

static PyType_Spec kToldSpec = {
    "astray.capture._calls.Told", sizeof(Told), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, kToldSlots,
};

// ---- as Python sees it ---------------------------------------------------------------------------------------------

// equip(disable, task, enabled, tracing, sequence, node, op, compiler, watching, overriding): how torch is asked. `op` is
// the type of operators, `compiler` what torch.compiler has, `watching` tells whether dynamo is; these three may be None.
// `overriding` tells whether a class of tensors has a `__torch_function__` of its own.
static PyObject *equip(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject **places[] = {&torch_disable, &torch_task, &torch_grad_enabled, &torch_tracing, &torch_sequence,
                           &torch_node,    &torch_op,   &torch_compiler,     &torch_watching, &torch_overriding};
    const Py_ssize_t count = sizeof places / sizeof *places;
    if (PyTuple_Size(args) != count)
        return PyErr_Format(PyExc_TypeError, "`equip` takes %zd arguments, not %zd.", count, PyTuple_Size(args));
    PyObject *compiler = PyTuple_GetItem(args, 7);
    if (compiler != Py_None && !PyDict_Check(compiler))
        return PyErr_Format(PyExc_TypeError, "%R is no namespace.", compiler);
    for (Py_ssize_t i = 0; i < count; ++i) replace(places[i], PyTuple_GetItem(args, i));
    return Py_NewRef(Py_None);
}

static PyMethodDef kEquip = {"equip", equip, METH_VARARGS, NULL};

static int taking_init(PyObject *object, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Taking *self = (Taking *)object;
    PyObject *engine, *taking, *places, *outside, *tensors, *flat, *gradients, *edges, *is_machinery, *origins;
    if (!PyArg_ParseTuple(args, "O!OOO!OO!OOOO:Taking", calls_type, &engine, &taking, &places, &PyDict_Type, &outside,
                          &tensors, structures_type, &flat, &gradients, &edges, &is_machinery, &origins))
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
    replace(&self->origins, origins);
    put(&self->traits, PyDict_New());
    put(&self->overriding, PyDict_New());
    return self->traits && self->overriding ? 0 : -1;
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
    Py_VISIT(self->origins);
    Py_VISIT(self->traits);
    Py_VISIT(self->overriding);
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
    Py_CLEAR(self->origins);
    Py_CLEAR(self->traits);
    Py_CLEAR(self->overriding);
    code_clear(&self->codes);
    return 0;
}

static void taking_dealloc(PyObject *self) { end_object(self, taking_clear); }

static PyType_Slot kSlots[] = {
    {Py_tp_init, (void *)taking_init},   {Py_tp_traverse, (void *)taking_traverse},
    {Py_tp_clear, (void *)taking_clear}, {Py_tp_dealloc, (void *)taking_dealloc}, {0, NULL},
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
        {&s_gave_bad, "gave_bad"},
        {&s_changed, "changed"}, {&s_watch, "watch"}, {&s_out, "out"}, {&s_name_place, "_site"},
        {&s_is_elsewhere, "_is_elsewhere"}, {&s_enter_backward, "enter_backward"}, {&s_abandon, "abandon"},
        {&s_sees_ops, "sees_ops"}, {&s_sees_functions, "sees_functions"}, {&s_is_running, "is_running"}, {&s_run, "run"},
        {&s_waiting, "_waiting"}, {&s_observe, "observe"}, {&s_local, "_local"}, {&s_marks, "marks"},
        {&s_latest, "_latest"}, {&s_numbers, "numbers"}, {&s_calls, "calls"}, {&s_current, "current"},
        {&s_sequence_nr, "_sequence_nr"}, {&s_op, "_op"}, {&s_run_mode, "_run"}, {&s_compiling, "_is_compiling_flag"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; ++i) {
        *texts[i].place = PyUnicode_InternFromString(texts[i].text);
        if (!*texts[i].place) return -1;
    }
    kNothing = PyList_New(0);
    taking_type = (PyTypeObject *)PyType_FromSpec(&kSpec);
    PyObject *told = PyType_FromSpec(&kToldSpec), *function = PyCFunction_New(&kEquip, NULL);
    if (!kNothing || !taking_type || !told || !function) return -1;
    if (PyModule_AddObject(module, "equip", function) < 0 || PyModule_AddObject(module, "Told", told) < 0) return -1;
    return PyModule_AddObjectRef(module, "Taking", (PyObject *)taking_type);
}
