// Finds the module call that the backward pass is in: the one whose forward made the running autograd node.
//
// Autograd numbers its nodes as they are made. Each module call notes the number at which it starts and ends, so a
// node's number says between which of these marks it was made. Needed by the function and op levels, where the backward
// pass makes calls of its own.

#pragma once

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "python.h"

namespace astray {

class NodeOrigins {
public:
    bool wanted = false;

    // Nodes made from now on belong to `call`; to none when it is empty.
    void mark(const Ref &call) {
        if (!wanted || !at::GradMode::is_enabled()) return;
        auto &marks = by_thread_[PyThread_get_thread_ident()];
        if (!marks) marks = std::make_shared<Marks>();
        latest_ = marks;
        marks->push_back({at::sequence_number::peek(), call});
        if (marks->size() <= kMost) return;
        const Marks gone(marks->begin(), marks->begin() + kMost / 2);  // destroyed after they have left the list
        marks->erase(marks->begin(), marks->begin() + kMost / 2);
    }

    // The call whose forward made the running node; empty for nodes made outside of modules.
    Ref current() const {
        const auto node = torch::autograd::get_current_node();
        if (!node) return Ref();
        const auto own = by_thread_.find(PyThread_get_thread_ident());
        const std::shared_ptr<Marks> marks = own == by_thread_.end() ? latest_ : own->second;
        if (!marks) return Ref();
        const auto is_after = [](uint64_t number, const Mark &mark) { return number < mark.number; };
        const auto after = std::upper_bound(marks->begin(), marks->end(), node->sequence_nr(), is_after);
        return after == marks->begin() ? Ref() : std::prev(after)->call;
    }

    // Ends the step.
    void clear() {
        const auto gone = std::exchange(by_thread_, {});
        latest_.reset();
    }

    static PyObject *make(PyTypeObject *, PyObject *, PyObject *) {
        return to_python([] { return Box<NodeOrigins>::make(); });
    }
    static PyObject *py_clear(PyObject *self, PyObject *) {
        Box<NodeOrigins>::in(self).clear();
        return none().release();
    }
    static PyObject *get_wanted(PyObject *self, void *) { return PyBool_FromLong(Box<NodeOrigins>::in(self).wanted); }
    static int set_wanted(PyObject *self, PyObject *given, void *) {
        return to_status([&] { Box<NodeOrigins>::in(self).wanted = is_true(given); });
    }

private:
    static constexpr size_t kMost = 100000;  // marks of one thread; a program that never ends a step forgets its oldest

    struct Mark {
        uint64_t number;
        Ref call;
    };
    using Marks = std::vector<Mark>;  // of one thread, whose nodes have numbers of their own

    std::unordered_map<unsigned long, std::shared_ptr<Marks>> by_thread_;
    std::shared_ptr<Marks> latest_;  // for backward threads, which made no nodes themselves
};

inline void add_origins(PyObject *module) {
    static PyMethodDef methods[] = {{"clear", NodeOrigins::py_clear, METH_NOARGS, nullptr}, {}};
    static PyGetSetDef attributes[] = {
        {"wanted", NodeOrigins::get_wanted, NodeOrigins::set_wanted, nullptr, nullptr}, {}};
    Box<NodeOrigins>::add_to(module, ASTRAY_MODULE ".NodeOrigins",
                         {slot(Py_tp_new, NodeOrigins::make), slot(Py_tp_methods, methods),
                          slot(Py_tp_getset, attributes)});
}

}  // namespace astray
