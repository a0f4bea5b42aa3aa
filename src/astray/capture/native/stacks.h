// Walks Python stacks, and finds the ids of known ones; `Stacks` in capture/stacks.py records new ones.
//
// The key of a stack is the id of its enclosing stack, its code objects and their instructions. It is looked up without
// making Python objects.

#pragma once

#include "python.h"

#include <unordered_map>
#include <vector>

namespace astray {

// Caches what a Python function returns for each code object: True, False or None.
class CodeTable {
public:
    PyObject *ask(const Ref &code, PyObject *classify) {
        const auto found = known_.find(code.get());
        if (found != known_.end()) return found->second.second;
        const Ref answer = call(classify, code.get());  // the table may grow meanwhile
        return known_.emplace(code.get(), std::make_pair(code, answer)).first->second.second;
    }

private:
    // Each is kept alive, so that its address is not reused.
    std::unordered_map<PyObject *, std::pair<Ref, Ref>> known_;
};

inline Ref code_of(PyObject *frame) {
    return Ref::made(reinterpret_cast<PyObject *>(PyFrame_GetCode(reinterpret_cast<PyFrameObject *>(frame))));
}

// The frame around one; empty when there is none.
inline Ref frame_around(PyObject *frame) {
    return Ref::owned(reinterpret_cast<PyObject *>(PyFrame_GetBack(reinterpret_cast<PyFrameObject *>(frame))));
}

// The innermost frame of Python; empty where there is none, as on autograd's own threads.
inline Ref innermost_frame() { return Ref::shared(reinterpret_cast<PyObject *>(PyEval_GetFrame())); }

inline int64_t instruction_of(PyObject *frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(reinterpret_cast<PyFrameObject *>(frame));
#else
    static const Ref *lasti = new Ref(interned("f_lasti"));
    return integer(attribute(frame, *lasti));
#endif
}

class StackWalk {
public:
    // `is_internal` says whether frames of a code object are ignored; `add` records a new stack.
    Ref is_internal, add;

    template <class Visit>
    void each(Visit visit) {
        visit(is_internal);
        visit(add);
    }

    static constexpr int64_t kOuterNotFound = -1;

    // The id of the stack of `frame`. `outer` is an outer frame, whose stack has an id; `kOuterNotFound` when it is not
    // on the stack: the call it was running has ended without its hook.
    int64_t capture(PyObject *frame, PyObject *outer, std::optional<int64_t> outer_id) {
        Borrowed borrowed{key_, std::move(key_)};
        std::vector<int64_t> &key = borrowed.own;
        key.assign(1, outer_id.value_or(-1));
        uint64_t hash = mixed(0xCBF29CE484222325u, key[0]);
        Ref inner = Ref::shared(frame);
        while (inner && inner.get() != outer) {
            const Ref code = code_of(inner);
            if (codes_.ask(code, is_internal) != Py_True)
                for (const int64_t part : {static_cast<int64_t>(reinterpret_cast<intptr_t>(code.get())),
                                           instruction_of(inner)}) {
                    key.push_back(part);
                    hash = mixed(hash, part);
                }
            inner = frame_around(inner);
        }
        if (inner.get() != outer) return kOuterNotFound;
        if (const Known *known = find(hash, key)) return known->id;
        const int64_t id = integer(call(add, or_none(frame), or_none(outer), to_object(outer_id).get()));
        // Another thread may have added it.
        if (!find(hash, key)) known_.emplace(hash, Known{key, id});
        return id;
    }

    static int init(PyObject *self, PyObject *args, PyObject *) {
        return to_status([&] {
            PyObject *is_internal, *add;
            if (!PyArg_ParseTuple(args, "OO:StackWalk", &is_internal, &add)) throw PythonError();
            StackWalk &walk = Object<StackWalk>::in(self);
            walk.is_internal = Ref::shared(is_internal), walk.add = Ref::shared(add);
        });
    }

    static PyObject *run(PyObject *self, PyObject *args, PyObject *) {
        return to_python([&] {
            PyObject *frame, *outer = Py_None, *outer_id = Py_None;
            if (!PyArg_ParseTuple(args, "O|OO:capture", &frame, &outer, &outer_id)) throw PythonError();
            std::optional<int64_t> id;
            read_object(outer_id, id);
            const auto or_null = [](PyObject *object) { return object == Py_None ? nullptr : object; };
            const int64_t found = Object<StackWalk>::in(self).capture(or_null(frame), or_null(outer), id);
            return found == kOuterNotFound ? none() : to_object(found);
        });
    }

private:
    struct Known {
        std::vector<int64_t> key;
        int64_t id;
    };

    // A vector that goes back when it is done with, so that its memory is used again.
    struct Borrowed {
        std::vector<int64_t> &home, own;
        ~Borrowed() { home = std::move(own); }
    };

    static PyObject *or_none(PyObject *object) { return object ? object : Py_None; }
    static uint64_t mixed(uint64_t hash, int64_t part) {
        hash = (hash ^ static_cast<uint64_t>(part)) * 0x9E3779B97F4A7C15u;
        return hash ^ (hash >> 29);
    }
    const Known *find(uint64_t hash, const std::vector<int64_t> &key) const {
        const auto [begin, end] = known_.equal_range(hash);
        for (auto at = begin; at != end; ++at)
            if (at->second.key == key) return &at->second;
        return nullptr;
    }

    CodeTable codes_;
    std::vector<int64_t> key_;
    std::unordered_multimap<uint64_t, Known> known_;
};

inline void add_stacks(PyObject *module) {
    Object<StackWalk>::add_to(module, ASTRAY_MODULE ".StackWalk",
                              {slot(Py_tp_init, StackWalk::init), slot(Py_tp_call, StackWalk::run)});
}

}  // namespace astray
