// Kernels over two blocks: ratios, errors, and distances in representable numbers.

#ifndef ASTRAY_STATS_PAIRS_H
#define ASTRAY_STATS_PAIRS_H

#include "lanes.h"

namespace {

template <class F> constexpr int64_t kPairBlock = 8192 / sizeof(F);  // half of a first-level cache with two tensors

// A pair of blocks is read twice: for the ratios, which keep the divider busy, and for everything else. The ratios come
// first, and decide what else must be computed. d is candidate - reference throughout.

// |d| / |reference| where the reference is not 0. `bound` is `most`, or infinite where the reference is 0 and the candidate is not.
struct Ratios { double sum, most, bound; int64_t different, nonzero; };

// In float a ratio is right to 2^-23: differences of floats do not underflow, nor do ratios, unequal floats being at
// least 2^-25 apart. They may overflow, and so may their sum: then it is infinite, and all is computed again in double.
constexpr double kRatioError = 0x1p-22;

// `Zeros`: some references are 0; without, these make the sum infinite or NaN.
template <int N, class R, bool Zeros> struct RatioLanes {
    using Integer = typename IntegerOf<sizeof(R)>::type;
    Lanes<R, N> most, bound;
    Lanes<Integer, N> different, nonzero;

    INLINE Lanes<R, N> add(const Lanes<R, N> &reference, const Lanes<R, N> &candidate) {
        const Lanes<R, N> none = {}, size = magnitude<R, N>(reference);
        const Lanes<R, N> error = magnitude<R, N>(candidate - reference);
        Lanes<R, N> ratio = error / size;
        tally_less<N>(different, none, error);
        if constexpr (Zeros) {
            bound = ratio > bound ? ratio : bound;  // false for 0 / 0
            tally_less<N>(nonzero, none, size);
            ratio = size == none ? none : ratio;
        }
        most = ratio > most ? ratio : most;
        return ratio;
    }

    INLINE void pour(Ratios &result) const {
        result.most = std::max<double>(result.most, largest<R, N>(most));
        result.bound = std::max<double>(result.bound, largest<R, N>(bound));
        result.different += total<Integer, N>(different);
        result.nonzero += total<Integer, N>(nonzero);
    }
};

// F elements, R the type to divide in. `each` receives the ratios, unless it is null.
template <int N, class F, class R, bool Zeros>
INLINE void ratios_of(const F *reference, const F *candidate, int64_t n, R *each, Ratios &result) {
    constexpr int W = N > 1 && sizeof(R) == 4 ? 2 * N : N;
    RatioLanes<W, R, Zeros> lanes = {};
    Lanes<double, N> sums[kLanes / N] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        UNROLL
        for (int l = 0; l < kLanes; l += W) {
            Lanes<R, W> r, c;
            load_as<W, R>(r, reference + i + l);
            load_as<W, R>(c, candidate + i + l);
            const Lanes<R, W> ratio = lanes.add(r, c);
            if (each) std::memcpy(each + i + l, &ratio, sizeof ratio);
            UNROLL
            for (int part = 0; part < W; part += N) {
                Lanes<R, N> narrow;
                Lanes<double, N> wide;
                load(narrow, reinterpret_cast<const R *>(&ratio) + part);
                widen<N>(wide, narrow);
                sums[(l + part) / N] += wide;
            }
        }
    }
    double sum[kLanes];
    std::memcpy(sum, sums, sizeof sum);
    result = {};
    const auto done = lanes;  // a copy: see Lane
    done.pour(result);
    RatioLanes<1, R, Zeros> last = {};
    for (int l = 0; i < n; ++i, ++l) {
        const R ratio = last.add(R(reference[i]), R(candidate[i]));
        if (each) each[i] = ratio;
        sum[l] += ratio;
    }
    last.pour(result);
    result.sum = fold<kLanes>(sum);
    if (!Zeros) result.bound = result.most, result.nonzero = n;
}

struct Tolerance {
    double relative, absolute;
    // Whether it allows at least `relative` of any reference, and equality everywhere.
    bool grows() const { return relative >= 0 && relative <= std::numeric_limits<double>::max() && absolute >= 0; }
};

// Which counts must be computed; the others equal the number of pairs.
enum Within { kSettled, kTolerance, kAll };

struct ErrorsRequest {
    double r_pivot, c_pivot;
    Within within;
    Tolerance tolerance;
    const char *r_ahead, *c_ahead;  // what to prefetch, and the size of its elements
    int r_size, c_size;
};

// The results of the other loop over a block of finite pairs: sums of d and of both sides about their pivots, extremes (of
// the sides for double only), and how many errors are within the tolerance, 0.001 and 0.005 of the reference.
enum ErrorSum { kDot, kAbs, kSquares, kR, kRSquares, kC, kCSquares, kErrorSums };
struct Errors {
    double sum[kErrorSums], max_abs, r_most, c_most;
    int64_t within[3];
};

constexpr int kErrorLanes = 8;  // one register of AVX-512

template <int N, class F, bool Pivot, Within What> struct ErrorLanes {
    Lanes<double, N> sum[kErrorSums], max_abs, r_most, c_most;
    Lanes<int64_t, N> within[3];

    INLINE void add(const F *reference, const F *candidate, const ErrorsRequest &request) {
        Lanes<double, N> r, c;
        load_as<N, double>(r, reference);
        load_as<N, double>(c, candidate);
        const Lanes<double, N> d = c - r, error = magnitude<double, N>(d), size = magnitude<double, N>(r);
        add_product<F, N>(sum[kDot], r, c);
        sum[kAbs] += error;
        add_evenly(sum[kSquares], d * d);
        max_abs = error > max_abs ? error : max_abs;
        if constexpr (sizeof(F) == 8) {
            const Lanes<double, N> other = magnitude<double, N>(c);
            r_most = size > r_most ? size : r_most;
            c_most = other > c_most ? other : c_most;
        }
        if constexpr (What != kSettled)
            tally_less<N, true>(within[0], error, request.tolerance.absolute + request.tolerance.relative * size);
        if constexpr (What == kAll) {
            tally_less<N, true>(within[1], error, 1e-3 * size);
            tally_less<N, true>(within[2], error, 5e-3 * size);
        }
        if constexpr (Pivot) r -= request.r_pivot, c -= request.c_pivot;
        add_evenly(sum[kR], r);
        sum[kC] += c;
        add_square(sum[kRSquares], r);
        add_square(sum[kCSquares], c);
    }

    // Adds these lanes to those from `first` on.
    INLINE void pour(double (*sums)[kErrorLanes], int first, Errors &result) const {
        for (int k = 0; k < kErrorSums; ++k) {
            const Lane<double, N> lane(sum[k]);
            for (int l = 0; l < N; ++l) sums[k][first + l] += lane.at[l];
        }
        result.max_abs = std::max(result.max_abs, largest<double, N>(max_abs));
        result.r_most = std::max(result.r_most, largest<double, N>(r_most));
        result.c_most = std::max(result.c_most, largest<double, N>(c_most));
        for (int k = 0; k < 3; ++k) result.within[k] += total<int64_t, N>(within[k]);
    }

  private:
    // Adders and multipliers are to be equally busy, and counting is work for the multipliers.
    static INLINE void add_evenly(Lanes<double, N> &total, const Lanes<double, N> &x) {
        if constexpr (What == kAll) total += x;
        else add_to<N>(total, x);
    }
    static INLINE void add_square(Lanes<double, N> &total, const Lanes<double, N> &x) {
        if constexpr (Pivot) total += x * x;
        else add_product<F, N>(total, x, x);
    }
};

template <int N, class F, bool Pivot, Within What>
INLINE void errors_of(const F *r, const F *c, int64_t n, const ErrorsRequest &request, Errors &result) {
    constexpr int L = kErrorLanes;
    double sums[kErrorSums][L] = {};
    const int64_t whole = n - n % L;
    result = {};
    for (int first = 0; first < L; first += N) {  // so that even sixteen registers are enough
        ErrorLanes<N, F, Pivot, What> lanes = {};
        for (int64_t i = first; i < whole; i += L) {
            touch(request.r_ahead + i * request.r_size);
            touch(request.c_ahead + i * request.c_size);
            lanes.add(r + i, c + i, request);
        }
        const auto done = lanes;
        done.pour(sums, first, result);
    }
    for (int64_t i = whole; i < n; ++i) {
        ErrorLanes<1, F, Pivot, What> last = {};
        last.add(r + i, c + i, request);
        last.pour(sums, static_cast<int>(i - whole), result);
    }
    for (int k = 0; k < kErrorSums; ++k) result.sum[k] = fold<L>(sums[k]);
}

template <int N, class F, bool Pivot>
INLINE void errors_about(const F *r, const F *c, int64_t n, const ErrorsRequest &request, Errors &result) {
    switch (request.within) {
        case kAll: return errors_of<N, F, Pivot, kAll>(r, c, n, request, result);
        case kTolerance: errors_of<N, F, Pivot, kTolerance>(r, c, n, request, result); break;
        case kSettled: errors_of<N, F, Pivot, kSettled>(r, c, n, request, result); result.within[0] = n;
    }
    result.within[1] = result.within[2] = n;
}

template <int N, class F>
INLINE void block_errors(const F *r, const F *c, int64_t n, const ErrorsRequest &request, Errors &result) {
    if (request.r_pivot == 0 && request.c_pivot == 0) errors_about<N, F, false>(r, c, n, request, result);
    else errors_about<N, F, true>(r, c, n, request, result);
}

// Distances in representable numbers, between two blocks of one float type.
struct Ulps { uint64_t most, low, high; };  // the sum is high * 2^32 + low

// Errors up to this part of the reference keep its sign, and are at most 2^20 representable floats, 2^49 doubles.
constexpr double kNear = 0x1p-4;

// Bit patterns in the order of their values; 0 and -0 are equal. Without a branch, for the vectoriser.
template <class U> INLINE std::make_signed_t<U> ordered(U bits) {
    using S = std::make_signed_t<U>;
    const S sign = static_cast<S>(static_cast<S>(bits) >> (8 * sizeof(U) - 1));  // -1 or 0
    return static_cast<S>((static_cast<S>(bits) ^ (sign & std::numeric_limits<S>::max())) - sign);
}

template <class U, bool Sign, bool Near> INLINE U distance(U one, U other) {
    if constexpr (Sign && !Near) {
        const auto a = ordered(one), b = ordered(other);
        const auto high = a > b ? a : b, low = a < b ? a : b;
        return static_cast<U>(static_cast<U>(high) - static_cast<U>(low));
    } else {
        constexpr U kMagnitude = Sign ? std::numeric_limits<U>::max() / 2 : std::numeric_limits<U>::max();
        const U a = one & kMagnitude, b = other & kMagnitude, high = a > b ? a : b, low = a < b ? a : b;
        return static_cast<U>(high - low);
    }
}

template <class U, bool Sign, bool Near>
INLINE Ulps block_ulps(const void *reference, const void *candidate, int64_t n) {
    auto r = static_cast<const U *>(reference);
    auto c = static_cast<const U *>(candidate);
    // Halves of the distances are added apart, and a block of halves does not overflow; near ones do not even whole.
    using Sum = std::conditional_t<sizeof(U) == 8, uint64_t, uint32_t>;
    constexpr int kHalf = 4 * sizeof(Sum);
    constexpr Sum kLow = (Sum(1) << kHalf) - 1;
    U most = 0;
    Sum low = 0, high = 0;
    for (int64_t i = 0; i < n; ++i) {
        const U apart = distance<U, Sign, Near>(r[i], c[i]);
        most = apart > most ? apart : most;
        if constexpr (Near || sizeof(U) < 4) low += apart;
        else low += apart & kLow, high += apart >> kHalf;
    }
    if constexpr (sizeof(U) == 8) return {most, low & kLow, high + (low >> kHalf)};
    else return {most, (static_cast<uint64_t>(high) << kHalf) + low, 0};
}

// Scales a difference into the range where its square is a double: (c * shrink - r * shrink) * zoom.
struct Zoom {
    double shrink = 1, factor = 1;
    bool plain() const { return shrink == 1 && factor == 1; }
};

template <int N, class F, bool Plain>
INLINE Lanes<double, N> square_of(const F *reference, const F *candidate, const Zoom &zoom) {
    Lanes<double, N> r, c;
    load_as<N, double>(r, reference);
    load_as<N, double>(c, candidate);
    if constexpr (!Plain) r *= zoom.shrink, c *= zoom.shrink;
    Lanes<double, N> d = c - r;
    if constexpr (!Plain) d *= zoom.factor;
    const Lanes<double, N> none = {};
    d = d - d == none ? d : none;  // infinite or NaN where a side is
    return d * d;
}

// Adds d * d of every finite pair to its element of `each`, and returns their sum.
template <int N, class F, bool Plain>
INLINE double squares_of(const F *reference, const F *candidate, int64_t n, const Zoom &zoom, double *each) {
    constexpr int L = kErrorLanes;
    Lanes<double, N> sums[L / N] = {};
    int64_t i = 0;
    for (; i + L <= n; i += L) {
        UNROLL
        for (int l = 0; l < L; l += N) {
            const Lanes<double, N> square = square_of<N, F, Plain>(reference + i + l, candidate + i + l, zoom);
            Lanes<double, N> total;
            load(total, each + i + l);
            total += square;
            std::memcpy(each + i + l, &total, sizeof total);
            sums[l / N] += square;
        }
    }
    double sum[L];
    std::memcpy(sum, sums, sizeof sum);
    for (int l = 0; i < n; ++i, ++l) {
        const double square = square_of<1, F, Plain>(reference + i, candidate + i, zoom);
        each[i] += square;
        sum[l] += square;
    }
    return fold<L>(sum);
}

template <int N, class F>
INLINE double block_squares(const F *r, const F *c, int64_t n, const Zoom &zoom, double *each) {
    return zoom.plain() ? squares_of<N, F, true>(r, c, n, zoom, each) : squares_of<N, F, false>(r, c, n, zoom, each);
}

}  // namespace

#endif
