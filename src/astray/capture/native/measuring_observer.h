// Records plain tensors: what all frameworks share of their `TensorObserver`, which knows the framework's tensors.
//
// Unusual cases (a subclass, a layout, a limit, values to keep) are passed to `Observer` in Python, which gets the
// numbers of values from here. The GIL is the lock of everything here. Measuring may release it, so table entries are
// looked up again after it.

#pragma once

#include "memories.h"
#include "observer.h"

namespace astray {

struct TensorNames {
    Ref launches = interned("_launches"), index = interned("_index"), slots = interned("_slots");
    Ref tensor_row = interned("tensor_row"), batch_ready = interned("batch_ready"), stale = interned("stale");
};

inline const TensorNames &tensor_names() {
    static const TensorNames *names = new TensorNames();  // for as long as the program runs
    return *names;
}

// Whether its kept bytes are no longer held by the writer, so that they have to be read again.
inline bool is_stale(const CachedMeasurement &cached) {
    return cached.values && is_true(attribute(cached.values, tensor_names().stale));
}

inline bool call_slow_path(const Ref &slow_path, const Row &row, PyObject *tensor) {
    const Ref seq = Ref::made(PyLong_FromLongLong(row.seq));
    return call(slow_path, seq.get(), name_of(row.role), row.path, tensor).get() == Py_True;
}

// What a row says of a tensor besides its identity.
struct Described {
    PyObject *device;  // its name
    Text device_text;
    bool requires_grad;
};

class MeasuringObserver : public NativeObserver {
   public:
    Ref make_identity, unfilled, writer, row_buffer;
    Ref slow_observe, slow_observe_unread, slow_written, slow_changed, slow_measure;
    std::vector<Dtype> types;  // by the framework's number of a dtype; never resized after it was filled
    const Appending *appending = nullptr;  // appends rows to `row_buffer`; NULL when the writer takes each row
    const Measuring *measuring = nullptr;  // NULL when memory of this process is measured in Python
    Py_ssize_t batch = 0;
    uint8_t roles = 0;  // the recorded roles, a bit each
    int64_t rows = 0;   // counted here, for the quota
    bool on = false, statistics = true, values = false;
    bool ops = false;                 // ops are observed before version counters count their writes
    bool reports_nonfinite = false;   // `observe` returns whether tensors hold NaN or infinities
    bool shared_with_python = false;  // whether `Observer` in Python may have measured memories too
    Memories memories;

    // `given` has what `native_observer` passes, in its order; `measuring_capsule` may be None.
    void use(const std::vector<PyObject *> &given, Py_ssize_t batch_size, PyObject *measuring_capsule) {
        Ref *members[] = {&make_identity, &unfilled, &writer, &row_buffer, &slow_observe, &slow_observe_unread,
                          &slow_written, &slow_changed, &slow_measure};
        for (size_t i = 0; i < std::size(members); ++i) *members[i] = Ref::shared(given[i]);
        batch = batch_size;
        appending = find_appending();
        if (appending && !appending->are_tensors(row_buffer)) appending = nullptr;
        if (measuring_capsule == Py_None) return;
        measuring = static_cast<const Measuring *>(PyCapsule_GetPointer(measuring_capsule, MEASURING));
        if (!measuring) throw PythonError();
    }

    // The framework's dtype of this number has this name.
    void name_dtype(size_t number, PyObject *name) {
        if (types.size() <= number) types.resize(number + 1);
        Dtype &type = types[number];
        type.name = Ref::shared(name);
        type.text = text_of(type.name);
        if (measuring) type.number = measuring->dtype(type.text.data);
    }

    // Ends the step, and what goes with it.
    virtual void next_step() {}
    virtual void expire() {}

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&slow_observe, &slow_observe_unread, &slow_written, &slow_changed, &slow_measure, &writer})
            visit(*one);
    }

   protected:
    ~MeasuringObserver() = default;

    Layouts layouts;

    // nullptr for one that cannot be measured.
    const Dtype *dtype_of(size_t number) const {
        return number < types.size() && types[number].name ? &types[number] : nullptr;
    }

    // Whether a row is recorded: of a call that has none, or of a role that the settings leave out, nothing is.
    bool is_wanted(const Row &row) const { return row.seq >= 0 && (roles & bit_of(row.role)); }

    // The Python object of a memory's owner.
    virtual Ref owner_object(const MemoryOwner &owner) const = 0;

    // Measures memory of this process.
    CachedMeasurement measure_here(const Identity &identity) {
        CachedMeasurement cached;
        cached.is_measured = true;
        cached.has_statistics = statistics;
        const Layout &layout = *identity.layout;
        check(measuring->measure(identity.address, identity.dtype->number, layout.shape.data(), layout.stride.data(),
                                 static_cast<int>(layout.shape.size()), statistics, &cached.measured));
        return cached;
    }

    // Has Python measure it, and keep its values.
    CachedMeasurement measure_in_python(const Identity &identity, PyObject *tensor, const Row &row) {
        const Layout &layout = *identity.layout;
        const Ref address = Ref::made(PyLong_FromUnsignedLongLong(identity.address));
        const Ref known = call(make_identity, owner_object(identity.owner).get(), Py_None, address.get(),
                               identity.dtype->name.get(), layout.shape_tuple().get(), layout.stride_tuple().get());
        const Ref seq = Ref::made(PyLong_FromLongLong(row.seq));
        return CachedMeasurement::of_python(
            call(slow_measure, tensor, known.get(), seq.get(), name_of(row.role), row.path));
    }

    // Records a tensor that has been identified; `measure` is called unless its measurement is known. Returns whether
    // it holds NaN or infinities, if `reports_nonfinite`.
    template <class Measure>
    bool record(const Identity &identity, const Row &row, const Described &described, Measure measure) {
        note_filled(identity.owner);
        CachedMeasurement cached;
        int64_t number = -1;
        const MeasuredView *known = memories.find(identity);
        if (known) {
            cached = known->cached, number = known->number;
            if (is_stale(cached)) known = nullptr, number = -1;
        }
        if (!known) cached = measure();
        if (number < 0) {
            Memory &memory = memories.of(identity.owner);
            number = memories.value(memory, identity.version);
            MeasuredView *view = memories.find(identity);
            if (view) view->cached = cached, view->number = number;
            else memory.views.push_back(MeasuredView{identity.address, identity.version, identity.dtype,
                                                     identity.layout, cached, number});
        }
        write_row(identity, row, described, cached, number);
        return reports_nonfinite && cached.is_nonfinite();
    }

    // Whether a memory has not been filled yet.
    bool is_unfilled(const MemoryOwner &memory) const {
        if (!PyDict_Size(unfilled)) return false;
        const Ref owner = owner_object(memory);
        return check(PyDict_Contains(unfilled, Ref::made(PyLong_FromVoidPtr(owner.get()))));
    }

    // If a call takes a memory as an input, it must have been filled by a kernel that we cannot see.
    void note_filled(const MemoryOwner &memory) {
        if (!is_unfilled(memory)) return;
        const Ref owner = owner_object(memory);
        check(PyDict_DelItem(unfilled, Ref::made(PyLong_FromVoidPtr(owner.get()))));
    }

   private:
    void write_row(const Identity &identity, const Row &row, const Described &described,
                   const CachedMeasurement &cached, int64_t number) {
        if (!appending) return pass_row(identity, row, described, cached, number);
        Ref path, placement, note;  // keep encoded texts alive
        const Layout &layout = *identity.layout;
        TensorRow written{};
        written.seq = row.seq;
        written.role = text_of(name_of(row.role), path);
        written.path = text_of(row.path, path);
        written.dtype = identity.dtype->text;
        written.shape = layout.shape.data(), written.stride = layout.stride.data();
        written.dims = static_cast<int64_t>(layout.shape.size());
        written.device = described.device_text;
        written.requires_grad = described.requires_grad;
        written.ticket = cached.ticket;
        written.measured = cached.is_measured ? &cached.measured : nullptr;
        written.has_statistics = cached.has_statistics;
        written.values = cached.values ? cached.values.get() : Py_None;
        if (cached.placement) written.placement = text_of(cached.placement, placement);
        if (cached.note) written.note = text_of(cached.note, note);
        written.value = number;
        const Py_ssize_t count = appending->append_tensor(row_buffer, &written);
        if (count < 0) throw PythonError();
        if (count >= batch) call_method(writer, tensor_names().batch_ready, row_buffer.get());
    }

    // Passes the row to the writer as a tuple.
    void pass_row(const Identity &identity, const Row &row, const Described &described,
                  const CachedMeasurement &cached, int64_t number) {
        const auto or_none = [](const Ref &object) { return object ? object.get() : Py_None; };
        const Ref tuple = Ref::made(Py_BuildValue(
            "LOOONNONNNOOON", static_cast<long long>(row.seq), name_of(row.role), row.path, identity.dtype->name.get(),
            identity.layout->shape_tuple().release(), identity.layout->stride_tuple().release(), described.device,
            PyBool_FromLong(described.requires_grad), cached.statistics().release(),
            cached.is_measured ? PyLong_FromUnsignedLongLong(cached.measured.fingerprint) : none().release(),
            or_none(cached.values), or_none(cached.placement), or_none(cached.note), PyLong_FromLongLong(number)));
        call_method(writer, tensor_names().tensor_row, tuple.get());
    }
};

}  // namespace astray
