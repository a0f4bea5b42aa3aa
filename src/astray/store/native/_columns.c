// Rows of one table on their way to its file, kept as columns: what `PythonRows` does where this could not be built.
//
// Appending a row copies its cells to the ends of the columns and makes no Python object, so that nothing of it is left
// for the garbage collector, and the writer's thread finds Arrow's buffers all but done: it competes with the user's
// program for the interpreter. Nulls are kept as Arrow has them: a value that is NaN, 0 or no byte, beside a flag.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_columns.h"

enum { kMostColumns = 48 };

typedef enum { kInt64, kInt32, kUInt64, kFloat64, kBool, kString, kList, kObject } Type;

static const struct {
    const char *name;
    int size;  // of a value; of an item where each value has a size of its own
} kTypes[] = {
    {"int64", 8}, {"int32", 4}, {"uint64", 8}, {"float64", 8}, {"bool", 1}, {"string", 1}, {"list<int64>", 8}, {"object", sizeof(PyObject *)},
};

static int is_varied(Type type) { return type == kString || type == kList; }

// ---- rows ----------------------------------------------------------------------------------------------------------

typedef struct {
    Type type;
    int nullable;
    char *values;    // of strings and lists: where each ends, counted in items, as int64
    uint8_t *there;  // whether each is not null. Only where there may be nulls.
    char *items;     // what strings and lists consist of
    size_t used, room, before;  // of the items, in bytes; `before` is how many there were the last time
    Py_ssize_t filled;          // so many rows have a value; those behind are null, which most columns are
} Column;

// An item of a row: one column, or a tuple of several. In place of a tuple there may be a ticket, for the first of them.
typedef struct {
    int first, columns;
    int is_tuple;
} Cell;

typedef struct {
    PyObject_HEAD
    Py_ssize_t rows, room, before;  // `before` is how many there were the last time: so many are likely to come again
    int cell_count, column_count;
    char open;
    Cell cells[kMostColumns];
    Column columns[kMostColumns];
} Rows;

static PyTypeObject *rows_type;

static size_t value_size(const Column *column) { return is_varied(column->type) ? 8 : (size_t)kTypes[column->type].size; }

static int resize(char **data, size_t size) {
    char *larger = PyMem_Realloc(*data, size ? size : 1);
    if (!larger) return PyErr_NoMemory(), 0;
    *data = larger;
    return 1;
}

// Makes room for more rows, though not for the items of their strings and lists.
static int make_room(Rows *self, Py_ssize_t more) {
    if (self->rows + more <= self->room) return 1;
    Py_ssize_t room = 2 * (self->rows + more);
    if (room < self->before) room = self->before;
    if (room < 64) room = 64;
    for (int i = 0; i < self->column_count; ++i) {
        Column *column = &self->columns[i];
        if (!resize(&column->values, value_size(column) * (size_t)room)) return 0;
        if (column->nullable && !resize((char **)&column->there, (size_t)room)) return 0;
    }
    self->room = room;
    return 1;
}

static int make_item_room(Column *column, size_t more) {
    if (column->used + more <= column->room) return 1;
    size_t room = 2 * (column->used + more);
    if (room < column->before) room = column->before;
    if (!resize(&column->items, room)) return 0;
    column->room = room;
    return 1;
}

// Writes the nulls that have only been counted so far, up to a row for which there is room.
static void fill(Column *column, Py_ssize_t stop) {
    const Py_ssize_t start = column->filled;
    if (start >= stop) return;
    const size_t size = value_size(column), count = (size_t)(stop - start);
    memset(column->there + start, 0, count);  // only what may be null can be behind
    if (column->type == kFloat64) {
        for (Py_ssize_t row = start; row < stop; ++row) ((double *)(void *)column->values)[row] = NAN;
    } else if (is_varied(column->type)) {
        const int64_t end = (int64_t)(column->used / (size_t)kTypes[column->type].size);
        for (Py_ssize_t row = start; row < stop; ++row) ((int64_t *)(void *)column->values)[row] = end;
    } else {
        memset(column->values + size * (size_t)start, 0, size * count);
    }
    column->filled = stop;
}

static void fill_all(Rows *self) {
    for (int i = 0; i < self->column_count; ++i) fill(&self->columns[i], self->rows);
}

static Column *column_of(Rows *self, Py_ssize_t number) {
    if (number >= 0 && number < self->column_count) return &self->columns[number];
    PyErr_Format(PyExc_IndexError, "There is no column %zd.", number);
    return NULL;
}

static int is_range(const Rows *self, Py_ssize_t start, Py_ssize_t stop) {
    if (0 <= start && start <= stop && stop <= self->rows) return 1;
    PyErr_Format(PyExc_IndexError, "Rows %zd to %zd are not among %zd.", start, stop, self->rows);
    return 0;
}

// Where the string or list of a row begins, which is where the one before it ends.
static int64_t begin_of(const Column *column, Py_ssize_t row) {
    return row ? ((const int64_t *)(const void *)column->values)[row - 1] : 0;
}

// ---- reading a row -------------------------------------------------------------------------------------------------

// The value of a cell, read before anything is written: reading it may run code that appends a row of its own.
typedef struct {
    union {
        int64_t integer;
        uint64_t natural;
        double real;
        const char *text;
        const int64_t *list;
        PyObject *object;
    } as;
    Py_ssize_t size;  // of a text or list
    PyObject *owned;  // what keeps it
    int is_null;
} Value;

static int read_integer(PyObject *object, int64_t *out) {
    if (PyLong_Check(object)) {
        *out = PyLong_AsLongLong(object);
    } else {
        PyObject *index = PyNumber_Index(object);
        if (!index) return 0;
        *out = PyLong_AsLongLong(index);
        Py_DECREF(index);
    }
    return *out != -1 || !PyErr_Occurred();
}

static int read_text(PyObject *object, Value *value) {
    value->as.text = PyUnicode_AsUTF8AndSize(object, &value->size);
    if (value->as.text) return 1;
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return 0;  // file names may hold what UTF-8 cannot
    PyErr_Clear();
    value->owned = PyUnicode_AsEncodedString(object, "utf-8", "backslashreplace");
    if (!value->owned) return 0;
    value->as.text = PyBytes_AsString(value->owned);
    value->size = PyBytes_Size(value->owned);
    return 1;
}

// Room for the lists of a row, which have seldom more than a few items.
typedef struct {
    int64_t items[32];
    Py_ssize_t used;
} Room;

static int read_list(PyObject *object, Value *value, Room *room) {
    if (!PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%R is no tuple.", object);
        return 0;
    }
    value->size = PyTuple_Size(object);
    int64_t *items = room->items + room->used;
    if (value->size <= (Py_ssize_t)(sizeof room->items / sizeof *room->items) - room->used) {
        room->used += value->size;
    } else {
        value->owned = PyBytes_FromStringAndSize(NULL, 8 * value->size);
        if (!value->owned) return 0;
        items = (int64_t *)(void *)PyBytes_AsString(value->owned);
    }
    value->as.list = items;
    for (Py_ssize_t i = 0; i < value->size; ++i)
        if (!read_integer(PyTuple_GetItem(object, i), &items[i])) return 0;
    return 1;
}

static int read_value(Type type, PyObject *object, Value *value, Room *room) {
    switch (type) {
        case kInt64:
            return read_integer(object, &value->as.integer);
        case kInt32:
            if (!read_integer(object, &value->as.integer)) return 0;
            if (value->as.integer == (int32_t)value->as.integer) return 1;
            PyErr_Format(PyExc_OverflowError, "%lld does not fit into 32 bits.", (long long)value->as.integer);
            return 0;
        case kUInt64:
            value->as.natural = PyLong_AsUnsignedLongLong(object);
            return value->as.natural != UINT64_MAX || !PyErr_Occurred();
        case kFloat64:
            value->as.real = PyFloat_AsDouble(object);
            return value->as.real != -1.0 || !PyErr_Occurred();
        case kBool:
            value->as.integer = PyObject_IsTrue(object);
            return value->as.integer >= 0;
        case kString:
            return read_text(object, value);
        case kList:
            return read_list(object, value, room);
        case kObject:
            value->as.object = object;
            return 1;
    }
    return 0;
}

static int read_cell(const Column *column, int item, PyObject *object, Value *value, Room *room) {
    if (object != Py_None || column->type == kObject) return read_value(column->type, object, value, room);
    value->is_null = 1;
    if (column->nullable) return 1;
    PyErr_Format(PyExc_TypeError, "Item %d of a row is None, in a column without nulls.", item);
    return 0;
}

// A tuple, of which each item is a cell; or a ticket, for the first column; or None.
static int read_tuple(const Rows *self, int item, PyObject *object, Value *values, Room *room) {
    const Cell *cell = &self->cells[item];
    const int is_tuple = PyTuple_Check(object);
    for (int i = 0; i < cell->columns; ++i) values[i].is_null = 1;
    if (PyLong_CheckExact(object)) {
        values[0].is_null = 0;
        return read_cell(&self->columns[cell->first], item, object, &values[0], room);
    }
    if (!is_tuple && object != Py_None) {
        PyErr_Format(PyExc_TypeError, "Item %d of a row is %R: no tuple, no ticket and not None.", item, object);
        return 0;
    }
    for (int i = 1; is_tuple && i < cell->columns; ++i) {
        PyObject *one = PyTuple_GetItem(object, i - 1);
        values[i].is_null = 0;
        if (!one || !read_cell(&self->columns[cell->first + i], item, one, &values[i], room)) return 0;
    }
    return 1;
}

static int read_row(const Rows *self, PyObject *const *cells, Py_ssize_t count, Value *values, Room *room) {
    if (count != self->cell_count) {
        PyErr_Format(PyExc_IndexError, "A row has %d items, not %zd.", self->cell_count, count);
        return 0;
    }
    for (int item = 0; item < count; ++item) {
        const Cell *cell = &self->cells[item];
        const int done = cell->is_tuple
                             ? read_tuple(self, item, cells[item], values + cell->first, room)
                             : read_cell(&self->columns[cell->first], item, cells[item], values + cell->first, room);
        if (!done) return 0;
    }
    return 1;
}

// ---- writing a row -------------------------------------------------------------------------------------------------

static int make_room_for(Rows *self, const Value *values) {
    if (!make_room(self, 1)) return 0;
    for (int i = 0; i < self->column_count; ++i) {
        Column *column = &self->columns[i];
        if (!is_varied(column->type) || values[i].is_null) continue;
        if (!make_item_room(column, (size_t)kTypes[column->type].size * (size_t)values[i].size)) return 0;
    }
    return 1;
}

// Writes a value for which there is room. Nothing is run here.
static void write_value(Column *column, Py_ssize_t row, const Value *value) {
    void *values = column->values;
    if (value->is_null) return;
    if (column->nullable) {
        fill(column, row);
        column->there[row] = 1;
    }
    column->filled = row + 1;
    switch (column->type) {
        case kInt64:
        case kUInt64:
            ((uint64_t *)values)[row] = value->as.natural;
            break;
        case kInt32:
            ((int32_t *)values)[row] = (int32_t)value->as.integer;
            break;
        case kFloat64:
            ((double *)values)[row] = value->as.real;
            break;
        case kBool:
            ((uint8_t *)values)[row] = (uint8_t)value->as.integer;
            break;
        case kObject:
            ((PyObject **)values)[row] = Py_NewRef(value->as.object);
            break;
        case kString:
            if (value->size) memcpy(column->items + column->used, value->as.text, (size_t)value->size);
            column->used += (size_t)value->size;
            ((int64_t *)values)[row] = (int64_t)column->used;
            break;
        case kList:
            if (value->size) memcpy(column->items + column->used, value->as.list, 8 * (size_t)value->size);
            column->used += 8 * (size_t)value->size;
            ((int64_t *)values)[row] = (int64_t)(column->used / 8);
            break;
    }
}

// Appends a row, given as its items: 1, 0 when that would make it `most` rows, −1 with an error set. Where no rows are
// taken any more it is dropped.
static int append_row(PyObject *object, PyObject *const *cells, Py_ssize_t count, Py_ssize_t most) {
    Rows *self = (Rows *)object;
    if (!self->open) return 1;
    if (self->rows + 1 >= most) return 0;
    Value values[kMostColumns];
    Room room;
    room.used = 0;
    for (int i = 0; i < self->column_count; ++i) values[i].is_null = 0, values[i].owned = NULL;
    const int done = read_row(self, cells, count, values, &room) && make_room_for(self, values);
    if (done) {
        for (int i = 0; i < self->column_count; ++i) write_value(&self->columns[i], self->rows, &values[i]);
        ++self->rows;
    }
    for (int i = 0; i < self->column_count; ++i) Py_XDECREF(values[i].owned);
    return done ? 1 : -1;
}

static int are_rows(PyObject *object) { return Py_TYPE(object) == rows_type; }

static PyObject *rows_append(PyObject *self, PyObject *row) {
    PyObject *cells[kMostColumns];
    const Py_ssize_t count = PyTuple_Check(row) ? PyTuple_Size(row) : -1;
    if (count < 0) return PyErr_Format(PyExc_TypeError, "%R is no tuple.", row);
    for (Py_ssize_t i = 0; i < count && i < kMostColumns; ++i) cells[i] = PyTuple_GetItem(row, i);
    if (append_row(self, cells, count, PY_SSIZE_T_MAX) < 0) return NULL;
    Py_RETURN_NONE;
}

// ---- moving rows ---------------------------------------------------------------------------------------------------

static Rows *rows_like(const Rows *other) {
    Rows *self = (Rows *)PyType_GenericAlloc(rows_type, 0);
    if (!self) return NULL;
    self->open = 1;
    self->cell_count = other->cell_count;
    self->column_count = other->column_count;
    memcpy(self->cells, other->cells, sizeof self->cells);
    for (int i = 0; i < self->column_count; ++i) {
        self->columns[i].type = other->columns[i].type;
        self->columns[i].nullable = other->columns[i].nullable;
    }
    return self;
}

// Copies a range of rows to the end of others, which have the same columns and room for them.
static int copy_column(Column *to, Py_ssize_t at, const Column *from, Py_ssize_t start, Py_ssize_t stop) {
    const size_t size = value_size(from), count = (size_t)(stop - start);
    if (from->nullable) memcpy(to->there + at, from->there + start, count);
    if (!is_varied(from->type)) {
        memcpy(to->values + size * (size_t)at, from->values + size * (size_t)start, size * count);
        for (Py_ssize_t row = start; from->type == kObject && row < stop; ++row)
            Py_INCREF(((PyObject **)(void *)from->values)[row]);
        return 1;
    }
    const size_t item = (size_t)kTypes[from->type].size;
    const int64_t begin = begin_of(from, start), shift = (int64_t)(to->used / item) - begin;
    const size_t bytes = item * (size_t)(begin_of(from, stop) - begin);
    if (!make_item_room(to, bytes)) return 0;
    if (bytes) memcpy(to->items + to->used, from->items + item * (size_t)begin, bytes);
    to->used += bytes;
    for (Py_ssize_t row = start; row < stop; ++row)
        ((int64_t *)(void *)to->values)[at + row - start] = begin_of(from, row + 1) + shift;
    return 1;
}

static int copy_rows(Rows *to, Rows *from, Py_ssize_t start, Py_ssize_t stop) {
    if (start == stop) return 1;
    int done = make_room(to, stop - start);
    fill_all(to);
    fill_all(from);
    for (int i = 0; done && i < from->column_count; ++i)
        done = copy_column(&to->columns[i], to->rows, &from->columns[i], start, stop);
    if (!done) return 0;
    to->rows += stop - start;
    for (int i = 0; i < to->column_count; ++i) to->columns[i].filled = to->rows;
    return 1;
}

static void free_column(Column *column, Py_ssize_t rows) {
    for (Py_ssize_t row = 0; column->type == kObject && row < rows; ++row)
        Py_DECREF(((PyObject **)(void *)column->values)[row]);
    PyMem_Free(column->values), PyMem_Free(column->there), PyMem_Free(column->items);
}

static void swap_rows(Rows *one, Rows *other) {
    for (int i = 0; i < one->column_count; ++i) {
        const Column column = one->columns[i];
        one->columns[i] = other->columns[i];
        other->columns[i] = column;
    }
    const Py_ssize_t rows = one->rows, room = one->room;
    one->rows = other->rows, one->room = other->room;
    other->rows = rows, other->room = room;
}

// take(count=None): moves the first rows out
static PyObject *rows_take(PyObject *object, PyObject *args) {
    Rows *self = (Rows *)object;
    PyObject *given = Py_None;
    if (!PyArg_ParseTuple(args, "|O", &given)) return NULL;
    const Py_ssize_t count = given == Py_None ? self->rows : PyLong_AsSsize_t(given);
    if (count == -1 && PyErr_Occurred()) return NULL;
    if (!is_range(self, 0, count)) return NULL;
    Rows *taken = rows_like(self);
    if (!taken) return NULL;
    if (count == self->rows) {
        swap_rows(self, taken);
        self->before = taken->rows;
        for (int i = 0; i < self->column_count; ++i) self->columns[i].before = taken->columns[i].used;
        return (PyObject *)taken;
    }
    Rows *rest = copy_rows(taken, self, 0, count) ? rows_like(self) : NULL;
    if (rest && copy_rows(rest, self, count, self->rows)) swap_rows(self, rest);
    else Py_CLEAR(taken);
    Py_XDECREF(rest);
    return (PyObject *)taken;
}

// extend(other): appends copies of other rows of this kind
static PyObject *rows_extend(PyObject *self, PyObject *other) {
    if (Py_TYPE(other) != rows_type || ((Rows *)other)->column_count != ((Rows *)self)->column_count || self == other)
        return PyErr_Format(PyExc_TypeError, "%R are no other rows of this kind.", other);
    if (!copy_rows((Rows *)self, (Rows *)other, 0, ((Rows *)other)->rows)) return NULL;
    Py_RETURN_NONE;
}

// ---- as Arrow has them ---------------------------------------------------------------------------------------------

static PyObject *packed(const uint8_t *flags, Py_ssize_t count) {
    PyObject *bits = PyBytes_FromStringAndSize(NULL, (count + 7) / 8);
    if (!bits) return NULL;
    uint8_t *out = (uint8_t *)PyBytes_AsString(bits);
    memset(out, 0, (size_t)((count + 7) / 8));
    for (Py_ssize_t i = 0; i < count; ++i) out[i / 8] |= (uint8_t)(flags[i] << (i % 8));
    return bits;
}

// The bitmap: nothing when every bit is set. Counts the nulls.
static PyObject *bitmap_of(const Column *column, Py_ssize_t start, Py_ssize_t count, Py_ssize_t *nulls) {
    const uint8_t *there = column->nullable ? column->there + start : NULL;
    *nulls = 0;
    for (Py_ssize_t i = 0; there && i < count; ++i) *nulls += !there[i];
    return *nulls ? packed(there, count) : PyBytes_FromStringAndSize("", 0);
}

static PyObject *encode_varied(const Column *column, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t limit) {
    const int64_t begin = begin_of(column, start), items = begin_of(column, stop) - begin;
    const size_t size = (size_t)kTypes[column->type].size;
    Py_ssize_t nulls;
    if (items > limit) Py_RETURN_NONE;
    PyObject *offsets = PyBytes_FromStringAndSize(NULL, 4 * (stop - start + 1));
    if (!offsets) return NULL;
    int32_t *out = (int32_t *)(void *)PyBytes_AsString(offsets);
    for (Py_ssize_t row = start; row <= stop; ++row) out[row - start] = (int32_t)(begin_of(column, row) - begin);
    PyObject *bitmap = bitmap_of(column, start, stop - start, &nulls);
    const char *data = items ? column->items + size * (size_t)begin : "";
    const Py_ssize_t bytes = (Py_ssize_t)size * (Py_ssize_t)items;
    if (column->type == kString) return Py_BuildValue("n(NNy#)", nulls, bitmap, offsets, data, bytes);
    // The items of a list have a bitmap of their own, and no nulls.
    return Py_BuildValue("n(NNy#y#)", nulls, bitmap, offsets, "", (Py_ssize_t)0, data, bytes);
}

// encode(column, start, stop, limit) -> (nulls, buffers), or None when it needs offsets above the limit
static PyObject *rows_encode(PyObject *self, PyObject *args) {
    Py_ssize_t number, start, stop, limit, nulls;
    if (!PyArg_ParseTuple(args, "nnnn", &number, &start, &stop, &limit)) return NULL;
    Column *column = column_of((Rows *)self, number);
    if (!column || !is_range((Rows *)self, start, stop)) return NULL;
    if (column->type == kObject) return PyErr_Format(PyExc_TypeError, "Column %zd is of objects.", number);
    fill(column, ((Rows *)self)->rows);
    if (is_varied(column->type)) return encode_varied(column, start, stop, limit);
    const size_t size = (size_t)kTypes[column->type].size;
    const char *data = stop > start ? column->values + size * (size_t)start : "";
    PyObject *bitmap = bitmap_of(column, start, stop - start, &nulls);
    if (column->type == kBool) return Py_BuildValue("n(NN)", nulls, bitmap, packed((const uint8_t *)data, stop - start));
    return Py_BuildValue("n(Ny#)", nulls, bitmap, data, (Py_ssize_t)size * (stop - start));
}

// tickets(column) -> (the rows that have one, the tickets), each as bytes of int64
static PyObject *rows_tickets(PyObject *object, PyObject *given) {
    const Rows *self = (Rows *)object;
    Column *column = column_of((Rows *)object, PyLong_AsSsize_t(given));
    if (!column) return NULL;
    if (column->type != kInt64 || !column->nullable)
        return PyErr_Format(PyExc_TypeError, "Column %S is not one of tickets.", given);
    fill(column, self->rows);
    Py_ssize_t count = 0;
    for (Py_ssize_t row = 0; row < self->rows; ++row) count += column->there[row];
    PyObject *places = PyBytes_FromStringAndSize(NULL, 8 * count), *tickets = PyBytes_FromStringAndSize(NULL, 8 * count);
    if (places && tickets) {
        int64_t *place = (int64_t *)(void *)PyBytes_AsString(places), *ticket = (int64_t *)(void *)PyBytes_AsString(tickets);
        for (Py_ssize_t row = 0; row < self->rows; ++row) {
            if (!column->there[row]) continue;
            *place++ = row;
            *ticket++ = ((const int64_t *)(const void *)column->values)[row];
        }
    }
    return Py_BuildValue("NN", places, tickets);
}

// cells(column) -> the objects or texts themselves
static PyObject *rows_cells(PyObject *object, PyObject *given) {
    const Rows *self = (Rows *)object;
    Column *column = column_of((Rows *)object, PyLong_AsSsize_t(given));
    if (!column) return NULL;
    if (column->type != kObject && column->type != kString)
        return PyErr_Format(PyExc_TypeError, "Column %S is neither of objects nor of texts.", given);
    if (column->nullable) fill(column, self->rows);
    PyObject *found = PyList_New(self->rows);
    for (Py_ssize_t row = 0; found && row < self->rows; ++row) {
        PyObject *cell;
        if (column->type == kObject) {
            cell = Py_NewRef(((PyObject **)(void *)column->values)[row]);
        } else if (column->nullable && !column->there[row]) {
            cell = Py_NewRef(Py_None);
        } else {
            const int64_t begin = begin_of(column, row), size = begin_of(column, row + 1) - begin;
            cell = PyUnicode_DecodeUTF8(size ? column->items + begin : "", (Py_ssize_t)size, NULL);
        }
        if (!cell || PyList_SetItem(found, row, cell)) Py_CLEAR(found);
    }
    return found;
}

// ---- their life ----------------------------------------------------------------------------------------------------

static int add_column(Rows *self, const char *name, int nullable) {
    size_t type = 0;
    while (type < sizeof kTypes / sizeof *kTypes && strcmp(kTypes[type].name, name)) ++type;
    if (type == sizeof kTypes / sizeof *kTypes) {
        PyErr_Format(PyExc_ValueError, "There is no column type %s.", name);
        return 0;
    }
    if (self->column_count == kMostColumns) {
        PyErr_Format(PyExc_ValueError, "Rows have at most %d columns.", kMostColumns);
        return 0;
    }
    Column *column = &self->columns[self->column_count++];
    column->type = (Type)type;
    column->nullable = nullable;
    return 1;
}

static int add_pair(Rows *self, PyObject *pair) {
    const char *name;
    int nullable;
    return PyArg_ParseTuple(pair, "sp", &name, &nullable) && add_column(self, name, nullable);
}

static int add_cell(Rows *self, PyObject *given) {
    const int is_tuple = PyList_Check(given), first = self->column_count;
    int done = is_tuple ? add_column(self, "int64", 1) : add_pair(self, given);  // the first is for tickets
    for (Py_ssize_t i = 0; done && is_tuple && i < PyList_Size(given); ++i) done = add_pair(self, PyList_GetItem(given, i));
    if (done) self->cells[self->cell_count++] = (Cell){first, self->column_count - first, is_tuple};
    return done;
}

// Rows(cells): each item of a row is a pair of a type and whether it may be None, or a list of such pairs
static PyObject *rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *cells;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &cells)) return NULL;
    Rows *self = (Rows *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->open = 1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(cells); ++i) {
        if (add_cell(self, PyTuple_GetItem(cells, i))) continue;
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void rows_dealloc(PyObject *object) {
    Rows *self = (Rows *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < self->column_count; ++i) free_column(&self->columns[i], self->rows);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static Py_ssize_t rows_length(PyObject *self) { return ((Rows *)self)->rows; }

static PyObject *get_open(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(((Rows *)self)->open);
}

// The bytes of memory that the rows take, without the objects among them.
static PyObject *get_nbytes(PyObject *object, void *closure) {
    (void)closure;
    const Rows *self = (const Rows *)object;
    size_t bytes = sizeof *self;
    for (int i = 0; i < self->column_count; ++i) {
        const Column *column = &self->columns[i];
        bytes += (value_size(column) + (column->nullable ? 1 : 0)) * (size_t)self->room + column->room;
    }
    return PyLong_FromSize_t(bytes);
}

static int set_open(PyObject *self, PyObject *value, void *closure) {
    (void)closure;
    const int open = value ? PyObject_IsTrue(value) : -1;
    if (open < 0) return -1;
    ((Rows *)self)->open = (char)open;
    return 0;
}

static PyMethodDef kMethods[] = {
    {"append", rows_append, METH_O, NULL},   {"take", rows_take, METH_VARARGS, NULL},
    {"extend", rows_extend, METH_O, NULL},   {"encode", rows_encode, METH_VARARGS, NULL},
    {"tickets", rows_tickets, METH_O, NULL}, {"cells", rows_cells, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef kGetSet[] = {
    {"open", get_open, set_open, NULL, NULL},
    {"nbytes", get_nbytes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_methods, kMethods}, {Py_tp_getset, kGetSet},        {Py_sq_length, (void *)rows_length},
    {Py_tp_new, (void *)rows_new}, {Py_tp_dealloc, (void *)rows_dealloc}, {0, NULL},
};

static PyType_Spec kSpec = {"astray.store.native._columns.Rows", sizeof(Rows), 0, Py_TPFLAGS_DEFAULT, kSlots};

static const Appending kAppending = {are_rows, append_row};

static PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "astray.store.native._columns", NULL, -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__columns(void) {
    PyObject *module = PyModule_Create(&kModule);
    rows_type = module ? (PyTypeObject *)PyType_FromSpec(&kSpec) : NULL;
    PyObject *capsule = rows_type ? PyCapsule_New((void *)&kAppending, APPENDING, NULL) : NULL;
    const int done = capsule && !PyModule_AddObjectRef(module, "Rows", (PyObject *)rows_type) &&
                     !PyModule_AddObjectRef(module, "appending", capsule);
    Py_XDECREF(capsule);
    if (!done) Py_CLEAR(module);
    return module;
}
