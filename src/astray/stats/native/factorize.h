// Byte strings to integer codes, for the dictionary columns of a recording's tables.

#ifndef ASTRAY_STATS_FACTORIZE_H
#define ASTRAY_STATS_FACTORIZE_H

#include <cstdint>
#include <cstring>
#include <vector>

#include "objects.h"

namespace {

// Numbers byte strings by their first appearance: an open hash table of codes, kept at most half full.
class Factorizer {
    struct Slot { uint32_t hash; int32_t code; };
    std::vector<Slot> slots_ = std::vector<Slot>(1024, Slot{0, -1});
    const uint8_t *data_;
    int64_t *first_;
    int32_t count_ = 0;

    // Eight bytes at a time, the last ones overlapping; each step is a multiplication folded onto itself.
    static uint64_t hash(const uint8_t *s, int64_t n) {
        uint64_t h = static_cast<uint64_t>(n) * 0x9E3779B97F4A7C15u;
        auto stir = [&](uint64_t word) {
            h = (h ^ word) * 0xBF58476D1CE4E5B9u;
            h ^= h >> 32;
        };
        uint64_t word = 0;
        if (n >= 8) {
            for (int64_t i = 0; i + 8 < n; i += 8) std::memcpy(&word, s + i, 8), stir(word);
            std::memcpy(&word, s + n - 8, 8);
        } else if (n >= 4) {
            uint32_t low, high;
            std::memcpy(&low, s, 4), std::memcpy(&high, s + n - 4, 4);
            word = low | static_cast<uint64_t>(high) << 32;
        } else if (n) {
            word = s[0] | static_cast<uint64_t>(s[n / 2]) << 8 | static_cast<uint64_t>(s[n - 1]) << 16;
        }
        stir(word);
        h *= 0x94D049BB133111EBu;
        return h ^ (h >> 29);
    }

    void grow() {
        std::vector<Slot> old(slots_.size() * 2, Slot{0, -1});
        old.swap(slots_);
        for (const Slot &slot : old) {
            if (slot.code < 0) continue;
            size_t at = slot.hash & (slots_.size() - 1);
            while (slots_[at].code >= 0) at = (at + 1) & (slots_.size() - 1);
            slots_[at] = slot;
        }
    }

  public:
    Factorizer(const uint8_t *data, int64_t *first) : data_(data), first_(first) {}

    template <class Offset> int64_t run(const Offset *offsets, int64_t rows, int32_t *codes) {
        for (int64_t row = 0; row < rows; ++row) {
            const uint8_t *text = data_ + offsets[row];
            const int64_t n = offsets[row + 1] - offsets[row];
            const auto h = static_cast<uint32_t>(hash(text, n));
            size_t at = h & (slots_.size() - 1);
            for (;; at = (at + 1) & (slots_.size() - 1)) {
                const Slot slot = slots_[at];
                if (slot.code < 0) {
                    slots_[at] = {h, count_};
                    first_[count_] = row;
                    codes[row] = count_++;
                    if (static_cast<size_t>(count_) * 2 > slots_.size()) grow();
                    break;
                }
                const int64_t seen = first_[slot.code];
                if (slot.hash == h && offsets[seen + 1] - offsets[seen] == n &&
                    std::memcmp(data_ + offsets[seen], text, n) == 0) {
                    codes[row] = slot.code;
                    break;
                }
            }
        }
        return count_;
    }
};

// factorize(data, offsets, bytes per offset, rows, codes, first) -> number of codes
PyObject *py_factorize(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    void *data, *offsets, *codes, *first;
    int64_t width, rows, count = 0;
    if (!expect(nargs, 6) || !read_address(args[0], data) || !read_address(args[1], offsets) ||
        !read_integer(args[2], width) || !read_integer(args[3], rows) || !read_address(args[4], codes) ||
        !read_address(args[5], first))
        return nullptr;
    const bool done = unlocked(rows * width, [&] {
        Factorizer factorizer(static_cast<const uint8_t *>(data), static_cast<int64_t *>(first));
        auto numbers = static_cast<int32_t *>(codes);
        count = width == 4 ? factorizer.run(static_cast<const int32_t *>(offsets), rows, numbers)
                           : factorizer.run(static_cast<const int64_t *>(offsets), rows, numbers);
    });
    return done ? PyLong_FromLongLong(count) : nullptr;
}

}  // namespace

#endif
