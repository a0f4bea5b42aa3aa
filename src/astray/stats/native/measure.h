// Statistics and fingerprint of one tensor, in one walk over its memory.
//
// Narrow elements of a block are widened to float or double, and one loop gives its sums. A sum that is not finite sends
// the block to the slow path, which counts NaN and infinity and repeats the loop over the finite elements; then its chunk
// is searched once more for the first of them.

#ifndef ASTRAY_STATS_MEASURE_H
#define ASTRAY_STATS_MEASURE_H

#include "layout.h"
#include "moments.h"
#include "objects.h"
#include "threads.h"

namespace {

// The first element that is NaN or infinite: its logical index, and what it is.
struct Bad {
    uint64_t index = UINT64_MAX;
    double value = 0;
    bool there() const { return index != UINT64_MAX; }
    void merge(const Bad &other) { if (other.index < index) *this = other; }
};

struct Measured {
    Moments moments;
    int64_t zeros = 0, nan = 0, inf = 0;
    uint64_t fingerprint = 0;
    Bad bad;

    void merge(const Measured &other) {
        moments.merge(other.moments);
        zeros += other.zeros;
        nan += other.nan;
        inf += other.inf;
        fingerprint += other.fingerprint;
        bad.merge(other.bad);
    }
};

template <class F> void measure_block(const Isa &isa, const F *x, int64_t n, double pivot, Measured &part) {
    Sums s = sums(isa, x, n, pivot);
    F finite[kBlock];
    if (!std::isfinite(s.sum)) {
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            finite[kept] = x[i];
            kept += std::isfinite(x[i]);
            part.nan += std::isnan(x[i]);
            part.inf += std::isinf(x[i]);
        }
        if (!kept) return;
        x = finite;
        n = kept;
        s = sums(isa, x, n, pivot);
    }
    part.zeros += s.zeros;
    part.moments.merge(moments_of(isa, x, n, pivot, s));
}

// An 8-bit type has 256 values: count each, and the rest is a loop over a table. Four counters in turn, since repeated
// additions to one address wait for the last store.
class Histogram {
    uint32_t count_[4][256] = {};

  public:
    void add(const uint8_t *x, int64_t n) {
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            for (int k = 0; k < 4; ++k) ++count_[k][x[i + k]];
        for (; i < n; ++i) ++count_[0][x[i]];
    }
    void finish(const float *value, Measured &part) {
        double sum = 0, m2 = 0, rest = 0;
        int64_t total[256], count = 0;
        Moments m;
        for (int v = 0; v < 256; ++v) {
            total[v] = int64_t(count_[0][v]) + count_[1][v] + count_[2][v] + count_[3][v];
            if (!total[v]) continue;
            if (std::isnan(value[v])) part.nan += total[v];
            else if (std::isinf(value[v])) part.inf += total[v];
            else {
                count += total[v];
                sum += total[v] * double(value[v]);
                if (value[v] == 0) part.zeros += total[v];
                if (value[v] < m.low) m.low = value[v];
                if (value[v] > m.high) m.high = value[v];
            }
        }
        if (!count) return;
        m.count = count;
        m.mean = m.low == m.high ? m.low : sum / static_cast<double>(count);
        for (int v = 0; v < 256; ++v)
            if (total[v] && std::isfinite(value[v])) {
                const double away = value[v] - m.mean;
                m2 += total[v] * away * away;
                rest += total[v] * away;
            }
        m.m2 = m2 - rest * rest / static_cast<double>(count);
        if (m.m2 < 0 || m.low == m.high) m.m2 = 0;
        m.total.add(sum);
        part.moments.merge(m);
    }
};

struct Request {
    Layout layout;
    const Layout *logical;  // the same walk with its logical indices
    Type type;
    bool statistics, fingerprint;
    bool dense = false, stream = false, wide_index = false;
    double pivot = 0, scale = 1;
};

void to_doubles(const Isa &isa, Type type, const char *raw, int64_t n, double *out) {
    if (to_double(type)) return isa.widen(type, raw, n, out);
    alignas(64) float wide[kBlock];
    isa.widen(type, raw, n, wide);
    isa.doubles(wide, n, out);
}

// Searches the elements [begin, end) of a walk, of which some are known to be bad. Only a walk in logical order finds
// the first one first. Its buffers must not become a part of every caller's stack.
[[gnu::noinline]] Bad find_bad(const Isa &isa, const Layout &layout, Type type, int64_t begin, int64_t end) {
    alignas(64) char raw[kBlock * 8];
    alignas(64) double values[kBlock];
    alignas(64) uint64_t index[kBlock];
    const bool in_order = layout.row_major();
    Bad bad;
    Walk walk(layout, begin);
    for (int64_t at = begin; at < end && !(in_order && bad.there()); at += kBlock) {
        const int64_t n = end - at < kBlock ? end - at : kBlock;
        take(walk, layout.size, n, raw, index, true);
        to_doubles(isa, type, raw, n, values);
        for (int64_t i = 0; i < n; ++i)
            if (!std::isfinite(values[i])) bad.merge({index[i], values[i]});
    }
    return bad;
}

// The elements [begin, end) of the walk.
Measured measure_chunk(const Isa &isa, const Request &request, int64_t begin, int64_t end) {
    const Layout &layout = request.layout;
    const int size = layout.size;
    const bool indexed = request.fingerprint && !request.stream, copied = !request.dense;
    const bool bytes = is_byte(request.type);
    alignas(64) char raw[kBlock * 8], wide[kBlock * 8];
    alignas(64) uint64_t index[kBlock];
    Measured part;
    Histogram histogram;
    Walk walk(layout, begin);
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = end - at < kBlock ? end - at : kBlock;
        const char *values = copied ? raw : layout.base + at * size;
        if (copied || indexed)
            take(walk, size, n, copied ? raw : nullptr, indexed ? index : nullptr, request.wide_index);
        if (indexed) part.fingerprint += isa.elements(size, request.wide_index, values, n, index);
        else if (request.fingerprint) {
            const uint64_t first = (layout.origin + at) * size / 4;
            part.fingerprint += isa.words(values, n * size / 4, first);
            if (const int64_t rest = n * size % 4) {  // the very last word of the tensor
                uint32_t word = 0;
                std::memcpy(&word, values + n * size - rest, rest);
                part.fingerprint += isa.words(&word, 1, first + n * size / 4);
            }
        }
        if (!request.statistics) continue;
        if (bytes) {
            histogram.add(reinterpret_cast<const uint8_t *>(values), n);
        } else if (to_double(request.type)) {
            auto x = reinterpret_cast<const double *>(values);
            if (request.type != kF64 || request.scale != 1) {
                isa.widen(request.type, values, n, wide);
                x = reinterpret_cast<const double *>(wide);
                if (request.scale != 1) scale_block(reinterpret_cast<double *>(wide), n, request.scale);
            }
            measure_block(isa, x, n, request.pivot, part);
        } else {
            auto x = reinterpret_cast<const float *>(values);
            if (request.type != kF32) {
                isa.widen(request.type, values, n, wide);
                x = reinterpret_cast<const float *>(wide);
            }
            measure_block(isa, x, n, request.pivot, part);
        }
    }
    if (bytes && request.statistics) histogram.finish(byte_value[request.type - kI8], part);
    if (part.nan || part.inf) part.bad = find_bad(isa, *request.logical, request.type, begin, end);
    return part;
}

// Widens up to `n` elements from the start of a walk to double.
void head(const Isa &isa, const Layout &layout, Type type, double scale, int64_t n, double *out) {
    alignas(64) char raw[kBlock * 8];
    Walk walk(layout, 0);
    take(walk, layout.size, n, raw, nullptr, false);
    to_doubles(isa, type, raw, n, out);
    scale_block(out, n, scale);
}

// A value near the mean, if the mean is large beside the spread, as the first elements show it; else 0, which is
// faster. A poor choice costs time, and precision only where block means differ more than their spread.
double choose_pivot(const Isa &isa, const Layout &layout, Type type, double scale) {
    constexpr int64_t kSample = 64;
    if (layout.count <= kBlock || is_byte(type)) return 0;
    double x[kSample], sum = 0, squares = 0;
    int64_t n = 0;
    head(isa, layout, type, scale, kSample, x);
    for (double v : x)
        if (std::isfinite(v)) x[n++] = v, sum += v;
    if (!n) return 0;
    const double mean = sum / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const double m2 = squares, total = m2 + static_cast<double>(n) * mean * mean;
    return m2 * 128 < total && std::isfinite(total) ? mean : 0;
}

Measured measure_all(const Isa &isa, const Request &request) {
    const int64_t count = request.layout.count, chunks = (count + kChunk - 1) / kChunk;
    if (chunks <= 1) return measure_chunk(isa, request, 0, count);
    std::vector<Measured> parts(chunks);
    run_tasks(chunks, count * request.layout.size, [&](int64_t i) {
        parts[i] = measure_chunk(isa, request, i * kChunk, std::min(count, (i + 1) * kChunk));
    });
    Measured result;
    for (const auto &part : parts) result.merge(part);
    return result;
}

struct MeasureResult { Measured measured; Summary summary; double low, high, absmax; };

MeasureResult measure(Request &request) {
    const Isa &isa = *chosen_isa;
    KeepSubnormals subnormals;
    Layout &layout = request.layout;
    Layout indexed;
    request.logical = &layout;
    if (!request.fingerprint) {  // nothing but memory order counts then, and more dimensions merge
        indexed = layout;
        indexed.sort();
        indexed.merge();
        request.logical = &indexed;
        for (int d = 0; d < layout.rank; ++d) layout.dim[d].step = 0;
    }
    layout.sort();
    layout.merge();
    request.dense = layout.dense();
    request.stream = layout.row_major() && layout.origin * layout.size % 4 == 0;
    if (request.statistics) request.pivot = choose_pivot(isa, layout, request.type, 1);
    MeasureResult result{measure_all(isa, request), {}, 0, 0, 0};
    Moments moments = result.measured.moments;
    if (!moments.count) return result;
    result.low = moments.low + 0.0;  // -0 is reported as 0
    result.high = moments.high + 0.0;
    result.absmax = moments.absmax();
    const int exponent = request.type == kF64 ? rescale_exponent(result.absmax) : 0;
    if (exponent) {
        request.fingerprint = false;
        request.scale = std::ldexp(1.0, -exponent);
        request.pivot = choose_pivot(isa, layout, request.type, request.scale);
        moments = measure_all(isa, request).moments;
    }
    result.summary = summarize(moments, exponent);
    return result;
}

// Measures what `request` has a layout of, without the interpreter lock when there is much. False with an error set.
bool measure_request(Request &request, MeasureResult &result) {
    const Layout &layout = request.layout;
    if (!layout.count) return true;
    uint64_t last = layout.origin;  // the index of the last element bounds all indices
    for (int d = 0; d < layout.rank; ++d) last += (layout.dim[d].size - 1) * layout.dim[d].step;
    request.wide_index = last >= UINT32_MAX / 2;  // 8-byte elements are two words
    return unlocked(layout.count * layout.size, [&] { result = measure(request); });
}

Measurement plain(const MeasureResult &result, int64_t count) {
    const Measured &m = result.measured;
    const double moments[] = {result.low,          result.high,       result.summary.mean,
                              result.summary.std, result.summary.l2, result.absmax};
    const int64_t counts[] = {m.zeros, m.nan, m.inf, count};
    Measurement found;
    for (int i = 0; i < 6; ++i) found.moments[i] = m.moments.count > 0 ? moments[i] : NAN;
    std::copy(counts, counts + 4, found.counts);
    found.first_bad = m.bad.there() ? static_cast<int64_t>(m.bad.index) : -1;
    found.first_bad_value = m.bad.value;
    found.fingerprint = m.fingerprint;
    return found;
}

PyObject *make_statistics(const Measurement &found) {
    Fields fields(12);
    for (const double moment : found.moments) fields.real_if(!std::isnan(moment), moment);
    for (const int64_t number : found.counts) fields.integer(number);
    if (found.first_bad >= 0) {
        fields.integer(found.first_bad);
        if (std::isnan(found.first_bad_value)) fields.add(Py_NewRef(not_a_number));
        else fields.real(found.first_bad_value);
    } else {
        fields.none();
        fields.none();
    }
    return make_named(statistics_type, fields.take());
}

// measure(tensor, statistics, fingerprint, shard)
PyObject *py_measure(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    Request request;
    bool complex;
    if (!expect(nargs, 4) || !read_tensor(args[0], args[3], request.layout, request.type, complex)) return nullptr;
    const int statistics = PyObject_IsTrue(args[1]), fingerprint = PyObject_IsTrue(args[2]);
    if (statistics < 0 || fingerprint < 0) return nullptr;
    request.statistics = statistics;
    request.fingerprint = fingerprint;
    MeasureResult result{};
    const int64_t count = request.layout.count;
    if (!measure_request(request, result)) return nullptr;
    const Measurement found = plain(result, count);
    Fields fields(2);
    if (statistics) fields.add(make_statistics(found));
    else fields.none();
    if (fingerprint) fields.add(PyLong_FromUnsignedLongLong(found.fingerprint));
    else fields.none();
    return make_named(measurement_type, fields.take());
}

// ---- for native callers --------------------------------------------------------------------------------------------

int dtype_number(const char *name) {
    for (size_t i = 0; i < std::size(kNames); ++i)
        if (std::strcmp(kNames[i].name, name) == 0) return static_cast<int>(i);
    return -1;
}

int measure_memory(uint64_t address, int dtype, const int64_t *shape, const int64_t *stride, int rank, int statistics,
                   Measurement *out) {
    Request request;
    if (rank > kMaxRank - 1) {
        PyErr_Format(PyExc_ValueError, "A tensor of %d dimensions has more than can be measured.", rank);
        return -1;
    }
    request.type = kNames[dtype].type;
    request.statistics = statistics;
    request.fingerprint = true;
    Layout &layout = request.layout;
    layout.base = reinterpret_cast<const char *>(static_cast<uintptr_t>(address));
    layout.size = size_of(request.type);
    layout.rank = rank;
    for (int i = 0; i < rank; ++i) {
        layout.dim[rank - 1 - i].size = shape[i];
        layout.dim[rank - 1 - i].stride = stride[i];
    }
    finish_layout(layout);
    if (kNames[dtype].complex) as_pairs(layout);
    MeasureResult result{};
    const int64_t count = layout.count;
    if (!measure_request(request, result)) return -1;
    *out = plain(result, count);
    return 0;
}

Measuring measuring = {dtype_number, measure_memory};

}  // namespace

#endif
