// What is known of the memory behind tensors: its layouts, what was measured of it, and which value it holds.
//
// A memory is identified by the object that owns it, to which a weak reference is held: so another memory at its address
// is not taken for it, and no memory lives longer because of us. The GIL is the lock of these tables: an entry must be
// looked up again after the GIL was released.

#pragma once

#include "rows.h"

#include "memory_owner.h"  // of the framework

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace astray {

struct LaunchPlan;  // of a framework whose kernels are launched from here

// The sizes of a shape, or its strides.
struct Sizes {
    const int64_t *first;
    size_t count;

    bool operator==(const std::vector<int64_t> &other) const {
        return count == other.size() && std::equal(first, first + count, other.begin());
    }
};

inline uint64_t hash_of(Sizes shape, Sizes stride) {
    uint64_t hash = shape.count;
    for (size_t i = 0; i < shape.count; ++i) {
        hash = (hash ^ static_cast<uint64_t>(shape.first[i])) * 0x9E3779B97F4A7C15u;
        hash = ((hash ^ (hash >> 29)) + static_cast<uint64_t>(stride.first[i])) * 0xBF58476D1CE4E5B9u;
    }
    return hash ^ (hash >> 32);
}

inline Ref tuple_of(const std::vector<int64_t> &numbers) {
    Ref tuple = Ref::made(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
    for (size_t i = 0; i < numbers.size(); ++i)
        PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), Ref::made(PyLong_FromLongLong(numbers[i])).release());
    return tuple;
}

struct Layout {
    std::vector<int64_t> shape, stride;
    int64_t elements = 1;
    bool contiguous = true;
    std::vector<std::shared_ptr<LaunchPlan>> plans;

    Layout(Sizes shape, Sizes stride)
        : shape(shape.first, shape.first + shape.count), stride(stride.first, stride.first + stride.count) {
        for (size_t i = shape.count; i-- > 0;) {
            if (shape.first[i] != 1 && stride.first[i] != elements) contiguous = false;
            elements *= shape.first[i];
        }
        if (!elements) contiguous = true;
    }

    Ref shape_tuple() const { return tuple_of(shape); }
    Ref stride_tuple() const { return tuple_of(stride); }
};

// Equal layouts share one object.
class Layouts {
   public:
    std::shared_ptr<Layout> find(Sizes shape, Sizes stride) {
        const uint64_t hash = hash_of(shape, stride);
        const auto [begin, end] = known_.equal_range(hash);
        for (auto at = begin; at != end; ++at)
            if (shape == at->second->shape && stride == at->second->stride) return at->second;
        if (known_.size() >= kMost) known_.clear();
        return known_.emplace(hash, std::make_shared<Layout>(shape, stride))->second;
    }

   private:
    static constexpr size_t kMost = 20000;  // then all are dropped: a program whose shapes change in every call

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
    MemoryOwner owner;
    std::shared_ptr<Layout> layout;
    const Dtype *dtype;  // one of the observer's `types`
    uint64_t address;
    int64_t version;
};

struct MeasuredView {
    uint64_t address;
    int64_t version;
    const Dtype *dtype;
    std::shared_ptr<Layout> layout;
    CachedMeasurement cached;
    int64_t number = -1;  // of the value; −1 until there is a row of it

    bool matches(const Identity &identity) const {
        return address == identity.address && version == identity.version && dtype == identity.dtype &&
               (identity.layout->contiguous ? layout->contiguous && layout->elements == identity.layout->elements
                                            : layout == identity.layout);
    }
};

struct Memory {
    WeakOwner owner;
    std::vector<MeasuredView> views{};
    bool is_known = false;         // which value it is
    int64_t since = 0, until = 0;  // the versions in which it is this value; most often there is one
    int64_t number = -1;           // of the value; −1 until there is a row of it
};

class Memories {
   public:
    Memory &of(const MemoryOwner &owner) {
        if (known_.size() > sweep_above_) {  // a program without steps, such as a generation loop
            for (auto at = known_.begin(); at != known_.end();)
                at = at->second.owner.expired() ? known_.erase(at) : ++at;
            sweep_above_ = std::max(kBeforeSweep, 2 * known_.size());
        }
        if (Memory *memory = living(owner)) return *memory;
        forget(owner);
        return known_.emplace(address_of(owner), Memory{weak_reference(owner)}).first->second;
    }

    MeasuredView *find(const Identity &identity) {
        Memory *memory = living(identity.owner);
        if (!memory) return nullptr;
        for (MeasuredView &one : memory->views)
            if (one.matches(identity)) return &one;
        return nullptr;
    }

    // The number of the value that a memory holds in a version. Version 0 matches any: `.data` has its own counter.
    int64_t value(Memory &memory, int64_t version) {
        const bool same = memory.is_known && (!version || (memory.since <= version && version <= memory.until));
        if (!same) {
            memory.is_known = true;
            memory.since = memory.until = version;
        }
        if (!same || memory.number < 0) memory.number = values_++;
        return memory.number;
    }

    // An op has written to a memory whose version will only increase when the op has returned.
    void written_ahead(const MemoryOwner &owner, int64_t version) {
        forget(owner);
        Memory &memory = of(owner);
        memory.is_known = true;
        memory.since = version;
        memory.until = version + 1;
    }

    // Dropping an entry may run code that calls this again, so it is removed from the table first.
    void forget(const MemoryOwner &owner) {
        const auto at = known_.find(address_of(owner));
        if (at == known_.end()) return;
        const Memory gone = std::move(at->second);
        known_.erase(at);
    }

    // Drops all measurements; the numbers of values stay.
    void expire() {
        std::vector<std::vector<MeasuredView>> gone;
        for (auto at = known_.begin(); at != known_.end();) {
            gone.push_back(std::move(at->second.views));
            at->second.views.clear();
            at = at->second.is_known && !at->second.owner.expired() ? ++at : known_.erase(at);
        }
    }

    void clear() {
        const auto gone = std::move(known_);
        known_.clear();
    }

   private:
    // What is known of a memory; nullptr when it is nothing, or of another that was at its owner's address before.
    Memory *living(const MemoryOwner &owner) {
        const auto at = known_.find(address_of(owner));
        return at == known_.end() || at->second.owner.expired() ? nullptr : &at->second;
    }

    static constexpr size_t kBeforeSweep = 4096;  // memories that are tracked before dead ones are dropped

    std::unordered_map<const void *, Memory> known_;
    size_t sweep_above_ = kBeforeSweep;
    int64_t values_ = 0;  // how many were numbered
};

}  // namespace astray
