// Numbers the calls of a running program and writes their rows; the native base class of `Engine`.
//
// The GIL is held throughout and released only where Python is called, so no lock is needed to number a call.

#pragma once

#include <string>
#include <unordered_map>

#include "sites.h"
#include "stacks.h"
#include "observer.h"

namespace astray {

// The names of attributes that are read or called in the engine and the writer.
struct CallNames {
    Ref batch_ready = interned("batch_ready"), call_row = interned("call_row"), failed = interned("failed"),
        follows = interned("_follows_recorded"), is_in_scope = interned("_is_in_scope"),
        on_call_end = interned("on_call_end"), outermost = interned("_outermost_micro"),
        row_buffers = interned("row_buffers"), wants = interned("wants");
};

inline const CallNames &call_names() {
    static const CallNames *known = new CallNames();  // for as long as the program runs
    return *known;
}

// A set of phases.
struct Phases {
    uint8_t bits = 0;

    bool has(Phase phase) const { return bits >> static_cast<int>(phase) & 1; }
};

inline Ref to_object(const Phases &phases) {
    Ref set = Ref::made(PyFrozenSet_New(nullptr));
    for (size_t i = 0; i < kPhaseNames.size(); ++i)
        if (phases.has(static_cast<Phase>(i))) check(PySet_Add(set, name_of(static_cast<Phase>(i))));
    return set;
}
inline void read_object(PyObject *given, Phases &phases) {
    phases.bits = 0;
    for (size_t i = 0; i < kPhaseNames.size(); ++i)
        if (check(PySequence_Contains(given, name_of(static_cast<Phase>(i))))) phases.bits |= 1 << i;
}

class Calls {
public:
    Ref writer, stack_walk, row_buffer, selection, scope;
    Ref micros;   // the micro step of the last outermost forward call, by root: a dict
    Ref backward_micro;  // the micro step of the call whose backward ran last, by root: a dict
    Ref called_modules;   // the modules in which something was recorded in this step: a set
    ObserverHandle tensors;
    int64_t step = 0, latest_micro = 0;
    Phases phases;
    // `recording` is false whenever a hook should cost nothing; `listening` stays true when only gradients and updates
    // are still taken. `in_own_process` is false in a forked child, such as a DataLoader's worker, which must not
    // record.
    bool recording = false, listening = false, in_own_process = true, forward_ended = false, by_module = false,
        paused = false;
    // Whether gradients of calls are read, or only those of parameters. It may change between steps.
    bool reads_call_gradients = true;

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&writer, &stack_walk, &selection, &scope, &micros, &backward_micro,
                         &called_modules}) visit(*one);
        tensors.each(visit);
        for (auto &[_, calls] : open_)
            for (Ref &call : calls) visit(call);
    }

    static Calls &of(PyObject *engine) { return Object<Calls>::in(engine); }

    // The open calls of this thread.
    std::vector<Ref> &open() {
        const unsigned long thread = PyThread_get_thread_ident();
        if (thread != latest_thread_ || !latest_open_) latest_thread_ = thread, latest_open_ = &open_[thread];
        return *latest_open_;
    }
    // The innermost of them; empty when there is none.
    Ref enclosing() { return open().empty() ? Ref() : open().back(); }
    Ref innermost(PyObject *site) {
        const auto &calls = open();
        for (size_t at = calls.size(); at--;)
            if (call_in(calls[at]).site.get() == site) return calls[at];
        return Ref();
    }

    static OpenCall &call_in(PyObject *call) { return Object<OpenCall>::in(call); }

    int64_t next_seq() { return seq_++; }

    // A call starts. `frame` is the innermost frame of the call that the stack should start from.
    //
    // Calls inside it refer to it from now on. Its own row is written by `begin`, if it is `recorded`. `micro`
    // overrides the micro step of the enclosing calls. Without `row` it only encloses other calls.
    Ref enter(PyObject *site, PyObject *frame, Phase phase = Phase::forward, bool recompute = false,
              std::optional<int64_t> micro = {}, bool row = true) {
        Ref outer;
        const int64_t stack = stack_of(frame, outer);
        const OpenCall *around = outer ? &call_in(outer) : nullptr;
        const int64_t counted = micro ? *micro : micro_of(Object<Site>::in(site), around, recompute);
        Ref made = open_call(site, phase, counted, around ? around->anchor : std::nullopt, stack);
        call_in(made).frame = Ref::shared(frame);
        call_in(made).recompute = recompute;
        if (row) admit(call_in(made));
        open().push_back(made);
        return made;
    }

    // A call starts that the backward pass makes: inside the backward of `forward`, when that is known.
    Ref enter_backward(PyObject *site, const OpenCall *forward, int64_t micro) {
        Ref made = open_call(site, Phase::backward, micro, forward ? forward->anchor : std::nullopt,
                             forward ? forward->stack : std::nullopt);
        admit(call_in(made));
        open().push_back(made);
        return made;
    }

    // Writes the row of a call that has one. `args` is the structure of its arguments, or None.
    void begin(const OpenCall &call, PyObject *args) {
        CallRow row{};
        row.seq = call.seq, row.step = call.step;
        row.micro = static_cast<int32_t>(call.micro), row.call = static_cast<int32_t>(call.number);
        row.parent = call.parent.value_or(-1), row.stack = call.stack.value_or(-1);
        row.recompute = call.recompute;
        write(row, call.site_data(), call.phase, args);
    }

    // A call ends; calls inside it that an exception left open end with it.
    void leave(PyObject *call) {
        auto &calls = open();
        const Ref held = Ref::shared(call);
        if (!calls.empty() && calls.back().get() == call) {
            drop_last(calls);
            // Nothing that it still refers to refers back to it, so the garbage collector need not track it. A thousand
            // of them live from a forward to its backward.
            if (!call_in(call).input_edges && PyObject_GC_IsTracked(call)) PyObject_GC_UnTrack(call);
        } else if (std::any_of(calls.begin(), calls.end(), [&](const Ref &one) { return one.get() == call; })) {
            while (!calls.empty() && calls.back().get() != call) drop_last(calls);
            if (!calls.empty()) drop_last(calls);
        }
        if (scope) call_method(scope, call_names().on_call_end, call_in(call).site_data().name.get());
    }

    // The same when an error may be set, which is kept. An error in here is reported, and raised only if it is the
    // program's.
    void leave_anyhow(PyObject *call) {
        SavedError before;
        attempt([&] { leave(call); }, "the end of ", call_in(call).site_data().name);
        before.restore();
    }

    // Whether the gradients that come to a forward call should be seen, where gradients are on.
    //
    // If none are read, only those of outermost calls: recomputations by checkpointing and gradients of parameters
    // belong to the micro step of the outermost call whose backward ran last.
    bool follows_gradients(const OpenCall &call) const {
        return !call.parent || (phases.has(Phase::backward) && reads_call_gradients);
    }

    // The backward of a forward call starts: its number.
    int64_t backward(const OpenCall &forward) {
        check(PyDict_SetItem(backward_micro, forward.site_data().root, to_object(forward.micro)));
        if (!phases.has(Phase::backward) || !reads_call_gradients) return -1;
        CallRow row{};
        row.seq = next_seq(), row.step = forward.step;
        row.micro = static_cast<int32_t>(forward.micro), row.call = static_cast<int32_t>(forward.number);
        row.parent = forward.has_row() ? forward.seq : -1, row.stack = forward.stack.value_or(-1);
        row.recompute = forward.recompute;
        write(row, forward.site_data(), Phase::backward, Py_None);
        return row.seq;
    }

    // An event that is not a call of a function, such as a parameter receiving its gradient. Returns its number.
    //
    // An update belongs to the whole step and to none of its micro steps: another program may have more or fewer.
    int64_t event(PyObject *site_object, Phase phase, std::optional<int64_t> parent = {},
                  std::optional<int64_t> stack = {},
                  PyObject *args = Py_None) {
        Site &site = Object<Site>::in(site_object);
        const int64_t micro = phase == Phase::update ? 0 : micro_of_event(site);
        CallRow row{};
        row.call = static_cast<int32_t>(next_number(site, micro, false, phase));
        if (!phases.has(phase) || !wants(site_object) || belongs_to_excluded_module(site)) return -1;
        row.seq = next_seq(), row.step = step, row.micro = static_cast<int32_t>(micro);
        row.parent = parent.value_or(-1), row.stack = stack.value_or(-1);
        write(row, site, phase, args);
        return row.seq;
    }

    // Whether the settings ask for a site, which Python decides once for each.
    bool wants(PyObject *site_object) {
        Site &site = Object<Site>::in(site_object);
        if (site.decided_by.get() == selection.get()) return site.wanted;
        return is_true(call_method(self(), call_names().wants, site_object));
    }

    // Runs `work`; an error is reported to the engine and kept out of the program, unless it is the program's own: an
    // interrupt, or an exception of one of its signal handlers, which the engine recognises. Returns false after an
    // error.
    template <class Work>
    bool attempt(Work work, const char *doing, PyObject *of) {
        try {
            work();
            return true;
        } catch (...) {
            set_error();
            report_error(doing, of);
            return false;
        }
    }

    // Reports the error that is set to the engine, and clears it.
    void report_error(const char *doing, PyObject *of) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();
        const Ref error = SavedError().exception();
        call_method(self(), call_names().failed, Ref::made(PyUnicode_FromFormat("%s%S", doing, of)).get(), error.get());
    }

    PyObject *self() { return Object<Calls>::around(*this); }

    void use(PyObject *row_writer, PyObject *walk) {
        writer = Ref::shared(row_writer), stack_walk = Ref::shared(walk);
        micros = Ref::made(PyDict_New()), backward_micro = Ref::made(PyDict_New()),
            called_modules = Ref::made(PySet_New(nullptr));
        const Ref buffers = attribute(writer, call_names().row_buffers);
        PyObject *calls, *others;
        if (buffers.get() == Py_None) return;
        if (!PyArg_ParseTuple(buffers, "OOn", &calls, &others, &batch_)) throw PythonError();
        row_buffer = Ref::shared(calls);
        appending_ = find_appending();
        if (appending_ && !appending_->are_calls(row_buffer)) appending_ = nullptr;
    }

private:
    // Removes the last open call, and its reference to its frame, which holds all locals of its function.
    static void drop_last(std::vector<Ref> &calls) {
        const Ref last = std::move(calls.back());
        calls.pop_back();
        const Ref frame = std::move(call_in(last).frame);
    }

    // The stack of a call, and the enclosing open call, after removing open calls that are not on this stack.
    int64_t stack_of(PyObject *frame, Ref &outer) {
        StackWalk &stacks = Object<StackWalk>::in(stack_walk);
        while ((outer = enclosing())) {  // the last may be one that was interrupted
            const OpenCall &around = call_in(outer);
            const int64_t stack = stacks.capture(frame, around.frame, around.stack);
            if (stack != StackWalk::kOuterNotFound) return stack;
            auto &calls = open();
            if (!calls.empty() && calls.back().get() == outer.get()) drop_last(calls);
        }
        return stacks.capture(frame, nullptr, std::nullopt);
    }

    int64_t micro_of(const Site &site, const OpenCall *outer, bool recompute) {
        if (outer && (!site.is_module || outer->site_data().is_module)) return outer->micro;
        if (!site.is_module) return latest_micro;
        return integer(call_method(self(), call_names().outermost, site.root.get(), to_object(recompute).get()));
    }

    int64_t micro_of_event(const Site &site) const {
        for (const Ref &known : {backward_micro, micros}) {
            PyObject *micro = PyDict_GetItemWithError(known, site.root);
            if (micro) return integer(micro);
            if (PyErr_Occurred()) throw PythonError();
        }
        return 0;
    }

    bool belongs_to_excluded_module(const Site &site) const {
        if (!by_module && !forward_ended) return false;
        const bool of_parameter = is_text(site.kind, "parameter") || is_text(site.kind, "optimizer");
        if (!of_parameter || PyUnicode_Compare(site.module, site.name) == 0) return false;
        return !check(PySet_Contains(called_modules, site.module));
    }

    Ref open_call(PyObject *site, Phase phase, int64_t micro, std::optional<int64_t> parent,
                  std::optional<int64_t> stack) {
        Ref made = Object<OpenCall>::make();
        OpenCall &call = call_in(made);
        call.site = Ref::shared(site);
        call.step = step, call.micro = micro, call.phase = phase;
        call.parent = call.anchor = parent, call.stack = stack;
        return made;
    }

    int64_t next_number(Site &site, int64_t micro, bool recompute, Phase phase) {
        if (!site.numbers) {
            Ref owned;
            const Text name = text_of(site.name, owned);
            auto &numbers = numbers_[std::string(name.data, static_cast<size_t>(name.size))];
            if (!numbers) numbers = std::make_shared<Numbers>();
            site.numbers = numbers;
        }
        return site.numbers->next(phase, recompute, step, micro);
    }

    // Decides whether a call is recorded, and numbers it: among those of its site, recorded or not.
    void admit(OpenCall &call) {
        Site &site = call.site_data();
        call.number = next_number(site, call.micro, call.recompute, call.phase);
        if (scope || !recording) {  // seldom: Python answers whether it is in scope, and follows
            PyObject *object = Object<OpenCall>::around(call);
            if (!is_true(call_method(self(), scope ? call_names().is_in_scope : call_names().follows, object))) return;
        }
        if (!wants(call.site)) return;
        call.recorded = true;
        check(PySet_Add(called_modules, site.module));
        if (phases.has(call.phase)) call.seq = next_seq(), call.anchor = call.seq;
    }

    void write(CallRow &row, const Site &site, Phase phase, PyObject *args) {
        if (!appending_) {
            const auto or_none = [](int64_t number) { return number < 0 ? none() : to_object(number); };
            const Ref tuple = Ref::made(Py_BuildValue(
                "LLiOOOiOOOOO", static_cast<long long>(row.seq), static_cast<long long>(row.step), row.micro,
                    site.kind.get(),
                site.name.get(), site.type.get(), row.call, name_of(phase), or_none(row.parent).get(),
                or_none(row.stack).get(), args, row.recompute ? Py_True : Py_False));
            call_method(writer, call_names().call_row, tuple.get());
            return;
        }
        Ref owned[4];
        row.kind = text_of(site.kind, owned[0]), row.site = text_of(site.name, owned[1]);
        row.type = text_of(site.type, owned[2]), row.phase = text_of(name_of(phase), owned[0]);
        if (args != Py_None) row.args = text_of(args, owned[3]);
        const Py_ssize_t count = appending_->append_call(row_buffer, &row);
        if (count < 0) throw PythonError();
        if (count >= batch_) call_method(writer, call_names().batch_ready, row_buffer.get());
    }

    const Appending *appending_ = nullptr;  // appends rows to `row_buffer`; nullptr when the writer takes each row
    Py_ssize_t batch_ = 0;
    int64_t seq_ = 0;
    std::unordered_map<std::string, std::shared_ptr<Numbers>> numbers_;  // by the names of sites
    std::unordered_map<unsigned long, std::vector<Ref>> open_;           // by thread
    unsigned long latest_thread_ = 0;
    std::vector<Ref> *latest_open_ = nullptr;
};

// ---- as Python sees it: see _torch.pyi -----------------------------------------------------------------------------

namespace calls {

inline int init(PyObject *self, PyObject *args, PyObject *) {
    return to_status([&] {
        PyObject *writer, *stack_walk;
        if (!PyArg_ParseTuple(args, "OO!:Calls", &writer, Object<StackWalk>::type, &stack_walk)) throw PythonError();
        Calls::of(self).use(writer, stack_walk);
    });
}

inline PyObject *enter(PyObject *self, PyObject *args, PyObject *kwargs) {
    return to_python([&] {
        static const char *names[] = {"site", "frame", "phase", "recompute", "micro", "row", nullptr};
        PyObject *site, *frame, *phase = name_of(Phase::forward), *micro = Py_None;
        int recompute = 0, row = 1;
        if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|$OpOp:enter", const_cast<char **>(names),
                                         Object<Site>::type,
                                         &site, &frame, &phase, &recompute, &micro, &row))
            throw PythonError();
        std::optional<int64_t> known;
        read_object(micro, known);
        return Calls::of(self).enter(site, frame == Py_None ? nullptr : frame, phase_of(phase), recompute, known, row);
    });
}

inline PyObject *begin(PyObject *self, PyObject *args) {
    return to_python([&] {
        PyObject *call, *skeleton;
        if (!PyArg_ParseTuple(args, "OO:begin", &call, &skeleton)) throw PythonError();
        Calls::of(self).begin(Object<OpenCall>::checked(call), skeleton);
        return none();
    });
}

inline PyObject *leave(PyObject *self, PyObject *call) {
    return to_python([&] {
        Object<OpenCall>::checked(call);
        Calls::of(self).leave(call);
        return none();
    });
}

inline PyObject *innermost(PyObject *self, PyObject *site) {
    return to_python([&] { return to_object(Calls::of(self).innermost(site)); });
}

inline PyObject *follows_gradients(PyObject *self, PyObject *call) {
    return to_python([&] { return to_object(Calls::of(self).follows_gradients(Object<OpenCall>::checked(call))); });
}

inline PyObject *backward(PyObject *self, PyObject *call) {
    return to_python([&] { return to_object(Calls::of(self).backward(Object<OpenCall>::checked(call))); });
}

inline PyObject *event(PyObject *self, PyObject *given, PyObject *kwargs) {
    return to_python([&] {
        static const char *names[] = {"site", "phase", "parent", "stack", "args", nullptr};
        PyObject *site, *phase, *parent = Py_None, *stack = Py_None, *args = Py_None;
        if (!PyArg_ParseTupleAndKeywords(given, kwargs, "O!O|O$OO:event", const_cast<char **>(names),
                                         Object<Site>::type,
                                         &site, &phase, &parent, &stack, &args))
            throw PythonError();
        std::optional<int64_t> around, id;
        read_object(parent, around);
        read_object(stack, id);
        return to_object(Calls::of(self).event(site, phase_of(phase), around, id, args));
    });
}

inline PyObject *next_seq(PyObject *self, PyObject *) { return PyLong_FromLongLong(Calls::of(self).next_seq()); }

inline PyObject *open_calls(PyObject *self, PyObject *) {
    return to_python([&] {
        Ref list = Ref::made(PyList_New(0));
        for (const Ref &call : Calls::of(self).open()) check(PyList_Append(list, call));
        return list;
    });
}

inline PyObject *set_observer(PyObject *self, PyObject *observer) {
    Calls::of(self).tensors.use(observer);
    return none().release();
}

inline PyObject *enclosing(PyObject *self, void *) {
    return to_python([&] { return to_object(Calls::of(self).enclosing()); });
}

}  // namespace calls

inline void add_calls(PyObject *module) {
    static PyMethodDef methods[] = {
        {"enter", with_names(calls::enter), METH_VARARGS | METH_KEYWORDS, nullptr},
        {"begin", calls::begin, METH_VARARGS, nullptr},
        {"leave", calls::leave, METH_O, nullptr},
        {"innermost", calls::innermost, METH_O, nullptr},
        {"follows_gradients", calls::follows_gradients, METH_O, nullptr},
        {"backward", calls::backward, METH_O, nullptr},
        {"event", with_names(calls::event), METH_VARARGS | METH_KEYWORDS, nullptr},
        {"_next_seq", calls::next_seq, METH_NOARGS, nullptr},
        {"_open_calls", calls::open_calls, METH_NOARGS, nullptr},
        {"_set_observer", calls::set_observer, METH_O, nullptr},
        {},
    };
    static PyGetSetDef attributes[] = {
        {"enclosing", calls::enclosing, nullptr, "The innermost open call, on this thread.", nullptr},
        member_of<Calls, &Calls::writer>("_writer"),
        member_of<Calls, &Calls::micros>("_micro"),
        member_of<Calls, &Calls::backward_micro>("_backward_micro"),
        member_of<Calls, &Calls::called_modules>("_called_modules"),
        member_of<Calls, &Calls::selection>("_selection"),
        member_of<Calls, &Calls::scope>("_scope"),
        member_of<Calls, &Calls::phases>("_phases"),
        member_of<Calls, &Calls::forward_ended>("_forward_ended"),
        member_of<Calls, &Calls::by_module>("_by_module"),
        member_of<Calls, &Calls::step>("step"),
        member_of<Calls, &Calls::latest_micro>("latest_micro"),
        member_of<Calls, &Calls::recording>("recording"),
        member_of<Calls, &Calls::listening>("listening"),
        member_of<Calls, &Calls::in_own_process>("in_own_process"),
        member_of<Calls, &Calls::paused>("paused"),
        member_of<Calls, &Calls::reads_call_gradients>("reads_call_gradients"),
        {},
    };
    Object<Calls>::add_to(module, ASTRAY_MODULE ".Calls",
                          {slot(Py_tp_init, calls::init), slot(Py_tp_methods, methods),
                           slot(Py_tp_getset, attributes)});
}

}  // namespace astray
