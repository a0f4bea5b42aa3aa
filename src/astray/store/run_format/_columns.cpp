// Rows of one table on their way to its file, kept as columns.
//
// Appending a row copies its cells to the ends of the columns and makes no Python object: there is nothing to collect,
// and the writer's thread, which competes with the user's program for the interpreter, finds Arrow's buffers nearly
// finished. Nulls are stored as in Arrow: a value that is NaN, 0 or empty, and a flag. Recordings append plain values
// (_columns.h); everything else that writes runs appends tuples.

#include "ref.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "_columns.h"

namespace astray {
namespace {

constexpr size_t kMostColumns = 48;

enum Type { kInt64, kInt32, kUInt64, kFloat64, kBool, kString, kList, kObject };

const struct {
    const char *name;
    size_t size;  // of a value; of an item where each value has a size of its own
} kTypes[] = {
    {"int64", 8}, {"int32", 4}, {"uint64", 8}, {"float64", 8}, {"bool", 1}, {"string", 1}, {"list<int64>", 8}, {"object", 0},
};

// An append-only byte buffer.
class Buffer {
public:
    Buffer() = default;
    Buffer(Buffer &&other) noexcept { swap(other); }
    Buffer &operator=(Buffer &&other) noexcept {
        swap(other);
        return *this;
    }
    ~Buffer() { std::free(data_); }

    // Reserves room for at least `least` bytes in all; adding within it cannot fail.
    void reserve(size_t more, size_t least = 0) {
        if (size_ + more <= room_) return;
        const size_t room = std::max(2 * (size_ + more), least);
        auto *larger = static_cast<char *>(std::realloc(data_, room));
        if (!larger) throw std::bad_alloc();
        data_ = larger;
        room_ = room;
    }
    void add(const void *from, size_t bytes) {
        if (bytes) std::memcpy(data_ + size_, from, bytes);
        size_ += bytes;
    }
    template <class Value>
    void push(Value value) {
        std::memcpy(data_ + size_, &value, sizeof value);
        size_ += sizeof value;
    }
    void add_zeros(size_t bytes) {
        if (bytes) std::memset(data_ + size_, 0, bytes);
        size_ += bytes;
    }

    const char *data() const { return data_ ? data_ : ""; }
    template <class Value>
    const Value *as() const { return reinterpret_cast<const Value *>(data()); }
    size_t size() const { return size_; }
    size_t room() const { return room_; }

private:
    void swap(Buffer &other) {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(room_, other.room_);
    }

    char *data_ = nullptr;
    size_t size_ = 0, room_ = 0;
};

// ---- one column ----------------------------------------------------------------------------------------------------

class Column {
public:
    Column(Type type, bool nullable)
        : type(type), nullable(nullable), item_size_(kTypes[type].size), value_size_(is_varied() ? 8 : item_size_) {}

    const Type type;
    const bool nullable;

    bool is_varied() const { return type == kString || type == kList; }
    size_t item_size() const { return item_size_; }

    void reserve(size_t rows, size_t least) {
        if (type == kObject) return objects_.reserve(objects_.size() + rows);
        values_.reserve(value_size_ * rows, value_size_ * least);
        if (nullable) validity_.reserve(rows, least);
    }
    void reserve_items(size_t bytes) { items_.reserve(bytes, last_size_); }

    // Each appends the value of a row for which there is room.
    template <class Value>
    void put(size_t row, Value value) {
        if (nullable) {
            fill(row);
            validity_.push<uint8_t>(1);
        }
        values_.push(value);
    }
    void put_items(size_t row, const void *items, size_t bytes) {
        if (nullable) fill(row);  // with the end of the previous items
        items_.add(items, bytes);
        put(row, static_cast<int64_t>(items_.size() / item_size_));
    }
    void put_object(PyObject *object) { objects_.push_back(Ref::shared(object)); }

    // Writes the nulls that were only counted so far: in most columns all rows or none are null.
    void fill(size_t stop) {
        if (type == kObject || values_.size() >= value_size_ * stop) return;
        const size_t start = values_.size() / value_size_;
        validity_.add_zeros(stop - start);  // only nullable columns can lag behind
        if (type == kFloat64)
            for (size_t row = start; row < stop; ++row) values_.push(std::nan(""));
        else if (is_varied())
            for (size_t row = start; row < stop; ++row) values_.push(static_cast<int64_t>(items_.size() / item_size_));
        else
            values_.add_zeros(value_size_ * (stop - start));
    }

    // Appends copies of some rows of another column of this kind. Both are filled.
    void reserve_copy(const Column &from, size_t start, size_t stop) {
        if (is_varied()) reserve_items(item_size() * static_cast<size_t>(from.begin_of(stop) - from.begin_of(start)));
    }
    void copy(const Column &from, size_t start, size_t stop) {
        if (type == kObject) {
            objects_.insert(objects_.end(), from.objects_.begin() + start, from.objects_.begin() + stop);
            return;
        }
        if (nullable) validity_.add(from.validity_.data() + start, stop - start);
        if (!is_varied()) {
            values_.add(from.values_.data() + value_size_ * start, value_size_ * (stop - start));
            return;
        }
        const int64_t begin = from.begin_of(start), shift = static_cast<int64_t>(items_.size() / item_size_) - begin;
        items_.add(from.items_.data() + item_size() * begin, item_size() * (from.begin_of(stop) - begin));
        for (size_t row = start; row < stop; ++row) values_.push(from.begin_of(row + 1) + shift);
    }

    // Where the string or list of a row begins, which is where the one before it ends.
    int64_t begin_of(size_t row) const { return row ? values_.as<int64_t>()[row - 1] : 0; }
    bool is_there(size_t row) const { return !nullable || validity_.as<uint8_t>()[row]; }
    const char *values() const { return values_.data(); }
    const char *items() const { return items_.data(); }
    const uint8_t *there() const { return nullable ? validity_.as<uint8_t>() : nullptr; }
    const Ref &object(size_t row) const { return objects_[row]; }

    void expect_as_many_as(const Column &taken) { last_size_ = taken.items_.size(); }
    size_t nbytes() const { return values_.room() + items_.room() + validity_.room(); }

private:
    Buffer values_;  // of strings and lists: where each ends, counted in items, as int64
    Buffer validity_;   // whether each is not null; only where there may be nulls
    Buffer items_;   // the bytes of strings, the elements of lists
    std::vector<Ref> objects_;
    size_t item_size_, value_size_;
    size_t last_size_ = 0;  // bytes of items when the rows were last taken: about as many are likely to come again
};

// ---- reading a row of Python objects -------------------------------------------------------------------------------

// The value of a cell, read before anything is written: reading it may run code that appends a row of its own.
struct Cell {
    bool is_null = false;
    int64_t integer = 0;
    uint64_t natural = 0;
    double real = 0;
    const char *text = nullptr;
    Py_ssize_t size = 0;
    std::vector<int64_t> list;
    PyObject *object = nullptr;
    Ref owned;  // keeps the text alive

    size_t item_bytes() const { return text ? static_cast<size_t>(size) : 8 * list.size(); }
};

int64_t read_integer(PyObject *object) {
    return PyLong_Check(object) ? integer(object) : integer(Ref::made(PyNumber_Index(object)));
}

void read_text(PyObject *object, Cell &cell) {
    cell.text = PyUnicode_AsUTF8AndSize(object, &cell.size);
    if (cell.text) return;
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw PythonError();
    PyErr_Clear();  // file names may hold what UTF-8 cannot
    cell.owned = Ref::made(PyUnicode_AsEncodedString(object, "utf-8", "backslashreplace"));
    cell.text = PyBytes_AsString(cell.owned);
    cell.size = PyBytes_Size(cell.owned);
}

void read_list(PyObject *object, Cell &cell) {
    if (!PyTuple_Check(object)) raise(PyExc_TypeError, "%R is not a tuple.", object);
    for (Py_ssize_t i = 0; i < PyTuple_Size(object); ++i) cell.list.push_back(read_integer(PyTuple_GetItem(object, i)));
}

void read_value(Type type, PyObject *object, Cell &cell) {
    switch (type) {
        case kInt64:
            cell.integer = read_integer(object);
            break;
        case kInt32:
            cell.integer = read_integer(object);
            if (cell.integer != static_cast<int32_t>(cell.integer))
                raise(PyExc_OverflowError, "%lld does not fit into 32 bits.", static_cast<long long>(cell.integer));
            break;
        case kUInt64:
            cell.natural = PyLong_AsUnsignedLongLong(object);
            if (cell.natural == UINT64_MAX && PyErr_Occurred()) throw PythonError();
            break;
        case kFloat64:
            cell.real = PyFloat_AsDouble(object);
            if (cell.real == -1.0 && PyErr_Occurred()) throw PythonError();
            break;
        case kBool:
            cell.integer = is_true(object);
            break;
        case kString:
            read_text(object, cell);
            break;
        case kList:
            read_list(object, cell);
            break;
        case kObject:
            cell.object = object;
            break;
    }
}

void read_cell(const Column &column, size_t item, PyObject *object, Cell &cell) {
    cell.is_null = object == Py_None && column.type != kObject;
    if (!cell.is_null) read_value(column.type, object, cell);
    else if (!column.nullable) raise(PyExc_TypeError, "Item %zu of a row is None, in a column without nulls.", item);
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// An item of a row: one column, or a tuple of several. In place of a tuple there may be a ticket, for the first of them.
struct Item {
    size_t first, columns;
    bool is_tuple;
};

class Rows {
public:
    std::vector<Item> items;
    std::vector<Column> columns;
    size_t count = 0;
    bool open = true;

    // Makes room for more rows, though not for the items of their strings and lists.
    void reserve(size_t more) {
        if (count + more <= room_) return;
        const size_t room = std::max<size_t>({2 * (count + more), last_count_, 64});
        for (Column &column : columns) {
            column.fill(count);
            column.reserve(room - count, room);
        }
        room_ = room;
    }

    void append(PyObject *const *given, size_t size);
    void append(const CallRow &row);
    void append(const TensorRow &row);

    // An empty container with the same columns.
    Rows like() const {
        Rows other;
        other.items = items;
        for (const Column &column : columns) other.columns.emplace_back(column.type, column.nullable);
        return other;
    }

    void copy(Rows &from, size_t start, size_t stop) {
        if (start == stop) return;
        reserve(stop - start);
        for (size_t i = 0; i < columns.size(); ++i) {
            columns[i].fill(count);
            from.columns[i].fill(from.count);
            columns[i].reserve_copy(from.columns[i], start, stop);
        }
        for (size_t i = 0; i < columns.size(); ++i) columns[i].copy(from.columns[i], start, stop);
        count += stop - start;
    }

    // Moves the first rows out.
    Rows take(size_t most) {
        Rows taken = like();
        if (most == count) {
            swap(taken);
            last_count_ = taken.count;
            for (size_t i = 0; i < columns.size(); ++i) columns[i].expect_as_many_as(taken.columns[i]);
            return taken;
        }
        Rows rest = like();
        taken.copy(*this, 0, most);
        rest.copy(*this, most, count);
        swap(rest);
        return taken;
    }

    size_t nbytes() const {
        size_t bytes = sizeof *this;
        for (const Column &column : columns) bytes += column.nbytes();
        return bytes;
    }

private:
    void read_tuple(const Item &item, size_t number, PyObject *object, Cell *cells) const;
    void swap(Rows &other) {
        columns.swap(other.columns);
        std::swap(count, other.count);
        std::swap(room_, other.room_);
    }

    size_t room_ = 0;
    size_t last_count_ = 0;  // rows when they were last taken: about as many are likely to come again
};

// A tuple, of which each item is a cell; or a ticket, for the first column; or None.
void Rows::read_tuple(const Item &item, size_t number, PyObject *object, Cell *cells) const {
    const bool is_tuple = PyTuple_Check(object);
    for (size_t i = 0; i < item.columns; ++i) cells[i].is_null = true;
    if (PyLong_CheckExact(object)) return read_cell(columns[item.first], number, object, cells[0]);
    if (!is_tuple && object != Py_None)
        raise(PyExc_TypeError, "Item %zu of a row is %R: no tuple, no ticket and not None.", number, object);
    for (size_t i = 1; is_tuple && i < item.columns; ++i) {
        PyObject *one = PyTuple_GetItem(object, static_cast<Py_ssize_t>(i) - 1);
        if (!one) throw PythonError();
        read_cell(columns[item.first + i], number, one, cells[i]);
    }
}

void Rows::append(PyObject *const *given, size_t size) {
    if (size != items.size()) raise(PyExc_IndexError, "A row has %zu items, not %zu.", items.size(), size);
    std::vector<Cell> cells(columns.size());
    for (size_t i = 0; i < size; ++i) {
        const Item &item = items[i];
        if (item.is_tuple) read_tuple(item, i, given[i], &cells[item.first]);
        else read_cell(columns[item.first], i, given[i], cells[item.first]);
    }
    reserve(1);
    for (size_t i = 0; i < columns.size(); ++i)
        if (columns[i].is_varied()) columns[i].reserve_items(cells[i].item_bytes());
    for (size_t i = 0; i < columns.size(); ++i) {  // no Python code is run from here on
        const Cell &cell = cells[i];
        Column &column = columns[i];
        if (cell.is_null) continue;
        switch (column.type) {
            case kInt64: column.put(count, cell.integer); break;
            case kInt32: column.put(count, static_cast<int32_t>(cell.integer)); break;
            case kUInt64: column.put(count, cell.natural); break;
            case kFloat64: column.put(count, cell.real); break;
            case kBool: column.put(count, static_cast<uint8_t>(cell.integer)); break;
            case kString: column.put_items(count, cell.text, cell.item_bytes()); break;
            case kList: column.put_items(count, cell.list.data(), cell.item_bytes()); break;
            case kObject: column.put_object(cell.object); break;
        }
    }
    ++count;
}

// ---- rows of plain values ------------------------------------------------------------------------------------------

const char kCallColumns[] = "llisssisLLSb", kTensorColumns[] = "lsssaasbLDDDDDDLLLLLDUOSSL";

// The types of columns as letters, to be compared with those that rows of plain values go into. Capitals may be null.
std::string signature_of(const Rows &rows) {
    std::string letters;
    for (const Column &column : rows.columns) {
        const char letter = "liudbsao"[column.type];
        letters.push_back(column.nullable ? static_cast<char>(std::toupper(letter)) : letter);
    }
    return letters;
}

// Appends the cells of one row, column after column, after reserving room for its texts and lists.
class Cells {
public:
    Cells(Rows &rows) : at_(rows.columns.data()), row_(rows.count) { rows.reserve(1); }

    template <class Value>
    Cells &operator<<(Value value) {
        (at_++)->put(row_, value);
        return *this;
    }
    Cells &operator<<(const Text &text) {
        if (text.data) at_->put_items(row_, text.data, static_cast<size_t>(text.size));
        ++at_;
        return *this;
    }
    Cells &operator<<(PyObject *object) {
        (at_++)->put_object(object);
        return *this;
    }
    Cells &list(const int64_t *items, int64_t size) {
        (at_++)->put_items(row_, items, 8 * static_cast<size_t>(size));
        return *this;
    }
    template <class Value>
    Cells &put_if(bool there, Value value) {
        if (there) at_->put(row_, value);
        ++at_;
        return *this;
    }
    Cells &number(int64_t value) { return put_if(value >= 0, value); }
    Cells &skip(size_t columns) {
        at_ += columns;
        return *this;
    }

private:
    Column *at_;
    size_t row_;
};

void reserve_text(Column &column, const Text &text) {
    if (text.data) column.reserve_items(static_cast<size_t>(text.size));
}

void Rows::append(const CallRow &row) {
    const std::pair<int, const Text *> texts[] = {{3, &row.kind}, {4, &row.site}, {5, &row.type}, {7, &row.phase}, {10, &row.args}};
    for (const auto &[column, text] : texts) reserve_text(columns[column], *text);
    Cells cells(*this);
    cells << row.seq << row.step << row.micro << row.kind << row.site << row.type << row.call << row.phase;
    cells.number(row.parent).number(row.stack) << row.args << static_cast<uint8_t>(row.recompute);
    ++count;
}

void Rows::append(const TensorRow &row) {
    const std::pair<int, const Text *> texts[] = {{1, &row.role},   {2, &row.path},       {3, &row.dtype},
                                                  {6, &row.device}, {23, &row.placement}, {24, &row.note}};
    for (const auto &[column, text] : texts) reserve_text(columns[column], *text);
    for (const int column : {4, 5}) columns[column].reserve_items(8 * static_cast<size_t>(row.dims));
    Cells cells(*this);
    cells << row.seq << row.role << row.path << row.dtype;
    cells.list(row.shape, row.dims).list(row.stride, row.dims) << row.device << static_cast<uint8_t>(row.requires_grad);
    cells.number(row.ticket);
    const Measurement *measured = row.measured;
    if (measured && row.has_statistics) {
        for (const double moment : measured->moments) cells.put_if(!std::isnan(moment), moment);
        for (const int64_t number : measured->counts) cells << number;
        cells.number(measured->first_bad).put_if(measured->first_bad >= 0, measured->first_bad_value);
    } else {
        cells.skip(12);
    }
    cells.put_if(measured != nullptr, measured ? measured->fingerprint : 0) << row.values << row.placement << row.note;
    cells.number(row.value);
    ++count;
}

// ---- the Python type -----------------------------------------------------------------------------------------------

struct RowsObject {
    PyObject_HEAD
    Rows rows;
    bool are_calls, are_tensors;
};

PyTypeObject *rows_type;

RowsObject *object_of(PyObject *self) { return reinterpret_cast<RowsObject *>(self); }
Rows &of(PyObject *self) { return object_of(self)->rows; }

Ref make_object(Rows rows) {
    Ref made = Ref::made(PyType_GenericAlloc(rows_type, 0));
    RowsObject *self = object_of(made);
    new (&self->rows) Rows(std::move(rows));
    const std::string signature = signature_of(self->rows);
    self->are_calls = signature == kCallColumns;
    self->are_tensors = signature == kTensorColumns;
    return made;
}

void add_column(Rows &rows, const char *name, bool nullable) {
    size_t type = 0;
    while (type < std::size(kTypes) && std::strcmp(kTypes[type].name, name)) ++type;
    if (type == std::size(kTypes)) raise(PyExc_ValueError, "There is no column type %s.", name);
    if (rows.columns.size() == kMostColumns) raise(PyExc_ValueError, "Rows have at most %zu columns.", kMostColumns);
    rows.columns.emplace_back(static_cast<Type>(type), nullable);
}

void add_pair(Rows &rows, PyObject *pair) {
    const char *name;
    int nullable;
    if (!PyArg_ParseTuple(pair, "sp", &name, &nullable)) throw PythonError();
    add_column(rows, name, nullable);
}

// Rows(cells): each item of a row is a pair of a type and whether it may be None, or a list of such pairs
PyObject *rows_new(PyTypeObject *, PyObject *args, PyObject *) {
    return to_python([&] {
        PyObject *cells;
        if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &cells)) throw PythonError();
        Rows rows;
        for (Py_ssize_t i = 0; i < PyTuple_Size(cells); ++i) {
            PyObject *given = PyTuple_GetItem(cells, i);
            const bool is_tuple = PyList_Check(given);
            const size_t first = rows.columns.size();
            if (is_tuple) add_column(rows, "int64", true);  // for tickets
            else add_pair(rows, given);
            for (Py_ssize_t j = 0; is_tuple && j < PyList_Size(given); ++j) add_pair(rows, PyList_GetItem(given, j));
            rows.items.push_back({first, rows.columns.size() - first, is_tuple});
        }
        return make_object(std::move(rows));
    });
}

void rows_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    of(self).~Rows();
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Ref::made(reinterpret_cast<PyObject *>(type));  // the reference that it held
}

PyObject *rows_append(PyObject *self, PyObject *row) {
    return to_python([&] {
        if (!PyTuple_Check(row)) raise(PyExc_TypeError, "%R is not a tuple.", row);
        std::vector<PyObject *> cells;
        for (Py_ssize_t i = 0; i < PyTuple_Size(row); ++i) cells.push_back(PyTuple_GetItem(row, i));
        if (of(self).open) of(self).append(cells.data(), cells.size());
        return none();
    });
}

void check_range(const Rows &rows, Py_ssize_t start, Py_ssize_t stop) {
    if (0 <= start && start <= stop && stop <= static_cast<Py_ssize_t>(rows.count)) return;
    raise(PyExc_IndexError, "Rows %zd to %zd are not among %zu.", start, stop, rows.count);
}

Column &column_of(Rows &rows, Py_ssize_t number) {
    if (number < 0 || number >= static_cast<Py_ssize_t>(rows.columns.size())) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "There is no column %zd.", number);
        throw PythonError();
    }
    rows.columns[number].fill(rows.count);
    return rows.columns[number];
}

// take(count=None): moves the first rows out
PyObject *rows_take(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *given = Py_None;
        if (!PyArg_ParseTuple(args, "|O", &given)) throw PythonError();
        const int64_t count = given == Py_None ? static_cast<int64_t>(of(self).count) : integer(given);
        check_range(of(self), 0, count);
        return make_object(of(self).take(static_cast<size_t>(count)));
    });
}

// extend(other): appends copies of other rows of this kind
PyObject *rows_extend(PyObject *self, PyObject *other) {
    return to_python([&] {
        if (Py_TYPE(other) != rows_type || self == other || of(other).columns.size() != of(self).columns.size())
            raise(PyExc_TypeError, "%R are not rows of this kind, or they are these rows.", other);
        of(self).copy(of(other), 0, of(other).count);
        return none();
    });
}

// ---- Arrow buffers -------------------------------------------------------------------------------------------------

Ref bytes_of(const void *data, size_t size) {
    return Ref::made(PyBytes_FromStringAndSize(static_cast<const char *>(data), static_cast<Py_ssize_t>(size)));
}

Ref packed(const uint8_t *flags, size_t count) {
    std::vector<uint8_t> bits((count + 7) / 8);
    for (size_t i = 0; i < count; ++i) bits[i / 8] |= static_cast<uint8_t>(flags[i] << (i % 8));
    return bytes_of(bits.data(), bits.size());
}

// encode(column, start, stop, limit) -> (nulls, buffers), or None when it needs offsets above the limit
PyObject *rows_encode(PyObject *self, PyObject *args) {
    return to_python([&] {
        Py_ssize_t number, start, stop, limit;
        if (!PyArg_ParseTuple(args, "nnnn", &number, &start, &stop, &limit)) throw PythonError();
        const Column &column = column_of(of(self), number);
        check_range(of(self), start, stop);
        if (column.type == kObject) raise(PyExc_TypeError, "Column %zd is of objects.", number);
        const size_t count = static_cast<size_t>(stop - start), size = column.item_size();
        const uint8_t *there = column.there() ? column.there() + start : nullptr;
        const Py_ssize_t nulls = there ? std::count(there, there + count, 0) : 0;
        const Ref bitmap = nulls ? packed(there, count) : bytes_of("", 0);  // empty when every bit is set
        if (!column.is_varied()) {
            const char *values = column.values() + size * start;
            const Ref data = column.type == kBool ? packed(reinterpret_cast<const uint8_t *>(values), count)
                                                  : bytes_of(values, size * count);
            return Ref::made(Py_BuildValue("n(OO)", nulls, bitmap.get(), data.get()));
        }
        const int64_t begin = column.begin_of(start), items = column.begin_of(stop) - begin;
        if (items > limit) return none();
        std::vector<int32_t> ends;
        for (Py_ssize_t row = start; row <= stop; ++row) ends.push_back(static_cast<int32_t>(column.begin_of(row) - begin));
        const Ref offsets = bytes_of(ends.data(), 4 * ends.size());
        const Ref data = bytes_of(column.items() + size * begin, size * static_cast<size_t>(items));
        if (column.type == kString)
            return Ref::made(Py_BuildValue("n(OOO)", nulls, bitmap.get(), offsets.get(), data.get()));
        // The items of a list have their own bitmap, and no nulls.
        return Ref::made(Py_BuildValue("n(OOy#O)", nulls, bitmap.get(), offsets.get(), "", Py_ssize_t(0), data.get()));
    });
}

// tickets(column) -> (the rows that have one, the tickets), each as bytes of int64
PyObject *rows_tickets(PyObject *self, PyObject *given) {
    return to_python([&] {
        const Column &column = column_of(of(self), PyLong_AsSsize_t(given));
        if (column.type != kInt64 || !column.nullable) raise(PyExc_TypeError, "Column %S is not one of tickets.", given);
        std::vector<int64_t> places, tickets;
        for (size_t row = 0; row < of(self).count; ++row) {
            if (!column.is_there(row)) continue;
            places.push_back(static_cast<int64_t>(row));
            tickets.push_back(reinterpret_cast<const int64_t *>(column.values())[row]);
        }
        const Ref first = bytes_of(places.data(), 8 * places.size()), second = bytes_of(tickets.data(), 8 * tickets.size());
        return Ref::made(PyTuple_Pack(2, first.get(), second.get()));
    });
}

// cells(column) -> the objects or texts themselves
PyObject *rows_cells(PyObject *self, PyObject *given) {
    return to_python([&] {
        const Column &column = column_of(of(self), PyLong_AsSsize_t(given));
        if (column.type != kObject && column.type != kString)
            raise(PyExc_TypeError, "Column %S is neither of objects nor of texts.", given);
        Ref found = Ref::made(PyList_New(static_cast<Py_ssize_t>(of(self).count)));
        for (size_t row = 0; row < of(self).count; ++row) {
            Ref cell = none();
            if (column.type == kObject) {
                cell = column.object(row);
            } else if (column.is_there(row)) {
                const int64_t begin = column.begin_of(row), size = column.begin_of(row + 1) - begin;
                cell = Ref::made(PyUnicode_DecodeUTF8(column.items() + begin, static_cast<Py_ssize_t>(size), nullptr));
            }
            PyList_SetItem(found, static_cast<Py_ssize_t>(row), cell.release());
        }
        return found;
    });
}

Py_ssize_t rows_length(PyObject *self) { return static_cast<Py_ssize_t>(of(self).count); }
PyObject *get_open(PyObject *self, void *) { return PyBool_FromLong(of(self).open); }
PyObject *get_nbytes(PyObject *self, void *) { return PyLong_FromSize_t(of(self).nbytes()); }

int set_open(PyObject *self, PyObject *value, void *) {
    const int open = value ? PyObject_IsTrue(value) : -1;
    if (open >= 0) of(self).open = open;
    return open < 0 ? -1 : 0;
}

PyMethodDef methods[] = {
    {"append", rows_append, METH_O, nullptr},   {"take", rows_take, METH_VARARGS, nullptr},
    {"extend", rows_extend, METH_O, nullptr},   {"encode", rows_encode, METH_VARARGS, nullptr},
    {"tickets", rows_tickets, METH_O, nullptr}, {"cells", rows_cells, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef attributes[] = {
    {"open", get_open, set_open, nullptr, nullptr},
    {"nbytes", get_nbytes, nullptr, "The bytes of memory that the rows take, without the objects among them.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// ---- for native callers --------------------------------------------------------------------------------------------

template <class Row>
Py_ssize_t append_plain(PyObject *object, const Row *row) {
    try {
        if (!of(object).open) return 0;
        of(object).append(*row);
        return rows_length(object);
    } catch (...) {
        set_error();
        return -1;
    }
}

int are_calls(PyObject *object) { return Py_TYPE(object) == rows_type && object_of(object)->are_calls; }
int are_tensors(PyObject *object) { return Py_TYPE(object) == rows_type && object_of(object)->are_tensors; }

Appending appending = {are_calls, are_tensors, append_plain<CallRow>, append_plain<TensorRow>};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "astray.store.run_format._columns", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr,
};

Ref make_module() {
    static PyType_Slot slots[] = {
        {Py_tp_methods, methods},
        {Py_tp_getset, attributes},
        {Py_sq_length, reinterpret_cast<void *>(rows_length)},
        {Py_tp_new, reinterpret_cast<void *>(rows_new)},
        {Py_tp_dealloc, reinterpret_cast<void *>(rows_dealloc)},
        {0, nullptr},
    };
    static PyType_Spec spec = {"astray.store.run_format._columns.Rows", sizeof(RowsObject), 0, Py_TPFLAGS_DEFAULT, slots};
    Ref module = Ref::made(PyModule_Create(&definition));
    const Ref type = Ref::made(PyType_FromSpec(&spec));
    rows_type = reinterpret_cast<PyTypeObject *>(Ref(type).release());  // for good
    check(PyModule_AddObjectRef(module, "Rows", type));
    check(PyModule_AddObjectRef(module, "appending", Ref::made(PyCapsule_New(&appending, APPENDING, nullptr))));
    return module;
}

}  // namespace
}  // namespace astray

PyMODINIT_FUNC PyInit__columns() { return astray::to_python(astray::make_module); }
