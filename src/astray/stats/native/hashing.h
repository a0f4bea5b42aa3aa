// The fingerprint of a block. See fingerprint.py for its definition.

#ifndef ASTRAY_STATS_HASHING_H
#define ASTRAY_STATS_HASHING_H

#include "lanes.h"

namespace {

constexpr uint32_t kStep = 0x9E3779B1u, kStepHigh = 0x85EBCA6Bu, kSpread = 0x7FEB352Du, kFlip = 0x61C8864Fu;

// The factor of a word, from the linear part of its hash. See fingerprint.py for the definition.
template <class V> INLINE V spread(V x) {
    x ^= kFlip;
    x ^= x >> 16;
    x *= kSpread;
    x ^= x >> 15;
    return x;
}
INLINE uint32_t linear(uint64_t word) {
    return static_cast<uint32_t>(word) * kStep + static_cast<uint32_t>(word >> 32) * kStepHigh;
}

// Products of the even 32-bit lanes, 64 bits each.
template <int N>
INLINE void multiply_even(Lanes<uint64_t, N> &to, const Lanes<uint64_t, N> &a, const Lanes<uint64_t, N> &b) {
#if GCC_ASM  // gcc multiplies all 64 bits instead, at three times the cost
    if constexpr (N >= 4) asm("vpmuludq %2, %1, %0" : "=v"(to) : "v"(a), "v"(b));
    else { to = a; asm("pmuludq %1, %0" : "+x"(to) : "x"(b)); }
#else
    to = (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// The fingerprint of n whole words that follow each other, the first being the `first` of the tensor.
template <int N> INLINE uint64_t block_words(const void *raw, int64_t n, uint64_t first) {
    auto bytes = static_cast<const char *>(raw);
    uint64_t total = 0;
    while (n) {
        // The low half of the index must not wrap within a run: the high half would change.
        const int64_t room = static_cast<int64_t>((uint64_t(1) << 32) - (first & 0xffffffffu));
        const int64_t run = n < room ? n : room;
        uint32_t x = linear(first);
        int64_t i = 0;
#if GNU_VECTORS
        constexpr int W = 2 * N;
        using Words = Lanes<uint32_t, W>;
        using Sum = Lanes<uint64_t, N>;
        Words place;
        Sum even = {}, odd = {};
        for (int l = 0; l < W; ++l) place[l] = x + l * kStep;
        for (; i + W < run; i += W) {
            touch_ahead(bytes + 4 * i);
            const Sum factor = reinterpret_cast<Sum>(spread<Words>(place));
            Sum word, next, product;
            load(word, bytes + 4 * i);
            load(next, bytes + 4 * i + 4);  // one word on, so that odd words stand in even lanes; hence "<" above
            place += W * kStep;
            multiply_even<N>(product, factor, word);
            even += product;
            multiply_even<N>(product, factor >> 32, next);
            odd += product;
        }
        even += odd;
        for (int l = 0; l < N; ++l) total += even[l];
        x += static_cast<uint32_t>(i) * kStep;
#endif
        for (; i < run; ++i, x += kStep) {
            uint32_t word;
            std::memcpy(&word, bytes + 4 * i, 4);
            total += static_cast<uint64_t>(word) * spread(x);
        }
        bytes += 4 * run;
        first += run;
        n -= run;
    }
    return total;
}

// The fingerprint of n elements, each at its own index in the tensor. `Index` has 32 bits where all word indices do.
template <class U, class Index> INLINE uint64_t block_elements(const void *raw, int64_t n, const void *indices) {
    auto value = static_cast<const U *>(raw);
    auto index = static_cast<const Index *>(indices);
    auto factor = [](Index word) -> uint64_t {
        if constexpr (sizeof(Index) == 4) return spread(word * kStep);
        else return spread(linear(word));
    };
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
        if constexpr (sizeof(U) == 8) {
            total += (value[i] & 0xffffffffu) * factor(2 * index[i]) + (value[i] >> 32) * factor(2 * index[i] + 1);
        } else if constexpr (sizeof(U) == 4) {
            total += value[i] * factor(index[i]);
        } else {
            constexpr int kPerWord = 4 / sizeof(U);
            const uint32_t shift = static_cast<uint32_t>(index[i] % kPerWord) * (8 * sizeof(U));
            total += static_cast<uint64_t>(static_cast<uint32_t>(value[i]) << shift) * factor(index[i] / kPerWord);
        }
    }
    return total;
}

}  // namespace

#endif
