// Records the calls of modules: what the hooks on them do. `ModuleCapture` in calls/modules.py adds these, and handles
// unusual cases in Python.
//
// torch calls the hooks natively, except while a compiler is active; see compilers.h.

#pragma once

#include <torch/csrc/jit/frontend/tracer.h>

#include "functions.h"

namespace astray {

// The names of attributes that are read or called in `ModuleCapture` and other Python objects.
struct ModuleNames {
    Ref buffers = interned("_buffers"), called = interned("_any_called"), check = interned("check"),
        compiled = interned("_compiled_call_impl"), context = interned("dynamo_ctx"), direct = interned("_direct"),
        first_call = interned("first_call"), enter_thread = interned("enter_thread"),
            on_nonfinite = interned("on_nonfinite"),
        hooked = interned("hooked"), layers = interned("_layers"), lists = interned("_lists"),
        modules = interned("_modules"), note_exception = interned("_note_exception"),
        observe_state = interned("_observe_state"), of = interned("of"), parameters = interned("_parameters"),
        sources = interned("_sources"), thread = interned("_thread"), leave_thread = interned("leave_thread"),
        watch = interned("watch"), unsharded_types = interned("_unsharded_types");
};

inline const ModuleNames &module_names() {
    static const ModuleNames *known = new ModuleNames();  // for as long as the program runs
    return *known;
}

// How one module is watched, whether or not its hooks are on.
struct WatchedModule {
    Ref before, after;  // what its hooks do instead of the default, if anything
    Ref children;       // a `ChildModules`
    bool called = false;

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&before, &after, &children}) visit(*one);
    }

    // Whether the children of a module are the known ones.
    bool has_same_children(PyObject *module, PyObject *modules) const {
        const Ref direct = attribute(children, module_names().direct),
            lists = attribute(children, module_names().lists);
        if (!modules || !PyDict_Check(modules) || PyList_Size(lists))
            return is_true(call_method(children, module_names().of, module));
        const Py_ssize_t size = PyTuple_Size(direct);
        if (PyDict_Size(modules) != size) return false;
        PyObject *child;
        Py_ssize_t at = 0;
        for (Py_ssize_t i = 0; i < size && PyDict_Next(modules, &at, nullptr, &child); ++i)
            if (child != PyTuple_GetItem(direct, i)) return false;
        return true;
    }

    static int init(PyObject *self, PyObject *args, PyObject *) {
        return to_status([&] {
            PyObject *before, *after, *children;
            if (!PyArg_ParseTuple(args, "OOO:WatchedModule", &before, &after, &children)) throw PythonError();
            WatchedModule &watched = Object<WatchedModule>::in(self);
            read_object(before, watched.before), read_object(after, watched.after),
                read_object(children, watched.children);
        });
    }
};

class ModuleCalls {
public:
    Ref engine;
    Ref capture;  // the `ModuleCapture`
    Ref flat, modes, origins, fast_paths, gathered, parameters, parameter_type;
    // Attributes of `fast_paths`, `gathered` and `parameters` that are never replaced.
    Ref layers, unsharded_types, sources, hooked;
    GradientWatcher watcher;
    GraftPoint graft;

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&engine, &capture, &flat, &modes, &origins, &fast_paths, &gathered, &parameters, &layers,
                         &unsharded_types,
                         &sources, &hooked, &graft.grafts})
            visit(*one);
        watcher.each(visit);
    }

    Calls &calls() const { return Calls::of(engine); }

    // A module is about to run. Afterwards `given` holds what it is to be called with.
    void enter(PyObject *site, PyObject *module, GivenArguments &given, PyObject *frame) {
        check_module(module);
        Calls &calls = this->calls();
        const Ref object = calls.enter(site, frame, Phase::forward, in_backward());  // inside a backward: checkpointing
        OpenCall &call = Calls::call_in(object);
        if (!is_own_thread()) call_method(modes, module_names().enter_thread, object.get());
        Box<NodeOrigins>::in(origins).mark(object);
        graft.enter(object, module, given);
        if (call.recorded) observe_given(site, module, call, given);
        graft.enter_below(object, module, given);
    }

    // A module has run. Returns what takes the place of its result, or the same.
    Ref leave(PyObject *site, PyObject *returned) {
        const Ref object = calls().innermost(site);
        Ref result = Ref::shared(returned);
        if (!object) return result;
        const auto finish = [&] {
            Calls::call_in(object).input_edges = Ref();
            if (!is_own_thread()) call_method(modes, module_names().leave_thread, object.get());
            calls().leave(object);
            Box<NodeOrigins>::in(origins).mark(calls().enclosing());
        };
        try {
            result = graft.leave(object, result);
            if (Calls::call_in(object).recorded) observe_result(object, result);
        } catch (...) {
            set_error();
            SavedError first;  // the one to report, unless the second is the program's
            calls().attempt(finish, "the end of ", Object<Site>::in(site).name);
            first.restore();
            throw PythonError();
        }
        finish();
        return result;
    }

    // Ends the step: parameters and buffers of every module are recorded again.
    void next_step() { states_.clear(); }

private:
    struct ParameterVersion {
        const at::TensorImpl *tensor;
        int64_t version, size;
        const void *address;

        bool operator==(const ParameterVersion &other) const {
            return tensor == other.tensor && version == other.version && size == other.size && address == other.address;
        }
    };
    using ParameterVersions = std::vector<ParameterVersion>;

    // Updates the state of hooks and gathered parameters before a module runs.
    void check_module(PyObject *module) {
        if (!called_) astray::check(PyObject_SetAttr(capture, module_names().called, Py_True));
        called_ = true;
        if (PyList_Size(layers)) call_method(fast_paths, module_names().check);
        if (!astray::check(PySet_Contains(unsharded_types, reinterpret_cast<PyObject *>(Py_TYPE(module)))))
            call_method(gathered, module_names().check, module);
    }

    void observe_given(PyObject *site, PyObject *module, OpenCall &call, const GivenArguments &arguments) {
        Calls &calls = this->calls();
        const Arguments given = Object<Structures>::in(flat).arguments(arguments.args, arguments.kwargs);
        if (call.has_row()) {
            calls.begin(call, given.skeleton);
            for (const NamedTensor &one : given.tensors) calls.tensors.observe({call.seq, Role::input, one.path},
                one.tensor);
            observe_state(site, module, call);
        }
        if (calls.follows_gradients(call) && at::GradMode::is_enabled())
            call.input_edges = watcher.edges_of(given.tensors);
    }

    // On other threads the modes are pushed at the start of a call; on their own thread they are on already.
    bool is_own_thread() const { return PyThread_get_thread_ident() == thread_; }

    static PyObject *item_of(PyObject *dict, PyObject *name) {  // nullptr when there is none
        PyObject *found = PyDict_GetItemWithError(dict, name);
        if (!found && PyErr_Occurred()) throw PythonError();
        return found;
    }

    // Keys of the parameters that change when they do; nullopt when Python has to handle this module.
    std::optional<ParameterVersions> state_of(PyObject *own) const {
        PyObject *all = item_of(own, module_names().parameters), *buffers = item_of(own, module_names().buffers), *name,
            *one;
        if (!all || !buffers || !PyDict_Check(all) || !PyDict_Check(buffers) || PyDict_Size(sources))
            return std::nullopt;
        PyObject *compiled = item_of(own, module_names().compiled);  // by torch.compile, in place or as a wrapper
        if ((compiled && compiled != Py_None) || item_of(own, module_names().context)) return std::nullopt;
        for (Py_ssize_t at = 0; PyDict_Next(buffers, &at, nullptr, &one);)
            if (one != Py_None) return std::nullopt;
        ParameterVersions state;
        for (Py_ssize_t at = 0; PyDict_Next(all, &at, &name, &one);) {
            if (one == Py_None) continue;
            const bool plain = reinterpret_cast<PyObject *>(Py_TYPE(one)) == parameter_type.get() &&
                PyUnicode_Check(name) &&
                               PyUnicode_FindChar(name, '.', 0, PyUnicode_GetLength(name), 1) == -1;
            if (!plain) return std::nullopt;
            const at::Tensor &tensor = THPVariable_Unpack(one);
            if (tensor.is_inference() || tensor.layout() != at::kStrided || !tensor.has_storage()) return std::nullopt;
            state.push_back({tensor.unsafeGetTensorImpl(), static_cast<int64_t>(tensor._version()), tensor.numel(),
                             tensor.unsafeGetTensorImpl()->data()});
        }
        return state;
    }

    // The module's own parameters and buffers, at its first call of a step and whenever they have changed.
    void observe_state(PyObject *site, PyObject *module, const OpenCall &call) {
        const Ref own = Ref::made(PyObject_GenericGetDict(module, nullptr));
        std::optional<ParameterVersions> now = state_of(own);
        if (!now) {
            call_method(capture, module_names().observe_state, site, module, to_object(call.seq).get());
            return;
        }
        const auto then = states_.find(site);
        if (now->empty() || (then != states_.end() && then->second.second == *now)) return;
        states_[site] = {Ref::shared(site), std::move(*now)};
        observe_parameters(Object<Site>::in(site), item_of(own, module_names().parameters), call);
    }

    void observe_parameters(const Site &site, PyObject *all, const OpenCall &call) {
        const Ref items = Ref::made(PyDict_Items(all));  // a copy: the program may change it meanwhile
        const bool is_root = is_text(site.name, "<root>");   // astray.records.ROOT
        for (Py_ssize_t i = 0; i < PyList_Size(items); ++i) {
            PyObject *name = PyTuple_GetItem(PyList_GetItem(items, i), 0),
                *one = PyTuple_GetItem(PyList_GetItem(items, i), 1);
            if (one == Py_None) continue;
            calls().tensors.observe({call.seq, Role::parameter, name}, one);
            if (is_hooked(one)) continue;
            // It may have been made, replaced or unfrozen since the start.
            const Ref full = is_root ? Ref::shared(name) : Ref::made(PyUnicode_FromFormat("%U.%U", site.name.get(),
                name));
            call_method(parameters, module_names().watch, one, full.get(), site.name.get(), site.root.get());
        }
    }

    // Whether `ParameterCapture` already watches the gradients of a parameter.
    bool is_hooked(PyObject *parameter) const {
        PyObject *reference = item_of(hooked, Ref::made(PyLong_FromVoidPtr(parameter)));
        return reference && call(reference).get() == parameter;
    }

    void observe_result(PyObject *object, PyObject *result) {
        Calls &calls = this->calls();
        const OpenCall &call = Calls::call_in(object);
        if (result == Py_None && !call.recompute)  // checkpointing ends a recomputation by an exception
            call_method(capture, module_names().note_exception, call.site.get(), to_object(call.frame).get());
        const NamedTensors outputs = Object<Structures>::in(flat).result(result);
        bool bad = false;
        if (call.has_row())
            for (const NamedTensor &one : outputs)
                bad |= calls.tensors.observe({call.seq, Role::output, one.path}, one.tensor);
        if (bad) call_method(capture, module_names().on_nonfinite, object, to_object(outputs).get());
        if (call.input_edges) watcher.watch(engine, object, call.input_edges, outputs);
    }

    bool called_ = false;
    unsigned long thread_ = 0;  // the one that the modes are on for
    std::unordered_map<PyObject *, std::pair<Ref, ParameterVersions>> states_;  // by site, which is held

    friend int init_modules(PyObject *, PyObject *, PyObject *);
};

// ---- hooks ---------------------------------------------------------------------------------------------------------

// The hooks on a module: one kind runs before its call, another after it.
class ModuleHook {
public:
    Ref modules, engine, site, watched;
    Ref action;  // replaces the default action, if not empty
    Ref resync;  // brings names and hooks in line with a model that has changed

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&modules, &engine, &site, &watched, &action, &resync}) visit(*one);
    }

    // `depth` is the number of our own frames inside torch's function that is going to call `forward`. Returns what to
    // call it with instead, as a pair, or nothing.
    Ref before(PyObject *module, PyObject *args, PyObject *kwargs, int depth) {
        Ref instead;
        run([&] {
            WatchedModule &state = Object<WatchedModule>::in(watched);
            const bool is_first = !std::exchange(state.called, true);
            const Ref own = Ref::made(PyObject_GenericGetDict(module, nullptr));
            Ref at = site;
            if (!state.has_same_children(module, PyDict_GetItemWithError(own, module_names().modules))) {
                const Ref now = call(resync, module);
                if (now.get() != Py_None) at = now;
            }
            if (action) {
                instead = call(action, at.get(), module, args, or_empty(kwargs).get());
            } else if (Calls::of(engine).recording) {
                Ref frame = innermost_frame();
                if (frame && depth) frame = frame_around(frame);
                GivenArguments given(args, kwargs);
                Object<ModuleCalls>::in(modules).enter(at, module, given, frame);
                instead = given.if_replaced();
            }
            if (is_first) call_method(Object<ModuleCalls>::in(modules).capture, module_names().first_call, at.get());
        });
        return instead;
    }

    // Returns what takes the place of a result; nothing where it stays.
    Ref after(PyObject *result) {
        Ref now;
        run([&] {
            now = action ? call(action, site.get(), result) : Object<ModuleCalls>::in(modules).leave(site, result);
        });
        return now.get() == result ? Ref() : now;
    }

private:
    // A hook does nothing when nothing is recorded, or while a tracer would record it as a part of the model.
    bool is_inactive() const {
        Calls &calls = Calls::of(engine);
        if (!calls.recording && calls.open().empty()) return true;
        return torch::jit::tracer::isTracing() || !calls.in_own_process;
    }

    template <class Work>
    void run(Work work) {
        if (is_inactive()) return;
        const Ref kept = modules;  // the action may remove the hook
        const auto unseen = [&] {
            const TorchFunctionOff torch_function_off;
            work();
        };
        Calls::of(engine).attempt(unseen, "the call of ", Object<Site>::in(site).name);
    }
};

struct BeforeHook : ModuleHook {};
struct AfterHook : ModuleHook {};

// ---- as Python sees them: see _torch.pyi ---------------------------------------------------------------------------

inline int init_modules(PyObject *self, PyObject *args, PyObject *) {
    return to_status([&] {
        PyObject *given[11];
        if (!PyArg_ParseTuple(args, "O!OO!OOOO!OOOO:ModuleCalls", Object<Calls>::type, &given[0], &given[1],
                              Object<Structures>::type, &given[2], &given[3], &given[4], &given[5],
                              Box<NodeOrigins>::type,
                              &given[6], &given[7], &given[8], &given[9], &given[10]))
            throw PythonError();
        ModuleCalls &modules = Object<ModuleCalls>::in(self);
        Ref *members[] = {&modules.engine,     &modules.capture, &modules.flat,    &modules.watcher.gradients,
                          &modules.watcher.edges, &modules.modes,   &modules.origins, &modules.fast_paths,
                          &modules.gathered, &modules.parameters, &modules.parameter_type};
        for (size_t i = 0; i < std::size(members); ++i) *members[i] = Ref::shared(given[i]);
        modules.layers = attribute(modules.fast_paths, module_names().layers);
        modules.unsharded_types = attribute(modules.gathered, module_names().unsharded_types);
        modules.sources = attribute(modules.gathered, module_names().sources);
        modules.hooked = attribute(modules.parameters, module_names().hooked);
        modules.thread_ = PyLong_AsUnsignedLong(attribute(modules.modes, module_names().thread));
        if (PyErr_Occurred()) throw PythonError();
    });
}

namespace modules {

inline PyObject *enter(PyObject *self, PyObject *given) {
    return to_python([&] {
        PyObject *site, *module, *args, *kwargs, *frame;
        if (!PyArg_ParseTuple(given, "O!OOOO:enter", Object<Site>::type, &site, &module, &args, &kwargs, &frame))
            throw PythonError();
        GivenArguments now(args, functions::or_null(kwargs));
        Object<ModuleCalls>::in(self).enter(site, module, now, functions::or_null(frame));
        return to_object(now.if_replaced());
    });
}

inline PyObject *leave(PyObject *self, PyObject *given) {
    return to_python([&] {
        PyObject *site, *result;
        if (!PyArg_ParseTuple(given, "O!O:leave", Object<Site>::type, &site, &result)) throw PythonError();
        return Object<ModuleCalls>::in(self).leave(site, result);
    });
}

inline PyObject *next_step(PyObject *self, PyObject *) {
    Object<ModuleCalls>::in(self).next_step();
    return none().release();
}

// graft(grafts): what takes the place of arguments and results from now on, or None.
inline PyObject *use_grafts(PyObject *self, PyObject *grafts) {
    return to_python([&] {
        read_object(grafts, Object<ModuleCalls>::in(self).graft.grafts);
        return none();
    });
}

template <class Hook>
int init_hook(PyObject *self, PyObject *args, PyObject *) {
    return to_status([&] {
        PyObject *modules, *site, *watched, *action, *resync;
        if (!PyArg_ParseTuple(args, "O!O!O!OO", Object<ModuleCalls>::type, &modules, Object<Site>::type, &site,
                              Object<WatchedModule>::type, &watched, &action, &resync))
            throw PythonError();
        Hook &hook = Object<Hook>::in(self);
        hook.modules = Ref::shared(modules), hook.engine = Object<ModuleCalls>::in(modules).engine;
        hook.site = Ref::shared(site), hook.watched = Ref::shared(watched), hook.resync = Ref::shared(resync);
        read_object(action, hook.action);
    });
}

inline Ref in_python(PyObject *self, PyObject *args, PyObject *kwargs) {
    return Ref::made(PyObject_Call(attribute(self, compilers->call), args, kwargs));
}

// Called with the module, its arguments and, if it was registered with them, the keyword arguments.
inline PyObject *before(PyObject *self, PyObject *args, PyObject *kwargs) {
    return to_python([&] {
        const Ref alive = Ref::shared(self);
        const Py_ssize_t count = PyTuple_Size(args);
        if (kwargs || count < 2 || count > 3 || !compilers->are_idle()) return in_python(self, args, kwargs);
        PyObject *named = count == 3 ? functions::or_null(PyTuple_GetItem(args, 2)) : nullptr;
        const Ref instead =
            Object<BeforeHook>::in(self).before(PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 1), named, 0);
        if (count == 2 && instead && PyTuple_Check(instead.get()))  // torch takes no keyword arguments back
            return Ref::shared(PyTuple_GetItem(instead, 0));
        return to_object(instead);
    });
}

inline PyObject *run_before(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    return to_python([&] {
        const Ref alive = Ref::shared(self);
        expect(count, 3);
        return to_object(Object<BeforeHook>::in(self).before(given[0], given[1], functions::or_null(given[2]), 1));
    });
}

// The result is the last argument, with or without keyword arguments before it.
inline PyObject *after(PyObject *self, PyObject *args, PyObject *kwargs) {
    return to_python([&] {
        const Ref alive = Ref::shared(self);
        const Py_ssize_t count = PyTuple_Size(args);
        if (kwargs || count < 3 || !compilers->are_idle()) return in_python(self, args, kwargs);
        return to_object(Object<AfterHook>::in(self).after(PyTuple_GetItem(args, count - 1)));
    });
}

inline PyObject *run_after(PyObject *self, PyObject *result) {
    return to_python([&] {
        const Ref alive = Ref::shared(self);
        return to_object(Object<AfterHook>::in(self).after(result));
    });
}

template <class Hook, class Run>
void add_hook(PyObject *module, const char *name, Run call, PyMethodDef *methods) {
    static PyGetSetDef attributes[] = {
        {"engine", [](PyObject *self, void *) { return to_object(Object<Hook>::in(self).engine).release(); }, nullptr,
         nullptr, nullptr},
        {"site", [](PyObject *self, void *) { return to_object(Object<Hook>::in(self).site).release(); }, nullptr,
         nullptr, nullptr},
        {},
    };
    Object<Hook>::add_to(module, name, {slot(Py_tp_init, init_hook<Hook>), slot(Py_tp_call, call),
                                        slot(Py_tp_methods, methods), slot(Py_tp_getset, attributes)});
}

}  // namespace modules

inline void add_modules(PyObject *module) {
    static PyMethodDef methods[] = {
        {"enter", modules::enter, METH_VARARGS, nullptr},
        {"leave", modules::leave, METH_VARARGS, nullptr},
        {"graft", modules::use_grafts, METH_O, nullptr},
        {"next_step", modules::next_step, METH_NOARGS, nullptr},
        {},
    };
    static PyMethodDef of_before[] = {{"run", fast(modules::run_before), METH_FASTCALL, nullptr}, {}};
    static PyMethodDef of_after[] = {{"run", modules::run_after, METH_O, nullptr}, {}};
    static PyGetSetDef of_watched[] = {
        member_of<WatchedModule, &WatchedModule::before>("before"),
        member_of<WatchedModule, &WatchedModule::after>("after"),
        member_of<WatchedModule, &WatchedModule::children>("children"),
        member_of<WatchedModule, &WatchedModule::called>("called"),
        {},
    };
    Object<ModuleCalls>::add_to(module, ASTRAY_MODULE ".ModuleCalls",
                            {slot(Py_tp_init, init_modules), slot(Py_tp_methods, methods)});
    Object<WatchedModule>::add_to(module, ASTRAY_MODULE ".WatchedModule",
                                 {slot(Py_tp_init, WatchedModule::init), slot(Py_tp_getset, of_watched)});
    modules::add_hook<BeforeHook>(module, ASTRAY_MODULE ".BeforeHook", modules::before, of_before);
    modules::add_hook<AfterHook>(module, ASTRAY_MODULE ".AfterHook", modules::after, of_after);
}

}  // namespace astray
