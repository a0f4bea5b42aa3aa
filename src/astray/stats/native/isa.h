// The kernels over a block, once for each instruction set, and which of them is in use.
//
// One wrapper per kernel has the target attribute and everything else is inlined into it. The choice is made when the
// module loads: a wheel built on one machine serves all.

#ifndef ASTRAY_STATS_ISA_H
#define ASTRAY_STATS_ISA_H

#include <atomic>

#include "elements.h"
#include "hashing.h"
#include "pairs.h"
#include "powers.h"
#include "sums.h"

namespace {

INLINE uint64_t block_read(const void *raw, int64_t n) {
    auto word = static_cast<const uint64_t *>(raw);
    uint64_t total = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        touch_ahead(word + i);
        for (int k = 0; k < 8; ++k) total += word[i + k];
    }
    for (; i < n; ++i) total += word[i];
    return total;
}

struct Isa {
    const char *name;
    void (*widen)(Type, const void *, int64_t, void *);
    void (*doubles)(const float *, int64_t, double *);
    Sums (*sums32)(const float *, int64_t, double);
    Sums (*sums64)(const double *, int64_t, double);
    PowerSums (*powers32)(const float *, int64_t, double);
    PowerSums (*powers64)(const double *, int64_t, double);
    double (*power)(double *, int64_t, int);
    uint64_t (*words)(const void *, int64_t, uint64_t);
    uint64_t (*elements)(int size, bool wide_index, const void *, int64_t, const void *);
    void (*ratios32)(const float *, const float *, int64_t, bool zeros, float *each, Ratios &);
    void (*exact_ratios32)(const float *, const float *, int64_t, Ratios &);
    void (*exact_ratios64)(const double *, const double *, int64_t, Ratios &);
    void (*errors32)(const float *, const float *, int64_t, const ErrorsRequest &, Errors &);
    void (*errors64)(const double *, const double *, int64_t, const ErrorsRequest &, Errors &);
    double (*squares32)(const float *, const float *, int64_t, const Zoom &, double *each);
    double (*squares64)(const double *, const double *, int64_t, const Zoom &, double *each);
    Ulps (*ulps)(Type, const void *, const void *, int64_t, bool near);
    uint64_t (*read)(const void *, int64_t);
};

template <class Index> INLINE uint64_t elements_of(int size, const void *raw, int64_t n, const void *index) {
    switch (size) {
        case 8: return block_elements<uint64_t, Index>(raw, n, index);
        case 4: return block_elements<uint32_t, Index>(raw, n, index);
        case 2: return block_elements<uint16_t, Index>(raw, n, index);
        default: return block_elements<uint8_t, Index>(raw, n, index);
    }
}
template <bool Near> INLINE Ulps ulps_of(Type type, const void *r, const void *c, int64_t n) {
    switch (size_of(type)) {
        case 8: return block_ulps<uint64_t, true, Near>(r, c, n);
        case 4: return block_ulps<uint32_t, true, Near>(r, c, n);
        case 2: return block_ulps<uint16_t, true, Near>(r, c, n);
        default:
            if (type == kE8M0) return block_ulps<uint8_t, false, Near>(r, c, n);
            return block_ulps<uint8_t, true, Near>(r, c, n);
    }
}

// One wrapper per kernel: the attribute makes everything inlined into it use the instruction set.
#define DEFINE_ISA(ISA, TARGET, N)                                                                                     \
    namespace isa_##ISA {                                                                                              \
    TARGET void widen(Type type, const void *raw, int64_t n, void *out) { widen_elements<N>(type, raw, n, out); }      \
    TARGET void doubles(const float *x, int64_t n, double *out) { convert<float, double>(x, n, out); }                 \
    TARGET Sums sums32(const float *x, int64_t n, double pivot) { return block_sums<N>(x, n, pivot); }                 \
    TARGET Sums sums64(const double *x, int64_t n, double pivot) { return block_sums<N>(x, n, pivot); }                \
    TARGET PowerSums powers32(const float *x, int64_t n, double centre) { return block_powers<N>(x, n, centre); }      \
    TARGET PowerSums powers64(const double *x, int64_t n, double centre) { return block_powers<N>(x, n, centre); }     \
    TARGET double power(double *x, int64_t n, int exponent) { return block_power(x, n, exponent); }                    \
    TARGET uint64_t words(const void *raw, int64_t n, uint64_t first) { return block_words<N>(raw, n, first); }        \
    TARGET uint64_t elements(int size, bool wide, const void *raw, int64_t n, const void *index) {                     \
        return wide ? elements_of<uint64_t>(size, raw, n, index) : elements_of<uint32_t>(size, raw, n, index);         \
    }                                                                                                                  \
    TARGET void ratios32(const float *r, const float *c, int64_t n, bool zeros, float *each, Ratios &q) {              \
        if (zeros) ratios_of<N, float, float, true>(r, c, n, each, q);                                                 \
        else ratios_of<N, float, float, false>(r, c, n, each, q);                                                      \
    }                                                                                                                  \
    TARGET void exact_ratios32(const float *r, const float *c, int64_t n, Ratios &q) {                                 \
        ratios_of<N, float, double, true>(r, c, n, static_cast<double *>(nullptr), q);                                 \
    }                                                                                                                  \
    TARGET void exact_ratios64(const double *r, const double *c, int64_t n, Ratios &q) {                               \
        ratios_of<N, double, double, true>(r, c, n, static_cast<double *>(nullptr), q);                                \
    }                                                                                                                  \
    TARGET void errors32(const float *r, const float *c, int64_t n, const ErrorsRequest &q, Errors &e) {               \
        block_errors<N>(r, c, n, q, e);                                                                                \
    }                                                                                                                  \
    TARGET void errors64(const double *r, const double *c, int64_t n, const ErrorsRequest &q, Errors &e) {             \
        block_errors<N>(r, c, n, q, e);                                                                                \
    }                                                                                                                  \
    TARGET double squares32(const float *r, const float *c, int64_t n, const Zoom &zoom, double *each) {               \
        return block_squares<N>(r, c, n, zoom, each);                                                                  \
    }                                                                                                                  \
    TARGET double squares64(const double *r, const double *c, int64_t n, const Zoom &zoom, double *each) {             \
        return block_squares<N>(r, c, n, zoom, each);                                                                  \
    }                                                                                                                  \
    TARGET Ulps ulps(Type type, const void *r, const void *c, int64_t n, bool near) {                                  \
        return near ? ulps_of<true>(type, r, c, n) : ulps_of<false>(type, r, c, n);                                    \
    }                                                                                                                  \
    TARGET uint64_t read(const void *raw, int64_t n) { return block_read(raw, n); }                                    \
    constexpr Isa table = {#ISA, widen, doubles, sums32, sums64, powers32, powers64, power,                            \
                           words, elements, ratios32, exact_ratios32, exact_ratios64, errors32,                        \
                           errors64, squares32, squares64, ulps, read};                                                \
    }

#if X86_VECTORS
#if defined(__clang__)
#define TARGET_AVX512 "arch=x86-64-v4"
#else
#define TARGET_AVX512 "arch=x86-64-v4,prefer-vector-width=512"  // gcc limits its own loops to half of that
#endif
DEFINE_ISA(baseline, , 2)
DEFINE_ISA(avx2, __attribute__((target("arch=x86-64-v3"))), 4)
DEFINE_ISA(avx512, __attribute__((target(TARGET_AVX512))), 8)
constexpr const Isa *kIsas[] = {&isa_baseline::table, &isa_avx2::table, &isa_avx512::table};
int supported_isas() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2")) return 1;
    const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    return v4 ? 3 : 2;
}
#else
DEFINE_ISA(baseline, , GNU_VECTORS ? 2 : 1)
constexpr const Isa *kIsas[] = {&isa_baseline::table};
int supported_isas() { return 1; }
#endif

std::atomic<const Isa *> chosen_isa{kIsas[0]};

}  // namespace

#endif
