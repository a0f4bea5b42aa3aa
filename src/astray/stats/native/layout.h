// A strided tensor as nested loops, merged where they can be, and how to walk it.

#ifndef ASTRAY_STATS_LAYOUT_H
#define ASTRAY_STATS_LAYOUT_H

#include <cstdint>
#include <cstring>

namespace {

struct Dim { int64_t size, stride, step; };  // stride in memory, step in the tensor's logical index, both in elements

constexpr int kMaxRank = 66;  // torch and numpy stop at 64; complex parts add one

// A tensor as nested loops, dim[0] innermost.
struct Layout {
    const char *base = nullptr;
    int64_t count = 1;
    uint64_t origin = 0;  // the logical index of the element at `base`
    int size = 1;         // of an element
    int rank = 0;
    Dim dim[kMaxRank];

    // Sorts the dimensions into memory order, smallest stride first: statistics do not depend on the order, and a
    // fingerprint only on the logical index. Repeated dimensions (stride 0) go outermost: inner runs stay long.
    void sort() {
        for (int d = 0; d < rank; ++d)
            if (dim[d].stride < 0) {
                base += (dim[d].size - 1) * dim[d].stride * size;
                origin += static_cast<uint64_t>((dim[d].size - 1) * dim[d].step);
                dim[d].stride = -dim[d].stride;
                dim[d].step = -dim[d].step;
            }
        auto weight = [](const Dim &d) { return d.stride ? static_cast<uint64_t>(d.stride) : UINT64_MAX; };
        for (int d = 1; d < rank; ++d) {
            const Dim moving = dim[d];
            int to = d;
            for (; to && weight(dim[to - 1]) > weight(moving); --to) dim[to] = dim[to - 1];
            dim[to] = moving;
        }
    }

    // Joins neighbouring dimensions that are one run in memory and in index.
    void merge() {
        int last = -1;
        for (int d = 0; d < rank; ++d) {
            if (dim[d].size == 1) continue;
            if (last >= 0 && dim[d].stride == dim[last].size * dim[last].stride &&
                dim[d].step == dim[last].size * dim[last].step)
                dim[last].size *= dim[d].size;
            else dim[++last] = dim[d];
        }
        rank = last + 1;
    }

    // Whether its elements are contiguous in memory, in this order.
    bool dense() const {
        int64_t expected = 1;
        for (int d = 0; d < rank; ++d) {
            if (dim[d].stride != expected) return false;
            expected *= dim[d].size;
        }
        return true;
    }

    bool row_major() const { return rank == 0 || (rank == 1 && dim[0].stride == 1 && dim[0].step == 1); }
};

// A position in a layout, and how to advance it.
class Walk {
  public:
    Walk(const Layout &layout, int64_t position) : layout_(layout), address_(layout.base), index_(layout.origin) {
        for (int d = 0; d < layout.rank; ++d) {
            at_[d] = position % layout.dim[d].size;
            position /= layout.dim[d].size;
            address_ += at_[d] * layout.dim[d].stride * layout.size;
            index_ += static_cast<uint64_t>(at_[d] * layout.dim[d].step);
        }
    }

    // Passes n elements, copying them out and noting their logical indices; either may be null. Inlined into every
    // caller, like its callers below: the loops are only tight where it is known which is null.
    template <class U, class Index> INLINE void take(int64_t n, U *values, Index *indices) {
        if (layout_.rank == 0) {
            if (values) std::memcpy(values, address_, sizeof(U));
            if (indices) *indices = static_cast<Index>(index_);
            return;
        }
        const Dim &inner = layout_.dim[0];
        while (n) {
            const int64_t left = inner.size - at_[0], run = left < n ? left : n;
            if (values) values = copy(values, run, inner.stride);
            if (indices) {
                auto index = static_cast<Index>(index_);
                for (int64_t i = 0; i < run; ++i, index += static_cast<Index>(inner.step)) indices[i] = index;
                indices += run;
            }
            n -= run;
            move(0, run);
            if (at_[0] == inner.size) carry();
        }
    }

  private:
    template <class U> U *copy(U *values, int64_t run, int64_t stride) {
        if (stride == 1) std::memcpy(values, address_, run * sizeof(U));
        else {
            auto from = reinterpret_cast<const U *>(address_);
            for (int64_t i = 0; i < run; ++i) values[i] = from[i * stride];
        }
        return values + run;
    }
    void move(int d, int64_t by) {
        at_[d] += by;
        address_ += by * layout_.dim[d].stride * layout_.size;
        index_ += static_cast<uint64_t>(by * layout_.dim[d].step);
    }
    void carry() {
        for (int d = 0; d < layout_.rank && at_[d] == layout_.dim[d].size; ++d) {
            move(d, -at_[d]);
            if (d + 1 < layout_.rank) move(d + 1, 1);
        }
    }

    const Layout &layout_;
    const char *address_;
    uint64_t index_;
    int64_t at_[kMaxRank];
};

template <class U> INLINE void take_indexed(Walk &walk, int64_t n, void *values, void *indices, bool wide_index) {
    if (wide_index) walk.take(n, static_cast<U *>(values), static_cast<uint64_t *>(indices));
    else walk.take(n, static_cast<U *>(values), static_cast<uint32_t *>(indices));
}
INLINE void take(Walk &walk, int size, int64_t n, void *values, void *indices, bool wide_index) {
    switch (size) {
        case 8: return take_indexed<uint64_t>(walk, n, values, indices, wide_index);
        case 4: return take_indexed<uint32_t>(walk, n, values, indices, wide_index);
        case 2: return take_indexed<uint16_t>(walk, n, values, indices, wide_index);
        default: return take_indexed<uint8_t>(walk, n, values, indices, wide_index);
    }
}

}  // namespace

#endif
