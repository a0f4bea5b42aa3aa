// Records plain torch tensors: what they are, what is measured of them, and which value each of them is.
//
// What is out of the ordinary (a subclass, a layout, a limit, values to keep, a full ring) is handed over to `Observer`
// in Python, which asks here which value a memory is. Memories are known by their StorageImpl, to which weak references
// are held: so no address can come to stand for another memory, and no memory lives longer because of us.
//
// The GIL is the lock of everything here. Measuring and launching let go of it, so nothing found in a table is used
// after one of them without being looked for again.

#pragma once

#include "python.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../../device/_launch.h"
#include "../../../store/run_format/_columns.h"

namespace astray {

struct Layout;
struct Way;

// What is kept of a memory once it has been measured; see `CachedMeasurement` in measurement_cache.py.
struct Kept {
    int64_t ticket = -1;  // for what is measured later
    bool is_measured = false, has_statistics = false;
    Measurement measured{};
    Ref values, placement, note;  // empty where there is none

    static Kept of_ticket(int64_t ticket) {
        Kept kept;
        kept.ticket = ticket;
        return kept;
    }
    static Kept of_python(PyObject *sighting);
    Ref statistics() const;
    bool is_bad() const {
        return has_statistics && (measured.counts[kNanCount] || measured.counts[kInfCount]);
    }
};

enum class Role : uint8_t { input, output, parameter, gradient, state };

// The call, role and path of a tensor.
struct Row {
    int64_t seq;
    Role role;
    PyObject *path;
};

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
    int number = -1;  // of the kernels
};

// What a tensor is right now. Two hold the same numbers in the same order if all of it is the same; of contiguous ones
// the shapes may differ.
struct Identity {
    c10::Storage storage;
    std::shared_ptr<Layout> layout;
    const Dtype *dtype;  // of the taker's
    uint64_t address;
    int64_t version;
    c10::Device device;
};

struct Sighting {
    uint64_t address;
    int64_t version;
    const Dtype *dtype;
    std::shared_ptr<Layout> layout;
    Kept kept;
    int64_t number = -1;  // of the value; −1 until there is a row of it

    bool is_of(const Identity &what) const;
};

struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> living{c10::intrusive_ptr<c10::StorageImpl>()};
    std::vector<Sighting> sightings;
    bool is_known = false;           // which value it is
    int64_t since = 0, until = 0;    // the versions in which it is this value; most often there is one
    int64_t number = -1;             // of the value; −1 until there is a row of it
};

class Memories {
   public:
    Memory &of(const c10::Storage &storage);
    Sighting *find(const Identity &what);
    int64_t value(Memory &memory, int64_t version);
    // An op has written to a memory, and its version will say so when the op has returned.
    void written_ahead(const c10::Storage &storage, int64_t version);
    void forget(const c10::Storage &storage);
    void expire();  // uses no measurement again; the values are still the same
    void clear();

   private:
    std::unordered_map<const c10::StorageImpl *, Memory> known_;
    size_t crowded_ = 4096;
    int64_t values_ = 0;  // how many were numbered
};

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// A parameter, buffer or state that is measured in every step, and so together with the others.
struct Regular {
    WeakTensor living{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    bool seen = false;       // since they were last measured together
    bool taken = false;      // it was measured with the others then
    bool irregular = false;  // and changed before it was seen: it is measured by itself from now on
};

class Regulars {
   public:
    bool due = false;  // they have not been measured in this step

    void note(const at::Tensor &tensor, bool again);  // `again`: it had been measured in this step as it is now
    std::vector<at::Tensor> take_due();
    void taken(const at::Tensor &tensor);
    void expire();

   private:
    std::unordered_map<const c10::TensorImpl *, Regular> known_;
};

struct NamedDevice {
    c10::Device where;
    Ref device, name;  // as torch has it, and its name in rows
    Text text;
};

class Taker {
   public:
    Ref parameter_type, tensor_type, devices, rings, stream, together, identity, unfilled, writer, lane;
    Ref odd_observe, odd_observe_unread, odd_written, odd_changed, first;
    std::array<Dtype, static_cast<size_t>(c10::ScalarType::NumOptions)> types;
    const Appending *appending = nullptr;  // how rows get into the lane; NULL when the writer takes each
    const Measuring *measuring = nullptr;  // NULL when memory of this process is measured in Python
    const Launching *launching = nullptr;  // NULL when kernels are not launched natively
    Py_ssize_t batch = 0;
    uint8_t roles = 0;  // which are recorded: a bit each
    int64_t rows = 0;  // counted here, for the quota
    bool on = false, statistics = true, values = false;
    bool ops = false;       // calls are seen before the version counters know of their writes
    bool catching = false;  // says which tensors hold NaN or infinities
    bool handed = false;    // whether Python may know of memories too
    Memories memories;
    Regulars regulars;

    // Records one tensor as it is now. Gives whether it holds NaN or infinities, if that is known and asked for.
    bool observe(const Row &row, PyObject *tensor);
    bool observe(const Row &row, const at::Tensor &tensor);
    // The same for one whose memory may not have been filled yet.
    bool observe_unread(const Row &row, PyObject *tensor);
    // A call has written into this tensor, perhaps without its version counter knowing; `written`: it may be filled now.
    void changed(PyObject *tensor) { note_change(odd_changed, tensor, false, false); }
    void written(PyObject *tensor) { note_change(odd_written, tensor, PyDict_Size(unfilled) != 0, ops); }

    template <class Visit>
    void each(Visit visit) {
        for (Ref *one : {&odd_observe, &odd_observe_unread, &odd_written, &odd_changed, &first, &together, &writer, &rings})
            visit(*one);
    }

   private:
    void note_change(const Ref &odd, PyObject *tensor, bool more, bool ahead);
    Layouts layouts;
    std::vector<NamedDevice> known_devices;

    bool is_plain(PyObject *tensor) const;
    // Whether it is there in every step: a parameter, a buffer, an optimizer's state. `object` may be empty.
    bool is_lasting(const Row &row, PyObject *object) const;
    std::optional<Identity> identify(const at::Tensor &tensor);
    const NamedDevice &device_of(const at::Tensor &tensor);
    bool is_near(const Identity &what) const;
    Ref memory_of(const Identity &what) const;
    Kept measure_near(const Identity &what);
    std::shared_ptr<Way> learn_way(PyObject *ring, PyObject *slots, const Identity &what, long alignment);
    std::shared_ptr<Way> find_way(PyObject *ring, PyObject *slots, const Identity &what);
    int64_t launch_into(Slots *slots, const Way &way, uint64_t stream, uint64_t address) const;
    int64_t measure_far(PyObject *ring, const Identity &what);
    Kept measure_first(const at::Tensor &tensor, const Identity &what, PyObject *device, const Row &row);
    void measure_group(const std::vector<std::pair<at::Tensor, Identity>> &group);
    void measure_regulars();
    void write_row(const TensorRow &row, const Identity &what, const Row &of, const Kept &kept, PyObject *device);
    bool is_unfilled(const c10::Storage &storage) const;
    void note_filled(const c10::Storage &storage);
    bool take(const at::Tensor &tensor, const Identity &what, const Row &row, bool is_lasting);
};

inline constexpr size_t kMostLayouts = 20000;  // shapes that are others in every call are forgotten
inline constexpr size_t kEnough = 4096;        // memories that are remembered before the dead are looked for

// What every kernel is given before its own arguments: the tensor, the partial rows and which of them are free, and the
// slot in the table of measurements. See `CudaMeasurer.measure`.
enum { kAddress, kRows, kRowCount, kFirstRow, kTable, kSlot, kOwn };

// Tensors that stand for others: of transforms, of a compiler, of classes in Python.
inline const c10::DispatchKeySet kOdd({c10::DispatchKey::Functionalize, c10::DispatchKey::Python,
                                c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});

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

constexpr std::array<const char *, 5> kRoleNames = {"input", "output", "parameter", "gradient", "state"};

struct Words {
    Ref launches = interned("_launches"), index = interned("_index"), slots = interned("_slots");
    Ref tensor_row = interned("tensor_row"), crowded = interned("crowded"), stale = interned("stale");
    std::array<Ref, 5> roles = {interned(kRoleNames[0]), interned(kRoleNames[1]), interned(kRoleNames[2]),
                                interned(kRoleNames[3]), interned(kRoleNames[4])};
};

inline const Words &word() {
    static const Words *words = new Words();  // for as long as the program runs
    return *words;
}

inline PyObject *name_of(Role role) { return word().roles[static_cast<size_t>(role)]; }
inline uint8_t bit_of(Role role) { return static_cast<uint8_t>(1 << static_cast<int>(role)); }

inline Role role_of(PyObject *name) {
    for (size_t i = 0; i < kRoleNames.size(); ++i)
        if (word().roles[i].get() == name) return static_cast<Role>(i);
    for (size_t i = 0; PyUnicode_Check(name) && i < kRoleNames.size(); ++i)
        if (PyUnicode_CompareWithASCIIString(name, kRoleNames[i]) == 0) return static_cast<Role>(i);
    raise(PyExc_ValueError, "%R is not a role.", name);
}

// A text as rows have it. `owned` keeps what had to be made for it.
inline Text text_of(PyObject *object, Ref &owned) {
    Py_ssize_t size;
    const char *data = PyUnicode_AsUTF8AndSize(object, &size);
    if (!data) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw PythonError();
        PyErr_Clear();  // names may hold what UTF-8 cannot
        owned = Ref::made(PyUnicode_AsEncodedString(object, "utf-8", "backslashreplace"));
        data = PyBytes_AsString(owned);
        size = PyBytes_Size(owned);
    }
    return {data, size};
}

inline Text text_of(const Ref &object) {  // of one that is kept, and plain
    Ref unused;
    return object ? text_of(object, unused) : Text{};
}

// ---- what is known of a memory -------------------------------------------------------------------------------------

constexpr Py_ssize_t kStatistics = 12;  // fields

// From the five fields of a `CachedMeasurement`.
inline Kept Kept::of_python(PyObject *sighting) {
    if (!PyTuple_Check(sighting) || PyTuple_Size(sighting) != 5) raise(PyExc_TypeError, "A sighting has five fields.");
    PyObject *fields = PyTuple_GetItem(sighting, 0), *fingerprint = PyTuple_GetItem(sighting, 1);
    Kept kept;
    if (PyLong_Check(fields)) kept.ticket = integer(fields);
    if (PyTuple_Check(fields)) {
        kept.has_statistics = true;
        if (PyTuple_Size(fields) != kStatistics) raise(PyExc_TypeError, "Statistics have twelve fields.");
        for (int i = 0; i < 6; ++i) {
            PyObject *moment = PyTuple_GetItem(fields, i);
            kept.measured.moments[i] = moment == Py_None ? NAN : PyFloat_AsDouble(moment);
        }
        for (int i = 0; i < 4; ++i) kept.measured.counts[i] = integer(PyTuple_GetItem(fields, 6 + i));
        PyObject *first_bad = PyTuple_GetItem(fields, 10);
        kept.measured.first_bad = first_bad == Py_None ? -1 : integer(first_bad);
        if (first_bad != Py_None) kept.measured.first_bad_value = PyFloat_AsDouble(PyTuple_GetItem(fields, 11));
    }
    if (fingerprint != Py_None) {
        kept.is_measured = true;
        kept.measured.fingerprint = PyLong_AsUnsignedLongLong(fingerprint);
    }
    if (PyErr_Occurred()) throw PythonError();
    Ref *others[] = {&kept.values, &kept.placement, &kept.note};
    for (int i = 0; i < 3; ++i) {
        PyObject *other = PyTuple_GetItem(sighting, 2 + i);
        if (other != Py_None) *others[i] = Ref::shared(other);
    }
    return kept;
}

// As a row has them that is given to the writer as a tuple: a tuple, a ticket or None.
inline Ref Kept::statistics() const {
    if (!has_statistics) return ticket < 0 ? none() : Ref::made(PyLong_FromLongLong(ticket));
    Ref tuple = Ref::made(PyTuple_New(kStatistics));
    Py_ssize_t next = 0;
    const auto add = [&](Ref field) { PyTuple_SetItem(tuple, next++, field.release()); };
    for (const double moment : measured.moments)
        add(std::isnan(moment) ? none() : Ref::made(PyFloat_FromDouble(moment)));
    for (const int64_t number : measured.counts) add(Ref::made(PyLong_FromLongLong(number)));
    const bool bad = measured.first_bad >= 0;
    add(bad ? Ref::made(PyLong_FromLongLong(measured.first_bad)) : none());
    add(bad ? Ref::made(PyFloat_FromDouble(measured.first_bad_value)) : none());
    return tuple;
}

// ---- layouts: equal ones are one object ----------------------------------------------------------------------------

// How a tensor of one layout is measured on one card.
struct Way {
    Ref slots;  // which card: of these its ring has one
    const Dtype *dtype;
    Ref kernel;
    long alignment;
    bool statistics;
    uint64_t programs;
    std::vector<uint64_t> arguments;  // behind those that every kernel has
};

struct Layout {
    std::vector<int64_t> shape, stride;
    int64_t elements = 1;
    bool contiguous = true;
    std::vector<std::shared_ptr<Way>> ways;

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

inline bool Sighting::is_of(const Identity &what) const {
    return address == what.address && version == what.version && dtype == what.dtype &&
           (what.layout->contiguous ? layout->contiguous && layout->elements == what.layout->elements
                                    : layout == what.layout);
}

inline Memory &Memories::of(const c10::Storage &storage) {
    if (known_.size() > crowded_) {  // a program without steps, such as a generation loop
        for (auto at = known_.begin(); at != known_.end();) at = at->second.living.expired() ? known_.erase(at) : ++at;
        crowded_ = std::max(kEnough, 2 * known_.size());
    }
    const auto [at, is_new] = known_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) at->second.living = storage.getWeakStorageImpl();
    return at->second;
}

inline Sighting *Memories::find(const Identity &what) {
    const auto at = known_.find(what.storage.unsafeGetStorageImpl());
    if (at == known_.end()) return nullptr;
    for (Sighting &one : at->second.sightings)
        if (one.is_of(what)) return &one;
    return nullptr;
}

// Which value a memory is in a version of it. A version of 0 tells nothing: `.data` has a counter of its own.
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

// Letting go of what is known may run code that comes back here: it is out of the table by then.
inline void Memories::forget(const c10::Storage &storage) {
    const auto at = known_.find(storage.unsafeGetStorageImpl());
    if (at == known_.end()) return;
    const Memory gone = std::move(at->second);
    known_.erase(at);
}

inline void Memories::expire() {
    std::vector<std::vector<Sighting>> gone;
    for (auto at = known_.begin(); at != known_.end();) {
        gone.push_back(std::move(at->second.sightings));
        at->second.sightings.clear();
        at = at->second.is_known && !at->second.living.expired() ? ++at : known_.erase(at);
    }
}

inline void Memories::clear() {
    const auto gone = std::move(known_);
    known_.clear();
}

// ---- parameters and buffers: all of them together ------------------------------------------------------------------

// They are the same tensors in every step, at the same places, so one launch measures them all when the first of them is
// seen. It reads the others before their modules run; what changes until then has another version, and is measured again.
// A program that changes its weights there, perhaps on a stream of its own, is found out by that, and they are left out.

inline void Regulars::note(const at::Tensor &tensor, bool again) {
    const auto [at, is_new] = known_.try_emplace(tensor.unsafeGetTensorImpl());
    Regular &one = at->second;
    if (is_new) one.living = WeakTensor(tensor.getIntrusivePtr());
    one.irregular |= one.taken && !one.seen && !again;
    one.seen = true;
}

inline std::vector<at::Tensor> Regulars::take_due() {
    due = false;
    std::vector<at::Tensor> found;
    for (auto at = known_.begin(); at != known_.end();) {
        Regular &one = at->second;
        auto living = one.seen ? one.living.lock() : decltype(one.living.lock())();
        if (!living) {
            at = known_.erase(at);
            continue;
        }
        one.taken = one.seen = false;
        if (!one.irregular) found.emplace_back(std::move(living));
        ++at;
    }
    return found;
}

inline void Regulars::taken(const at::Tensor &tensor) {
    const auto at = known_.find(tensor.unsafeGetTensorImpl());
    if (at != known_.end()) at->second.taken = true;
}

inline void Regulars::expire() {
    for (auto &one : known_) one.second.taken = false;  // it is not their fault
}

// ---- what a tensor is ----------------------------------------------------------------------------------------------

inline bool Taker::is_plain(PyObject *tensor) const {
    const PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
    return type == tensor_type.get() || type == parameter_type.get();
}

inline bool Taker::is_lasting(const Row &row, PyObject *object) const {
    return row.role == Role::parameter || row.role == Role::state ||
           (object && reinterpret_cast<PyObject *>(Py_TYPE(object)) == parameter_type.get());
}

inline std::optional<Identity> Taker::identify(const at::Tensor &tensor) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    // No one address, shape or version: sparse, nested, inside a transform, made in inference mode. And a sign that is
    // only a flag yet.
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage() || impl->is_inference() ||
        tensor.is_nested() || tensor.is_neg() || tensor.is_conj() || impl->has_symbolic_sizes_strides() ||
        impl->key_set().has_any(kOdd))
        return std::nullopt;
    const Dtype &dtype = types[static_cast<size_t>(tensor.scalar_type())];
    const void *data = dtype.name ? tensor.const_data_ptr() : nullptr;
    if (!data) return std::nullopt;
    return Identity{tensor.storage(), layouts.find(tensor), &dtype, reinterpret_cast<uint64_t>(data),
                    static_cast<int64_t>(impl->version_counter().current_version()), tensor.device()};
}

inline const NamedDevice &Taker::device_of(const at::Tensor &tensor) {
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

inline bool Taker::is_near(const Identity &what) const { return what.device.is_cpu() && measuring; }

inline Ref Taker::memory_of(const Identity &what) const {
    return Ref::made(Py_BuildValue("KOOO", static_cast<unsigned long long>(what.address), what.dtype->name.get(),
                                   what.layout->shape_tuple().get(), what.layout->stride_tuple().get()));
}

// Measures memory of this process.
inline Kept Taker::measure_near(const Identity &what) {
    Kept kept;
    kept.is_measured = true;
    kept.has_statistics = statistics;
    const Layout &layout = *what.layout;
    check(measuring->measure(what.address, what.dtype->number, layout.shape.data(), layout.stride.data(),
                             static_cast<int>(layout.shape.size()), statistics, &kept.measured));
    return kept;
}

// What the ring has found out about a layout: how it is launched. Empty when it does not know it yet, or launches it
// otherwise.
inline std::shared_ptr<Way> Taker::learn_way(PyObject *ring, PyObject *slots, const Identity &what, long alignment) {
    const Ref key = Ref::made(Py_BuildValue("OOOlOO", what.dtype->name.get(), what.layout->shape_tuple().get(),
                                            what.layout->stride_tuple().get(), alignment, Py_None,
                                            statistics ? Py_True : Py_False));
    const Ref launches = Ref::made(PyObject_GetAttr(ring, word().launches.get()));
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
    auto way = std::make_shared<Way>();
    for (Py_ssize_t i = 0; i < count; ++i) {
        way->arguments.push_back(PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(arguments, i)));
        if (PyErr_Occurred()) throw PythonError();
    }
    way->slots = Ref::shared(slots);
    way->dtype = what.dtype;
    way->kernel = Ref::shared(kernel);
    way->alignment = alignment;
    way->statistics = statistics;
    way->programs = programs;
    what.layout->ways.push_back(way);
    return way;
}

inline std::shared_ptr<Way> Taker::find_way(PyObject *ring, PyObject *slots, const Identity &what) {
    const long alignment = static_cast<long>(what.address % 16);
    for (const auto &way : what.layout->ways)
        if (way->slots.get() == slots && way->dtype == what.dtype && way->alignment == alignment &&
            way->statistics == statistics)
            return way;
    return learn_way(ring, slots, what, alignment);
}

// Launches a kernel into the next slot: its ticket, or −1 when Python should see to it. The slots are locked all the
// while, so that no segment is sent for during a launch.
inline int64_t Taker::launch_into(Slots *slots, const Way &way, uint64_t stream, uint64_t address) const {
    uint64_t words[kMaxArguments] = {};
    words[kAddress] = address;
    words[kRows] = slots->rows_at;
    words[kRowCount] = static_cast<uint64_t>(slots->partials);
    words[kTable] = slots->table_at;
    std::copy(way.arguments.begin(), way.arguments.end(), words + kOwn);
    if (!PyThread_acquire_lock(slots->lock, NOWAIT_LOCK)) return -1;
    int64_t ticket = -1;
    words[kFirstRow] = static_cast<uint64_t>(slots->used);
    words[kSlot] = static_cast<uint64_t>(slots->count);
    const int64_t programs = static_cast<int64_t>(way.programs);
    // Now and then the ring looks at the clock.
    if (slots->has_stream && slots->stream == stream && slots->count % 64 && slots->count < slots->most &&
        slots->used + programs <= slots->partials && launching->launch(way.kernel.get(), way.programs, stream, words) == 0) {
        ticket = (slots->number * slots->most + slots->count++) * 2 + way.statistics;
        slots->used += programs;
    }
    PyThread_release_lock(slots->lock);
    return ticket;
}

// Has a tensor measured on its card: the ticket; −1 when Python should see to it.
inline int64_t Taker::measure_far(PyObject *ring, const Identity &what) {
    if (!launching) return -1;
    const Ref slots = attribute(ring, word().slots);
    if (!launching->are_slots(slots)) return -1;
    const Ref current = Ref::made(PyObject_CallOneArg(stream, attribute(ring, word().index)));
    const uint64_t raw = PyLong_AsUnsignedLongLongMask(current);
    if (PyErr_Occurred()) throw PythonError();
    const std::shared_ptr<Way> way = find_way(ring, slots, what);
    return way ? launch_into(reinterpret_cast<Slots *>(slots.get()), *way, raw, what.address) : -1;
}

// The first sight of a memory.
inline Kept Taker::measure_first(const at::Tensor &tensor, const Identity &what, PyObject *device, const Row &row) {
    if (!values && is_near(what)) return measure_near(what);
    if (!values) {
        const Ref ring = Ref::shared(PyDict_GetItemWithError(rings, device));
        if (!ring && PyErr_Occurred()) throw PythonError();
        const int64_t ticket = ring ? measure_far(ring, what) : -1;
        if (ticket >= 0) return Kept::of_ticket(ticket);
    }
    const Ref owner = Ref::made(THPStorage_Wrap(tensor.storage()));
    const Ref known = call(identity, owner.get(), Py_None, Ref::made(PyLong_FromUnsignedLongLong(what.address)).get(),
                           what.dtype->name.get(), what.layout->shape_tuple().get(), what.layout->stride_tuple().get());
    const Ref object = Ref::made(THPVariable_Wrap(tensor)), seq = Ref::made(PyLong_FromLongLong(row.seq));
    return Kept::of_python(call(first, object.get(), known.get(), seq.get(), name_of(row.role), row.path));
}

// Measures those of one type and device by one launch, and remembers what comes of it.
inline void Taker::measure_group(const std::vector<std::pair<at::Tensor, Identity>> &group) {
    if (group.size() < 2) return;
    const NamedDevice where = device_of(group[0].first);
    const Ref memories_given = Ref::made(PyList_New(0));
    for (const auto &[_, what] : group) check(PyList_Append(memories_given.get(), memory_of(what).get()));
    const Ref tickets = Ref::made(PyObject_CallFunctionObjArgs(together.get(), where.device.get(), memories_given.get(),
                                                               statistics ? Py_True : Py_False, nullptr));
    if (tickets.get() == Py_None) return;
    Py_ssize_t taken = 0;
    for (const auto &[tensor, what] : group) {
        PyObject *ticket = PyList_GetItem(tickets.get(), taken++);
        if (!ticket) throw PythonError();
        memories.of(what.storage).sightings.push_back(
            Sighting{what.address, what.version, what.dtype, what.layout, Kept::of_ticket(integer(ticket))});
        regulars.taken(tensor);
    }
}

inline void Taker::measure_regulars() {
    std::vector<std::vector<std::pair<at::Tensor, Identity>>> groups;
    for (const at::Tensor &tensor : regulars.take_due()) {
        const std::optional<Identity> what = identify(tensor);
        if (!what || !what->layout->contiguous || !what->layout->elements || what->address % 16 || is_near(*what) ||
            memories.find(*what))
            continue;
        auto fits = [&](const auto &group) {
            return group[0].second.dtype == what->dtype && group[0].second.device == what->device;
        };
        auto at = std::find_if(groups.begin(), groups.end(), fits);
        if (at == groups.end()) at = groups.emplace(groups.end());
        at->emplace_back(tensor, *what);
    }
    for (const auto &group : groups) measure_group(group);
}

// ---- observing -----------------------------------------------------------------------------------------------------

inline void Taker::write_row(const TensorRow &row, const Identity &what, const Row &of, const Kept &kept,
                             PyObject *device) {
    if (appending) {
        const Py_ssize_t count = appending->append_tensor(lane, &row);
        if (count < 0) throw PythonError();
        if (count >= batch) call_method(writer, word().crowded, lane.get());
        return;
    }
    const auto or_none = [](const Ref &object) { return object ? object.get() : Py_None; };
    const Ref tuple = Ref::made(Py_BuildValue(
        "LOOONNONNNOOON", static_cast<long long>(of.seq), name_of(of.role), of.path, what.dtype->name.get(),
        what.layout->shape_tuple().release(), what.layout->stride_tuple().release(), device,
        PyBool_FromLong(row.requires_grad), kept.statistics().release(),
        kept.is_measured ? PyLong_FromUnsignedLongLong(kept.measured.fingerprint) : none().release(), or_none(kept.values),
        or_none(kept.placement), or_none(kept.note), PyLong_FromLongLong(row.value)));
    call_method(writer, word().tensor_row, tuple.get());
}

// Whether its memory has not been filled yet.
inline bool Taker::is_unfilled(const c10::Storage &storage) const {
    if (!PyDict_Size(unfilled.get())) return false;
    const Ref owner = Ref::made(THPStorage_Wrap(storage));
    const Ref number = Ref::made(PyLong_FromVoidPtr(owner.get()));
    return check(PyDict_Contains(unfilled.get(), number.get()));
}

// A call that takes a memory as an input shows that it has been filled, by a kernel that we cannot see.
inline void Taker::note_filled(const c10::Storage &storage) {
    if (!is_unfilled(storage)) return;
    const Ref owner = Ref::made(THPStorage_Wrap(storage));
    check(PyDict_DelItem(unfilled.get(), Ref::made(PyLong_FromVoidPtr(owner.get())).get()));
}

// Whether the bytes that were handed over of it are gone, so that they are to be read again.
inline bool is_stale(const Kept &kept) { return kept.values && is_true(attribute(kept.values, word().stale)); }

// Records a tensor that has been identified. Gives whether it holds NaN or infinities, if that is asked for.
inline bool Taker::take(const at::Tensor &tensor, const Identity &what, const Row &row, bool is_lasting) {
    note_filled(what.storage);
    const bool is_regular = is_lasting && !values && !is_near(what);
    if (is_regular && regulars.due) measure_regulars();
    Kept kept;
    int64_t number = -1;
    const NamedDevice where = device_of(tensor);
    const Sighting *known = memories.find(what);
    if (known) {
        kept = known->kept, number = known->number;
        if (is_stale(kept)) known = nullptr, number = -1;
    }
    if (!known) kept = measure_first(tensor, what, where.device, row);
    if (number < 0) {
        Memory &memory = memories.of(what.storage);
        number = memories.value(memory, what.version);
        Sighting *there = memories.find(what);
        if (there) there->kept = kept, there->number = number;
        else memory.sightings.push_back(Sighting{what.address, what.version, what.dtype, what.layout, kept, number});
    }
    if (is_regular) regulars.note(tensor, known != nullptr);
    Ref path, placement, note;  // keep texts that had to be made
    const Layout &layout = *what.layout;
    TensorRow written{};
    written.seq = row.seq;
    written.role = text_of(name_of(row.role), path);
    written.path = text_of(row.path, path);
    written.dtype = what.dtype->text;
    written.shape = layout.shape.data(), written.stride = layout.stride.data();
    written.dims = static_cast<int64_t>(layout.shape.size());
    written.device = where.text;
    written.requires_grad = tensor.requires_grad();
    written.ticket = kept.ticket;
    written.measured = kept.is_measured ? &kept.measured : nullptr;
    written.has_statistics = kept.has_statistics;
    written.values = kept.values ? kept.values.get() : Py_None;
    if (kept.placement) written.placement = text_of(kept.placement, placement);
    if (kept.note) written.note = text_of(kept.note, note);
    written.value = number;
    write_row(written, what, row, kept, where.name);
    return catching && kept.is_bad();
}

inline bool hand_over(const Ref &odd, const Row &row, PyObject *tensor) {
    const Ref seq = Ref::made(PyLong_FromLongLong(row.seq));
    return call(odd, seq.get(), name_of(row.role), row.path, tensor).get() == Py_True;
}

inline bool Taker::observe(const Row &row, PyObject *tensor) {
    if (!on) return handed = true, hand_over(odd_observe, row, tensor);
    if (row.seq < 0 || !(roles & bit_of(row.role))) return false;  // a call that has no row, or a role not asked for
    const bool plain = is_plain(tensor);
    const std::optional<Identity> what = plain ? identify(THPVariable_Unpack(tensor)) : std::nullopt;
    if (!what) return handed = true, hand_over(odd_observe, row, tensor);
    ++rows;
    return take(THPVariable_Unpack(tensor), *what, row, is_lasting(row, tensor));
}

inline bool Taker::observe_unread(const Row &row, PyObject *tensor) {
    bool may_be_unfilled = PyDict_Size(unfilled.get()) != 0;
    if (may_be_unfilled && is_plain(tensor) && THPVariable_Unpack(tensor).has_storage())
        may_be_unfilled = is_unfilled(THPVariable_Unpack(tensor).storage());
    return may_be_unfilled ? hand_over(odd_observe_unread, row, tensor) : observe(row, tensor);
}

// The Python object of a tensor, where it has one already, and whether that could be told.
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

// Without making a Python object of it, unless it is out of the ordinary.
inline bool Taker::observe(const Row &row, const at::Tensor &tensor) {
    const auto [object, is_known] = object_in(*tensor.unsafeGetTensorImpl()->pyobj_slot(), 0);
    if (on && is_known && (!object || is_plain(object))) {
        if (row.seq < 0 || !(roles & bit_of(row.role))) return false;
        if (const std::optional<Identity> what = identify(tensor)) {
            ++rows;
            return take(tensor, *what, row, is_lasting(row, object));
        }
    }
    return observe(row, Ref::made(THPVariable_Wrap(tensor)));
}

// Forgets what is known of a tensor's memory. Python, which calls `forget`, does so when more may have to be done.
inline void Taker::note_change(const Ref &odd, PyObject *tensor, bool more, bool ahead) {
    if (!more && !handed && is_plain(tensor) && THPVariable_Unpack(tensor).has_storage()) {
        const at::Tensor &changed = THPVariable_Unpack(tensor);
        memories.forget(changed.storage());
        if (ahead && !changed.is_inference())
            memories.written_ahead(changed.storage(), static_cast<int64_t>(changed._version()));
        return;
    }
    Ref::made(PyObject_CallOneArg(odd, tensor));
}

}  // namespace astray
