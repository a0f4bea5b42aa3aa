// Sums of any power of magnitudes, over finite elements: for norms.

#ifndef ASTRAY_STATS_ANY_POWER_H
#define ASTRAY_STATS_ANY_POWER_H

#include "block_reader.h"
#include "moments.h"
#include "objects.h"
#include "threads.h"

namespace {

struct Power {
    double exponent, unit;
    bool whole() const { return exponent >= 1 && exponent <= 64 && exponent == std::floor(exponent); }
};

// The sum of n magnitudes in units; x is overwritten.
double sum_powers(const Isa &isa, double *x, int64_t n, const Power &power) {
    if (power.whole()) return isa.power(x, n, static_cast<int>(power.exponent));
    for (int64_t i = 0; i < n; ++i) x[i] = power.exponent == 0 ? x[i] != 0 : std::pow(x[i], power.exponent);
    return isa.power(x, n, 1);
}

template <class F>
Exact powers_chunk(const Isa &isa, const Source &source, const Power &power, int64_t begin, int64_t end) {
    Exact total;
    alignas(64) double x[kBlock];
    BlockReader<F> reader(isa, source, begin);
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = std::min(kBlock, end - at);
        const F *values = reader.read(at, n);
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            x[kept] = std::fabs(static_cast<double>(values[i]));
            kept += std::isfinite(values[i]);
        }
        if (power.unit != 1)
            for (int64_t i = 0; i < kept; ++i) x[i] /= power.unit;
        total.add(sum_powers(isa, x, kept, power));
    }
    return total;
}

double powers_of(Source &source, const Power &power) {
    const Isa &isa = *chosen_isa;
    KeepSubnormals subnormals;
    source.to_memory_order();
    const int64_t count = source.layout.count;
    std::vector<Exact> parts((count + kChunk - 1) / kChunk);
    run_tasks(parts.size(), count * source.layout.size, [&](int64_t i) {
        const int64_t begin = i * kChunk, end = std::min(count, begin + kChunk);
        parts[i] = to_double(source.type) ? powers_chunk<double>(isa, source, power, begin, end)
                                          : powers_chunk<float>(isa, source, power, begin, end);
    });
    Exact total;
    for (const Exact &part : parts)
        for (double each : {part.sum, part.rest}) total.add(each);
    return std::isfinite(total.sum) ? total.value() : std::numeric_limits<double>::infinity();
}

// powers(tensor, p, unit)
PyObject *py_powers(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    Source source;
    bool complex;
    if (!expect(nargs, 3) || !read_tensor(args[0], Py_None, source.layout, source.type, complex)) return nullptr;
    const Power power{PyFloat_AsDouble(args[1]), PyFloat_AsDouble(args[2])};
    if (PyErr_Occurred()) return nullptr;
    double result = 0;
    const int64_t bytes = source.layout.count * source.layout.size;
    if (bytes && !unlocked(bytes, [&] { result = powers_of(source, power); })) return nullptr;
    return PyFloat_FromDouble(result);
}

}  // namespace

#endif
