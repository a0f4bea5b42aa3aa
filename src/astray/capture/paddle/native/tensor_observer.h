// Records Paddle's tensors that lie in memory of this process; the others take the slow path.

#pragma once

#include "measuring_observer.h"
#include "paddle_tensors.h"

namespace astray {

class TensorObserver final : public MeasuringObserver {
   public:
    Ref device = interned("cpu");
    Text device_text = text_of(device);

    bool observe(const Row &row, PyObject *tensor) override {
        if (!on) return shared_with_python = true, call_slow_path(slow_observe, row, tensor);
        if (!is_wanted(row)) return false;
        if (!is_tensor(tensor)) return call_slow_path(slow_observe, row, tensor);
        const std::optional<Identity> identity = identify(tensor_in(tensor));
        if (!identity) return shared_with_python = true, call_slow_path(slow_observe, row, tensor);
        return record(*identity, row, !is_true(attribute(tensor, stop_gradient)), [&] { return Ref::shared(tensor); });
    }

    // Records a tensor of C++, such as a gradient, of which a Python object is made only where it has to be.
    bool observe(const Row &row, const paddle::Tensor &tensor) {
        if (on && !is_wanted(row)) return false;
        const std::optional<Identity> identity = on ? identify(tensor) : std::nullopt;
        if (!identity) return observe(row, object_of(tensor));
        return record(*identity, row, false, [&] { return object_of(tensor); });
    }

    bool observe_unread(const Row &row, PyObject *tensor) override {
        const auto *dense = PyDict_Size(unfilled) && is_tensor(tensor) ? dense_in(tensor_in(tensor)) : nullptr;
        const bool may_be_unfilled = dense && dense->Holder() && is_unfilled(dense->Holder());
        return may_be_unfilled ? call_slow_path(slow_observe_unread, row, tensor) : observe(row, tensor);
    }

    void changed(PyObject *tensor) override {
        if (shared_with_python || !forget(tensor)) call(slow_changed, tensor);
    }
    void written(PyObject *tensor) override {
        if (shared_with_python || PyDict_Size(unfilled) || !forget(tensor)) call(slow_written, tensor);
    }

   private:
    Ref stop_gradient = interned("stop_gradient");

    std::optional<Identity> identify(const paddle::Tensor &tensor) {
        const phi::DenseTensor *dense = dense_in(tensor);
        if (!dense || !measuring || !dense->initialized() || dense->place().GetType() != phi::AllocationType::CPU)
            return std::nullopt;
        const Dtype *dtype = dtype_of(static_cast<size_t>(dense->dtype()));
        const void *data = dtype ? dense->data() : nullptr;
        if (!data) return std::nullopt;
        const auto sizes = [](const phi::DDim &dims) {
            return Sizes{dims.Get(), static_cast<size_t>(dims.size())};
        };
        return Identity{dense->Holder(), layouts.find(sizes(dense->dims()), sizes(dense->strides())), dtype,
                        reinterpret_cast<uint64_t>(data), version_of(*dense)};
    }

    template <class MakeObject>
    bool record(const Identity &identity, const Row &row, bool requires_grad, MakeObject object) {
        ++rows;
        return MeasuringObserver::record(identity, row, {device, device_text, requires_grad}, [&] {
            return values ? measure_in_python(identity, object(), row) : measure_here(identity);
        });
    }

    Ref owner_object(const MemoryOwner &owner) const override { return allocation_handles->of(owner); }

    bool forget(PyObject *tensor) {
        const auto *dense = is_tensor(tensor) ? dense_in(tensor_in(tensor)) : nullptr;
        if (dense && dense->Holder()) memories.forget(dense->Holder());
        return dense;
    }
};

// Records a tensor of C++, of which a Python object is made only where it has to be.
inline bool observe_value(const ObserverHandle &tensors, const Row &row, const paddle::Tensor &tensor) {
    if (NativeObserver *native = tensors.native()) return static_cast<TensorObserver *>(native)->observe(row, tensor);
    return tensors.observe(row, object_of(tensor));
}

}  // namespace astray
