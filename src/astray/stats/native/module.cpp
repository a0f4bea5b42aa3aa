// The module `astray.stats._native`: statistics and fingerprints of a tensor, and the comparison of two.
//
// Work goes block by block, a block being small enough for the first-level cache, so that it can be gone over several
// times for the price of one read from memory. From the bottom up:
//
//   lanes.h elements.h              vectors of numbers; what an element can be
//   sums.h powers.h hashing.h       loops over a block (byte_counts.h for 8-bit types)
//   pairs.h                         loops over two
//   isa.h                           those loops for each instruction set
//   layout.h threads.h moments.h    walks over strided memory; chunks of it for threads; how blocks merge
//   measure.h                       statistics of a tensor
//   higher_moments.h any_power.h    those that add up, to the fourth moment; sums of powers (blocks by block_reader.h)
//   contrast.h slices.h             the comparison of two (its blocks in block_contrast.h); of their slices
//   copying.h factorize.h           bytes of strided tensors; strings as numbers
//   objects.h                       what all of them take from Python and give to it
//
// All sums run in a fixed number of lanes (kLanes), in double, without contraction (-ffp-contract=off): neither
// instruction sets nor threads change a single bit of a result. All of this is one translation unit, since everything
// must be inlined below the wrappers in isa.h.

#include "objects.h"  // first, since Python.h must be

#include "any_power.h"
#include "contrast.h"
#include "copy.h"
#include "factorize.h"
#include "higher_moments.h"
#include "measure.h"
#include "slices.h"

namespace {

uint64_t read_all(const char *address, int64_t bytes) {
    constexpr int64_t kPiece = 1 << 20;
    const Isa &isa = *chosen_isa;
    std::atomic<uint64_t> total{0};
    run_tasks((bytes + kPiece - 1) / kPiece, bytes, [&](int64_t i) {
        total += isa.read(address + i * kPiece, std::min(kPiece, bytes - i * kPiece) / 8);
    });
    return total;
}

// read(address, bytes) -> sum of 64-bit words: what merely going over memory takes
PyObject *py_read(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    void *address;
    int64_t bytes;
    uint64_t total = 0;
    if (!expect(nargs, 2) || !read_address(args[0], address) || !read_integer(args[1], bytes)) return nullptr;
    if (!unlocked(bytes, [&] { total = read_all(static_cast<const char *>(address), bytes); })) return nullptr;
    return PyLong_FromUnsignedLongLong(total);
}

// set_threads(count)
PyObject *py_set_threads(PyObject *, PyObject *count) {
    int64_t value;
    if (!read_integer(count, value)) return nullptr;
    thread_limit = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(value, 256)));
    Py_RETURN_NONE;
}

// isas() -> the instruction sets this processor can use, the best one last
PyObject *py_isas(PyObject *, PyObject *) {
    const int count = supported_isas();
    Fields names(count);
    for (int i = 0; i < count; ++i) names.add(PyUnicode_FromString(kIsas[i]->name));
    return names.take();
}

// set_isa(name)
PyObject *py_set_isa(PyObject *, PyObject *name) {
    const char *text = PyUnicode_AsUTF8AndSize(name, nullptr);
    if (!text) return nullptr;
    for (int i = 0; i < supported_isas(); ++i)
        if (std::strcmp(kIsas[i]->name, text) == 0) {
            chosen_isa = kIsas[i];
            Py_RETURN_NONE;
        }
    PyErr_Format(PyExc_ValueError, "This processor cannot use %R.", name);
    return nullptr;
}

template <class Function> PyCFunction method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kMethods[] = {
    {"measure", method(py_measure), METH_FASTCALL, nullptr},
    {"moments", py_moments, METH_O, nullptr},
    {"powers", method(py_powers), METH_FASTCALL, nullptr},
    {"contrast", method(py_contrast), METH_FASTCALL, nullptr},
    {"slice_errors", method(py_slice_errors), METH_FASTCALL, nullptr},
    {"pack", method(py_pack), METH_FASTCALL, nullptr},
    {"gather", method(py_gather), METH_FASTCALL, nullptr},
    {"factorize", method(py_factorize), METH_FASTCALL, nullptr},
    {"read", method(py_read), METH_FASTCALL, nullptr},
    {"set_threads", py_set_threads, METH_O, nullptr},
    {"isas", py_isas, METH_NOARGS, nullptr},
    {"set_isa", py_set_isa, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "astray.stats._native", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr,
};

PyObject *import_name(const char *module, const char *name) {
    PyObject *found = PyImport_ImportModule(module);
    if (!found) return nullptr;
    PyObject *result = PyObject_GetAttrString(found, name);
    Py_DECREF(found);
    return result;
}

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    statistics_type = import_name("astray.records", "Statistics");
    measurement_type = import_name("astray.stats.types", "Measurement");
    contrast_type = import_name("astray.stats.types", "Contrast");
    not_a_number = import_name("math", "nan");
    if (!statistics_type || !measurement_type || !contrast_type || !not_a_number) return nullptr;
    new_tuple = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
    fill_tables();
    chosen_isa = kIsas[supported_isas() - 1];
    PyObject *module = PyModule_Create(&kModule), *capsule = PyCapsule_New(&measuring, MEASURING, nullptr);
    if (module && capsule && PyModule_AddObjectRef(module, "measuring", capsule) < 0) Py_CLEAR(module);
    Py_XDECREF(capsule);
    return module;
}
