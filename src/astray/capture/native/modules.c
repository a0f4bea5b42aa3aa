// Takes the calls of modules into a recording: what `ModuleCapture` and its hooks do in pytorch/calls/modules.py.
//
// torch calls the hooks natively, but for where a compiler has to do with them; see hooks.h.

#include "calls.h"
#include "hooks.h"

PyTypeObject *modules_type;
static PyTypeObject *before_type, *after_type;

static PyObject *s_called, *s_first_call, *s_called_place, *s_layers, *s_check, *s_whole, *s_modes, *s_follow, *s_unfollow, *s_thread;
static PyObject *s_wanted, *s_local, *s_marks, *s_latest, *s_numbers, *s_calls, *s_mark, *s_observe, *s_watch, *s_gave_bad, *s_observe_state, *s_note_exception, *s_children;
static PyObject *s_direct, *s_lists, *s_of, *s_module_modules, *s_parameters, *s_buffers, *s_compiled, *s_dict, *s_context;
static PyObject *s_hooked, *s_version, *s_data_ptr, *s_numel, *s_sources;

typedef struct {
    PyObject_HEAD
    Calls *engine;
    PyObject *capture;  // the Python twin, for what is out of the ordinary
    PyObject *flat, *tensors, *gradients, *edges, *modes, *origins, *fast_paths, *gatherings, *parameters, *states;
    PyObject *parameter_type, *hooked;
    unsigned long thread;  // the one that the modes are on for
    char called;
} Modules;

#define OBJECTS(X)                                                                                        \
    X(engine) X(capture) X(flat) X(tensors) X(gradients) X(edges) X(modes) X(origins) X(fast_paths)       \
    X(gatherings) X(parameters) X(states) X(parameter_type) X(hooked)

// ---- parameters and buffers ----------------------------------------------------------------------------------------

#define ROOT_NAME "<root>"  // astray.record.ROOT

enum { kMost = 16, kMarks = 100000 };  // parameters of one module that are compared here; marks of one thread

typedef struct {
    int64_t id, version, address, size;
} Known;

static int read_integer(PyObject *value, int64_t *number) {
    if (!value) return -1;
    *number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

// Whether a dict has a value other than None.
static int has_any(PyObject *dict) {
    Py_ssize_t at = 0;
    PyObject *value;
    while (PyDict_Next(dict, &at, NULL, &value)) {
        if (value != Py_None) return 1;
    }
    return 0;
}

// What tells whether the parameters are still the same. Their number, or -1 when Python should look at them.
static int read_parameters(Modules *self, PyObject *parameters, Known *known) {
    Py_ssize_t at = 0;
    PyObject *name, *tensor;
    int count = 0;
    while (PyDict_Next(parameters, &at, &name, &tensor)) {
        if (tensor == Py_None) continue;
        if (count == kMost || (PyObject *)Py_TYPE(tensor) != self->parameter_type || !PyUnicode_Check(name)) return -1;
        if (PyUnicode_FindChar(name, '.', 0, PyUnicode_GetLength(name), 1) != -1) return -1;
        Known *one = &known[count++];
        one->id = (int64_t)(intptr_t)tensor;
        if (read_integer(PyObject_GetAttr(tensor, s_version), &one->version) < 0 ||
            read_integer(CALL0(tensor, s_data_ptr), &one->address) < 0 ||
            read_integer(CALL0(tensor, s_numel), &one->size) < 0) {
            PyErr_Clear();  // made in inference mode, or not dense: it cannot be told
            return -1;
        }
    }
    return count;
}

// Whether the module is run by torch.compile, or may be; -1 with an error set.
static int may_be_compiled(PyObject *module) {
    PyObject *compiled = PyObject_GetAttr(module, s_compiled), *own;
    Py_XDECREF(compiled);
    if (compiled != Py_None) return compiled ? 1 : -1;
    own = PyObject_GetAttr(module, s_dict);
    const int found = own ? PyDict_Contains(own, s_context) : -1;
    Py_XDECREF(own);
    return found;
}

static int hand_state_over(Modules *self, Site *site, PyObject *module, OpenCall *call) {
    return done(CALL(self->capture, s_observe_state, (PyObject *)site, module, call->seq));
}

// Whether the gradients of a parameter are seen already, as ParameterCapture knows; -1 with an error set.
static int is_hooked(const Modules *self, PyObject *tensor) {
    PyObject *key = PyLong_FromVoidPtr(tensor);
    PyObject *reference = key ? PyDict_GetItemWithError(self->hooked, key) : NULL;
    Py_XDECREF(key);
    if (!reference) return PyErr_Occurred() ? -1 : 0;
    return PyWeakref_GetObject(reference) == tensor;
}

static int observe_parameters(Modules *self, Site *site, PyObject *parameters, OpenCall *call) {
    PyObject *items = PyDict_Items(parameters);  // a copy: the program may change it while we look
    const Py_ssize_t size = items ? PyList_Size(items) : -1;
    const int is_root = PyUnicode_CompareWithASCIIString(site->name, ROOT_NAME) == 0;
    int failed = size < 0;
    for (Py_ssize_t i = 0; !failed && i < size; ++i) {
        PyObject *item = PyList_GetItem(items, i), *name = PyTuple_GetItem(item, 0), *tensor = PyTuple_GetItem(item, 1);
        if (tensor == Py_None) continue;
        failed = done(CALL(self->tensors, s_observe, call->seq, s_parameter, name, tensor)) < 0;
        const int hooked = failed ? -1 : is_hooked(self, tensor);
        failed = hooked < 0;
        if (hooked) continue;
        // It may have been made, replaced or unfrozen since the start.
        PyObject *full = is_root ? Py_NewRef(name) : PyUnicode_FromFormat("%U.%U", site->name, name);
        failed = !full || done(CALL(self->parameters, s_watch, tensor, full, site->name, site->root)) < 0;
        Py_XDECREF(full);
    }
    Py_XDECREF(items);
    return failed ? -1 : 0;
}

// The module's own parameters and buffers, at its first call of a step and whenever they have changed.
static int observe_state(Modules *self, Site *site, PyObject *module, OpenCall *call) {
    PyObject *parameters = PyObject_GetAttr(module, s_parameters), *buffers = PyObject_GetAttr(module, s_buffers);
    PyObject *sources = PyObject_GetAttr(self->gatherings, s_sources), *now = NULL;
    int failed = -1;
    if (!parameters || !buffers || !sources || !PyDict_Check(parameters) || !PyDict_Check(buffers)) {
        PyErr_Clear();
        failed = hand_state_over(self, site, module, call);
        goto end;
    }
    const int compiled = may_be_compiled(module);
    if (compiled < 0) goto end;
    if (!compiled && !PyDict_Size(parameters) && !PyDict_Size(buffers)) {
        failed = 0;
        goto end;
    }
    Known known[kMost];
    int count = -1;
    if (!compiled && !has_any(buffers) && !PyDict_Size(sources)) count = read_parameters(self, parameters, known);
    if (count < 0) {
        failed = hand_state_over(self, site, module, call);
        goto end;
    }
    now = PyBytes_FromStringAndSize((const char *)known, count * (Py_ssize_t)sizeof(Known));
    if (!now) goto end;
    PyObject *then = PyDict_GetItemWithError(self->states, site->name);
    if (!then && PyErr_Occurred()) goto end;
    if (then && PyBytes_Check(then) && PyBytes_Size(then) == PyBytes_Size(now) &&
        !memcmp(PyBytes_AsString(then), PyBytes_AsString(now), (size_t)PyBytes_Size(now))) {
        failed = 0;
        goto end;
    }
    if (PyDict_SetItem(self->states, site->name, now) == 0) failed = observe_parameters(self, site, parameters, call);
end:
    Py_XDECREF(parameters);
    Py_XDECREF(buffers);
    Py_XDECREF(sources);
    Py_XDECREF(now);
    return failed;
}

// ---- a call --------------------------------------------------------------------------------------------------------

// What must be in order before a module runs. -1 with an error set.
static int check_module(Modules *self, PyObject *module) {
    if (!self->called && PyObject_SetAttr(self->capture, s_called, Py_True) < 0) return -1;
    self->called = 1;
    PyObject *layers = PyObject_GetAttr(self->fast_paths, s_layers);
    const Py_ssize_t count = layers ? PyList_Size(layers) : -1;
    Py_XDECREF(layers);
    if (count < 0 || (count && done(CALL0(self->fast_paths, s_check)) < 0)) return -1;
    PyObject *whole = PyObject_GetAttr(self->gatherings, s_whole);
    const int is_whole = whole ? PySet_Contains(whole, (PyObject *)Py_TYPE(module)) : -1;
    Py_XDECREF(whole);
    return is_whole < 0 ? -1 : is_whole ? 0 : done(CALL(self->gatherings, s_check, module));
}

// Modes are followed to other threads; on their own they are on already.
static int is_own_thread(const Modules *self) { return PyThread_get_thread_ident() == self->thread; }

// Records tensors with their paths: 1 when one of them holds NaN or infinities and somebody wants to know, -1 with an
// error set.
static int observe_all(Modules *self, OpenCall *call, PyObject *role, PyObject *found) {
    int bad = 0;
    const Py_ssize_t count = PyList_Size(found);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *one = PyList_GetItem(found, i);
        PyObject *seen = CALL(self->tensors, s_observe, call->seq, role, PyTuple_GetItem(one, 0), PyTuple_GetItem(one, 1));
        bad |= seen == Py_True;
        if (done(seen) < 0) return -1;
    }
    return count < 0 ? -1 : bad;
}

// Notes which call the nodes of autograd that are made from now on belong to, as `Origins` does. -1 with an error set.
static int mark(Modules *self, PyObject *call) {
    const int wanted = attribute_is_true(self->origins, s_wanted), enabled = wanted > 0 ? is_grad_enabled() : wanted;
    if (enabled <= 0) return enabled;
    PyObject *local = PyObject_GetAttr(self->origins, s_local), *marks = local ? PyObject_GetAttr(local, s_marks) : NULL;
    PyObject *latest = marks ? PyObject_GetAttr(self->origins, s_latest) : NULL;
    PyObject *numbers = latest == marks && marks ? PyObject_GetAttr(marks, s_numbers) : NULL;
    PyObject *calls = numbers ? PyObject_GetAttr(marks, s_calls) : NULL;
    int failed;
    if (calls && PyList_Size(numbers) < kMarks) {
        PyObject *number = PyObject_CallNoArgs(torch_sequence);
        failed = !number || PyList_Append(numbers, number) < 0 || PyList_Append(calls, call) < 0 ? -1 : 0;
        Py_XDECREF(number);
    } else {  // the first mark of this thread, one too many, or another thread's came in between
        PyErr_Clear();
        failed = done(CALL(self->origins, s_mark, call));
    }
    Py_XDECREF(local);
    Py_XDECREF(marks);
    Py_XDECREF(latest);
    Py_XDECREF(numbers);
    Py_XDECREF(calls);
    return failed;
}

// A module is about to run. -1 with an error set.
static int enter(Modules *self, Site *site, PyObject *module, PyObject *args, PyObject *kwargs, PyObject *frame) {
    const int recompute = check_module(self, module) < 0 ? -1 : is_passing();  // a forward inside a backward
    OpenCall *call = recompute < 0 ? NULL : calls_enter(self->engine, site, frame, s_forward, recompute, NULL, 1);
    if (!call) return -1;
    PyObject *inputs = NULL, *skeleton = NULL;
    int failed = -1;
    if (!is_own_thread(self) && done(CALL(self->modes, s_follow, (PyObject *)call)) < 0) goto end;
    if (mark(self, (PyObject *)call) < 0) goto end;
    if (!call->recorded) {
        failed = 0;
        goto end;
    }
    if (structures_arguments(self->flat, args, kwargs, &inputs, &skeleton) < 0) goto end;
    if (call->has_row && (calls_begin(self->engine, call, skeleton) < 0 || observe_all(self, call, s_input, inputs) < 0 ||
                          observe_state(self, site, module, call) < 0))
        goto end;
    int followed = calls_follow_gradients(self->engine, call);
    if (followed > 0) followed = is_grad_enabled();
    if (followed > 0) {
        PyObject *edges = PyObject_CallFunctionObjArgs(self->edges, inputs, NULL);
        if (!edges) goto end;
        put(&call->adapter, edges);
    }
    failed = followed < 0 ? -1 : 0;
end:
    Py_XDECREF(inputs);
    Py_XDECREF(skeleton);
    Py_DECREF(call);
    return failed;
}

static int take_result(Modules *self, OpenCall *call, PyObject *result) {
    if (result == Py_None && !call->recompute &&
        done(CALL(self->capture, s_note_exception, call->site, call->frame)) < 0)
        return -1;
    PyObject *outputs = structures_result(self->flat, result);
    const int seen = outputs && call->has_row ? observe_all(self, call, s_output, outputs) : 0;
    int failed = !outputs || seen < 0;
    if (seen > 0) failed = done(CALL(self->capture, s_gave_bad, (PyObject *)call, outputs)) < 0;
    if (!failed && call->adapter != Py_None)
        failed = done(CALL(self->gradients, s_watch, (PyObject *)self->engine, (PyObject *)call, call->adapter, outputs)) < 0;
    Py_XDECREF(outputs);
    return failed ? -1 : 0;
}

// What follows on a call whether or not its result could be taken.
static int finish(Modules *self, OpenCall *call, PyObject *open) {
    replace(&call->adapter, Py_None);
    int failed = !is_own_thread(self) && done(CALL(self->modes, s_unfollow, (PyObject *)call)) < 0;
    failed |= calls_leave(self->engine, call) < 0;
    if (failed) return -1;
    const Py_ssize_t depth = PyList_Size(open);
    return mark(self, depth ? PyList_GetItem(open, depth - 1) : Py_None);
}

// A module has run. -1 with an error set.
static int leave(Modules *self, PyObject *site, PyObject *result) {
    PyObject *open = calls_open(self->engine);
    if (!open) return -1;
    Py_ssize_t at = PyList_Size(open);
    OpenCall *call = NULL;
    while (at && !call) {
        OpenCall *one = (OpenCall *)PyList_GetItem(open, --at);
        if (one->site == site) call = one;
    }
    int failed = 0;
    if (call) {
        Py_INCREF(call);
        failed = call->recorded ? take_result(self, call, result) : 0;
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        if (finish(self, call, open) < 0) {
            // The first error is the one to tell of, unless the second is the program's.
            if (failed && calls_failed(self->engine, "the end of ", ((Site *)site)->name) < 0) {
                Py_CLEAR(type);
                Py_CLEAR(error);
                Py_CLEAR(traceback);
            }
            failed = -1;
        }
        if (type) PyErr_Restore(type, error, traceback);
        Py_DECREF(call);
    }
    Py_DECREF(open);
    return failed;
}

static PyObject *py_enter(PyObject *self, PyObject *given) {
    PyObject *site, *module, *args, *kwargs, *frame;
    if (!PyArg_ParseTuple(given, "O!OOOO:enter", site_type, &site, &module, &args, &kwargs, &frame)) return NULL;
    return enter((Modules *)self, (Site *)site, module, args, kwargs, frame) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *py_leave(PyObject *self, PyObject *given) {
    PyObject *site, *result;
    if (!PyArg_ParseTuple(given, "OO:leave", &site, &result)) return NULL;
    return leave((Modules *)self, site, result) < 0 ? NULL : Py_NewRef(Py_None);
}

static int modules_init(PyObject *object, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Modules *self = (Modules *)object;
    PyObject *engine, *capture, *flat, *tensors, *gradients, *edges, *modes, *origins, *fast_paths, *gatherings, *parameters;
    PyObject *states, *parameter_type;
    if (!PyArg_ParseTuple(args, "O!OO!OOOOOOOOO!O:Modules", calls_type, &engine, &capture, structures_type, &flat, &tensors,
                          &gradients, &edges, &modes, &origins, &fast_paths, &gatherings, &parameters, &PyDict_Type, &states,
                          &parameter_type))
        return -1;
    PyObject *thread = PyObject_GetAttr(modes, s_thread), *hooked = thread ? PyObject_GetAttr(parameters, s_hooked) : NULL;
    if (thread) self->thread = PyLong_AsUnsignedLong(thread);
    if (hooked && !PyDict_Check(hooked)) PyErr_SetString(PyExc_TypeError, "`hooked` is no dict.");
    Py_XDECREF(thread);
    Py_XDECREF(hooked);  // which `parameters` keeps
    if (!thread || !hooked || PyErr_Occurred()) return -1;
#define KEEP(field) replace((PyObject **)&self->field, field);
    OBJECTS(KEEP)
    return 0;
}

#define VISIT(field) Py_VISIT(self->field);
#define CLEAR(field) Py_CLEAR(self->field);

static int modules_traverse(PyObject *object, visitproc visit, void *arg) {
    Modules *self = (Modules *)object;
    Py_VISIT(Py_TYPE(object));
    OBJECTS(VISIT)
    return 0;
}

static int modules_clear(PyObject *object) {
    Modules *self = (Modules *)object;
    OBJECTS(CLEAR)
    return 0;
}

static void modules_dealloc(PyObject *self) { end_object(self, modules_clear); }

static PyMethodDef kModulesMethods[] = {
    {"enter", py_enter, METH_VARARGS, NULL},
    {"leave", py_leave, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kModulesSlots[] = {
    {Py_tp_init, (void *)modules_init},
    {Py_tp_methods, kModulesMethods},
    {Py_tp_traverse, (void *)modules_traverse},
    {Py_tp_clear, (void *)modules_clear},
    {Py_tp_dealloc, (void *)modules_dealloc},
    {0, NULL},
};

static PyType_Spec kModulesSpec = {
    "astray.capture._calls.Modules", sizeof(Modules), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kModulesSlots,
};

// ---- hooks ---------------------------------------------------------------------------------------------------------

// Sits on a module: one kind before its call, another after it. `action` is None for what is always done.
typedef struct {
    PyObject_HEAD
    Modules *modules;
    PyObject *engine, *site, *place, *action, *follow;
} Hook;

#define HOOK_OBJECTS(X) X(modules) X(engine) X(site) X(place) X(action) X(follow)

// Whether nothing may be done now; -1 with an error set.
static int sleeps(Hook *self) {
    Calls *engine = self->modules->engine;
    if (!engine->recording) {
        PyObject *open = calls_open(engine);
        const Py_ssize_t depth = open ? PyList_Size(open) : -1;
        Py_XDECREF(open);
        if (depth <= 0) return depth < 0 ? -1 : 1;
    }
    PyObject *tracing = PyObject_CallNoArgs(torch_tracing);
    Py_XDECREF(tracing);
    return tracing ? tracing != Py_None || !engine->is_here : -1;
}

// Whether the modules right below one are those that are known; -1 with an error set.
static int has_its_children(PyObject *place, PyObject *module) {
    PyObject *children = PyObject_GetAttr(place, s_children);
    PyObject *direct = children ? PyObject_GetAttr(children, s_direct) : NULL;
    PyObject *lists = direct ? PyObject_GetAttr(children, s_lists) : NULL;
    PyObject *now = lists ? PyObject_GetAttr(module, s_module_modules) : NULL;
    int answer = -1;
    if (now && (PyList_Size(lists) || !PyDict_Check(now))) {
        PyObject *same = CALL(children, s_of, module);
        answer = same ? PyObject_IsTrue(same) : -1;
        Py_XDECREF(same);
    } else if (now) {
        const Py_ssize_t size = PyTuple_Size(direct);
        Py_ssize_t at = 0, i = 0;
        PyObject *child;
        answer = PyDict_Size(now) == size;
        while (answer && i < size && PyDict_Next(now, &at, NULL, &child)) answer = child == PyTuple_GetItem(direct, i++);
    }
    Py_XDECREF(children);
    Py_XDECREF(direct);
    Py_XDECREF(lists);
    Py_XDECREF(now);
    return answer;
}

// `depth` says how many frames of our own lie above torch's function that goes on to call `forward`.
static int before(Hook *self, PyObject *module, PyObject *args, PyObject *kwargs, int depth) {
    const int called = attribute_is_true(self->place, s_called_place);
    if (called < 0 || PyObject_SetAttr(self->place, s_called_place, Py_True) < 0) return -1;
    const int same = has_its_children(self->place, module);
    if (same < 0) return -1;
    PyObject *site = same ? Py_NewRef(self->site) : PyObject_CallFunctionObjArgs(self->follow, module, NULL);
    if (site == Py_None) put(&site, Py_NewRef(self->site));
    int failed = !site;
    if (site && self->action != Py_None) {
        PyObject *given = kwargs ? Py_NewRef(kwargs) : PyDict_New();
        failed = !given || done(PyObject_CallFunctionObjArgs(self->action, site, module, args, given, NULL)) < 0;
        Py_XDECREF(given);
    } else if (site && self->modules->engine->recording) {
        PyObject *frame = (PyObject *)PyEval_GetFrame();
        frame = !frame ? Py_NewRef(Py_None) : depth ? frame_back(frame) : Py_NewRef(frame);
        failed = !frame || enter(self->modules, (Site *)site, module, args, kwargs, frame) < 0;
        Py_XDECREF(frame);
    }
    if (!failed && !called) failed = done(CALL(self->modules->capture, s_first_call, site)) < 0;
    Py_XDECREF(site);
    return failed ? -1 : 0;
}

static int after(Hook *self, PyObject *result) {
    if (self->action == Py_None) return leave(self->modules, self->site, result);
    return done(PyObject_CallFunctionObjArgs(self->action, self->site, result, NULL));
}

// Runs `before` or, given no module, `after` aside from the program, which goes on whatever happens.
static PyObject *guarded(Hook *self, PyObject *module, PyObject *args, PyObject *kwargs, PyObject *result, int depth) {
    const int asleep = sleeps(self);
    if (asleep > 0) return Py_NewRef(Py_None);
    PyObject *aside = asleep < 0 ? NULL : aside_enter();
    int failed = !aside || (module ? before(self, module, args, kwargs, depth) : after(self, result)) < 0;
    if (aside) aside_exit(aside);
    if (failed) failed = calls_failed(self->modules->engine, "the call of ", ((Site *)self->site)->name) < 0;
    return failed ? NULL : Py_NewRef(Py_None);
}

// Called with the module, its arguments and, if torch was told that we want them, those given by name.
static PyObject *before_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    const Py_ssize_t count = PyTuple_Size(args);
    if (kwargs || count < 2 || count > 3 || !hook_is_alone()) return hook_in_python(self, args, kwargs);
    PyObject *module = PyTuple_GetItem(args, 0), *named = count == 3 ? PyTuple_GetItem(args, 2) : Py_None;
    return guarded((Hook *)self, module, PyTuple_GetItem(args, 1), named == Py_None ? NULL : named, NULL, 0);
}

static PyObject *before_run(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "`run` takes 3 arguments, not %zd.", count);
    return guarded((Hook *)self, given[0], given[1], given[2] == Py_None ? NULL : given[2], NULL, 1);
}

// The result comes last, with and without arguments given by name before it.
static PyObject *after_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    const Py_ssize_t count = PyTuple_Size(args);
    if (kwargs || count < 3 || !hook_is_alone()) return hook_in_python(self, args, kwargs);
    return guarded((Hook *)self, NULL, NULL, NULL, PyTuple_GetItem(args, count - 1), 0);
}

static PyObject *after_run(PyObject *self, PyObject *result) { return guarded((Hook *)self, NULL, NULL, NULL, result, 1); }

static int hook_init(PyObject *object, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Hook *self = (Hook *)object;
    PyObject *modules, *site, *place, *action, *follow;
    if (!PyArg_ParseTuple(args, "O!O!OOO", modules_type, &modules, site_type, &site, &place, &action, &follow)) return -1;
    PyObject *engine = (PyObject *)((Modules *)modules)->engine;
    HOOK_OBJECTS(KEEP)
    return 0;
}

static int hook_traverse(PyObject *object, visitproc visit, void *arg) {
    Hook *self = (Hook *)object;
    Py_VISIT(Py_TYPE(object));
    HOOK_OBJECTS(VISIT)
    return 0;
}

static int hook_clear(PyObject *object) {
    Hook *self = (Hook *)object;
    HOOK_OBJECTS(CLEAR)
    return 0;
}

static void hook_dealloc(PyObject *self) { end_object(self, hook_clear); }

static PyMemberDef kHookMembers[] = {
    {"engine", T_OBJECT, offsetof(Hook, engine), READONLY, NULL},
    {"site", T_OBJECT, offsetof(Hook, site), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef kBeforeMethods[] = {
    {"run", (PyCFunction)(void (*)(void))before_run, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL},
};
static PyMethodDef kAfterMethods[] = {{"run", after_run, METH_O, NULL}, {NULL, NULL, 0, NULL}};

#define HOOK_SPEC(kSlots, kSpec, name, call, methods)                                                    \
    static PyType_Slot kSlots[] = {                                                                      \
        {Py_tp_init, (void *)hook_init},   {Py_tp_call, (void *)call},                                   \
        {Py_tp_methods, methods},          {Py_tp_members, kHookMembers},                                \
        {Py_tp_traverse, (void *)hook_traverse}, {Py_tp_clear, (void *)hook_clear},                      \
        {Py_tp_dealloc, (void *)hook_dealloc}, {0, NULL},                                                \
    };                                                                                                   \
    static PyType_Spec kSpec = {                                                                         \
        "astray.capture._calls." name, sizeof(Hook), 0,                                                  \
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, kSlots,                           \
    };

HOOK_SPEC(kBeforeSlots, kBeforeSpec, "BeforeHook", before_call, kBeforeMethods)
HOOK_SPEC(kAfterSlots, kAfterSpec, "AfterHook", after_call, kAfterMethods)

static PyMethodDef kFunctions[] = {HOOK_FUNCTIONS{NULL, NULL, 0, NULL}};

int add_modules(PyObject *module) {
    const struct {
        PyObject **place;
        const char *text;
    } texts[] = {
        {&s_called, "_called"}, {&s_first_call, "first_call"}, {&s_called_place, "called"}, {&s_layers, "_layers"}, {&s_check, "check"},
        {&s_whole, "_whole"}, {&s_modes, "_modes"}, {&s_follow, "follow"}, {&s_unfollow, "unfollow"},
        {&s_thread, "_thread"}, {&s_wanted, "wanted"}, {&s_local, "_local"}, {&s_marks, "marks"}, {&s_latest, "_latest"},
        {&s_numbers, "numbers"}, {&s_calls, "calls"}, {&s_mark, "_mark"},
        {&s_observe, "observe"}, {&s_watch, "watch"}, {&s_gave_bad, "gave_bad"}, {&s_observe_state, "_observe_state"},
        {&s_note_exception, "_note_exception"}, {&s_children, "children"}, {&s_direct, "_direct"}, {&s_lists, "_lists"},
        {&s_of, "of"}, {&s_module_modules, "_modules"}, {&s_parameters, "_parameters"}, {&s_buffers, "_buffers"},
        {&s_compiled, "_compiled_call_impl"}, {&s_dict, "__dict__"}, {&s_context, "dynamo_ctx"}, {&s_version, "_version"},
        {&s_data_ptr, "data_ptr"}, {&s_numel, "numel"}, {&s_sources, "_sources"}, {&s_hooked, "hooked"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; ++i) {
        *texts[i].place = PyUnicode_InternFromString(texts[i].text);
        if (!*texts[i].place) return -1;
    }
    modules_type = (PyTypeObject *)PyType_FromSpec(&kModulesSpec);
    before_type = (PyTypeObject *)PyType_FromSpec(&kBeforeSpec);
    after_type = (PyTypeObject *)PyType_FromSpec(&kAfterSpec);
    if (!modules_type || !before_type || !after_type || hooks_prepare() < 0) return -1;
    return PyModule_AddFunctions(module, kFunctions) < 0 ||
                   PyModule_AddObjectRef(module, "Modules", (PyObject *)modules_type) < 0 ||
                   PyModule_AddObjectRef(module, "BeforeHook", (PyObject *)before_type) < 0
               ? -1
               : PyModule_AddObjectRef(module, "AfterHook", (PyObject *)after_type);
}
