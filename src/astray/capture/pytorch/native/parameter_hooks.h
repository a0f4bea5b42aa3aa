// The hooks on a parameter: on arriving gradients, and after they have accumulated. torch calls these as Python
// objects.

#pragma once

#include "calls.h"
#include "recording.h"
#include "tensor_observer.h"

namespace astray {

// Records the gradient of a parameter each time something was added to it.
struct AccumulatedHook {
    Ref engine, site;
    std::optional<int64_t> seq{};  // of the current event
    bool arrived = false;
    const at::TensorImpl *gradient = nullptr;  // the last one, only compared and never dereferenced
    int64_t version = -1;                      // its version, or −1 where there is none

    static PyObject *make(PyTypeObject *, PyObject *args, PyObject *) {
        return to_python([&] {
            PyObject *engine, *site;
            if (!PyArg_ParseTuple(args, "O!O!", Object<Calls>::type, &engine, Object<Site>::type,
                                  &site)) throw PythonError();
            return Box<AccumulatedHook>::make(AccumulatedHook{Ref::shared(engine), Ref::shared(site)});
        });
    }

    static Ref run(AccumulatedHook &self, PyObject *parameter) {
        const bool arrived = std::exchange(self.arrived, false);
        const at::Tensor gradient = grad_of(parameter);
        // Compiled code calls hooks of parameters without gradients too.
        if (!gradient.defined() && !arrived) return none();
        // Even after an error the next gradient belongs to another event.
        const auto before = std::exchange(self.seq, {});
        if (!gradient.defined()) {
            const Ref why = Ref::made(PyUnicode_FromString("another hook took it away first"));
            const Ref what = Ref::made(PyUnicode_FromFormat("the gradient of %U",
                                                            Object<Site>::in(self.site).name.get()));
            call_method(self.engine, names->missed, what.get(), why.get());
        } else {
            self.record(before, names->grad, gradient);
            self.gradient = gradient.unsafeGetTensorImpl();
            self.version = version_of(gradient);
        }
        return none();
    }

    // Records a gradient of the event `number`, or of a new one if there is none; returns its number.
    std::optional<int64_t> record(std::optional<int64_t> number, PyObject *path, const at::Tensor &seen) {
        const Ref to = engine, of = site;
        Calls &calls = Calls::of(to);
        if (!calls.listening || !calls.in_own_process) return number;
        const auto observe = [&] {
            if (!number) number = calls.event(of, Phase::backward);
            const TorchFunctionOff torch_function_off;
            observe_value(calls.tensors, {*number, Role::gradient, path}, seen);
        };
        calls.attempt(observe, "the gradient of ", Object<Site>::in(of).name);
        return number;
    }

    // The accumulated gradient of a parameter, as the program sees it, without running modes.
    static at::Tensor grad_of(PyObject *parameter) { return THPVariable_Unpack(parameter).grad(); }

    // How often a gradient was written to since it was recorded; −1 when it is another tensor, or not known.
    static PyObject *writes(PyObject *self, PyObject *given) {
        return to_python([&] {
            const auto &seen = Box<AccumulatedHook>::in(self);
            const bool known = THPVariable_Check(given) && seen.version >= 0 &&
                               THPVariable_Unpack(given).unsafeGetTensorImpl() == seen.gradient;
            return to_object(known ? version_of(THPVariable_Unpack(given)) - seen.version : -1);
        });
    }

private:
    static int64_t version_of(const at::Tensor &tensor) {
        at::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        return impl->is_inference() ? -1 : impl->version_counter().current_version();
    }
};

// Records a gradient just before it is added to the existing one.
struct ArrivingHook {
    Ref accumulated;
    Ref parameter;  // a weak reference

    static PyObject *make(PyTypeObject *, PyObject *args, PyObject *) {
        return to_python([&] {
            PyObject *accumulated, *parameter;
            if (!PyArg_ParseTuple(args, "O!O", Box<AccumulatedHook>::type, &accumulated,
                                  &parameter)) throw PythonError();
            return Box<ArrivingHook>::make(ArrivingHook{Ref::shared(accumulated), Ref::shared(parameter)});
        });
    }

    static Ref run(ArrivingHook &self, PyObject *gradient) {
        const Ref alive = self.accumulated;
        AccumulatedHook &accumulated = Box<AccumulatedHook>::in(alive);
        accumulated.arrived = gradient != Py_None;
        accumulated.seq.reset();  // left over from a pass that a signal handler's exception has ended
        const Ref parameter = call(self.parameter);
        if (gradient != Py_None && parameter.get() != Py_None && AccumulatedHook::grad_of(parameter).defined())
            accumulated.seq = accumulated.record({}, names->added, THPVariable_Unpack(gradient));
        return none();
    }
};

}  // namespace astray
