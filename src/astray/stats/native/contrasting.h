// The comparison of two tensors block by block, as far as one thread goes.
//
// Two loops go over a block of both sides: ratios, in float where that is enough, and sums, in double. The ratios settle
// some counts, and which few of them must be had exactly. Blocks that are the same in every bit are only measured.

#ifndef ASTRAY_STATS_CONTRASTING_H
#define ASTRAY_STATS_CONTRASTING_H

#include "layout.h"
#include "moments.h"

namespace {

struct Peak {
    double value = -1;
    int64_t index = -1;
    void merge(const Peak &other) { if (other.value > value) *this = other; }
};

struct Contrasted {
    Moments reference, candidate;
    int64_t different = 0, rel_count = 0;
    int64_t nan_reference = 0, nan_candidate = 0, inf_reference = 0, inf_candidate = 0;
    int64_t mismatch = 0, first_mismatch = -1;
    double dot = 0, sum_abs = 0, squares = 0, sum_rel = 0;
    int64_t within[3] = {};
    Peak absolute, relative;
    uint64_t max_ulp = 0, ulp_low = 0, ulp_high = 0;

    void merge(const Contrasted &other) {
        reference.merge(other.reference);
        candidate.merge(other.candidate);
        different += other.different;
        rel_count += other.rel_count;
        dot += other.dot;
        sum_abs += other.sum_abs;
        squares += other.squares;
        sum_rel += other.sum_rel;
        for (int k = 0; k < 3; ++k) within[k] += other.within[k];
        nan_reference += other.nan_reference;
        nan_candidate += other.nan_candidate;
        inf_reference += other.inf_reference;
        inf_candidate += other.inf_candidate;
        mismatch += other.mismatch;
        if (first_mismatch < 0) first_mismatch = other.first_mismatch;
        absolute.merge(other.absolute);
        relative.merge(other.relative);
        max_ulp = other.max_ulp > max_ulp ? other.max_ulp : max_ulp;
        ulp_low += other.ulp_low;
        ulp_high += other.ulp_high;
    }
};

struct Side {
    Layout layout;
    Type type;
    double pivot = 0, scale = 1;
};

struct Pairing {
    Side reference, candidate;
    Tolerance tolerance;
    bool same_type() const { return reference.type == candidate.type; }
    bool in_double() const { return to_double(reference.type) || to_double(candidate.type); }
};

// Blocks of one side: raw, and widened to F.
template <class F> class Blocks {
    const Isa &isa_;
    const Side &side_;
    alignas(64) F wide_[kPairBlock<F>];
    alignas(64) float narrow_[kPairBlock<F>];

  public:
    const char *raw = nullptr;
    const F *values = nullptr;

    Blocks(const Isa &isa, const Side &side) : isa_(isa), side_(side) {}

    void seek(int64_t at, int64_t n) {
        raw = side_.layout.base + at * side_.layout.size;
        if (side_.type == (sizeof(F) == 4 ? kF32 : kF64) && side_.scale == 1) {
            values = reinterpret_cast<const F *>(raw);
            return;
        }
        values = wide_;
        if (sizeof(F) == 4 || to_double(side_.type)) isa_.widen(side_.type, raw, n, wide_);
        else {
            isa_.widen(side_.type, raw, n, narrow_);
            isa_.doubles(narrow_, n, reinterpret_cast<double *>(wide_));
        }
        if (side_.scale != 1) scale_block(wide_, n, side_.scale);
    }
};

template <class F> bool alike(F r, F c) { return r == c || (std::isnan(r) && std::isnan(c)); }

// A block of pairs. `place` is null when they follow each other in the tensors.
template <class F> struct Pairs {
    const F *reference, *candidate;
    const char *raw_reference, *raw_candidate;
    const int32_t *place;
    int64_t count;
};

// The pairs of a block that are finite on both sides, and where they stood.
template <class F> class FinitePairs {
    F reference_[kPairBlock<F>], candidate_[kPairBlock<F>];
    char raw_reference_[kPairBlock<F> * 8], raw_candidate_[kPairBlock<F> * 8];
    int32_t place_[kPairBlock<F>];

  public:
    Pairs<F> keep(const Pairs<F> &all, const Pairing &pairing, int64_t at, Contrasted &part) {
        const int r_size = pairing.reference.layout.size, c_size = pairing.candidate.layout.size;
        int64_t count = 0;
        for (int64_t i = 0; i < all.count; ++i) {
            const F r = all.reference[i], c = all.candidate[i];
            if (std::isfinite(r) && std::isfinite(c)) {
                reference_[count] = r;
                candidate_[count] = c;
                std::memcpy(raw_reference_ + count * r_size, all.raw_reference + i * r_size, r_size);
                std::memcpy(raw_candidate_ + count * c_size, all.raw_candidate + i * c_size, c_size);
                place_[count++] = static_cast<int32_t>(i);
                continue;
            }
            part.nan_reference += std::isnan(r);
            part.nan_candidate += std::isnan(c);
            part.inf_reference += std::isinf(r);
            part.inf_candidate += std::isinf(c);
            if (alike(r, c)) continue;
            if (!part.mismatch++) part.first_mismatch = at + i;
        }
        return {reference_, candidate_, raw_reference_, raw_candidate_, place_, count};
    }
};

// Contrasts blocks of pairs, one after the other.
template <class F> class Contrasting {
    static constexpr bool kFloat = sizeof(F) == 4;
    const Isa &isa_;
    const Pairing &pairing_;
    bool zeros_ = false;  // whether the last block had references that are 0: the next is likely to
    float ratio_[kPairBlock<F>];

    Ratios exact_ratios(const Pairs<F> &p, int64_t begin, int64_t end) const {
        Ratios result;
        if constexpr (kFloat) isa_.exact_ratios32(p.reference + begin, p.candidate + begin, end - begin, result);
        else isa_.exact_ratios64(p.reference + begin, p.candidate + begin, end - begin, result);
        return result;
    }
    Ratios ratios(const Pairs<F> &p) {
        if constexpr (!kFloat) return exact_ratios(p, 0, p.count);
        else {
            Ratios result;
            auto attempt = [&](bool zeros) {
                isa_.ratios32(p.reference, p.candidate, p.count, zeros, ratio_, result);
                return std::isfinite(result.sum);
            };
            if (!attempt(zeros_) && (zeros_ || !attempt(true))) result = exact_ratios(p, 0, p.count);
            zeros_ = result.nonzero != p.count;
            return result;
        }
    }

    // Whether the largest ratio is the one found before. With few bits that is common, and certain if they are the same
    // in float: small differences of 11-bit numbers have 12 bits, and two of their ratios are 2^-23 apart or equal.
    bool ties(const Ratios &q) const {
        const Type type = pairing_.reference.type;
        return pairing_.same_type() && is_float(type) && size_of(type) <= 2 && q.bound <= kNear &&
               static_cast<float>(q.most) == static_cast<float>(part.relative.value);
    }

    // The largest ratio in double, from the stretches where there is one that may be it.
    double exact_most(const Pairs<F> &p, const Ratios &q) const {
        if (!kFloat) return q.most;
        constexpr int64_t kStretch = 64;
        const auto near = static_cast<float>(q.most * (1 - 2 * kRatioError));
        double result = 0;
        int64_t begin = 0;
        for (int64_t at = 0; at < p.count; at += kStretch) {
            const int64_t end = std::min(at + kStretch, p.count);
            int32_t found = 0;
            for (int64_t i = at; i < end; ++i) found |= ratio_[i] >= near;
            if (found && end < p.count) continue;
            if (begin < (found ? end : at)) result = std::max(result, exact_ratios(p, begin, found ? end : at).most);
            begin = end;
        }
        return result;
    }

    // |d| <= k |reference| for all pairs, if the largest ratio says so.
    Within open_counts(const Ratios &q) const {
        const double bound = q.bound * (1 + kRatioError);
        if (!(bound <= 1e-3)) return kAll;
        return bound <= pairing_.tolerance.relative && pairing_.tolerance.grows() ? kSettled : kTolerance;
    }

    // `most`: the largest magnitude, which is known for double only, and needed there only.
    Moments moments(const F *x, int64_t n, double pivot, double sum, double squares, double most) const {
        const double m2 = squares - sum * (sum / static_cast<double>(n));
        if (kFloat) most = std::numeric_limits<double>::infinity();
        if (m2 * 128 > squares) return moments_of(isa_, x, n, pivot, {sum, squares, -most, most, 0});
        return moments_of(isa_, x, n, pivot, sums(isa_, x, n, pivot));  // they may all be the same
    }

    // The first pair whose error, relative or not, is this one.
    static int64_t find(const Pairs<F> &p, double value, bool relative) {
        for (int64_t i = 0; i < p.count; ++i) {
            const double r = p.reference[i], error = std::fabs(p.candidate[i] - r), size = std::fabs(r);
            if (relative ? size != 0 && error / size == value : error == value) return p.place ? p.place[i] : i;
        }
        return 0;
    }

    void add_ulps(const Pairs<F> &p, bool near) {
        const Ulps ulps = isa_.ulps(pairing_.reference.type, p.raw_reference, p.raw_candidate, p.count, near);
        part.max_ulp = std::max(part.max_ulp, ulps.most);
        part.ulp_low += ulps.low;
        part.ulp_high += ulps.high;
    }

  public:
    Contrasted part;

    Contrasting(const Isa &isa, const Pairing &pairing) : isa_(isa), pairing_(pairing) {}

    // Contrasts pairs that are the same in every bit; returns whether they are finite.
    bool add_same(const Pairs<F> &p, int64_t at) {
        const double pivot = pairing_.reference.pivot, other = pairing_.candidate.pivot;
        const Sums s = sums(isa_, p.reference, p.count, pivot);
        if (!std::isfinite(s.sum)) return false;
        const Moments m = moments_of(isa_, p.reference, p.count, pivot, s);
        part.reference.merge(m);
        part.candidate.merge(pivot == other ? m : moments_of(isa_, p.candidate, p.count, other,
                                                             sums(isa_, p.candidate, p.count, other)));
        part.dot += m.m2 + static_cast<double>(p.count) * (pivot + m.mean) * (pivot + m.mean);
        part.rel_count += p.count - s.zeros;
        for (int64_t &within : part.within) within += p.count;
        if (part.absolute.value < 0) part.absolute = {0, at};
        if (part.relative.value < 0 && p.count > s.zeros) part.relative = {0, at + find(p, 0, true)};
        return true;
    }

    // Returns whether the pairs are finite, as those with places are known to be; if not, nothing has been added.
    bool add(const Pairs<F> &p, int64_t at) {
        const int64_t n = p.count;
        const Ratios q = ratios(p);
        Errors e;
        const Side &one = pairing_.reference, &other = pairing_.candidate;
        const int r_size = one.layout.size, c_size = other.layout.size;
        const ErrorsRequest request{one.pivot, other.pivot, open_counts(q), pairing_.tolerance,
                                    p.raw_reference + kPairBlock<F> * r_size, p.raw_candidate + kPairBlock<F> * c_size,
                                    r_size, c_size};
        if constexpr (kFloat) isa_.errors32(p.reference, p.candidate, n, request, e);
        else isa_.errors64(p.reference, p.candidate, n, request, e);
        if (!p.place && !(std::isfinite(e.sum[kR]) && std::isfinite(e.sum[kC]))) return false;

        part.reference.merge(moments(p.reference, n, request.r_pivot, e.sum[kR], e.sum[kRSquares], e.r_most));
        part.candidate.merge(moments(p.candidate, n, request.c_pivot, e.sum[kC], e.sum[kCSquares], e.c_most));
        part.dot += e.sum[kDot];
        part.sum_abs += e.sum[kAbs];
        part.squares += e.sum[kSquares];
        part.sum_rel += q.sum;
        part.rel_count += q.nonzero;
        for (int k = 0; k < 3; ++k) part.within[k] += e.within[k];
        if (e.max_abs > part.absolute.value) part.absolute = {e.max_abs, at + find(p, e.max_abs, false)};
        if (q.nonzero && q.most * (1 + kRatioError) > part.relative.value && !ties(q)) {
            const double most = exact_most(p, q);
            if (most > part.relative.value) part.relative = {most, at + find(p, most, true)};
        }
        const Type type = pairing_.reference.type;
        if (pairing_.same_type() && (type == kI64 || type == kU64)) {  // unequal ones may be the same double
            auto r = reinterpret_cast<const int64_t *>(p.raw_reference);
            auto c = reinterpret_cast<const int64_t *>(p.raw_candidate);
            for (int64_t i = 0; i < n; ++i) part.different += r[i] != c[i];
        } else part.different += q.different;
        if (pairing_.same_type() && is_float(type) && q.different) add_ulps(p, q.bound <= kNear);
        return true;
    }
};

template <class F> Contrasted contrast_chunk(const Isa &isa, const Pairing &pairing, int64_t begin, int64_t end) {
    Blocks<F> reference(isa, pairing.reference), candidate(isa, pairing.candidate);
    FinitePairs<F> finite;
    Contrasting<F> contrasting(isa, pairing);
    for (int64_t at = begin; at < end; at += kPairBlock<F>) {
        const int64_t n = end - at < kPairBlock<F> ? end - at : kPairBlock<F>;
        reference.seek(at, n);
        candidate.seek(at, n);
        const Pairs<F> all{reference.values, candidate.values, reference.raw, candidate.raw, nullptr, n};
        const bool same = pairing.same_type() && pairing.tolerance.grows() &&
                          std::memcmp(reference.raw, candidate.raw, n * pairing.reference.layout.size) == 0;
        if (same ? contrasting.add_same(all, at) : contrasting.add(all, at)) continue;
        const Pairs<F> kept = finite.keep(all, pairing, at, contrasting.part);
        if (kept.count) contrasting.add(kept, at);
    }
    contrasting.part.different += contrasting.part.mismatch;
    return contrasting.part;
}

}  // namespace

#endif
