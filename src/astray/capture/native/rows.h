// The rows of tensors: which call, role and path each belongs to, and what was measured for it.

#pragma once

#include "python.h"

#include <array>
#include <cmath>

#include "../../store/run_format/_columns.h"

namespace astray {

// What was measured of a memory; see `CachedMeasurement` in measurement_cache.py.
struct CachedMeasurement {
    int64_t ticket = -1;  // for what is measured later
    bool is_measured = false, has_statistics = false;
    Measurement measured{};
    Ref values, placement, note;  // empty where there is none

    static CachedMeasurement of_ticket(int64_t ticket) {
        CachedMeasurement cached;
        cached.ticket = ticket;
        return cached;
    }
    static CachedMeasurement of_python(PyObject *measurement);
    Ref statistics() const;
    bool is_nonfinite() const {
        return has_statistics && (measured.counts[kNanCount] || measured.counts[kInfCount]);
    }
};

enum class Role : uint8_t { input, output, parameter, gradient, state };

// The call, role and path of a tensor.
struct Row {
    int64_t seq;
    Role role;
    PyObject *path;
};

constexpr std::array<const char *, 5> kRoleNames = {"input", "output", "parameter", "gradient", "state"};

inline const std::array<Ref, 5> &role_names() {
    static const auto *names = new std::array<Ref, 5>{interned(kRoleNames[0]), interned(kRoleNames[1]),
                                                      interned(kRoleNames[2]), interned(kRoleNames[3]),
                                                      interned(kRoleNames[4])};  // for as long as the program runs
    return *names;
}

inline PyObject *name_of(Role role) { return role_names()[static_cast<size_t>(role)]; }
inline uint8_t bit_of(Role role) { return static_cast<uint8_t>(1 << static_cast<int>(role)); }

inline Role role_of(PyObject *name) {
    for (size_t i = 0; i < kRoleNames.size(); ++i)
        if (role_names()[i].get() == name) return static_cast<Role>(i);
    for (size_t i = 0; PyUnicode_Check(name) && i < kRoleNames.size(); ++i)
        if (PyUnicode_CompareWithASCIIString(name, kRoleNames[i]) == 0) return static_cast<Role>(i);
    raise(PyExc_ValueError, "%R is not a role.", name);
}

// The UTF-8 text of a str. `owned` keeps the bytes alive if they had to be made.
inline Text text_of(PyObject *object, Ref &owned) {
    Py_ssize_t size;
    const char *data = PyUnicode_AsUTF8AndSize(object, &size);
    if (!data) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw PythonError();
        PyErr_Clear();  // names may hold what UTF-8 cannot
        owned = Ref::made(PyUnicode_AsEncodedString(object, "utf-8", "backslashreplace"));
        data = PyBytes_AsString(owned);
        size = PyBytes_Size(owned);
    }
    return {data, size};
}

inline Text text_of(const Ref &object) {  // for a str that is kept alive, and encodes to UTF-8
    Ref unused;
    return object ? text_of(object, unused) : Text{};
}

constexpr Py_ssize_t kStatistics = 12;  // fields

// From the five fields of a `CachedMeasurement`.
inline CachedMeasurement CachedMeasurement::of_python(PyObject *measurement) {
    if (!PyTuple_Check(measurement) || PyTuple_Size(measurement) != 5) raise(PyExc_TypeError,
        "A measurement has five fields.");
    PyObject *fields = PyTuple_GetItem(measurement, 0), *fingerprint = PyTuple_GetItem(measurement, 1);
    CachedMeasurement cached;
    if (PyLong_Check(fields)) cached.ticket = integer(fields);
    if (PyTuple_Check(fields)) {
        cached.has_statistics = true;
        if (PyTuple_Size(fields) != kStatistics) raise(PyExc_TypeError, "Statistics have twelve fields.");
        for (int i = 0; i < 6; ++i) {
            PyObject *moment = PyTuple_GetItem(fields, i);
            cached.measured.moments[i] = moment == Py_None ? NAN : PyFloat_AsDouble(moment);
        }
        for (int i = 0; i < 4; ++i) cached.measured.counts[i] = integer(PyTuple_GetItem(fields, 6 + i));
        PyObject *first_bad = PyTuple_GetItem(fields, 10);
        cached.measured.first_bad = first_bad == Py_None ? -1 : integer(first_bad);
        if (first_bad != Py_None) cached.measured.first_bad_value = PyFloat_AsDouble(PyTuple_GetItem(fields, 11));
    }
    if (fingerprint != Py_None) {
        cached.is_measured = true;
        cached.measured.fingerprint = PyLong_AsUnsignedLongLong(fingerprint);
    }
    if (PyErr_Occurred()) throw PythonError();
    Ref *others[] = {&cached.values, &cached.placement, &cached.note};
    for (int i = 0; i < 3; ++i) {
        PyObject *other = PyTuple_GetItem(measurement, 2 + i);
        if (other != Py_None) *others[i] = Ref::shared(other);
    }
    return cached;
}

// The statistics in a row that is passed to the writer as a tuple: a tuple, a ticket or None.
inline Ref CachedMeasurement::statistics() const {
    if (!has_statistics) return ticket < 0 ? none() : Ref::made(PyLong_FromLongLong(ticket));
    Ref tuple = Ref::made(PyTuple_New(kStatistics));
    Py_ssize_t next = 0;
    const auto add = [&](Ref field) { PyTuple_SetItem(tuple, next++, field.release()); };
    for (const double moment : measured.moments)
        add(std::isnan(moment) ? none() : Ref::made(PyFloat_FromDouble(moment)));
    for (const int64_t number : measured.counts) add(Ref::made(PyLong_FromLongLong(number)));
    const bool bad = measured.first_bad >= 0;
    add(bad ? Ref::made(PyLong_FromLongLong(measured.first_bad)) : none());
    add(bad ? Ref::made(PyFloat_FromDouble(measured.first_bad_value)) : none());
    return tuple;
}

}  // namespace astray
