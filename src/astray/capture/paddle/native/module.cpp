// astray.capture.paddle._paddle: the part of astray that is compiled against Paddle's C++ headers, built by build.py on
// first use.

#define ASTRAY_MODULE "astray.capture.paddle._paddle"

#include "live_gradients.h"
#include "objects.h"
#include "observer_arguments.h"
#include "parameter_hooks.h"

namespace astray {
namespace {

PyObject *make_live(PyTypeObject *, PyObject *args, PyObject *) {
    return to_python([&] {
        PyObject *engine;
        if (!PyArg_ParseTuple(args, "O!", Object<Calls>::type, &engine)) throw PythonError();
        Ref live = Box<LiveGradients>::make();
        Box<LiveGradients>::in(live).use(engine);
        return live;
    });
}

// edges(inputs): the inputs of a call that starts
PyObject *edges(PyObject *self, PyObject *inputs) {
    return to_python([&] { return Box<InputEdges>::make(named_tensors(inputs), Box<LiveGradients>::in(self).ages); });
}

// watch(call, edges, outputs)
PyObject *watch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return to_python([&] {
        expect(count, 3);
        if (!Object<OpenCall>::is(args[0]) || Py_TYPE(args[1]) != Box<InputEdges>::type)
            raise(PyExc_TypeError, "`watch` takes a call, InputEdges and the outputs.");
        LiveGradients &live = Box<LiveGradients>::in(self);
        if (!live.engine()) return none();  // the recording has stopped
        live.watch(live.engine(), args[0], Box<InputEdges>::in(args[1]), named_tensors(args[2]));
        return none();
    });
}

PyObject *finish(PyObject *self, PyObject *) {
    return to_python([&] {
        Box<LiveGradients>::in(self).finish();
        return none();
    });
}

// remove(): releases the engine too
PyObject *remove(PyObject *self, PyObject *) {
    return to_python([&] {
        Box<LiveGradients>::in(self).remove();
        return none();
    });
}

PyMethodDef live_methods[] = {
    {"edges", edges, METH_O, nullptr},
    {"watch", fast(watch), METH_FASTCALL, nullptr},
    {"finish", finish, METH_NOARGS, nullptr},
    {"remove", remove, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// set_handle_type(type): the class of the objects by which Python knows allocations
PyObject *set_handle_type(PyObject *, PyObject *type) {
    allocation_handles->make_handle = Ref::shared(type);
    return none().release();
}

PyObject *py_in_backward(PyObject *, PyObject *) { return PyBool_FromLong(in_backward()); }

// living(): the number of calls whose gradients are still pending, or are in a graph that has outlived its recording
PyObject *living(PyObject *, PyObject *) { return PyLong_FromLong(PendingGradients::live_count); }

PyMethodDef functions[] = {
    {"set_handle_type", set_handle_type, METH_O, nullptr},
    {"owner", bindings::py_owner, METH_O, nullptr},
    {"capacity", bindings::py_capacity, METH_O, nullptr},
    {"address", bindings::py_address, METH_O, nullptr},
    {"is_zero", bindings::py_is_zero, METH_O, nullptr},
    {"put_on_parameter", put_on_parameter, METH_VARARGS, nullptr},
    {"after_backward", after_backward, METH_O, nullptr},
    {"in_backward", py_in_backward, METH_NOARGS, nullptr},
    {"living", living, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, ASTRAY_MODULE, nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr,
};

Ref make_module() {
    allocation_handles = new AllocationHandles;
    Ref module = Ref::made(PyModule_Create(&definition));
    Box<InputEdges>::add_to(module, ASTRAY_MODULE ".InputEdges", {});
    Box<LiveGradients>::add_to(module, ASTRAY_MODULE ".LiveGradients",
                               {slot(Py_tp_new, make_live), slot(Py_tp_methods, live_methods)});
    for (const auto add : {add_paddle_observer, add_sites, add_stacks, add_structures, add_objects, add_calls,
                           add_finalizer})
        add(module);
    return module;
}

}  // namespace
}  // namespace astray

PyMODINIT_FUNC PyInit__paddle() { return astray::to_python(astray::make_module); }
