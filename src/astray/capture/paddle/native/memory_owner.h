// What owns the memory of a tensor: its allocation, which views share. See native/memories.h.

#pragma once

#include <paddle/phi/core/dense_tensor.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "python.h"

namespace astray {

using MemoryOwner = std::shared_ptr<phi::Allocation>;
using WeakOwner = std::weak_ptr<phi::Allocation>;

inline const void *address_of(const MemoryOwner &owner) { return owner.get(); }
inline WeakOwner weak_reference(const MemoryOwner &owner) { return owner; }

// An allocation as Python knows it: one object for each, for as long as the allocation lives. It keeps no memory alive.
class AllocationHandles {
public:
    Ref make_handle;  // a class of Python's, whose objects can be referred to weakly

    Ref of(const MemoryOwner &owner) {
        if (known_.size() > sweep_above_) drop_dead();
        Known &known = known_[owner.get()];
        if (!known.handle || known.owner.expired()) {
            owners_.erase(known.handle.get());
            known = {owner, call(make_handle)};
            owners_[known.handle.get()] = owner;
        }
        return known.handle;
    }

    // The allocation of a handle; empty when it is gone.
    MemoryOwner owner(PyObject *handle) const {
        const auto at = owners_.find(handle);
        return at == owners_.end() ? nullptr : at->second.lock();
    }

private:
    static constexpr size_t kBeforeSweep = 4096;
    struct Known {
        WeakOwner owner;
        Ref handle;
    };

    void drop_dead() {
        for (auto at = known_.begin(); at != known_.end();) {
            if (!at->second.owner.expired()) {
                ++at;
                continue;
            }
            owners_.erase(at->second.handle.get());
            at = known_.erase(at);
        }
        sweep_above_ = std::max(kBeforeSweep, 2 * known_.size());
    }

    std::unordered_map<const void *, Known> known_;
    std::unordered_map<PyObject *, WeakOwner> owners_;  // by the handle, which `known_` keeps
    size_t sweep_above_ = kBeforeSweep;
};

inline AllocationHandles *allocation_handles;  // made with the module, for as long as the program runs

// From the Python object that Python knows it by.
inline MemoryOwner memory_owner_of(PyObject *handle) { return allocation_handles->owner(handle); }

}  // namespace astray
