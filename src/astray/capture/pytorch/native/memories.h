// What is known of the memory behind tensors: its layouts, what was measured of it, and which value it holds.
//
// Memories are identified by their StorageImpl, to which weak references are held: so no address is reused for another
// memory, and no memory lives longer because of us. `TensorObserver` owns these tables. The GIL is their lock: an entry
// must be looked up again after the GIL was released.

#pragma once

#include "rows.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace astray {

struct Layout;
struct LaunchPlan;

class Layouts {
   public:
    std::shared_ptr<Layout> find(const at::Tensor &tensor);

   private:
    std::unordered_multimap<uint64_t, std::shared_ptr<Layout>> known_;
};

// A dtype that can be measured.
struct Dtype {
    Ref name;  // empty for one that cannot
    Text text{};
    int number = -1;  // the number by which the kernels know it
};

// What a tensor is right now. Two tensors with equal identities hold the same numbers in the same order; of contiguous
// ones the shapes may differ.
struct Identity {
    c10::Storage storage;
    std::shared_ptr<Layout> layout;
    const Dtype *dtype;  // one of the observer's `types`
    uint64_t address;
    int64_t version;
    c10::Device device;
};

struct MeasuredView {
    uint64_t address;
    int64_t version;
    const Dtype *dtype;
    std::shared_ptr<Layout> layout;
    CachedMeasurement cached;
    int64_t number = -1;  // of the value; −1 until there is a row of it

    bool matches(const Identity &identity) const;
};

struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    std::vector<MeasuredView> views;
    bool is_known = false;           // which value it is
    int64_t since = 0, until = 0;    // the versions in which it is this value; most often there is one
    int64_t number = -1;             // of the value; −1 until there is a row of it
};

class Memories {
   public:
    Memory &of(const c10::Storage &storage);
    MeasuredView *find(const Identity &identity);
    int64_t value(Memory &memory, int64_t version);
    // An op has written to a memory whose version will only increase when the op has returned.
    void written_ahead(const c10::Storage &storage, int64_t version);
    void forget(const c10::Storage &storage);
    void expire();  // drops all measurements; the numbers of values stay
    void clear();

   private:
    std::unordered_map<const c10::StorageImpl *, Memory> known_;
    size_t sweep_above_ = 4096;
    int64_t values_ = 0;  // how many were numbered
};

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

inline constexpr size_t kMostLayouts = 20000;  // then all are dropped: a program whose shapes change in every call
inline constexpr size_t kMemoriesBeforeSweep = 4096;        // memories that are tracked before dead ones are dropped

inline uint64_t hash_of(c10::IntArrayRef shape, c10::IntArrayRef stride) {
    uint64_t hash = shape.size();
    for (size_t i = 0; i < shape.size(); ++i) {
        hash = (hash ^ static_cast<uint64_t>(shape[i])) * 0x9E3779B97F4A7C15u;
        hash = ((hash ^ (hash >> 29)) + static_cast<uint64_t>(stride[i])) * 0xBF58476D1CE4E5B9u;
    }
    return hash ^ (hash >> 32);
}

inline Ref tuple_of(c10::IntArrayRef numbers) {
    Ref tuple = Ref::made(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
    for (size_t i = 0; i < numbers.size(); ++i)
        PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), Ref::made(PyLong_FromLongLong(numbers[i])).release());
    return tuple;
}

struct TensorNames {
    Ref launches = interned("_launches"), index = interned("_index"), slots = interned("_slots");
    Ref tensor_row = interned("tensor_row"), batch_ready = interned("batch_ready"), stale = interned("stale");
};

inline const TensorNames &tensor_names() {
    static const TensorNames *names = new TensorNames();  // for as long as the program runs
    return *names;
}

// ---- layouts: equal ones share one object ---------------------------------------------------------------------------

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

struct Layout {
    std::vector<int64_t> shape, stride;
    int64_t elements = 1;
    bool contiguous = true;
    std::vector<std::shared_ptr<LaunchPlan>> plans;

    Layout(c10::IntArrayRef shape, c10::IntArrayRef stride)
        : shape(shape.vec()), stride(stride.vec()) {
        for (size_t i = shape.size(); i-- > 0;) {
            if (shape[i] != 1 && stride[i] != elements) contiguous = false;
            elements *= shape[i];
        }
        if (!elements) contiguous = true;
    }

    Ref shape_tuple() const { return tuple_of(shape); }
    Ref stride_tuple() const { return tuple_of(stride); }
};

inline std::shared_ptr<Layout> Layouts::find(const at::Tensor &tensor) {
    const c10::IntArrayRef shape = tensor.sizes(), stride = tensor.strides();
    const uint64_t hash = hash_of(shape, stride);
    const auto [begin, end] = known_.equal_range(hash);
    for (auto at = begin; at != end; ++at)
        if (shape == at->second->shape && stride == at->second->stride) return at->second;
    if (known_.size() >= kMostLayouts) known_.clear();
    return known_.emplace(hash, std::make_shared<Layout>(shape, stride))->second;
}

// ---- memories: what was measured of each, and which value it is -----------------------------------------------------

inline bool MeasuredView::matches(const Identity &identity) const {
    return address == identity.address && version == identity.version && dtype == identity.dtype &&
           (identity.layout->contiguous ? layout->contiguous && layout->elements == identity.layout->elements
                                    : layout == identity.layout);
}

inline Memory &Memories::of(const c10::Storage &storage) {
    if (known_.size() > sweep_above_) {  // a program without steps, such as a generation loop
        for (auto at = known_.begin(); at != known_.end();) at = at->second.storage.expired() ? known_.erase(at) : ++at;
        sweep_above_ = std::max(kMemoriesBeforeSweep, 2 * known_.size());
    }
    const auto [at, is_new] = known_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) at->second.storage = storage.getWeakStorageImpl();
    return at->second;
}

inline MeasuredView *Memories::find(const Identity &identity) {
    const auto at = known_.find(identity.storage.unsafeGetStorageImpl());
    if (at == known_.end()) return nullptr;
    for (MeasuredView &one : at->second.views)
        if (one.matches(identity)) return &one;
    return nullptr;
}

// The number of the value that a memory holds in a version. Version 0 matches any: `.data` has its own counter.
inline int64_t Memories::value(Memory &memory, int64_t version) {
    const bool same = memory.is_known && (!version || (memory.since <= version && version <= memory.until));
    if (!same) {
        memory.is_known = true;
        memory.since = memory.until = version;
    }
    if (!same || memory.number < 0) memory.number = values_++;
    return memory.number;
}

inline void Memories::written_ahead(const c10::Storage &storage, int64_t version) {
    forget(storage);
    Memory &memory = of(storage);
    memory.is_known = true;
    memory.since = version;
    memory.until = version + 1;
}

// Dropping an entry may run code that calls this again, so it is removed from the table first.
inline void Memories::forget(const c10::Storage &storage) {
    const auto at = known_.find(storage.unsafeGetStorageImpl());
    if (at == known_.end()) return;
    const Memory gone = std::move(at->second);
    known_.erase(at);
}

inline void Memories::expire() {
    std::vector<std::vector<MeasuredView>> gone;
    for (auto at = known_.begin(); at != known_.end();) {
        gone.push_back(std::move(at->second.views));
        at->second.views.clear();
        at = at->second.is_known && !at->second.storage.expired() ? ++at : known_.erase(at);
    }
}

inline void Memories::clear() {
    const auto gone = std::move(known_);
    known_.clear();
}

// ---- parameters and buffers: all of them together ------------------------------------------------------------------

// They are the same tensors in every step, at the same addresses, so one launch measures them all when the first of
// them is observed. It reads the others before their modules run; one that changes until then has another version, and
// is measured again. Such tensors (`changes_early`) are left out of the group from then on.

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
