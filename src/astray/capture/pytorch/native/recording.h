// How gradients reach the recording: the engine in Python is asked and told, out of sight of the program's modes.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "compilers.h"
#include "python.h"

namespace astray {

struct Names {
    Ref added = interned("added"), backward = interned("backward"),
        event = interned("event"), failed = interned("failed"), grad = interned("grad"), gradient = interned("gradient"),
        input = interned("input"), is_here = interned("is_here"), listening = interned("listening"),
        missed = interned("missed"), name = interned("name"), observe = interned("observe"),
        output = interned("output"), paused = interned("paused"), remove = interned("remove"), site = interned("site"),
        tensors = interned("tensors");
};
inline Names *names;

// What is done in Python: given once by `use`.
struct Helpers {
    Ref add_up;       // the sum of two gradients of which one is no plain tensor
    Ref apart;        // runs a function where a compiler is about, unless it is tracing
    Ref put_on_leaf;  // puts a hook on a tensor that no graph takes along
};
inline Helpers *helpers;

inline bool flag(PyObject *engine, PyObject *name) { return is_true(attribute(engine, name)); }

// What is done meanwhile is no part of the program: neither modes nor tensor classes are told of it.
class OutOfSight {
    using Functions = at::impl::PythonTorchFunctionTLS;

public:
    OutOfSight() : before_(Functions::get_disabled_state()) {
        Functions::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    }
    ~OutOfSight() { Functions::set_disabled_state(before_); }
    OutOfSight(const OutOfSight &) = delete;

private:
    at::impl::TorchFunctionDisabledState before_;
};

inline void observe(PyObject *engine, PyObject *seq, PyObject *role, PyObject *path, PyObject *gradient) {
    const OutOfSight out_of_sight;
    call_method(attribute(engine, names->tensors), names->observe, seq, role, path, gradient);
}

inline Ref about(const char *format, PyObject *site) {
    return Ref::made(PyUnicode_FromFormat(format, attribute(site, names->name).get()));
}

// Tells the engine of the exception that is being handled. What has to reach the program after all, such as an
// interrupt, is thrown on; so is what the engine raises, which knows the exceptions of the program's signal handlers.
inline void report(PyObject *engine, PyObject *site, const char *format) {
    set_error();
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    const Ref kind = Ref::made(type), error = Ref::made(value), traceback = trace ? Ref::made(trace) : Ref();
    if (traceback) PyException_SetTraceback(error, traceback);
    call_method(engine, names->failed, about(format, site).get(), error.get());
}

// Runs what a hook does, on whatever thread of the backward pass it was called.
template <class Work>
void run_hook(Work work) {
    const WithPython with_python;
    try {
        if (compilers->are_away()) {
            work();
        } else {
            std::function<void()> action(work);
            call(helpers->apart, function_of(action).get());
        }
    } catch (const PythonError &) {
        python_error error;  // as torch knows it: it is raised where the program has started the backward pass
        error.persist();
        throw error;
    }
}

}  // namespace astray
