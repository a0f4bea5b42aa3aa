// The hooks on autograd nodes, through which gradients reach the calls that they belong to.
//
// What arrives is read by a hook on the gradient itself, before the node runs: nodes may write their results over it.
// What a node sends is read when it has run. The hooks stay on their nodes for as long as these live, and are emptied
// rather than removed. An empty hook does not take the GIL.

#pragma once

#include "call_gradients.h"
#include "edges.h"
#include "finalizer.h"

namespace astray {

using Tensors = paddle::small_vector<std::vector<paddle::Tensor>, egr::kSlots>;

// The recording that hooks belong to; empty when it has stopped.
struct HookedRecording {
    Ref engine;

    // Paddle adds gradients up in place and writes results over them, past every version counter: what was measured of
    // this memory is not known to hold any more.
    void forget(const paddle::Tensor &gradient) const {
        const phi::DenseTensor *dense = dense_in(gradient);
        NativeObserver *observer = engine ? Calls::of(engine).tensors.native() : nullptr;
        if (dense && observer) static_cast<TensorObserver *>(observer)->memories.forget(dense->Holder());
    }
};
using RecordingPtr = std::shared_ptr<HookedRecording>;

// Runs the work of a hook, in the backward pass. Paddle would turn an exception into one of its own: what a signal
// handler of the program has raised is raised when the backward pass has returned.
template <class Work>
void run_hook(Work work) {
    const HeldGil gil;
    try {
        work();
    } catch (const PythonError &) {
        raise_later(SavedError().exception());
    }
}

// Runs when the gradient of one result of a node has arrived.
class ArrivalHook : public egr::TensorHook {
public:
    explicit ArrivalHook(RecordingPtr recording) : recording_(std::move(recording)) {}

    void add(std::shared_ptr<CallGradients> gradients, size_t output) {
        readers_.push_back({std::move(gradients), output});
    }

    paddle::Tensor operator()(const paddle::Tensor &gradient) override {
        if (recording_->engine && is_defined(gradient)) run_hook([&] { run(gradient); });
        return gradient;
    }

private:
    struct Reader {
        std::shared_ptr<CallGradients> gradients;
        size_t output;
    };

    void run(const paddle::Tensor &gradient) {
        recording_->forget(gradient);
        for (size_t i = 0; i < readers_.size(); ++i) {
            const Reader reader = readers_[i];  // more may come while Python runs
            reader.gradients->arrived(reader.output, gradient);
        }
    }

    const RecordingPtr recording_;
    std::vector<Reader> readers_;  // inner calls before those around
};

// Runs when a node has computed what it sends.
class SentHook : public egr::NodePostHookBase {
public:
    SentHook(RecordingPtr recording, const Node &node) : recording_(std::move(recording)) {
        const auto &slots = node.OutputMeta();
        for (size_t slot = 0; slot < slots.size(); ++slot) leads_.push_back(!slots[slot].empty());
    }

    // What the node sends along this edge goes to this target of a call.
    void add(size_t edge, std::shared_ptr<CallGradients> gradients, size_t target) {
        readers_.push_back({edge, std::move(gradients), target});
    }

    Tensors operator()(const Tensors &computed, const Tensors &) override {
        if (recording_->engine) run_hook([&] { run(computed); });
        return computed;
    }

private:
    struct Reader {
        size_t edge;
        std::shared_ptr<CallGradients> gradients;
        size_t target;
    };

    // Edges are counted over all results of those slots that lead anywhere.
    void run(const Tensors &computed) {
        size_t edge = 0;
        for (size_t slot = 0; slot < computed.size() && slot < leads_.size(); ++slot) {
            if (!leads_[slot]) continue;
            for (const paddle::Tensor &gradient : computed[slot]) sent(edge++, gradient);
        }
    }

    void sent(size_t edge, const paddle::Tensor &gradient) {
        if (!is_defined(gradient)) return;
        recording_->forget(gradient);
        for (size_t i = 0; i < readers_.size(); ++i) {
            const Reader reader = readers_[i];  // more may come while Python runs
            if (reader.edge == edge) reader.gradients->sent(reader.target, gradient);
        }
    }

    const RecordingPtr recording_;
    std::vector<bool> leads_;
    std::vector<Reader> readers_;  // inner calls before those around
};

// Our hooks on the nodes of one step, to which further calls add.
class NodeHooks {
public:
    const RecordingPtr recording = std::make_shared<HookedRecording>();

    // `number` is that of a new hook, for `_remove_grad_hook`; −1 when there was one.
    ArrivalHook &arrival(const GraphTensor &tensor, int64_t &number) {
        std::vector<Arrival> &known = of(tensor.node).arrivals;
        number = -1;
        for (const Arrival &one : known)
            if (one.slot == tensor.slot && one.rank == tensor.rank) return *one.hook;
        auto hook = std::make_shared<ArrivalHook>(recording);
        known.push_back({tensor.slot, tensor.rank, hook.get()});
        number = tensor.node->RegisterGradientHook(tensor.slot, tensor.rank, std::move(hook));
        return *known.back().hook;
    }

    SentHook &sent(const NodePtr &node) {
        SentHook *&known = of(node).sent;
        if (!known) {
            auto hook = std::make_shared<SentHook>(recording, *node);
            known = hook.get();
            node->RegisterNodePostHook(std::move(hook));
        }
        return *known;
    }

    void clear() { known_.clear(); }

private:
    struct Arrival {
        size_t slot, rank;
        ArrivalHook *hook;  // which the node owns
    };
    struct Hooked {
        std::weak_ptr<Node> node;  // another at this address is not taken for it
        std::vector<Arrival> arrivals;
        SentHook *sent = nullptr;  // which the node owns
    };

    Hooked &of(const NodePtr &node) {
        if (known_.size() > sweep_above_) {  // a program that never ends a step
            for (auto at = known_.begin(); at != known_.end();)
                at = at->second.node.expired() ? known_.erase(at) : std::next(at);
            sweep_above_ = std::max(kBeforeSweep, 2 * known_.size());
        }
        Hooked &hooked = known_[node.get()];
        if (hooked.node.expired()) hooked = {node, {}, nullptr};
        return hooked;
    }

    static constexpr size_t kBeforeSweep = 1 << 16;

    std::unordered_map<const Node *, Hooked> known_;
    size_t sweep_above_ = kBeforeSweep;
};

}  // namespace astray
