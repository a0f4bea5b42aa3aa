// The comparison of two tensors: both made row-major first, chunk by chunk, and once more where squares overflow.

#ifndef ASTRAY_STATS_CONTRAST_H
#define ASTRAY_STATS_CONTRAST_H

#include "contrast_blocks.h"
#include "copy.h"
#include "measure.h"

namespace {

// The sums that are computed again from scaled elements when squares of the plain ones overflow or vanish.
struct ScaledSums {
    Moments reference, candidate;
    double dot = 0, squares = 0;
    void merge(const ScaledSums &other) {
        reference.merge(other.reference);
        candidate.merge(other.candidate);
        dot += other.dot;
        squares += other.squares;
    }
};

// `shrink` keeps a difference of two huge numbers finite, `zoom` then brings the largest difference near 1.
ScaledSums rescaled_chunk(const Isa &isa, const TensorPair &pair, double shrink, double zoom, int64_t begin,
                          int64_t end) {
    ScaledSums part;
    Blocks<double> reference(isa, pair.reference), candidate(isa, pair.candidate);
    double r[kPairBlock<double>], c[kPairBlock<double>], d[kPairBlock<double>];
    const double r_back = shrink / pair.reference.scale, c_back = shrink / pair.candidate.scale;
    for (int64_t at = begin; at < end; at += kPairBlock<double>) {
        const int64_t n = end - at < kPairBlock<double> ? end - at : kPairBlock<double>;
        reference.seek(at, n);
        candidate.seek(at, n);
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            r[kept] = reference.values[i];
            c[kept] = candidate.values[i];
            d[kept] = (c[kept] * c_back - r[kept] * r_back) * zoom;
            kept += std::isfinite(r[kept]) && std::isfinite(c[kept]);
        }
        if (!kept) continue;
        const double r_pivot = pair.reference.pivot, c_pivot = pair.candidate.pivot;
        part.reference.merge(moments_of(isa, r, kept, r_pivot, isa.sums64(r, kept, r_pivot)));
        part.candidate.merge(moments_of(isa, c, kept, c_pivot, isa.sums64(c, kept, c_pivot)));
        part.squares += isa.sums64(d, kept, 0).squares;
        for (int64_t i = 0; i < kept; ++i) part.dot += r[i] * c[i];
    }
    return part;
}

struct ContrastResult {
    ContrastSums sums;
    Summary reference, candidate;
    double dot, cosine, l2_error;
    bool has_cosine;
};

// Copies a side into row-major memory, which is faster than strided access pair by pair.
Memory make_row_major(Side &side) {
    Layout &layout = side.layout;
    layout.merge();
    if (layout.row_major()) return nullptr;
    Memory copy = allocate(layout.count * layout.size);
    pack(layout, copy.get());
    layout.base = copy.get();
    layout.rank = 1;
    layout.dim[0] = {layout.count, 1, 1};
    return copy;
}

ContrastResult contrast(TensorPair &pair) {
    const Isa &isa = *chosen_isa;
    KeepSubnormals subnormals;
    const auto reference = make_row_major(pair.reference), candidate = make_row_major(pair.candidate);
    for (Side *side : {&pair.reference, &pair.candidate})
        side->pivot = choose_pivot(isa, side->layout, side->type, 1);
    const int64_t count = pair.reference.layout.count;
    const int64_t bytes = count * (pair.reference.layout.size + pair.candidate.layout.size);
    ContrastResult result{};
    ContrastSums &all = result.sums;
    all = by_chunks<ContrastSums>(count, bytes, [&](int64_t begin, int64_t end) {
        return pair.in_double() ? contrast_chunk<double>(isa, pair, begin, end)
                                   : contrast_chunk<float>(isa, pair, begin, end);
    });
    if (!all.reference.count) return result;

    ScaledSums sums{all.reference, all.candidate, all.dot, all.squares};
    int r_exponent = 0, c_exponent = 0, d_exponent = 0;
    if (pair.in_double()) {
        r_exponent = rescale_exponent(all.reference.absmax());
        c_exponent = rescale_exponent(all.candidate.absmax());
        d_exponent = rescale_exponent(all.absolute.value);
    }
    if (r_exponent || c_exponent || d_exponent || !std::isfinite(all.absolute.value)) {
        const bool overflowed = !std::isfinite(all.absolute.value);  // then 2^-1000 of it does not
        const int shrink = overflowed ? -1000 : 0;
        if (overflowed) d_exponent = 1000;
        pair.reference.scale = std::ldexp(1.0, -r_exponent);
        pair.candidate.scale = std::ldexp(1.0, -c_exponent);
        for (Side *side : {&pair.reference, &pair.candidate})
            side->pivot = choose_pivot(isa, side->layout, side->type, side->scale);
        const double shrunk = std::ldexp(1.0, shrink), zoom = std::ldexp(1.0, -d_exponent - shrink);
        sums = by_chunks<ScaledSums>(count, bytes, [&](int64_t begin, int64_t end) {
            return rescaled_chunk(isa, pair, shrunk, zoom, begin, end);
        });
    }
    result.reference = summarize(sums.reference, r_exponent);
    result.candidate = summarize(sums.candidate, c_exponent);
    result.dot = std::ldexp(sums.dot, r_exponent + c_exponent);
    result.l2_error = std::ldexp(std::sqrt(sums.squares), d_exponent);
    const double norms = summarize(sums.reference, 0).l2 * summarize(sums.candidate, 0).l2;
    result.has_cosine = norms != 0;
    if (norms != 0) result.cosine = std::fmax(-1.0, std::fmin(1.0, sums.dot / norms));  // rounding can push 1 past 1
    return result;
}

PyObject *make_contrast(const ContrastResult &result, const TensorPair &pair, int64_t count) {
    const ContrastSums &all = result.sums;
    const int64_t finite = all.reference.count;
    const bool some = finite > 0, ratios = all.rel_count > 0;
    const bool ulps = some && pair.same_type() && is_float(pair.reference.type);
    Fields fields(30);
    fields.integer(count);
    fields.integer(finite);
    fields.integer(all.different);
    for (const Summary *side : {&result.reference, &result.candidate})
        for (double value : {side->mean, side->std, side->l2}) fields.real_if(some, value);
    fields.real_if(some, result.dot);
    fields.real_if(result.has_cosine, result.cosine);
    fields.real_if(some, all.sum_abs);
    fields.real_if(some, result.l2_error);
    fields.real_if(some, all.absolute.value);
    fields.integer(all.absolute.index);
    fields.real_if(ratios, all.relative.value);
    fields.integer(all.relative.index);
    fields.real_if(ratios, all.sum_rel);
    fields.integer(all.rel_count);
    for (int64_t within : all.within) fields.integer(within);
    if (ulps) {
        fields.add(PyLong_FromUnsignedLongLong(all.max_ulp));
        const double sum = static_cast<double>(all.ulp_high) * 0x1p32 + static_cast<double>(all.ulp_low);
        fields.real(sum / static_cast<double>(finite));
    } else {
        fields.none();
        fields.none();
    }
    for (int64_t value : {all.nan_reference, all.nan_candidate, all.inf_reference, all.inf_candidate, all.mismatch,
                          all.first_mismatch})
        fields.integer(value);
    return make_named(contrast_type, fields.take());
}

// contrast(reference, candidate, rtol, atol)
PyObject *py_contrast(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    TensorPair pair;
    bool complex;
    if (!expect(nargs, 4) ||
        !read_tensor(args[0], Py_None, pair.reference.layout, pair.reference.type, complex) ||
        !read_tensor(args[1], Py_None, pair.candidate.layout, pair.candidate.type, complex))
        return nullptr;
    pair.tolerance = {PyFloat_AsDouble(args[2]), PyFloat_AsDouble(args[3])};
    if (PyErr_Occurred()) return nullptr;
    const int64_t count = pair.reference.layout.count;
    if (count != pair.candidate.layout.count) {
        PyErr_SetString(PyExc_ValueError, "The tensors have different numbers of elements.");
        return nullptr;
    }
    ContrastResult result{};
    if (count && !unlocked(count * pair.reference.layout.size, [&] { result = contrast(pair); })) return nullptr;
    return make_contrast(result, pair, count);
}

}  // namespace

#endif
