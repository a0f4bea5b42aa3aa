// Walks Python stacks, and knows again those it has seen: what `Stacks.capture` does in capture/stacks.py.
//
// A stack is known by the numbers of its enclosing stack, its code objects and their instructions. They are looked up
// as they are, without making a Python object of them.

#include "calls.h"

static PyObject *s_back, *s_lasti;

static size_t pointer_hash(const void *pointer) {
    return (size_t)(((uint64_t)(uintptr_t)pointer >> 4) * 0x9E3779B97F4A7C15u >> 20);
}

static KnownCode *code_slot(const CodeTable *table, PyObject *code) {
    size_t at = pointer_hash(code) & (table->size - 1);
    while (table->slots[at].code && table->slots[at].code != code) at = (at + 1) & (table->size - 1);
    return &table->slots[at];
}

static int code_grow(CodeTable *table) {
    CodeTable larger = {NULL, table->size ? 2 * table->size : 64, table->used};
    larger.slots = PyMem_Calloc(larger.size, sizeof(KnownCode));
    if (!larger.slots) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < table->size; ++i) {
        if (table->slots[i].code) *code_slot(&larger, table->slots[i].code) = table->slots[i];
    }
    PyMem_Free(table->slots);
    *table = larger;
    return 0;
}

int code_lookup(CodeTable *table, PyObject *code, PyObject *classify) {
    if (table->size) {
        const KnownCode *known = code_slot(table, code);
        if (known->code) return known->answer;
    }
    PyObject *answer = PyObject_CallFunctionObjArgs(classify, code, NULL);  // during which the table may grow
    if (!answer) return -1;
    const int number = answer == Py_None ? kNeither : answer == Py_True ? kYes : kNo;
    Py_DECREF(answer);
    if (2 * table->used >= table->size && code_grow(table) < 0) return -1;
    KnownCode *slot = code_slot(table, code);
    if (!slot->code) {
        Py_INCREF(code);
        slot->code = code;
        slot->answer = number;
        ++table->used;
    }
    return number;
}

void code_clear(CodeTable *table) {
    const CodeTable old = *table;
    memset(table, 0, sizeof *table);
    for (size_t i = 0; i < old.size; ++i) Py_XDECREF(old.slots[i].code);
    PyMem_Free(old.slots);
}

int code_visit(CodeTable *table, visitproc visit, void *arg) {
    for (size_t i = 0; i < table->size; ++i) Py_VISIT(table->slots[i].code);
    return 0;
}

PyObject *frame_back(PyObject *frame) { return PyObject_GetAttr(frame, s_back); }

// ---- stacks --------------------------------------------------------------------------------------------------------

typedef struct {
    int64_t *key;  // NULL where there is none
    size_t length;
    uint64_t hash;
    PyObject *id;
} KnownStack;

typedef struct {
    PyObject_HEAD
    PyObject *is_internal, *add;
    CodeTable codes;
    KnownStack *stacks;
    size_t size, used;
} Walk;

PyTypeObject *walk_type;

enum { kAtOnce = 128 };  // numbers of a key that need no memory of their own

typedef struct {
    int64_t *numbers, own[kAtOnce];
    size_t length, room;
} Key;

static int key_add(Key *key, int64_t number) {
    if (key->length == key->room) {
        int64_t *larger = PyMem_Malloc(2 * key->room * sizeof(int64_t));
        if (!larger) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(larger, key->numbers, key->length * sizeof(int64_t));
        if (key->numbers != key->own) PyMem_Free(key->numbers);
        key->numbers = larger;
        key->room *= 2;
    }
    key->numbers[key->length++] = number;
    return 0;
}

static KnownStack *stack_slot(const KnownStack *stacks, size_t size, const int64_t *key, size_t length, uint64_t hash) {
    size_t at = (size_t)hash & (size - 1);
    for (;; at = (at + 1) & (size - 1)) {
        const KnownStack *slot = &stacks[at];
        if (!slot->key) return (KnownStack *)slot;
        if (slot->hash == hash && slot->length == length && !memcmp(slot->key, key, length * sizeof *key))
            return (KnownStack *)slot;
    }
}

static int stacks_grow(Walk *self) {
    const size_t size = self->size ? 2 * self->size : 256;
    KnownStack *larger = PyMem_Calloc(size, sizeof(KnownStack));
    if (!larger) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->size; ++i) {
        const KnownStack *one = &self->stacks[i];
        if (one->key) *stack_slot(larger, size, one->key, one->length, one->hash) = *one;
    }
    PyMem_Free(self->stacks);
    self->stacks = larger;
    self->size = size;
    return 0;
}

// The key as Python has it: the id of the outer stack or None, then a code and an instruction each.
static PyObject *key_tuple(const Key *key) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)key->length);
    for (size_t i = 0; tuple && i < key->length; ++i) {
        PyObject *number = i || key->numbers[0] >= 0 ? PyLong_FromLongLong(key->numbers[i]) : Py_NewRef(Py_None);
        if (!number || PyTuple_SetItem(tuple, (Py_ssize_t)i, number) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

// A stack that was not met before: Python writes it down.
static PyObject *walk_add(Walk *self, const Key *key, uint64_t hash, PyObject *frame, PyObject *outer, PyObject *outer_id) {
    PyObject *tuple = key_tuple(key);
    PyObject *id = tuple ? PyObject_CallFunctionObjArgs(self->add, tuple, frame, outer, outer_id, NULL) : NULL;
    Py_XDECREF(tuple);
    if (!id || (2 * self->used >= self->size && stacks_grow(self) < 0)) {
        Py_XDECREF(id);
        return NULL;
    }
    KnownStack *slot = stack_slot(self->stacks, self->size, key->numbers, key->length, hash);
    if (!slot->key) {
        int64_t *numbers = PyMem_Malloc(key->length * sizeof(int64_t));
        if (!numbers) {
            Py_DECREF(id);
            return PyErr_NoMemory();
        }
        memcpy(numbers, key->numbers, key->length * sizeof(int64_t));
        *slot = (KnownStack){numbers, key->length, hash, Py_NewRef(id)};
        ++self->used;
    }
    return id;
}

// Reads the key of a stack. 1 when `outer` was reached, 0 when it is not there, -1 with an error set.
static int walk_read(Walk *self, Key *key, PyObject *frame, PyObject *outer) {
    int reached = -1;
    Py_INCREF(frame);
    while (frame != Py_None && frame != outer) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        const int internal = code_lookup(&self->codes, code, self->is_internal);
        Py_DECREF(code);  // the table holds it
        if (internal < 0) goto end;
        if (internal == kNo) {
            PyObject *lasti = PyObject_GetAttr(frame, s_lasti);
            if (!lasti) goto end;
            const int64_t at = PyLong_AsLongLong(lasti);
            Py_DECREF(lasti);
            if (key_add(key, (int64_t)(intptr_t)code) < 0 || key_add(key, at) < 0) goto end;
        }
        PyObject *back = frame_back(frame);
        if (!back) goto end;
        Py_DECREF(frame);
        frame = back;
    }
    reached = frame == outer;
end:
    Py_DECREF(frame);
    return reached;
}

static PyObject *capture(Walk *self, PyObject *frame, PyObject *outer, PyObject *outer_id) {
    Key key;
    key.numbers = key.own;
    key.room = kAtOnce;
    key.length = 1;
    key.own[0] = outer_id == Py_None ? -1 : PyLong_AsLongLong(outer_id);
    if (key.own[0] == -1 && PyErr_Occurred()) return NULL;
    PyObject *id = NULL;
    const int reached = walk_read(self, &key, frame, outer);
    if (reached > 0) {
        uint64_t hash = 0xCBF29CE484222325u;
        for (size_t i = 0; i < key.length; ++i) {
            hash = (hash ^ (uint64_t)key.numbers[i]) * 0x9E3779B97F4A7C15u;
            hash ^= hash >> 29;
        }
        const KnownStack *known =
            self->size ? stack_slot(self->stacks, self->size, key.numbers, key.length, hash) : NULL;
        id = known && known->key ? Py_NewRef(known->id) : walk_add(self, &key, hash, frame, outer, outer_id);
    } else if (reached == 0) {
        id = Py_NewRef(Py_None);
    }
    if (key.numbers != key.own) PyMem_Free(key.numbers);
    return id;
}

PyObject *walk_capture(PyObject *walk, PyObject *frame, PyObject *outer, PyObject *outer_id) {
    if (Py_TYPE(walk) == walk_type) return capture((Walk *)walk, frame, outer, outer_id);
    return PyObject_CallFunctionObjArgs(walk, frame, outer, outer_id, NULL);
}

static PyObject *walk_call(PyObject *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *frame, *outer = Py_None, *outer_id = Py_None;
    if (!PyArg_ParseTuple(args, "O|OO:capture", &frame, &outer, &outer_id)) return NULL;
    return capture((Walk *)self, frame, outer, outer_id);
}

static int walk_init(PyObject *object, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Walk *self = (Walk *)object;
    PyObject *is_internal, *add;
    if (!PyArg_ParseTuple(args, "OO:Walk", &is_internal, &add)) return -1;
    replace(&self->is_internal, is_internal);
    replace(&self->add, add);
    return 0;
}

static int walk_traverse(PyObject *object, visitproc visit, void *arg) {
    Walk *self = (Walk *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->is_internal);
    Py_VISIT(self->add);
    return code_visit(&self->codes, visit, arg);
}

static int walk_clear(PyObject *object) {
    Walk *self = (Walk *)object;
    Py_CLEAR(self->is_internal);
    Py_CLEAR(self->add);
    code_clear(&self->codes);
    KnownStack *stacks = self->stacks;
    const size_t size = self->size;
    self->stacks = NULL;
    self->size = self->used = 0;
    for (size_t i = 0; i < size; ++i) {
        PyMem_Free(stacks[i].key);
        Py_XDECREF(stacks[i].id);
    }
    PyMem_Free(stacks);
    return 0;
}

static void walk_dealloc(PyObject *self) { end_object(self, walk_clear); }

static PyType_Slot kWalkSlots[] = {
    {Py_tp_init, (void *)walk_init},   {Py_tp_call, (void *)walk_call},       {Py_tp_traverse, (void *)walk_traverse},
    {Py_tp_clear, (void *)walk_clear}, {Py_tp_dealloc, (void *)walk_dealloc}, {0, NULL},
};

static PyType_Spec kWalkSpec = {
    "astray.capture._calls.Walk", sizeof(Walk), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kWalkSlots,
};

int add_walk(PyObject *module) {
    s_back = PyUnicode_InternFromString("f_back");
    s_lasti = PyUnicode_InternFromString("f_lasti");
    walk_type = (PyTypeObject *)PyType_FromSpec(&kWalkSpec);
    return s_back && s_lasti && walk_type ? PyModule_AddObjectRef(module, "Walk", (PyObject *)walk_type) : -1;
}
