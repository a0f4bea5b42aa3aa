// Records plain torch tensors: `Taker.observe` does in one call what `Observer` and `TorchReader` do in fifty.
//
// Those two are the twin: whatever is out of the ordinary (a subclass, a layout, a limit, values to keep, a full ring) is
// handed over to them, and both give the same rows. Where a tensor lies and how it is laid out comes from DLPack's
// exchange table, which torch offers on its class, the rest from methods and attributes that are looked up once. What is
// known of memories lies in a table of our own, which the garbage collector does not walk, and rows go straight to the
// columns that wait to be written.
//
// The GIL is the lock of everything here. Measuring, launching and some methods of torch let go of it, so nothing found
// in a table is used after one of them without being looked for again.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "../../device/_launch.h"
#include "../../store/native/_columns.h"

enum { kMostTypes = 64, kMostRank = 64, kMostLayouts = 20000, kEnough = 4096, kMostPlaces = 32 };

// ---- what is asked of torch ----------------------------------------------------------------------------------------

// Of DLPack's interface, with its own numbers.
enum { kDLMajor = 1, kDLCPU = 1 };

typedef struct {
    void *data;
    int32_t device_type, device_id, rank;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } type;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *unused[3];
    int (*describe)(void *tensor, DLTensor *out);  // which stays valid while the tensor is not touched
} Exchange;

// A method of a tensor that takes nothing, and how to call it without looking it up.
typedef struct {
    PyObject *name;
    PyCFunction function;  // NULL when it is to be looked up
    int flags;
} Method;

// An attribute of a tensor, as the descriptor that its class has.
typedef struct {
    PyObject *descriptor;
    descrgetfunc get;
} Attribute;

static PyObject *no_arguments;  // ()
static PyObject *input_role, *parameter_role;

static int find_method(Method *method, PyObject *tensor, const char *name) {
    method->name = PyUnicode_InternFromString(name);
    PyObject *bound = method->name ? PyObject_GetAttr(tensor, method->name) : NULL;
    if (!bound) return 0;
    if (PyCFunction_CheckExact(bound)) {
        method->flags = PyCFunction_GetFlags(bound);
        if (method->flags == METH_NOARGS || method->flags == METH_VARARGS || method->flags == (METH_VARARGS | METH_KEYWORDS))
            method->function = PyCFunction_GetFunction(bound);
    }
    Py_DECREF(bound);
    return 1;
}

static PyObject *call_method(const Method *method, PyObject *tensor) {
    if (!method->function) return PyObject_CallMethodObjArgs(tensor, method->name, NULL);
    if (method->flags == METH_NOARGS) return method->function(tensor, NULL);
    if (method->flags == METH_VARARGS) return method->function(tensor, no_arguments);
    return ((PyCFunctionWithKeywords)(void (*)(void))method->function)(tensor, no_arguments, NULL);
}

static int find_attribute(Attribute *attribute, PyTypeObject *type, const char *name) {
    attribute->descriptor = PyObject_GetAttrString((PyObject *)type, name);
    if (!attribute->descriptor) return 0;
    attribute->get = (descrgetfunc)PyType_GetSlot(Py_TYPE(attribute->descriptor), Py_tp_descr_get);
    if (!attribute->get) PyErr_Format(PyExc_TypeError, "Tensor.%s is no descriptor.", name);
    return attribute->get != NULL;
}

static PyObject *read_attribute(const Attribute *attribute, PyObject *tensor) {
    return attribute->get(attribute->descriptor, tensor, (PyObject *)Py_TYPE(tensor));
}

// Calls something that is most often a function in C.
static PyObject *call(PyObject *callable, PyObject *const *args, Py_ssize_t count) {
    if (PyCFunction_CheckExact(callable)) {
        const int flags = PyCFunction_GetFlags(callable);
        PyObject *self = PyCFunction_GetSelf(callable);
        PyCFunction function = PyCFunction_GetFunction(callable);
        if (flags == METH_FASTCALL) return ((_PyCFunctionFast)(void (*)(void))function)(self, args, count);
        if (flags == METH_O && count == 1) return function(self, args[0]);
    }
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; ++i) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(tuple, i, args[i]);
    }
    PyObject *result = tuple ? PyObject_Call(callable, tuple, NULL) : NULL;
    Py_XDECREF(tuple);
    return result;
}

static PyObject *new_reference(PyObject *object) { return Py_INCREF(object), object; }

// For what cannot be a part of a cycle. Thousands of these live for a step: going through them again and again would cost
// more than recording them, and many that survive make the collector go through all of the program's objects too.
static void leave_alone(PyObject *object) { PyObject_GC_UnTrack(object); }

static int read_truth(PyObject *object) {  // takes the reference
    const int truth = object ? PyObject_IsTrue(object) : -1;
    Py_XDECREF(object);
    return truth;
}

static int64_t read_integer(PyObject *object) {  // takes the reference; −1 with an error set
    const int64_t value = object ? (int64_t)PyLong_AsUnsignedLongLongMask(object) : -1;
    Py_XDECREF(object);
    return value;
}

// ---- layouts: equal ones share their tuples ------------------------------------------------------------------------

// How a tensor of one layout is measured on one card.
typedef struct Way {
    struct Way *next;
    PyObject *slots;  // which card: of these its ring has one
    PyObject *dtype, *kernel;
    long alignment;
    int statistics;
    uint64_t programs;
    int count;
    uint64_t arguments[];  // behind those that every kernel has
} Way;

typedef struct {
    uint64_t hash;
    PyObject *shape, *stride;
    int64_t elements;
    int contiguous, rank;
    int even;  // all its steps are multiples of two, but for one between two neighbours: it may be of complex numbers
    Way *ways;
    int64_t numbers[];  // the shape and then the stride
} Layout;

typedef struct {
    Layout **slots;
    size_t size, used;  // a power of two, at most half of it used
    uint64_t cleared;   // how often
} Layouts;

static void free_layout(Layout *layout) {
    while (layout->ways) {
        Way *way = layout->ways;
        layout->ways = way->next;
        Py_DECREF(way->slots), Py_DECREF(way->dtype), Py_DECREF(way->kernel);
        PyMem_Free(way);
    }
    Py_XDECREF(layout->shape), Py_XDECREF(layout->stride);
    PyMem_Free(layout);
}

static void clear_layouts(Layouts *layouts) {
    Layouts old = *layouts;
    *layouts = (Layouts){.cleared = old.cleared + 1};
    for (size_t i = 0; i < old.size; ++i)
        if (old.slots[i]) free_layout(old.slots[i]);
    PyMem_Free(old.slots);
}

static int grow_layouts(Layouts *layouts) {
    const size_t size = layouts->size ? 2 * layouts->size : 256;
    Layout **slots = PyMem_Calloc(size, sizeof *slots);
    if (!slots) return PyErr_NoMemory(), 0;
    for (size_t i = 0; i < layouts->size; ++i) {
        Layout *layout = layouts->slots[i];
        if (!layout) continue;
        size_t at = layout->hash & (size - 1);
        while (slots[at]) at = (at + 1) & (size - 1);
        slots[at] = layout;
    }
    PyMem_Free(layouts->slots);
    layouts->slots = slots;
    layouts->size = size;
    return 1;
}

static PyObject *tuple_of(const int64_t *numbers, int rank) {
    PyObject *tuple = PyTuple_New(rank);
    for (int i = 0; tuple && i < rank; ++i) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (!number || PyTuple_SetItem(tuple, i, number)) Py_CLEAR(tuple);
    }
    return tuple;
}

// The layout of a tensor; NULL with an error set.
static Layout *find_layout(Layouts *layouts, const DLTensor *tensor) {
    const int rank = tensor->rank;
    uint64_t hash = (uint64_t)rank;
    int64_t elements = 1, expected = 1;
    int dense = 1, even = 1;
    for (int i = rank; i-- > 0;) {
        const int64_t size = tensor->shape[i], step = tensor->strides[i];
        hash = (hash ^ (uint64_t)size) * 0x9E3779B97F4A7C15u;
        hash = ((hash ^ (hash >> 29)) + (uint64_t)step) * 0xBF58476D1CE4E5B9u;
        if (size != 1 && step != expected) dense = 0;
        if (size != 1 && step % 2 && (size != 2 || step != 1)) even = 0;
        expected *= size;
        elements *= size;
    }
    hash ^= hash >> 32;
    if (layouts->used >= kMostLayouts) clear_layouts(layouts);  // shapes that are others in every call
    if (2 * layouts->used >= layouts->size && !grow_layouts(layouts)) return NULL;
    const size_t bytes = sizeof(int64_t) * (size_t)rank;
    size_t at = hash & (layouts->size - 1);
    for (Layout *known; (known = layouts->slots[at]); at = (at + 1) & (layouts->size - 1))
        if (known->hash == hash && known->rank == rank &&
            (!rank || (!memcmp(known->numbers, tensor->shape, bytes) &&
                       !memcmp(known->numbers + rank, tensor->strides, bytes))))
            return known;
    Layout *layout = PyMem_Calloc(1, sizeof *layout + 2 * bytes);
    if (!layout) return (Layout *)PyErr_NoMemory();
    layout->hash = hash;
    layout->rank = rank;
    layout->elements = elements;
    layout->contiguous = dense || !elements;
    layout->even = even;
    if (rank) {
        memcpy(layout->numbers, tensor->shape, bytes);
        memcpy(layout->numbers + rank, tensor->strides, bytes);
    }
    layout->shape = tuple_of(layout->numbers, rank);
    layout->stride = tuple_of(layout->numbers + rank, rank);
    if (!layout->shape || !layout->stride) return free_layout(layout), NULL;
    ++layouts->used;
    return layouts->slots[at] = layout;
}

// ---- sightings: what was measured of memories that may be seen again -----------------------------------------------

enum { kStatistics, kFingerprint, kValues, kPlacement, kNote, kKept };

// Where in statistics they are counted.
enum { kNan = 7, kInf = 8 };

// What a tensor is right now. See `Identity`, and `TorchReader.identity` for when two are the same.
typedef struct {
    PyObject *owner, *shape, *stride;  // owned; the tuples are those of a layout
    PyObject *dtype;                   // borrowed from `types`
    uint64_t address;
    int64_t version, elements;
    int contiguous;
    int32_t device_type, device_id;
    Layout *layout;  // valid as long as the layouts have been cleared just so often
    uint64_t cleared;
} Identity;

typedef struct Sighting {
    struct Sighting *next;
    const void *owner;  // not to be followed: it lives only as long as `living` says so
    PyObject *living;   // a weak reference to it
    PyObject *dtype, *shape, *stride, *device;
    uint64_t address;
    int64_t version, elements;
    int contiguous;
    int measured;      // else only the number of the value is known
    int64_t since, until;  // the versions in which it is this value; most often there is one
    PyObject *number;      // of the value; NULL until there is a row of it
    int64_t value;         // the same, −1 until then
    PyObject *kept[kKept];
} Sighting;

typedef struct {
    Sighting **buckets;
    size_t size, used, crowded;
    int64_t values;  // how many were numbered
} Sightings;

static size_t bucket_of(const Sightings *sightings, const void *owner) {
    const uint64_t hash = ((uint64_t)(uintptr_t)owner >> 4) * 0x9E3779B97F4A7C15u;
    return (size_t)(hash >> 32) & (sightings->size - 1);
}

static int is_of(const Sighting *sighting, const Identity *what) {
    return sighting->measured && sighting->owner == what->owner && sighting->address == what->address && sighting->version == what->version &&
           sighting->dtype == what->dtype && sighting->contiguous == what->contiguous &&
           (what->contiguous ? sighting->elements == what->elements
                             : sighting->shape == what->shape && sighting->stride == what->stride) &&
           PyWeakref_GetObject(sighting->living) == what->owner;
}

static Sighting *find_sighting(const Sightings *sightings, const Identity *what) {
    if (!sightings->size) return NULL;
    Sighting *sighting = sightings->buckets[bucket_of(sightings, what->owner)];
    while (sighting && !is_of(sighting, what)) sighting = sighting->next;
    return sighting;
}

// Whether the bytes that were handed over of it are gone, so that they are to be read again. −1 with an error set.
static int is_stale(const Sighting *sighting) {
    PyObject *values = sighting->kept[kValues];
    if (values == Py_None) return 0;
    PyObject *stale = PyObject_GetAttrString(values, "stale");
    const int found = stale ? PyObject_IsTrue(stale) : -1;
    Py_XDECREF(stale);
    return found;
}

// Letting go of a chain may run code that comes back here, so the chain belongs to no table any more.
static void free_sightings(Sighting *chain) {
    while (chain) {
        Sighting *sighting = chain;
        chain = sighting->next;
        Py_XDECREF(sighting->living), Py_XDECREF(sighting->dtype), Py_XDECREF(sighting->device);
        Py_XDECREF(sighting->shape), Py_XDECREF(sighting->stride), Py_XDECREF(sighting->number);
        for (int i = 0; i < kKept; ++i) Py_XDECREF(sighting->kept[i]);
        PyMem_Free(sighting);
    }
}

static void clear_sightings(Sightings *sightings) {
    Sighting *chain = NULL;
    if (!sightings->used) return;
    for (size_t i = 0; i < sightings->size; ++i) {
        Sighting *sighting = sightings->buckets[i];
        sightings->buckets[i] = NULL;
        while (sighting) {
            Sighting *next = sighting->next;
            sighting->next = chain;
            chain = sighting;
            sighting = next;
        }
    }
    sightings->used = 0;
    free_sightings(chain);
}

// Forgets an owner, or with NULL those that are dead.
static void forget_sightings(Sightings *sightings, const void *owner) {
    Sighting *chain = NULL;
    if (!sightings->size) return;
    const size_t begin = owner ? bucket_of(sightings, owner) : 0, end = owner ? begin + 1 : sightings->size;
    for (size_t i = begin; i < end; ++i) {
        for (Sighting **at = &sightings->buckets[i]; *at;) {
            Sighting *sighting = *at;
            if (owner ? sighting->owner == owner : PyWeakref_GetObject(sighting->living) == Py_None) {
                *at = sighting->next;
                sighting->next = chain;
                chain = sighting;
                --sightings->used;
            } else {
                at = &sighting->next;
            }
        }
    }
    free_sightings(chain);
}

static int grow_sightings(Sightings *sightings) {
    Sightings larger = *sightings;
    larger.size = sightings->size ? 2 * sightings->size : 1024;
    larger.buckets = PyMem_Calloc(larger.size, sizeof *larger.buckets);
    if (!larger.buckets) return PyErr_NoMemory(), 0;
    for (size_t i = 0; i < sightings->size; ++i) {
        for (Sighting *sighting = sightings->buckets[i], *next; sighting; sighting = next) {
            Sighting **at = &larger.buckets[bucket_of(&larger, sighting->owner)];
            next = sighting->next;
            sighting->next = *at;
            *at = sighting;
        }
    }
    PyMem_Free(sightings->buckets);
    *sightings = larger;
    return 1;
}

// A sighting of an owner in a version, of which nothing else is known yet. NULL with an error set.
static Sighting *new_sighting(Sightings *sightings, PyObject *owner, int64_t version) {
    if (sightings->used > sightings->crowded) {  // a program without steps, such as a generation loop
        forget_sightings(sightings, NULL);
        sightings->crowded = 2 * sightings->used > kEnough ? 2 * sightings->used : kEnough;
    }
    if (sightings->used >= sightings->size && !grow_sightings(sightings)) return NULL;
    Sighting *sighting = PyMem_Calloc(1, sizeof *sighting);
    if (!sighting) return (Sighting *)PyErr_NoMemory();
    sighting->living = PyWeakref_NewRef(owner, NULL);
    if (!sighting->living) return PyMem_Free(sighting), NULL;
    leave_alone(sighting->living);
    sighting->owner = owner;
    sighting->version = sighting->since = sighting->until = version;
    sighting->value = -1;
    Sighting **at = &sightings->buckets[bucket_of(sightings, owner)];
    sighting->next = *at;
    *at = sighting;
    ++sightings->used;
    return sighting;
}

static Sighting *add_sighting(Sightings *sightings, const Identity *what, PyObject *device, PyObject *const *kept) {
    Sighting *sighting = new_sighting(sightings, what->owner, what->version);
    if (!sighting) return NULL;
    sighting->dtype = new_reference(what->dtype);
    sighting->shape = new_reference(what->shape);
    sighting->stride = new_reference(what->stride);
    sighting->device = new_reference(device);
    sighting->address = what->address;
    sighting->elements = what->elements;
    sighting->contiguous = what->contiguous;
    sighting->measured = 1;
    for (int i = 0; i < kKept; ++i) sighting->kept[i] = new_reference(kept[i]);
    return sighting;
}

// ---- numbers: which value a tensor is ------------------------------------------------------------------------------

// A value is a memory in one of its versions, whatever part of it a tensor shows and in which order. `Numbers` in
// `sightings.py` is the twin, and says what is known of versions.

// What is known last of an owner's value; NULL when that is nothing.
static Sighting *latest_sighting(const Sightings *sightings, PyObject *owner) {
    Sighting *latest = NULL;
    if (!sightings->size) return NULL;
    for (Sighting *one = sightings->buckets[bucket_of(sightings, owner)]; one; one = one->next) {
        if (one->owner != owner || (one->value < 0 && one->measured)) continue;  // measured ahead of its row
        if (PyWeakref_GetObject(one->living) != owner) continue;
        if (one->value < 0) return one;  // an op has just written
        if (!latest || one->value > latest->value) latest = one;
    }
    return latest;
}

static int number_anew(Sightings *sightings, Sighting *sighting) {
    if (!(sighting->number = PyLong_FromLongLong(sightings->values))) return 0;
    sighting->value = sightings->values++;
    return 1;
}

// What is known of an owner's value in a version; NULL when it is another one than before.
static Sighting *same_value(const Sightings *sightings, PyObject *owner, int64_t version) {
    Sighting *latest = latest_sighting(sightings, owner);
    return latest && (!version || (latest->since <= version && version <= latest->until)) ? latest : NULL;
}

// Gives a measured sighting the number of its value: the one that its owner has in this version, or the next.
static int number_sighting(Sightings *sightings, Sighting *sighting, PyObject *owner) {
    Sighting *same = same_value(sightings, owner, sighting->version);
    if (!same) return number_anew(sightings, sighting);
    if (!same->number && !number_anew(sightings, same)) return 0;
    sighting->number = new_reference(same->number);
    sighting->value = same->value;
    sighting->since = same->since;
    sighting->until = same->until;
    return 1;
}

// An op has written to a memory, and its version will say so when the op has returned.
static int number_ahead(Sightings *sightings, PyObject *owner, int64_t version) {
    forget_sightings(sightings, owner);
    Sighting *sighting = new_sighting(sightings, owner, version);
    if (sighting) sighting->until = version + 1;
    return sighting != NULL;
}

// Forgets what was measured, and not which value a memory is.
static void expire_sightings(Sightings *sightings) {
    Sighting *chain = NULL;
    for (size_t i = 0; sightings->used && i < sightings->size; ++i) {
        Sighting *sighting = sightings->buckets[i], *stay = NULL;
        while (sighting) {
            Sighting *next = sighting->next, *same = stay;
            const int is_known = sighting->value >= 0 || !sighting->measured;
            while (same && same->owner != sighting->owner) same = same->next;
            const int is_latest = !same || (same->value >= 0 && (sighting->value < 0 || sighting->value > same->value));
            Sighting *left = NULL;
            if (is_known && is_latest && PyWeakref_GetObject(sighting->living) != Py_None)
                left = same ? same : PyMem_Calloc(1, sizeof *left);  // without memory it is another value
            if (left) {
                PyObject *number = left->number;
                left->owner = sighting->owner;
                left->version = sighting->version;
                left->since = sighting->since;
                left->until = sighting->until;
                left->value = sighting->value;
                left->number = Py_XNewRef(sighting->number);
                Py_XDECREF(number);
                if (!same) {
                    left->living = new_reference(sighting->living);
                    left->next = stay;
                    stay = left;
                    ++sightings->used;
                }
            }
            --sightings->used;
            sighting->next = chain;
            chain = sighting;
            sighting = next;
        }
        sightings->buckets[i] = stay;
    }
    free_sightings(chain);
}

// ---- the taker -----------------------------------------------------------------------------------------------------

// A device, as DLPack and as torch knows it, and its name in rows.
typedef struct {
    int32_t type, id;
    PyObject *device, *name;
} Place;

// A parameter that is measured in every step, and so together with the others.
typedef struct {
    const void *tensor;  // not to be followed: it lives only as long as `living` says so
    PyObject *living;    // a weak reference to it
    int seen;            // since they were last measured together
    int taken;           // it was measured with the others then
    int irregular;       // and changed before it was seen: it is measured by itself from now on
} Regular;

typedef struct {
    Regular *slots;  // found by the address of the tensor
    size_t size, used;  // a power of two, at most half of it used
    int due;         // they have not been measured in this step
} Regulars;

typedef struct {
    PyObject_HEAD
    // What the garbage collector should know of, since the twin and the writer may lead back here.
    PyObject *observe, *observe_unread, *written, *changed, *first, *writer;
    PyObject *lane, *unfilled, *rings, *devices, *measure, *stream, *identity;
    PyObject *tensor_type, *parameter_type;
    const Exchange *exchange;
    struct {
        uint32_t code;
        int is_complex;
        PyObject *name;
    } types[kMostTypes];
    int type_count;
    PyObject *roles;
    const Appending *appending;  // how rows get into the lane; NULL when the writer has to be asked
    Py_ssize_t batch;
    int64_t rows;  // counted here, for the quota
    int on, statistics, values;
    int ops;       // calls are seen before the version counters know of their writes
    int catching;  // says which tensors hold NaN or infinities
    int handed;   // whether the twin may know of memories too
    int careful;  // the last tensor had no version: the next one is asked whether it keeps one
    Method is_neg, is_conj, is_inference, storage;
    Attribute version, device, requires_grad;
    Layouts layouts;
    Sightings sightings;
    Regulars regulars;
    PyObject *together;  // measures tensors of one type and device by one launch
    const Launching *launching;  // NULL when kernels are not launched natively
    Place places[kMostPlaces];
    int place_count;
} Taker;

static struct {
    PyObject *launches, *index, *slots, *tensor_row;
} word;

static void forget_identity(Identity *what) {
    Py_CLEAR(what->owner);
    Py_CLEAR(what->shape);
    Py_CLEAR(what->stride);
}

// Of a question that torch could not answer: 0 when the twin should see to it, −1 when it is an error.
static int refused(void) {
    if (!PyErr_Occurred()) return 0;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
    PyErr_Clear();
    return 0;
}

static int is_plain(const Taker *self, PyObject *tensor) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    return type == self->tensor_type || type == self->parameter_type;
}

static uint32_t type_code(const DLTensor *tensor) {
    return (uint32_t)tensor->type.code << 24 | (uint32_t)tensor->type.bits << 16 | tensor->type.lanes;
}

// Whether the sign of the numbers is only a flag yet. A real tensor has that flag as a part of conjugate numbers alone,
// so it is a view in steps of two. To ask costs as much as all the rest, since torch lets go of the GIL for it.
static int is_flagged(const Taker *self, PyObject *tensor, int is_complex, const Layout *layout) {
    if (!is_complex && !layout->even) return 0;
    const int negative = read_truth(call_method(&self->is_neg, tensor));
    return negative || !is_complex ? negative : read_truth(call_method(&self->is_conj, tensor));
}

// 1, 0 when the twin should see to this tensor, or −1 with an error set.
static int identify(Taker *self, PyObject *tensor, Identity *what) {
    DLTensor found;
    if (!is_plain(self, tensor)) return 0;
    if (self->careful) {
        if ((self->careful = read_truth(call_method(&self->is_inference, tensor)))) return refused();
    }
    // What has no one address, shape or known type, such as a sparse tensor, cannot be described.
    if (self->exchange->describe(tensor, &found)) return PyErr_Clear(), 0;
    what->address = (uint64_t)(uintptr_t)found.data + found.byte_offset;
    if (!found.data || !found.strides || found.rank > kMostRank) return 0;
    const uint32_t code = type_code(&found);
    int type = 0;
    while (type < self->type_count && self->types[type].code != code) ++type;
    if (type == self->type_count) return 0;
    what->dtype = self->types[type].name;
    Layout *layout = what->layout = find_layout(&self->layouts, &found);
    if (!layout) return -1;
    what->cleared = self->layouts.cleared;
    what->device_type = found.device_type;
    what->device_id = found.device_id;
    what->elements = layout->elements;
    what->contiguous = layout->contiguous;
    what->shape = new_reference(layout->shape);
    what->stride = new_reference(layout->stride);
    if (!is_flagged(self, tensor, self->types[type].is_complex, layout)) {
        what->version = read_integer(read_attribute(&self->version, tensor));
        if (what->version == -1) self->careful = 1;
        else if ((what->owner = call_method(&self->storage, tensor))) return 1;
    }
    forget_identity(what);
    return refused();
}

static int note_filled(Taker *self, const Identity *what) {
    if (!PyDict_Size(self->unfilled)) return 1;
    PyObject *number = PyLong_FromVoidPtr(what->owner);
    if (!number) return 0;
    const int there = PyDict_Contains(self->unfilled, number);
    const int done = there <= 0 ? !there : !PyDict_DelItem(self->unfilled, number);
    Py_DECREF(number);
    return done;
}

// ---- measuring -----------------------------------------------------------------------------------------------------

// What every kernel is given before its own arguments: the tensor, the partial rows and which of them are free, and the
// slot in the table of measurements. See `CudaRing.measure`.
enum { kAddress, kRows, kRowCount, kFirstRow, kTable, kSlot, kOwn };

// What the ring has found out about a layout: how it is launched. NULL without an error when it does not know it yet, or
// launches it otherwise.
static Way *learn_way(Taker *self, PyObject *ring, const Identity *what, PyObject *key) {
    PyObject *launches = PyObject_GetAttr(ring, word.launches), *launch, *arguments;
    PyObject *found = launches ? PyDict_GetItemWithError(launches, key) : NULL;
    Py_XINCREF(found), Py_XDECREF(launches);
    unsigned long long programs;
    Way *way = NULL;
    if (!found || !PyArg_ParseTuple(found, "OKO!", &launch, &programs, &PyTuple_Type, &arguments)) goto end;
    PyObject *kernel = PyCFunction_CheckExact(launch) ? PyCFunction_GetSelf(launch) : NULL;
    const Py_ssize_t count = PyTuple_Size(arguments);
    if (!kernel || self->launching->words(kernel) != kOwn + count) goto end;
    way = PyMem_Calloc(1, sizeof *way + sizeof *way->arguments * (size_t)count);
    if (!way) goto end;
    way->count = (int)count;
    for (Py_ssize_t i = 0; i < count; ++i) {
        way->arguments[i] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(arguments, i));
        if (way->arguments[i] == UINT64_MAX && PyErr_Occurred()) {
            PyMem_Free(way);
            way = NULL;
            goto end;
        }
    }
    way->kernel = new_reference(kernel);
    way->dtype = new_reference(what->dtype);
    way->programs = programs;
end:
    Py_XDECREF(found);
    return way;
}

// How to measure a tensor, once the ring knows it. NULL without an error when it does not yet.
static Way *find_way(Taker *self, PyObject *ring, PyObject *slots, const Identity *what) {
    Layout *layout = what->layout;
    if (what->cleared != self->layouts.cleared) return NULL;
    const long alignment = (long)(what->address % 16);
    for (Way *way = layout->ways; way; way = way->next)
        if (way->slots == slots && way->dtype == what->dtype && way->alignment == alignment &&
            way->statistics == self->statistics)
            return way;
    PyObject *key = Py_BuildValue("OOOlOO", what->dtype, what->shape, what->stride, alignment, Py_None,
                                  self->statistics ? Py_True : Py_False);
    Way *way = key ? learn_way(self, ring, what, key) : NULL;
    Py_XDECREF(key);
    if (!way) return NULL;
    way->slots = new_reference(slots);
    way->alignment = alignment;
    way->statistics = self->statistics;
    way->next = layout->ways;
    return layout->ways = way;
}

// Launches a kernel into the next slot: its ticket, or −1 when the twin should see to it. The slots are locked for as
// long as in the twin, so that nobody sends for a segment during a launch.
static int64_t launch_into(const Taker *self, Slots *slots, const Way *way, uint64_t stream, uint64_t address) {
    uint64_t words[kMaxArguments] = {[kAddress] = address, [kRows] = slots->rows_at, [kTable] = slots->table_at};
    PyObject *kernel = new_reference(way->kernel);  // others may clear the layouts during the launch
    const uint64_t programs = way->programs;
    const int statistics = way->statistics;
    int64_t ticket = -1;
    words[kRowCount] = (uint64_t)slots->partials;
    memcpy(words + kOwn, way->arguments, sizeof *words * (size_t)way->count);
    if (PyThread_acquire_lock(slots->lock, NOWAIT_LOCK)) {
        words[kFirstRow] = (uint64_t)slots->used;
        words[kSlot] = (uint64_t)slots->count;
        // Now and then the ring looks at the clock.
        if (slots->has_stream && slots->stream == stream && slots->count % 64 && slots->count < slots->most &&
            slots->used + (int64_t)programs <= slots->partials &&
            self->launching->launch(kernel, programs, stream, words) == 0) {
            ticket = (slots->number * slots->most + slots->count++) * 2 + statistics;
            slots->used += (int64_t)programs;
        }
        PyThread_release_lock(slots->lock);
    }
    Py_DECREF(kernel);
    return ticket;
}

// Has a tensor measured on its card: the ticket, or NULL when the twin should see to it, perhaps with an error set.
static PyObject *measure_far(Taker *self, PyObject *ring, const Identity *what) {
    PyObject *slots = self->launching ? PyObject_GetAttr(ring, word.slots) : NULL;
    PyObject *index = slots && self->launching->are_slots(slots) ? PyObject_GetAttr(ring, word.index) : NULL;
    PyObject *stream = index ? call(self->stream, &index, 1) : NULL;
    const uint64_t raw = stream ? PyLong_AsUnsignedLongLongMask(stream) : 0;
    const Way *way = stream && !PyErr_Occurred() ? find_way(self, ring, slots, what) : NULL;
    const int64_t ticket = way ? launch_into(self, (Slots *)slots, way, raw, what->address) : -1;
    Py_XDECREF(slots), Py_XDECREF(index), Py_XDECREF(stream);
    return ticket < 0 ? NULL : PyLong_FromLongLong(ticket);
}

// Whether a tensor lies in this process's own memory, where we measure it ourselves.
static int is_near(const Taker *self, const Identity *what) {
    return what->device_type == kDLCPU && self->measure != Py_None;
}

// Measures memory of this process: the plain fields of its statistics, or None, and its fingerprint.
static int measure_near(Taker *self, const Identity *what, PyObject **kept) {
    PyObject *memory = Py_BuildValue("KOOO", (unsigned long long)what->address, what->dtype, what->shape, what->stride);
    PyObject *args[] = {memory, self->statistics ? Py_True : Py_False, Py_True, Py_None};
    PyObject *measured = memory ? call(self->measure, args, 4) : NULL;
    Py_XDECREF(memory);
    if (!measured) return 0;
    PyObject *statistics = PyTuple_GetItem(measured, 0), *fingerprint = PyTuple_GetItem(measured, 1);
    if (fingerprint) {
        kept[kStatistics] = PyTuple_Check(statistics) ? PyTuple_GetSlice(statistics, 0, PyTuple_Size(statistics))
                                                      : new_reference(statistics);
        kept[kFingerprint] = new_reference(fingerprint);
        if (kept[kStatistics] && kept[kStatistics] != Py_None) leave_alone(kept[kStatistics]);
    }
    Py_DECREF(measured);
    return fingerprint && kept[kStatistics];
}

// The first sight of a memory: fills `kept`, which owns what is in it. `device` is the tensor's.
static int measure_first(Taker *self, PyObject *tensor, const Identity *what, PyObject *device, PyObject *const *row,
                         PyObject **kept) {
    if (!self->values && is_near(self, what)) {
        if (!measure_near(self, what, kept)) return 0;
        for (int i = kValues; i < kKept; ++i) kept[i] = new_reference(Py_None);
        return 1;
    }
    PyObject *ring = self->values ? NULL : PyDict_GetItemWithError(self->rings, device);
    if (ring) {
        Py_INCREF(ring);
        kept[kStatistics] = measure_far(self, ring, what);
        Py_DECREF(ring);
    }
    if (PyErr_Occurred()) return 0;
    if (kept[kStatistics]) {
        for (int i = kFingerprint; i < kKept; ++i) kept[i] = new_reference(Py_None);
        return 1;
    }
    PyObject *address = PyLong_FromUnsignedLongLong(what->address);
    PyObject *identity = address ? PyObject_CallFunctionObjArgs(self->identity, what->owner, Py_None, address, what->dtype,
                                                                what->shape, what->stride, NULL)
                                 : NULL;
    PyObject *seen = identity ? PyObject_CallFunctionObjArgs(self->first, tensor, identity, row[0], row[1], row[2], NULL)
                              : NULL;
    Py_XDECREF(address), Py_XDECREF(identity);
    if (!seen) return 0;
    if (!PyTuple_Check(seen) || PyTuple_Size(seen) != kKept) {
        PyErr_SetString(PyExc_TypeError, "A sighting has five fields.");
        return Py_DECREF(seen), 0;
    }
    for (int i = 0; i < kKept; ++i) kept[i] = new_reference(PyTuple_GetItem(seen, i));
    Py_DECREF(seen);
    return 1;
}

// Where a tensor lies. The place is valid as long as the taker is; NULL with an error set.
static const Place *find_place(Taker *self, PyObject *tensor, const Identity *what) {
    for (int i = 0; i < self->place_count; ++i)
        if (self->places[i].type == what->device_type && self->places[i].id == what->device_id) return &self->places[i];
    if (self->place_count == kMostPlaces) {
        PyErr_Format(PyExc_RuntimeError, "There are more than %d devices.", kMostPlaces);
        return NULL;
    }
    PyObject *device = read_attribute(&self->device, tensor);
    PyObject *name = device ? PyDict_GetItemWithError(self->devices, device) : NULL;
    Py_XINCREF(name);
    if (device && !name && !PyErr_Occurred()) name = PyObject_Str(device);
    if (!name || PyDict_SetItem(self->devices, device, name) < 0) {
        Py_XDECREF(device), Py_XDECREF(name);
        return NULL;
    }
    Place *place = &self->places[self->place_count++];
    *place = (Place){what->device_type, what->device_id, device, name};
    return place;
}

// ---- parameters: all of them together ------------------------------------------------------------------------------

// They are the same tensors in every step, at the same places, so one launch measures them all when the first of them is
// seen. It reads the others before their modules run; what changes until then has another version, and is measured again.
// A program that changes its weights there, perhaps on a stream of its own, is found out by that, and they are left out.

static Regular *find_regular(const Regulars *regulars, const void *tensor) {
    if (!regulars->size) return NULL;
    size_t at = (size_t)(((uint64_t)(uintptr_t)tensor >> 4) * 0x9E3779B97F4A7C15u >> 32) & (regulars->size - 1);
    while (regulars->slots[at].tensor && regulars->slots[at].tensor != tensor) at = (at + 1) & (regulars->size - 1);
    return &regulars->slots[at];
}

static void free_regulars(Regulars *regulars) {
    Regulars old = *regulars;
    *regulars = (Regulars){.due = old.due};
    for (size_t i = 0; i < old.size; ++i) Py_XDECREF(old.slots[i].living);
    PyMem_Free(old.slots);
}

// Has room for so many, and keeps of those that are there the living which were seen.
static int renew_regulars(Regulars *regulars, size_t count) {
    Regulars fresh = {.size = 64, .due = regulars->due};
    while (fresh.size < 4 * count) fresh.size *= 2;
    fresh.slots = PyMem_Calloc(fresh.size, sizeof *fresh.slots);
    if (!fresh.slots) return PyErr_NoMemory(), 0;
    for (size_t i = 0; i < regulars->size; ++i) {
        const Regular *one = &regulars->slots[i];
        if (!one->tensor || !one->seen || PyWeakref_GetObject(one->living) != one->tensor) continue;
        Py_INCREF(one->living);
        *find_regular(&fresh, one->tensor) = *one;
        ++fresh.used;
    }
    free_regulars(regulars);
    *regulars = fresh;
    return 1;
}

// A parameter was seen; `again` says that it had been measured in this step as it is now.
static int note_regular(Taker *self, PyObject *tensor, int again) {
    Regulars *regulars = &self->regulars;
    if (2 * (regulars->used + 1) > regulars->size && !renew_regulars(regulars, regulars->used + 1)) return 0;
    Regular *one = find_regular(regulars, tensor);
    if (one->living && PyWeakref_GetObject(one->living) != tensor) Py_CLEAR(one->living);  // another had its place
    if (!one->living) {
        PyObject *living = PyWeakref_NewRef(tensor, NULL);
        if (!living) return 0;
        leave_alone(living);
        regulars->used += !one->tensor;
        *one = (Regular){.tensor = tensor, .living = living};
    }
    one->irregular |= one->taken && !one->seen && !again;
    one->seen = 1;
    return 1;
}

typedef struct {
    PyObject *tensor;
    Identity what;
    int is_fit, done;
} Candidate;

static int is_fit(Taker *self, PyObject *tensor, Identity *what) {
    const int plain = identify(self, tensor, what);
    if (plain <= 0) return plain;
    return what->contiguous && what->elements && what->address % 16 == 0 && !is_near(self, what) &&
           !find_sighting(&self->sightings, what);
}

// Measures those of one type and device by one launch, and remembers what comes of it.
static int measure_group(Taker *self, Candidate *candidates, Py_ssize_t count, Py_ssize_t first) {
    const Identity *like = &candidates[first].what;
    const Place *place = find_place(self, candidates[first].tensor, like);
    PyObject *memories = place ? PyList_New(0) : NULL, *tickets = NULL;
    int done = memories != NULL;
#define IS_IN_GROUP(one)                                                                            \
    ((one)->is_fit && !(one)->done && (one)->what.dtype == like->dtype && (one)->what.device_type == like->device_type && \
     (one)->what.device_id == like->device_id)
    for (Py_ssize_t i = first; done && i < count; ++i) {
        const Identity *what = &candidates[i].what;
        if (!IS_IN_GROUP(&candidates[i])) continue;
        PyObject *memory = Py_BuildValue("KOOO", (unsigned long long)what->address, what->dtype, what->shape, what->stride);
        done = memory && !PyList_Append(memories, memory);
        Py_XDECREF(memory);
    }
    if (done && PyList_Size(memories) < 2) {
        tickets = new_reference(Py_None);
    } else if (done) {
        tickets = PyObject_CallFunctionObjArgs(self->together, place->device, memories,
                                               self->statistics ? Py_True : Py_False, NULL);
        done = tickets != NULL;
    }
    Py_ssize_t taken = 0;
    for (Py_ssize_t i = first; done && i < count; ++i) {
        if (!IS_IN_GROUP(&candidates[i])) continue;
        candidates[i].done = 1;
        if (tickets == Py_None) continue;
        PyObject *ticket = PyList_GetItem(tickets, taken++);
        PyObject *kept[kKept] = {ticket, Py_None, Py_None, Py_None, Py_None};
        done = ticket && add_sighting(&self->sightings, &candidates[i].what, place->name, kept);
        Regular *one = find_regular(&self->regulars, candidates[i].tensor);
        if (one && one->tensor) one->taken = 1;
    }
#undef IS_IN_GROUP
    Py_XDECREF(memories), Py_XDECREF(tickets);
    return done;
}

static int measure_regulars(Taker *self) {
    Regulars *regulars = &self->regulars;
    regulars->due = 0;
    if (!renew_regulars(regulars, regulars->used)) return 0;
    Py_ssize_t count = 0;
    Candidate *candidates = PyMem_Calloc(regulars->used + 1, sizeof *candidates);
    if (!candidates) return PyErr_NoMemory(), 0;
    for (size_t i = 0; i < regulars->size; ++i) {  // all at once: others may come here while a tensor is asked
        Regular *one = &regulars->slots[i];
        one->taken = one->seen = 0;
        if (one->tensor && !one->irregular) candidates[count++].tensor = new_reference(PyWeakref_GetObject(one->living));
    }
    int done = 1;
    for (Py_ssize_t i = 0; done && i < count; ++i) {
        candidates[i].is_fit = is_fit(self, candidates[i].tensor, &candidates[i].what);
        done = candidates[i].is_fit >= 0;
    }
    for (Py_ssize_t i = 0; done && count > 1 && i < count; ++i)
        if (candidates[i].is_fit && !candidates[i].done) done = measure_group(self, candidates, count, i);
    for (Py_ssize_t i = 0; i < count; ++i) {
        forget_identity(&candidates[i].what);
        Py_DECREF(candidates[i].tensor);
    }
    PyMem_Free(candidates);
    return done;
}

// ---- observing -----------------------------------------------------------------------------------------------------

enum { kCells = 14 };

static int write_row(Taker *self, PyObject *const *cells) {
    const int done = self->appending ? self->appending->append(self->lane, cells, kCells, self->batch) : 0;
    if (done) return done > 0;
    PyObject *row = PyTuple_New(kCells);  // the lane is full, or it is not ours to append to
    for (Py_ssize_t i = 0; row && i < kCells; ++i) PyTuple_SetItem(row, i, new_reference(cells[i]));
    PyObject *written = row ? PyObject_CallMethodObjArgs(self->writer, word.tensor_row, row, NULL) : NULL;
    Py_XDECREF(row), Py_XDECREF(written);
    return written != NULL;
}

// Whether a tensor belongs to the model: a module's, or handed to a function.
static int is_parameter(const Taker *self, PyObject *tensor, PyObject *role) {
    return role == parameter_role || (PyObject *)Py_TYPE(tensor) == self->parameter_type;
}

// Whether a measurement has counted NaN or infinities.
static int is_bad(PyObject *statistics) {
    if (!PyTuple_Check(statistics)) return 0;  // it comes later, or was not asked for
    return PyLong_AsLong(PyTuple_GetItem(statistics, kNan)) || PyLong_AsLong(PyTuple_GetItem(statistics, kInf));
}

// Records a tensor that has been identified. `row` is its call, role and path. Sets `bad`, if that is asked for and it
// holds NaN or infinities.
static int take(Taker *self, PyObject *tensor, const Identity *what, PyObject *const *row, int *bad) {
    PyObject *kept[kKept] = {NULL}, *name = NULL, *number = NULL;
    PyObject *requires_grad = read_attribute(&self->requires_grad, tensor);
    int done = requires_grad && note_filled(self, what);
    if (!done) goto end;
    const int is_regular = !self->values && !is_near(self, what) && is_parameter(self, tensor, row[1]);
    if (is_regular && self->regulars.due && !measure_regulars(self)) {
        done = 0;
        goto end;
    }
    Sighting *known = find_sighting(&self->sightings, what);
    const int stale = known ? is_stale(known) : 0;
    if (stale) {
        done = stale > 0;
        known = done ? find_sighting(&self->sightings, what) : NULL;
        if (!done) goto end;
        if (known) known->measured = 0;  // its value is still the same
        known = NULL;
    }
    const int again = known != NULL;
    if (known) {
        for (int i = 0; i < kKept; ++i) kept[i] = new_reference(known->kept[i]);
        name = new_reference(known->device);
        // It may have been measured with the other parameters, before it was seen.
        done = known->number || number_sighting(&self->sightings, known, what->owner);
        number = Py_XNewRef(known->number);
        if (!done) goto end;
    } else {
        const Place *place = find_place(self, tensor, what);
        done = place && measure_first(self, tensor, what, place->device, row, kept) &&
               (known = add_sighting(&self->sightings, what, place->name, kept)) &&
               number_sighting(&self->sightings, known, what->owner);
        if (!done) goto end;
        number = new_reference(known->number);
        name = new_reference(place->name);
    }
    done = !is_regular || note_regular(self, tensor, again);
    if (!done) goto end;
    PyObject *cells[kCells] = {row[0], row[1], row[2], what->dtype, what->shape, what->stride, name, requires_grad};
    memcpy(cells + kCells - 1 - kKept, kept, sizeof kept);
    cells[kCells - 1] = number;
    done = write_row(self, cells);
    if (self->catching && bad && is_bad(kept[kStatistics])) *bad = 1;
end:
    Py_XDECREF(name), Py_XDECREF(requires_grad), Py_XDECREF(number);
    for (int i = 0; i < kKept; ++i) Py_XDECREF(kept[i]);
    return done;
}

static int hand_over(PyObject *twin, PyObject *const *row, PyObject *tensor, int *bad) {
    PyObject *done = PyObject_CallFunctionObjArgs(twin, row[0], row[1], row[2], tensor, NULL);
    if (bad && done == Py_True) *bad = 1;
    Py_XDECREF(done);
    return done != NULL;
}

// Records one tensor; `row` is its call, role and path. 0 with an error set. `bad` as for `take`.
static int observe(Taker *self, PyObject *const *row, PyObject *tensor, int *bad) {
    Identity what = {0};
    if (!self->on) return self->handed = 1, hand_over(self->observe, row, tensor, bad);
    const long seq = PyLong_AsLong(row[0]);
    if (seq == -1) return !PyErr_Occurred();  // a call that has no row
    const int wanted = PySet_Contains(self->roles, row[1]);
    if (wanted <= 0) return !wanted;
    const int plain = identify(self, tensor, &what);
    if (plain < 0) return 0;
    if (!plain) return self->handed = 1, hand_over(self->observe, row, tensor, bad);
    ++self->rows;
    const int done = take(self, tensor, &what, row, bad);
    forget_identity(&what);
    return done;
}

// True when the tensor is bad, else None.
static PyObject *answer(int done, int bad) { return done ? new_reference(bad ? Py_True : Py_None) : NULL; }

static int expect(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are expected.", given, expected);
    return 0;
}

// observe(seq, role, path, tensor)
static PyObject *taker_observe(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    int bad = 0;
    if (!expect(nargs, 4)) return NULL;
    const int done = observe((Taker *)self, args, args[3], &bad);
    return answer(done, bad);
}

// Whether a tensor's memory may be one that nobody has filled yet; the twin finds out for certain.
static int may_be_unfilled(Taker *self, PyObject *tensor) {
    if (!PyDict_Size(self->unfilled)) return 0;
    if (!is_plain(self, tensor)) return 1;
    PyObject *owner = call_method(&self->storage, tensor);
    if (!owner) return refused() ? -1 : 1;
    PyObject *number = PyLong_FromVoidPtr(owner);
    const int there = number ? PyDict_Contains(self->unfilled, number) : -1;
    Py_XDECREF(number), Py_DECREF(owner);
    return there;
}

// observe_unread(seq, role, path, tensor)
static PyObject *taker_observe_unread(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Taker *self = (Taker *)object;
    if (!expect(nargs, 4)) return NULL;
    const int unfilled = may_be_unfilled(self, args[3]);
    if (unfilled < 0) return NULL;
    int bad = 0;
    const int done = unfilled ? hand_over(self->observe_unread, args, args[3], &bad) : observe(self, args, args[3], &bad);
    return answer(done, bad);
}

static int is_among(PyObject *list, PyObject *one) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i)
        if (PyList_GetItem(list, i) == one) return 1;
    return 0;
}

// observe_inputs(seq, inputs, unread): inputs is a list of pairs of a path and a tensor
static PyObject *taker_observe_inputs(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Taker *self = (Taker *)object;
    if (!expect(nargs, 3)) return NULL;
    PyObject *inputs = args[1], *unread = args[2];
    if (!PyList_Check(inputs) || !PyList_Check(unread)) {
        PyErr_SetString(PyExc_TypeError, "The inputs and the unread are lists.");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(inputs); ++i) {
        PyObject *pair = PyList_GetItem(inputs, i), *path, *tensor;
        if (!PyArg_ParseTuple(pair, "OO", &path, &tensor)) return NULL;
        PyObject *row[] = {args[0], input_role, path};
        Py_INCREF(pair);
        const int done = is_among(unread, tensor) ? hand_over(self->observe_unread, row, tensor, NULL)
                                                  : observe(self, row, tensor, NULL);
        Py_DECREF(pair);
        if (!done) return NULL;
    }
    Py_RETURN_NONE;
}

// forget(owner): this memory was written to, so it is another value
static PyObject *taker_forget(PyObject *self, PyObject *owner) {
    forget_sightings(&((Taker *)self)->sightings, owner);
    Py_RETURN_NONE;
}

// of(owner, version): which value a memory is in a version, for tensors that the twin sees to
static PyObject *taker_number(PyObject *self, PyObject *args) {
    PyObject *owner;
    long long version;
    Sightings *sightings = &((Taker *)self)->sightings;
    if (!PyArg_ParseTuple(args, "OL", &owner, &version)) return NULL;
    Sighting *same = same_value(sightings, owner, version);
    if (!same) same = new_sighting(sightings, owner, version);
    if (!same || (!same->number && !number_anew(sightings, same))) return NULL;
    return new_reference(same->number);
}

// ahead(owner, version): an op has written to this memory, of which this is the version until it returns
static PyObject *taker_ahead(PyObject *self, PyObject *args) {
    PyObject *owner;
    long long version;
    if (!PyArg_ParseTuple(args, "OL", &owner, &version)) return NULL;
    if (!number_ahead(&((Taker *)self)->sightings, owner, version)) return NULL;
    Py_RETURN_NONE;
}

// Forgets what is known of a tensor's memory. The twin, which calls `forget`, does so when more may have to be done.
static PyObject *note_change(Taker *self, PyObject *twin, PyObject *tensor, int more, int ahead) {
    if (!more && !self->handed && is_plain(self, tensor)) {
        PyObject *owner = call_method(&self->storage, tensor);
        if (owner) {
            forget_sightings(&self->sightings, owner);
            const int64_t version = ahead ? read_integer(read_attribute(&self->version, tensor)) : -1;
            if (version == -1 && PyErr_Occurred()) PyErr_Clear();  // an inference tensor keeps none
            const int done = version < 0 || number_ahead(&self->sightings, owner, version);
            Py_DECREF(owner);
            return done ? new_reference(Py_None) : NULL;
        }
        if (refused()) return NULL;
    }
    return PyObject_CallFunctionObjArgs(twin, tensor, NULL);
}

// changed(tensor): a call wrote into this tensor, perhaps without its version counter knowing
static PyObject *taker_changed(PyObject *object, PyObject *tensor) {
    Taker *self = (Taker *)object;
    return note_change(self, self->changed, tensor, 0, 0);
}

// written(tensor): a call has written into this tensor
static PyObject *taker_written(PyObject *object, PyObject *tensor) {
    Taker *self = (Taker *)object;
    return note_change(self, self->written, tensor, PyDict_Size(self->unfilled) != 0, self->ops);
}

// clear(): nothing measured before is to be used again
static PyObject *taker_clear(PyObject *self, PyObject *none) {
    (void)none;
    Regulars *regulars = &((Taker *)self)->regulars;
    for (size_t i = 0; i < regulars->size; ++i) regulars->slots[i].taken = 0;  // it is not their fault
    ((Taker *)self)->handed = 0;
    expire_sightings(&((Taker *)self)->sightings);
    Py_RETURN_NONE;
}

// renumber(): the same, and every memory may be another value
static PyObject *taker_renumber(PyObject *self, PyObject *none) {
    clear_sightings(&((Taker *)self)->sightings);
    return taker_clear(self, none);
}

// next_step(): the same, and the parameters are measured anew
static PyObject *taker_next_step(PyObject *self, PyObject *none) {
    ((Taker *)self)->regulars.due = 1;
    return taker_renumber(self, none);
}

// counted(): how many rows were counted since the last time
static PyObject *taker_counted(PyObject *object, PyObject *none) {
    Taker *self = (Taker *)object;
    const int64_t rows = self->rows;
    (void)none;
    self->rows = 0;
    return PyLong_FromLongLong(rows);
}

// apply(on, roles, statistics, values, ops): what is to be recorded from now on; not `on`, the twin does everything
static PyObject *taker_apply(PyObject *object, PyObject *args) {
    Taker *self = (Taker *)object;
    PyObject *roles;
    int on, statistics, values, ops;
    if (!PyArg_ParseTuple(args, "pOppp", &on, &roles, &statistics, &values, &ops)) return NULL;
    if (!PyFrozenSet_Check(roles)) {
        PyErr_SetString(PyExc_TypeError, "The roles are a frozenset.");
        return NULL;
    }
    PyObject *before = self->roles;
    self->roles = new_reference(roles);
    Py_XDECREF(before);
    self->on = on;
    self->statistics = statistics;
    self->values = values;
    self->ops = ops;
    expire_sightings(&self->sightings);
    Py_RETURN_NONE;
}

// catch(on): whether to say that a tensor holds NaN or infinities
static PyObject *taker_catch(PyObject *object, PyObject *on) {
    const int catching = PyObject_IsTrue(on);
    if (catching < 0) return NULL;
    ((Taker *)object)->catching = catching;
    Py_RETURN_NONE;
}

// ---- its life ------------------------------------------------------------------------------------------------------

static int find_questions(Taker *self, PyObject *tensor) {
    PyTypeObject *type = Py_TYPE(tensor);
    return find_method(&self->is_neg, tensor, "is_neg") && find_method(&self->is_conj, tensor, "is_conj") &&
           find_method(&self->is_inference, tensor, "is_inference") &&
           find_method(&self->storage, tensor, "untyped_storage") && find_attribute(&self->version, type, "_version") &&
           find_attribute(&self->device, type, "device") && find_attribute(&self->requires_grad, type, "requires_grad");
}

static int find_exchange(Taker *self) {
    PyObject *capsule = PyObject_GetAttrString(self->tensor_type, "__dlpack_c_exchange_api__");
    self->exchange = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);  // the class keeps it
    if (!self->exchange) return 0;
    if (self->exchange->major == kDLMajor) return 1;
    PyErr_Format(PyExc_ImportError, "torch speaks DLPack %u, and %d is needed.", self->exchange->major, kDLMajor);
    return 0;
}

// Learns how each type is written there, from tensors of all types and their names.
static int learn_types(Taker *self, PyObject *examples) {
    for (Py_ssize_t i = 0; i < PyList_Size(examples) && self->type_count < kMostTypes; ++i) {
        PyObject *tensor, *name;
        DLTensor found;
        if (!PyArg_ParseTuple(PyList_GetItem(examples, i), "OU", &tensor, &name)) return 0;
        if ((PyObject *)Py_TYPE(tensor) != self->tensor_type) {
            PyErr_SetString(PyExc_TypeError, "The examples are not all plain tensors.");
            return 0;
        }
        if (self->exchange->describe(tensor, &found)) {
            PyErr_Clear();  // it has no words for this type
            continue;
        }
        for (int known = 0; known < self->type_count; ++known) {
            if (self->types[known].code != type_code(&found)) continue;
            PyErr_Format(PyExc_ImportError, "%U and %U are the same to DLPack.", self->types[known].name, name);
            return 0;
        }
        self->types[self->type_count].code = type_code(&found);
        self->types[self->type_count].is_complex = PyUnicode_ReadChar(name, 0) == 'c';
        self->types[self->type_count++].name = new_reference(name);
    }
    return 1;
}

// Taker(examples, parameter_type, devices, rings, stream, together, measure, identity, unfilled, writer, lane, batch,
//       observe, observe_unread, written, changed, first)
static PyObject *taker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *examples, *tensor, *name, *given[15];
    Py_ssize_t batch;
    if (!PyArg_ParseTuple(args, "O!OO!O!OOOOO!OOnOOOOO", &PyList_Type, &examples, &given[0], &PyDict_Type, &given[1],
                          &PyDict_Type, &given[2], &given[3], &given[14], &given[4], &given[5], &PyDict_Type, &given[6],
                          &given[7], &given[8], &batch, &given[9], &given[10], &given[11], &given[12], &given[13]))
        return NULL;
    if (!PyList_Size(examples) || !PyArg_ParseTuple(PyList_GetItem(examples, 0), "OU", &tensor, &name)) return NULL;
    Taker *self = (Taker *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    PyObject **members[] = {&self->parameter_type, &self->devices,  &self->rings,   &self->stream,
                            &self->measure,        &self->identity, &self->unfilled, &self->writer,
                            &self->lane,           &self->observe,  &self->observe_unread, &self->written,
                            &self->changed,        &self->first,    &self->together};
    for (size_t i = 0; i < sizeof members / sizeof *members; ++i) *members[i] = new_reference(given[i]);
    self->tensor_type = new_reference((PyObject *)Py_TYPE(tensor));
    self->batch = batch;
    self->appending = find_appending(self->lane);
    self->launching = find_launching();
    self->sightings.crowded = kEnough;
    if (find_exchange(self) && find_questions(self, tensor) && learn_types(self, examples)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static int taker_traverse(PyObject *object, visitproc visit, void *arg) {
    Taker *self = (Taker *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->observe);
    Py_VISIT(self->observe_unread);
    Py_VISIT(self->written);
    Py_VISIT(self->changed);
    Py_VISIT(self->first);
    Py_VISIT(self->together);
    Py_VISIT(self->writer);
    Py_VISIT(self->rings);
    return 0;
}

static int taker_break(PyObject *object) {
    Taker *self = (Taker *)object;
    Py_CLEAR(self->observe);
    Py_CLEAR(self->observe_unread);
    Py_CLEAR(self->written);
    Py_CLEAR(self->changed);
    Py_CLEAR(self->first);
    Py_CLEAR(self->together);
    Py_CLEAR(self->writer);
    Py_CLEAR(self->rings);
    return 0;
}

static void taker_dealloc(PyObject *object) {
    Taker *self = (Taker *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    taker_break(object);
    clear_sightings(&self->sightings);
    PyMem_Free(self->sightings.buckets);
    clear_layouts(&self->layouts);
    free_regulars(&self->regulars);
    for (int i = 0; i < self->place_count; ++i) Py_DECREF(self->places[i].device), Py_DECREF(self->places[i].name);
    PyObject **members[] = {&self->parameter_type, &self->devices, &self->stream, &self->measure,    &self->identity,
                            &self->unfilled,       &self->lane,    &self->roles,  &self->tensor_type};
    for (size_t i = 0; i < sizeof members / sizeof *members; ++i) Py_CLEAR(*members[i]);
    Method *methods[] = {&self->is_neg, &self->is_conj, &self->is_inference, &self->storage};
    for (size_t i = 0; i < sizeof methods / sizeof *methods; ++i) Py_CLEAR(methods[i]->name);
    Attribute *attributes[] = {&self->version, &self->device, &self->requires_grad};
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; ++i) Py_CLEAR(attributes[i]->descriptor);
    for (int i = 0; i < self->type_count; ++i) Py_CLEAR(self->types[i].name);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

// ---- the module ----------------------------------------------------------------------------------------------------

#define FAST(function) ((PyCFunction)(void (*)(void))(function))
static PyMethodDef kTakerMethods[] = {
    {"observe", FAST(taker_observe), METH_FASTCALL, NULL},
    {"observe_unread", FAST(taker_observe_unread), METH_FASTCALL, NULL},
    {"observe_inputs", FAST(taker_observe_inputs), METH_FASTCALL, NULL},
    {"changed", taker_changed, METH_O, NULL},
    {"written", taker_written, METH_O, NULL},
    {"forget", taker_forget, METH_O, NULL},
    {"of", taker_number, METH_VARARGS, NULL},
    {"ahead", taker_ahead, METH_VARARGS, NULL},
    {"clear", taker_clear, METH_NOARGS, NULL},
    {"renumber", taker_renumber, METH_NOARGS, NULL},
    {"next_step", taker_next_step, METH_NOARGS, NULL},
    {"counted", taker_counted, METH_NOARGS, NULL},
    {"apply", taker_apply, METH_VARARGS, NULL},
    {"catch", taker_catch, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *taker_launches(PyObject *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(((Taker *)self)->launching != NULL);
}

static PyGetSetDef kTakerAttributes[] = {
    {"launches", taker_launches, NULL, "Whether kernels of a card are launched from here.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot kTakerSlots[] = {
    {Py_tp_methods, kTakerMethods},
    {Py_tp_getset, kTakerAttributes},
    {Py_tp_new, (void *)taker_new},
    {Py_tp_traverse, (void *)taker_traverse},
    {Py_tp_clear, (void *)taker_break},
    {Py_tp_dealloc, (void *)taker_dealloc},
    {0, NULL},
};

static PyType_Spec kTakerSpec = {
    "astray.capture.pytorch._tensors.Taker", sizeof(Taker), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kTakerSlots,
};

static PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "astray.capture.pytorch._tensors", NULL, -1, NULL, NULL, NULL, NULL, NULL,
};

static int make_words(void) {
    const struct {
        PyObject **at;
        const char *text;
    } words[] = {
        {&word.launches, "_launches"}, {&word.index, "_index"},     {&word.slots, "_slots"},
        {&word.tensor_row, "tensor_row"}, {&input_role, "input"},     {&parameter_role, "parameter"},
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; ++i)
        if (!(*words[i].at = PyUnicode_InternFromString(words[i].text))) return 0;
    return (no_arguments = PyTuple_New(0)) != NULL;
}

PyMODINIT_FUNC PyInit__tensors(void) {
    PyObject *module = PyModule_Create(&kModule);
    PyObject *type = module && make_words() ? PyType_FromSpec(&kTakerSpec) : NULL;
    if (type && !PyModule_AddObjectRef(module, "Taker", type)) return Py_DECREF(type), module;
    Py_XDECREF(type), Py_XDECREF(module);
    return NULL;
}
