// How often each of the 256 values of an 8-bit type occurs.

#ifndef ASTRAY_STATS_BYTE_COUNTS_H
#define ASTRAY_STATS_BYTE_COUNTS_H

#include <cstdint>

namespace {

class ByteCounts {
    uint32_t count_[4][256] = {};  // in turn, since adding to one address again and again waits for the last store

  public:
    void add(const uint8_t *x, int64_t n) {
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            for (int k = 0; k < 4; ++k) ++count_[k][x[i + k]];
        for (; i < n; ++i) ++count_[0][x[i]];
    }
    int64_t of(int value) const {
        return int64_t(count_[0][value]) + count_[1][value] + count_[2][value] + count_[3][value];
    }
};

}  // namespace

#endif
