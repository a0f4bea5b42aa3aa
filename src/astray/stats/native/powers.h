// Sums of powers of a block: the first four about a centre with everything else that `moments` returns, and any whole
// power.

#ifndef ASTRAY_STATS_POWERS_H
#define ASTRAY_STATS_POWERS_H

#include "lanes.h"

namespace {

constexpr int kPowerLanes = 8;  // one register of AVX-512: five sums hide how long each addition takes

constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum PowerSum { kFirst, kSecond, kThird, kFourth, kMagnitude, kPowerSums };

// The results of one loop over a block: sums of x - centre to the first four powers and of |x|, extremes, the least
// magnitude, zeros.
struct PowerSums {
    double sum[kPowerSums], low, high, least;
    int64_t zeros;
};

template <int N, class F, bool Centre> struct PowerLanes {
    // Extremes are cheaper among floats, but take registers that only AVX-512 has.
    using E = std::conditional_t<N == 8, F, double>;
    Lanes<double, N> sum[kPowerSums] = {};
    Lanes<E, N> low = Lanes<E, N>{} + E(kInfinity), high = -low, least = low;

    INLINE void add(const F *from, double centre) {
        Lanes<double, N> x;
        Lanes<E, N> e;
        load_as<N, double>(x, from);
        if constexpr (std::is_same_v<E, double>) e = x;
        else load(e, from);
        const Lanes<E, N> size = magnitude<E, N>(e);
        low = e < low ? e : low;  // false for NaN, which is thus skipped
        high = e > high ? e : high;
        least = size < least ? size : least;
        add_to<N>(sum[kMagnitude], magnitude<double, N>(x));
        if constexpr (Centre) x -= centre;
        const Lanes<double, N> square = x * x;
        add_to<N>(sum[kFirst], x);
        if constexpr (Centre) sum[kSecond] += square;
        else add_product<F, N>(sum[kSecond], x, x);
        sum[kThird] += square * x;
        sum[kFourth] += square * square;
    }

    // Adds these lanes to those from `first` on.
    INLINE void pour(double (*sums)[kPowerLanes], int first, PowerSums &result) const {
        for (int k = 0; k < kPowerSums; ++k) {
            const Lane<double, N> lane(sum[k]);
            for (int l = 0; l < N; ++l) sums[k][first + l] += lane.at[l];
        }
        result.low = std::min<double>(result.low, ::least<N>(Lane<E, N>(low).at));
        result.high = std::max<double>(result.high, largest<E, N>(high));
        result.least = std::min<double>(result.least, ::least<N>(Lane<E, N>(least).at));
    }
};

template <int N, class F, bool Centre> INLINE PowerSums powers_about(const F *x, int64_t n, double centre) {
    constexpr int L = kPowerLanes;
    double sums[kPowerSums][L] = {};
    const int64_t whole = n - n % L;
    PowerSums result = {{}, kInfinity, -kInfinity, kInfinity, 0};
    for (int first = 0; first < L; first += N) {  // so that even sixteen registers are enough
        PowerLanes<N, F, Centre> lanes;
        for (int64_t i = first; i < whole; i += L) {
            touch_ahead(x + i);
            lanes.add(x + i, centre);
        }
        const auto done = lanes;  // a copy: see Lane
        done.pour(sums, first, result);
    }
    for (int64_t i = whole; i < n; ++i) {  // the last few, each in the lane it would have had
        PowerLanes<1, F, Centre> last;
        last.add(x + i, centre);
        last.pour(sums, static_cast<int>(i - whole), result);
    }
    for (int k = 0; k < kPowerSums; ++k) result.sum[k] = fold<L>(sums[k]);
    if (result.least == 0) {  // most blocks have no 0, so the loop above does not count them
        typename IntegerOf<sizeof(F)>::type zeros = 0;
        for (int64_t i = 0; i < n; ++i) zeros += x[i] == 0;
        result.zeros = zeros;
    }
    return result;
}

template <int N, class F> INLINE PowerSums block_powers(const F *x, int64_t n, double centre) {
    return centre == 0 ? powers_about<N, F, false>(x, n, centre) : powers_about<N, F, true>(x, n, centre);
}

// The sum of x to a whole power, by repeated squaring; x is overwritten.
INLINE double block_power(double *x, int64_t n, int power) {
    constexpr int L = kPowerLanes;
    double result[kBlock], lane[L] = {};
    for (int64_t i = 0; i < n; ++i) result[i] = power & 1 ? x[i] : 1.0;
    while (power >>= 1) {
        for (int64_t i = 0; i < n; ++i) x[i] *= x[i];
        if (power & 1)
            for (int64_t i = 0; i < n; ++i) result[i] *= x[i];
    }
    int64_t i = 0;
    for (; i + L <= n; i += L)
        for (int l = 0; l < L; ++l) lane[l] += result[i + l];
    for (int l = 0; i < n; ++i, ++l) lane[l] += result[i];
    return fold<L>(lane);
}

}  // namespace

#endif
