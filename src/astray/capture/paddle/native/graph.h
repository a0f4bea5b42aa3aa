// Paddle's autograd graph: the part of it that we use, and which of its nodes were made when.
//
// libpaddle exports these functions, and Paddle ships no header that declares them. A version that has other ones fails
// when our module is loaded, not while it runs. Only pointers to nodes are held here, never nodes.

#pragma once

#include <paddle/phi/api/include/tensor.h>
#include <paddle/utils/small_vector.h>

#include <functional>
#include <memory>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

namespace egr {

class AutogradMeta;
class GradSlotMeta;
constexpr unsigned kSlots = 15;
template <class Item>
using Slots = paddle::small_vector<std::vector<Item>, kSlots>;

class TensorHook {
public:
    virtual ~TensorHook() = default;
    virtual paddle::Tensor operator()(const paddle::Tensor &gradient) = 0;
};

class NodePostHookBase {
public:
    virtual ~NodePostHookBase() = default;
    virtual paddle::small_vector<std::vector<paddle::Tensor>, kSlots> operator()(
        const paddle::small_vector<std::vector<paddle::Tensor>, kSlots> &computed,
        const paddle::small_vector<std::vector<paddle::Tensor>, kSlots> &arrived) = 0;
};

class GradNodeBase {
public:
    virtual ~GradNodeBase() = default;
    std::vector<std::shared_ptr<GradNodeBase>> NextFunctions();
    const paddle::small_vector<std::vector<GradSlotMeta>, kSlots> &OutputMeta() const;
    int64_t RegisterNodePostHook(std::shared_ptr<NodePostHookBase> &&hook);
    int64_t RegisterGradientHook(size_t slot, size_t rank, std::shared_ptr<TensorHook> &&hook);
};

class EagerUtils {
public:
    static std::shared_ptr<GradNodeBase> grad_node(const paddle::Tensor &tensor);
    static std::shared_ptr<GradNodeBase> GetGradAccumulationNode(const paddle::Tensor &tensor);
    static std::pair<size_t, size_t> OutRankInfo(const paddle::Tensor &tensor);
    static paddle::Tensor *mutable_grad(const paddle::Tensor &tensor);
};

class Controller {
public:
    static Controller &Instance();
    bool GetIsInBackward() const;
};

namespace egr_utils_api {
void RegisterBackwardFinalHook(const std::function<void()> &work);
}

}  // namespace egr

namespace astray {

using Node = egr::GradNodeBase;
using NodePtr = std::shared_ptr<Node>;

// Whether a backward pass runs.
inline bool in_backward() { return egr::Controller::Instance().GetIsInBackward(); }

// Whether a node is that of a leaf, where its gradients accumulate.
inline bool is_accumulation(const Node &node) {
    static std::unordered_map<const std::type_info *, bool> known;  // used under the interpreter's lock
    const std::type_info *kind = &typeid(node);
    const auto found = known.find(kind);
    if (found != known.end()) return found->second;
    return known[kind] = std::string(kind->name()).find("GradNodeAccumulation") != std::string::npos;
}

// Whether a node runs a function of the program's own, a PyLayer: Paddle calls no post hooks of it.
inline bool is_custom(const Node &node) {
    static std::unordered_map<const std::type_info *, bool> known;
    const std::type_info *kind = &typeid(node);
    const auto found = known.find(kind);
    if (found != known.end()) return found->second;
    return known[kind] = std::string(kind->name()).find("GradNodePyLayer") != std::string::npos;
}

// When nodes were made: before or inside a call.
//
// Paddle does not number its nodes. When a call starts, every node that leads to one of its inputs gets the number of
// that moment, and when it returns, every node that it has made: the walk back from its results ends at nodes with a
// lower number than the one at which it began. A node that was made before, leads to no input, and was met in no
// call counts as made inside: such as of a tensor that a module keeps from its last call.
class NodeAges {
public:
    // A call starts: the number that nodes made in it have at least.
    int64_t begin() { return ++now_; }
    int64_t now() const { return now_; }

    bool is_older(const Node *node, int64_t than) const {
        const auto at = known_.find(node);
        return at != known_.end() && at->second.number < than && !at->second.node.expired();
    }

    // Numbers a node. Returns false if it has a number.
    bool note(const NodePtr &node, int64_t number) {
        Age &age = known_[node.get()];
        if (age.number >= 0 && !age.node.expired()) return false;
        age = {node, number};
        return true;
    }

    // Numbers a node and all that it leads to, as far as they have none.
    void note_all_behind(const NodePtr &node, int64_t number) {
        if (known_.size() > sweep_above_) drop_dead();  // a program that never ends a step
        std::vector<NodePtr> queue;
        if (note(node, number)) queue.push_back(node);
        while (!queue.empty()) {
            const NodePtr next = std::move(queue.back());
            queue.pop_back();
            for (NodePtr &one : next->NextFunctions())
                if (one && note(one, number)) queue.push_back(std::move(one));
        }
    }

    void clear() { known_.clear(); }

private:
    static constexpr size_t kBeforeSweep = 1 << 16;
    struct Age {
        std::weak_ptr<Node> node;  // another at this address is not taken for it
        int64_t number = -1;
    };

    void drop_dead() {
        for (auto at = known_.begin(); at != known_.end();)
            at = at->second.node.expired() ? known_.erase(at) : std::next(at);
        sweep_above_ = std::max(kBeforeSweep, 2 * known_.size());
    }

    std::unordered_map<const Node *, Age> known_;
    size_t sweep_above_ = kBeforeSweep;
    int64_t now_ = 0;
};

}  // namespace astray
