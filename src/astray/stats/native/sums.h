// Sum, sum of squares, extremes and zeros of a block: the one loop that statistics need.

#ifndef ASTRAY_STATS_SUMS_H
#define ASTRAY_STATS_SUMS_H

#include "lanes.h"

namespace {

// The results of one loop over a block: sums of x - pivot and of its square, extremes, zeros.
struct Sums { double sum, squares, low, high; int64_t zeros; };

// Lanes of sums, whose number is fixed since it decides how they round.
template <int N, class F, bool Pivot> struct SumLanes {
    Lanes<double, N> sum, squares;

    INLINE void add(const Lanes<F, N> &x, double pivot) {
        Lanes<double, N> wide;
        widen<N>(wide, x);
        if constexpr (Pivot) wide -= pivot;
        add_to<N>(sum, wide);
        if constexpr (Pivot) squares += wide * wide;
        else add_product<F, N>(squares, wide, wide);
    }
};

// Extremes and zeros do not round, so their lanes have whatever width suits the processor.
template <int N, class F> struct ScanLanes {
    Lanes<F, N> low, high;
    Lanes<typename IntegerOf<sizeof(F)>::type, N> zeros;

    INLINE void add(const Lanes<F, N> &x) {
        low = x < low ? x : low;  // false for NaN, which is thus skipped
        high = x > high ? x : high;
        tally<N>(zeros, x == F(0));
    }
};

template <int N, class F, bool Pivot> INLINE Sums sums_about(const F *x, int64_t n, double pivot) {
    constexpr int G = kLanes / N;
    constexpr int S = N > 1 && sizeof(F) == 4 ? std::min(2 * N, 8) : N;  // 32 bytes of floats: wider gains nothing
    constexpr F kTop = std::numeric_limits<F>::infinity();
    SumLanes<N, F, Pivot> group[G] = {};
    ScanLanes<S, F> scan = {};
    scan.low += kTop, scan.high -= kTop;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        touch_ahead(x + i);
        UNROLL
        for (int l = 0; l < kLanes; l += S) {
            Lanes<F, S> v;
            load(v, x + i + l);
            scan.add(v);
        }
        UNROLL
        for (int g = 0; g < G; ++g) {
            Lanes<F, N> v;
            load(v, x + i + g * N);
            group[g].add(v, pivot);
        }
    }
    double sum[kLanes], squares[kLanes];
    F low[S], high[S];
    typename IntegerOf<sizeof(F)>::type zeros[S];
    UNROLL
    for (int g = 0; g < G; ++g) {
        std::memcpy(sum + g * N, &group[g].sum, sizeof(double) * N);
        std::memcpy(squares + g * N, &group[g].squares, sizeof(double) * N);
    }
    std::memcpy(low, &scan.low, sizeof low);
    std::memcpy(high, &scan.high, sizeof high);
    std::memcpy(zeros, &scan.zeros, sizeof zeros);
    ScanLanes<1, F> last{least<S>(low), most<S>(high), 0};
    for (int l = 0; i < n; ++i, ++l) {  // the last few, each in the lane it would have had
        SumLanes<1, F, Pivot> lane{sum[l], squares[l]};
        lane.add(x[i], pivot);
        last.add(x[i]);
        sum[l] = lane.sum, squares[l] = lane.squares;
    }
    int64_t zero_count = last.zeros;
    for (int l = 0; l < S; ++l) zero_count += zeros[l];
    return {fold<kLanes>(sum), fold<kLanes>(squares), last.low, last.high, zero_count};
}

template <int N, class F> INLINE Sums block_sums(const F *x, int64_t n, double pivot) {
    return pivot == 0 ? sums_about<N, F, false>(x, n, pivot) : sums_about<N, F, true>(x, n, pivot);
}

}  // namespace

#endif
