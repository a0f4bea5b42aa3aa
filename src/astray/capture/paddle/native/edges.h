// The positions of a call's inputs and outputs in the autograd graph, and the walk from outputs back to inputs.

#pragma once

#include "graph.h"
#include "paddle_tensors.h"
#include "structure.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace astray {

constexpr size_t kNotFound = std::numeric_limits<size_t>::max();

// A tensor that takes part in a graph, with its path among the arguments or results of the call.
struct GraphTensor {
    Ref path, tensor;
    NodePtr node;  // none for a leaf that has taken no part yet
    size_t slot = 0, rank = 0;

    const paddle::Tensor &value() const { return tensor_in(tensor); }
    bool is_leaf() const { return !node || is_accumulation(*node); }
};

inline GraphTensor graph_tensor(const NamedTensor &one) {
    if (!is_tensor(one.tensor)) raise(PyExc_TypeError, "Tensors come as a list of (path, tensor).");
    const paddle::Tensor &value = tensor_in(one.tensor);
    GraphTensor found{one.path, one.tensor, egr::EagerUtils::grad_node(value)};
    if (found.node) std::tie(found.slot, found.rank) = egr::EagerUtils::OutRankInfo(value);
    return found;
}

// The inputs of a call, taken before it can change them in place.
class InputEdges {
public:
    InputEdges(const NamedTensors &given, NodeAges &ages) {
        inputs.reserve(given.size());
        for (const NamedTensor &one : given) inputs.push_back(graph_tensor(one));
        for (const GraphTensor &input : inputs)
            if (!input.is_leaf()) ages.note_all_behind(input.node, ages.now());
        born = ages.begin();
    }

    // The index of the input that a tensor is; `kNotFound` when it is none.
    size_t find(const GraphTensor &tensor) const {
        for (size_t i = 0; i < inputs.size(); ++i) {
            const GraphTensor &input = inputs[i];
            const bool same = input.node && !input.is_leaf()
                                  ? input.node == tensor.node && input.slot == tensor.slot && input.rank == tensor.rank
                                  : tensor.is_leaf() && input.value().impl() == tensor.value().impl();
            if (same) return i;
        }
        return kNotFound;
    }

    int64_t born;  // the number that nodes made in the call have at least
    std::vector<GraphTensor> inputs;
};

// An edge that leads out of the part of the graph that a call made, to one of its inputs.
struct ExitEdge {
    NodePtr from;
    size_t index;  // which of its edges
    size_t input;  // where that leads
};

// A walk back through the nodes that were made inside a call.
class GraphWalk {
public:
    GraphWalk(InputEdges &edges, NodeAges &ages) : edges_(edges), ages_(ages) {
        for (size_t i = 0; i < edges.inputs.size(); ++i) {
            GraphTensor &input = edges.inputs[i];
            if (!input.node) input.node = egr::EagerUtils::grad_node(input.value());  // made when it took part
            if (!input.node) continue;
            std::vector<size_t> &known = by_node_[input.node.get()];
            const auto same = [&](size_t other) { return is_same(edges.inputs[other], input); };
            // Given twice, it is recorded under its first path.
            if (std::none_of(known.begin(), known.end(), same)) known.push_back(i);
        }
    }

    // Walks from a node, unless it was there before the call.
    void from(const NodePtr &node) {
        visit(node);
        while (!queue_.empty()) {
            const NodePtr next = std::move(queue_.back());
            queue_.pop_back();
            expand(next);
        }
    }

    // Ends the walk: edges to nodes with several results among the inputs are assigned to them.
    void finish() {
        for (const auto &[to, edges] : unclear_) {
            const std::vector<size_t> &inputs = by_node_.at(to);
            bool one_node = edges.size() == inputs.size();
            for (const ExitEdge &edge : edges) one_node = one_node && edge.from == edges[0].from;
            if (!one_node) {
                is_unclear = true;
                continue;
            }
            // One node takes each of them once: its edges have the order of its arguments.
            for (size_t i = 0; i < edges.size(); ++i) exits.push_back({edges[i].from, edges[i].index, inputs[i]});
        }
    }

    std::vector<ExitEdge> exits;
    bool is_unclear = false;  // some edges could not be assigned: Paddle does not tell which result they lead to
    bool is_custom_inside = false;  // an edge leads out of a PyLayer

private:
    static bool is_same(const GraphTensor &one, const GraphTensor &other) {
        return one.slot == other.slot && one.rank == other.rank;
    }

    void visit(const NodePtr &node) {
        if (ages_.is_older(node.get(), edges_.born) || is_accumulation(*node)) return;
        if (!seen_.insert(node.get()).second) return;
        ages_.note(node, ages_.now());
        queue_.push_back(node);
    }

    void expand(const NodePtr &node) {
        const auto following = node->NextFunctions();
        for (size_t i = 0; i < following.size(); ++i) {
            const NodePtr &to = following[i];
            if (!to) continue;
            const auto inputs = by_node_.find(to.get());
            if (inputs == by_node_.end())
                visit(to);
            else if (is_custom(*node))
                is_custom_inside = true;
            else if (inputs->second.size() == 1)
                exits.push_back({node, i, inputs->second[0]});
            else
                unclear_[to.get()].push_back({node, i, kNotFound});
        }
    }

    InputEdges &edges_;
    NodeAges &ages_;
    std::unordered_map<const Node *, std::vector<size_t>> by_node_;
    std::unordered_map<const Node *, std::vector<ExitEdge>> unclear_;
    std::unordered_set<const Node *> seen_;
    std::vector<NodePtr> queue_;
};

}  // namespace astray
