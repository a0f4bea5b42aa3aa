// Takes the arguments of a call apart when their structure is known: what `Flattener` does in capture/structure.py.
//
// Anything that is not plain to see, or is met for the first time, goes to Python.

#include "calls.h"

enum { kTypes = 32, kRoom = 640, kLongestList = 64, kLongestKey = 256, kMany = 10000 };

typedef struct {
    PyObject_HEAD
    PyObject *tensors, *values, *is_tensor, *walk, *walk_result, *known, *mark;
    PyObject *at_sight[kTypes], *plain[kTypes];  // borrowed from the two sets
    int at_sights, plains;
} Structures;

PyTypeObject *structures_type;

static PyObject *s_out, *result_paths[kLongestList];

// A key under construction, and the tensors met on the way. All are held.
typedef struct {
    PyObject *key[kRoom], *tensors[kRoom];
    int length, count;
} Reading;

static inline int is_among(PyObject *type, PyObject *const *types, int count) {
    for (int i = 0; i < count; ++i) {
        if (types[i] == type) return 1;
    }
    return 0;
}

static inline void add_key(Reading *reading, PyObject *part) {
    Py_INCREF(part);
    reading->key[reading->length++] = part;
}

// 1 when a value was read, 0 when it is not plain to see what it is, -1 with an error set.
static int read_value(Structures *self, PyObject *value, Reading *reading) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (reading->length + 2 >= kRoom || reading->count + 1 >= kRoom) return 0;
    if (!is_among(type, self->at_sight, self->at_sights)) {
        if (is_among(type, self->plain, self->plains)) {
            add_key(reading, type);
            add_key(reading, value);
            return 1;
        }
        const int is_list = type == (PyObject *)&PyList_Type, is_sequence = is_list || type == (PyObject *)&PyTuple_Type;
        if (is_sequence) {
            const Py_ssize_t size = is_list ? PyList_Size(value) : PyTuple_Size(value);
            if (size > kLongestList || reading->length >= kLongestKey) return 0;
            PyObject *length = PyLong_FromSsize_t(size);
            if (!length) return -1;
            add_key(reading, type);
            reading->key[reading->length++] = length;
            for (Py_ssize_t i = 0; i < size; ++i) {
                PyObject *item = is_list ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i);
                if (!item) return -1;
                Py_INCREF(item);  // another thread may change the list
                const int read = read_value(self, item, reading);
                Py_DECREF(item);
                if (read <= 0) return read;
            }
            return 1;
        }
        PyObject *answer = PyObject_CallFunctionObjArgs(self->is_tensor, value, NULL);
        if (!answer) return -1;
        const int is_tensor = PyObject_IsTrue(answer);
        Py_DECREF(answer);
        if (is_tensor <= 0) return is_tensor;
    }
    add_key(reading, self->mark);
    reading->tensors[reading->count++] = Py_NewRef(value);
    return 1;
}

static int read_call(Structures *self, PyObject *args, PyObject *kwargs, Reading *reading) {
    if (!PyTuple_Check(args) || (kwargs && !PyDict_Check(kwargs))) return 0;
    const Py_ssize_t size = PyTuple_Size(args);
    if (size > kRoom / 4 || (kwargs && PyDict_Size(kwargs) > kRoom / 8)) return 0;
    PyObject *length = PyLong_FromSsize_t(size), *name, *value;
    if (!length) return -1;
    reading->key[reading->length++] = length;
    Py_ssize_t at = 0;
    while (kwargs && PyDict_Next(kwargs, &at, &name, NULL)) add_key(reading, name);
    int read = 1;
    for (Py_ssize_t i = 0; read > 0 && i < size; ++i) read = read_value(self, PyTuple_GetItem(args, i), reading);
    at = 0;
    while (read > 0 && kwargs && PyDict_Next(kwargs, &at, NULL, &value)) read = read_value(self, value, reading);
    return read;
}

// What Python makes of a call: (tensors with paths, skeleton).
static PyObject *walk_call(Structures *self, PyObject *args, PyObject *kwargs) {
    PyObject *given = kwargs ? Py_NewRef(kwargs) : PyDict_New();
    PyObject *found = given ? PyObject_CallFunctionObjArgs(self->walk, args, given, NULL) : NULL;
    Py_XDECREF(given);
    if (found && (!PyTuple_Check(found) || PyTuple_Size(found) != 2 || !PyList_Check(PyTuple_GetItem(found, 0)))) {
        PyErr_SetString(PyExc_TypeError, "The arguments of a call were not taken apart into tensors and a skeleton.");
        Py_CLEAR(found);
    }
    return found;
}

static int hand_out(PyObject *pair, PyObject **found, PyObject **skeleton) {
    if (!pair) return -1;
    *found = Py_NewRef(PyTuple_GetItem(pair, 0));
    *skeleton = Py_NewRef(PyTuple_GetItem(pair, 1));
    Py_DECREF(pair);
    return 0;
}

// Remembers the paths of a structure: ((path, …), skeleton), as it is kept in `known`. A new reference.
static PyObject *remember(Structures *self, PyObject *key, PyObject *pair) {
    PyObject *found = PyTuple_GetItem(pair, 0);
    const Py_ssize_t count = PyList_Size(found);
    PyObject *paths = PyTuple_New(count);
    for (Py_ssize_t i = 0; paths && i < count; ++i) {
        PyObject *path = PySequence_GetItem(PyList_GetItem(found, i), 0);
        if (!path || PyTuple_SetItem(paths, i, path) < 0) Py_CLEAR(paths);
    }
    PyObject *entry = paths ? PyTuple_Pack(2, paths, PyTuple_GetItem(pair, 1)) : NULL;
    Py_XDECREF(paths);
    if (!entry) return NULL;
    if (PyDict_Size(self->known) > kMany) PyDict_Clear(self->known);
    if (PyDict_SetItem(self->known, key, entry) < 0) Py_CLEAR(entry);
    return entry;
}

static PyObject *with_paths(PyObject *paths, PyObject *const *tensors, int count) {
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; ++i) {
        PyObject *one = PyTuple_Pack(2, PyTuple_GetItem(paths, i), tensors[i]);
        if (!one || PyList_SetItem(list, i, one) < 0) Py_CLEAR(list);
    }
    return list;
}

int structures_arguments(PyObject *object, PyObject *args, PyObject *kwargs, PyObject **found, PyObject **skeleton) {
    Structures *self = (Structures *)object;
    Reading reading;
    reading.length = reading.count = 0;
    int failed = -1;
    PyObject *key = NULL, *entry = NULL;
    if (kwargs && PyDict_Check(kwargs) && !PyDict_Size(kwargs)) kwargs = NULL;
    const int read = read_call(self, args, kwargs, &reading);
    if (read == 0) {
        failed = hand_out(walk_call(self, args, kwargs), found, skeleton);
    } else if (read > 0 && (key = PyTuple_New(reading.length))) {
        for (int i = 0; i < reading.length; ++i) PyTuple_SetItem(key, i, reading.key[i]);
        reading.length = 0;  // the tuple holds them now
        entry = PyDict_GetItemWithError(self->known, key);
        Py_XINCREF(entry);
        if (!entry && !PyErr_Occurred()) {
            PyObject *pair = walk_call(self, args, kwargs);
            if (pair && PyList_Size(PyTuple_GetItem(pair, 0)) != reading.count) {
                failed = hand_out(pair, found, skeleton);
                pair = NULL;
            } else if (pair) {
                entry = remember(self, key, pair);
            }
            Py_XDECREF(pair);
        }
        if (entry) {
            *found = with_paths(PyTuple_GetItem(entry, 0), reading.tensors, reading.count);
            *skeleton = *found ? Py_NewRef(PyTuple_GetItem(entry, 1)) : NULL;
            failed = *found ? 0 : -1;
        }
    }
    for (int i = 0; i < reading.length; ++i) Py_DECREF(reading.key[i]);
    for (int i = 0; i < reading.count; ++i) Py_DECREF(reading.tensors[i]);
    Py_XDECREF(key);
    Py_XDECREF(entry);
    return failed;
}

// The path of a result among several. Borrowed; NULL with an error set.
static PyObject *result_path(Py_ssize_t at) {
    if (!result_paths[at]) result_paths[at] = PyUnicode_FromFormat("out.%zd", at);
    return result_paths[at];
}

static int add_found(PyObject *list, PyObject *path, PyObject *tensor) {
    PyObject *one = path ? PyTuple_Pack(2, path, tensor) : NULL;
    const int failed = !one || PyList_Append(list, one) < 0;
    Py_XDECREF(one);
    return failed ? -1 : 0;
}

// The tensors among several results; None when they are not plain to see. A new reference.
static PyObject *several_results(const Structures *self, PyObject *items) {
    const Py_ssize_t size = PyTuple_Size(items);
    if (size > kLongestList || !self->at_sights) return Py_NewRef(Py_None);
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < size; ++i) {
        PyObject *item = PyTuple_GetItem(items, i);
        if (item == Py_None) continue;
        if (!is_among((PyObject *)Py_TYPE(item), self->at_sight, self->at_sights)) {
            Py_DECREF(list);
            return Py_NewRef(Py_None);
        }
        if (add_found(list, result_path(i), item) < 0) Py_CLEAR(list);
    }
    return list;
}

PyObject *structures_result(PyObject *object, PyObject *value) {
    Structures *self = (Structures *)object;
    PyObject *type = (PyObject *)Py_TYPE(value), *found = NULL;
    if (is_among(type, self->at_sight, self->at_sights)) {
        PyObject *one = PyTuple_Pack(2, s_out, value);
        found = one ? PyList_New(1) : NULL;
        if (found) PyList_SetItem(found, 0, one);
        else Py_XDECREF(one);
        return found;
    }
    if (type == (PyObject *)&PyTuple_Type || type == (PyObject *)&PyList_Type) {
        PyObject *items = PySequence_Tuple(value);  // another thread may change a list
        found = items ? several_results(self, items) : NULL;
        Py_XDECREF(items);
        if (found != Py_None) return found;
        Py_DECREF(found);
    }
    return PyObject_CallFunctionObjArgs(self->walk_result, value, NULL);
}

// ---- as Python sees it ---------------------------------------------------------------------------------------------

static PyObject *py_arguments(PyObject *self, PyObject *args) {
    PyObject *given, *kwargs, *found, *skeleton;
    if (!PyArg_ParseTuple(args, "OO:arguments", &given, &kwargs)) return NULL;
    if (structures_arguments(self, given, kwargs, &found, &skeleton) < 0) return NULL;
    return Py_BuildValue("(NN)", found, skeleton);
}

static PyMethodDef kMethods[] = {
    {"arguments", py_arguments, METH_VARARGS, NULL},
    {"result", structures_result, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int read_types(PyObject *set, PyObject **types, int *count) {
    PyObject *iterator = PyObject_GetIter(set), *type;
    if (!iterator) return -1;
    while ((type = PyIter_Next(iterator))) {
        Py_DECREF(type);  // the set holds it
        if (*count == kTypes) {
            PyErr_Format(PyExc_ValueError, "More than %d types whose values are plain.", kTypes);
            break;
        }
        types[(*count)++] = type;
    }
    Py_DECREF(iterator);
    return PyErr_Occurred() ? -1 : 0;
}

static int structures_init(PyObject *object, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Structures *self = (Structures *)object;
    PyObject *tensors, *values, *is_tensor, *walk, *walk_result;
    if (!PyArg_ParseTuple(args, "O!O!OOO:Structures", &PyFrozenSet_Type, &tensors, &PyFrozenSet_Type, &values,
                          &is_tensor, &walk, &walk_result))
        return -1;
    replace(&self->tensors, tensors);
    replace(&self->values, values);
    replace(&self->is_tensor, is_tensor);
    replace(&self->walk, walk);
    replace(&self->walk_result, walk_result);
    self->at_sights = self->plains = 0;
    if (!self->known) self->known = PyDict_New();
    if (!self->mark) self->mark = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    if (!self->known || !self->mark) return -1;
    return read_types(tensors, self->at_sight, &self->at_sights) < 0 ? -1
                                                                      : read_types(values, self->plain, &self->plains);
}

static int structures_traverse(PyObject *object, visitproc visit, void *arg) {
    Structures *self = (Structures *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->tensors);
    Py_VISIT(self->values);
    Py_VISIT(self->is_tensor);
    Py_VISIT(self->walk);
    Py_VISIT(self->walk_result);
    Py_VISIT(self->known);
    return 0;
}

static int structures_clear(PyObject *object) {
    Structures *self = (Structures *)object;
    self->at_sights = self->plains = 0;
    Py_CLEAR(self->tensors);
    Py_CLEAR(self->values);
    Py_CLEAR(self->is_tensor);
    Py_CLEAR(self->walk);
    Py_CLEAR(self->walk_result);
    Py_CLEAR(self->known);
    Py_CLEAR(self->mark);
    return 0;
}

static void structures_dealloc(PyObject *self) { end_object(self, structures_clear); }

static PyType_Slot kSlots[] = {
    {Py_tp_init, (void *)structures_init},
    {Py_tp_methods, kMethods},
    {Py_tp_traverse, (void *)structures_traverse},
    {Py_tp_clear, (void *)structures_clear},
    {Py_tp_dealloc, (void *)structures_dealloc},
    {0, NULL},
};

static PyType_Spec kSpec = {
    "astray.capture._calls.Structures", sizeof(Structures), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots,
};

int add_structures(PyObject *module) {
    s_out = PyUnicode_InternFromString("out");
    structures_type = (PyTypeObject *)PyType_FromSpec(&kSpec);
    return s_out && structures_type ? PyModule_AddObjectRef(module, "Structures", (PyObject *)structures_type) : -1;
}
