// Parameters, buffers and states on a card, which are measured together: one launch for all of them.
//
// They are the same tensors in every step, at the same addresses, so one launch measures them all when the first of
// them is observed. It reads the others before their modules run; one that changes until then has another version, and
// is measured again. Such tensors (`changes_early`) are left out of the group from then on.

#pragma once

#include "memories.h"

namespace astray {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// A parameter, buffer or state that is measured in every step, in a group with the others.
struct LongLivedTensor {
    WeakTensor tensor{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    bool seen = false;       // since they were last measured together
    bool grouped = false;    // it was measured with the others then
    bool changes_early = false;  // and changed before it was seen: it is measured by itself from now on
};

class LongLivedTensors {
   public:
    bool is_due = false;  // the group has not been measured in this step yet

    void note(const at::Tensor &tensor, bool again);  // `again`: it had been measured in this step as it is now
    std::vector<at::Tensor> take_due();
    void note_grouped(const at::Tensor &tensor);
    void expire();

   private:
    std::unordered_map<const c10::TensorImpl *, LongLivedTensor> known_;
};

// How tensors of one layout are measured on one device: the kernel and its arguments.
struct LaunchPlan {
    Ref slots;  // identifies the device: each measurer has one `Slots`
    const Dtype *dtype;
    Ref kernel;
    long alignment;
    bool statistics;
    uint64_t programs;
    std::vector<uint64_t> arguments;  // after those that every kernel has
};

inline void LongLivedTensors::note(const at::Tensor &tensor, bool again) {
    const auto [at, is_new] = known_.try_emplace(tensor.unsafeGetTensorImpl());
    LongLivedTensor &one = at->second;
    if (is_new) one.tensor = WeakTensor(tensor.getIntrusivePtr());
    one.changes_early |= one.grouped && !one.seen && !again;
    one.seen = true;
}

inline std::vector<at::Tensor> LongLivedTensors::take_due() {
    is_due = false;
    std::vector<at::Tensor> found;
    for (auto at = known_.begin(); at != known_.end();) {
        LongLivedTensor &one = at->second;
        auto alive = one.seen ? one.tensor.lock() : decltype(one.tensor.lock())();
        if (!alive) {
            at = known_.erase(at);
            continue;
        }
        one.grouped = one.seen = false;
        if (!one.changes_early) found.emplace_back(std::move(alive));
        ++at;
    }
    return found;
}

inline void LongLivedTensors::note_grouped(const at::Tensor &tensor) {
    const auto at = known_.find(tensor.unsafeGetTensorImpl());
    if (at != known_.end()) at->second.grouped = true;
}

inline void LongLivedTensors::expire() {
    for (auto &one : known_) one.second.grouped = false;  // the program has not changed them
}

}  // namespace astray
