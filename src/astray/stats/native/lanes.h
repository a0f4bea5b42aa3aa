// The vector types that the kernels compute in, and the compilers' builtins for them.
//
// Lanes are GNU vector types, a width at a time; where a compiler lacks them they are plain numbers. The kernels are
// templates over that width, see isa.h.

#ifndef ASTRAY_STATS_LANES_H
#define ASTRAY_STATS_LANES_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__GNUC__) || defined(__clang__)
#define INLINE inline __attribute__((always_inline))
#define GNU_VECTORS 1
#else
#define INLINE __forceinline
#define GNU_VECTORS 0
#endif

// Loops over the registers of a group of lanes: left as loops, the group would live in memory.
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL
#endif

#if GNU_VECTORS && defined(__x86_64__)
#define X86_VECTORS 1
#else
#define X86_VECTORS 0
#endif

#if X86_VECTORS && !defined(__clang__)
#define GCC_ASM 1  // clang finds these instructions by itself, and checks assembly before it has been inlined
#else
#define GCC_ASM 0
#endif

namespace {

constexpr int kLanes = 16;           // two registers of doubles with AVX-512, four with AVX2
constexpr int64_t kBlock = 2048;     // 16 KiB as doubles: half of a first-level cache
constexpr int64_t kAhead = 8 << 10;  // bytes: a block of floats

// Prefetches a cache line that will be needed soon. Prefetching beyond the end of a tensor does no harm.
INLINE void touch(const void *address) {
#if GNU_VECTORS
    __builtin_prefetch(address);
#else
    (void)address;
#endif
}

// A block is read several times, and meanwhile nothing would be loaded from memory: so every loop prefetches about a
// block ahead.
INLINE void touch_ahead(const void *address) { touch(static_cast<const char *>(address) + kAhead); }

template <class T, int N> struct LanesOf {
#if GNU_VECTORS
    typedef T type __attribute__((vector_size(N * sizeof(T))));
#endif
};
template <class T> struct LanesOf<T, 1> { typedef T type; };
template <class T, int N> using Lanes = typename LanesOf<T, N>::type;

template <class V, class T> INLINE void load(V &v, const T *from) { std::memcpy(&v, from, sizeof v); }

// Inline assembly where gcc is known to miss the instruction. It is used rather than intrinsics because those demand
// the target attribute on every function they appear in, and a template cannot have one per width.

template <int N> INLINE void widen(Lanes<double, N> &to, const Lanes<float, N> &from) {
    if constexpr (N == 1) to = from;
#if GCC_ASM
    else if constexpr (N >= 4) asm("vcvtps2pd %1, %0" : "=v"(to) : "vm"(from));  // gcc splits it in three
    else asm("cvtps2pd %1, %0" : "=x"(to) : "x"(from));
#elif GNU_VECTORS
    else to = __builtin_convertvector(from, Lanes<double, N>);
#endif
}
template <int N> INLINE void widen(Lanes<double, N> &to, const Lanes<double, N> &from) { to = from; }

template <int N, class T, class F> INLINE void load_as(Lanes<T, N> &v, const F *from) {
    if constexpr (std::is_same_v<F, T>) load(v, from);
    else {
        Lanes<F, N> narrow;
        load(narrow, from);
        widen<N>(v, narrow);
    }
}

// sum += a * b for a product that is exact in double, as that of two floats is: a fused instruction then gives the same
// bits, and relieves the adders, which also compare and convert and are the bottleneck of these loops.
template <int N> INLINE void add_exact(Lanes<double, N> &sum, const Lanes<double, N> &a, const Lanes<double, N> &b) {
#if GCC_ASM
    if constexpr (N >= 4) { asm("vfmadd231pd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); return; }
#endif
    sum += a * b;
}
template <class F, int N>
INLINE void add_product(Lanes<double, N> &sum, const Lanes<double, N> &a, const Lanes<double, N> &b) {
    if constexpr (sizeof(F) == 4) add_exact<N>(sum, a, b);
    else sum += a * b;
}
// sum += x, as x * 1 for the same reason.
template <int N> INLINE void add_to(Lanes<double, N> &sum, const Lanes<double, N> &x) {
#if GCC_ASM
    if constexpr (N >= 4) { add_exact<N>(sum, x, Lanes<double, N>{} + 1.0); return; }
#endif
    sum += x;
}

// A comparison of vectors is -1 where it holds, one of plain numbers is 1.
template <int N, class C, class M> INLINE void tally(C &count, const M &holds) {
    if constexpr (N == 1) count += holds;
    else count -= holds;
}

// count += a < b, or a <= b
template <int N, bool OrEqual = false, class C, class V> INLINE void tally_less(C &count, const V &a, const V &b) {
#if GCC_ASM  // gcc makes a vector of the mask first
#define TALLY(COMPARE, ADD)                                                                                            \
    asm(COMPARE " %2, %1, %%k1\n\t" ADD " %3, %0, %0 %{%%k1%}" : "+v"(count) : "v"(a), "v"(b), "v"(C{} + 1) : "k1")
    if constexpr (N == 16 && !OrEqual) { TALLY("vcmpltps", "vpaddd"); return; }
    else if constexpr (N == 8 && sizeof(V) == 64 && OrEqual) { TALLY("vcmplepd", "vpaddq"); return; }
    else if constexpr (N == 8 && sizeof(V) == 64) { TALLY("vcmpltpd", "vpaddq"); return; }
#undef TALLY
#endif
    if constexpr (OrEqual) tally<N>(count, a <= b);
    else tally<N>(count, a < b);
}

// Joins lanes as a tree, in the same order whatever the width was.
template <int L, class T, class Join> INLINE T join(T *lane, const Join &both) {
    for (int half = L / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) lane[l] = both(lane[l], lane[l + half]);
    return lane[0];
}
template <int L, class T> INLINE T fold(T *lane) { return join<L>(lane, [](T a, T b) { return a + b; }); }
template <int L, class T> INLINE T least(T *lane) { return join<L>(lane, [](T a, T b) { return b < a ? b : a; }); }
template <int L, class T> INLINE T most(T *lane) { return join<L>(lane, [](T a, T b) { return b > a ? b : a; }); }

// The lanes of a register. A copy: lanes that are picked out by a variable would make the register live in memory.
template <class T, int N> struct Lane {
    T at[N];
    explicit INLINE Lane(const Lanes<T, N> &v) { std::memcpy(at, &v, sizeof at); }
};
template <class T, int N> INLINE T total(const Lanes<T, N> &v) { return fold<N>(Lane<T, N>(v).at); }
template <class T, int N> INLINE T largest(const Lanes<T, N> &v) { return most<N>(Lane<T, N>(v).at); }

template <int Bytes> struct IntegerOf;
template <> struct IntegerOf<4> { using type = int32_t; };
template <> struct IntegerOf<8> { using type = int64_t; };

template <class T, int N> INLINE Lanes<T, N> magnitude(const Lanes<T, N> &x) {
    using Bits = typename IntegerOf<sizeof(T)>::type;
    if constexpr (N == 1) return std::fabs(x);
    else return reinterpret_cast<Lanes<T, N>>(reinterpret_cast<Lanes<Bits, N>>(x) & std::numeric_limits<Bits>::max());
}

}  // namespace

#endif
