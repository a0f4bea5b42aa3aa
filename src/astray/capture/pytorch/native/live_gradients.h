// Adds the hooks of each call to the graph, and keeps track of every call whose graph still exists.

#pragma once

#include "node_hooks.h"

namespace astray {

class LiveGradients {
public:
    // Watches the gradients of a call that has returned `given`.
    void watch(PyObject *engine, PyObject *call, const InputEdges &edges, const NamedTensors &given) {
        const std::vector<GraphTensor> outputs = graph_tensors(given);
        if (outputs.empty()) return;
        const uint64_t now = at::sequence_number::peek();
        if (now != edges.born + 1 || !watch_node(engine, call, edges, outputs))
            watch_several(engine, call, edges, outputs, now);
    }

    // Ends the step: incomplete sums are recorded as they are, and the hooks on leaves are removed.
    void finish() {
        living_.finish_step();
        const auto on_leaves = std::exchange(on_leaves_, {});
        for (const Ref &handle : on_leaves) call_method(handle, names->remove);
    }

    // Makes every hook that is still in a graph do nothing from now on, and releases what it holds.
    void remove() { living_.release(); }

private:
    // Watches a call by one hook on the node that it made; false when one hook does not see all gradients.
    bool watch_node(PyObject *engine, PyObject *call, const InputEdges &edges,
                    const std::vector<GraphTensor> &outputs) {
        Node *node = outputs[0].node.get();
        if (!node || node->sequence_nr() != edges.born || !leaves_gradients_alone(*node)) return false;
        std::vector<NodeGradients::Route> arrives, sends;
        for (const GraphTensor &output : outputs) {
            if (output.node.get() != node) return false;
            arrives.push_back({output.output, output.path});
        }
        GraphWalk walk(edges, edges.born + 1);
        if (walk.expand(node)) return false;
        for (size_t i = 0; i < walk.exits.size(); ++i) {
            for (size_t j = 0; j < i; ++j)
                if (walk.exits[j].input == walk.exits[i].input) return false;  // x * x: there is a sum to wait for
            sends.push_back({walk.exits[i].index, edges.inputs[walk.exits[i].input].path});
        }
        auto gradients = PendingGradients::make<NodeGradients>(engine, call, std::move(arrives), std::move(sends));
        living_.add(gradients);
        NodePostHook::on(*node).add(std::move(gradients));
        return true;
    }

    // Watches a call by hooks on its outputs and on the nodes that send to its inputs.
    void watch_several(PyObject *engine, PyObject *call, const InputEdges &edges,
                       const std::vector<GraphTensor> &outputs,
                       uint64_t now) {
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
        if (!edges.inputs.empty()) watch_exits(gradients, edges, outputs, passed, now);
        for (size_t i = 0; i < outputs.size(); ++i) {
            if (outputs[i].node)
                NodePreHook::behind(*outputs[i].node).add_arrival(gradients, outputs[i].output, i);
            else
                put_on_leaf(outputs[i].tensor, {gradients, i, true});
        }
    }

    // Watches what is sent to those inputs that are not outputs as well.
    void watch_exits(const std::shared_ptr<CallGradients> &gradients, const InputEdges &edges,
                     const std::vector<GraphTensor> &outputs, const std::vector<bool> &passed, uint64_t now) {
        GraphWalk walk(edges, now);
        for (const GraphTensor &output : outputs)
            if (output.node) walk.from(output.node.get());
        auto &targets = gradients->targets;
        for (const ExitEdge &exit : walk.exits) {
            if (passed[exit.input]) continue;
            const size_t target = gradients->target_of(exit.input, edges.inputs[exit.input].path);
            ++targets[target].expected;
            NodePostHook::on(*exit.from).add(gradients, exit.index, target);
        }
        // Of several nodes that send to one input some may never run: the sum is complete when the backward pass
        // reaches the input.
        for (size_t i = 0; i < targets.size(); ++i) {
            if (targets[i].expected < 2) continue;
            const GraphTensor &input = edges.inputs[targets[i].input];
            if (input.node)
                NodePreHook::first(*input.node).add_completion(gradients, i);
            else
                put_on_leaf(input.tensor, {gradients, i, false});
        }
    }

    void put_on_leaf(const Ref &leaf, LeafHook hook) {
        const Ref boxed = Box<LeafHook>::make(std::move(hook));
        on_leaves_.push_back(call(callbacks->put_on_leaf, leaf.get(), boxed.get()));
    }

    LivingCalls living_;
    std::vector<Ref> on_leaves_;  // handles of hooks that are not freed with a graph
};

}  // namespace astray
