// Records the calls of functions and ops: the native part of the two modes.
//
// A call is opened, its inputs are recorded, and then its outputs. Unusual cases are handled in Python: `CallCapture`
// in calls/call_capture.py, `FunctionSites` in calls/sites.py, and the callee itself. Errors of ours are kept out of
// the program.

#pragma once

#include "live_gradients.h"
#include "origins.h"

namespace astray {

// The names of attributes that `FunctionCalls` reads or calls in Python.
struct FunctionNames {
    Ref call_raised = interned("call_raised"), on_nonfinite = interned("on_nonfinite"), inputs = interned("inputs"),
        entered = interned("entered"), entered_below = interned("entered_below"), returned = interned("returned"),
        is_in_other_recording = interned("_is_in_other_recording"), is_only_view = interned("is_only_view"),
        is_plain = interned("is_plain"), is_running = interned("is_running"), makes_buffers = interned("makes_buffers"),
        make_site = interned("_make_site"), not_read = interned("not_read"), op = interned("_op"),
            out = interned("out"),
        outputs = interned("outputs"), run = interned("run"), run_mode = interned("_run"),
        sees_functions = interned("sees_functions"), sees_ops = interned("sees_ops"), type = interned("type"),
        waiting = interned("_waiting"), watch = interned("watch"), written = interned("written");
};

inline const FunctionNames &function_names() {
    static const FunctionNames *known = new FunctionNames();  // for as long as the program runs
    return *known;
}

// Types and predicates of torch that Python provides, set once by `set_torch_types`.
struct TorchTypes {
    Ref op;          // the type of operators whose own method does nothing but call `_op`; None for another torch
    Ref overriding;  // tells whether a class of tensors has a `__torch_function__` of its own
};
inline TorchTypes *torch_types;

// Watches the gradients of calls: natively, or by a Python object with a `watch` method, to which it passes what
// `edges` makes of the inputs.
class GradientWatcher {
public:
    Ref gradients, edges;

    template <class Visit>
    void each(Visit visit) {
        visit(gradients);
        visit(edges);
    }

    Ref edges_of(const NamedTensors &inputs) const {
        if (edges.get() == reinterpret_cast<PyObject *>(Box<InputEdges>::type)) return Box<InputEdges>::make(inputs);
        return call(edges, to_object(inputs).get());
    }
    void watch(PyObject *engine, PyObject *of, const Ref &at, const NamedTensors &outputs) const {
        if (Py_TYPE(gradients.get()) == Box<LiveGradients>::type)
            Box<LiveGradients>::in(gradients).watch(engine, of, Box<InputEdges>::in(at), outputs);
        else
            call_method(gradients, function_names().watch, engine, of, at.get(), to_object(outputs).get());
    }
};

inline Ref or_empty(PyObject *kwargs) { return kwargs ? Ref::shared(kwargs) : Ref::made(PyDict_New()); }

// The arguments of a call. `kwargs` is empty where there are none.
struct GivenArguments {
    Ref args, kwargs;
    bool replaced = false;

    GivenArguments(PyObject *args, PyObject *kwargs) : args(Ref::shared(args)), kwargs(Ref::shared(kwargs)) {}
    // As a pair for Python, or nothing where they are the program's own.
    Ref if_replaced() const {
        return replaced ? Ref::made(PyTuple_Pack(2, args.get(), or_empty(kwargs).get())) : Ref();
    }
};

// Where the values of another run take the place of what a call is given and what it returns: `Grafts` in
// experiments/grafting.py, whose methods this calls, or nothing.
class GraftPoint {
public:
    Ref grafts;

    // Before the inputs are recorded.
    void enter(PyObject *call, PyObject *callee, GivenArguments &given) const {
        if (grafts) replace(function_names().entered, call, callee, given);
    }
    // After that: what is replaced here is not seen by the recording.
    void enter_below(PyObject *call, PyObject *callee, GivenArguments &given) const {
        if (grafts) replace(function_names().entered_below, call, callee, given);
    }
    // Before the outputs are recorded: the result that takes the place of this one, or the same.
    Ref leave(PyObject *call, const Ref &result) const {
        return grafts ? call_method(grafts, function_names().returned, call, result.get()) : result;
    }

private:
    void replace(const Ref &method, PyObject *call, PyObject *callee, GivenArguments &given) const {
        const Ref now = call_method(grafts, method, call, callee, given.args.get(), or_empty(given.kwargs).get());
        if (now.get() == Py_None) return;
        PyObject *args, *kwargs;
        if (!PyArg_ParseTuple(now, "O!O!", &PyTuple_Type, &args, &PyDict_Type, &kwargs)) throw PythonError();
        given.args = Ref::shared(args), given.kwargs = Ref::shared(kwargs), given.replaced = true;
    }
};

// What a callee does: `is_plain` only reads its arguments and returns its result, `is_view` only returns a view of its
// first argument; neither when it is given `out`. With `makes_buffers` its result may be filled later, without a change
// of its version counter.
struct CalleeTraits {
    bool is_plain = false, is_view = false, makes_buffers = false;

    bool is_simple() const { return is_plain || is_view; }
};

class FunctionCalls {
public:
    Ref engine, capture, sites, outside, flat, is_machinery, origins;
    GradientWatcher watcher;
    GraftPoint graft;

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&engine, &capture, &sites, &outside, &flat, &is_machinery, &origins, &graft.grafts})
            visit(*one);
        watcher.each(visit);
    }

    Calls &calls() const { return Calls::of(engine); }

    // A call starts: empty when it is not part of this recording. `traits` is set when the inputs were recorded. It is
    // to be made with what is in `given` afterwards.
    Ref begin(PyObject *callee, GivenArguments &given, PyObject *frame, std::optional<CalleeTraits> &traits) {
        Ref call;
        const auto open = [&] {
            const TorchFunctionOff torch_function_off;
            call = open_call(callee, frame);
            if (!call) return;
            graft.enter(call, callee, given);
            if (Calls::call_in(call).recorded) observe_inputs(call, callee, given.args, given.kwargs, traits);
            graft.enter_below(call, callee, given);
        };
        try {
            if (attempt(open, "a call of ", callee)) return call;
        } catch (const PythonError &) {
            if (call) calls().leave_anyhow(call);
            throw;
        }
        if (call) calls().leave_anyhow(call);  // or calls that follow would seem to be inside it
        return Ref();
    }

    // What takes the place of the result of a call.
    Ref grafted(PyObject *call, PyObject *callee, const Ref &result) {
        if (!graft.grafts) return result;
        Ref now = result;
        attempt([&] {
            const TorchFunctionOff torch_function_off;
            now = graft.leave(call, result);
        }, "the result of ", callee);
        return now;
    }

    // A call has returned: its output tensors, if they were recorded. `record_outputs` records them instead if it is
    // not nullptr.
    std::optional<NamedTensors> end(PyObject *call, PyObject *callee, PyObject *args, PyObject *kwargs,
                                    PyObject *result,
                                    std::optional<CalleeTraits> traits, PyObject *record_outputs = nullptr) {
        std::optional<NamedTensors> outputs;
        OpenCall &ended = Calls::call_in(call);
        const auto finish = [&] {
            ended.input_edges = Ref();
            calls().leave_anyhow(call);
        };
        try {
            if (ended.recorded)
                attempt([&] {
                    const TorchFunctionOff torch_function_off;
                    if (record_outputs) astray::call(record_outputs, call, callee, args, or_empty(kwargs).get(),
                                                     result);
                    else outputs = observe_outputs(call, callee, args, kwargs, result, traits);
                }, "the result of ", callee);
        } catch (const PythonError &) {
            finish();
            throw;
        }
        finish();
        return outputs;
    }

    // A call has raised: Python reports it, and the program's error stays set, unless a signal handler raises another
    // one.
    void call_raised(PyObject *call) {
        SavedError raised;
        const Ref error = raised.exception();
        calls().attempt([&] { call_method(capture, function_names().call_raised, call, error.get()); }, "the end of ",
                        Calls::call_in(call).site_data().name);
        raised.restore();
    }

    // Whether the innermost frame of a call belongs to torch's own machinery.
    bool is_infrastructure(PyObject *frame) {
        for (Ref at = Ref::shared(frame); at; at = frame_around(at)) {
            PyObject *answer = codes_.ask(code_of(at), is_machinery);
            if (answer != Py_None) return answer == Py_True;
        }
        return false;
    }

    // Whether one of these arguments, or of the lists among them, is a tensor of a class with a `__torch_function__`.
    bool overrides(PyObject *one) {
        if (PyTuple_CheckExact(one) || PyList_CheckExact(one)) {
            const Ref items = Ref::made(PySequence_Fast(one, "A list or tuple."));
            for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i)
                if (overrides(PySequence_Fast_GET_ITEM(items.get(), i))) return true;
            return false;
        }
        if (one == Py_None || PyLong_Check(one) || PyFloat_Check(one) || PyUnicode_Check(one)) return false;
        const Ref type = Ref::shared(reinterpret_cast<PyObject *>(Py_TYPE(one)));
        const auto known = overriding_.find(type.get());
        if (known != overriding_.end()) return known->second.second;
        const bool answer = is_true(call(torch_types->overriding, type.get()));
        overriding_.emplace(type.get(), std::make_pair(type, answer));
        return answer;
    }

private:
    // As `Calls::attempt`, with the name of the callee.
    template <class Work>
    bool attempt(Work work, const char *doing, PyObject *callee) {
        try {
            work();
            return true;
        } catch (...) {
            set_error();
            SavedError error;
            const Ref type = Ref::owned(PyObject_GetAttr(callee, function_names().type));
            PyErr_Clear();
            error.restore();
            calls().report_error(doing, type ? type.get() : Py_None);
            return false;
        }
    }

    // ---- where a call is -------------------------------------------------------------------------------------------

    Ref find_site(const Ref &outer, PyObject *callee) const {
        PyObject *known = outer ? Calls::call_in(outer).site_data().inner_sites.get() : outside.get();
        Ref site = Ref::shared(PyDict_GetItemWithError(known, callee));
        if (site) return site;
        if (PyErr_Occurred()) throw PythonError();
        return call_method(sites, function_names().make_site, to_object(outer).get(), callee);
    }

    // Empty when the call is not part of this recording.
    Ref open_call(PyObject *callee, PyObject *frame) {
        Calls &calls = this->calls();
        if (!calls.in_own_process || is_infrastructure(frame)) return Ref();
        const bool in_backward_pass = in_backward();
        const Ref outer = calls.enclosing();
        if (in_backward_pass && (!outer || !Calls::call_in(outer).recompute)) return open_backward(callee, frame);
        if (!outer && call_method(sites, function_names().is_in_other_recording).get() == Py_True) return Ref();
        const Ref site = find_site(outer, callee);
        if (!calls.wants(site)) return Ref();
        const bool updates = outer && Calls::call_in(outer).phase == Phase::update;
        return calls.enter(site, frame, updates ? Phase::update : Phase::forward, in_backward_pass);
    }

    // The backward pass calls a function, outside of any module that runs.
    Ref open_backward(PyObject *callee, PyObject *frame) {
        Calls &calls = this->calls();
        const Ref origin = Box<NodeOrigins>::in(origins).current();
        const Ref site = find_site(origin, callee);
        if (!calls.wants(site)) return Ref();
        const OpenCall *forward = origin ? &Calls::call_in(origin) : nullptr;
        if (frame && at::GradMode::is_enabled())  // checkpointing runs a part of the forward again
            return calls.enter(site, frame, Phase::forward, true,
                               forward ? std::optional(forward->micro) : std::nullopt);
        return calls.enter_backward(site, forward, forward ? forward->micro : calls.latest_micro);
    }

    // ---- what goes in and comes out --------------------------------------------------------------------------------

    // Read once from each callee, since it does not change.
    CalleeTraits traits_of(PyObject *callee, PyObject *kwargs) {
        auto known = traits_.find(callee);
        if (known == traits_.end()) {
            CalleeTraits traits;
            traits.is_plain = is_true(attribute(callee, function_names().is_plain));
            traits.is_view = !traits.is_plain && is_true(attribute(callee, function_names().is_only_view));
            traits.makes_buffers = is_true(attribute(callee, function_names().makes_buffers));
            known = traits_.emplace(callee, std::make_pair(Ref::shared(callee), traits)).first;
        }
        CalleeTraits traits = known->second.second;
        if (kwargs && check(PyDict_Contains(kwargs, function_names().out))) traits.is_plain = traits.is_view = false;
        return traits;
    }

    void observe_inputs(PyObject *object, PyObject *callee, PyObject *args, PyObject *kwargs,
                        std::optional<CalleeTraits> &traits) {
        Calls &calls = this->calls();
        OpenCall &call = Calls::call_in(object);
        const bool watched = watcher.gradients && call.phase == Phase::forward && calls.follows_gradients(call) &&
                             at::GradMode::is_enabled();
        if (!watched && !call.has_row()) return;
        traits = traits_of(callee, kwargs);
        Arguments given;
        Ref unread;
        if (traits->is_simple()) {
            given = Object<Structures>::in(flat).arguments(args, kwargs);
        } else {
            const Ref named = or_empty(kwargs);
            const Ref found = call_method(callee, function_names().inputs, flat.get(), args, named.get());
            PyObject *tensors, *skeleton;
            if (!PyArg_ParseTuple(found, "OO", &tensors, &skeleton)) throw PythonError();
            given = {named_tensors(tensors), Ref::shared(skeleton)};
            if (call.has_row()) unread = call_method(callee, function_names().not_read, args, named.get());
        }
        if (call.has_row()) {
            calls.begin(call, given.skeleton);
            PyObject *viewed = traits->is_view && PyTuple_Size(args) ? PyTuple_GetItem(args, 0) : nullptr;
            for (const NamedTensor &one : given.tensors) {
                const Row row{call.seq, Role::input, one.path};
                const bool not_read = one.tensor.get() == viewed || (unread && is_among(unread, one.tensor));
                if (not_read) calls.tensors.observe_unread(row, one.tensor);
                else calls.tensors.observe(row, one.tensor);
            }
        }
        if (watched) call.input_edges = watcher.edges_of(given.tensors);
    }

    std::optional<NamedTensors> observe_outputs(PyObject *object, PyObject *callee, PyObject *args, PyObject *kwargs,
                                             PyObject *result, std::optional<CalleeTraits> known) {
        Calls &calls = this->calls();
        const OpenCall &call = Calls::call_in(object);
        const CalleeTraits traits = known ? *known : traits_of(callee, kwargs);
        const Ref named = traits.is_simple() ? Ref() : or_empty(kwargs);
        if (named) {
            const Ref written = call_method(callee, function_names().written, args, named.get());
            for (Py_ssize_t i = 0; i < PyList_Size(written); ++i) calls.tensors.written(PyList_GetItem(written, i));
        }
        if (!call.has_row() && !call.input_edges && !traits.makes_buffers) return std::nullopt;
        NamedTensors outputs =
            named ? named_tensors(call_method(callee, function_names().outputs, flat.get(), args,
                                              named.get(), result))
                  : structures().result(result);
        bool bad = false;
        if (call.has_row())
            for (const NamedTensor &one : outputs)
                bad |= calls.tensors.observe_unread({call.seq, Role::output, one.path}, one.tensor);
        if (bad)  // and a guard keeps such calls
            call_method(capture, function_names().on_nonfinite, object, callee, args, or_empty(kwargs).get(),
                        to_object(outputs).get());
        if (traits.makes_buffers)
            for (const NamedTensor &one : outputs) calls.tensors.changed(one.tensor);
        if (!outputs.empty() && call.input_edges && watcher.gradients)
            watcher.watch(engine, object, call.input_edges, outputs);
        return outputs;
    }

    Structures &structures() const { return Object<Structures>::in(flat); }

    static bool is_among(PyObject *list, PyObject *one) {
        for (Py_ssize_t i = 0; i < PyList_Size(list); ++i)
            if (PyList_GetItem(list, i) == one) return true;
        return false;
    }

    CodeTable codes_;
    std::unordered_map<PyObject *, std::pair<Ref, CalleeTraits>> traits_;   // callees are kept alive
    // Whether classes of tensors have a `__torch_function__`.
    std::unordered_map<PyObject *, std::pair<Ref, bool>> overriding_;
};

// ---- the modes -----------------------------------------------------------------------------------------------------

// The native base of the modes, whose other base is torch's Python class. It provides the method that torch calls,
// without running Python code. Code that inspects the class, as dynamo does when it traces a mode, finds that method in
// Python.
class Mode {
public:
    Ref native;  // the native method that torch gets; empty where it gets the one in Python
    Ref name;    // of that method
    Ref object;  // the `FunctionCalls`, once the mode is attached
    Ref known, plain, pending;
    bool is_op = false;

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&native, &object, &known, &plain, &pending}) visit(*one);
    }

    FunctionCalls &recorder() const { return Object<FunctionCalls>::in(object); }

    // `skip_own_frame`: the innermost frame is the mode's own method; the caller is the frame around it.
    Ref dispatch(PyObject *func, PyObject *args, PyObject *kwargs, bool skip_own_frame) {
        if (kwargs == Py_None) kwargs = nullptr;
        if (!PyTuple_Check(args) || (kwargs && !PyDict_Check(kwargs)))
            raise(PyExc_TypeError, "A mode is given a call as its function, a tuple and a dict of arguments.");
        return is_op ? dispatch_op(func, args, kwargs, skip_own_frame) : dispatch_function(func, args, kwargs,
            skip_own_frame);
    }

private:
    static Ref caller(bool skip_own_frame) {
        const Ref own = innermost_frame();
        return own && skip_own_frame ? frame_around(own) : own;
    }

    // `FunctionSites.run` in Python runs ops for which a function mode or a tensor class would be called.
    Ref run(PyObject *func, PyObject *args, PyObject *kwargs) const {
        if (is_op && (is_true(attribute(recorder().sites, function_names().sees_functions)) ||
                      any_overrides(args, kwargs)))
            return call_method(recorder().sites, function_names().run, func, args, or_empty(kwargs).get());
        if (is_op && reinterpret_cast<PyObject *>(Py_TYPE(func)) == torch_types->op.get())
            return Ref::made(PyObject_Call(attribute(func, function_names().op), args, kwargs));
        return Ref::made(PyObject_Call(func, args, kwargs));
    }

    bool any_overrides(PyObject *args, PyObject *kwargs) const {
        if (recorder().overrides(args)) return true;
        PyObject *value;
        for (Py_ssize_t at = 0; kwargs && PyDict_Next(kwargs, &at, nullptr, &value);)
            if (recorder().overrides(value)) return true;
        return false;
    }

    // Runs a function or op and records its call. `outputs` is set to the tensors that it returned.
    Ref run_and_record(PyObject *func, PyObject *callee, PyObject *args, PyObject *kwargs, bool skip_own_frame,
                     std::optional<NamedTensors> &outputs) const {
        std::optional<CalleeTraits> traits;
        GivenArguments given(args, kwargs);
        const Ref call = recorder().begin(callee, given, caller(skip_own_frame), traits);
        if (!call) return run(func, args, kwargs);
        Ref result;
        try {
            result = run(func, given.args, given.kwargs);
        } catch (const PythonError &) {
            recorder().call_raised(call);
            throw;
        }
        result = recorder().grafted(call, callee, result);
        outputs = recorder().end(call, callee, given.args, given.kwargs, result, traits);
        return result;
    }

    // Passes a call to the mode's own method in Python.
    Ref run_in_python(PyObject *func, PyObject *args, PyObject *kwargs, bool skip_own_frame) {
        const Ref frame = caller(skip_own_frame);
        return call_method(Object<Mode>::around(*this), function_names().run_mode, func, args, or_empty(kwargs).get(),
                           to_object(frame).get());
    }

    Ref dispatch_function(PyObject *func, PyObject *args, PyObject *kwargs, bool skip_own_frame) {
        const Ref function = Ref::shared(PyDict_GetItemWithError(known, func));
        if (!function && PyErr_Occurred()) throw PythonError();
        if (function.get() == Py_None || !recorder().calls().listening)
            return Ref::made(PyObject_Call(func, args, kwargs));
        const bool is_ours = function && reinterpret_cast<PyObject *>(Py_TYPE(function.get())) == plain.get() &&
                             PyList_Size(attribute(pending, function_names().waiting)) == 0;
        if (!is_ours) return run_in_python(func, args, kwargs, skip_own_frame);
        const Ref &sites = recorder().sites;
        if (is_true(attribute(sites, function_names().sees_ops)) &&
            call_method(sites, function_names().is_running, func).get() == Py_True)
            return Ref::made(PyObject_Call(func, args, kwargs));
        std::optional<NamedTensors> outputs;
        const Ref result = run_and_record(func, function, args, kwargs, skip_own_frame, outputs);
        if (outputs && outputs->empty())  // it only queries a tensor; it is not recorded again
            recorder().calls().attempt([&] { check(PyDict_SetItem(known, func, Py_None)); }, "a call of ", func);
        return result;
    }

    Ref dispatch_op(PyObject *func, PyObject *args, PyObject *kwargs, bool skip_own_frame) {
        if (!recorder().calls().listening) return run(func, args, kwargs);
        const Ref id = Ref::made(PyLong_FromVoidPtr(func)), pair = Ref::shared(PyDict_GetItemWithError(known, id));
        if (!pair && PyErr_Occurred()) throw PythonError();
        const Ref op = Ref::shared(pair ? PyTuple_GetItem(pair, 1) : nullptr);
        if (op.get() == Py_None) return run(func, args, kwargs);
        if (!op || reinterpret_cast<PyObject *>(Py_TYPE(op.get())) != plain.get())
            return run_in_python(func, args, kwargs, skip_own_frame);
        std::optional<NamedTensors> outputs;
        return run_and_record(func, op, args, kwargs, skip_own_frame, outputs);
    }
};

// ---- as Python sees them: see _torch.pyi ---------------------------------------------------------------------------

namespace functions {

inline PyObject *or_null(PyObject *object) { return object == Py_None ? nullptr : object; }

inline int init_function_calls(PyObject *self, PyObject *args, PyObject *) {
    return to_status([&] {
        PyObject *given[9];
        if (!PyArg_ParseTuple(args, "O!OOO!O!OOOO!:FunctionCalls", Object<Calls>::type, &given[0], &given[1], &given[2],
                              &PyDict_Type,
                              &given[3], Object<Structures>::type, &given[4], &given[5], &given[6], &given[7],
                              Box<NodeOrigins>::type, &given[8]))
            throw PythonError();
        FunctionCalls &recorder = Object<FunctionCalls>::in(self);
        Ref *members[] = {&recorder.engine,  &recorder.capture, &recorder.sites, &recorder.outside, &recorder.flat,
                          &recorder.watcher.gradients, &recorder.watcher.edges, &recorder.is_machinery,
                              &recorder.origins};
        for (size_t i = 0; i < std::size(members); ++i) read_object(given[i], *members[i]);
    });
}

inline PyObject *begin(PyObject *self, PyObject *given) {
    return to_python([&] {
        PyObject *callee, *args, *kwargs, *frame;
        if (!PyArg_ParseTuple(given, "OO!OO:begin", &callee, &PyTuple_Type, &args, &kwargs,
                              &frame)) throw PythonError();
        std::optional<CalleeTraits> traits;
        GivenArguments now(args, or_null(kwargs));
        const Ref call = Object<FunctionCalls>::in(self).begin(callee, now, or_null(frame), traits);
        return Ref::made(PyTuple_Pack(3, to_object(call).get(), now.args.get(), or_empty(now.kwargs).get()));
    });
}

inline PyObject *grafted(PyObject *self, PyObject *given) {
    return to_python([&] {
        PyObject *call, *callee, *result;
        if (!PyArg_ParseTuple(given, "O!OO:grafted", Object<OpenCall>::type, &call, &callee, &result))
            throw PythonError();
        return Object<FunctionCalls>::in(self).grafted(call, callee, Ref::shared(result));
    });
}

inline PyObject *end(PyObject *self, PyObject *given) {
    return to_python([&] {
        PyObject *call, *callee, *args, *kwargs, *result, *record_outputs = Py_None;
        if (!PyArg_ParseTuple(given, "O!OO!OO|O:end", Object<OpenCall>::type, &call, &callee, &PyTuple_Type, &args,
                              &kwargs,
                              &result, &record_outputs))
            throw PythonError();
        const auto outputs = Object<FunctionCalls>::in(self).end(call, callee, args, or_null(kwargs), result, {},
                                                                 or_null(record_outputs));
        return outputs ? to_object(*outputs) : none();
    });
}

inline PyObject *is_machinery(PyObject *self, PyObject *frame) {
    return to_python([&] { return to_object(Object<FunctionCalls>::in(self).is_infrastructure(or_null(frame))); });
}

// graft(grafts): what takes the place of arguments and results from now on, or None.
inline PyObject *use_grafts(PyObject *self, PyObject *grafts) {
    return to_python([&] {
        read_object(grafts, Object<FunctionCalls>::in(self).graft.grafts);
        return none();
    });
}

// The mode's method as torch calls it: (func, types, args, kwargs), without the last when there are none. With other
// arguments, or while a compiler is active, the method in Python is called.
inline PyObject *dispatch(PyObject *self, PyObject *const *given, Py_ssize_t count, PyObject *keywords) {
    return to_python([&] {
        Mode &mode = Object<Mode>::in(self);
        if ((count == 3 || count == 4) && !keywords && compilers->are_idle())
            return mode.dispatch(given[0], given[2], count == 4 ? given[3] : nullptr, false);
        const Ref method = Ref::made(PyObject_GenericGetAttr(self, mode.name));
        return Ref::made(PyObject_Vectorcall(method, given, static_cast<size_t>(count), keywords));
    });
}

// attach(name, is_op, taking, known, plain, pending): from now on calls are recorded. `known` has the catalogue entries
// of functions, those of ops as pairs by id; `plain` is the type of entries that are recorded here, `_run` in Python
// handles the rest.
inline PyObject *attach(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *name, *recorder, *known, *plain, *pending;
        int is_op;
        if (!PyArg_ParseTuple(args, "UpO!O!OO:attach", &name, &is_op, Object<FunctionCalls>::type, &recorder,
                              &PyDict_Type, &known,
                              &plain, &pending))
            throw PythonError();
        static PyMethodDef method = {
            "dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dispatch)),
                METH_FASTCALL | METH_KEYWORDS, nullptr};
        Mode &mode = Object<Mode>::in(self);
        mode.name = Ref::shared(name), mode.object = Ref::shared(recorder), mode.known = Ref::shared(known);
        mode.plain = Ref::shared(plain), mode.pending = Ref::shared(pending);
        mode.is_op = is_op;
        if (compilers->flags) mode.native = Ref::made(PyCFunction_New(&method, self));
        return none();
    });
}

// _dispatch(func, args, kwargs): the same for the method in Python, which calls this and nothing else does.
inline PyObject *dispatch_from_python(PyObject *self, PyObject *given) {
    return to_python([&] {
        PyObject *func, *args, *kwargs;
        if (!PyArg_ParseTuple(given, "OOO:_dispatch", &func, &args, &kwargs)) throw PythonError();
        return Object<Mode>::in(self).dispatch(func, args, kwargs, true);
    });
}

inline PyObject *get_attribute(PyObject *self, PyObject *name) {
    const Mode &mode = Object<Mode>::in(self);
    if (mode.native && (name == mode.name.get() || (PyUnicode_Check(name) && PyUnicode_Compare(name, mode.name) == 0)))
        return Ref(mode.native).release();
    return PyObject_GenericGetAttr(self, name);
}

}  // namespace functions

inline void add_functions(PyObject *module) {
    static PyMethodDef of_calls[] = {
        {"begin", functions::begin, METH_VARARGS, nullptr},
        {"end", functions::end, METH_VARARGS, nullptr},
        {"grafted", functions::grafted, METH_VARARGS, nullptr},
        {"graft", functions::use_grafts, METH_O, nullptr},
        {"is_machinery", functions::is_machinery, METH_O, nullptr},
        {},
    };
    static PyMethodDef of_modes[] = {
        {"attach", functions::attach, METH_VARARGS, nullptr},
        {"_dispatch", functions::dispatch_from_python, METH_VARARGS, nullptr},
        {},
    };
    Object<FunctionCalls>::add_to(module, ASTRAY_MODULE ".FunctionCalls",
                           {slot(Py_tp_init, functions::init_function_calls), slot(Py_tp_methods, of_calls)});
    Object<Mode>::add_to(module, ASTRAY_MODULE ".Mode",
                         {slot(Py_tp_getattro, functions::get_attribute), slot(Py_tp_methods, of_modes)});
}

}  // namespace astray
