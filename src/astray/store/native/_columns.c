// Turns one column of rows into Arrow buffers: what `cells` does in plain Python where this could not be built.
//
// Rows are plain tuples, and everything here reads them with the GIL held, in competition with the user's program: a
// column is one loop without a Python object made, but for the buffers themselves. Nulls are kept as Arrow has them: a
// bit that is 0, and a value that is NaN, 0 or no byte. Both give the same bytes.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

// A column: item `item` of each row, or of the tuple that is item `within` of it.
typedef struct {
    PyObject *rows;
    Py_ssize_t count, item, within;
    int nullable;
    Py_ssize_t nulls;
    uint8_t *valid;  // the bitmap, of which bits are cleared
} Column;

// The cell of a row, borrowed; NULL with an error set. It is None where there is no tuple for it to be in: a row may be
// None itself, and have None or a ticket at `within`.
static PyObject *cell(const Column *column, Py_ssize_t row) {
    PyObject *found = PyList_GetItem(column->rows, row);
    if (found && column->within >= 0) {
        found = PyTuple_GetItem(found, column->within);
        if (found && !PyTuple_Check(found)) return Py_None;
    }
    return found && found != Py_None ? PyTuple_GetItem(found, column->item) : found;
}

// Notes that a row has no value. 0 when it has to have one.
static int set_null(Column *column, Py_ssize_t row) {
    if (!column->nullable) {
        PyErr_Format(PyExc_TypeError, "Item %zd of row %zd is None, in a column without nulls.", column->item, row);
        return 0;
    }
    column->valid[row / 8] &= (uint8_t)~(1u << (row % 8));
    ++column->nulls;
    return 1;
}

// The bitmap of a column as Arrow has it: nothing when every bit is set, and no bit set behind the last row.
static PyObject *bitmap_of(const Column *column) {
    if (!column->nulls) return PyBytes_FromStringAndSize("", 0);
    if (column->count % 8) column->valid[column->count / 8] &= (uint8_t)((1u << (column->count % 8)) - 1);
    return PyBytes_FromStringAndSize((const char *)column->valid, (column->count + 7) / 8);
}

// ---- columns whose values have one size ----------------------------------------------------------------------------

// Puts the value of a cell into its place. 0 when it is not what it should be, with an error set.
typedef int (*Put)(PyObject *object, void *out, Py_ssize_t row);

static int put_int64(PyObject *object, void *out, Py_ssize_t row) {
    const long long value = ((int64_t *)out)[row] = PyLong_AsLongLong(object);
    return value != -1 || !PyErr_Occurred();
}

static int put_int32(PyObject *object, void *out, Py_ssize_t row) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) return 0;
    ((int32_t *)out)[row] = (int32_t)value;
    if (value != (int32_t)value) PyErr_Format(PyExc_OverflowError, "%lld does not fit into 32 bits.", value);
    return value == (int32_t)value;
}

static int put_uint64(PyObject *object, void *out, Py_ssize_t row) {
    const uint64_t value = ((uint64_t *)out)[row] = PyLong_AsUnsignedLongLong(object);
    return value != UINT64_MAX || !PyErr_Occurred();
}

static int put_float64(PyObject *object, void *out, Py_ssize_t row) {
    const double value = ((double *)out)[row] = PyFloat_AsDouble(object);
    return value != -1.0 || !PyErr_Occurred();
}

static int put_bool(PyObject *object, void *out, Py_ssize_t row) {
    const int is_true = PyObject_IsTrue(object);
    if (is_true > 0) ((uint8_t *)out)[row / 8] |= (uint8_t)(1u << (row % 8));
    return is_true >= 0;
}

static PyObject *encode_fixed(Column *column, Put put, int bits) {
    const Py_ssize_t bytes = (bits * column->count + 7) / 8;
    PyObject *data = PyBytes_FromStringAndSize(NULL, bytes);
    if (!data) return NULL;
    void *out = PyBytes_AsString(data);
    memset(out, 0, (size_t)bytes);
    for (Py_ssize_t row = 0; row < column->count; ++row) {
        PyObject *object = cell(column, row);
        if (object == Py_None && put == put_float64) ((double *)out)[row] = NAN;
        if (object && (object == Py_None ? set_null(column, row) : put(object, out, row))) continue;
        Py_DECREF(data);
        return NULL;
    }
    return Py_BuildValue("n(NN)", column->nulls, bitmap_of(column), data);
}

// ---- columns whose values have a size each -------------------------------------------------------------------------

// Bytes under construction.
typedef struct {
    char *data;
    Py_ssize_t used, room;
} Growing;

static char *grow(Growing *buffer, Py_ssize_t size) {
    if (buffer->used + size > buffer->room) {
        const Py_ssize_t room = 2 * (buffer->used + size);
        char *data = PyMem_Realloc(buffer->data, (size_t)room);
        if (!data) return (char *)PyErr_NoMemory();
        buffer->data = data;
        buffer->room = room;
    }
    char *place = buffer->data + buffer->used;
    buffer->used += size;
    return place;
}

// Fills `offsets` and `data`. Returns 0 with an error set, or −1 when the offsets cannot count so much.
typedef int (*Fill)(Column *column, int32_t *offsets, Growing *data, Py_ssize_t limit);

static int fill_string(Column *column, int32_t *offsets, Growing *data, Py_ssize_t limit) {
    for (Py_ssize_t row = 0; row < column->count; ++row) {
        PyObject *object = cell(column, row), *escaped = NULL;
        if (!object) return 0;
        if (object == Py_None) {
            if (!set_null(column, row)) return 0;
        } else {
            Py_ssize_t size;
            const char *text = PyUnicode_AsUTF8AndSize(object, &size);
            if (!text) {  // file names may hold what UTF-8 cannot
                if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return 0;
                PyErr_Clear();
                escaped = PyUnicode_AsEncodedString(object, "utf-8", "backslashreplace");
                if (!escaped) return 0;
                text = PyBytes_AsString(escaped);
                size = PyBytes_Size(escaped);
            }
            const int fits = size <= limit - data->used;
            char *place = fits ? grow(data, size) : NULL;
            if (place) memcpy(place, text, (size_t)size);
            Py_XDECREF(escaped);
            if (!place) return fits ? 0 : -1;
        }
        offsets[row + 1] = (int32_t)data->used;
    }
    return 1;
}

static int fill_list(Column *column, int32_t *offsets, Growing *data, Py_ssize_t limit) {
    for (Py_ssize_t row = 0; row < column->count; ++row) {
        PyObject *object = cell(column, row);
        if (!object) return 0;
        if (!PyTuple_Check(object)) {
            PyErr_Format(PyExc_TypeError, "Item %zd of row %zd is no tuple.", column->item, row);
            return 0;
        }
        const Py_ssize_t size = PyTuple_Size(object);
        if (size > limit - data->used / 8) return -1;
        int64_t *items = (int64_t *)(void *)grow(data, 8 * size);
        if (!items) return 0;
        for (Py_ssize_t i = 0; i < size; ++i)
            if (!put_int64(PyTuple_GetItem(object, i), items, i)) return 0;
        offsets[row + 1] = (int32_t)(data->used / 8);
    }
    return 1;
}

static PyObject *encode_varied(Column *column, Fill fill, Py_ssize_t limit) {
    Growing data = {NULL, 0, 0};
    PyObject *result = NULL, *offsets = PyBytes_FromStringAndSize(NULL, 4 * (column->count + 1));
    if (offsets && grow(&data, 16 * column->count + 1)) {  // a guess that is seldom too low
        int32_t *ends = (int32_t *)(void *)PyBytes_AsString(offsets);
        data.used = ends[0] = 0;
        const int filled = fill(column, ends, &data, limit);
        if (filled > 0 && fill == fill_string)
            result = Py_BuildValue("n(NOy#)", column->nulls, bitmap_of(column), offsets, data.data, data.used);
        else if (filled > 0)  // the items have a bitmap of their own, and no nulls
            result = Py_BuildValue("n(NOy#y#)", column->nulls, bitmap_of(column), offsets, "", (Py_ssize_t)0, data.data,
                                   data.used);
        else if (filled < 0)
            result = Py_NewRef(Py_None);
    }
    PyMem_Free(data.data);
    Py_XDECREF(offsets);
    return result;
}

// ---- what Python calls ---------------------------------------------------------------------------------------------

static const struct {
    const char *name;
    int bits;  // of a value
    Put put;
    Fill fill;
} kTypes[] = {
    {"int64", 64, put_int64, NULL},     {"int32", 32, put_int32, NULL}, {"uint64", 64, put_uint64, NULL},
    {"float64", 64, put_float64, NULL}, {"bool", 1, put_bool, NULL},    {"string", 0, NULL, fill_string},
    {"list<int64>", 0, NULL, fill_list},
};

// encode(rows, item, within, type, nullable, limit) -> (nulls, buffers), None when it needs offsets above the limit
static PyObject *py_encode(PyObject *self, PyObject *args) {
    (void)self;
    Column column = {0};
    const char *type;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "O!nnspn", &PyList_Type, &column.rows, &column.item, &column.within, &type,
                          &column.nullable, &limit))
        return NULL;
    column.count = PyList_Size(column.rows);
    for (size_t i = 0; i < sizeof kTypes / sizeof *kTypes; ++i) {
        if (strcmp(kTypes[i].name, type)) continue;
        const size_t bytes = (size_t)(column.count + 7) / 8;
        column.valid = PyMem_Malloc(bytes + 1);
        if (!column.valid) return PyErr_NoMemory();
        memset(column.valid, 0xFF, bytes);
        PyObject *result = kTypes[i].put ? encode_fixed(&column, kTypes[i].put, kTypes[i].bits)
                                         : encode_varied(&column, kTypes[i].fill, limit);
        PyMem_Free(column.valid);
        return result;
    }
    return PyErr_Format(PyExc_ValueError, "There is no column type %s.", type);
}

// tickets(rows, item) -> (the places of rows whose item is an integer, those integers), each as int64
static PyObject *py_tickets(PyObject *self, PyObject *args) {
    (void)self;
    Column column = {.within = -1};
    if (!PyArg_ParseTuple(args, "O!n", &PyList_Type, &column.rows, &column.item)) return NULL;
    column.count = PyList_Size(column.rows);
    int64_t *found = PyMem_Malloc(16 * (size_t)column.count + 1);
    if (!found) return PyErr_NoMemory();
    int64_t *places = found, *tickets = found + column.count;
    Py_ssize_t count = 0;
    PyObject *result = NULL;
    for (Py_ssize_t row = 0; row < column.count; ++row) {
        PyObject *object = cell(&column, row);
        if (!object) goto end;
        if (!PyLong_CheckExact(object)) continue;
        places[count] = row;
        if (!put_int64(object, tickets, count++)) goto end;
    }
    result = Py_BuildValue("y#y#", (char *)places, 8 * count, (char *)tickets, 8 * count);
end:
    PyMem_Free(found);
    return result;
}

static PyMethodDef kMethods[] = {
    {"encode", py_encode, METH_VARARGS, NULL},
    {"tickets", py_tickets, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "astray.store.native._columns", NULL, -1, kMethods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__columns(void) { return PyModule_Create(&kModule); }
