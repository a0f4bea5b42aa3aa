// The blocks of a strided tensor one after the other, in memory order, widened to float or double.

#ifndef ASTRAY_STATS_BLOCK_READER_H
#define ASTRAY_STATS_BLOCK_READER_H

#include "isa.h"
#include "layout.h"
#include "moments.h"

namespace {

struct Source {
    Layout layout;
    Type type;
    bool dense = false;
    double scale = 1;  // of double only

    // Sorts the dimensions into memory order, which changes no sum.
    void to_memory_order() {
        for (int d = 0; d < layout.rank; ++d) layout.dim[d].step = 0;
        layout.sort();
        layout.merge();
        dense = layout.dense();
    }
};

// The blocks of a source, one after the other, widened to F, which is what its type is widened to.
template <class F> class BlockReader {
    const Isa &isa_;
    const Source &source_;
    Walk walk_;
    alignas(64) char raw_[kBlock * 8], wide_[kBlock * 8];

  public:
    BlockReader(const Isa &isa, const Source &source, int64_t begin)
        : isa_(isa), source_(source), walk_(source.layout, begin) {}

    const char *read_raw(int64_t at, int64_t n) {
        const Layout &layout = source_.layout;
        if (source_.dense) return layout.base + at * layout.size;
        take(walk_, layout.size, n, raw_, nullptr, false);
        return raw_;
    }

    const F *read(int64_t at, int64_t n) {
        const char *values = read_raw(at, n);
        const bool plain = source_.type == (sizeof(F) == 4 ? kF32 : kF64);
        if (plain && source_.scale == 1) return reinterpret_cast<const F *>(values);
        isa_.widen(source_.type, values, n, wide_);
        auto wide = reinterpret_cast<F *>(wide_);
        if (source_.scale != 1) scale_block(wide, n, source_.scale);
        return wide;
    }
};

}  // namespace

#endif
