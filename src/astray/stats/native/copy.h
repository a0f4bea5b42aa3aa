// Bytes of a strided tensor: all of them in row-major order, or those of some elements.

#ifndef ASTRAY_STATS_COPY_H
#define ASTRAY_STATS_COPY_H

#include <cstdlib>
#include <memory>
#include <new>

#include "layout.h"
#include "objects.h"
#include "threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

// Row-major elements of a strided tensor. Two dimensions are taken in tiles: the innermost, along which the copy is
// written, and the one along which memory is dense, so that a transposed tensor is read by whole cache lines.
template <class U> class Packing {
    static constexpr int64_t kTile = 64, kLine = 64 / sizeof(U);
    const Layout &layout_;
    U *const out_;
    int64_t out_stride_[kMaxRank];
    int dense_ = 0;  // the dimension, other than the innermost, with the smallest stride
    int64_t strips_ = 1, outer_ = 1;

  public:
    Packing(const Layout &layout, void *out) : layout_(layout), out_(static_cast<U *>(out)) {
        int64_t stride = 1;
        for (int d = 0; d < layout.rank; ++d) {
            out_stride_[d] = stride;
            stride *= layout.dim[d].size;
            if (d && (!dense_ || std::llabs(layout.dim[d].stride) < std::llabs(layout.dim[dense_].stride))) dense_ = d;
        }
        if (dense_) strips_ = (layout.dim[dense_].size + kTile - 1) / kTile;
        for (int d = 1; d < layout.rank; ++d)
            if (d != dense_) outer_ *= layout.dim[d].size;
    }

    int64_t tasks() const { return strips_ * outer_; }

    void operator()(int64_t task) const {
        auto from = reinterpret_cast<const U *>(layout_.base);
        U *to = out_;
        const Dim &inner = layout_.dim[0];
        int64_t rest = task / strips_, begin = task % strips_ * kTile;
        for (int d = 1; d < layout_.rank; ++d) {
            if (d == dense_) continue;
            const int64_t at = rest % layout_.dim[d].size;
            rest /= layout_.dim[d].size;
            from += at * layout_.dim[d].stride;
            to += at * out_stride_[d];
        }
        const int64_t rows = dense_ ? std::min(kTile, layout_.dim[dense_].size - begin) : 1;
        const int64_t row = dense_ ? layout_.dim[dense_].stride : 0, out_row = dense_ ? out_stride_[dense_] : 0;
        from += begin * row;
        to += begin * out_row;
        if (inner.stride == 1) {
            for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * out_row, from + i * row, inner.size * sizeof(U));
            return;
        }
        // Through a small buffer: a row of the tile is read whole before its cache line can be evicted, which happens
        // immediately when the distance between rows is a power of two.
        U tile[kTile][kTile + 1];
        for (int64_t left = 0; left < inner.size; left += kTile) {
            const int64_t columns = std::min(kTile, inner.size - left);
            for (int64_t j = 0; j < columns; ++j) {
                const U *column = from + (left + j) * inner.stride;
                for (int64_t i = 0; i < rows; i += kLine) touch(column + 8 * inner.stride + i * row);
                for (int64_t i = 0; i < rows; ++i) tile[i][j] = column[i * row];
            }
            for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * out_row + left, tile[i], columns * sizeof(U));
        }
    }
};

template <class U> void pack(const Layout &layout, void *out) {
    Packing<U> packing(layout, out);
    run_tasks(packing.tasks(), layout.count * layout.size, packing);
}

void pack(Layout &layout, void *out) {
    layout.merge();
    if (layout.row_major()) {
        constexpr int64_t kPiece = 1 << 20;
        const int64_t bytes = layout.count * layout.size;
        run_tasks((bytes + kPiece - 1) / kPiece, bytes, [&](int64_t i) {
            const int64_t at = i * kPiece;
            std::memcpy(static_cast<char *>(out) + at, layout.base + at, std::min(kPiece, bytes - at));
        });
        return;
    }
    switch (layout.size) {
        case 8: return pack<uint64_t>(layout, out);
        case 4: return pack<uint32_t>(layout, out);
        case 2: return pack<uint16_t>(layout, out);
        default: return pack<uint8_t>(layout, out);
    }
}

// `parts`: real numbers per element, two for a complex one.
// Returns whether all positions lie within the tensor.
bool gather(Layout &layout, int parts, const int64_t *positions, int64_t n, char *out) {
    const int64_t count = layout.count / parts;
    for (int64_t i = 0; i < n; ++i)
        if (positions[i] < 0 || positions[i] >= count) return false;
    layout.merge();
    for (int64_t i = 0; i < n; ++i)
        for (int part = 0; part < parts; ++part) {
            int64_t position = positions[i] * parts + part;
            const char *from = layout.base;
            for (int d = 0; d < layout.rank; ++d) {
                from += position % layout.dim[d].size * layout.dim[d].stride * layout.size;
                position /= layout.dim[d].size;
            }
            std::memcpy(out, from, layout.size);
            out += layout.size;
        }
    return true;
}

struct Free { void operator()(char *memory) const { std::free(memory); } };
using Memory = std::unique_ptr<char, Free>;

// In huge pages where available: mapping memory in small ones takes longer than filling it.
Memory allocate(size_t bytes) {
#if defined(__linux__)
    constexpr size_t kPage = 2 << 20;
    Memory memory(static_cast<char *>(bytes < kPage ? std::malloc(bytes)
                                                    : std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage)));
    if (memory && bytes >= kPage) madvise(memory.get(), bytes, MADV_HUGEPAGE);
#else
    Memory memory(static_cast<char *>(std::malloc(bytes)));
#endif
    if (!memory) throw std::bad_alloc();
    return memory;
}

// pack(tensor, address)
PyObject *py_pack(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    Layout layout;
    Type type;
    bool complex;
    void *out;
    if (!expect(nargs, 2) || !read_tensor(args[0], Py_None, layout, type, complex) || !read_address(args[1], out))
        return nullptr;
    if (layout.count && !unlocked(layout.count * layout.size, [&] { pack(layout, out); })) return nullptr;
    Py_RETURN_NONE;
}

// gather(tensor, address of int64 positions, their number, address) -> whether all lie within
PyObject *py_gather(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    Layout layout;
    Type type;
    bool complex;
    void *positions, *out;
    int64_t n;
    if (!expect(nargs, 4) || !read_tensor(args[0], Py_None, layout, type, complex) ||
        !read_address(args[1], positions) || !read_integer(args[2], n) || !read_address(args[3], out))
        return nullptr;
    bool inside = false;
    const bool done = unlocked(n * layout.size, [&] {
        inside = gather(layout, complex ? 2 : 1, static_cast<const int64_t *>(positions), n, static_cast<char *>(out));
    });
    return done ? PyBool_FromLong(inside) : nullptr;
}

}  // namespace

#endif
