// The hooks on autograd nodes, through which gradients reach the calls that they belong to.
//
// A hook stays on its node for as long as that lives, and is emptied rather than removed: torch iterates over the hooks
// of a node without a lock, so none may leave the list while a backward pass could be running on some thread. (torch
// does the same with a hook that a program removes.) An empty hook does not take the GIL.

#pragma once

#include "edges.h"
#include "node_gradients.h"

namespace astray {

// Compiled autograd gets nothing of these hooks: it runs the backward pass as one graph, without ours.
using CompiledArgs = torch::dynamo::autograd::CompiledNodeArgs;

// Runs when a node has computed its gradients.
class NodePostHook : public torch::autograd::FunctionPostHook {
public:
    // Our hook after all other hooks of a node.
    static NodePostHook &on(Node &node) {
        const auto &hooks = node.post_hooks();
        auto *hook = hooks.empty() ? nullptr : dynamic_cast<NodePostHook *>(hooks.back().get());
        if (hook) return *hook;
        node.add_post_hook(std::make_unique<NodePostHook>());
        return static_cast<NodePostHook &>(*node.post_hooks().back());
    }

    void add(std::shared_ptr<NodeGradients> whole) { add({std::move(whole), nullptr, 0, 0}); }
    void add(std::shared_ptr<CallGradients> part, size_t index, size_t target) {
        add({nullptr, std::move(part), index, target});
    }

    Tensors operator()(const Tensors &computed, const Tensors &arrived) override {
        if (is_used_) run_hook([&] { run(computed, arrived); });
        return computed;
    }
    void compiled_args(CompiledArgs &) const override {}

private:
    struct Reader {
        std::shared_ptr<NodeGradients> whole;  // of the call that made only this node
        std::shared_ptr<CallGradients> part;   // of one that sends the gradient of this index to this target
        size_t index, target;

        const PendingGradients &watched() const {
            return whole ? static_cast<const PendingGradients &>(*whole) : *part; }
    };

    void add(Reader reader) {
        readers_.push_back(std::move(reader));
        is_used_ = true;
    }

    void run(const Tensors &computed, const Tensors &arrived) {
        for (size_t i = 0; i < readers_.size(); ++i) {
            const Reader reader = readers_[i];  // another thread may add readers before this returns
            if (reader.whole)
                reader.whole->ran(computed, arrived);
            else if (reader.index < computed.size() && computed[reader.index].defined())
                reader.part->sent(reader.target, computed[reader.index]);
        }
        const auto is_active = [](const Reader &one) { return !one.watched().is_released(); };
        is_used_ = std::any_of(readers_.begin(), readers_.end(), is_active);
    }

    std::vector<Reader> readers_;  // inner calls before those around
    std::atomic<bool> is_used_{false};
};

// Runs when all gradients have arrived at a node.
class NodePreHook : public torch::autograd::FunctionPreHook {
public:
    // Our hook after all other hooks of a node, whose changes it sees.
    static NodePreHook &behind(Node &node) {
        const auto &hooks = node.tensor_pre_hooks();
        auto *hook = hooks.empty() ? nullptr : dynamic_cast<NodePreHook *>(hooks.back().get());
        return hook ? *hook : put(node);
    }

    // Our first hook on a node: what calls have sent to it is completed before any call sees it arrive.
    static NodePreHook &first(Node &node) {
        for (const auto &hook : node.tensor_pre_hooks())
            if (auto *ours = dynamic_cast<NodePreHook *>(hook.get())) return *ours;
        return put(node);
    }

    void add_arrival(std::shared_ptr<CallGradients> gradients, uint32_t index, size_t output) {
        arrivals_.push_back({std::move(gradients), index, output});
        is_used_ = true;
    }
    void add_completion(const std::shared_ptr<CallGradients> &gradients, size_t target) {
        // The node may outlive many calls that take its result.
        const auto is_gone = [](const Completion &one) { return one.gradients.expired(); };
        if (completions_.size() == completions_.capacity())
            completions_.erase(std::remove_if(completions_.begin(), completions_.end(), is_gone), completions_.end());
        completions_.push_back({gradients, target});
        is_used_ = true;
    }

    Tensors operator()(const Tensors &gradients) override {
        if (is_used_) run_hook([&] { run(gradients); });
        return gradients;
    }
    void compiled_args(CompiledArgs &) const override {}

private:
    struct Completion {
        std::weak_ptr<CallGradients> gradients;  // which its own part of the graph holds
        size_t target;
    };
    struct Arrival {
        std::shared_ptr<CallGradients> gradients;
        uint32_t index;
        size_t output;
    };

    static NodePreHook &put(Node &node) {
        node.add_tensor_pre_hook(std::make_unique<NodePreHook>());
        return static_cast<NodePreHook &>(*node.tensor_pre_hooks().back());
    }

    void run(const Tensors &gradients) {
        const std::vector<Completion> completions = completions_;  // the list may change while Python runs
        for (const Completion &completion : completions)
            if (const auto alive = completion.gradients.lock()) alive->complete(completion.target);
        for (size_t i = 0; i < arrivals_.size(); ++i) {
            const Arrival arrival = arrivals_[i];
            if (arrival.index < gradients.size() && gradients[arrival.index].defined())  // else it was not used
                arrival.gradients->arrived(arrival.output, gradients[arrival.index]);
        }
        const auto is_awaited = [](const Completion &one) {
            const auto alive = one.gradients.lock();
            return alive && !alive->is_released();
        };
        const auto is_active = [](const Arrival &one) { return !one.gradients->is_released(); };
        is_used_ = std::any_of(completions_.begin(), completions_.end(), is_awaited) ||
                   std::any_of(arrivals_.begin(), arrivals_.end(), is_active);
    }

    std::vector<Completion> completions_;
    std::vector<Arrival> arrivals_;
    std::atomic<bool> is_used_{false};
};

// Does on a leaf what a `NodePreHook` does on a node. It is a Python object: a leaf keeps its hooks, so this one has to
// be removed again, which torch supports in Python only.
struct LeafHook {
    std::shared_ptr<CallGradients> gradients;
    size_t index;  // of the target, or of the output
    bool arrives;

    static Ref run(LeafHook &self, PyObject *gradient) {
        const auto gradients = self.gradients;
        if (!self.arrives)
            gradients->complete(self.index);
        else if (gradient != Py_None)
            gradients->arrived(self.index, THPVariable_Unpack(gradient));
        return none();
    }
    static PyObject *get_arrives(PyObject *self, void *) { return PyBool_FromLong(Box<LeafHook>::in(self).arrives); }
};

}  // namespace astray
