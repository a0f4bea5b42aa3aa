// The positions of a call's inputs and outputs in the autograd graph, and the walk from outputs back to inputs.
//
// Nodes are numbered as they are made, on each thread. So nodes with a number below the one at which a call began
// existed before it, and the walk through the nodes of the call ends at them.

#pragma once

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "structure.h"

namespace astray {

using torch::autograd::Node;
using NodePtr = decltype(torch::autograd::Edge::function);  // another kind of pointer from torch 2.13 on

constexpr size_t kNotFound = std::numeric_limits<size_t>::max();
constexpr uint64_t kLeaf = std::numeric_limits<uint64_t>::max();  // the number of nodes that accumulate into leaves

// A tensor that takes part in a graph, with its path among the arguments or results of the call.
struct GraphTensor {
    Ref path, tensor;
    NodePtr node;  // none for a leaf
    uint32_t output;

    const at::TensorImpl *impl() const { return THPVariable_Unpack(tensor.get()).unsafeGetTensorImpl(); }
};

// Those that take part in a graph.
inline std::vector<GraphTensor> graph_tensors(const NamedTensors &given) {
    std::vector<GraphTensor> found;
    found.reserve(given.size());
    for (const NamedTensor &one : given) {
        if (!THPVariable_Check(one.tensor)) raise(PyExc_TypeError, "Tensors come as a list of (path, tensor).");
        const at::Tensor &value = THPVariable_Unpack(one.tensor);
        const NodePtr &node = value.grad_fn();
        if (node || value.requires_grad())
            found.push_back({one.path, one.tensor, node, node ? static_cast<uint32_t>(value.output_nr()) : 0});
    }
    return found;
}

// The inputs of a call, taken before it can change them in place.
class InputEdges {
public:
    explicit InputEdges(const NamedTensors &given) : born(at::sequence_number::peek()) {
        inputs.reserve(given.size());
        for (GraphTensor &tensor : graph_tensors(given)) {
            if (find(tensor) != kNotFound) continue;  // given twice: recorded under its first path
            has_leaves = has_leaves || !tensor.node;
            inputs.push_back(std::move(tensor));
            if (inputs.size() > kFew) index();
        }
    }

    // The index of the input at this output of a node.
    size_t find(const Node *node, uint32_t output) const { return index_of(node, output); }
    size_t find_leaf(const at::TensorImpl *leaf) const { return index_of(leaf, 0); }
    size_t find(const GraphTensor &tensor) const {
        return tensor.node ? find(tensor.node.get(), tensor.output) : find_leaf(tensor.impl());
    }

    const uint64_t born;  // the number that the next node was to have when the call began
    bool has_leaves = false;
    std::vector<GraphTensor> inputs;

private:
    static constexpr size_t kFew = 16;  // inputs that are searched linearly
    struct Hash {
        size_t operator()(const std::pair<const void *, uint32_t> &key) const {
            return std::hash<const void *>()(key.first) * 31 + key.second;
        }
    };

    static std::pair<const void *, uint32_t> key(const GraphTensor &tensor) {
        if (tensor.node) return {tensor.node.get(), tensor.output};
        return {tensor.impl(), 0};
    }

    size_t index_of(const void *what, uint32_t output) const {
        const std::pair<const void *, uint32_t> wanted(what, output);
        if (!many_.empty()) {
            const auto found = many_.find(wanted);
            return found == many_.end() ? kNotFound : found->second;
        }
        for (size_t i = 0; i < inputs.size(); ++i)
            if (key(inputs[i]) == wanted) return i;
        return kNotFound;
    }

    void index() {
        for (size_t i = many_.size(); i < inputs.size(); ++i) many_.emplace(key(inputs[i]), i);
    }

    std::unordered_map<std::pair<const void *, uint32_t>, size_t, Hash> many_;
};

// An edge that leads out of the part of the graph that a call made, to one of its inputs.
struct ExitEdge {
    Node *from;
    size_t index;  // which of its edges
    size_t input;  // where that leads
};

// A walk back through the nodes that were made inside a call.
class GraphWalk {
public:
    GraphWalk(const InputEdges &edges, uint64_t now)
        : edges_(edges), by_number_(std::min<uint64_t>(now - edges.born, kMostByNumber)) {}

    // Walks from a node, unless it was there before the call.
    void from(Node *node) {
        if (node->sequence_nr() >= edges_.born) visit(node);
        while (!queue_.empty()) {
            Node *next = queue_.back();
            queue_.pop_back();
            expand(next);
        }
    }

    // Visits the edges of one node; returns whether they lead to other nodes inside the call.
    bool expand(Node *node) {
        const auto &following = node->next_edges();
        bool goes_on = false;
        for (size_t i = 0; i < following.size(); ++i) {
            Node *to = following[i].function.get();
            if (!to) continue;
            size_t input = edges_.find(to, following[i].input_nr);
            const uint64_t number = to->sequence_nr();
            if (input == kNotFound && number == kLeaf && edges_.has_leaves) {
                const auto *leaf = dynamic_cast<torch::autograd::AccumulateGrad *>(to);
                if (leaf) input = edges_.find_leaf(leaf->variable.unsafeGetTensorImpl());
            }
            if (input != kNotFound) {
                exits.push_back({node, i, input});
            } else if (number >= edges_.born && number != kLeaf) {
                goes_on = true;
                visit(to);
            }
        }
        return goes_on;
    }

    std::vector<ExitEdge> exits;  // those of one node follow each other

private:
    static constexpr uint64_t kMostByNumber = 1 << 16;

    void visit(Node *node) {
        const uint64_t index = node->sequence_nr() - edges_.born;
        bool is_new;
        if (index < by_number_.size() && (!by_number_[index] || by_number_[index] == node)) {
            is_new = !by_number_[index];
            by_number_[index] = node;
        } else {  // one of very many, or made on another thread, which has its own numbering
            is_new = others_.insert(node).second;
        }
        if (is_new) queue_.push_back(node);
    }

    const InputEdges &edges_;
    std::vector<Node *> by_number_, queue_;
    std::unordered_set<Node *> others_;
};

// Whether a node is one of torch's own derivatives, such as AddBackward0, which write to fresh memory only. A custom
// `backward` may change arriving gradients in place, before a hook after it sees them.
inline bool leaves_gradients_alone(const Node &node) {
    static std::unordered_map<const std::type_info *, bool> known;  // used under the interpreter's lock
    const std::type_info *kind = &typeid(node);
    const auto found = known.find(kind);
    if (found != known.end()) return found->second;
    const std::string name = c10::demangle(kind->name());
    const bool own = name.find("torch::autograd::generated::") != std::string::npos && std::isdigit(name.back());
    return known[kind] = own;
}

}  // namespace astray
