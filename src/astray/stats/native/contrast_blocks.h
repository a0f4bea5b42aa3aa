// The comparison of two tensors block by block, within one thread.
//
// Two loops read a block of both sides: ratios, in float where that is enough, and sums, in double. The ratios decide
// some counts, and which few of them must be computed exactly. Blocks that are the same in every bit are only measured.

#ifndef ASTRAY_STATS_CONTRAST_BLOCKS_H
#define ASTRAY_STATS_CONTRAST_BLOCKS_H

#include "layout.h"
#include "moments.h"

namespace {

struct Peak {
    double value = -1;
    int64_t index = -1;
    void merge(const Peak &other) { if (other.value > value) *this = other; }
};

struct ContrastSums {
    Moments reference, candidate;
    int64_t different = 0, rel_count = 0;
    int64_t nan_reference = 0, nan_candidate = 0, inf_reference = 0, inf_candidate = 0;
    int64_t mismatch = 0, first_mismatch = -1;
    double dot = 0, sum_abs = 0, squares = 0, sum_rel = 0;
    int64_t within[3] = {};
    Peak absolute, relative;
    uint64_t max_ulp = 0, ulp_low = 0, ulp_high = 0;

    void merge(const ContrastSums &other) {
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

struct TensorPair {
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

template <class F> bool equal_or_nan(F r, F c) { return r == c || (std::isnan(r) && std::isnan(c)); }

// A block of pairs. `index` is null when they follow each other in the tensors.
template <class F> struct Pairs {
    const F *reference, *candidate;
    const char *raw_reference, *raw_candidate;
    const int32_t *index;
    int64_t count;
};

// The pairs of a block that are finite on both sides, and their indices in it.
template <class F> class FinitePairs {
    F reference_[kPairBlock<F>], candidate_[kPairBlock<F>];
    char raw_reference_[kPairBlock<F> * 8], raw_candidate_[kPairBlock<F> * 8];
    int32_t index_[kPairBlock<F>];

  public:
    Pairs<F> keep(const Pairs<F> &all, const TensorPair &pair, int64_t at, ContrastSums &part) {
        const int r_size = pair.reference.layout.size, c_size = pair.candidate.layout.size;
        int64_t count = 0;
        for (int64_t i = 0; i < all.count; ++i) {
            const F r = all.reference[i], c = all.candidate[i];
            if (std::isfinite(r) && std::isfinite(c)) {
                reference_[count] = r;
                candidate_[count] = c;
                std::memcpy(raw_reference_ + count * r_size, all.raw_reference + i * r_size, r_size);
                std::memcpy(raw_candidate_ + count * c_size, all.raw_candidate + i * c_size, c_size);
                index_[count++] = static_cast<int32_t>(i);
                continue;
            }
            part.nan_reference += std::isnan(r);
            part.nan_candidate += std::isnan(c);
            part.inf_reference += std::isinf(r);
            part.inf_candidate += std::isinf(c);
            if (equal_or_nan(r, c)) continue;
            if (!part.mismatch++) part.first_mismatch = at + i;
        }
        return {reference_, candidate_, raw_reference_, raw_candidate_, index_, count};
    }
};

// Contrasts blocks of pairs, one after the other.
template <class F> class BlockContrast {
    static constexpr bool kFloat = sizeof(F) == 4;
    const Isa &isa_;
    const TensorPair &pair_;
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

    // Whether the largest ratio equals an earlier one. With few bits that is common, and certain if they are the same
    // in float: small differences of 11-bit numbers have 12 bits, and two of their ratios are 2^-23 apart or equal.
    bool ties(const Ratios &q) const {
        const Type type = pair_.reference.type;
        return pair_.same_type() && is_float(type) && size_of(type) <= 2 && q.bound <= kNear &&
               static_cast<float>(q.most) == static_cast<float>(part.relative.value);
    }

    // The largest ratio in double, from the stretches that may contain it.
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
        return bound <= pair_.tolerance.relative && pair_.tolerance.grows() ? kSettled : kTolerance;
    }

    // `most`: the largest magnitude, known and needed for double only.
    Moments moments(const F *x, int64_t n, double pivot, double sum, double squares, double most) const {
        const double m2 = squares - sum * (sum / static_cast<double>(n));
        if (kFloat) most = std::numeric_limits<double>::infinity();
        if (m2 * 128 > squares) return moments_of(isa_, x, n, pivot, {sum, squares, -most, most, 0});
        return moments_of(isa_, x, n, pivot, sums(isa_, x, n, pivot));  // they may all be equal
    }

    // The first pair with this error, relative or absolute.
    static int64_t find(const Pairs<F> &p, double value, bool relative) {
        for (int64_t i = 0; i < p.count; ++i) {
            const double r = p.reference[i], error = std::fabs(p.candidate[i] - r), size = std::fabs(r);
            if (relative ? size != 0 && error / size == value : error == value) return p.index ? p.index[i] : i;
        }
        return 0;
    }

    void add_ulps(const Pairs<F> &p, bool near) {
        const Ulps ulps = isa_.ulps(pair_.reference.type, p.raw_reference, p.raw_candidate, p.count, near);
        part.max_ulp = std::max(part.max_ulp, ulps.most);
        part.ulp_low += ulps.low;
        part.ulp_high += ulps.high;
    }

  public:
    ContrastSums part;

    BlockContrast(const Isa &isa, const TensorPair &pair) : isa_(isa), pair_(pair) {}

    // Contrasts pairs that are the same in every bit; returns whether they are finite.
    bool add_same(const Pairs<F> &p, int64_t at) {
        const double pivot = pair_.reference.pivot, other = pair_.candidate.pivot;
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
        const Side &one = pair_.reference, &other = pair_.candidate;
        const int r_size = one.layout.size, c_size = other.layout.size;
        const ErrorsRequest request{one.pivot, other.pivot, open_counts(q), pair_.tolerance,
                                    p.raw_reference + kPairBlock<F> * r_size, p.raw_candidate + kPairBlock<F> * c_size,
                                    r_size, c_size};
        if constexpr (kFloat) isa_.errors32(p.reference, p.candidate, n, request, e);
        else isa_.errors64(p.reference, p.candidate, n, request, e);
        if (!p.index && !(std::isfinite(e.sum[kR]) && std::isfinite(e.sum[kC]))) return false;

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
        const Type type = pair_.reference.type;
        if (pair_.same_type() && (type == kI64 || type == kU64)) {  // unequal ones may be the same double
            auto r = reinterpret_cast<const int64_t *>(p.raw_reference);
            auto c = reinterpret_cast<const int64_t *>(p.raw_candidate);
            for (int64_t i = 0; i < n; ++i) part.different += r[i] != c[i];
        } else part.different += q.different;
        if (pair_.same_type() && is_float(type) && q.different) add_ulps(p, q.bound <= kNear);
        return true;
    }
};

template <class F> ContrastSums contrast_chunk(const Isa &isa, const TensorPair &pair, int64_t begin, int64_t end) {
    Blocks<F> reference(isa, pair.reference), candidate(isa, pair.candidate);
    FinitePairs<F> finite;
    BlockContrast<F> block_contrast(isa, pair);
    for (int64_t at = begin; at < end; at += kPairBlock<F>) {
        const int64_t n = end - at < kPairBlock<F> ? end - at : kPairBlock<F>;
        reference.seek(at, n);
        candidate.seek(at, n);
        const Pairs<F> all{reference.values, candidate.values, reference.raw, candidate.raw, nullptr, n};
        const bool same = pair.same_type() && pair.tolerance.grows() &&
                          std::memcmp(reference.raw, candidate.raw, n * pair.reference.layout.size) == 0;
        if (same ? block_contrast.add_same(all, at) : block_contrast.add(all, at)) continue;
        const Pairs<F> kept = finite.keep(all, pair, at, block_contrast.part);
        if (kept.count) block_contrast.add(kept, at);
    }
    block_contrast.part.different += block_contrast.part.mismatch;
    return block_contrast.part;
}

}  // namespace

#endif
