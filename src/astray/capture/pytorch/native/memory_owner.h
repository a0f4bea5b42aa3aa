// What owns the memory of a tensor: its storage. See native/memories.h.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/Storage.h>

#include "python.h"

namespace astray {

using MemoryOwner = c10::Storage;
using WeakOwner = c10::weak_intrusive_ptr<c10::StorageImpl>;

inline const void *address_of(const MemoryOwner &owner) { return owner.unsafeGetStorageImpl(); }
inline WeakOwner weak_reference(const MemoryOwner &owner) { return owner.getWeakStorageImpl(); }

// From the Python object that Python knows it by.
inline MemoryOwner memory_owner_of(PyObject *owner) {
    if (!THPStorage_Check(owner)) raise(PyExc_TypeError, "The owner of a memory is a storage.");
    return THPStorage_Unpack(owner);
}

}  // namespace astray
