// astray.capture.pytorch._torch: the part of astray that is compiled against torch's C++ headers, built by build.py on
// first use.
//
// A single translation unit, since torch's headers take most of the compile time.

#define ASTRAY_MODULE "astray.capture.pytorch._torch"

#include "finalizer.h"
#include "modules.h"
#include "objects.h"
#include "observer_arguments.h"
#include "parameter_hooks.h"

namespace astray {
namespace {

PyObject *make_edges(PyTypeObject *, PyObject *args, PyObject *) {
    return to_python([&] {
        PyObject *inputs;
        if (!PyArg_ParseTuple(args, "O", &inputs)) throw PythonError();
        return Box<InputEdges>::make(named_tensors(inputs));
    });
}

PyObject *make_live(PyTypeObject *, PyObject *, PyObject *) {
    return to_python([] { return Box<LiveGradients>::make(); });
}

// watch(engine, call, edges, outputs)
PyObject *watch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return to_python([&] {
        if (count != 4 || !Object<Calls>::is(args[0]) || !Object<OpenCall>::is(args[1]) ||
            Py_TYPE(args[2]) != Box<InputEdges>::type)
            raise(PyExc_TypeError, "`watch` takes an engine, a call, InputEdges and the outputs.");
        Box<LiveGradients>::in(self).watch(args[0], args[1], Box<InputEdges>::in(args[2]), named_tensors(args[3]));
        return none();
    });
}

template <void (LiveGradients::*method)()>
PyObject *on_live(PyObject *self, PyObject *) {
    return to_python([&] {
        (Box<LiveGradients>::in(self).*method)();
        return none();
    });
}

PyMethodDef live_methods[] = {
    {"watch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(watch)), METH_FASTCALL, nullptr},
    {"finish", on_live<&LiveGradients::finish>, METH_NOARGS, nullptr},
    {"remove", on_live<&LiveGradients::remove>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

using OnLeaf = TensorHook<LeafHook, LeafHook::run>;
using OnArrival = TensorHook<ArrivingHook, ArrivingHook::run>;
using OnAccumulation = TensorHook<AccumulatedHook, AccumulatedHook::run>;

PyMethodDef leaf_methods[] = {OnLeaf::method, {nullptr, nullptr, 0, nullptr}};
PyMethodDef arriving_methods[] = {OnArrival::method, {nullptr, nullptr, 0, nullptr}};
PyMethodDef accumulated_methods[] = {
    OnAccumulation::method,
    {"writes", AccumulatedHook::writes, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef leaf_attributes[] = {
    {"arrives", LeafHook::get_arrives, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// set_callbacks(add_up, run_uncompiled, put_on_leaf, flags, callback): functions in Python, and the flags that say
// whether a compiler is active
PyObject *set_callbacks(PyObject *, PyObject *args) {
    return to_python([&] {
        PyObject *add_up, *run_uncompiled, *put_on_leaf, *flags, *callback;
        if (!PyArg_ParseTuple(args, "OOOOO", &add_up, &run_uncompiled, &put_on_leaf, &flags,
                              &callback)) throw PythonError();
        *callbacks = {Ref::shared(add_up), Ref::shared(run_uncompiled), Ref::shared(put_on_leaf)};
        compilers->flags = PyDict_Check(flags) && callback != Py_None ? Ref::shared(flags) : Ref();
        compilers->callback = Ref::shared(callback);
        return none();
    });
}

// set_torch_types(op, overriding): the type of plain operators, and a function that says whether a tensor class has a
// `__torch_function__`
PyObject *set_torch_types(PyObject *, PyObject *args) {
    return to_python([&] {
        PyObject *op, *overriding;
        if (!PyArg_ParseTuple(args, "OO", &op, &overriding)) throw PythonError();
        *torch_types = {Ref::shared(op), Ref::shared(overriding)};
        return none();
    });
}

// living(): the number of calls whose gradients are still pending, or are in a graph that has outlived its recording
PyObject *living(PyObject *, PyObject *) { return PyLong_FromLong(PendingGradients::live_count); }

PyMethodDef functions[] = {
    {"set_callbacks", set_callbacks, METH_VARARGS, nullptr},
    {"set_torch_types", set_torch_types, METH_VARARGS, nullptr},
    {"set_python_call", set_python_call, METH_VARARGS, nullptr},
    {"living", living, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, ASTRAY_MODULE, nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr,
};

Ref make_module() {
    names = new Names;
    callbacks = new PythonCallbacks;
    compilers = new Compilers;
    torch_types = new TorchTypes;
    Ref module = Ref::made(PyModule_Create(&definition));
    Box<InputEdges>::add_to(module, ASTRAY_MODULE ".InputEdges", {slot(Py_tp_new, make_edges)});
    Box<LiveGradients>::add_to(module, ASTRAY_MODULE ".LiveGradients",
                               {slot(Py_tp_new, make_live), slot(Py_tp_methods, live_methods)});
    Box<LeafHook>::add_to(module, ASTRAY_MODULE ".LeafHook",
                          {slot(Py_tp_call, OnLeaf::call), slot(Py_tp_methods, leaf_methods),
                           slot(Py_tp_getset, leaf_attributes)});
    Box<AccumulatedHook>::add_to(module, ASTRAY_MODULE ".AccumulatedHook",
                                 {slot(Py_tp_new, AccumulatedHook::make), slot(Py_tp_call, OnAccumulation::call),
                                  slot(Py_tp_methods, accumulated_methods)});
    Box<ArrivingHook>::add_to(module, ASTRAY_MODULE ".ArrivingHook",
                              {slot(Py_tp_new, ArrivingHook::make), slot(Py_tp_call, OnArrival::call),
                               slot(Py_tp_methods, arriving_methods)});
    for (const auto add : {add_torch_observer, add_sites, add_stacks, add_structures, add_objects, add_origins,
                           add_calls, add_functions,
                           add_modules, add_finalizer})
        add(module);
    return module;
}

}  // namespace
}  // namespace astray

PyMODINIT_FUNC PyInit__torch() { return astray::to_python(astray::make_module); }
