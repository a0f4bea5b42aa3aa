// Adds the hooks of each call to the graph, and keeps track of every call whose graph still exists.

#pragma once

#include "node_hooks.h"

namespace astray {

class LiveGradients {
public:
    NodeAges ages;

    // Watches the gradients of a call that has returned `given`.
    void watch(PyObject *engine, PyObject *call, InputEdges &edges, const NamedTensors &given) {
        std::vector<GraphTensor> outputs;
        for (const NamedTensor &one : given) {
            GraphTensor output = graph_tensor(one);
            if (output.node) outputs.push_back(std::move(output));
        }
        if (outputs.empty()) return;
        const auto gradients = PendingGradients::make<CallGradients>(engine, call);
        living_.add(gradients);
        std::vector<bool> passed(edges.inputs.size());
        for (const GraphTensor &output : outputs) {
            // An output that is an input: its gradient cannot be split into what arrives and what others send, so it is
            // recorded as one.
            const size_t passthrough = edges.find(output);
            if (passthrough != kNotFound) passed[passthrough] = true;
            gradients->outputs.push_back({output.path,
                                          passthrough == kNotFound ? Ref() : edges.inputs[passthrough].path});
        }
        if (!edges.inputs.empty()) watch_exits(gradients, edges, outputs, passed, Calls::call_in(call));
        for (size_t i = 0; i < outputs.size(); ++i) watch_arrival(gradients, outputs[i], i);
    }

    // Ends the step: incomplete sums are recorded as they are, and the hooks on leaves are removed.
    void finish() {
        living_.finish_step();
        end_step();
    }

    // Makes every hook that is still in a graph do nothing from now on, and releases what it holds.
    void remove() {
        living_.release();
        end_step();
        const Ref engine = std::move(hooks_.recording->engine);
    }

    PyObject *engine() const { return hooks_.recording->engine; }
    void use(PyObject *engine) { hooks_.recording->engine = Ref::shared(engine); }

private:
    // Watches what is sent to those inputs that are not outputs as well.
    void watch_exits(const std::shared_ptr<CallGradients> &gradients, InputEdges &edges,
                     const std::vector<GraphTensor> &outputs, const std::vector<bool> &passed, const OpenCall &call) {
        GraphWalk walk(edges, ages);
        for (const GraphTensor &output : outputs) walk.from(output.node);
        walk.finish();
        for (const ExitEdge &exit : walk.exits) {
            if (passed[exit.input]) continue;
            const size_t target = gradients->target_of(exit.input, edges.inputs[exit.input].path);
            ++gradients->targets[target].expected;
            hooks_.sent(exit.from).add(exit.index, gradients, target);
        }
        if (walk.is_unclear)
            missed(call, "Paddle does not tell which of several results of one call an edge of the graph leads to");
        if (walk.is_custom_inside) missed(call, "Paddle does not show what a PyLayer sends, such as of recompute");
    }

    void missed(const OpenCall &call, const char *why) {
        static const Ref *name = new Ref(interned("missed"));
        const Ref what = Ref::made(PyUnicode_FromFormat("gradients that %U sends", call.site_data().name.get()));
        call_method(Ref::shared(engine()), *name, what.get(), Ref::made(PyUnicode_FromString(why)).get());
    }

    void watch_arrival(const std::shared_ptr<CallGradients> &gradients, const GraphTensor &output, size_t index) {
        int64_t number;
        hooks_.arrival(output, number).add(gradients, index);
        if (number >= 0 && is_accumulation(*output.node)) on_leaves_.push_back({output.tensor, number});
    }

    // The hooks on leaves are not freed with a graph.
    void end_step() {
        ages.clear();
        hooks_.clear();
        static const Ref *remove = new Ref(interned("_remove_grad_hook"));
        const auto on_leaves = std::exchange(on_leaves_, {});
        for (const auto &[leaf, number] : on_leaves) call_method(leaf, *remove, to_object(number).get());
    }

    NodeHooks hooks_;
    LivingCalls living_;
    std::vector<std::pair<Ref, int64_t>> on_leaves_;  // leaves with the numbers of hooks that are not freed with a graph
};

}  // namespace astray
