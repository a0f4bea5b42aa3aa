// Finds the tensors in the attributes of an object; `ObjectWalk` in capture/structure.py says which and why.
//
// No code of the object runs: attributes are read from its `__dict__` and its slots by the descriptors that Python
// itself made for them, past every property and `__getattr__`, and containers by Python's own functions.

#pragma once

#include "structure.h"

#include "seen_tensors.h"  // of the framework

#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace astray {

// The descriptors of slots and of `__dict__`, for each class seen so far.
class Descriptors {
public:
    struct Named {
        Ref name, descriptor;  // without a name: the descriptor of `__dict__`
    };

    // In method resolution order. A shared copy, so that the table may change while it is used.
    std::shared_ptr<const std::vector<Named>> of(PyTypeObject *type) {
        const auto known = known_.find(type);
        if (known != known_.end()) return known->second.own;
        auto own = std::make_shared<const std::vector<Named>>(read(type));
        if (known_.size() >= kMany) known_.clear();  // a program that makes classes
        known_.emplace(type, Known{Ref::shared(reinterpret_cast<PyObject *>(type)), own});
        return own;
    }

private:
    static constexpr size_t kMany = 1000;

    struct Known {
        Ref type;  // kept alive, so that its address is not reused
        std::shared_ptr<const std::vector<Named>> own;
    };

    static std::vector<Named> read(PyTypeObject *type) {
        std::vector<Named> found;
        const Ref bases = Ref::shared(type->tp_mro);
        for (Py_ssize_t i = 0; bases && i < PyTuple_Size(bases); ++i) {
            auto *base = reinterpret_cast<PyTypeObject *>(PyTuple_GetItem(bases, i));
            const Ref own = Ref::made(PyDict_Copy(dict_of(base)));
            PyObject *name, *descriptor;
            for (Py_ssize_t at = 0; PyDict_Next(own, &at, &name, &descriptor);) {
                const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
                if (!text) {
                    PyErr_Clear();
                    continue;
                }
                if (Py_TYPE(descriptor) == &PyMemberDescr_Type && std::strncmp(text, "__", 2) != 0)
                    found.push_back({Ref::shared(name), Ref::shared(descriptor)});
                else if (Py_TYPE(descriptor) == &PyGetSetDescr_Type && !std::strcmp(text, "__dict__"))
                    found.push_back({Ref(), Ref::shared(descriptor)});
            }
        }
        return found;
    }

    static Ref dict_of(PyTypeObject *type) {
#if PY_VERSION_HEX >= 0x030C0000
        return Ref::made(PyType_GetDict(type));
#else
        return Ref::shared(type->tp_dict);
#endif
    }

    std::unordered_map<PyTypeObject *, Known> known_;
};

class ObjectWalk {
public:
    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&is_tensor_, &epoch_, &now_}) visit(*one);
    }

    static int init(PyObject *self, PyObject *args, PyObject *) {
        return to_status([&] {
            PyObject *is_tensor, *epoch;
            ObjectWalk &own = Object<ObjectWalk>::in(self);
            if (!PyArg_ParseTuple(args, "OOnnn:ObjectWalk", &is_tensor, &epoch, &own.deepest_, &own.most_tensors_,
                                  &own.most_items_))
                throw PythonError();
            read_object(is_tensor, own.is_tensor_), read_object(epoch, own.epoch_);
        });
    }

    static PyObject *py_tensors(PyObject *self, PyObject *args) {
        return to_python([&] {
            PyObject *value, *path;
            if (!PyArg_ParseTuple(args, "OU:tensors", &value, &path)) throw PythonError();
            bool cut_short = false;
            const NamedTensors found = Object<ObjectWalk>::in(self).tensors(value, path, cut_short);
            return Ref::made(PyTuple_Pack(2, to_object(found).get(), to_object(cut_short).get()));
        });
    }

private:
    using Items = std::vector<std::pair<Ref, Ref>>;

    // One walk through an object.
    struct Search {
        std::unordered_set<PyObject *> met;
        std::vector<PyObject *> names;  // the attributes and items on the path from the root, kept alive by the walk
        Py_ssize_t items = 0, tensors = 0;
        NamedTensors found;
        bool cut_short = false;
    };

    NamedTensors tensors(PyObject *value, PyObject *path, bool &cut_short) {
        Search search;
        if (is_searched(value)) {
            begin();
            search.names.push_back(path);
            look_into(value, search);
        }
        cut_short = search.cut_short;
        return std::move(search.found);
    }

    // An object that is met twice, as in a cycle, counts once.
    void look_into(PyObject *value, Search &search) {
        if (!search.met.insert(value).second) return;
        for (const auto &[name, item] : items_of(value)) {
            if (is_plain(item)) continue;
            if (++search.items > most_items_ || search.tensors >= most_tensors_) {
                search.cut_short = search.cut_short || search.tensors;
                return;
            }
            search.names.push_back(name);
            if (is_tensor(item)) {
                if (search.met.insert(item).second) {
                    ++search.tensors;
                    if (is_new(item)) search.found.push_back({path_of(search.names), item});
                }
            } else if (static_cast<Py_ssize_t>(search.names.size()) - 2 < deepest_ && is_searched(item)) {
                look_into(item, search);
            }
            search.names.pop_back();
        }
    }

    static Ref path_of(const std::vector<PyObject *> &names) {
        Ref path = Ref::shared(names[0]);
        for (size_t i = 1; i < names.size(); ++i) path = Ref::made(PyUnicode_FromFormat("%U.%S", path.get(), names[i]));
        return path;
    }

    static bool is_plain(PyObject *value) {
        PyTypeObject *type = Py_TYPE(value);
        for (PyTypeObject *plain : {&PyUnicode_Type, &PyLong_Type, &PyBool_Type, &PyFloat_Type, &PyBytes_Type,
                                    &PyByteArray_Type, &PyRange_Type, &PySlice_Type})
            if (type == plain) return true;
        return value == Py_None;
    }

    // Classes, functions, modules and other callables are not searched.
    static bool is_searched(PyObject *value) {
        return !PyCallable_Check(value) && !PyModule_Check(value) && !is_plain(value);
    }

    bool is_tensor(PyObject *value) const {
        return is_tensor_ ? is_true(call(is_tensor_, value)) : SeenTensors::is_tensor(value);
    }

    // A copy of the items: what is done with them may change the object.
    Items items_of(PyObject *value) {
        Items found;
        if (PyDict_Check(value)) {
            read_dict(value, true, found);
        } else if (PyList_Check(value) || PyTuple_Check(value)) {
            const Ref held = PyList_Check(value) ? Ref::made(PyList_AsTuple(value)) : Ref::shared(value);
            for (Py_ssize_t i = 0; i < PyTuple_Size(held); ++i)
                found.emplace_back(to_object(static_cast<int64_t>(i)), Ref::shared(PyTuple_GetItem(held, i)));
        }
        if (!PyDict_CheckExact(value) && !PyList_CheckExact(value) && !PyTuple_CheckExact(value))
            read_attributes(value, found);
        return found;
    }

    static void read_dict(PyObject *dict, bool with_numbers, Items &found) {
        PyObject *key, *item;
        for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &item);)
            if (PyUnicode_CheckExact(key) || (with_numbers && PyLong_CheckExact(key)))
                found.emplace_back(Ref::shared(key), Ref::shared(item));
    }

    void read_attributes(PyObject *value, Items &found) {
        auto *type = reinterpret_cast<PyObject *>(Py_TYPE(value));
        const auto descriptors = descriptors_.of(Py_TYPE(value));
        for (const auto &[name, descriptor] : *descriptors) {
            const Ref held = Ref::owned(Py_TYPE(descriptor.get())->tp_descr_get(descriptor, value, type));
            if (!held) {  // the attribute is not set
                if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw PythonError();
                PyErr_Clear();
            } else if (name) {
                found.emplace_back(name, held);
            } else if (PyDict_Check(held.get())) {
                read_dict(held, false, found);
            }
        }
    }

    // ---- what has been returned already ----------------------------------------------------------------------------

    void begin() {
        if (!epoch_) return;
        Ref now = call(epoch_);
        if (!now_ || !check(PyObject_RichCompareBool(now, now_, Py_EQ))) returned_.clear();
        now_ = std::move(now);
        returned_.drop_dead();
    }

    bool is_new(PyObject *value) { return !epoch_ || returned_.add(value); }

    Ref is_tensor_, epoch_, now_;
    Py_ssize_t deepest_ = 0, most_tensors_ = 0, most_items_ = 0;
    Descriptors descriptors_;
    SeenTensors returned_;
};

inline void add_objects(PyObject *module) {
    static PyMethodDef methods[] = {{"tensors", ObjectWalk::py_tensors, METH_VARARGS, nullptr}, {}};
    Object<ObjectWalk>::add_to(module, ASTRAY_MODULE ".ObjectWalk",
                            {slot(Py_tp_init, ObjectWalk::init), slot(Py_tp_methods, methods)});
}

}  // namespace astray
