// The hook on a parameter: it sees a gradient before that is added to the one there is, and calls for the sum when the
// backward pass is over.

#pragma once

#include "node_hooks.h"

namespace astray {

// What records the gradients of one parameter: Python's `WatchedParameter`, which is called with the gradient.
class ParameterHook : public egr::TensorHook {
public:
    explicit ParameterHook(PyObject *arrived) : arrived_(Ref::shared(arrived)) {}
    ~ParameterHook() override {
        if (!Py_IsInitialized()) return;
        const HeldGil gil;
        const Ref gone = std::move(arrived_);
    }

    paddle::Tensor operator()(const paddle::Tensor &gradient) override {
        run_hook([&] { call(Ref(arrived_), is_defined(gradient) ? object_of(gradient).get() : Py_None); });
        return gradient;
    }

private:
    Ref arrived_;
};

// put_on_parameter(parameter, arrived): calls `arrived` with each gradient that arrives; returns the hook's number, for
// `_remove_grad_hook`. None when the parameter takes no gradients.
inline PyObject *put_on_parameter(PyObject *, PyObject *args) {
    return to_python([&] {
        PyObject *parameter, *arrived;
        if (!PyArg_ParseTuple(args, "OO", &parameter, &arrived)) throw PythonError();
        if (!is_tensor(parameter)) raise(PyExc_TypeError, "A parameter is a tensor.");
        const NodePtr node = egr::EagerUtils::GetGradAccumulationNode(tensor_in(parameter));
        if (!node) return none();
        return to_object(node->RegisterGradientHook(0, 0, std::make_shared<ParameterHook>(arrived)));
    });
}

// after_backward(work): calls a function when the running backward pass is over, or the next one
inline PyObject *after_backward(PyObject *, PyObject *work) {
    return to_python([&] {
        struct Held {
            Ref work;
            ~Held() {
                if (!Py_IsInitialized()) return;
                const HeldGil gil;
                const Ref gone = std::move(work);
            }
        };
        const auto held = std::make_shared<Held>(Held{Ref::shared(work)});
        egr::egr_utils_api::RegisterBackwardFinalHook([held] { run_hook([&] { call(Ref(held->work)); }); });
        return none();
    });
}

}  // namespace astray
