// Errors in parts of a tensor: in the slice that is furthest off, and in a typical row.

#ifndef ASTRAY_STATS_SLICES_H
#define ASTRAY_STATS_SLICES_H

#include "contrast.h"

namespace {

// The dimensions of a tensor that have slices, the innermost first, and where the sums of each begin; -1 without.
// Elements add to the sums of the innermost dimension one by one, and to those of the others row by row.
struct Slicing {
    static constexpr int64_t kLeast = 16;  // elements of a slice or a row: fewer scatter as single ones do
    static constexpr int64_t kMany = 8;    // rows: the median of fewer is chance
    int64_t count, row = 1, total = 0, parts = 1;
    int rank;
    int64_t size[kMaxRank], first[kMaxRank];

    Slicing(const Layout &layout, bool complex) : count(layout.count), rank(layout.rank) {
        if (rank) row = layout.dim[0].size;
        for (int d = 0; d < rank; ++d) {
            size[d] = layout.dim[d].size;
            const bool has = size[d] > 1 && count / size[d] >= kLeast && !(d == 0 && complex);  // of which the parts are
            first[d] = has ? total : -1;
            total += has ? size[d] : 0;
        }
        // Whatever the number of threads, so that no bit depends on it; and no more than the elements take.
        if (total) parts = std::max<int64_t>(1, std::min<int64_t>(16, count / (16 * total)));
    }
    int64_t begin(int64_t part) const { return count / row * part / parts * row; }
    int64_t rows() const { return row >= kLeast && count / row >= kMany ? count / row : 0; }
};

// Adds up a part of the pairs, which begins and ends with a row. rows: the sums of all rows, or null.
template <class F>
void add_part(const Isa &isa, const TensorPair &pair, const Slicing &slicing, const Zoom &zoom, int64_t part,
              double *sums, double *rows) {
    Blocks<F> reference(isa, pair.reference), candidate(isa, pair.candidate);
    double nowhere[kPairBlock<F>] = {};
    const int64_t end = slicing.begin(part + 1);
    int64_t at[kMaxRank], column = 0, outside = slicing.begin(part) / slicing.row;
    if (rows) rows += outside;
    for (int d = 1; d < slicing.rank; ++d) {
        at[d] = outside % slicing.size[d];
        outside /= slicing.size[d];
    }
    for (int64_t begin = slicing.begin(part); begin < end; begin += kPairBlock<F>) {
        const int64_t n = std::min(kPairBlock<F>, end - begin);
        reference.seek(begin, n);
        candidate.seek(begin, n);
        for (int64_t done = 0; done < n;) {
            const int64_t run = std::min(n - done, slicing.row - column);
            const F *r = reference.values + done, *c = candidate.values + done;
            double *each = slicing.first[0] < 0 ? nowhere : sums + slicing.first[0] + column, sum;
            if constexpr (sizeof(F) == 4) sum = isa.squares32(r, c, run, zoom, each);
            else sum = isa.squares64(r, c, run, zoom, each);
            for (int d = 1; d < slicing.rank; ++d)
                if (slicing.first[d] >= 0) sums[slicing.first[d] + at[d]] += sum;
            if (rows) *rows += sum;
            done += run;
            column += run;
            if (column < slicing.row) continue;
            column = 0;
            if (rows) ++rows;
            for (int d = 1; d < slicing.rank && ++at[d] == slicing.size[d]; ++d) at[d] = 0;
        }
    }
}

// The slice that is furthest off, times the root of how many there are of its dimension; dim is -1 where there is none.
// Likewise `typical`, the median of all rows, of an even number the larger one; -1 where there are too few.
struct Apart {
    double value = -1, typical = -1;
    int dim = -1;
    int64_t index = -1;
};

Apart slice_errors(TensorPair &pair, const Slicing &slicing, double largest) {
    const Isa &isa = *chosen_isa;
    KeepSubnormals subnormals;
    const auto reference = make_row_major(pair.reference), candidate = make_row_major(pair.candidate);
    Zoom zoom;
    int exponent = 0;
    if (pair.in_double()) {
        const bool overflowed = !std::isfinite(largest);  // then 2^-1000 of it does not
        const int shrink = overflowed ? -1000 : 0;
        exponent = overflowed ? 1000 : rescale_exponent(largest);
        zoom = {std::ldexp(1.0, shrink), std::ldexp(1.0, -exponent - shrink)};
    }
    std::vector<double> sums(slicing.parts * slicing.total), rows(slicing.rows());
    double *each = rows.empty() ? nullptr : rows.data();
    const int64_t bytes = slicing.count * (pair.reference.layout.size + pair.candidate.layout.size);
    run_tasks(slicing.parts, bytes, [&](int64_t part) {
        double *own = sums.data() + part * slicing.total;
        if (pair.in_double()) add_part<double>(isa, pair, slicing, zoom, part, own, each);
        else add_part<float>(isa, pair, slicing, zoom, part, own, each);
    });
    for (int64_t part = 1; part < slicing.parts; ++part)
        for (int64_t i = 0; i < slicing.total; ++i) sums[i] += sums[part * slicing.total + i];
    Apart found;
    for (int d = slicing.rank; d--;) {
        if (slicing.first[d] < 0) continue;
        const double *begin = sums.data() + slicing.first[d], *top = std::max_element(begin, begin + slicing.size[d]);
        const double value = *top * static_cast<double>(slicing.size[d]);
        if (value > found.value) {
            found.value = value;
            found.dim = slicing.rank - 1 - d;
            found.index = top - begin;
        }
    }
    found.value = std::ldexp(std::sqrt(found.value), exponent);
    if (each) {
        double *middle = each + rows.size() / 2;
        std::nth_element(each, middle, each + rows.size());
        found.typical = std::ldexp(std::sqrt(*middle * static_cast<double>(rows.size())), exponent);
    }
    return found;
}

// slice_errors(reference, candidate, largest) -> (value, dim, index, typical), or None where there are no slices.
PyObject *py_slice_errors(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    TensorPair pair;
    bool complex;
    if (!expect(nargs, 3) ||
        !read_tensor(args[0], Py_None, pair.reference.layout, pair.reference.type, complex) ||
        !read_tensor(args[1], Py_None, pair.candidate.layout, pair.candidate.type, complex))
        return nullptr;
    const double largest = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return nullptr;
    const Layout &layout = pair.reference.layout;
    if (layout.count != pair.candidate.layout.count) {
        PyErr_SetString(PyExc_ValueError, "The tensors have different numbers of elements.");
        return nullptr;
    }
    Apart found;
    const Slicing slicing(layout, complex);
    if (slicing.total &&
        !unlocked(layout.count * layout.size, [&] { found = slice_errors(pair, slicing, largest); }))
        return nullptr;
    if (found.dim < 0) Py_RETURN_NONE;
    Fields fields(4);
    fields.real(found.value);
    fields.integer(found.dim);
    fields.integer(found.index);
    fields.real(found.typical < 0 ? NAN : found.typical);
    return fields.take();
}

}  // namespace

#endif
