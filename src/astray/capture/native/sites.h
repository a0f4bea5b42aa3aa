// The sites of calls, and calls that have started.

#pragma once

#include "python.h"

#include <array>
#include <memory>

namespace astray {

enum class Phase : uint8_t { forward, backward, update };

constexpr std::array<const char *, 3> kPhaseNames = {"forward", "backward", "update"};

inline PyObject *name_of(Phase phase) {
    static const auto *names = new std::array<Ref, 3>{interned("forward"), interned("backward"), interned("update")};
    return (*names)[static_cast<size_t>(phase)];
}

inline bool is_text(PyObject *value, const char *text) {
    return PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, text) == 0;
}

inline Phase phase_of(PyObject *name) {
    for (size_t i = 0; i < kPhaseNames.size(); ++i)
        if (name == name_of(static_cast<Phase>(i)) || is_text(name, kPhaseNames[i])) return static_cast<Phase>(i);
    raise(PyExc_KeyError, "%R", name);
}

inline Ref to_object(Phase phase) { return Ref::shared(name_of(phase)); }
inline void read_object(PyObject *given, Phase &phase) { phase = phase_of(given); }

// Counts the calls of one site name within the current micro step: for each phase, and separately for recomputations.
// Earlier micro steps are not kept: a generation loop may have millions.
class Numbers {
public:
    int64_t next(Phase phase, bool again, int64_t step, int64_t micro) {
        Count &count = counts_[2 * static_cast<size_t>(phase) + again];
        if (count.step != step || count.micro != micro) count = {step, micro, 0};
        return count.next++;
    }

private:
    struct Count {
        int64_t step = 0, micro = 0, next = 0;
    };
    std::array<Count, 6> counts_;
};

// Where in the program calls happen: a module, function or op.
//
// `root` is the outermost module it belongs to, `module` the name of the module itself, of the one that encloses a
// function, or of the one that owns a parameter. `wanted` was decided by the selection `decided_by`, and is decided
// again for another one. `numbers` counts its calls, together with other sites of its name; `inner_sites` are the sites
// of what is called in it.
struct Site {
    Ref name, type, root, kind, module, decided_by, inner_sites;
    bool wanted = true, is_module = true;
    std::shared_ptr<Numbers> numbers;

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&name, &type, &root, &kind, &module, &decided_by, &inner_sites}) visit(*one);
    }

    static int init(PyObject *self, PyObject *args, PyObject *kwargs) {
        return to_status([&] {
            static const char *names[] = {"name", "type", "root", "kind", "module", nullptr};
            PyObject *name, *type, *root, *kind = nullptr, *module = Py_None;
            if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UUU|UO:Site", const_cast<char **>(names), &name, &type,
                                             &root,
                                             &kind, &module))
                throw PythonError();
            Site &site = Object<Site>::in(self);
            site.name = Ref::shared(name), site.type = Ref::shared(type), site.root = Ref::shared(root);
            site.kind = kind ? Ref::shared(kind) : interned("module");
            site.module = Ref::shared(module == Py_None ? name : module);
            site.inner_sites = Ref::made(PyDict_New());
            site.is_module = is_text(site.kind, "module");
        });
    }
};

// A call that has started: what the calls inside it and its backward need to know of it.
//
// `recorded` says whether anything of it is recorded, `seq` is the number of its row, or −1. `anchor` is the number of
// the innermost call that has a row, this one or one around it.
struct OpenCall {
    Ref site, frame;
    Ref input_edges;  // where its inputs are in the autograd graph, while it runs and its gradients are watched
    Ref runs_inner;   // of a wrapper: whether what it wraps is running; of an optimizer: whether a closure runs in it
    int64_t step = 0, micro = 0, seq = -1, number = 0;
    std::optional<int64_t> parent, anchor, stack;
    Phase phase = Phase::forward;
    bool recompute = false, recorded = false;

    bool has_row() const { return seq >= 0; }
    Site &site_data() const { return Object<Site>::in(site); }

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&site, &frame, &input_edges, &runs_inner}) visit(*one);
    }
};

inline void add_sites(PyObject *module) {
    static PyGetSetDef of_sites[] = {
        member_of<Site, &Site::name>("name"),     member_of<Site, &Site::type>("type"),
        member_of<Site, &Site::root>("root"),     member_of<Site, &Site::kind>("kind"),
        member_of<Site, &Site::module>("module"), member_of<Site, &Site::decided_by>("decided_by"),
        member_of<Site, &Site::inner_sites>("inner_sites"), member_of<Site, &Site::wanted>("wanted"),
        {},
    };
    static PyGetSetDef of_calls[] = {
        member_of<OpenCall, &OpenCall::site>("site"),           member_of<OpenCall, &OpenCall::frame>("frame"),
        member_of<OpenCall, &OpenCall::input_edges>("input_edges"),     member_of<OpenCall,
            &OpenCall::runs_inner>("runs_inner"),
        member_of<OpenCall, &OpenCall::step>("step"),           member_of<OpenCall, &OpenCall::micro>("micro"),
        member_of<OpenCall, &OpenCall::seq>("seq"),             member_of<OpenCall, &OpenCall::number>("number"),
        member_of<OpenCall, &OpenCall::parent>("parent"),       member_of<OpenCall, &OpenCall::anchor>("anchor"),
        member_of<OpenCall, &OpenCall::stack>("stack"),         member_of<OpenCall, &OpenCall::phase>("phase"),
        member_of<OpenCall, &OpenCall::recompute>("recompute"), member_of<OpenCall, &OpenCall::recorded>("recorded"),
        {},
    };
    Object<Site>::add_to(module, ASTRAY_MODULE ".Site",
                         {slot(Py_tp_init, Site::init), slot(Py_tp_getset, of_sites)});
    Object<OpenCall>::add_to(module, ASTRAY_MODULE ".OpenCall", {slot(Py_tp_getset, of_calls)});
}

}  // namespace astray
