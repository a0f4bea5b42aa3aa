// The slice of a tensor in which two runs are furthest apart: one row, head, channel or position.

#ifndef ASTRAY_STATS_SLICES_H
#define ASTRAY_STATS_SLICES_H

#include "contrast.h"

namespace {

// The dimensions of a tensor that have slices, the innermost first, and where the sums of each begin; -1 without.
// Elements add to the sums of the innermost dimension one by one, and to those of the others row by row.
struct Slicing {
    static constexpr int64_t kLeast = 16;  // elements of a slice: fewer scatter as single ones do
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
};

// Adds up a part of the pairs, which begins and ends with a row.
template <class F>
void add_part(const Isa &isa, const Pairing &pairing, const Slicing &slicing, const Zoom &zoom, int64_t part,
              double *sums) {
    Blocks<F> reference(isa, pairing.reference), candidate(isa, pairing.candidate);
    double nowhere[kPairBlock<F>] = {};
    const int64_t end = slicing.begin(part + 1);
    int64_t at[kMaxRank], column = 0, outside = slicing.begin(part) / slicing.row;
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
            done += run;
            column += run;
            if (column < slicing.row) continue;
            column = 0;
            for (int d = 1; d < slicing.rank && ++at[d] == slicing.size[d]; ++d) at[d] = 0;
        }
    }
}

// The slice that is furthest off, times the root of how many there are of its dimension; dim is -1 where there is none.
struct Furthest {
    double value = -1;
    int dim = -1;
    int64_t index = -1;
};

Furthest furthest_slice(Pairing &pairing, const Slicing &slicing, double largest) {
    const Isa &isa = *chosen_isa;
    KeepSubnormals subnormals;
    const auto reference = straighten(pairing.reference), candidate = straighten(pairing.candidate);
    Zoom zoom;
    int exponent = 0;
    if (pairing.in_double()) {
        const bool overflowed = !std::isfinite(largest);  // then 2^-1000 of it does not
        const int shrink = overflowed ? -1000 : 0;
        exponent = overflowed ? 1000 : rescue_exponent(largest);
        zoom = {std::ldexp(1.0, shrink), std::ldexp(1.0, -exponent - shrink)};
    }
    std::vector<double> sums(slicing.parts * slicing.total);
    const int64_t bytes = slicing.count * (pairing.reference.layout.size + pairing.candidate.layout.size);
    run_tasks(slicing.parts, bytes, [&](int64_t part) {
        double *own = sums.data() + part * slicing.total;
        if (pairing.in_double()) add_part<double>(isa, pairing, slicing, zoom, part, own);
        else add_part<float>(isa, pairing, slicing, zoom, part, own);
    });
    for (int64_t part = 1; part < slicing.parts; ++part)
        for (int64_t i = 0; i < slicing.total; ++i) sums[i] += sums[part * slicing.total + i];
    Furthest found;
    for (int d = slicing.rank; d--;)
        for (int64_t i = 0; slicing.first[d] >= 0 && i < slicing.size[d]; ++i) {
            const double value = sums[slicing.first[d] + i] * static_cast<double>(slicing.size[d]);
            if (value > found.value) found = {value, slicing.rank - 1 - d, i};
        }
    found.value = std::ldexp(std::sqrt(found.value), exponent);
    return found;
}

// furthest_slice(reference, candidate, largest) -> (value, dim, index), or None where there are no slices.
PyObject *py_furthest_slice(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    Pairing pairing;
    bool complex;
    if (!expect(nargs, 3) ||
        !read_tensor(args[0], Py_None, pairing.reference.layout, pairing.reference.type, complex) ||
        !read_tensor(args[1], Py_None, pairing.candidate.layout, pairing.candidate.type, complex))
        return nullptr;
    const double largest = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return nullptr;
    const Layout &layout = pairing.reference.layout;
    if (layout.count != pairing.candidate.layout.count) {
        PyErr_SetString(PyExc_ValueError, "The tensors have different numbers of elements.");
        return nullptr;
    }
    Furthest found;
    const Slicing slicing(layout, complex);
    if (slicing.total &&
        !unlocked(layout.count * layout.size, [&] { found = furthest_slice(pairing, slicing, largest); }))
        return nullptr;
    if (found.dim < 0) Py_RETURN_NONE;
    Fields fields(3);
    fields.real(found.value);
    fields.integer(found.dim);
    fields.integer(found.index);
    return fields.take();
}

}  // namespace

#endif
