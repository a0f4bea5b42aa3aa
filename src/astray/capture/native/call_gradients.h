// The gradients of one forward call, recorded as the backward pass computes them.
//
// They live as long as the graph, whose hooks hold them, or until the recording stops and they are released. They never
// hold a node of the graph: a node holds its hooks, they hold this object, and the cycle would never be freed.
// Everything here runs with the GIL held, which may pass to another thread whenever Python is called.

#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "calls.h"
#include "gradient_tensor.h"  // of the framework

namespace astray {

// The base of the gradients of a call: recording, and release when the recording stops.
class PendingGradients {
public:
    PendingGradients(PyObject *engine, PyObject *call) : engine_(Ref::shared(engine)),
        call_(Ref::shared(call)) { ++live_count; }
    PendingGradients(const PendingGradients &) = delete;
    virtual ~PendingGradients() { --live_count; }

    // A graph may be freed on any thread, and after Python has ended.
    template <class Kind, class... Given>
    static std::shared_ptr<Kind> make(Given &&...given) {
        return {new Kind(std::forward<Given>(given)...), [](Kind *self) {
                    if (!Py_IsInitialized()) return;
                    const HeldGil gil;
                    delete self;
                }};
    }

    // Releases the engine and the call: the recording has stopped, though the graph may live on.
    virtual void release() { engine_ = call_ = Ref(); }
    bool is_released() const { return !engine_; }

    // The step has ended: incomplete sums are recorded as they are.
    virtual void finish_step() {}

    // Runs one observation, and keeps its errors out of the backward pass.
    template <class Action>
    void attempt(Action action) {
        if (is_released()) return;
        const Ref engine = engine_, call = call_;  // `action` may end the recording
        Calls &calls = Calls::of(engine);
        if (calls.paused || !calls.in_own_process) return;
        calls.attempt(action, "a gradient of ", Calls::call_in(call).site_data().name);
    }

    static inline std::atomic<long> live_count{0};

protected:
    // Records a gradient of the backward call `seq`, which is opened at the first of them.
    void record(std::optional<int64_t> &seq, Role role, PyObject *path, const Gradient &gradient) {
        if (is_released()) return;
        const Ref engine = engine_;
        Calls &calls = Calls::of(engine);
        if (!seq) seq = calls.backward(Calls::call_in(call_));
        const NotOfProgram not_of_program;
        observe_value(calls.tensors, {*seq, role, path}, gradient);
    }

    Ref engine_, call_;
};

// The gradients of any other call: arriving ones are seen at its outputs, sent ones at those of its nodes that lead to
// an input.
class CallGradients : public PendingGradients {
public:
    // An input that gradients are sent to.
    struct Target {
        size_t input;
        Ref path;
        int expected = 0, terms = 0;  // how many nodes send to it, and how many have
        Gradient total{};
    };
    struct Output {
        Ref path, passthrough;  // `passthrough` is the path of the input that this output is, if it is one
        bool arrived = false;
    };

    CallGradients(PyObject *engine, PyObject *call) : PendingGradients(engine, call) {}

    // The index of an input's target, which is added if there is none yet.
    size_t target_of(size_t input, const Ref &path) {
        for (size_t i = 0; i < targets.size(); ++i)
            if (targets[i].input == input) return i;
        targets.push_back({input, path});
        return targets.size() - 1;
    }

    // The gradient of an output is complete.
    void arrived(size_t index, const Gradient &gradient) {
        attempt([&] {
            Output &output = outputs[index];
            if (output.arrived) finish();  // a second backward through the same graph
            output.arrived = true;
            record(seq_, Role::input, output.path, gradient);
            if (output.passthrough) record(seq_, Role::output, output.passthrough, gradient);
        });
    }

    // One of the call's nodes has computed what it sends to an input.
    void sent(size_t index, const Gradient &gradient) {
        attempt([&] {
            Target &target = targets[index];
            if (target.expected == 1) {
                record(seq_, Role::output, target.path, gradient);
                return;
            }
            if (++target.terms == 1)
                target.total = gradient;
            else if (is_defined(target.total))
                target.total = add_up(Gradient(target.total), gradient);
            if (target.terms == target.expected) complete_one(target);
        });
    }

    // Nothing more will be sent to this input: the backward pass has reached the node that made it.
    void complete(size_t index) {
        attempt([&] { complete_one(targets[index]); });
    }

    void finish_step() override {
        for (const Target &target : targets)
            if (target.terms) {
                attempt([&] { finish(); });
                return;
            }
    }

    void release() override {
        PendingGradients::release();
        seq_.reset();
        for (Target &target : targets) target.total = Gradient();
    }

    std::vector<Target> targets;  // neither of the two changes once the hooks are in place
    std::vector<Output> outputs;

private:
    void complete_one(Target &target) {
        if (!target.terms || is_released()) return;
        const Gradient total = std::exchange(target.total, Gradient());
        target.terms = 0;
        if (is_defined(total)) {
            record(seq_, Role::output, target.path, total);
            return;
        }
        const Ref why = Ref::made(PyUnicode_FromString(
            "its parts are distributed in different ways, and to add them takes communication"));
        const Ref what = Ref::made(PyUnicode_FromFormat("a gradient that %U sends",
                                                        Calls::call_in(call_).site_data().name.get()));
        static const Ref *missed = new Ref(interned("missed"));
        call_method(Ref(engine_), *missed, what.get(), why.get());
    }

    // Ends this pass through the graph, and records incomplete sums.
    void finish() {
        for (Target &target : targets) complete_one(target);
        seq_.reset();
        for (Output &output : outputs) output.arrived = false;
    }

    std::optional<int64_t> seq_;  // of the current backward
};

// Every call whose graph still exists.
class LivingCalls {
public:
    void add(std::weak_ptr<PendingGradients> gradients) {
        living_.push_back(std::move(gradients));
        if (living_.size() <= sweep_above_) return;  // else a program that never ends a step
        forget_dead();
        sweep_above_ = std::max(kBeforeSweep, 2 * living_.size());
    }

    // Ends the step: incomplete sums are recorded as they are.
    void finish_step() {
        forget_dead();
        const auto living = living_;  // more may come while Python runs
        for (const auto &reference : living)
            if (const auto watched = reference.lock()) watched->finish_step();
    }

    // Makes every hook that is still in a graph do nothing from now on, and releases what it holds.
    void release() {
        const auto living = std::exchange(living_, {});
        for (const auto &reference : living)
            if (const auto watched = reference.lock()) watched->release();
    }

private:
    static constexpr size_t kBeforeSweep = 4096;  // calls that are tracked before dead ones are dropped

    void forget_dead() {
        const auto is_dead = [](const std::weak_ptr<PendingGradients> &reference) { return reference.expired(); };
        living_.erase(std::remove_if(living_.begin(), living_.end(), is_dead), living_.end());
    }

    std::vector<std::weak_ptr<PendingGradients>> living_;
    size_t sweep_above_ = kBeforeSweep;
};

}  // namespace astray
