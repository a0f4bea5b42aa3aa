// Watches the gradients of calls and parameters: what `watching` and `parameters` do in plain Python where this could not
// be built. They are the reference: the same hooks in the same places, the same rows in the same order.
//
// A hook is one small object without anything in it that the garbage collector would have to look into. The calls
// around a call share the hooks on its nodes, and do not walk through its part of the graph again. What is out of the
// ordinary (very many inputs or outputs, graphs made on several threads) is handed over to Python.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../../native/hooks.h"

#define FEW_INPUTS 4      // that need no memory of their own
#define MOST_INPUTS 64    // that are looked for one after the other
#define MOST_OUTPUTS 64   // bits of a word
#define MOST_REGIONS 256  // calls inside one call whose part of the graph is kept in mind
#define MOST_NODES (1 << 20)

static const uint64_t kLeaf = UINT64_MAX;  // the number of the nodes that accumulate into leaves

// What this module needs of torch and of Python, given once by `use`.
static struct {
    PyObject *sequence_nr, *depth, *dispatch_depth, *grad_enabled, *disable;  // functions of torch
    PyObject *plain;                                   // the plain kinds of tensors
    PyObject *ordered;                                 // OrderedDict
    PyObject *edges, *live, *add_up, *untouched, *own;  // of the twin
    PyObject *registering;                              // has torch ask `register_hook` below while recordings run
    PyObject *registered;                               // what it asks otherwise
    int dicts_track_themselves;                         // once there is something in them that can be in a circle
    int nodes_stay;                                     // as Python objects, once made, for as long as torch has them
} g;

#define NAMES(X)                                                                                                     \
    X(_backward_hooks) X(_register_hook_dict) X(_sequence_nr) X(_version) X(__enter__) X(__exit__)                   \
    X(added) X(backward) X(born) X(event) X(failed) X(finish) X(grad) X(grad_fn) X(gradient) X(hooks_dict_ref) X(id) \
    X(input) X(inputs) X(is_here) X(leaves) X(listening) X(missed) X(name) X(next_functions) X(observe) X(output)    \
    X(output_nr) X(paths) X(paused) X(pop) X(register_hook) X(register_prehook) X(remove) X(requires_grad)           \
    X(site) X(tensors) X(variable) X(watch)
#define DECLARE(word) static PyObject *s_##word;
NAMES(DECLARE)

static PyTypeObject *EdgesType, *LiveType, *CallType, *ArrivalType, *SendingType, *CompletionType, *NodeType,
    *AccumulatedType, *ArrivingType;

// ---- small things --------------------------------------------------------------------------------------------------

// A list through the objects themselves: who is in it costs no object, and leaves it when it goes.
typedef struct Link {
    struct Link *before, *after;
} Link;

static void link_alone(Link *link) { link->before = link->after = link; }

static void link_into(Link *list, Link *link) {
    link->before = list->before;
    link->after = list;
    list->before->after = link;
    list->before = link;
}

static void link_out(Link *link) {
    link->before->after = link->after;
    link->after->before = link->before;
    link_alone(link);
}

static void set(PyObject **place, PyObject *given) {
    PyObject *old = *place;
    *place = given;
    Py_XDECREF(old);
}

static void dispose(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

// Whether an attribute is true; −1 with an error set.
static int is_true(PyObject *object, PyObject *name) {
    PyObject *found = PyObject_GetAttr(object, name);
    if (!found) return -1;
    const int truth = found == Py_True ? 1 : found == Py_False ? 0 : PyObject_IsTrue(found);
    Py_DECREF(found);
    return truth;
}

// The number in the order of making of a node, or of the next one. 0 with an error set.
static int take_number(PyObject *number, uint64_t *out) {
    if (!number) return 0;
    *out = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *out != UINT64_MAX || !PyErr_Occurred();
}

static int number_of(PyObject *node, uint64_t *out) {
    return take_number(PyObject_CallMethodObjArgs(node, s__sequence_nr, NULL), out);
}

static int number_now(uint64_t *out) { return take_number(PyObject_CallObject(g.sequence_nr, NULL), out); }

static int output_of(PyObject *tensor, Py_ssize_t *out) {
    PyObject *number = PyObject_GetAttr(tensor, s_output_nr);
    if (!number) return 0;
    *out = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    return *out >= 0 || !PyErr_Occurred();
}

static int is_plain(PyObject *tensor) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(g.plain); ++i)
        if ((PyObject *)Py_TYPE(tensor) == PyTuple_GetItem(g.plain, i)) return 1;
    return 0;
}

// A node of a graph that torch has just given us, and that therefore is a Python object from now on until the graph
// goes. A thousand of them a step would have the garbage collector run all the time. One that nobody else holds and
// that is none of a class in Python can only become a part of a circle by a hook that somebody puts on it later.
static PyObject *quiet(PyObject *node) {
    if (!node || node == Py_None || !g.nodes_stay || Py_REFCNT(node) != 2) return node;
    const unsigned long flags = PyType_GetFlags(Py_TYPE(node));
    if ((flags & Py_TPFLAGS_HAVE_GC) && !(flags & Py_TPFLAGS_HEAPTYPE)) PyObject_GC_UnTrack(node);
    return node;
}

static PyObject *node_of(PyObject *tensor) { return quiet(PyObject_GetAttr(tensor, s_grad_fn)); }

// The node of a tensor that takes part in a graph, None when it is a leaf there. 0 when it takes none, −1 with an error
// set. A plain tensor with a node need not be asked.
static int part_of_graph(PyObject *tensor, PyObject **node) {
    *node = is_plain(tensor) ? node_of(tensor) : Py_NewRef(Py_None);
    if (!*node) return -1;
    if (*node != Py_None) return 1;
    Py_DECREF(Py_None);
    const int wanted = is_true(tensor, s_requires_grad);
    if (wanted <= 0) return wanted;
    *node = node_of(tensor);
    return *node ? 1 : -1;
}

// How many of something there are, which torch says; −1 with an error set.
static long number_from(PyObject *function) {
    PyObject *said = PyObject_CallObject(function, NULL);
    const long number = said ? PyLong_AsLong(said) : -1;
    Py_XDECREF(said);
    return number;
}

// Whether nothing may be observed now; −1 with an error set.
static int asleep(PyObject *engine) {
    const int paused = is_true(engine, s_paused);
    if (paused) return paused;
    const int here = is_true(engine, s_is_here);
    return here < 0 ? -1 : !here;
}

// What is done between these two is no part of the program. A plain tensor without a mode around asks nobody.
static int shield(PyObject *tensor, PyObject **guard) {
    *guard = NULL;
    if (tensor && is_plain(tensor)) {
        const long modes = number_from(g.depth);
        if (modes <= 0) return !modes;
    }
    PyObject *made = PyObject_CallObject(g.disable, NULL);
    PyObject *entered = made ? PyObject_CallMethodObjArgs(made, s___enter__, NULL) : NULL;
    if (!entered) {
        Py_XDECREF(made);
        return 0;
    }
    Py_DECREF(entered);
    *guard = made;
    return 1;
}

static void unshield(PyObject *guard) {
    if (!guard) return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *left = PyObject_CallMethodObjArgs(guard, s___exit__, Py_None, Py_None, Py_None, NULL);
    if (!left) PyErr_Clear();
    Py_XDECREF(left);
    Py_DECREF(guard);
    PyErr_Restore(type, value, trace);
}

static int observe(PyObject *engine, PyObject *seq, PyObject *role, PyObject *path, PyObject *tensor) {
    PyObject *guard, *tensors = PyObject_GetAttr(engine, s_tensors);
    if (!tensors || !shield(tensor, &guard)) {
        Py_XDECREF(tensors);
        return 0;
    }
    PyObject *done = PyObject_CallMethodObjArgs(tensors, s_observe, seq, role, path, tensor, NULL);
    unshield(guard);
    Py_DECREF(tensors);
    Py_XDECREF(done);
    return done != NULL;
}

// Tells the engine of the error that is set. 0 when that has to reach the program after all, such as an interrupt.
static int report(PyObject *engine, PyObject *site, const char *format) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return 0;
    PyObject *type, *value, *trace, *told = NULL;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace) PyException_SetTraceback(value, trace);
    PyObject *name = PyObject_GetAttr(site, s_name);
    PyObject *what = name ? PyUnicode_FromFormat(format, name) : NULL;
    if (what) told = PyObject_CallMethodObjArgs(engine, s_failed, what, value, NULL);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_XDECREF(name);
    Py_XDECREF(what);
    Py_XDECREF(told);
    return told != NULL;
}

static PyObject *report_call(PyObject *engine, PyObject *call) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *site = PyObject_GetAttr(call, s_site);
    if (!site) PyErr_Clear();
    PyErr_Restore(type, value, trace);
    const int told = site && report(engine, site, "a gradient of %U");
    Py_XDECREF(site);
    return told ? Py_NewRef(Py_None) : NULL;
}

// ---- hooks in their places -----------------------------------------------------------------------------------------

// The start of every hook on a graph: where it is, so that it can be taken off.
typedef struct {
    PyObject_HEAD
    Link link;       // of those that are in place
    PyObject *dict;  // a weak reference to the dict it is in
    PyObject *key;   // its key there; itself when NULL
} Placed;

static Placed *placed_new(PyTypeObject *type) {
    Placed *self = PyObject_New(Placed, type);
    if (!self) return NULL;
    link_alone(&self->link);
    self->dict = self->key = NULL;
    return self;
}

static void placed_clear(Placed *self) {
    link_out(&self->link);
    Py_XDECREF(self->dict);
    Py_XDECREF(self->key);
}

// Notes where torch has put a hook. Neither the dict nor the reference to it can be a part of a circle as long as there
// is nothing else in it; whoever puts more there has it tracked again.
static int placed_at(Placed *self, Link *list, PyObject *handle) {
    self->dict = PyObject_GetAttr(handle, s_hooks_dict_ref);
    self->key = PyObject_GetAttr(handle, s_id);
    if (!self->dict || !self->key) return 0;
    PyObject_GC_UnTrack(self->dict);
    PyObject *dict = PyWeakref_GetObject(self->dict);  // borrowed
    if (g.dicts_track_themselves && PyDict_Check(dict) && PyDict_Size(dict) == 1) PyObject_GC_UnTrack(dict);
    link_into(list, &self->link);
    return 1;
}

// Does to a tensor of a graph what its `register_hook` does.
static int place_on_tensor(Placed *self, Link *list, PyObject *tensor, PyObject *node) {
    if (!is_plain(tensor)) {
        PyObject *handle = PyObject_CallMethodObjArgs(tensor, s_register_hook, self, NULL);
        const int placed = handle && placed_at(self, list, handle);
        Py_XDECREF(handle);
        return placed;
    }
    PyObject *hooks = PyObject_GetAttr(tensor, s__backward_hooks);
    if (!hooks) return 0;
    if (hooks == Py_None) {
        Py_DECREF(hooks);
        hooks = PyObject_CallObject(g.ordered, NULL);
        if (!hooks) return 0;
        if (g.dicts_track_themselves) PyObject_GC_UnTrack(hooks);
        PyObject *told = NULL;
        if (!PyObject_SetAttr(tensor, s__backward_hooks, hooks))
            told = PyObject_CallMethodObjArgs(node, s__register_hook_dict, tensor, NULL);
        Py_XDECREF(told);
        if (!told) goto failed;
    }
    self->dict = PyWeakref_NewRef(hooks, NULL);
    if (!self->dict) goto failed;
    PyObject_GC_UnTrack(self->dict);
    if (PyObject_SetItem(hooks, (PyObject *)self, (PyObject *)self)) goto failed;
    Py_DECREF(hooks);
    link_into(list, &self->link);
    return 1;
failed:
    Py_DECREF(hooks);
    return 0;
}

static int place_on_node(Placed *self, Link *list, PyObject *node) {
    PyObject *handle = PyObject_CallMethodObjArgs(node, s_register_hook, self, NULL);
    int placed = handle != NULL;
    if (handle == Py_None && self->dict)  // see `register_hook`
        link_into(list, &self->link);
    else if (handle)
        placed = placed_at(self, list, handle);
    Py_XDECREF(handle);
    return placed;
}

// register_hook(hooks, hook): what torch calls to put a hook of a node into a dict, which may still be None. It gives
// back the dict and a handle. One of ours needs no handle, and to make it would take longer than all the rest.
static PyObject *register_hook(PyObject *module, PyObject *const *args, Py_ssize_t size) {
    (void)module;
    if (size != 2) return PyErr_Format(PyExc_TypeError, "`register_hook` takes 2 arguments, not %zd.", size);
    Placed *hook = (Placed *)args[1];
    if ((Py_TYPE(hook) != NodeType && Py_TYPE(hook) != SendingType) || hook->dict)
        return PyObject_CallFunctionObjArgs(g.registered, args[0], args[1], NULL);
    PyObject *hooks = args[0] == Py_None ? PyObject_CallObject(g.ordered, NULL) : Py_NewRef(args[0]);
    if (!hooks) return NULL;
    if (args[0] == Py_None && g.dicts_track_themselves) PyObject_GC_UnTrack(hooks);
    PyObject *result = NULL;
    hook->dict = PyWeakref_NewRef(hooks, NULL);
    if (hook->dict) {
        PyObject_GC_UnTrack(hook->dict);
        if (!PyObject_SetItem(hooks, (PyObject *)hook, (PyObject *)hook)) result = PyTuple_Pack(2, hooks, Py_None);
    }
    Py_DECREF(hooks);
    return result;
}

static int take_off(Placed *self) {
    PyObject *dict = self->dict ? PyWeakref_GetObject(self->dict) : Py_None;
    if (!dict || dict == Py_None) return dict != NULL;
    Py_INCREF(dict);
    PyObject *key = self->key ? self->key : (PyObject *)self;
    PyObject *gone = PyObject_CallMethodObjArgs(dict, s_pop, key, Py_None, NULL);
    Py_DECREF(dict);
    Py_XDECREF(gone);
    return gone != NULL;
}

// What torch calls of a hook that gets `count` arguments, and `run`, which is what the `__call__` in Python does. Further
// methods may follow.
#define HOOK_CALL(name, count, given, ...)                                                     \
    static PyObject *name##_call(PyObject *self, PyObject *args, PyObject *kwargs) {           \
        if (kwargs || PyTuple_Size(args) != count || !hook_is_alone())                         \
            return hook_in_python(self, args, kwargs);                                         \
        return name##_run(self, given);                                                        \
    }                                                                                          \
    static PyMethodDef name##_methods[] = {                                                    \
        {"run", name##_run, count == 1 ? METH_O : METH_VARARGS, NULL},                         \
        __VA_ARGS__ {NULL, NULL, 0, NULL},                                                     \
    };
#define TENSOR_HOOK(name, ...) HOOK_CALL(name, 1, PyTuple_GetItem(args, 0), __VA_ARGS__)
#define NODE_HOOK(name) HOOK_CALL(name, 2, args, )

// ---- the inputs of a call ------------------------------------------------------------------------------------------

typedef struct {
    PyObject *node;  // NULL for a leaf
    Py_ssize_t output;
    PyObject *path, *tensor;  // both kept by `given`
} Input;

typedef struct {
    PyObject_HEAD
    PyObject *given;  // the inputs as they came
    uint64_t born;
    int count, leaves;
    Input *inputs;
    Input room[FEW_INPUTS];
} Edges;

static Py_ssize_t edges_open;  // calls that are under way

static void edges_dealloc(PyObject *object) {
    Edges *self = (Edges *)object;
    for (int i = 0; i < self->count; ++i) Py_XDECREF(self->inputs[i].node);
    if (self->inputs != self->room) PyMem_Free(self->inputs);
    Py_XDECREF(self->given);
    --edges_open;
    dispose(object);
}

// Which input hangs at this output of a node; −1 when none does.
static int edges_find(const Edges *self, PyObject *node, Py_ssize_t output) {
    for (int i = 0; i < self->count; ++i)
        if (self->inputs[i].node == node && self->inputs[i].output == output) return i;
    return -1;
}

static int edges_find_leaf(const Edges *self, PyObject *tensor) {
    for (int i = 0; i < self->count; ++i)
        if (!self->inputs[i].node && self->inputs[i].tensor == tensor) return i;
    return -1;
}

// Which input a tensor is; −1 when it is none, −2 with an error set.
static int edges_find_tensor(const Edges *self, PyObject *tensor) {
    PyObject *node = node_of(tensor);
    if (!node) return -2;
    Py_ssize_t output;
    int found = -2;
    if (node == Py_None)
        found = edges_find_leaf(self, tensor);
    else if (output_of(tensor, &output))
        found = edges_find(self, node, output);
    Py_DECREF(node);
    return found;
}

// Takes in one input. 0 with an error set.
static int edges_take(Edges *self, PyObject *path, PyObject *tensor) {
    PyObject *node;
    const int wanted = part_of_graph(tensor, &node);
    if (wanted <= 0) return !wanted;
    Py_ssize_t output = 0;
    int known;
    if (node == Py_None) {
        Py_DECREF(node);
        node = NULL;
        known = edges_find_leaf(self, tensor);
        self->leaves = 1;
    } else {
        if (!output_of(tensor, &output)) {
            Py_DECREF(node);
            return 0;
        }
        known = edges_find(self, node, output);
    }
    if (known >= 0) {  // given twice: recorded under its first path
        Py_XDECREF(node);
        return 1;
    }
    if (self->count == FEW_INPUTS && self->inputs == self->room) {
        Input *more = PyMem_Malloc(MOST_INPUTS * sizeof(Input));
        if (!more) {
            Py_XDECREF(node);
            PyErr_NoMemory();
            return 0;
        }
        memcpy(more, self->room, sizeof self->room);
        self->inputs = more;
    }
    self->inputs[self->count++] = (Input){node, output, path, tensor};
    return 1;
}

// InputEdges(inputs), where inputs is a list of (path, tensor)
static PyObject *edges_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    if (PyTuple_Size(args) != 1) return PyErr_Format(PyExc_TypeError, "`InputEdges` takes the inputs, and no more.");
    PyObject *given = PyTuple_GetItem(args, 0);
    if (!PyList_Check(given)) return PyObject_CallFunctionObjArgs(g.edges, given, NULL);
    Edges *self = PyObject_New(Edges, type);
    if (!self) return NULL;
    ++edges_open;
    self->given = Py_NewRef(given);
    self->count = self->leaves = 0;
    self->inputs = self->room;
    if (!number_now(&self->born)) goto failed;
    for (Py_ssize_t i = 0; i < PyList_Size(given); ++i) {
        PyObject *pair = PyList_GetItem(given, i);
        PyObject *path = pair ? PyTuple_GetItem(pair, 0) : NULL, *tensor = path ? PyTuple_GetItem(pair, 1) : NULL;
        if (!tensor) goto failed;
        if (self->count == MOST_INPUTS) {
            Py_DECREF(self);
            return PyObject_CallFunctionObjArgs(g.edges, given, NULL);
        }
        if (!edges_take(self, path, tensor)) goto failed;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

// The same for the twin, with what was noted before the call.
static PyObject *edges_in_python(const Edges *self) {
    PyObject *none = PyList_New(0), *born = PyLong_FromUnsignedLongLong(self->born);
    PyObject *twin = none ? PyObject_CallFunctionObjArgs(g.edges, none, NULL) : NULL;
    PyObject *paths = twin ? PyObject_GetAttr(twin, s_paths) : NULL;
    PyObject *leaves = twin ? PyObject_GetAttr(twin, s_leaves) : NULL;
    int made = born && paths && leaves && !PyObject_SetAttr(twin, s_inputs, self->given) &&
               !PyObject_SetAttr(twin, s_born, born);
    for (int i = 0; made && i < self->count; ++i) {
        const Input *one = &self->inputs[i];
        PyObject *key = one->node ? Py_BuildValue("On", one->node, one->output) : PyLong_FromVoidPtr(one->tensor);
        made = key && !PyDict_SetItem(one->node ? paths : leaves, key, one->path);
        Py_XDECREF(key);
    }
    Py_XDECREF(none);
    Py_XDECREF(born);
    Py_XDECREF(paths);
    Py_XDECREF(leaves);
    if (!made) {
        Py_XDECREF(twin);
        return NULL;
    }
    return twin;
}

// ---- a call that made several --------------------------------------------------------------------------------------

// An input that gradients are sent to.
typedef struct {
    PyObject *path;
    int input;            // which of the edges'
    int expected, terms;  // how many nodes send to it, and how many have
    PyObject *total;
} Target;

typedef struct {
    PyObject_HEAD
    Link link;  // of all whose graph is still there
    PyObject *engine, *call, *seq;
    uint64_t arrived;  // a bit for each output
    int count;
    Target *targets;
} CallGradients;

static void call_dealloc(PyObject *object) {
    CallGradients *self = (CallGradients *)object;
    link_out(&self->link);
    for (int i = 0; i < self->count; ++i) {
        Py_DECREF(self->targets[i].path);
        Py_XDECREF(self->targets[i].total);
    }
    PyMem_Free(self->targets);
    Py_DECREF(self->engine);
    Py_DECREF(self->call);
    Py_XDECREF(self->seq);
    dispose(object);
}

static PyObject *call_started(CallGradients *self) {
    if (!self->seq) self->seq = PyObject_CallMethodObjArgs(self->engine, s_backward, self->call, NULL);
    return self->seq;
}

static int call_observe(CallGradients *self, PyObject *role, PyObject *path, PyObject *gradient) {
    PyObject *seq = call_started(self);
    if (!seq) return 0;
    Py_INCREF(seq);
    const int observed = observe(self->engine, seq, role, path, gradient);
    Py_DECREF(seq);
    return observed;
}

// Nothing more will be sent to this input: the backward pass has come to where it came from.
static int call_complete(CallGradients *self, Target *target) {
    if (!target->terms) return 1;
    PyObject *total = target->total;
    target->total = NULL;
    target->terms = 0;
    if (total) {
        const int observed = call_observe(self, s_output, target->path, total);
        Py_DECREF(total);
        return observed;
    }
    PyObject *site = PyObject_GetAttr(self->call, s_site), *name = site ? PyObject_GetAttr(site, s_name) : NULL;
    PyObject *what = name ? PyUnicode_FromFormat("a gradient that %U sends", name) : NULL;
    PyObject *why =
        PyUnicode_FromString("its parts are distributed in different ways, and to add them takes communication");
    PyObject *told = what && why ? PyObject_CallMethodObjArgs(self->engine, s_missed, what, why, NULL) : NULL;
    Py_XDECREF(site);
    Py_XDECREF(name);
    Py_XDECREF(what);
    Py_XDECREF(why);
    Py_XDECREF(told);
    return told != NULL;
}

static int call_is_summing(const CallGradients *self) {
    for (int i = 0; i < self->count; ++i)
        if (self->targets[i].terms) return 1;
    return 0;
}

// Ends this pass through the graph.
static int call_finish(CallGradients *self) {
    for (int i = 0; i < self->count; ++i)
        if (!call_complete(self, &self->targets[i])) return 0;
    set(&self->seq, NULL);
    self->arrived = 0;
    return 1;
}

// The sum of two gradients, None when there is none. Plain tensors without a mode around are added as they are.
static PyObject *add_up(PyObject *one, PyObject *other) {
    if (is_plain(one) && is_plain(other)) {
        const long modes = number_from(g.depth), deeper = modes ? modes : number_from(g.dispatch_depth);
        const long graded = deeper ? deeper : number_from(g.grad_enabled);
        if (graded < 0 && PyErr_Occurred()) return NULL;
        if (graded == 0) return PyNumber_Add(one, other);
    }
    PyObject *guard;
    if (!shield(NULL, &guard)) return NULL;
    PyObject *sum = PyObject_CallFunctionObjArgs(g.add_up, one, other, NULL);
    unshield(guard);
    return sum;
}

// One of the call's nodes has computed what it sends to an input.
static int call_sent(CallGradients *self, Target *target, PyObject *gradient) {
    if (target->expected == 1) return call_observe(self, s_output, target->path, gradient);
    if (++target->terms == 1) {
        set(&target->total, Py_NewRef(gradient));
    } else if (target->total) {
        PyObject *sum = add_up(target->total, gradient);
        if (!sum) return 0;
        if (sum == Py_None) {
            Py_DECREF(sum);
            sum = NULL;
        }
        set(&target->total, sum);
    }
    return target->terms == target->expected ? call_complete(self, target) : 1;
}

// Sits on an output tensor.
typedef struct {
    Placed placed;
    CallGradients *gradients;
    PyObject *path, *through;  // `through` is the path of the input that this output is, or NULL
    int output;
} Arrival;

static void arrival_dealloc(PyObject *object) {
    Arrival *self = (Arrival *)object;
    placed_clear(&self->placed);
    Py_DECREF(self->gradients);
    Py_DECREF(self->path);
    Py_XDECREF(self->through);
    dispose(object);
}

static PyObject *arrival_run(PyObject *object, PyObject *gradient) {
    Arrival *self = (Arrival *)object;
    CallGradients *gradients = self->gradients;
    const int sleeps = gradient == Py_None ? 1 : asleep(gradients->engine);  // an output that nobody used
    if (sleeps) return sleeps < 0 ? NULL : Py_NewRef(Py_None);
    Py_INCREF(self);
    PyObject *result = NULL;
    const uint64_t bit = (uint64_t)1 << self->output;
    int seen = 1;
    if (gradients->arrived & bit) seen = call_finish(gradients);  // a second backward through the same graph
    gradients->arrived |= bit;
    if (seen) seen = call_observe(gradients, s_input, self->path, gradient);
    if (seen && self->through) seen = call_observe(gradients, s_output, self->through, gradient);
    result = seen ? Py_NewRef(Py_None) : report_call(gradients->engine, gradients->call);
    Py_DECREF(self);
    return result;
}
TENSOR_HOOK(arrival, )

// Sits on a node and reads those of the gradients it computed that go to an input, for a call and for those around it.
typedef struct {
    Py_ssize_t index;
    CallGradients *gradients;
    int target;
} Send;

typedef struct {
    Placed placed;
    int count, room;
    Send *sends;
    Send few[2];
} Sending;

static void sending_dealloc(PyObject *object) {
    Sending *self = (Sending *)object;
    placed_clear(&self->placed);
    for (int i = 0; i < self->count; ++i) Py_DECREF(self->sends[i].gradients);
    if (self->sends != self->few) PyMem_Free(self->sends);
    dispose(object);
}

static Sending *sending_new(void) {
    Sending *self = (Sending *)placed_new(SendingType);
    if (!self) return NULL;
    self->count = 0;
    self->room = 2;
    self->sends = self->few;
    return self;
}

static int sending_add(Sending *self, Py_ssize_t index, CallGradients *gradients, int target) {
    if (self->count == self->room) {
        Send *more = PyMem_Malloc(2 * (size_t)self->room * sizeof(Send));
        if (!more) {
            PyErr_NoMemory();
            return 0;
        }
        memcpy(more, self->sends, (size_t)self->count * sizeof(Send));
        if (self->sends != self->few) PyMem_Free(self->sends);
        self->sends = more;
        self->room *= 2;
    }
    Py_INCREF(gradients);
    self->sends[self->count++] = (Send){index, gradients, target};
    return 1;
}

static PyObject *sending_run(PyObject *object, PyObject *args) {
    Sending *self = (Sending *)object;
    PyObject *computed = PyTuple_GetItem(args, 0);
    if (!computed) return NULL;
    Py_INCREF(self);
    PyObject *result = Py_NewRef(Py_None);
    for (int i = 0; result && i < self->count; ++i) {
        const Send send = self->sends[i];
        PyObject *gradient = PyTuple_GetItem(computed, send.index);
        int sent = gradient != NULL;
        if (sent && gradient != Py_None) {
            const int sleeps = asleep(send.gradients->engine);
            Target *target = &send.gradients->targets[send.target];
            sent = sleeps < 0 ? 0 : sleeps || call_sent(send.gradients, target, gradient);
        }
        if (!sent) set(&result, report_call(send.gradients->engine, send.gradients->call));
    }
    Py_DECREF(self);
    return result;
}
NODE_HOOK(sending)

// Sits where an input came from, behind everything that is sent to it.
typedef struct {
    Placed placed;
    CallGradients *gradients;
    int target;
} Completion;

static void completion_dealloc(PyObject *object) {
    Completion *self = (Completion *)object;
    placed_clear(&self->placed);
    Py_DECREF(self->gradients);
    dispose(object);
}

static PyObject *completion_run(PyObject *object, PyObject *unused) {
    (void)unused;
    Completion *self = (Completion *)object;
    CallGradients *gradients = self->gradients;
    const int sleeps = asleep(gradients->engine);
    if (sleeps) return sleeps < 0 ? NULL : Py_NewRef(Py_None);
    Py_INCREF(self);
    PyObject *result = call_complete(gradients, &gradients->targets[self->target])
                           ? Py_NewRef(Py_None)
                           : report_call(gradients->engine, gradients->call);
    Py_DECREF(self);
    return result;
}
TENSOR_HOOK(completion, )

// ---- a call that made one node -------------------------------------------------------------------------------------

typedef struct {
    Py_ssize_t index;
    PyObject *path;
} Route;

typedef struct {
    Placed placed;
    PyObject *engine, *call;
    PyObject *around;  // another hook, in no place of its own, for the calls around; NULL while there is none
    int arrives, sends;
    Route *routes;  // first those that arrive
    Route room[2];
} NodeGradients;

static void node_dealloc(PyObject *object) {
    NodeGradients *self = (NodeGradients *)object;
    placed_clear(&self->placed);
    for (int i = 0; i < self->arrives + self->sends; ++i) Py_DECREF(self->routes[i].path);
    if (self->routes != self->room) PyMem_Free(self->routes);
    Py_DECREF(self->engine);
    Py_DECREF(self->call);
    Py_XDECREF(self->around);
    dispose(object);
}

static PyObject *node_run(PyObject *object, PyObject *args) {
    NodeGradients *self = (NodeGradients *)object;
    PyObject *computed = PyTuple_GetItem(args, 0), *arrived = computed ? PyTuple_GetItem(args, 1) : NULL, *seq = NULL;
    if (!arrived) return NULL;
    const int sleeps = asleep(self->engine);
    if (sleeps) return sleeps < 0 ? NULL : Py_NewRef(Py_None);  // so do the calls around
    Py_INCREF(self);
    PyObject *result = NULL;
    for (int i = 0; i < self->arrives + self->sends; ++i) {
        const Route *route = &self->routes[i];
        const int is_arriving = i < self->arrives;
        PyObject *gradient = PyTuple_GetItem(is_arriving ? arrived : computed, route->index);
        if (!gradient) goto failed;
        if (gradient == Py_None) continue;  // an output that nobody used
        if (!seq) seq = PyObject_CallMethodObjArgs(self->engine, s_backward, self->call, NULL);
        if (!seq || !observe(self->engine, seq, is_arriving ? s_input : s_output, route->path, gradient)) goto failed;
    }
    result = Py_NewRef(Py_None);
failed:
    if (!result) result = report_call(self->engine, self->call);
    if (result && self->around) {
        const int of_node = Py_TYPE(self->around) == NodeType;
        set(&result, of_node ? node_run(self->around, args) : sending_run(self->around, args));
    }
    Py_XDECREF(seq);
    Py_DECREF(self);
    return result;
}
NODE_HOOK(node)

// ---- the part of the graph that a call made ------------------------------------------------------------------------

// An edge that leads out of it to one of the call's inputs, and the hook that reads what is sent along it.
typedef struct {
    PyObject *hook;  // NULL until there is one
    PyObject *from;  // the node it starts at, while there is no hook
    Py_ssize_t index;
    PyObject *node;  // where it leads
    Py_ssize_t output;
    uint64_t number;
    int input;  // which of the call's inputs that is
} Exit;

// The part of the graph of a call that has ended. Entered by its one output it is left by these exits and no other, but
// for leaves: so the calls around need not go through it again.
typedef struct {
    uint64_t born, end, entry;
    PyObject *hook;  // its NodeGradients when it is one node, else NULL
    Py_ssize_t count;
    Exit *exits;
} Region;

static void exits_free(Exit *exits, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_XDECREF(exits[i].hook);
        Py_XDECREF(exits[i].from);
        Py_XDECREF(exits[i].node);
    }
    PyMem_Free(exits);
}

typedef struct {
    PyObject_HEAD
    Link hooks;  // every hook that is in place
    Link calls;  // every CallGradients whose graph is still there
    PyObject *on_leaves;  // handles of hooks that no graph takes along
    PyObject *twin;       // for what is handed over
    Region *regions;      // of calls that have ended inside one that has not, in the order of their nodes
    int count;
    unsigned long thread;  // whose nodes these are
    int registers;         // whether `registering` was told of it
} Live;

// Says that hooks are put on nodes from now on, or no longer. 0 with an error set.
static int live_registers(Live *self, int on) {
    if (self->registers == on) return 1;
    PyObject *told = PyObject_CallFunctionObjArgs(g.registering, on ? Py_True : Py_False, NULL);
    if (told) self->registers = on;
    Py_XDECREF(told);
    return told != NULL;
}

static void forget_regions(Live *self, int keep) {
    while (self->count > keep) {
        Region region = self->regions[--self->count];
        Py_XDECREF(region.hook);
        exits_free(region.exits, region.count);
    }
}

// How many of the regions were there before a call.
static int regions_before(const Live *self, const Edges *edges) {
    int before = self->count;
    if (before && self->thread == PyThread_get_thread_ident())
        while (before && self->regions[before - 1].born >= edges->born) --before;
    return before;
}

typedef enum { FAILED, WALKED, ODD, SHORTCUT_FAILED } Outcome;

// A walk back through the nodes born inside a call.
typedef struct {
    const Edges *edges;
    uint64_t size;     // how many numbers were given since the call began
    PyObject **nodes;  // by their numbers: those that were met
    uint64_t *ahead;   // the numbers of those of them to go on from
    Py_ssize_t waiting;
    Exit *exits;
    Py_ssize_t count, room;
    int leads_elsewhere;  // to a node that is older than the call, and no input
    const Region *regions;
    int known;
} Walk;

static void walk_free(Walk *self) {
    for (uint64_t i = 0; self->nodes && i < self->size; ++i) Py_XDECREF(self->nodes[i]);
    PyMem_Free(self->nodes);
    PyMem_Free(self->ahead);
    exits_free(self->exits, self->count);
    self->nodes = NULL;
    self->ahead = NULL;
    self->exits = NULL;
    self->count = self->waiting = self->room = 0;
    self->leads_elsewhere = 0;
}

static Outcome walk_meet(Walk *self, PyObject *node, uint64_t number) {
    const uint64_t place = number - self->edges->born;
    if (place >= self->size) return ODD;  // made on another thread, which counts for itself
    if (self->nodes[place]) return self->nodes[place] == node ? WALKED : ODD;
    self->nodes[place] = Py_NewRef(node);
    self->ahead[self->waiting++] = number;
    return WALKED;
}

static int walk_exit(Walk *self, Exit exit) {
    if (self->count == self->room) {
        const Py_ssize_t room = self->room ? 2 * self->room : 8;
        Exit *more = PyMem_Realloc(self->exits, (size_t)room * sizeof(Exit));
        if (!more) {
            PyErr_NoMemory();
            return 0;
        }
        self->exits = more;
        self->room = room;
    }
    Py_XINCREF(exit.hook);
    Py_XINCREF(exit.from);
    Py_XINCREF(exit.node);
    self->exits[self->count++] = exit;
    return 1;
}

// Follows one edge that ends at output `to.output` of `to.node`.
static Outcome walk_follow(Walk *self, Exit to) {
    const Edges *edges = self->edges;
    to.input = edges_find(edges, to.node, to.output);
    if (to.input < 0) {
        if (to.number < edges->born) {  // nodes are numbered as they are made: it was there before the call
            self->leads_elsewhere = 1;
            return WALKED;
        }
        if (to.number != kLeaf) return walk_meet(self, to.node, to.number);
        if (!edges->leaves) return WALKED;
        PyObject *variable = PyObject_GetAttr(to.node, s_variable);
        if (!variable) return FAILED;
        to.input = edges_find_leaf(edges, variable);
        Py_DECREF(variable);
        if (to.input < 0) return WALKED;
    }
    return walk_exit(self, to) ? WALKED : FAILED;
}

static Outcome walk_node(Walk *self, PyObject *node) {
    PyObject *following = PyObject_GetAttr(node, s_next_functions);
    if (!following) return FAILED;
    Outcome outcome = WALKED;
    const Py_ssize_t count = PyTuple_Size(following);
    for (Py_ssize_t i = 0; outcome == WALKED && i < count; ++i) {
        PyObject *edge = PyTuple_GetItem(following, i), *to = PyTuple_GetItem(edge, 0);
        if (to == Py_None) continue;
        quiet(to);
        Exit exit = {.from = node, .index = i, .node = to, .output = PyLong_AsSsize_t(PyTuple_GetItem(edge, 1))};
        outcome = number_of(to, &exit.number) ? walk_follow(self, exit) : FAILED;
    }
    Py_DECREF(following);
    return outcome;
}

// The region in which a node of this number was made; NULL when it is in none.
static const Region *walk_region(const Walk *self, uint64_t number) {
    int low = 0, high = self->known;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (self->regions[middle].end <= number)
            low = middle + 1;
        else
            high = middle;
    }
    return low < self->known && self->regions[low].born <= number ? &self->regions[low] : NULL;
}

// Walks from the nodes that `ahead` starts with.
static Outcome walk(Walk *self) {
    Outcome outcome = WALKED;
    while (outcome == WALKED && self->waiting) {
        const uint64_t number = self->ahead[--self->waiting];
        const Region *region = self->known ? walk_region(self, number) : NULL;
        if (!region) {
            outcome = walk_node(self, self->nodes[number - self->edges->born]);
        } else if (region->entry != number) {
            return SHORTCUT_FAILED;  // it is entered in the middle
        } else {
            for (Py_ssize_t i = 0; outcome == WALKED && i < region->count; ++i)
                outcome = walk_follow(self, region->exits[i]);
        }
    }
    return outcome;
}

// ---- LiveGradients -------------------------------------------------------------------------------------------------

typedef struct {
    PyObject *path, *tensor;  // kept by the list of outputs
    PyObject *node;           // None for a leaf
    Py_ssize_t output;
    uint64_t number;  // of its node
    int through;  // which input it is, or −1
} Output;

static PyObject *live_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    Live *self = PyObject_New(Live, type);
    if (!self) return NULL;
    link_alone(&self->hooks);
    link_alone(&self->calls);
    self->count = 0;
    self->thread = 0;
    self->twin = NULL;
    self->registers = 0;
    self->on_leaves = PyList_New(0);
    self->regions = PyMem_Malloc(MOST_REGIONS * sizeof(Region));
    if (!self->on_leaves || !self->regions) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (live_registers(self, 1)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void live_dealloc(PyObject *object) {
    Live *self = (Live *)object;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!live_registers(self, 0)) PyErr_Clear();
    PyErr_Restore(type, value, trace);
    while (self->hooks.after != &self->hooks) link_out(self->hooks.after);
    while (self->calls.after != &self->calls) link_out(self->calls.after);
    forget_regions(self, 0);
    PyMem_Free(self->regions);
    Py_XDECREF(self->on_leaves);
    Py_XDECREF(self->twin);
    dispose(object);
}

static PyObject *hand_over(Live *self, PyObject *engine, PyObject *call, PyObject *edges, PyObject *outputs) {
    if (!self->twin) self->twin = PyObject_CallObject(g.live, NULL);
    return self->twin ? PyObject_CallMethodObjArgs(self->twin, s_watch, engine, call, edges, outputs, NULL) : NULL;
}

// Keeps the way through the graph of a call that has ended, if it is the only one.
static void keep_region(Live *self, const Edges *edges, Walk *found, const Output *outputs, int count, uint64_t passed,
                        PyObject *hook) {
    forget_regions(self, regions_before(self, edges));  // what was inside this call has served
    if (found->leads_elsewhere || passed || edges_open < 2) return;
    const uint64_t entry = outputs[0].number;
    if (outputs[0].node == Py_None || entry < edges->born) return;
    for (int i = 1; i < count; ++i)
        if (outputs[i].node != outputs[0].node) return;
    const unsigned long thread = PyThread_get_thread_ident();
    if (self->count && self->thread != thread) return;
    if (self->count == MOST_REGIONS) forget_regions(self, 0);
    Py_ssize_t kept = 0;
    for (Py_ssize_t i = 0; i < found->count; ++i) {  // leaves are no concern of the calls around
        Exit exit = found->exits[i];
        set(&exit.from, NULL);
        if (exit.number == kLeaf || !exit.hook) {
            Py_XDECREF(exit.hook);
            Py_DECREF(exit.node);
        } else {
            found->exits[kept++] = exit;
        }
    }
    self->thread = thread;
    self->regions[self->count++] = (Region){edges->born, edges->born + found->size, entry, hook, kept, found->exits};
    Py_XINCREF(hook);
    found->exits = NULL;
    found->count = 0;
}

// Watches a call by one hook on the node it made. 1 when that is all it takes, 0 when not, −1 with an error set.
static int watch_node(Live *self, PyObject *engine, PyObject *call, const Edges *edges, const Output *outputs,
                      int count) {
    PyObject *node = outputs[0].node;
    if (node == Py_None || outputs[0].number != edges->born) return 0;
    for (int i = 1; i < count; ++i)
        if (outputs[i].node != node) return 0;
    const int own = PySet_Contains(g.own, (PyObject *)Py_TYPE(node));
    if (own < 0) return -1;
    if (!own) {
        PyObject *untouched = PyObject_CallFunctionObjArgs(g.untouched, node, NULL);
        if (!untouched) return -1;
        Py_DECREF(untouched);
        if (untouched != Py_True) return 0;
    }

    uint64_t ahead[1];
    PyObject *nodes[1] = {node};
    Walk found = {.edges = edges, .size = 1, .nodes = nodes, .ahead = ahead};
    const Outcome outcome = walk_node(&found, node);
    int result = outcome == FAILED ? -1 : outcome == WALKED;
    for (Py_ssize_t i = 1; i < found.count; ++i)  // x * x: there is a sum to wait for
        for (Py_ssize_t j = 0; j < i; ++j)
            if (found.exits[i].input == found.exits[j].input) result = 0;
    NodeGradients *hook = result > 0 ? (NodeGradients *)placed_new(NodeType) : NULL;
    if (hook) {
        hook->engine = Py_NewRef(engine);
        hook->call = Py_NewRef(call);
        hook->routes = hook->room;
        hook->arrives = hook->sends = 0;
        hook->around = NULL;
        const size_t routes = (size_t)count + (size_t)found.count;
        if (routes > 2) hook->routes = PyMem_Malloc(routes * sizeof(Route));
        if (hook->routes) {
            for (int i = 0; i < count; ++i)
                hook->routes[hook->arrives++] = (Route){outputs[i].output, Py_NewRef(outputs[i].path)};
            for (Py_ssize_t i = 0; i < found.count; ++i)
                hook->routes[count + hook->sends++] =
                    (Route){found.exits[i].index, Py_NewRef(edges->inputs[found.exits[i].input].path)};
        } else {
            PyErr_NoMemory();
        }
        const int before = regions_before(self, edges);
        NodeGradients *inner = before < self->count ? (NodeGradients *)self->regions[self->count - 1].hook : NULL;
        if (!hook->routes)
            result = -1;
        else if (inner && !inner->around)  // a call inside made this very node
            inner->around = Py_NewRef((PyObject *)hook);
        else if (!place_on_node(&hook->placed, &self->hooks, node))
            result = -1;
        if (result > 0) {
            for (Py_ssize_t i = 0; i < found.count; ++i) found.exits[i].hook = Py_NewRef((PyObject *)hook);
            keep_region(self, edges, &found, outputs, count, 0, (PyObject *)hook);
        }
        Py_DECREF(hook);
    } else if (result > 0) {
        result = -1;
    }
    exits_free(found.exits, found.count);
    return result;
}

// Orders the hooks of a tensor: what a call has sent here comes before what arrives here. torch calls them in the order
// they were put into their dict, which taking out and putting back changes.
static int let_completion_come_first(PyObject *tensor) {
    PyObject *hooks = PyObject_GetAttr(tensor, s__backward_hooks);
    if (!hooks || hooks == Py_None) {
        Py_XDECREF(hooks);
        return hooks != NULL;
    }
    PyObject *keys = PySequence_List(hooks);
    int ordered = keys != NULL;
    for (Py_ssize_t i = 0; ordered && i < PyList_Size(keys); ++i) {
        PyObject *key = PyList_GetItem(keys, i), *hook = PyObject_GetItem(hooks, key);
        ordered = hook && (Py_TYPE(hook) != ArrivalType ||
                           (!PyObject_DelItem(hooks, key) && !PyObject_SetItem(hooks, key, hook)));
        Py_XDECREF(hook);
    }
    Py_XDECREF(keys);
    Py_DECREF(hooks);
    return ordered;
}

// Puts a hook on a tensor that has no graph to take it along.
static int place_on_leaf(Live *self, PyObject *hook, PyObject *tensor) {
    PyObject *handle = PyObject_CallMethodObjArgs(tensor, s_register_hook, hook, NULL);
    const int placed = handle && !PyList_Append(self->on_leaves, handle);
    Py_XDECREF(handle);
    return placed;
}

// Of several nodes that send to one input some may never run: the sum is whole when the input's turn comes.
static int watch_for_completion(Live *self, CallGradients *gradients, const Edges *edges) {
    for (int i = 0; i < gradients->count; ++i) {
        if (gradients->targets[i].expected < 2) continue;
        const Input *input = &edges->inputs[gradients->targets[i].input];
        const int now = edges_find_tensor(edges, input->tensor);
        Completion *hook = now == -2 ? NULL : (Completion *)placed_new(CompletionType);
        if (!hook) return 0;
        hook->gradients = (CallGradients *)Py_NewRef((PyObject *)gradients);
        hook->target = i;
        int placed;
        if (now != gradients->targets[i].input) {  // changed in place since; its former self has a node alone
            PyObject *handle = NULL;
            if (input->node)
                handle = PyObject_CallMethodObjArgs(input->node, s_register_prehook, hook, NULL);
            else
                PyErr_SetObject(PyExc_KeyError, input->path);
            placed = handle && placed_at(&hook->placed, &self->hooks, handle);
            Py_XDECREF(handle);
        } else {
            placed = input->node ? place_on_tensor(&hook->placed, &self->hooks, input->tensor, input->node)
                                 : place_on_leaf(self, (PyObject *)hook, input->tensor);
            placed = placed && let_completion_come_first(input->tensor);
        }
        Py_DECREF(hook);
        if (!placed) return 0;
    }
    return 1;
}

// Which target of a call an input is; added when it is none yet.
static int target_of(CallGradients *gradients, const Edges *edges, int input) {
    for (int i = 0; i < gradients->count; ++i)
        if (gradients->targets[i].input == input) return i;
    Target *target = &gradients->targets[gradients->count];
    *target = (Target){Py_NewRef(edges->inputs[input].path), input, 0, 0, NULL};
    return gradients->count++;
}

// What a hook of a call inside has for the calls around, borrowed.
static Sending *sending_of(PyObject *hook) {
    if (Py_TYPE(hook) == SendingType) return (Sending *)hook;
    NodeGradients *node = (NodeGradients *)hook;
    if (!node->around) node->around = (PyObject *)sending_new();
    return (Sending *)node->around;
}

// Reads what is sent along each exit. Those of one node follow each other, and share a hook.
static int watch_exits(Live *self, CallGradients *gradients, const Edges *edges, Walk *found, uint64_t passed) {
    Sending *latest = NULL;
    PyObject *latest_node = NULL;
    for (Py_ssize_t i = 0; i < found->count; ++i) {
        Exit *exit = &found->exits[i];
        if (passed >> exit->input & 1) continue;
        const int target = target_of(gradients, edges, exit->input);
        ++gradients->targets[target].expected;
        if (exit->hook) {  // of a call inside
            Sending *hook = sending_of(exit->hook);
            if (!hook || !sending_add(hook, exit->index, gradients, target)) return 0;
            continue;
        }
        if (exit->from != latest_node) {
            Sending *hook = sending_new();
            if (!hook) return 0;
            const int placed = place_on_node(&hook->placed, &self->hooks, exit->from);
            Py_DECREF(hook);  // which lives on in its place
            if (!placed) return 0;
            latest = hook;
            latest_node = exit->from;
        }
        if (!sending_add(latest, exit->index, gradients, target)) return 0;
        exit->hook = Py_NewRef((PyObject *)latest);
    }
    return 1;
}

// Watches a call by hooks on its outputs and on the nodes that send to its inputs. ODD when Python has to do it.
static Outcome watch_several(Live *self, PyObject *engine, PyObject *call, const Edges *edges, Output *outputs,
                             int count, uint64_t now) {
    Walk found = {.edges = edges, .size = now - edges->born};
    uint64_t passed = 0;  // a bit for each input that is an output too
    Outcome outcome = WALKED;
    if (edges->count) {
        if (found.size > MOST_NODES) return ODD;
        const int inner = regions_before(self, edges);
        found.regions = self->regions + inner;
        found.known = edges->leaves ? 0 : self->count - inner;
        do {
            if (outcome == SHORTCUT_FAILED) {
                walk_free(&found);
                found.known = 0;
            }
            outcome = WALKED;
            if (!found.size) break;
            found.nodes = PyMem_Calloc((size_t)found.size, sizeof(PyObject *));
            found.ahead = PyMem_Malloc((size_t)found.size * sizeof(uint64_t));
            if (!found.nodes || !found.ahead) {
                PyErr_NoMemory();
                outcome = FAILED;
            }
            for (int i = 0; outcome == WALKED && i < count; ++i)
                if (outputs[i].node != Py_None && outputs[i].number >= edges->born)
                    outcome = walk_meet(&found, outputs[i].node, outputs[i].number);
            if (outcome == WALKED) outcome = walk(&found);
        } while (outcome == SHORTCUT_FAILED);
        for (int i = 0; i < count; ++i) {
            // An output that is an input: what arrives cannot be told from what others send, so it counts as a whole.
            outputs[i].through = outputs[i].node == Py_None ? edges_find_leaf(edges, outputs[i].tensor)
                                                            : edges_find(edges, outputs[i].node, outputs[i].output);
            if (outputs[i].through >= 0) passed |= (uint64_t)1 << outputs[i].through;
        }
    }
    CallGradients *gradients = outcome == WALKED ? PyObject_New(CallGradients, CallType) : NULL;
    if (!gradients) {
        walk_free(&found);
        return outcome == ODD ? ODD : FAILED;
    }
    link_alone(&gradients->link);
    gradients->engine = Py_NewRef(engine);
    gradients->call = Py_NewRef(call);
    gradients->seq = NULL;
    gradients->arrived = 0;
    gradients->count = 0;
    gradients->targets = NULL;
    outcome = FAILED;
    if (edges->count) {
        const Py_ssize_t most = found.count < edges->count ? found.count : edges->count;
        if (most) gradients->targets = PyMem_Malloc((size_t)most * sizeof(Target));
        if (most && !gradients->targets) {
            PyErr_NoMemory();
            goto end;
        }
        if (!watch_exits(self, gradients, edges, &found, passed)) goto end;
        if (!watch_for_completion(self, gradients, edges)) goto end;
    }
    for (int i = 0; i < count; ++i) {
        Arrival *hook = (Arrival *)placed_new(ArrivalType);
        if (!hook) goto end;
        hook->gradients = (CallGradients *)Py_NewRef((PyObject *)gradients);
        hook->path = Py_NewRef(outputs[i].path);
        hook->through = outputs[i].through < 0 ? NULL : Py_NewRef(edges->inputs[outputs[i].through].path);
        hook->output = i;
        const int placed = outputs[i].node == Py_None
                               ? place_on_leaf(self, (PyObject *)hook, outputs[i].tensor)
                               : place_on_tensor(&hook->placed, &self->hooks, outputs[i].tensor, outputs[i].node);
        Py_DECREF(hook);
        if (!placed) goto end;
    }
    link_into(&self->calls, &gradients->link);
    if (edges->count) keep_region(self, edges, &found, outputs, count, passed, NULL);
    outcome = WALKED;
end:
    walk_free(&found);
    Py_DECREF(gradients);
    return outcome;
}

// watch(engine, call, edges, outputs): sees the gradients of a call that has returned `outputs`
static PyObject *live_watch(PyObject *object, PyObject *const *args, Py_ssize_t size) {
    Live *self = (Live *)object;
    if (size != 4) return PyErr_Format(PyExc_TypeError, "`watch` takes 4 arguments, not %zd.", size);
    PyObject *engine = args[0], *call = args[1], *given = args[2], *outputs = args[3];
    if (Py_TYPE(given) != EdgesType || !PyList_Check(outputs)) return hand_over(self, engine, call, given, outputs);
    const Edges *edges = (Edges *)given;
    Output hooked[MOST_OUTPUTS];
    int count = 0, too_many = 0;
    PyObject *result = NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(outputs); ++i) {
        PyObject *pair = PyList_GetItem(outputs, i);
        PyObject *path = PyTuple_GetItem(pair, 0), *tensor = path ? PyTuple_GetItem(pair, 1) : NULL;
        PyObject *node;
        const int wanted = tensor ? part_of_graph(tensor, &node) : -1;
        if (wanted < 0) goto end;
        if (!wanted) continue;
        if (count == MOST_OUTPUTS) {
            Py_DECREF(node);
            too_many = 1;
            break;
        }
        Output *one = &hooked[count++];
        *one = (Output){path, tensor, node, 0, kLeaf, -1};
        if (node != Py_None && (!output_of(tensor, &one->output) || !number_of(node, &one->number))) goto end;
    }
    if (count) {
        uint64_t now;
        if (!number_now(&now)) goto end;
        int watched = 0;
        if (!too_many && now == edges->born + 1) watched = watch_node(self, engine, call, edges, hooked, count);
        if (watched < 0) goto end;
        if (!watched) {
            const Outcome outcome = too_many ? ODD : watch_several(self, engine, call, edges, hooked, count, now);
            if (outcome == FAILED) goto end;
            if (outcome == ODD) {
                PyObject *twin = edges_in_python(edges);
                if (twin) result = hand_over(self, engine, call, twin, outputs);
                Py_XDECREF(twin);
                goto end;
            }
        }
    }
    if (edges_open < 2) forget_regions(self, 0);  // no call is around this one
    result = Py_NewRef(Py_None);
end:
    for (int i = 0; i < count; ++i) Py_DECREF(hooked[i].node);
    return result;
}

// Holds everything in a list, which may change while Python runs. NULL with an error set.
static PyObject **hold(Link *list, size_t offset, Py_ssize_t *count) {
    *count = 0;
    for (Link *link = list->after; link != list; link = link->after) ++*count;
    PyObject **held = PyMem_Malloc((size_t)(*count + 1) * sizeof(PyObject *));
    if (!held) return (PyObject **)PyErr_NoMemory();
    Py_ssize_t i = 0;
    for (Link *link = list->after; link != list; link = link->after)
        held[i++] = Py_NewRef((PyObject *)(void *)((char *)link - offset));
    return held;
}

static void let_go(PyObject **held, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; ++i) Py_DECREF(held[i]);
    PyMem_Free(held);
}

// finish(): ends the step. A sum that waits for more is recorded as it is, and nothing stays on a leaf.
static PyObject *live_finish(PyObject *object, PyObject *unused) {
    (void)unused;
    Live *self = (Live *)object;
    Py_ssize_t count;
    forget_regions(self, 0);
    PyObject **held = hold(&self->calls, offsetof(CallGradients, link), &count);
    if (!held) return NULL;
    int done = 1;
    for (Py_ssize_t i = 0; done && i < count; ++i) {
        CallGradients *gradients = (CallGradients *)held[i];
        if (!call_is_summing(gradients)) continue;
        const int sleeps = asleep(gradients->engine);
        done = sleeps >= 0;
        if (sleeps || call_finish(gradients)) continue;
        PyObject *told = report_call(gradients->engine, gradients->call);
        done = told != NULL;
        Py_XDECREF(told);
    }
    let_go(held, count);
    PyObject *on_leaves = self->on_leaves;
    self->on_leaves = PyList_New(0);
    for (Py_ssize_t i = 0; done && i < PyList_Size(on_leaves); ++i) {
        PyObject *removed = PyObject_CallMethodObjArgs(PyList_GetItem(on_leaves, i), s_remove, NULL);
        done = removed != NULL;
        Py_XDECREF(removed);
    }
    Py_DECREF(on_leaves);
    if (done && self->twin) return PyObject_CallMethodObjArgs(self->twin, s_finish, NULL);
    return done && self->on_leaves ? Py_NewRef(Py_None) : NULL;
}

// remove(): takes every hook off the graphs.
static PyObject *live_remove(PyObject *object, PyObject *unused) {
    (void)unused;
    Live *self = (Live *)object;
    Py_ssize_t count;
    PyObject **held = hold(&self->hooks, offsetof(Placed, link), &count);
    if (!held) return NULL;
    int done = 1;
    for (Py_ssize_t i = 0; i < count; ++i) {
        Placed *hook = (Placed *)held[i];
        link_out(&hook->link);
        done = done && take_off(hook);
    }
    let_go(held, count);
    done = done && live_registers(self, 0);
    if (done && self->twin) return PyObject_CallMethodObjArgs(self->twin, s_remove, NULL);
    return done ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef live_methods[] = {
    {"watch", (PyCFunction)(void (*)(void))live_watch, METH_FASTCALL, NULL},
    {"finish", live_finish, METH_NOARGS, NULL},
    {"remove", live_remove, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

// ---- parameters ----------------------------------------------------------------------------------------------------

// Sees the gradient of a parameter each time something was added to it.
typedef struct {
    PyObject_HEAD
    PyObject *engine, *site, *seq;
    int arrived;
    PyObject *gradient;  // the one it saw last, to be compared and not to be touched: it is not held
    long long version;   // of that, or −1 where there is none
} Accumulated;

static PyObject *accumulated_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *engine, *site;
    if (!PyArg_ParseTuple(args, "OO", &engine, &site)) return NULL;
    Accumulated *self = PyObject_New(Accumulated, type);
    if (!self) return NULL;
    self->seq = self->gradient = NULL;
    self->arrived = 0;
    self->version = -1;
    self->engine = Py_NewRef(engine);
    self->site = Py_NewRef(site);
    return (PyObject *)self;
}

static void accumulated_dealloc(PyObject *object) {
    Accumulated *self = (Accumulated *)object;
    Py_XDECREF(self->engine);
    Py_XDECREF(self->site);
    Py_XDECREF(self->seq);
    dispose(object);
}

// 0 when an error has to reach the program.
static int accumulated_see(Accumulated *self, PyObject *path, PyObject *gradient) {
    const int listening = is_true(self->engine, s_listening);
    const int here = listening > 0 ? is_true(self->engine, s_is_here) : listening;
    if (here <= 0) return !here;
    if (!self->seq) self->seq = PyObject_CallMethodObjArgs(self->engine, s_event, self->site, s_backward, NULL);
    if (self->seq && observe(self->engine, self->seq, s_gradient, path, gradient)) return 1;
    return report(self->engine, self->site, "the gradient of %U");
}

// Remembers in which version a gradient was left, for whoever asks whether it was written to since.
static void accumulated_note(Accumulated *self, PyObject *gradient) {
    PyObject *version = PyObject_GetAttr(gradient, s__version);
    self->version = version ? PyLong_AsLongLong(version) : -1;
    self->gradient = gradient;
    Py_XDECREF(version);
    PyErr_Clear();  // made in inference mode
}

// How often a gradient was written to since it was seen; −1 when it is another one, or not known.
static PyObject *accumulated_writes(PyObject *object, PyObject *gradient) {
    Accumulated *self = (Accumulated *)object;
    if (gradient != self->gradient || self->version < 0) return PyLong_FromLong(-1);
    PyObject *version = PyObject_GetAttr(gradient, s__version);
    if (!version) return NULL;
    const long long now = PyLong_AsLongLong(version);
    Py_DECREF(version);
    return PyLong_FromLongLong(now - self->version);
}

static PyObject *accumulated_run(PyObject *object, PyObject *parameter) {
    Accumulated *self = (Accumulated *)object;
    const int arrived = self->arrived;
    self->arrived = 0;
    PyObject *gradient = PyObject_GetAttr(parameter, s_grad);
    if (!gradient) return NULL;
    int seen = 1;
    if (gradient != Py_None) {
        seen = accumulated_see(self, s_grad, gradient);
        if (seen) accumulated_note(self, gradient);
    } else if (arrived) {
        PyObject *name = PyObject_GetAttr(self->site, s_name);
        PyObject *what = name ? PyUnicode_FromFormat("the gradient of %U", name) : NULL;
        PyObject *why = PyUnicode_FromString("another hook took it away first");
        PyObject *told = what && why ? PyObject_CallMethodObjArgs(self->engine, s_missed, what, why, NULL) : NULL;
        seen = told != NULL;
        Py_XDECREF(name);
        Py_XDECREF(what);
        Py_XDECREF(why);
        Py_XDECREF(told);
    }  // else compiled code calls here for parameters that it has no gradient for
    if (gradient != Py_None || arrived) set(&self->seq, NULL);
    Py_DECREF(gradient);
    return seen ? Py_NewRef(Py_None) : NULL;
}
TENSOR_HOOK(accumulated, {"writes", accumulated_writes, METH_O, NULL}, )

// Sees a gradient just before it is added to the one that is there already.
typedef struct {
    PyObject_HEAD
    Accumulated *accumulated;
    PyObject *parameter;  // a weak reference
} Arriving;

static PyObject *arriving_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *accumulated, *parameter;
    if (!PyArg_ParseTuple(args, "O!O", AccumulatedType, &accumulated, &parameter)) return NULL;
    Arriving *self = PyObject_New(Arriving, type);
    if (!self) return NULL;
    self->accumulated = (Accumulated *)Py_NewRef(accumulated);
    self->parameter = Py_NewRef(parameter);
    return (PyObject *)self;
}

static void arriving_dealloc(PyObject *object) {
    Arriving *self = (Arriving *)object;
    Py_XDECREF(self->accumulated);
    Py_XDECREF(self->parameter);
    dispose(object);
}

static PyObject *arriving_run(PyObject *object, PyObject *gradient) {
    Arriving *self = (Arriving *)object;
    self->accumulated->arrived = gradient != Py_None;
    set(&self->accumulated->seq, NULL);  // of one that a signal handler's exception has cut short
    if (gradient == Py_None) return Py_NewRef(Py_None);
    PyObject *parameter = PyObject_CallObject(self->parameter, NULL);
    PyObject *there = NULL;
    if (parameter) there = parameter == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(parameter, s_grad);
    const int seen = there && (there == Py_None || accumulated_see(self->accumulated, s_added, gradient));
    Py_XDECREF(parameter);
    Py_XDECREF(there);
    return seen ? Py_NewRef(Py_None) : NULL;
}
TENSOR_HOOK(arriving, )

// ---- what Python calls ---------------------------------------------------------------------------------------------

// use(…): what the module needs of others; see `g`.
static PyObject *py_use(PyObject *self, PyObject *args, PyObject *kwargs) {
    (void)self;
    static char *names[] = {"sequence_nr", "depth", "dispatch_depth", "grad_enabled", "disable", "plain",
                            "ordered", "edges", "live", "add_up", "untouched", "own",
                            "registering", "registered", "dicts_track_themselves", NULL};
    PyObject **all[] = {&g.sequence_nr, &g.depth, &g.dispatch_depth, &g.grad_enabled, &g.disable,
                        &g.plain,       &g.ordered, &g.edges,        &g.live,         &g.add_up,
                        &g.untouched,   &g.own,   &g.registering,    &g.registered};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO!OOOOOO!OOp", names, &g.sequence_nr, &g.depth,
                                     &g.dispatch_depth, &g.grad_enabled, &g.disable, &PyTuple_Type, &g.plain,
                                     &g.ordered, &g.edges, &g.live, &g.add_up, &g.untouched, &PySet_Type, &g.own,
                                     &g.registering, &g.registered, &g.dicts_track_themselves))
        return NULL;
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i) Py_INCREF(*all[i]);  // for as long as the program runs
    return Py_NewRef(Py_None);
}

// look_at(tensor): learns from a result whether torch keeps the Python object of its node.
static PyObject *look_at(PyObject *self, PyObject *tensor) {
    (void)self;
    PyObject *node = PyObject_GetAttr(tensor, s_grad_fn);
    if (!node) return NULL;
    g.nodes_stay = node != Py_None && Py_REFCNT(node) == 2;
    Py_DECREF(node);
    return PyBool_FromLong(g.nodes_stay);
}

static PyMethodDef kMethods[] = {
    {"use", (PyCFunction)(void (*)(void))py_use, METH_VARARGS | METH_KEYWORDS, NULL},
    {"look_at", look_at, METH_O, NULL},
    {"register_hook", (PyCFunction)(void (*)(void))register_hook, METH_FASTCALL, NULL},
    HOOK_FUNCTIONS
    {NULL, NULL, 0, NULL},
};

static PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "astray.capture.pytorch.backward._gradients", NULL, -1, kMethods, NULL, NULL, NULL, NULL,
};

#define PACKAGE "astray.capture.pytorch.backward._gradients."
#define SLOT(slot, function) {slot, (void *)(function)}
#define END {0, NULL}
#define HOOK_SLOTS(name) \
    SLOT(Py_tp_dealloc, name##_dealloc), SLOT(Py_tp_call, name##_call), SLOT(Py_tp_methods, name##_methods)

static int add_type(PyObject *module, PyTypeObject **place, const char *name, size_t size, unsigned flags,
                    PyType_Slot *slots) {
    PyType_Spec spec = {name, (int)size, 0, Py_TPFLAGS_DEFAULT | flags, slots};
    *place = (PyTypeObject *)PyType_FromSpec(&spec);
    return *place && !PyModule_AddObjectRef(module, name + sizeof PACKAGE - 1, (PyObject *)*place);
}

PyMODINIT_FUNC PyInit__gradients(void) {
#define INTERN(word) \
    if (!(s_##word = PyUnicode_InternFromString(#word))) return NULL;
    NAMES(INTERN)
    if (hooks_prepare() < 0) return NULL;
    PyObject *module = PyModule_Create(&kModule);
    if (!module) return NULL;
    PyType_Slot edges[] = {SLOT(Py_tp_new, edges_new), SLOT(Py_tp_dealloc, edges_dealloc), END};
    PyType_Slot live[] = {SLOT(Py_tp_new, live_new), SLOT(Py_tp_dealloc, live_dealloc),
                          SLOT(Py_tp_methods, live_methods), END};
    PyType_Slot call[] = {SLOT(Py_tp_dealloc, call_dealloc), END};
    PyType_Slot node[] = {HOOK_SLOTS(node), END}, arrival[] = {HOOK_SLOTS(arrival), END};
    PyType_Slot sending[] = {HOOK_SLOTS(sending), END}, completion[] = {HOOK_SLOTS(completion), END};
    PyType_Slot accumulated[] = {SLOT(Py_tp_new, accumulated_new), HOOK_SLOTS(accumulated), END};
    PyType_Slot arriving[] = {SLOT(Py_tp_new, arriving_new), HOOK_SLOTS(arriving), END};
    const unsigned hidden = Py_TPFLAGS_DISALLOW_INSTANTIATION;
    if (add_type(module, &EdgesType, PACKAGE "InputEdges", sizeof(Edges), 0, edges) &&
        add_type(module, &LiveType, PACKAGE "LiveGradients", sizeof(Live), 0, live) &&
        add_type(module, &CallType, PACKAGE "CallGradients", sizeof(CallGradients), hidden, call) &&
        add_type(module, &NodeType, PACKAGE "NodeGradients", sizeof(NodeGradients), hidden, node) &&
        add_type(module, &ArrivalType, PACKAGE "ArrivalHook", sizeof(Arrival), hidden, arrival) &&
        add_type(module, &SendingType, PACKAGE "SendingHook", sizeof(Sending), hidden, sending) &&
        add_type(module, &CompletionType, PACKAGE "CompletionHook", sizeof(Completion), hidden, completion) &&
        add_type(module, &AccumulatedType, PACKAGE "AccumulatedHook", sizeof(Accumulated), 0, accumulated) &&
        add_type(module, &ArrivingType, PACKAGE "ArrivingHook", sizeof(Arriving), 0, arriving))
        return module;
    Py_DECREF(module);
    return NULL;
}
