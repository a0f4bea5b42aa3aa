// Mean and spread of a block, and of merged blocks.
//
// Sum of squares minus squared sum cancels when the mean is large beside the spread; such a block is summed again about
// its own mean. Blocks merge by Chan's formula, relative to one pivot for the tensor.
//
// Squares of 1e200 overflow and those of 1e-200 vanish: when the largest element of a float64 tensor is in that range, the
// moments are computed again from elements scaled by a power of two.

#ifndef ASTRAY_STATS_MOMENTS_H
#define ASTRAY_STATS_MOMENTS_H

#include "isa.h"

namespace {

// a + b exactly, as a rounded sum and what rounding lost.
struct Exact {
    double sum = 0, rest = 0;
    void add(double x) {
        const double total = sum + x, part = total - sum;
        rest += (sum - (total - part)) + (x - part);
        sum = total;
    }
    double value() const { return sum + rest; }
};

struct Moments {
    int64_t count = 0;
    double mean = 0;  // relative to the tensor's pivot
    double m2 = 0;    // sum of squared distances from the mean
    Exact total;
    double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();

    void merge(const Moments &other) {  // Chan, Golub and LeVeque
        if (!other.count) return;
        const double a = static_cast<double>(count), b = static_cast<double>(other.count), delta = other.mean - mean;
        mean += delta * (b / (a + b));
        m2 += other.m2 + delta * delta * (a * b / (a + b));
        count += other.count;
        total.add(other.total.sum);
        total.add(other.total.rest);
        low = other.low < low ? other.low : low;
        high = other.high > high ? other.high : high;
    }
    double absmax() const { return count ? std::fmax(std::fabs(low), std::fabs(high)) : 0; }
};

template <class F> INLINE Sums sums(const Isa &isa, const F *x, int64_t n, double pivot) {
    if constexpr (sizeof(F) == 4) return isa.sums32(x, n, pivot);
    else return isa.sums64(x, n, pivot);
}

// The moments of a block of finite elements from its sums about the pivot.
template <class F> Moments moments_of(const Isa &isa, const F *x, int64_t n, double pivot, Sums s) {
    const double count = static_cast<double>(n);
    Moments result;
    result.count = n;
    result.low = s.low;
    result.high = s.high;
    double centre = pivot, mean = s.sum / count, m2 = s.squares - s.sum * mean;
    if (s.low == s.high) {  // all equal: the spread is 0, whatever rounding gives
        centre = s.low, mean = 0, m2 = 0, s.sum = 0;
    } else if (m2 * 128 < s.squares) {  // more than 7 of 53 bits cancelled
        centre = pivot + mean;
        s = sums(isa, x, n, centre);
        mean = s.sum / count;
        m2 = s.squares - s.sum * mean;
    }
    result.mean = (centre - pivot) + mean;
    result.m2 = m2 > 0 ? m2 : 0;
    const double product = count * centre;
    result.total.add(product);
    result.total.add(std::fma(count, centre, -product));
    result.total.add(s.sum);
    return result;
}

struct Summary { double mean, std, l2; };

// `exponent`: the elements were scaled by 2^-exponent.
Summary summarize(const Moments &m, int exponent) {
    const double count = static_cast<double>(m.count);
    const double mean = m.low == m.high ? m.low : m.total.value() / count;
    return {std::ldexp(mean, exponent), std::ldexp(std::sqrt(m.m2 / count), exponent),
            std::ldexp(std::sqrt(m.m2 + count * mean * mean), exponent)};
}

// The power of two that brings absmax near 1, where squares would leave the range of double; else 0. Below 2^-400 the
// square of the last bit of an element would vanish; above 2^480, the sum of 2^40 squares would overflow.
int rescale_exponent(double absmax) {
    if (absmax == 0 || !std::isfinite(absmax) || (absmax >= 0x1p-400 && absmax <= 0x1p480)) return 0;
    const int exponent = std::ilogb(absmax);
    return exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;  // 2^-exponent itself must not overflow
}

template <class F> void scale_block(F *x, int64_t n, double scale) {
    for (int64_t i = 0; i < n; ++i) x[i] = static_cast<F>(x[i] * scale);
}

}  // namespace

#endif
