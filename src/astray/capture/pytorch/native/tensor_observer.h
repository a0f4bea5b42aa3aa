// Records plain torch tensors: their metadata, their measurements, and the number of the value that each holds.
//
// Unusual cases (a subclass, a layout, a limit, values to keep, a full ring) are passed to `Observer` in Python, which
// gets the numbers of values from here. The GIL is the lock of everything here. Measuring and launching release it, so
// table entries are looked up again after them.

#pragma once

#include "memories.h"
#include "observer.h"

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

class TensorObserver final : public NativeObserver {
   public:
    Ref parameter_type, tensor_type, devices, cuda_measurers, stream, measure_together, make_identity, unfilled, writer;
    Ref row_buffer;
    Ref slow_observe, slow_observe_unread, slow_written, slow_changed, slow_measure;
    std::array<Dtype, static_cast<size_t>(c10::ScalarType::NumOptions)> types;
    const Appending *appending = nullptr;  // appends rows to `row_buffer`; NULL when the writer takes each row
    const Measuring *measuring = nullptr;  // NULL when memory of this process is measured in Python
    const Launching *launching = nullptr;  // NULL when kernels are not launched natively
    Py_ssize_t batch = 0;
    uint8_t roles = 0;  // the recorded roles, a bit each
    int64_t rows = 0;  // counted here, for the quota
    bool on = false, statistics = true, values = false;
    bool ops = false;       // ops are observed before version counters count their writes
    bool reports_nonfinite = false;  // `observe` returns whether tensors hold NaN or infinities
    bool shared_with_python = false;    // whether `Observer` in Python may have measured memories too
    Memories memories;
    LongLivedTensors long_lived;

    // Records one tensor as it is now. Returns whether it holds NaN or infinities, if that is known and
    // `reports_nonfinite`.
    bool observe(const Row &row, PyObject *tensor) override;
    bool observe(const Row &row, const at::Tensor &tensor);
    // The same for one whose memory may not have been filled yet.
    bool observe_unread(const Row &row, PyObject *tensor) override;
    // A call has written into this tensor, perhaps without changing its version counter; `written`: it may be filled
    // now.
    void changed(PyObject *tensor) override { forget_written(slow_changed, tensor, false, false); }
    void written(PyObject *tensor) override { forget_written(slow_written, tensor, PyDict_Size(unfilled) != 0, ops); }

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&slow_observe, &slow_observe_unread, &slow_written, &slow_changed, &slow_measure,
                         &measure_together, &writer, &cuda_measurers})
            visit(*one);
    }

   private:
    void forget_written(const Ref &slow_path, PyObject *tensor, bool more, bool ahead);
    Layouts layouts;
    std::vector<NamedDevice> known_devices;

    bool is_plain(PyObject *tensor) const;
    // Whether it exists in every step: a parameter, a buffer, an optimizer's state. `object` may be empty.
    bool is_long_lived(const Row &row, PyObject *object) const;
    std::optional<Identity> identify(const at::Tensor &tensor);
    const NamedDevice &device_of(const at::Tensor &tensor);
    bool is_on_cpu(const Identity &identity) const;
    Ref memory_of(const Identity &identity) const;
    CachedMeasurement measure_on_cpu(const Identity &identity);
    std::shared_ptr<LaunchPlan> read_launch_plan(PyObject *measurer, PyObject *slots, const Identity &identity,
                                                 long alignment);
    std::shared_ptr<LaunchPlan> find_launch_plan(PyObject *measurer, PyObject *slots, const Identity &identity);
    int64_t launch_into(Slots *slots, const LaunchPlan &plan, uint64_t stream, uint64_t address) const;
    int64_t measure_on_device(PyObject *measurer, const Identity &identity);
    CachedMeasurement measure_first(const at::Tensor &tensor, const Identity &identity, PyObject *device,
                                    const Row &row);
    void measure_group(const std::vector<std::pair<at::Tensor, Identity>> &group);
    void measure_long_lived();
    void write_row(const TensorRow &row, const Identity &identity, const Row &of, const CachedMeasurement &cached,
                   PyObject *device);
    bool is_unfilled(const c10::Storage &storage) const;
    void note_filled(const c10::Storage &storage);
    bool record(const at::Tensor &tensor, const Identity &identity, const Row &row, bool is_long_lived);
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
    const Dtype &dtype = types[static_cast<size_t>(tensor.scalar_type())];
    const void *data = dtype.name ? tensor.const_data_ptr() : nullptr;
    if (!data) return std::nullopt;
    return Identity{tensor.storage(), layouts.find(tensor), &dtype, reinterpret_cast<uint64_t>(data),
                    static_cast<int64_t>(impl->version_counter().current_version()), tensor.device()};
}

inline const NamedDevice &TensorObserver::device_of(const at::Tensor &tensor) {
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

inline bool TensorObserver::is_on_cpu(const Identity &identity) const { return identity.device.is_cpu() && measuring; }

inline Ref TensorObserver::memory_of(const Identity &identity) const {
    return Ref::made(Py_BuildValue("KOOO", static_cast<unsigned long long>(identity.address),
                                   identity.dtype->name.get(),
                                   identity.layout->shape_tuple().get(), identity.layout->stride_tuple().get()));
}

// Measures memory of this process.
inline CachedMeasurement TensorObserver::measure_on_cpu(const Identity &identity) {
    CachedMeasurement cached;
    cached.is_measured = true;
    cached.has_statistics = statistics;
    const Layout &layout = *identity.layout;
    check(measuring->measure(identity.address, identity.dtype->number, layout.shape.data(), layout.stride.data(),
                             static_cast<int>(layout.shape.size()), statistics, &cached.measured));
    return cached;
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
    if (!values && is_on_cpu(identity)) return measure_on_cpu(identity);
    if (!values) {
        const Ref measurer = Ref::shared(PyDict_GetItemWithError(cuda_measurers, device));
        if (!measurer && PyErr_Occurred()) throw PythonError();
        const int64_t ticket = measurer ? measure_on_device(measurer, identity) : -1;
        if (ticket >= 0) return CachedMeasurement::of_ticket(ticket);
    }
    const Ref owner = Ref::made(THPStorage_Wrap(tensor.storage()));
    const Ref known = call(make_identity, owner.get(), Py_None,
                           Ref::made(PyLong_FromUnsignedLongLong(identity.address)).get(),
                           identity.dtype->name.get(), identity.layout->shape_tuple().get(),
                               identity.layout->stride_tuple().get());
    const Ref object = Ref::made(THPVariable_Wrap(tensor)), seq = Ref::made(PyLong_FromLongLong(row.seq));
    return CachedMeasurement::of_python(call(slow_measure, object.get(), known.get(), seq.get(), name_of(row.role),
                                             row.path));
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
        memories.of(identity.storage).views.push_back(
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
            is_on_cpu(*identity) ||
            memories.find(*identity))
            continue;
        auto fits = [&](const auto &group) {
            return group[0].second.dtype == identity->dtype && group[0].second.device == identity->device;
        };
        auto at = std::find_if(groups.begin(), groups.end(), fits);
        if (at == groups.end()) at = groups.emplace(groups.end());
        at->emplace_back(tensor, *identity);
    }
    for (const auto &group : groups) measure_group(group);
}

// ---- observing -----------------------------------------------------------------------------------------------------

inline void TensorObserver::write_row(const TensorRow &row, const Identity &identity, const Row &of,
                                      const CachedMeasurement &cached,
                             PyObject *device) {
    if (appending) {
        const Py_ssize_t count = appending->append_tensor(row_buffer, &row);
        if (count < 0) throw PythonError();
        if (count >= batch) call_method(writer, tensor_names().batch_ready, row_buffer.get());
        return;
    }
    const auto or_none = [](const Ref &object) { return object ? object.get() : Py_None; };
    const Ref tuple = Ref::made(Py_BuildValue(
        "LOOONNONNNOOON", static_cast<long long>(of.seq), name_of(of.role), of.path, identity.dtype->name.get(),
        identity.layout->shape_tuple().release(), identity.layout->stride_tuple().release(), device,
        PyBool_FromLong(row.requires_grad), cached.statistics().release(),
        cached.is_measured ? PyLong_FromUnsignedLongLong(cached.measured.fingerprint) : none().release(),
            or_none(cached.values),
        or_none(cached.placement), or_none(cached.note), PyLong_FromLongLong(row.value)));
    call_method(writer, tensor_names().tensor_row, tuple.get());
}

// Whether a memory has not been filled yet.
inline bool TensorObserver::is_unfilled(const c10::Storage &storage) const {
    if (!PyDict_Size(unfilled.get())) return false;
    const Ref owner = Ref::made(THPStorage_Wrap(storage));
    const Ref number = Ref::made(PyLong_FromVoidPtr(owner.get()));
    return check(PyDict_Contains(unfilled.get(), number.get()));
}

// If a call takes a memory as an input, it must have been filled by a kernel that we cannot see.
inline void TensorObserver::note_filled(const c10::Storage &storage) {
    if (!is_unfilled(storage)) return;
    const Ref owner = Ref::made(THPStorage_Wrap(storage));
    check(PyDict_DelItem(unfilled.get(), Ref::made(PyLong_FromVoidPtr(owner.get())).get()));
}

// Whether its kept bytes are no longer held by the writer, so that they have to be read again.
inline bool is_stale(const CachedMeasurement &cached) { return cached.values &&
                                                       is_true(attribute(cached.values, tensor_names().stale)); }

// Records a tensor that has been identified. Returns whether it holds NaN or infinities, if `reports_nonfinite`.
inline bool TensorObserver::record(const at::Tensor &tensor, const Identity &identity, const Row &row,
                                   bool is_long_lived) {
    note_filled(identity.storage);
    const bool is_grouped = is_long_lived && !values && !is_on_cpu(identity);
    if (is_grouped && long_lived.is_due) measure_long_lived();
    CachedMeasurement cached;
    int64_t number = -1;
    const NamedDevice where = device_of(tensor);
    const MeasuredView *known = memories.find(identity);
    if (known) {
        cached = known->cached, number = known->number;
        if (is_stale(cached)) known = nullptr, number = -1;
    }
    if (!known) cached = measure_first(tensor, identity, where.device, row);
    if (number < 0) {
        Memory &memory = memories.of(identity.storage);
        number = memories.value(memory, identity.version);
        MeasuredView *view = memories.find(identity);
        if (view) view->cached = cached, view->number = number;
        else memory.views.push_back(MeasuredView{identity.address, identity.version, identity.dtype, identity.layout,
                                                 cached, number});
    }
    if (is_grouped) long_lived.note(tensor, known != nullptr);
    Ref path, placement, note;  // keep encoded texts alive
    const Layout &layout = *identity.layout;
    TensorRow written{};
    written.seq = row.seq;
    written.role = text_of(name_of(row.role), path);
    written.path = text_of(row.path, path);
    written.dtype = identity.dtype->text;
    written.shape = layout.shape.data(), written.stride = layout.stride.data();
    written.dims = static_cast<int64_t>(layout.shape.size());
    written.device = where.text;
    written.requires_grad = tensor.requires_grad();
    written.ticket = cached.ticket;
    written.measured = cached.is_measured ? &cached.measured : nullptr;
    written.has_statistics = cached.has_statistics;
    written.values = cached.values ? cached.values.get() : Py_None;
    if (cached.placement) written.placement = text_of(cached.placement, placement);
    if (cached.note) written.note = text_of(cached.note, note);
    written.value = number;
    write_row(written, identity, row, cached, where.name);
    return reports_nonfinite && cached.is_nonfinite();
}

inline bool call_slow_path(const Ref &slow_path, const Row &row, PyObject *tensor) {
    const Ref seq = Ref::made(PyLong_FromLongLong(row.seq));
    return call(slow_path, seq.get(), name_of(row.role), row.path, tensor).get() == Py_True;
}

inline bool TensorObserver::observe(const Row &row, PyObject *tensor) {
    if (!on) return shared_with_python = true, call_slow_path(slow_observe, row, tensor);
    // A call that has no row, or a role that is not recorded.
    if (row.seq < 0 || !(roles & bit_of(row.role))) return false;
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
        if (row.seq < 0 || !(roles & bit_of(row.role))) return false;
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

}  // namespace astray
