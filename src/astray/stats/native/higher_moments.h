// The first four moments of a tensor, its extremes and counts, in one walk over its memory.
//
// The sums of a block are about one pivot for the tensor, and are then moved to the mean of the block. Where that is far
// from the pivot compared with the spread, too many bits would cancel: such a block is summed again about its own mean.
// Blocks, and then chunks, are merged by moving the sums of each to the common mean; moments.py does so for tensors.

#ifndef ASTRAY_STATS_HIGHER_MOMENTS_H
#define ASTRAY_STATS_HIGHER_MOMENTS_H

#include "block_reader.h"
#include "byte_counts.h"
#include "measure.h"

namespace {

// Central sums, and the mean they are about, relative to the tensor's pivot.
struct Central { double count, mean, m2, m3, m4; };

// From sums of the first four powers about a point to those about the mean.
Central recentre(double count, double point, double s1, double s2, double s3, double s4) {
    const double away = s1 / count, m2 = s2 - away * s1;
    const double m3 = s3 - away * (3 * s2 - 2 * away * s1);
    const double m4 = s4 - away * (4 * s3 - away * (6 * s2 - 3 * away * s1));
    return {count, point + away, m2 > 0 ? m2 : 0, m3, m4 > 0 ? m4 : 0};
}

Central merge_central(const std::vector<Central> &parts) {
    if (parts.size() == 1) return parts[0];
    Exact count, total, s1, s2, s3, s4;
    for (const Central &part : parts) {
        count.add(part.count);
        total.add(part.count * part.mean);
    }
    if (count.sum == 0) return {};
    const double mean = total.value() / count.sum;
    for (const Central &part : parts) {
        const double n = part.count, d = part.mean - mean;
        s1.add(n * d);
        s2.add(part.m2 + n * d * d);
        s3.add(part.m3 + d * (3 * part.m2 + n * d * d));
        s4.add(part.m4 + d * (4 * part.m3 + d * (6 * part.m2 + n * d * d)));
    }
    return recentre(count.sum, mean, s1.value(), s2.value(), s3.value(), s4.value());
}

// The power of two that brings absmax near 1, where fourth powers would leave the range of double; else 0. The same as
// `exponent_of` in numpy_moments.py.
int power_exponent(double absmax) {
    if (absmax == 0 || !std::isfinite(absmax) || (absmax >= 0x1p-200 && absmax <= 0x1p200)) return 0;
    return std::max(-1000, std::min(1000, std::ilogb(absmax)));  // 2^-exponent itself must not overflow
}

struct HigherMoments {
    int64_t nan = 0, posinf = 0, neginf = 0, zeros = 0;
    double low = std::numeric_limits<double>::infinity(), high = -low, least = low;
    Exact total, magnitudes;
    Central central = {};

    // Everything but the central sums.
    void merge(const HigherMoments &other) {
        nan += other.nan;
        posinf += other.posinf;
        neginf += other.neginf;
        zeros += other.zeros;
        low = std::min(low, other.low);
        high = std::max(high, other.high);
        least = std::min(least, other.least);
        for (double part : {other.total.sum, other.total.rest}) total.add(part);
        for (double part : {other.magnitudes.sum, other.magnitudes.rest}) magnitudes.add(part);
    }
    double absmax() const { return std::max(-low, high); }
};

template <class F> PowerSums power_sums(const Isa &isa, const F *x, int64_t n, double centre) {
    if constexpr (sizeof(F) == 4) return isa.powers32(x, n, centre);
    else return isa.powers64(x, n, centre);
}

// Adds a block to `part`, all but its central sums: those are returned, empty where no element is finite.
template <class F> Central add_block(const Isa &isa, const F *x, int64_t n, double pivot, HigherMoments &part) {
    PowerSums s = power_sums(isa, x, n, pivot);
    F finite[kBlock];
    if (!std::isfinite(s.sum[kFirst])) {
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            finite[kept] = x[i];
            kept += std::isfinite(x[i]);
            part.nan += std::isnan(x[i]);
            part.posinf += x[i] == std::numeric_limits<F>::infinity();
            part.neginf += x[i] == -std::numeric_limits<F>::infinity();
        }
        if (!kept) return {};
        x = finite;
        n = kept;
        s = power_sums(isa, x, n, pivot);
    }
    part.zeros += s.zeros;
    part.low = std::min(part.low, s.low);
    part.high = std::max(part.high, s.high);
    part.least = std::min(part.least, s.least);
    part.magnitudes.add(s.sum[kMagnitude]);
    const double count = static_cast<double>(n);
    double centre = pivot;
    if (s.low == s.high) {  // all equal: the spread is 0, whatever rounding gives
        centre = s.low;
        for (double &sum : s.sum) sum = 0;
    } else if (s.sum[kFirst] * (s.sum[kFirst] / count) * 16 > s.sum[kSecond] * 15) {  // the mean is 4 spreads away
        centre = pivot + s.sum[kFirst] / count;
        s = power_sums(isa, x, n, centre);
    }
    const double product = count * centre;
    part.total.add(product);
    part.total.add(std::fma(count, centre, -product));
    part.total.add(s.sum[kFirst]);
    return recentre(count, centre - pivot, s.sum[kFirst], s.sum[kSecond], s.sum[kThird], s.sum[kFourth]);
}

template <class F>
HigherMoments moments_chunk(const Isa &isa, const Source &source, double pivot, int64_t begin, int64_t end) {
    HigherMoments part;
    std::vector<Central> blocks;
    blocks.reserve((end - begin + kBlock - 1) / kBlock);
    BlockReader<F> reader(isa, source, begin);
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = std::min(kBlock, end - at);
        const Central block = add_block(isa, reader.read(at, n), n, pivot, part);
        if (block.count) blocks.push_back(block);
    }
    part.central = merge_central(blocks);
    return part;
}

// An 8-bit type has 256 values: count each, and the rest is two loops over a table.
HigherMoments byte_moments(const Isa &isa, const Source &source, int64_t begin, int64_t end) {
    HigherMoments part;
    ByteCounts counts;
    BlockReader<float> reader(isa, source, begin);
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = std::min(kBlock, end - at);
        counts.add(reinterpret_cast<const uint8_t *>(reader.read_raw(at, n)), n);
    }
    const float *value = byte_value[source.type - kI8];
    double weight[256] = {}, count = 0, s[4] = {};
    for (int v = 0; v < 256; ++v) {
        const int64_t n = counts.of(v);
        const double x = value[v];
        if (!n) continue;
        if (std::isnan(x)) part.nan += n;
        else if (std::isinf(x)) (x > 0 ? part.posinf : part.neginf) += n;
        else {
            if (x == 0) part.zeros += n;
            part.low = std::min(part.low, x);
            part.high = std::max(part.high, x);
            part.least = std::min(part.least, std::fabs(x));
            weight[v] = static_cast<double>(n);
            count += weight[v];
            part.total.add(weight[v] * x);
            part.magnitudes.add(weight[v] * std::fabs(x));
        }
    }
    if (!count) return part;
    const double centre = part.total.value() / count;
    for (int v = 0; v < 256; ++v) {
        if (!weight[v]) continue;
        const double d = value[v] - centre;
        double term = weight[v];
        for (double &sum : s) sum += term *= d;
    }
    part.central = recentre(count, centre, s[0], s[1], s[2], s[3]);
    return part;
}

HigherMoments all_moments(const Isa &isa, const Source &source) {
    const int64_t count = source.layout.count;
    const double pivot = choose_pivot(isa, source.layout, source.type, source.scale);
    std::vector<HigherMoments> parts((count + kChunk - 1) / kChunk);
    run_tasks(parts.size(), count * source.layout.size, [&](int64_t i) {
        const int64_t begin = i * kChunk, end = std::min(count, begin + kChunk);
        parts[i] = is_byte(source.type)     ? byte_moments(isa, source, begin, end)
                   : to_double(source.type) ? moments_chunk<double>(isa, source, pivot, begin, end)
                                            : moments_chunk<float>(isa, source, pivot, begin, end);
    });
    HigherMoments result;
    std::vector<Central> centrals;
    for (const HigherMoments &part : parts) {
        result.merge(part);
        if (part.central.count) centrals.push_back(part.central);
    }
    result.central = merge_central(centrals);
    return result;
}

struct MomentsResult {
    HigherMoments moments;
    double sum, magnitudes, mean;
    int exponent;
};

MomentsResult higher_moments(Source &source) {
    const Isa &isa = *chosen_isa;
    KeepSubnormals subnormals;
    source.to_memory_order();
    MomentsResult result{all_moments(isa, source), 0, 0, 0, 0};
    HigherMoments &found = result.moments;
    if (!found.central.count) return result;
    found.low += 0.0;  // -0 is reported as 0
    found.high += 0.0;
    result.exponent = source.type == kF64 ? power_exponent(found.absmax()) : 0;
    if (result.exponent) {
        source.scale = std::ldexp(1.0, -result.exponent);
        const HigherMoments scaled = all_moments(isa, source);
        found.central = scaled.central;
        found.total = scaled.total;
        found.magnitudes = scaled.magnitudes;
    }
    result.sum = std::ldexp(found.total.value(), result.exponent);
    result.magnitudes = std::ldexp(found.magnitudes.value(), result.exponent);
    result.mean = std::ldexp(found.total.value() / found.central.count, result.exponent);
    if (found.low == found.high) {
        result.mean = found.low;
        found.central.m2 = found.central.m3 = found.central.m4 = 0;
    }
    return result;
}

// moments(tensor) -> the fields of a Moments
PyObject *py_moments(PyObject *, PyObject *tensor) {
    Source source;
    bool complex;
    if (!read_tensor(tensor, Py_None, source.layout, source.type, complex)) return nullptr;
    MomentsResult result{};
    const int64_t count = source.layout.count;
    if (count && !unlocked(count * source.layout.size, [&] { result = higher_moments(source); })) return nullptr;
    const HigherMoments &found = result.moments;
    const Central &central = found.central;
    Fields fields(17);
    fields.integer(count);
    fields.integer(static_cast<int64_t>(central.count));
    for (int64_t number : {found.nan, found.posinf, found.neginf, found.zeros}) fields.integer(number);
    const double none = std::numeric_limits<double>::quiet_NaN();
    for (double extreme : {found.low, found.high, found.least, found.absmax()})
        fields.real(central.count ? extreme : none);
    fields.real(result.sum);
    fields.real(result.magnitudes);
    fields.real(central.count ? result.mean : none);
    for (double sum : {central.m2, central.m3, central.m4}) fields.real(sum);
    fields.integer(result.exponent);
    return fields.take();
}

}  // namespace

#endif
