// Records plain torch tensors: their metadata, their measurements, and the number of the value that each holds. Those
// on a card are measured there, by kernels that are launched from here.

#pragma once

#include "long_lived.h"
#include "measuring_observer.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include "device/_launch.h"

namespace astray {

// The arguments that every kernel gets before its own: the tensor, the partial rows and the first free one, and the
// slot in the table of measurements. See `CudaMeasurer.measure`.
enum { kAddress, kRows, kRowCount, kFirstRow, kTable, kSlot, kOwn };

// The dispatch keys of tensors that wrap others: of transforms, of a compiler, of Python classes.
inline const c10::DispatchKeySet kWrapperKeys({c10::DispatchKey::Functionalize, c10::DispatchKey::Python,
                                c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});

struct NamedDevice {
    c10::Device where;
    Ref device, name;  // the torch.device, and its name in rows
    Text text;
};

class TensorObserver final : public MeasuringObserver {
   public:
    Ref parameter_type, tensor_type, devices, cuda_measurers, stream, measure_together;
    const Launching *launching = nullptr;  // NULL when kernels are not launched natively

    // Records one tensor as it is now. Returns whether it holds NaN or infinities, if that is known and
    // `reports_nonfinite`.
    bool observe(const Row &row, PyObject *tensor) override;
    bool observe(const Row &row, const at::Tensor &tensor);
    bool observe_unread(const Row &row, PyObject *tensor) override;
    void changed(PyObject *tensor) override { forget_written(slow_changed, tensor, false, false); }
    void written(PyObject *tensor) override { forget_written(slow_written, tensor, PyDict_Size(unfilled) != 0, ops); }
    void next_step() override { long_lived.is_due = true; }
    void expire() override { long_lived.expire(); }

    template <class Visit>
    void each(Visit visit) {
        MeasuringObserver::each(visit);
        visit(measure_together);
        visit(cuda_measurers);
    }

   private:
    LongLivedTensors long_lived;
    std::vector<NamedDevice> known_devices;

    bool is_plain(PyObject *tensor) const;
    // Whether it exists in every step: a parameter, a buffer, an optimizer's state. `object` may be empty.
    bool is_long_lived(const Row &row, PyObject *object) const;
    std::optional<Identity> identify(const at::Tensor &tensor);
    NamedDevice device_of(const at::Tensor &tensor);
    bool is_measured_here(const at::Tensor &tensor) const;
    Ref owner_object(const MemoryOwner &owner) const override { return Ref::made(THPStorage_Wrap(owner)); }
    Ref memory_of(const Identity &identity) const;
    std::shared_ptr<LaunchPlan> read_launch_plan(PyObject *measurer, PyObject *slots, const Identity &identity,
                                                 long alignment);
    std::shared_ptr<LaunchPlan> find_launch_plan(PyObject *measurer, PyObject *slots, const Identity &identity);
    int64_t launch_into(Slots *slots, const LaunchPlan &plan, uint64_t stream, uint64_t address) const;
    int64_t measure_on_device(PyObject *measurer, const Identity &identity);
    CachedMeasurement measure_first(const at::Tensor &tensor, const Identity &identity, PyObject *device,
                                    const Row &row);
    void measure_group(const std::vector<std::pair<at::Tensor, Identity>> &group);
    void measure_long_lived();
    bool record(const at::Tensor &tensor, const Identity &identity, const Row &row, bool is_long_lived);
    void forget_written(const Ref &slow_path, PyObject *tensor, bool more, bool ahead);
};

// ---- what a tensor is ----------------------------------------------------------------------------------------------

inline bool TensorObserver::is_plain(PyObject *tensor) const {
    const PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
    return type == tensor_type.get() || type == parameter_type.get();
}

inline bool TensorObserver::is_long_lived(const Row &row, PyObject *object) const {
    return row.role == Role::parameter || row.role == Role::state ||
           (object && reinterpret_cast<PyObject *>(Py_TYPE(object)) == parameter_type.get());
}

inline std::optional<Identity> TensorObserver::identify(const at::Tensor &tensor) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    // Excluded are tensors without a single address, shape or version (sparse, nested, inside a transform, made in
    // inference mode), and those whose sign is a lazy flag.
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage() || impl->is_inference() ||
        tensor.is_nested() || tensor.is_neg() || tensor.is_conj() || impl->has_symbolic_sizes_strides() ||
        impl->key_set().has_any(kWrapperKeys))
        return std::nullopt;
    const Dtype *dtype = dtype_of(static_cast<size_t>(tensor.scalar_type()));
    const void *data = dtype ? tensor.const_data_ptr() : nullptr;
    if (!data) return std::nullopt;
    const c10::IntArrayRef shape = tensor.sizes(), stride = tensor.strides();
    return Identity{tensor.storage(), layouts.find({shape.data(), shape.size()}, {stride.data(), stride.size()}),
                    dtype, reinterpret_cast<uint64_t>(data),
                    static_cast<int64_t>(impl->version_counter().current_version())};
}

inline NamedDevice TensorObserver::device_of(const at::Tensor &tensor) {
    for (const NamedDevice &one : known_devices)
        if (one.where == tensor.device()) return one;
    Ref device = Ref::made(THPDevice_New(tensor.device()));
    Ref name = Ref::shared(PyDict_GetItemWithError(devices.get(), device.get()));
    if (!name) {
        if (PyErr_Occurred()) throw PythonError();
        name = Ref::made(PyObject_Str(device.get()));
        check(PyDict_SetItem(devices.get(), device.get(), name.get()));
    }
    known_devices.push_back(NamedDevice{tensor.device(), device, name, text_of(name)});
    return known_devices.back();
}

// ---- measuring -----------------------------------------------------------------------------------------------------

inline bool TensorObserver::is_measured_here(const at::Tensor &tensor) const {
    return tensor.device().is_cpu() && measuring;
}

inline Ref TensorObserver::memory_of(const Identity &identity) const {
    return Ref::made(Py_BuildValue("KOOO", static_cast<unsigned long long>(identity.address),
                                   identity.dtype->name.get(),
                                   identity.layout->shape_tuple().get(), identity.layout->stride_tuple().get()));
}

// Reads from the measurer how tensors of a layout are launched. Empty when it does not know the layout yet, or
// launches it in another way.
inline std::shared_ptr<LaunchPlan> TensorObserver::read_launch_plan(PyObject *measurer, PyObject *slots,
                                                                    const Identity &identity, long alignment) {
    const Ref key = Ref::made(Py_BuildValue("OOOlOO", identity.dtype->name.get(), identity.layout->shape_tuple().get(),
                                            identity.layout->stride_tuple().get(), alignment, Py_None,
                                            statistics ? Py_True : Py_False));
    const Ref launches = Ref::made(PyObject_GetAttr(measurer, tensor_names().launches.get()));
    const Ref found = Ref::shared(PyDict_GetItemWithError(launches.get(), key.get()));
    PyObject *launch, *arguments;
    unsigned long long programs;
    if (!found) {
        if (PyErr_Occurred()) throw PythonError();
        return nullptr;
    }
    if (!PyArg_ParseTuple(found.get(), "OKO!", &launch, &programs, &PyTuple_Type, &arguments)) throw PythonError();
    PyObject *kernel = PyCFunction_CheckExact(launch) ? PyCFunction_GET_SELF(launch) : nullptr;
    const Py_ssize_t count = PyTuple_Size(arguments);
    if (!kernel || launching->words(kernel) != kOwn + count) return nullptr;
    auto plan = std::make_shared<LaunchPlan>();
    for (Py_ssize_t i = 0; i < count; ++i) {
        plan->arguments.push_back(PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(arguments, i)));
        if (PyErr_Occurred()) throw PythonError();
    }
    plan->slots = Ref::shared(slots);
    plan->dtype = identity.dtype;
    plan->kernel = Ref::shared(kernel);
    plan->alignment = alignment;
    plan->statistics = statistics;
    plan->programs = programs;
    identity.layout->plans.push_back(plan);
    return plan;
}

inline std::shared_ptr<LaunchPlan> TensorObserver::find_launch_plan(PyObject *measurer, PyObject *slots,
                                                                    const Identity &identity) {
    const long alignment = static_cast<long>(identity.address % 16);
    for (const auto &plan : identity.layout->plans)
        if (plan->slots.get() == slots && plan->dtype == identity.dtype && plan->alignment == alignment &&
            plan->statistics == statistics)
            return plan;
    return read_launch_plan(measurer, slots, identity, alignment);
}

// Launches a kernel into the next slot. Returns its ticket, or −1 when Python has to do it. The slots are locked during
// the launch, so that no segment is fetched meanwhile.
inline int64_t TensorObserver::launch_into(Slots *slots, const LaunchPlan &plan, uint64_t stream,
                                           uint64_t address) const {
    uint64_t words[kMaxArguments] = {};
    words[kAddress] = address;
    words[kRows] = slots->rows_at;
    words[kRowCount] = static_cast<uint64_t>(slots->partials);
    words[kTable] = slots->table_at;
    std::copy(plan.arguments.begin(), plan.arguments.end(), words + kOwn);
    if (!PyThread_acquire_lock(slots->lock, NOWAIT_LOCK)) return -1;
    int64_t ticket = -1;
    words[kFirstRow] = static_cast<uint64_t>(slots->used);
    words[kSlot] = static_cast<uint64_t>(slots->count);
    const int64_t programs = static_cast<int64_t>(plan.programs);
    // Every 64th launch is left to the measurer, which checks the time.
    if (slots->has_stream && slots->stream == stream && slots->count % 64 && slots->count < slots->most &&
        slots->used + programs <= slots->partials && launching->launch(plan.kernel.get(), plan.programs, stream,
            words) == 0) {
        ticket = (slots->number * slots->most + slots->count++) * 2 + plan.statistics;
        slots->used += programs;
    }
    PyThread_release_lock(slots->lock);
    return ticket;
}

// Has a tensor measured on its device. Returns the ticket, or −1 when Python has to do it.
inline int64_t TensorObserver::measure_on_device(PyObject *measurer, const Identity &identity) {
    if (!launching) return -1;
    const Ref slots = attribute(measurer, tensor_names().slots);
    if (!launching->are_slots(slots)) return -1;
    const Ref current = Ref::made(PyObject_CallOneArg(stream, attribute(measurer, tensor_names().index)));
    const uint64_t raw = PyLong_AsUnsignedLongLongMask(current);
    if (PyErr_Occurred()) throw PythonError();
    const std::shared_ptr<LaunchPlan> plan = find_launch_plan(measurer, slots, identity);
    return plan ? launch_into(reinterpret_cast<Slots *>(slots.get()), *plan, raw, identity.address) : -1;
}

// Measures a memory that is not in the tables.
inline CachedMeasurement TensorObserver::measure_first(const at::Tensor &tensor, const Identity &identity,
                                                       PyObject *device, const Row &row) {
    if (!values && is_measured_here(tensor)) return measure_here(identity);
    if (!values) {
        const Ref measurer = Ref::shared(PyDict_GetItemWithError(cuda_measurers, device));
        if (!measurer && PyErr_Occurred()) throw PythonError();
        const int64_t ticket = measurer ? measure_on_device(measurer, identity) : -1;
        if (ticket >= 0) return CachedMeasurement::of_ticket(ticket);
    }
    return measure_in_python(identity, Ref::made(THPVariable_Wrap(tensor)), row);
}

// Measures tensors of one dtype and device by one launch, and stores their tickets.
inline void TensorObserver::measure_group(const std::vector<std::pair<at::Tensor, Identity>> &group) {
    if (group.size() < 2) return;
    const NamedDevice where = device_of(group[0].first);
    const Ref memories_given = Ref::made(PyList_New(0));
    for (const auto &[_, identity] : group) check(PyList_Append(memories_given.get(), memory_of(identity).get()));
    const Ref tickets = Ref::made(PyObject_CallFunctionObjArgs(measure_together.get(), where.device.get(),
                                                               memories_given.get(),
                                                               statistics ? Py_True : Py_False, nullptr));
    if (tickets.get() == Py_None) return;
    Py_ssize_t taken = 0;
    for (const auto &[tensor, identity] : group) {
        PyObject *ticket = PyList_GetItem(tickets.get(), taken++);
        if (!ticket) throw PythonError();
        memories.of(identity.owner).views.push_back(
            MeasuredView{identity.address, identity.version, identity.dtype, identity.layout,
                         CachedMeasurement::of_ticket(integer(ticket))});
        long_lived.note_grouped(tensor);
    }
}

inline void TensorObserver::measure_long_lived() {
    std::vector<std::vector<std::pair<at::Tensor, Identity>>> groups;
    for (const at::Tensor &tensor : long_lived.take_due()) {
        const std::optional<Identity> identity = identify(tensor);
        if (!identity || !identity->layout->contiguous || !identity->layout->elements || identity->address % 16 ||
            is_measured_here(tensor) || memories.find(*identity))
            continue;
        auto fits = [&](const auto &group) {
            return group[0].second.dtype == identity->dtype && group[0].first.device() == tensor.device();
        };
        auto at = std::find_if(groups.begin(), groups.end(), fits);
        if (at == groups.end()) at = groups.emplace(groups.end());
        at->emplace_back(tensor, *identity);
    }
    for (const auto &group : groups) measure_group(group);
}

// ---- observing -----------------------------------------------------------------------------------------------------

inline bool TensorObserver::record(const at::Tensor &tensor, const Identity &identity, const Row &row,
                                   bool is_long_lived) {
    const bool is_grouped = is_long_lived && !values && !is_measured_here(tensor);
    if (is_grouped && long_lived.is_due) measure_long_lived();
    const NamedDevice where = device_of(tensor);
    bool again = true;
    const bool bad = MeasuringObserver::record(identity, row, {where.name, where.text, tensor.requires_grad()}, [&] {
        again = false;
        return measure_first(tensor, identity, where.device, row);
    });
    if (is_grouped) long_lived.note(tensor, again);
    return bad;
}

inline bool TensorObserver::observe(const Row &row, PyObject *tensor) {
    if (!on) return shared_with_python = true, call_slow_path(slow_observe, row, tensor);
    if (!is_wanted(row)) return false;
    const bool plain = is_plain(tensor);
    const std::optional<Identity> identity = plain ? identify(THPVariable_Unpack(tensor)) : std::nullopt;
    if (!identity) return shared_with_python = true, call_slow_path(slow_observe, row, tensor);
    ++rows;
    return record(THPVariable_Unpack(tensor), *identity, row, is_long_lived(row, tensor));
}

inline bool TensorObserver::observe_unread(const Row &row, PyObject *tensor) {
    bool may_be_unfilled = PyDict_Size(unfilled.get()) != 0;
    if (may_be_unfilled && is_plain(tensor) && THPVariable_Unpack(tensor).has_storage())
        may_be_unfilled = is_unfilled(THPVariable_Unpack(tensor).storage());
    return may_be_unfilled ? call_slow_path(slow_observe_unread, row, tensor) : observe(row, tensor);
}

// The Python object of a tensor, if it has one already, and whether this version of torch exposes that.
template <class Slot>
auto object_in(const Slot &slot, int) -> decltype(slot.load_pyobj(), std::pair<PyObject *, bool>()) {
    return {slot.load_pyobj(), true};
}
template <class Slot>
auto object_in(const Slot &slot, long) -> decltype(slot.check_pyobj(false), std::pair<PyObject *, bool>()) {
    return {slot.check_pyobj(false).value_or(nullptr), true};  // torch 2.11 and earlier
}
template <class Slot>
std::pair<PyObject *, bool> object_in(const Slot &, ...) {
    return {nullptr, false};
}

// Makes no Python object of the tensor, unless it takes the slow path.
inline bool TensorObserver::observe(const Row &row, const at::Tensor &tensor) {
    const auto [object, is_known] = object_in(*tensor.unsafeGetTensorImpl()->pyobj_slot(), 0);
    if (on && is_known && (!object || is_plain(object))) {
        if (!is_wanted(row)) return false;
        if (const std::optional<Identity> identity = identify(tensor)) {
            ++rows;
            return record(tensor, *identity, row, is_long_lived(row, object));
        }
    }
    return observe(row, Ref::made(THPVariable_Wrap(tensor)));
}

// Forgets the measurements of a tensor's memory. When more may have to be done, Python does it, and calls `forget`.
inline void TensorObserver::forget_written(const Ref &slow_path, PyObject *tensor, bool more, bool ahead) {
    if (!more && !shared_with_python && is_plain(tensor) && THPVariable_Unpack(tensor).has_storage()) {
        const at::Tensor &changed = THPVariable_Unpack(tensor);
        memories.forget(changed.storage());
        if (ahead && !changed.is_inference())
            memories.written_ahead(changed.storage(), static_cast<int64_t>(changed._version()));
        return;
    }
    Ref::made(PyObject_CallOneArg(slow_path, tensor));
}

// Records a tensor of C++, of which a Python object is made only where it has to be.
inline bool observe_value(const ObserverHandle &tensors, const Row &row, const at::Tensor &tensor) {
    if (NativeObserver *native = tensors.native()) return static_cast<TensorObserver *>(native)->observe(row, tensor);
    return tensors.observe(row, Ref::made(THPVariable_Wrap(tensor)));
}

}  // namespace astray
