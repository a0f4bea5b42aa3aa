// The hooks on a parameter: what a backward pass brings it, and what has accumulated. torch calls these as Python objects.

#pragma once

#include "recording.h"

namespace astray {

// Sees the gradient of a parameter each time something was added to it.
struct AccumulatedHook {
    Ref engine, site, seq{};
    bool arrived = false;
    const at::TensorImpl *gradient = nullptr;  // the one it saw last, to be compared and not to be touched
    int64_t version = -1;                      // of that, or −1 where there is none

    static PyObject *make(PyTypeObject *, PyObject *args, PyObject *) {
        return to_python([&] {
            PyObject *engine, *site;
            if (!PyArg_ParseTuple(args, "OO", &engine, &site)) throw PythonError();
            return Box<AccumulatedHook>::make(AccumulatedHook{Ref::shared(engine), Ref::shared(site)});
        });
    }

    static Ref run(AccumulatedHook &self, PyObject *parameter) {
        const bool arrived = std::exchange(self.arrived, false);
        const Ref gradient = attribute(parameter, names->grad);
        if (gradient.get() == Py_None && !arrived) return none();  // compiled code calls for those it has nothing for
        const Ref before = std::exchange(self.seq, Ref());  // whatever happens, the next gradient is another event's
        if (gradient.get() == Py_None) {
            const Ref why = Ref::made(PyUnicode_FromString("another hook took it away first"));
            call_method(self.engine, names->missed, about("the gradient of %U", self.site).get(), why.get());
        } else {
            self.see(before, names->grad, gradient);
            self.gradient = THPVariable_Unpack(gradient.get()).unsafeGetTensorImpl();
            self.version = version_of(gradient);
        }
        return none();
    }

    // Records a gradient of the event `number`, or of a new one where there is none; gives back its number.
    Ref see(Ref number, PyObject *path, PyObject *seen) {
        const Ref to = engine, of = site;
        if (!flag(to, names->listening) || !flag(to, names->is_here)) return number;
        try {
            if (!number) number = call_method(to, names->event, of.get(), names->backward.get());
            observe(to, number, names->gradient, path, seen);
        } catch (...) {
            report(to, of, "the gradient of %U");
        }
        return number;
    }

    // How often a gradient was written to since it was seen; −1 when it is another one, or not known.
    static PyObject *writes(PyObject *self, PyObject *given) {
        return to_python([&] {
            const auto &seen = Box<AccumulatedHook>::in(self);
            const bool known = THPVariable_Check(given) && seen.version >= 0 &&
                               THPVariable_Unpack(given).unsafeGetTensorImpl() == seen.gradient;
            return Ref::made(PyLong_FromLongLong(known ? version_of(given) - seen.version : -1));
        });
    }

private:
    static int64_t version_of(PyObject *tensor) {
        at::TensorImpl *impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
        return impl->is_inference() ? -1 : impl->version_counter().current_version();
    }
};

// Sees a gradient just before it is added to the one that is there already.
struct ArrivingHook {
    Ref accumulated;
    Ref parameter;  // a weak reference

    static PyObject *make(PyTypeObject *, PyObject *args, PyObject *) {
        return to_python([&] {
            PyObject *accumulated, *parameter;
            if (!PyArg_ParseTuple(args, "O!O", Box<AccumulatedHook>::type, &accumulated, &parameter)) throw PythonError();
            return Box<ArrivingHook>::make(ArrivingHook{Ref::shared(accumulated), Ref::shared(parameter)});
        });
    }

    static Ref run(ArrivingHook &self, PyObject *gradient) {
        const Ref alive = self.accumulated;
        AccumulatedHook &accumulated = Box<AccumulatedHook>::in(alive);
        accumulated.arrived = gradient != Py_None;
        accumulated.seq = Ref();  // of one that a signal handler's exception has cut short
        const Ref parameter = call(self.parameter);
        if (gradient != Py_None && parameter.get() != Py_None && attribute(parameter, names->grad).get() != Py_None)
            accumulated.seq = accumulated.see(Ref(), names->added, gradient);
        return none();
    }
};

}  // namespace astray
