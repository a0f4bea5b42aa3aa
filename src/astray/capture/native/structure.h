// Flattens the arguments of a call when their structure is cached; `Flattener` in capture/structure.py does the rest.
//
// Values of other types, and new structures, are left to Python.

#pragma once

#include "python.h"

namespace astray {

// A tensor, and its path among the arguments or results.
struct NamedTensor {
    Ref path, tensor;
};
using NamedTensors = std::vector<NamedTensor>;

// Reads a Python list of (path, tensor).
inline NamedTensors named_tensors(PyObject *given) {
    NamedTensors found;
    const Ref pairs = Ref::made(PySequence_Fast(given, "Tensors come as a list of (path, tensor)."));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(pairs.get()); ++i) {
        PyObject *pair = PySequence_Fast_GET_ITEM(pairs.get(), i);
        if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2)
            raise(PyExc_TypeError, "Tensors come as a list of (path, tensor).");
        found.push_back({Ref::shared(PyTuple_GetItem(pair, 0)), Ref::shared(PyTuple_GetItem(pair, 1))});
    }
    return found;
}

inline Ref to_object(const NamedTensors &tensors) {
    Ref list = Ref::made(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
    for (size_t i = 0; i < tensors.size(); ++i)
        PyList_SetItem(list, static_cast<Py_ssize_t>(i),
                       Ref::made(PyTuple_Pack(2, tensors[i].path.get(), tensors[i].tensor.get())).release());
    return list;
}

struct Arguments {
    NamedTensors tensors;
    Ref skeleton;  // the structure with every value that is not a tensor, as text
};

class Structures {
public:
    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&is_tensor_, &flatten_arguments_, &flatten_result_, &known_}) visit(*one);
    }

    // `kwargs` may be nullptr.
    Arguments arguments(PyObject *args, PyObject *kwargs) {
        if (kwargs && PyDict_Check(kwargs) && !PyDict_Size(kwargs)) kwargs = nullptr;
        Reading reading;
        reading.key.reserve(16), reading.tensors.reserve(8);  // most calls have fewer
        if (!read_call(args, kwargs, reading)) return flatten(args, kwargs);
        const Ref key = Ref::made(PyTuple_New(static_cast<Py_ssize_t>(reading.key.size())));
        for (size_t i = 0; i < reading.key.size(); ++i)
            PyTuple_SetItem(key, static_cast<Py_ssize_t>(i), reading.key[i].release());
        Ref entry = Ref::shared(PyDict_GetItemWithError(known_, key));
        if (!entry) {
            if (PyErr_Occurred()) throw PythonError();
            Arguments walked = flatten(args, kwargs);
            // Nested too deep, or numbers that count as tensors.
            if (walked.tensors.size() != reading.tensors.size()) return walked;
            entry = remember(key, walked);
        }
        PyObject *paths = PyTuple_GetItem(entry, 0);
        Arguments found;
        found.tensors.reserve(reading.tensors.size());
        for (size_t i = 0; i < reading.tensors.size(); ++i)
            found.tensors.push_back({Ref::shared(PyTuple_GetItem(paths, static_cast<Py_ssize_t>(i))),
                                     std::move(reading.tensors[i])});
        found.skeleton = Ref::shared(PyTuple_GetItem(entry, 1));
        return found;
    }

    NamedTensors result(PyObject *value) {
        static const Ref *out = new Ref(interned("out"));
        if (has_tensor_type(value)) return {{*out, Ref::shared(value)}};
        if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
            NamedTensors found;
            // Another thread may change a list.
            if (read_results(Ref::made(PySequence_Tuple(value)), found)) return found;
        }
        return named_tensors(call(flatten_result_, value));
    }

    static int init(PyObject *self, PyObject *args, PyObject *) {
        return to_status([&] {
            PyObject *tensors, *values, *is_tensor, *flatten, *flatten_result;
            if (!PyArg_ParseTuple(args, "O!O!OOO:Structures", &PyFrozenSet_Type, &tensors, &PyFrozenSet_Type, &values,
                                  &is_tensor, &flatten, &flatten_result))
                throw PythonError();
            Structures &own = Object<Structures>::in(self);
            own.tensors_ = types_of(tensors), own.values_ = types_of(values);
            own.is_tensor_ = Ref::shared(is_tensor), own.flatten_arguments_ = Ref::shared(flatten);
            own.flatten_result_ = Ref::shared(flatten_result);
            own.known_ = Ref::made(PyDict_New());
            own.tensor_mark_ = Ref::made(PyObject_CallNoArgs(reinterpret_cast<PyObject *>(&PyBaseObject_Type)));
        });
    }

    static PyObject *py_arguments(PyObject *self, PyObject *args) {
        return to_python([&] {
            PyObject *given, *kwargs;
            if (!PyArg_ParseTuple(args, "OO:arguments", &given, &kwargs)) throw PythonError();
            const Arguments found = Object<Structures>::in(self).arguments(given, kwargs);
            return Ref::made(PyTuple_Pack(2, to_object(found.tensors).get(), found.skeleton.get()));
        });
    }

    static PyObject *py_result(PyObject *self, PyObject *value) {
        return to_python([&] { return to_object(Object<Structures>::in(self).result(value)); });
    }

private:
    static constexpr Py_ssize_t kLongestList = 64, kMany = 10000;  // structures that are cached
    static constexpr size_t kLongestKey = 256;

    // A key under construction, and the tensors met on the way.
    struct Reading {
        std::vector<Ref> key, tensors;
    };

    static std::vector<Ref> types_of(PyObject *set) {
        std::vector<Ref> found;
        const Ref iterator = Ref::made(PyObject_GetIter(set));
        while (Ref type = Ref::owned(PyIter_Next(iterator))) found.push_back(std::move(type));
        if (PyErr_Occurred()) throw PythonError();
        return found;
    }
    static bool is_one_of(const std::vector<Ref> &types, PyObject *value) {
        for (const Ref &type : types)
            if (type.get() == reinterpret_cast<PyObject *>(Py_TYPE(value))) return true;
        return false;
    }
    bool has_tensor_type(PyObject *value) const { return is_one_of(tensors_, value); }

    // Returns false for a value that needs Python. The key has the type of every value, since 1 and True are equal.
    bool read_value(PyObject *value, Reading &reading) {
        const Ref type = Ref::shared(reinterpret_cast<PyObject *>(Py_TYPE(value)));
        if (!has_tensor_type(value)) {
            if (is_one_of(values_, value)) {
                reading.key.push_back(type);
                reading.key.push_back(Ref::shared(value));
                return true;
            }
            if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
                const Ref items = Ref::made(PySequence_Tuple(value));  // another thread may change a list
                const Py_ssize_t size = PyTuple_Size(items);
                if (size > kLongestList || reading.key.size() >= kLongestKey) return false;
                reading.key.push_back(type);
                reading.key.push_back(to_object(static_cast<int64_t>(size)));
                for (Py_ssize_t i = 0; i < size; ++i)
                    if (!read_value(PyTuple_GetItem(items, i), reading)) return false;
                return true;
            }
            if (!is_true(call(is_tensor_, value))) return false;
        }
        reading.key.push_back(tensor_mark_);
        reading.tensors.push_back(Ref::shared(value));
        return true;
    }

    bool read_call(PyObject *args, PyObject *kwargs, Reading &reading) {
        if (!PyTuple_Check(args) || (kwargs && !PyDict_Check(kwargs))) return false;
        reading.key.push_back(to_object(static_cast<int64_t>(PyTuple_Size(args))));
        PyObject *name, *value;
        for (Py_ssize_t at = 0; kwargs && PyDict_Next(kwargs, &at, &name,
                                                      nullptr);) reading.key.push_back(Ref::shared(name));
        for (Py_ssize_t i = 0; i < PyTuple_Size(args); ++i)
            if (!read_value(PyTuple_GetItem(args, i), reading)) return false;
        for (Py_ssize_t at = 0; kwargs && PyDict_Next(kwargs, &at, nullptr, &value);)
            if (!read_value(value, reading)) return false;
        return true;
    }

    // Flattens a call in Python.
    Arguments flatten(PyObject *args, PyObject *kwargs) {
        const Ref given = kwargs ? Ref::shared(kwargs) : Ref::made(PyDict_New());
        const Ref found = call(flatten_arguments_, args, given.get());
        if (!PyTuple_Check(found.get()) || PyTuple_Size(found) != 2)
            raise(PyExc_TypeError, "The arguments of a call were not taken apart into tensors and a skeleton.");
        return {named_tensors(PyTuple_GetItem(found, 0)), Ref::shared(PyTuple_GetItem(found, 1))};
    }

    // ((path, …), skeleton), as it is kept in `known_`.
    Ref remember(PyObject *key, const Arguments &walked) {
        const Ref paths = Ref::made(PyTuple_New(static_cast<Py_ssize_t>(walked.tensors.size())));
        for (size_t i = 0; i < walked.tensors.size(); ++i)
            PyTuple_SetItem(paths, static_cast<Py_ssize_t>(i), Ref(walked.tensors[i].path).release());
        Ref entry = Ref::made(PyTuple_Pack(2, paths.get(), walked.skeleton.get()));
        if (PyDict_Size(known_) > kMany) PyDict_Clear(known_);  // a program with a number that differs in every call
        check(PyDict_SetItem(known_, key, entry));
        return entry;
    }

    // The tensors among several results; returns false when they need Python.
    bool read_results(const Ref &items, NamedTensors &found) const {
        static std::vector<Ref> *paths = new std::vector<Ref>();
        const Py_ssize_t size = PyTuple_Size(items);
        if (size > kLongestList || tensors_.empty()) return false;
        for (Py_ssize_t i = static_cast<Py_ssize_t>(paths->size()); i < size; ++i)
            paths->push_back(Ref::made(PyUnicode_FromFormat("out.%zd", i)));
        for (Py_ssize_t i = 0; i < size; ++i) {
            PyObject *item = PyTuple_GetItem(items, i);
            if (item == Py_None) continue;
            if (!has_tensor_type(item)) return false;
            found.push_back({(*paths)[static_cast<size_t>(i)], Ref::shared(item)});
        }
        return true;
    }

    std::vector<Ref> tensors_, values_;  // types whose values are always tensors, or plain
    Ref is_tensor_, flatten_arguments_, flatten_result_, known_, tensor_mark_;
};

inline void add_structures(PyObject *module) {
    static PyMethodDef methods[] = {
        {"arguments", Structures::py_arguments, METH_VARARGS, nullptr},
        {"result", Structures::py_result, METH_O, nullptr},
        {},
    };
    Object<Structures>::add_to(module, ASTRAY_MODULE ".Structures",
                               {slot(Py_tp_init, Structures::init), slot(Py_tp_methods, methods)});
}

}  // namespace astray
