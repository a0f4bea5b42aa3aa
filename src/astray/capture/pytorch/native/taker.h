// `Taker` as Python sees it: see _torch.pyi, and `TorchReader.taker` for what it is given.

#pragma once

#include "tensors.h"

namespace astray {
namespace taker {

// Not a `Box`: the garbage collector looks into it, since the twin and the writer may lead back here.
struct TakerObject {
    PyObject_HEAD
    Taker taker;
};

inline Taker &of(PyObject *self) { return reinterpret_cast<TakerObject *>(self)->taker; }

inline void expect(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are expected.", given, expected);
    throw PythonError();
}

inline const c10::Storage &storage_of(PyObject *owner) {
    if (!THPStorage_Check(owner)) raise(PyExc_TypeError, "The owner of a memory is a storage.");
    return THPStorage_Unpack(owner);
}

// True when the tensor is bad, else None.
inline Ref answer(bool bad) { return Ref::shared(bad ? Py_True : Py_None); }

inline PyObject *py_observe(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return to_python([&] {
        expect(count, 4);
        return answer(of(self).observe(Row{integer(args[0]), role_of(args[1]), args[2]}, args[3]));
    });
}

inline PyObject *py_observe_unread(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return to_python([&] {
        expect(count, 4);
        return answer(of(self).observe_unread(Row{integer(args[0]), role_of(args[1]), args[2]}, args[3]));
    });
}

inline PyObject *py_observe_inputs(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return to_python([&] {
        expect(count, 3);
        of(self).observe_inputs(integer(args[0]), args[1], args[2]);
        return answer(false);
    });
}

inline PyObject *py_changed(PyObject *self, PyObject *tensor) {
    return to_python([&] {
        of(self).note_change(of(self).twin_changed, tensor, false, false);
        return answer(false);
    });
}

inline PyObject *py_written(PyObject *self, PyObject *tensor) {
    return to_python([&] {
        Taker &taker = of(self);
        taker.note_change(taker.twin_written, tensor, PyDict_Size(taker.unfilled.get()) != 0, taker.ops);
        return answer(false);
    });
}

inline PyObject *py_forget(PyObject *self, PyObject *owner) {
    return to_python([&] {
        of(self).memories.forget(storage_of(owner));
        return answer(false);
    });
}

inline PyObject *py_value_of(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *owner;
        long long version;
        if (!PyArg_ParseTuple(args, "OL", &owner, &version)) throw PythonError();
        Memories &memories = of(self).memories;
        return Ref::made(PyLong_FromLongLong(memories.value(memories.of(storage_of(owner)), version)));
    });
}

inline PyObject *py_ahead(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *owner;
        long long version;
        if (!PyArg_ParseTuple(args, "OL", &owner, &version)) throw PythonError();
        of(self).memories.written_ahead(storage_of(owner), version);
        return answer(false);
    });
}

inline PyObject *py_clear(PyObject *self, PyObject *) {
    return to_python([&] {
        Taker &taker = of(self);
        taker.regulars.expire();
        taker.handed = false;
        taker.memories.expire();
        return answer(false);
    });
}

inline PyObject *py_renumber(PyObject *self, PyObject *unused) {
    of(self).memories.clear();
    return py_clear(self, unused);
}

inline PyObject *py_next_step(PyObject *self, PyObject *unused) {
    of(self).regulars.due = true;
    return py_renumber(self, unused);
}

inline PyObject *py_counted(PyObject *self, PyObject *) { return PyLong_FromLongLong(std::exchange(of(self).rows, 0)); }

inline PyObject *py_apply(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *roles;
        int on, statistics, values, ops;
        if (!PyArg_ParseTuple(args, "pOppp", &on, &roles, &statistics, &values, &ops)) throw PythonError();
        if (!PyFrozenSet_Check(roles)) raise(PyExc_TypeError, "The roles are a frozenset.");
        Taker &taker = of(self);
        taker.roles = 0;
        for (size_t i = 0; i < kRoleNames.size(); ++i)
            if (check(PySet_Contains(roles, word().roles[i]))) taker.roles |= bit_of(static_cast<Role>(i));
        taker.on = on, taker.statistics = statistics, taker.values = values, taker.ops = ops;
        taker.memories.expire();
        return answer(false);
    });
}

inline PyObject *py_catch(PyObject *self, PyObject *on) {
    return to_python([&] {
        of(self).catching = is_true(Ref::shared(on));
        return answer(false);
    });
}

inline PyObject *get_launches(PyObject *self, void *) { return PyBool_FromLong(of(self).launching != nullptr); }

inline PyObject *make(PyTypeObject *type, PyObject *args, PyObject *) {
    return to_python([&] {
        PyObject *examples, *measuring, *given[16];
        Py_ssize_t batch;
        if (!PyArg_ParseTuple(args, "O!OO!O!OOOOO!OOnOOOOO:Taker", &PyList_Type, &examples, &given[0], &PyDict_Type,
                              &given[1], &PyDict_Type, &given[2], &given[3], &given[4], &measuring, &given[5],
                              &PyDict_Type, &given[6], &given[7], &given[8], &batch, &given[9], &given[10], &given[11],
                              &given[12], &given[13]))
            throw PythonError();
        Ref self = Ref::made(type->tp_alloc(type, 0));
        new (&of(self.get())) Taker();
        Taker &taker = of(self.get());
        Ref *members[] = {&taker.parameter_type, &taker.devices,      &taker.rings,        &taker.stream,
                          &taker.together,       &taker.identity,     &taker.unfilled,     &taker.writer,
                          &taker.lane,           &taker.twin_observe, &taker.twin_observe_unread,
                          &taker.twin_written,   &taker.twin_changed, &taker.first};
        for (size_t i = 0; i < std::size(members); ++i) *members[i] = Ref::shared(given[i]);
        taker.batch = batch;
        taker.appending = find_appending();
        if (taker.appending && !taker.appending->are_tensors(taker.lane)) taker.appending = nullptr;
        taker.launching = find_launching();
        if (measuring != Py_None) {
            taker.measuring = static_cast<const Measuring *>(PyCapsule_GetPointer(measuring, MEASURING));
            if (!taker.measuring) throw PythonError();
        }
        for (Py_ssize_t i = 0; i < PyList_Size(examples); ++i) {
            PyObject *tensor, *name;
            if (!PyArg_ParseTuple(PyList_GetItem(examples, i), "OU", &tensor, &name)) throw PythonError();
            if (!THPVariable_CheckExact(tensor)) raise(PyExc_TypeError, "The examples are not all plain tensors.");
            if (!i) taker.tensor_type = Ref::shared(reinterpret_cast<PyObject *>(Py_TYPE(tensor)));
            Dtype &type = taker.types[static_cast<size_t>(THPVariable_Unpack(tensor).scalar_type())];
            type.name = Ref::shared(name);
            type.text = text_of(type.name);
            if (taker.measuring) type.number = taker.measuring->dtype(type.text.data);
        }
        return self;
    });
}

// What the garbage collector should know of, since the twin and the writer may lead back here.
inline int traverse(PyObject *self, visitproc visit, void *arg) {
    Taker &taker = of(self);
    Py_VISIT(Py_TYPE(self));
    for (const Ref *one : {&taker.twin_observe, &taker.twin_observe_unread, &taker.twin_written, &taker.twin_changed,
                           &taker.first, &taker.together, &taker.writer, &taker.rings})
        Py_VISIT(one->get());
    return 0;
}

inline int break_cycles(PyObject *self) {
    Taker &taker = of(self);
    for (Ref *one : {&taker.twin_observe, &taker.twin_observe_unread, &taker.twin_written, &taker.twin_changed,
                     &taker.first, &taker.together, &taker.writer, &taker.rings})
        Ref(std::move(*one));
    return 0;
}

inline void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    of(self).~Taker();
    type->tp_free(self);
    Py_DECREF(type);
}

inline PyCFunction fast(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace taker

// Makes the type, and adds it to the module.
inline void add_taker(PyObject *module) {
    using namespace taker;
    static PyMethodDef methods[] = {
        {"observe", fast(py_observe), METH_FASTCALL, nullptr},
        {"observe_unread", fast(py_observe_unread), METH_FASTCALL, nullptr},
        {"observe_inputs", fast(py_observe_inputs), METH_FASTCALL, nullptr},
        {"changed", py_changed, METH_O, nullptr},
        {"written", py_written, METH_O, nullptr},
        {"forget", py_forget, METH_O, nullptr},
        {"of", py_value_of, METH_VARARGS, nullptr},
        {"ahead", py_ahead, METH_VARARGS, nullptr},
        {"clear", py_clear, METH_NOARGS, nullptr},
        {"renumber", py_renumber, METH_NOARGS, nullptr},
        {"next_step", py_next_step, METH_NOARGS, nullptr},
        {"counted", py_counted, METH_NOARGS, nullptr},
        {"apply", py_apply, METH_VARARGS, nullptr},
        {"catch", py_catch, METH_O, nullptr},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyGetSetDef attributes[] = {
        {"launches", get_launches, nullptr, "Whether kernels of a card are launched from here.", nullptr},
        {nullptr, nullptr, nullptr, nullptr, nullptr},
    };
    static PyType_Slot slots[] = {
        {Py_tp_methods, methods},
        {Py_tp_getset, attributes},
        {Py_tp_new, reinterpret_cast<void *>(make)},
        {Py_tp_traverse, reinterpret_cast<void *>(traverse)},
        {Py_tp_clear, reinterpret_cast<void *>(break_cycles)},
        {Py_tp_dealloc, reinterpret_cast<void *>(dealloc)},
        {0, nullptr},
    };
    static PyType_Spec spec = {
        "astray.capture.pytorch._torch.Taker", sizeof(TakerObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
    };
    const Ref type = Ref::made(PyType_FromSpec(&spec));
    check(PyModule_AddObjectRef(module, "Taker", type.get()));
}

}  // namespace astray
