// The kernels of astray: statistics and fingerprints of a tensor, and the comparison of two.
//
// Plan. Work goes block by block, a block being small enough for the first-level cache, so that it can be gone over
// several times for the price of one read from memory:
//
//   layout     a strided tensor becomes a list of dimensions, merged where they can be; `measure` walks it in memory
//              order, `contrast` first makes a row-major copy of what is not row-major
//   block      narrow elements are widened to float or double; one loop then gives sum, sum of squares, minimum,
//              maximum and zeros. A sum that is not finite sends the block the slow way, which counts NaN and infinity
//              and repeats the loop over what is left
//   moments    sum of squares minus squared sum cancels when the mean is large beside the spread; such a block is gone
//              over again about its own mean. Blocks merge by Chan's formula, relative to one pivot for the tensor
//   pairs      two loops over a block of both sides: ratios, in float where that is enough, and sums, in double. The
//              ratios settle some counts, and which few of them must be had exactly. Blocks that are the same in every
//              bit are only measured
//   chunk      a fixed number of elements whatever the number of threads; one partial result each, merged in order.
//              So neither threads nor instruction sets change a single bit of a result
//
// All sums run in a fixed number of lanes (kLanes), in double, without contraction (-ffp-contract=off): every
// instruction set gives the same bits. Lanes are GNU vector types, a width at a time; where a compiler lacks them they
// are plain numbers. The kernels are templates over that width, instantiated below one wrapper per instruction set
// with the target attribute, and chosen when the module loads: a wheel built on one machine serves all.
//
// Squares of 1e200 overflow and those of 1e-200 vanish: when the largest element of a float64 tensor lies out there,
// the moments are computed again from elements scaled by a power of two.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

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

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr int kLanes = 16;                  // two registers of doubles with AVX-512, four with AVX2
constexpr int64_t kBlock = 2048;            // 16 KiB as doubles: half of a first-level cache
template <class F> constexpr int64_t kPairBlock = 8192 / sizeof(F);  // half of that cache with two tensors
constexpr int64_t kAhead = 8 << 10;         // bytes: a block of floats
constexpr int64_t kChunk = 1 << 18;         // a few hundred microseconds of work
constexpr int64_t kThreadBytes = 2 << 20;   // a thread costs about 30 us to start: what is worth one
constexpr int64_t kReleaseBytes = 32 << 10; // below this, giving up the interpreter lock costs more than the work

// Asks for a cache line that will be needed soon. Asking beyond the end of a tensor does no harm.
INLINE void touch(const void *address) {
#if GNU_VECTORS
    __builtin_prefetch(address);
#else
    (void)address;
#endif
}

// A block is gone over several times, and while that goes on nothing would come from memory: so every loop asks for
// what lies about a block further on.
INLINE void touch_ahead(const void *address) { touch(static_cast<const char *>(address) + kAhead); }

// ----------------------------------------------------------------------------------------------------------- lanes

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
// bits, and takes the load off the adders, which also compare and convert and are what these loops wait for.
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

// ----------------------------------------------------------------------------------------------------- element types

enum Type {
    kF64, kF32, kF16, kBF16,
    kI16, kU16, kI32, kU32, kI64, kU64,
    kI8, kU8, kBool, kE4M3FN, kE5M2, kE4M3FNUZ, kE5M2FNUZ, kE8M0,  // the 8-bit ones, read through a table
    kTypes
};

struct TypeName { const char *name; Type type; bool complex; };
constexpr TypeName kNames[] = {
    {"float32", kF32, false}, {"bfloat16", kBF16, false}, {"float16", kF16, false}, {"int64", kI64, false},
    {"float64", kF64, false}, {"bool", kBool, false}, {"int32", kI32, false}, {"uint8", kU8, false},
    {"int8", kI8, false}, {"int16", kI16, false}, {"uint16", kU16, false}, {"uint32", kU32, false},
    {"uint64", kU64, false}, {"float8_e4m3fn", kE4M3FN, false}, {"float8_e5m2", kE5M2, false},
    {"float8_e4m3fnuz", kE4M3FNUZ, false}, {"float8_e5m2fnuz", kE5M2FNUZ, false}, {"float8_e8m0fnu", kE8M0, false},
    {"complex64", kF32, true}, {"complex128", kF64, true}, {"complex32", kF16, true},
};

constexpr int size_of(Type type) {
    return type == kF64 || type == kI64 || type == kU64 ? 8
         : type == kF32 || type == kI32 || type == kU32 ? 4
         : type < kI8 ? 2 : 1;
}
constexpr bool is_byte(Type type) { return type >= kI8; }
constexpr bool is_float(Type type) { return type <= kBF16 || type >= kE4M3FN; }
// What a type is widened to: float where that is exact.
constexpr bool to_double(Type type) { return type == kF64 || (type >= kI32 && type <= kU64); }

float byte_value[kTypes - kI8][256];  // exact in float for all of them

// The value of an 8-bit float. `nan` is 'i' where the top exponent holds infinity and NaN, 'n' where only all-ones is
// NaN, 'z' where only minus zero is.
float small_float(int bits, int mantissa_bits, int bias, char nan) {
    const int magnitude = bits & 0x7f, exponent = magnitude >> mantissa_bits;
    const int mantissa = magnitude & ((1 << mantissa_bits) - 1), top = 0x7f >> mantissa_bits;
    const float sign = bits & 0x80 ? -1.0f : 1.0f;
    if ((nan == 'z' && bits == 0x80) || (nan == 'n' && magnitude == 0x7f) ||
        (nan == 'i' && exponent == top && mantissa))
        return std::numeric_limits<float>::quiet_NaN();
    if (nan == 'i' && exponent == top) return sign * std::numeric_limits<float>::infinity();
    const int whole = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
    return sign * std::ldexp(static_cast<float>(whole), (exponent ? exponent : 1) - bias - mantissa_bits);
}

void fill_tables() {
    for (int bits = 0; bits < 256; ++bits) {
        byte_value[kI8 - kI8][bits] = static_cast<int8_t>(bits);
        byte_value[kU8 - kI8][bits] = static_cast<float>(bits);
        byte_value[kBool - kI8][bits] = bits != 0;
        byte_value[kE4M3FN - kI8][bits] = small_float(bits, 3, 7, 'n');
        byte_value[kE5M2 - kI8][bits] = small_float(bits, 2, 15, 'i');
        byte_value[kE4M3FNUZ - kI8][bits] = small_float(bits, 3, 8, 'z');
        byte_value[kE5M2FNUZ - kI8][bits] = small_float(bits, 2, 16, 'z');
        byte_value[kE8M0 - kI8][bits] =
            bits == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, bits - 127);
    }
}

INLINE float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
INLINE uint32_t as_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

// Moves exponent and mantissa to their places in a float and lets one multiplication mend the bias: right for
// subnormals too, and a loop over it vectorises.
INLINE float from_half(uint16_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
    const uint32_t finite = as_bits(as_float(magnitude) * 0x1p112f);
    return as_float(sign | (magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000u : finite));
}

// Widens halves, 8 at a time where the processor can.
template <int N> INLINE void widen_halves(const uint16_t *from, int64_t n, float *to) {
    int64_t i = 0;
#if GCC_ASM
    if constexpr (N >= 4)
        for (; i + 8 <= n; i += 8) {
            Lanes<uint16_t, 8> halves;
            Lanes<float, 8> floats;
            load(halves, from + i);
            asm("vcvtph2ps %1, %0" : "=v"(floats) : "vm"(halves));
            std::memcpy(to + i, &floats, sizeof floats);
        }
#endif
    for (; i < n; ++i) to[i] = from_half(from[i]);
}

template <class From, class To> INLINE void convert(const void *raw, int64_t n, void *out) {
    for (int64_t i = 0; i < n; ++i) static_cast<To *>(out)[i] = static_cast<To>(static_cast<const From *>(raw)[i]);
}
INLINE void widen_bfloats(const uint16_t *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; ++i) to[i] = as_float(static_cast<uint32_t>(from[i]) << 16);
}
INLINE void widen_bytes(const uint8_t *from, const float *value, int64_t n, float *to) {
    for (int64_t i = 0; i < n; ++i) to[i] = value[from[i]];
}

// Widens n elements from raw storage; `out` holds floats or doubles, as to_double(type) says.
template <int N> INLINE void widen_elements(Type type, const void *raw, int64_t n, void *out) {
    switch (type) {
        case kF64: std::memcpy(out, raw, n * 8); return;
        case kF32: std::memcpy(out, raw, n * 4); return;
        case kF16: return widen_halves<N>(static_cast<const uint16_t *>(raw), n, static_cast<float *>(out));
        case kBF16: return widen_bfloats(static_cast<const uint16_t *>(raw), n, static_cast<float *>(out));
        case kI16: return convert<int16_t, float>(raw, n, out);
        case kU16: return convert<uint16_t, float>(raw, n, out);
        case kI32: return convert<int32_t, double>(raw, n, out);
        case kU32: return convert<uint32_t, double>(raw, n, out);
        case kI64: return convert<int64_t, double>(raw, n, out);
        case kU64: return convert<uint64_t, double>(raw, n, out);
        default:
            return widen_bytes(static_cast<const uint8_t *>(raw), byte_value[type - kI8], n, static_cast<float *>(out));
    }
}

// ----------------------------------------------------------------------------------------------- kernels over a block

// What one loop over a block tells: sums of x - pivot and of its square, extremes, zeros.
struct Sums { double sum, squares, low, high; int64_t zeros; };

// Lanes of sums, whose number is fixed since it decides how they round.
template <int N, class F, bool Pivot> struct SumLanes {
    Lanes<double, N> sum, squares;

    INLINE void add(const Lanes<F, N> &x, double pivot) {
        Lanes<double, N> wide;
        widen<N>(wide, x);
        if constexpr (Pivot) wide -= pivot;
        add_to<N>(sum, wide);
        if constexpr (Pivot) squares += wide * wide;
        else add_product<F, N>(squares, wide, wide);
    }
};

// Extremes and zeros do not round, so these go in lanes of whatever width suits the processor.
template <int N, class F> struct ScanLanes {
    Lanes<F, N> low, high;
    Lanes<typename IntegerOf<sizeof(F)>::type, N> zeros;

    INLINE void add(const Lanes<F, N> &x) {
        low = x < low ? x : low;  // false for NaN, which is thus passed over
        high = x > high ? x : high;
        tally<N>(zeros, x == F(0));
    }
};

template <int N, class F, bool Pivot> INLINE Sums sums_about(const F *x, int64_t n, double pivot) {
    constexpr int G = kLanes / N;
    constexpr int S = N > 1 && sizeof(F) == 4 ? std::min(2 * N, 8) : N;  // 32 bytes of floats: wider gains nothing
    constexpr F kTop = std::numeric_limits<F>::infinity();
    SumLanes<N, F, Pivot> group[G] = {};
    ScanLanes<S, F> scan = {};
    scan.low += kTop, scan.high -= kTop;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        touch_ahead(x + i);
        UNROLL
        for (int l = 0; l < kLanes; l += S) {
            Lanes<F, S> v;
            load(v, x + i + l);
            scan.add(v);
        }
        UNROLL
        for (int g = 0; g < G; ++g) {
            Lanes<F, N> v;
            load(v, x + i + g * N);
            group[g].add(v, pivot);
        }
    }
    double sum[kLanes], squares[kLanes];
    F low[S], high[S];
    typename IntegerOf<sizeof(F)>::type zeros[S];
    UNROLL
    for (int g = 0; g < G; ++g) {
        std::memcpy(sum + g * N, &group[g].sum, sizeof(double) * N);
        std::memcpy(squares + g * N, &group[g].squares, sizeof(double) * N);
    }
    std::memcpy(low, &scan.low, sizeof low);
    std::memcpy(high, &scan.high, sizeof high);
    std::memcpy(zeros, &scan.zeros, sizeof zeros);
    ScanLanes<1, F> last{least<S>(low), most<S>(high), 0};
    for (int l = 0; i < n; ++i, ++l) {  // the last few, each in the lane it would have had
        SumLanes<1, F, Pivot> lane{sum[l], squares[l]};
        lane.add(x[i], pivot);
        last.add(x[i]);
        sum[l] = lane.sum, squares[l] = lane.squares;
    }
    int64_t zero_count = last.zeros;
    for (int l = 0; l < S; ++l) zero_count += zeros[l];
    return {fold<kLanes>(sum), fold<kLanes>(squares), last.low, last.high, zero_count};
}

template <int N, class F> INLINE Sums block_sums(const F *x, int64_t n, double pivot) {
    return pivot == 0 ? sums_about<N, F, false>(x, n, pivot) : sums_about<N, F, true>(x, n, pivot);
}

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

// A pair of blocks is gone over twice: for the ratios, which keep the divider busy, and for everything else. What the
// ratios tell first decides what else must be looked at. d is candidate - reference throughout.

// |d| / |reference| where the reference is not 0. `bound` is `most`, or infinite where something stands against 0.
struct Ratios { double sum, most, bound; int64_t different, nonzero; };

// In float a ratio is right to 2^-23: differences of floats do not underflow, nor do ratios, unequal floats being at
// least 2^-25 apart. They may overflow, and so may their sum: then it is infinite, and all must be had again in double.
constexpr double kRatioError = 0x1p-22;

template <class T, int N> INLINE Lanes<T, N> magnitude(const Lanes<T, N> &x) {
    using Bits = typename IntegerOf<sizeof(T)>::type;
    if constexpr (N == 1) return std::fabs(x);
    else return reinterpret_cast<Lanes<T, N>>(reinterpret_cast<Lanes<Bits, N>>(x) & std::numeric_limits<Bits>::max());
}

// `Zeros`: some references are 0; without, these make the sum infinite or NaN.
template <int N, class R, bool Zeros> struct RatioLanes {
    using Integer = typename IntegerOf<sizeof(R)>::type;
    Lanes<R, N> most, bound;
    Lanes<Integer, N> different, nonzero;

    INLINE Lanes<R, N> add(const Lanes<R, N> &reference, const Lanes<R, N> &candidate) {
        const Lanes<R, N> none = {}, size = magnitude<R, N>(reference);
        const Lanes<R, N> error = magnitude<R, N>(candidate - reference);
        Lanes<R, N> ratio = error / size;
        tally_less<N>(different, none, error);
        if constexpr (Zeros) {
            bound = ratio > bound ? ratio : bound;  // false for 0 / 0
            tally_less<N>(nonzero, none, size);
            ratio = size == none ? none : ratio;
        }
        most = ratio > most ? ratio : most;
        return ratio;
    }

    INLINE void pour(Ratios &result) const {
        result.most = std::max<double>(result.most, largest<R, N>(most));
        result.bound = std::max<double>(result.bound, largest<R, N>(bound));
        result.different += total<Integer, N>(different);
        result.nonzero += total<Integer, N>(nonzero);
    }
};

// F elements, R the type to divide in. `each` receives the ratios, unless it is null.
template <int N, class F, class R, bool Zeros>
INLINE void ratios_of(const F *reference, const F *candidate, int64_t n, R *each, Ratios &result) {
    constexpr int W = N > 1 && sizeof(R) == 4 ? 2 * N : N;
    RatioLanes<W, R, Zeros> lanes = {};
    Lanes<double, N> sums[kLanes / N] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        UNROLL
        for (int l = 0; l < kLanes; l += W) {
            Lanes<R, W> r, c;
            load_as<W, R>(r, reference + i + l);
            load_as<W, R>(c, candidate + i + l);
            const Lanes<R, W> ratio = lanes.add(r, c);
            if (each) std::memcpy(each + i + l, &ratio, sizeof ratio);
            UNROLL
            for (int part = 0; part < W; part += N) {
                Lanes<R, N> narrow;
                Lanes<double, N> wide;
                load(narrow, reinterpret_cast<const R *>(&ratio) + part);
                widen<N>(wide, narrow);
                sums[(l + part) / N] += wide;
            }
        }
    }
    double sum[kLanes];
    std::memcpy(sum, sums, sizeof sum);
    result = {};
    const auto done = lanes;  // a copy: see Lane
    done.pour(result);
    RatioLanes<1, R, Zeros> last = {};
    for (int l = 0; i < n; ++i, ++l) {
        const R ratio = last.add(R(reference[i]), R(candidate[i]));
        if (each) each[i] = ratio;
        sum[l] += ratio;
    }
    last.pour(result);
    result.sum = fold<kLanes>(sum);
    if (!Zeros) result.bound = result.most, result.nonzero = n;
}

struct Tolerance {
    double relative, absolute;
    // Whether it allows at least `relative` of any reference, and equality everywhere.
    bool grows() const { return relative >= 0 && relative <= std::numeric_limits<double>::max() && absolute >= 0; }
};

// Which counts must be made; the others are known to be all.
enum Within { kSettled, kTolerance, kAll };

struct ErrorsRequest {
    double r_pivot, c_pivot;
    Within within;
    Tolerance tolerance;
    const char *r_ahead, *c_ahead;  // what to ask memory for meanwhile, and the size of elements there
    int r_size, c_size;
};

// What the other loop over a block of finite pairs tells: sums of d and of both sides about their pivots, extremes (of
// the sides for double only), and how many errors are within the tolerance, 0.001 and 0.005 of the reference.
enum ErrorSum { kDot, kAbs, kSquares, kR, kRSquares, kC, kCSquares, kErrorSums };
struct Errors {
    double sum[kErrorSums], max_abs, r_most, c_most;
    int64_t within[3];
};

constexpr int kErrorLanes = 8;  // one register of AVX-512

template <int N, class F, bool Pivot, Within What> struct ErrorLanes {
    Lanes<double, N> sum[kErrorSums], max_abs, r_most, c_most;
    Lanes<int64_t, N> within[3];

    INLINE void add(const F *reference, const F *candidate, const ErrorsRequest &request) {
        Lanes<double, N> r, c;
        load_as<N, double>(r, reference);
        load_as<N, double>(c, candidate);
        const Lanes<double, N> d = c - r, error = magnitude<double, N>(d), size = magnitude<double, N>(r);
        add_product<F, N>(sum[kDot], r, c);
        sum[kAbs] += error;
        add_evenly(sum[kSquares], d * d);
        max_abs = error > max_abs ? error : max_abs;
        if constexpr (sizeof(F) == 8) {
            const Lanes<double, N> other = magnitude<double, N>(c);
            r_most = size > r_most ? size : r_most;
            c_most = other > c_most ? other : c_most;
        }
        if constexpr (What != kSettled)
            tally_less<N, true>(within[0], error, request.tolerance.absolute + request.tolerance.relative * size);
        if constexpr (What == kAll) {
            tally_less<N, true>(within[1], error, 1e-3 * size);
            tally_less<N, true>(within[2], error, 5e-3 * size);
        }
        if constexpr (Pivot) r -= request.r_pivot, c -= request.c_pivot;
        add_evenly(sum[kR], r);
        sum[kC] += c;
        add_square(sum[kRSquares], r);
        add_square(sum[kCSquares], c);
    }

    // Adds these lanes to those from `first` on.
    INLINE void pour(double (*sums)[kErrorLanes], int first, Errors &result) const {
        for (int k = 0; k < kErrorSums; ++k) {
            const Lane<double, N> lane(sum[k]);
            for (int l = 0; l < N; ++l) sums[k][first + l] += lane.at[l];
        }
        result.max_abs = std::max(result.max_abs, largest<double, N>(max_abs));
        result.r_most = std::max(result.r_most, largest<double, N>(r_most));
        result.c_most = std::max(result.c_most, largest<double, N>(c_most));
        for (int k = 0; k < 3; ++k) result.within[k] += total<int64_t, N>(within[k]);
    }

  private:
    // Adders and multipliers are to be equally busy, and counting is work for the multipliers.
    static INLINE void add_evenly(Lanes<double, N> &total, const Lanes<double, N> &x) {
        if constexpr (What == kAll) total += x;
        else add_to<N>(total, x);
    }
    static INLINE void add_square(Lanes<double, N> &total, const Lanes<double, N> &x) {
        if constexpr (Pivot) total += x * x;
        else add_product<F, N>(total, x, x);
    }
};

template <int N, class F, bool Pivot, Within What>
INLINE void errors_of(const F *r, const F *c, int64_t n, const ErrorsRequest &request, Errors &result) {
    constexpr int L = kErrorLanes;
    double sums[kErrorSums][L] = {};
    const int64_t whole = n - n % L;
    result = {};
    for (int first = 0; first < L; first += N) {  // so that even sixteen registers are enough
        ErrorLanes<N, F, Pivot, What> lanes = {};
        for (int64_t i = first; i < whole; i += L) {
            touch(request.r_ahead + i * request.r_size);
            touch(request.c_ahead + i * request.c_size);
            lanes.add(r + i, c + i, request);
        }
        const auto done = lanes;
        done.pour(sums, first, result);
    }
    for (int64_t i = whole; i < n; ++i) {
        ErrorLanes<1, F, Pivot, What> last = {};
        last.add(r + i, c + i, request);
        last.pour(sums, static_cast<int>(i - whole), result);
    }
    for (int k = 0; k < kErrorSums; ++k) result.sum[k] = fold<L>(sums[k]);
}

template <int N, class F, bool Pivot>
INLINE void errors_about(const F *r, const F *c, int64_t n, const ErrorsRequest &request, Errors &result) {
    switch (request.within) {
        case kAll: return errors_of<N, F, Pivot, kAll>(r, c, n, request, result);
        case kTolerance: errors_of<N, F, Pivot, kTolerance>(r, c, n, request, result); break;
        case kSettled: errors_of<N, F, Pivot, kSettled>(r, c, n, request, result); result.within[0] = n;
    }
    result.within[1] = result.within[2] = n;
}

template <int N, class F>
INLINE void block_errors(const F *r, const F *c, int64_t n, const ErrorsRequest &request, Errors &result) {
    if (request.r_pivot == 0 && request.c_pivot == 0) errors_about<N, F, false>(r, c, n, request, result);
    else errors_about<N, F, true>(r, c, n, request, result);
}

// Distances in representable numbers, between two blocks of one float type.
struct Ulps { uint64_t most, low, high; };  // the sum is high * 2^32 + low

// Errors up to this part of the reference keep its sign, and are at most 2^20 representable floats, 2^49 doubles.
constexpr double kNear = 0x1p-4;

// Bit patterns in the order of their values; 0 and -0 are the same place. Without a branch, for the vectoriser.
template <class U> INLINE std::make_signed_t<U> ordered(U bits) {
    using S = std::make_signed_t<U>;
    const S sign = static_cast<S>(static_cast<S>(bits) >> (8 * sizeof(U) - 1));  // -1 or 0
    return static_cast<S>((static_cast<S>(bits) ^ (sign & std::numeric_limits<S>::max())) - sign);
}

template <class U, bool Sign, bool Near> INLINE U distance(U one, U other) {
    if constexpr (Sign && !Near) {
        const auto a = ordered(one), b = ordered(other);
        const auto high = a > b ? a : b, low = a < b ? a : b;
        return static_cast<U>(static_cast<U>(high) - static_cast<U>(low));
    } else {
        constexpr U kMagnitude = Sign ? std::numeric_limits<U>::max() / 2 : std::numeric_limits<U>::max();
        const U a = one & kMagnitude, b = other & kMagnitude, high = a > b ? a : b, low = a < b ? a : b;
        return static_cast<U>(high - low);
    }
}

template <class U, bool Sign, bool Near>
INLINE Ulps block_ulps(const void *reference, const void *candidate, int64_t n) {
    auto r = static_cast<const U *>(reference);
    auto c = static_cast<const U *>(candidate);
    // Halves of the distances are added apart, and a block of halves does not overflow; near ones do not even whole.
    using Sum = std::conditional_t<sizeof(U) == 8, uint64_t, uint32_t>;
    constexpr int kHalf = 4 * sizeof(Sum);
    constexpr Sum kLow = (Sum(1) << kHalf) - 1;
    U most = 0;
    Sum low = 0, high = 0;
    for (int64_t i = 0; i < n; ++i) {
        const U apart = distance<U, Sign, Near>(r[i], c[i]);
        most = apart > most ? apart : most;
        if constexpr (Near || sizeof(U) < 4) low += apart;
        else low += apart & kLow, high += apart >> kHalf;
    }
    if constexpr (sizeof(U) == 8) return {most, low & kLow, high + (low >> kHalf)};
    else return {most, (static_cast<uint64_t>(high) << kHalf) + low, 0};
}

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

// ------------------------------------------------------------------------------------------------- instruction sets

struct Isa {
    const char *name;
    void (*widen)(Type, const void *, int64_t, void *);
    void (*doubles)(const float *, int64_t, double *);
    Sums (*sums32)(const float *, int64_t, double);
    Sums (*sums64)(const double *, int64_t, double);
    uint64_t (*words)(const void *, int64_t, uint64_t);
    uint64_t (*elements)(int size, bool wide_index, const void *, int64_t, const void *);
    void (*ratios32)(const float *, const float *, int64_t, bool zeros, float *each, Ratios &);
    void (*exact_ratios32)(const float *, const float *, int64_t, Ratios &);
    void (*exact_ratios64)(const double *, const double *, int64_t, Ratios &);
    void (*errors32)(const float *, const float *, int64_t, const ErrorsRequest &, Errors &);
    void (*errors64)(const double *, const double *, int64_t, const ErrorsRequest &, Errors &);
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
    TARGET Ulps ulps(Type type, const void *r, const void *c, int64_t n, bool near) {                                  \
        return near ? ulps_of<true>(type, r, c, n) : ulps_of<false>(type, r, c, n);                                    \
    }                                                                                                                  \
    TARGET uint64_t read(const void *raw, int64_t n) { return block_read(raw, n); }                                    \
    constexpr Isa table = {#ISA,     widen,          doubles,        sums32,   sums64,   words, elements,              \
                           ratios32, exact_ratios32, exact_ratios64, errors32, errors64, ulps,  read};                 \
    }

#if X86_VECTORS
#if defined(__clang__)
#define TARGET_AVX512 "arch=x86-64-v4"
#else
#define TARGET_AVX512 "arch=x86-64-v4,prefer-vector-width=512"  // gcc keeps its own loops to half of that
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

// ---------------------------------------------------------------------------------------------------------- layout

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

    // Brings the dimensions into the order of memory, smallest stride first: statistics do not care about order, and a
    // fingerprint only about the logical index. Repeated dimensions (stride 0) go outermost: inner runs stay long.
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

    // Whether walking it is walking memory, element after element.
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

// A position in a layout, and how to get on from there.
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

    // Passes n elements, copying them out and noting their logical indices; either may be null.
    template <class U, class Index> void take(int64_t n, U *values, Index *indices) {
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

template <class U> void take_indexed(Walk &walk, int64_t n, void *values, void *indices, bool wide_index) {
    if (wide_index) walk.take(n, static_cast<U *>(values), static_cast<uint64_t *>(indices));
    else walk.take(n, static_cast<U *>(values), static_cast<uint32_t *>(indices));
}
void take(Walk &walk, int size, int64_t n, void *values, void *indices, bool wide_index) {
    switch (size) {
        case 8: return take_indexed<uint64_t>(walk, n, values, indices, wide_index);
        case 4: return take_indexed<uint32_t>(walk, n, values, indices, wide_index);
        case 2: return take_indexed<uint16_t>(walk, n, values, indices, wide_index);
        default: return take_indexed<uint8_t>(walk, n, values, indices, wide_index);
    }
}

// --------------------------------------------------------------------------------------------------------- threads

// Subnormal numbers count here, whatever the program has asked the processor to do with them.
class KeepSubnormals {
#if defined(__x86_64__) || defined(_M_X64)
    static constexpr unsigned kFlush = 0x8040;  // flush to zero, denormals are zero
    const unsigned saved_ = _mm_getcsr();

  public:
    KeepSubnormals() { if (saved_ & kFlush) _mm_setcsr(saved_ & ~kFlush); }
    ~KeepSubnormals() { if (saved_ & kFlush) _mm_setcsr(saved_); }
#elif defined(__aarch64__) && GNU_VECTORS
    static constexpr uint64_t kFlush = (1u << 24) | (1u << 19);  // FZ, FZ16
    uint64_t saved_;

  public:
    KeepSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        if (saved_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(saved_ & ~kFlush));
    }
    ~KeepSubnormals() { if (saved_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  public:
    KeepSubnormals() {}
    ~KeepSubnormals() {}
#endif
    KeepSubnormals(const KeepSubnormals &) = delete;
    KeepSubnormals &operator=(const KeepSubnormals &) = delete;
};

std::atomic<int> thread_limit{1};

// Calls task(i) for every i below `tasks`. Threads are started for each call and none is kept: a pool would not survive
// a fork, and DataLoader workers are forked.
template <class Task> void run_tasks(int64_t tasks, int64_t bytes, const Task &task) {
    int64_t threads = bytes / kThreadBytes;
    if (threads > thread_limit) threads = thread_limit;
    if (threads > tasks) threads = tasks;
    std::atomic<int64_t> next{0};
    auto work = [&] {
        KeepSubnormals subnormals;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(i);
    };
    std::vector<std::thread> others;
    try {
        for (int64_t t = 1; t < threads; ++t) others.emplace_back(work);
    } catch (const std::system_error &) {
        // No more threads to be had; those there are do the work.
    }
    work();
    for (auto &thread : others) thread.join();
}

// --------------------------------------------------------------------------------------------------------- moments

// a + b exactly, as a rounded sum and what rounding lost.
struct Exact {
    double sum = 0, rest = 0;
    void add(double x) {
        const double total = sum + x, part = total - sum;
        rest += (sum - (total - part)) + (x - part);
        sum = total;
    }
    double value() const { return sum + rest; }
};

struct Moments {
    int64_t count = 0;
    double mean = 0;  // relative to the tensor's pivot
    double m2 = 0;    // sum of squared distances from the mean
    Exact total;
    double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();

    void merge(const Moments &other) {  // Chan, Golub and LeVeque
        if (!other.count) return;
        const double a = static_cast<double>(count), b = static_cast<double>(other.count), delta = other.mean - mean;
        mean += delta * (b / (a + b));
        m2 += other.m2 + delta * delta * (a * b / (a + b));
        count += other.count;
        total.add(other.total.sum);
        total.add(other.total.rest);
        low = other.low < low ? other.low : low;
        high = other.high > high ? other.high : high;
    }
    double absmax() const { return count ? std::fmax(std::fabs(low), std::fabs(high)) : 0; }
};

template <class F> INLINE Sums sums(const Isa &isa, const F *x, int64_t n, double pivot) {
    if constexpr (sizeof(F) == 4) return isa.sums32(x, n, pivot);
    else return isa.sums64(x, n, pivot);
}

// The moments of a block of finite elements from its sums about the pivot.
template <class F> Moments moments_of(const Isa &isa, const F *x, int64_t n, double pivot, Sums s) {
    const double count = static_cast<double>(n);
    Moments result;
    result.count = n;
    result.low = s.low;
    result.high = s.high;
    double centre = pivot, mean = s.sum / count, m2 = s.squares - s.sum * mean;
    if (s.low == s.high) {  // all the same: nothing spreads, whatever rounding says
        centre = s.low, mean = 0, m2 = 0, s.sum = 0;
    } else if (m2 * 128 < s.squares) {  // more than 7 of 53 bits cancelled
        centre = pivot + mean;
        s = sums(isa, x, n, centre);
        mean = s.sum / count;
        m2 = s.squares - s.sum * mean;
    }
    result.mean = (centre - pivot) + mean;
    result.m2 = m2 > 0 ? m2 : 0;
    const double product = count * centre;
    result.total.add(product);
    result.total.add(std::fma(count, centre, -product));
    result.total.add(s.sum);
    return result;
}

struct Summary { double mean, std, l2; };

// `exponent`: the elements were scaled by 2^-exponent.
Summary summarize(const Moments &m, int exponent) {
    const double count = static_cast<double>(m.count);
    const double mean = m.low == m.high ? m.low : m.total.value() / count;
    return {std::ldexp(mean, exponent), std::ldexp(std::sqrt(m.m2 / count), exponent),
            std::ldexp(std::sqrt(m.m2 + count * mean * mean), exponent)};
}

// The power of two that brings absmax near 1, where squares would leave the range of double; else 0. Below 2^-400 the
// square of the last bit of an element would vanish; above 2^480, the sum of 2^40 squares would overflow.
int rescue_exponent(double absmax) {
    if (absmax == 0 || !std::isfinite(absmax) || (absmax >= 0x1p-400 && absmax <= 0x1p480)) return 0;
    const int exponent = std::ilogb(absmax);
    return exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;  // 2^-exponent itself must not overflow
}

template <class F> void scale_block(F *x, int64_t n, double scale) {
    for (int64_t i = 0; i < n; ++i) x[i] = static_cast<F>(x[i] * scale);
}

// --------------------------------------------------------------------------------------------------------- measure

struct Measured {
    Moments moments;
    int64_t zeros = 0, nan = 0, inf = 0;
    uint64_t fingerprint = 0;

    void merge(const Measured &other) {
        moments.merge(other.moments);
        zeros += other.zeros;
        nan += other.nan;
        inf += other.inf;
        fingerprint += other.fingerprint;
    }
};

template <class F> void measure_block(const Isa &isa, const F *x, int64_t n, double pivot, Measured &part) {
    Sums s = sums(isa, x, n, pivot);
    F finite[kBlock];
    if (!std::isfinite(s.sum)) {
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            finite[kept] = x[i];
            kept += std::isfinite(x[i]);
            part.nan += std::isnan(x[i]);
            part.inf += std::isinf(x[i]);
        }
        if (!kept) return;
        x = finite;
        n = kept;
        s = sums(isa, x, n, pivot);
    }
    part.zeros += s.zeros;
    part.moments.merge(moments_of(isa, x, n, pivot, s));
}

// An 8-bit type has 256 values: count each, and the rest is a loop over a table. Four counters in turn, since adding to
// one address again and again waits for the last store.
class Histogram {
    uint32_t count_[4][256] = {};

  public:
    void add(const uint8_t *x, int64_t n) {
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            for (int k = 0; k < 4; ++k) ++count_[k][x[i + k]];
        for (; i < n; ++i) ++count_[0][x[i]];
    }
    void finish(const float *value, Measured &part) {
        double sum = 0, m2 = 0, rest = 0;
        int64_t total[256], count = 0;
        Moments m;
        for (int v = 0; v < 256; ++v) {
            total[v] = int64_t(count_[0][v]) + count_[1][v] + count_[2][v] + count_[3][v];
            if (!total[v]) continue;
            if (std::isnan(value[v])) part.nan += total[v];
            else if (std::isinf(value[v])) part.inf += total[v];
            else {
                count += total[v];
                sum += total[v] * double(value[v]);
                if (value[v] == 0) part.zeros += total[v];
                if (value[v] < m.low) m.low = value[v];
                if (value[v] > m.high) m.high = value[v];
            }
        }
        if (!count) return;
        m.count = count;
        m.mean = m.low == m.high ? m.low : sum / static_cast<double>(count);
        for (int v = 0; v < 256; ++v)
            if (total[v] && std::isfinite(value[v])) {
                const double away = value[v] - m.mean;
                m2 += total[v] * away * away;
                rest += total[v] * away;
            }
        m.m2 = m2 - rest * rest / static_cast<double>(count);
        if (m.m2 < 0 || m.low == m.high) m.m2 = 0;
        m.total.add(sum);
        part.moments.merge(m);
    }
};

struct Request {
    Layout layout;
    Type type;
    bool statistics, fingerprint;
    bool dense = false, stream = false, wide_index = false;
    double pivot = 0, scale = 1;
};

// The elements [begin, end) of the walk.
Measured measure_chunk(const Isa &isa, const Request &request, int64_t begin, int64_t end) {
    const Layout &layout = request.layout;
    const int size = layout.size;
    const bool indexed = request.fingerprint && !request.stream, copied = !request.dense;
    const bool bytes = is_byte(request.type);
    alignas(64) char raw[kBlock * 8], wide[kBlock * 8];
    alignas(64) uint64_t index[kBlock];
    Measured part;
    Histogram histogram;
    Walk walk(layout, begin);
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = end - at < kBlock ? end - at : kBlock;
        const char *values = copied ? raw : layout.base + at * size;
        if (copied || indexed)
            take(walk, size, n, copied ? raw : nullptr, indexed ? index : nullptr, request.wide_index);
        if (indexed) part.fingerprint += isa.elements(size, request.wide_index, values, n, index);
        else if (request.fingerprint) {
            const uint64_t first = (layout.origin + at) * size / 4;
            part.fingerprint += isa.words(values, n * size / 4, first);
            if (const int64_t rest = n * size % 4) {  // the very last word of the tensor
                uint32_t word = 0;
                std::memcpy(&word, values + n * size - rest, rest);
                part.fingerprint += isa.words(&word, 1, first + n * size / 4);
            }
        }
        if (!request.statistics) continue;
        if (bytes) {
            histogram.add(reinterpret_cast<const uint8_t *>(values), n);
        } else if (to_double(request.type)) {
            auto x = reinterpret_cast<const double *>(values);
            if (request.type != kF64 || request.scale != 1) {
                isa.widen(request.type, values, n, wide);
                x = reinterpret_cast<const double *>(wide);
                if (request.scale != 1) scale_block(reinterpret_cast<double *>(wide), n, request.scale);
            }
            measure_block(isa, x, n, request.pivot, part);
        } else {
            auto x = reinterpret_cast<const float *>(values);
            if (request.type != kF32) {
                isa.widen(request.type, values, n, wide);
                x = reinterpret_cast<const float *>(wide);
            }
            measure_block(isa, x, n, request.pivot, part);
        }
    }
    if (bytes && request.statistics) histogram.finish(byte_value[request.type - kI8], part);
    return part;
}

// Widens up to `n` elements from the start of a walk to double.
void head(const Isa &isa, const Layout &layout, Type type, double scale, int64_t n, double *out) {
    alignas(64) char raw[kBlock * 8], wide[kBlock * 8];
    Walk walk(layout, 0);
    take(walk, layout.size, n, raw, nullptr, false);
    if (to_double(type)) isa.widen(type, raw, n, out);
    else {
        isa.widen(type, raw, n, wide);
        isa.doubles(reinterpret_cast<const float *>(wide), n, out);
    }
    scale_block(out, n, scale);
}

// A value near the mean, if the mean is large beside the spread, as the first elements show it; else 0, which is
// faster. A poor choice costs time, and precision only where block means differ more than their spread.
double choose_pivot(const Isa &isa, const Layout &layout, Type type, double scale) {
    constexpr int64_t kSample = 64;
    if (layout.count <= kBlock || is_byte(type)) return 0;
    double x[kSample], sum = 0, squares = 0;
    int64_t n = 0;
    head(isa, layout, type, scale, kSample, x);
    for (double v : x)
        if (std::isfinite(v)) x[n++] = v, sum += v;
    if (!n) return 0;
    const double mean = sum / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const double m2 = squares, total = m2 + static_cast<double>(n) * mean * mean;
    return m2 * 128 < total && std::isfinite(total) ? mean : 0;
}

Measured measure_all(const Isa &isa, const Request &request) {
    const int64_t count = request.layout.count, chunks = (count + kChunk - 1) / kChunk;
    if (chunks <= 1) return measure_chunk(isa, request, 0, count);
    std::vector<Measured> parts(chunks);
    run_tasks(chunks, count * request.layout.size, [&](int64_t i) {
        parts[i] = measure_chunk(isa, request, i * kChunk, std::min(count, (i + 1) * kChunk));
    });
    Measured result;
    for (const auto &part : parts) result.merge(part);
    return result;
}

struct MeasureResult { Measured measured; Summary summary; double low, high, absmax; };

MeasureResult measure(Request &request) {
    const Isa &isa = *chosen_isa;
    KeepSubnormals subnormals;
    Layout &layout = request.layout;
    if (!request.fingerprint)  // nothing but memory order counts then, and more dimensions merge
        for (int d = 0; d < layout.rank; ++d) layout.dim[d].step = 0;
    layout.sort();
    layout.merge();
    request.dense = layout.dense();
    request.stream = layout.row_major() && layout.origin * layout.size % 4 == 0;
    if (request.statistics) request.pivot = choose_pivot(isa, layout, request.type, 1);
    MeasureResult result{measure_all(isa, request), {}, 0, 0, 0};
    Moments moments = result.measured.moments;
    if (!moments.count) return result;
    result.low = moments.low + 0.0;  // -0 is reported as 0
    result.high = moments.high + 0.0;
    result.absmax = moments.absmax();
    const int exponent = request.type == kF64 ? rescue_exponent(result.absmax) : 0;
    if (exponent) {
        request.fingerprint = false;
        request.scale = std::ldexp(1.0, -exponent);
        request.pivot = choose_pivot(isa, layout, request.type, request.scale);
        moments = measure_all(isa, request).moments;
    }
    result.summary = summarize(moments, exponent);
    return result;
}

// --------------------------------------------------------------------------------------------------- copying bytes

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
        // By way of a small copy: a row of the tile is read whole before its cache line can be lost to another, which
        // happens at once when the distance between rows is a power of two.
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

uint64_t read_all(const char *address, int64_t bytes) {
    constexpr int64_t kPiece = 1 << 20;
    const Isa &isa = *chosen_isa;
    std::atomic<uint64_t> total{0};
    run_tasks((bytes + kPiece - 1) / kPiece, bytes, [&](int64_t i) {
        total += isa.read(address + i * kPiece, std::min(kPiece, bytes - i * kPiece) / 8);
    });
    return total;
}

// -------------------------------------------------------------------------------------------------------- contrast

struct Peak {
    double value = -1;
    int64_t index = -1;
    void merge(const Peak &other) { if (other.value > value) *this = other; }
};

struct Contrasted {
    Moments reference, candidate;
    int64_t different = 0, rel_count = 0;
    int64_t nan_reference = 0, nan_candidate = 0, inf_reference = 0, inf_candidate = 0;
    int64_t mismatch = 0, first_mismatch = -1;
    double dot = 0, sum_abs = 0, squares = 0, sum_rel = 0;
    int64_t within[3] = {};
    Peak absolute, relative;
    uint64_t max_ulp = 0, ulp_low = 0, ulp_high = 0;

    void merge(const Contrasted &other) {
        reference.merge(other.reference);
        candidate.merge(other.candidate);
        different += other.different;
        rel_count += other.rel_count;
        dot += other.dot;
        sum_abs += other.sum_abs;
        squares += other.squares;
        sum_rel += other.sum_rel;
        for (int k = 0; k < 3; ++k) within[k] += other.within[k];
        nan_reference += other.nan_reference;
        nan_candidate += other.nan_candidate;
        inf_reference += other.inf_reference;
        inf_candidate += other.inf_candidate;
        mismatch += other.mismatch;
        if (first_mismatch < 0) first_mismatch = other.first_mismatch;
        absolute.merge(other.absolute);
        relative.merge(other.relative);
        max_ulp = other.max_ulp > max_ulp ? other.max_ulp : max_ulp;
        ulp_low += other.ulp_low;
        ulp_high += other.ulp_high;
    }
};

struct Side {
    Layout layout;
    Type type;
    double pivot = 0, scale = 1;
};

struct Pairing {
    Side reference, candidate;
    Tolerance tolerance;
    bool same_type() const { return reference.type == candidate.type; }
    bool in_double() const { return to_double(reference.type) || to_double(candidate.type); }
};

// Blocks of one side: raw, and widened to F.
template <class F> class Blocks {
    const Isa &isa_;
    const Side &side_;
    alignas(64) F wide_[kPairBlock<F>];
    alignas(64) float narrow_[kPairBlock<F>];

  public:
    const char *raw = nullptr;
    const F *values = nullptr;

    Blocks(const Isa &isa, const Side &side) : isa_(isa), side_(side) {}

    void seek(int64_t at, int64_t n) {
        raw = side_.layout.base + at * side_.layout.size;
        if (side_.type == (sizeof(F) == 4 ? kF32 : kF64) && side_.scale == 1) {
            values = reinterpret_cast<const F *>(raw);
            return;
        }
        values = wide_;
        if (sizeof(F) == 4 || to_double(side_.type)) isa_.widen(side_.type, raw, n, wide_);
        else {
            isa_.widen(side_.type, raw, n, narrow_);
            isa_.doubles(narrow_, n, reinterpret_cast<double *>(wide_));
        }
        if (side_.scale != 1) scale_block(wide_, n, side_.scale);
    }
};

template <class F> bool alike(F r, F c) { return r == c || (std::isnan(r) && std::isnan(c)); }

// A block of pairs. `place` is null when they follow each other in the tensors.
template <class F> struct Pairs {
    const F *reference, *candidate;
    const char *raw_reference, *raw_candidate;
    const int32_t *place;
    int64_t count;
};

// The pairs of a block that are finite on both sides, and where they stood.
template <class F> class FinitePairs {
    F reference_[kPairBlock<F>], candidate_[kPairBlock<F>];
    char raw_reference_[kPairBlock<F> * 8], raw_candidate_[kPairBlock<F> * 8];
    int32_t place_[kPairBlock<F>];

  public:
    Pairs<F> keep(const Pairs<F> &all, const Pairing &pairing, int64_t at, Contrasted &part) {
        const int r_size = pairing.reference.layout.size, c_size = pairing.candidate.layout.size;
        int64_t count = 0;
        for (int64_t i = 0; i < all.count; ++i) {
            const F r = all.reference[i], c = all.candidate[i];
            if (std::isfinite(r) && std::isfinite(c)) {
                reference_[count] = r;
                candidate_[count] = c;
                std::memcpy(raw_reference_ + count * r_size, all.raw_reference + i * r_size, r_size);
                std::memcpy(raw_candidate_ + count * c_size, all.raw_candidate + i * c_size, c_size);
                place_[count++] = static_cast<int32_t>(i);
                continue;
            }
            part.nan_reference += std::isnan(r);
            part.nan_candidate += std::isnan(c);
            part.inf_reference += std::isinf(r);
            part.inf_candidate += std::isinf(c);
            if (alike(r, c)) continue;
            if (!part.mismatch++) part.first_mismatch = at + i;
        }
        return {reference_, candidate_, raw_reference_, raw_candidate_, place_, count};
    }
};

// Contrasts blocks of pairs, one after the other.
template <class F> class Contrasting {
    static constexpr bool kFloat = sizeof(F) == 4;
    const Isa &isa_;
    const Pairing &pairing_;
    bool zeros_ = false;  // whether the last block had references that are 0: the next is likely to
    float ratio_[kPairBlock<F>];

    Ratios exact_ratios(const Pairs<F> &p, int64_t begin, int64_t end) const {
        Ratios result;
        if constexpr (kFloat) isa_.exact_ratios32(p.reference + begin, p.candidate + begin, end - begin, result);
        else isa_.exact_ratios64(p.reference + begin, p.candidate + begin, end - begin, result);
        return result;
    }
    Ratios ratios(const Pairs<F> &p) {
        if constexpr (!kFloat) return exact_ratios(p, 0, p.count);
        else {
            Ratios result;
            auto attempt = [&](bool zeros) {
                isa_.ratios32(p.reference, p.candidate, p.count, zeros, ratio_, result);
                return std::isfinite(result.sum);
            };
            if (!attempt(zeros_) && (zeros_ || !attempt(true))) result = exact_ratios(p, 0, p.count);
            zeros_ = result.nonzero != p.count;
            return result;
        }
    }

    // Whether the largest ratio is the one found before. With few bits that is common, and certain if they are the same
    // in float: small differences of 11-bit numbers have 12 bits, and two of their ratios are 2^-23 apart or equal.
    bool ties(const Ratios &q) const {
        const Type type = pairing_.reference.type;
        return pairing_.same_type() && is_float(type) && size_of(type) <= 2 && q.bound <= kNear &&
               static_cast<float>(q.most) == static_cast<float>(part.relative.value);
    }

    // The largest ratio in double, from the stretches where there is one that may be it.
    double exact_most(const Pairs<F> &p, const Ratios &q) const {
        if (!kFloat) return q.most;
        constexpr int64_t kStretch = 64;
        const auto near = static_cast<float>(q.most * (1 - 2 * kRatioError));
        double result = 0;
        int64_t begin = 0;
        for (int64_t at = 0; at < p.count; at += kStretch) {
            const int64_t end = std::min(at + kStretch, p.count);
            int32_t found = 0;
            for (int64_t i = at; i < end; ++i) found |= ratio_[i] >= near;
            if (found && end < p.count) continue;
            if (begin < (found ? end : at)) result = std::max(result, exact_ratios(p, begin, found ? end : at).most);
            begin = end;
        }
        return result;
    }

    // |d| <= k |reference| for all pairs, if the largest ratio says so.
    Within open_counts(const Ratios &q) const {
        const double bound = q.bound * (1 + kRatioError);
        if (!(bound <= 1e-3)) return kAll;
        return bound <= pairing_.tolerance.relative && pairing_.tolerance.grows() ? kSettled : kTolerance;
    }

    // `most`: the largest magnitude, which is known for double only, and needed there only.
    Moments moments(const F *x, int64_t n, double pivot, double sum, double squares, double most) const {
        const double m2 = squares - sum * (sum / static_cast<double>(n));
        if (kFloat) most = std::numeric_limits<double>::infinity();
        if (m2 * 128 > squares) return moments_of(isa_, x, n, pivot, {sum, squares, -most, most, 0});
        return moments_of(isa_, x, n, pivot, sums(isa_, x, n, pivot));  // they may all be the same
    }

    // The first pair whose error, relative or not, is this one.
    static int64_t find(const Pairs<F> &p, double value, bool relative) {
        for (int64_t i = 0; i < p.count; ++i) {
            const double r = p.reference[i], error = std::fabs(p.candidate[i] - r), size = std::fabs(r);
            if (relative ? size != 0 && error / size == value : error == value) return p.place ? p.place[i] : i;
        }
        return 0;
    }

    void add_ulps(const Pairs<F> &p, bool near) {
        const Ulps ulps = isa_.ulps(pairing_.reference.type, p.raw_reference, p.raw_candidate, p.count, near);
        part.max_ulp = std::max(part.max_ulp, ulps.most);
        part.ulp_low += ulps.low;
        part.ulp_high += ulps.high;
    }

  public:
    Contrasted part;

    Contrasting(const Isa &isa, const Pairing &pairing) : isa_(isa), pairing_(pairing) {}

    // Contrasts pairs that are the same in every bit; returns whether they are finite.
    bool add_same(const Pairs<F> &p, int64_t at) {
        const double pivot = pairing_.reference.pivot, other = pairing_.candidate.pivot;
        const Sums s = sums(isa_, p.reference, p.count, pivot);
        if (!std::isfinite(s.sum)) return false;
        const Moments m = moments_of(isa_, p.reference, p.count, pivot, s);
        part.reference.merge(m);
        part.candidate.merge(pivot == other ? m : moments_of(isa_, p.candidate, p.count, other,
                                                             sums(isa_, p.candidate, p.count, other)));
        part.dot += m.m2 + static_cast<double>(p.count) * (pivot + m.mean) * (pivot + m.mean);
        part.rel_count += p.count - s.zeros;
        for (int64_t &within : part.within) within += p.count;
        if (part.absolute.value < 0) part.absolute = {0, at};
        if (part.relative.value < 0 && p.count > s.zeros) part.relative = {0, at + find(p, 0, true)};
        return true;
    }

    // Returns whether the pairs are finite, as those with places are known to be; if not, nothing has been added.
    bool add(const Pairs<F> &p, int64_t at) {
        const int64_t n = p.count;
        const Ratios q = ratios(p);
        Errors e;
        const Side &one = pairing_.reference, &other = pairing_.candidate;
        const int r_size = one.layout.size, c_size = other.layout.size;
        const ErrorsRequest request{one.pivot, other.pivot, open_counts(q), pairing_.tolerance,
                                    p.raw_reference + kPairBlock<F> * r_size, p.raw_candidate + kPairBlock<F> * c_size,
                                    r_size, c_size};
        if constexpr (kFloat) isa_.errors32(p.reference, p.candidate, n, request, e);
        else isa_.errors64(p.reference, p.candidate, n, request, e);
        if (!p.place && !(std::isfinite(e.sum[kR]) && std::isfinite(e.sum[kC]))) return false;

        part.reference.merge(moments(p.reference, n, request.r_pivot, e.sum[kR], e.sum[kRSquares], e.r_most));
        part.candidate.merge(moments(p.candidate, n, request.c_pivot, e.sum[kC], e.sum[kCSquares], e.c_most));
        part.dot += e.sum[kDot];
        part.sum_abs += e.sum[kAbs];
        part.squares += e.sum[kSquares];
        part.sum_rel += q.sum;
        part.rel_count += q.nonzero;
        for (int k = 0; k < 3; ++k) part.within[k] += e.within[k];
        if (e.max_abs > part.absolute.value) part.absolute = {e.max_abs, at + find(p, e.max_abs, false)};
        if (q.nonzero && q.most * (1 + kRatioError) > part.relative.value && !ties(q)) {
            const double most = exact_most(p, q);
            if (most > part.relative.value) part.relative = {most, at + find(p, most, true)};
        }
        const Type type = pairing_.reference.type;
        if (pairing_.same_type() && (type == kI64 || type == kU64)) {  // unequal ones may be the same double
            auto r = reinterpret_cast<const int64_t *>(p.raw_reference);
            auto c = reinterpret_cast<const int64_t *>(p.raw_candidate);
            for (int64_t i = 0; i < n; ++i) part.different += r[i] != c[i];
        } else part.different += q.different;
        if (pairing_.same_type() && is_float(type) && q.different) add_ulps(p, q.bound <= kNear);
        return true;
    }
};

template <class F> Contrasted contrast_chunk(const Isa &isa, const Pairing &pairing, int64_t begin, int64_t end) {
    Blocks<F> reference(isa, pairing.reference), candidate(isa, pairing.candidate);
    FinitePairs<F> finite;
    Contrasting<F> contrasting(isa, pairing);
    for (int64_t at = begin; at < end; at += kPairBlock<F>) {
        const int64_t n = end - at < kPairBlock<F> ? end - at : kPairBlock<F>;
        reference.seek(at, n);
        candidate.seek(at, n);
        const Pairs<F> all{reference.values, candidate.values, reference.raw, candidate.raw, nullptr, n};
        const bool same = pairing.same_type() && pairing.tolerance.grows() &&
                          std::memcmp(reference.raw, candidate.raw, n * pairing.reference.layout.size) == 0;
        if (same ? contrasting.add_same(all, at) : contrasting.add(all, at)) continue;
        const Pairs<F> kept = finite.keep(all, pairing, at, contrasting.part);
        if (kept.count) contrasting.add(kept, at);
    }
    contrasting.part.different += contrasting.part.mismatch;
    return contrasting.part;
}

template <class Part, class Chunk> Part by_chunks(int64_t count, int64_t bytes, const Chunk &chunk) {
    std::vector<Part> parts((count + kChunk - 1) / kChunk);
    run_tasks(parts.size(), bytes, [&](int64_t i) { parts[i] = chunk(i * kChunk, std::min(count, (i + 1) * kChunk)); });
    Part result;
    for (const auto &part : parts) result.merge(part);
    return result;
}

// What must be had again from scaled elements when squares of the plain ones overflow or vanish.
struct Rescued {
    Moments reference, candidate;
    double dot = 0, squares = 0;
    void merge(const Rescued &other) {
        reference.merge(other.reference);
        candidate.merge(other.candidate);
        dot += other.dot;
        squares += other.squares;
    }
};

// `shrink` keeps a difference of two huge numbers finite, `zoom` then brings the largest difference near 1.
Rescued rescue_chunk(const Isa &isa, const Pairing &pairing, double shrink, double zoom, int64_t begin, int64_t end) {
    Rescued part;
    Blocks<double> reference(isa, pairing.reference), candidate(isa, pairing.candidate);
    double r[kPairBlock<double>], c[kPairBlock<double>], d[kPairBlock<double>];
    const double r_back = shrink / pairing.reference.scale, c_back = shrink / pairing.candidate.scale;
    for (int64_t at = begin; at < end; at += kPairBlock<double>) {
        const int64_t n = end - at < kPairBlock<double> ? end - at : kPairBlock<double>;
        reference.seek(at, n);
        candidate.seek(at, n);
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            r[kept] = reference.values[i];
            c[kept] = candidate.values[i];
            d[kept] = (c[kept] * c_back - r[kept] * r_back) * zoom;
            kept += std::isfinite(r[kept]) && std::isfinite(c[kept]);
        }
        if (!kept) continue;
        const double r_pivot = pairing.reference.pivot, c_pivot = pairing.candidate.pivot;
        part.reference.merge(moments_of(isa, r, kept, r_pivot, isa.sums64(r, kept, r_pivot)));
        part.candidate.merge(moments_of(isa, c, kept, c_pivot, isa.sums64(c, kept, c_pivot)));
        part.squares += isa.sums64(d, kept, 0).squares;
        for (int64_t i = 0; i < kept; ++i) part.dot += r[i] * c[i];
    }
    return part;
}

struct ContrastResult {
    Contrasted contrasted;
    Summary reference, candidate;
    double dot, cosine, l2_error;
    bool has_cosine;
};

struct Free { void operator()(char *memory) const { std::free(memory); } };
using Memory = std::unique_ptr<char, Free>;

// In huge pages where they are to be had: getting memory in small ones takes longer than filling it.
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

// Makes a side row-major in memory of its own, which is faster than jumping about in the tensor pair by pair.
Memory straighten(Side &side) {
    Layout &layout = side.layout;
    layout.merge();
    if (layout.row_major()) return nullptr;
    Memory copy = allocate(layout.count * layout.size);
    pack(layout, copy.get());
    layout.base = copy.get();
    layout.rank = 1;
    layout.dim[0] = {layout.count, 1, 1};
    return copy;
}

ContrastResult contrast(Pairing &pairing) {
    const Isa &isa = *chosen_isa;
    KeepSubnormals subnormals;
    const auto reference = straighten(pairing.reference), candidate = straighten(pairing.candidate);
    for (Side *side : {&pairing.reference, &pairing.candidate})
        side->pivot = choose_pivot(isa, side->layout, side->type, 1);
    const int64_t count = pairing.reference.layout.count;
    const int64_t bytes = count * (pairing.reference.layout.size + pairing.candidate.layout.size);
    ContrastResult result{};
    Contrasted &all = result.contrasted;
    all = by_chunks<Contrasted>(count, bytes, [&](int64_t begin, int64_t end) {
        return pairing.in_double() ? contrast_chunk<double>(isa, pairing, begin, end)
                                   : contrast_chunk<float>(isa, pairing, begin, end);
    });
    if (!all.reference.count) return result;

    Rescued sums{all.reference, all.candidate, all.dot, all.squares};
    int r_exponent = 0, c_exponent = 0, d_exponent = 0;
    if (pairing.in_double()) {
        r_exponent = rescue_exponent(all.reference.absmax());
        c_exponent = rescue_exponent(all.candidate.absmax());
        d_exponent = rescue_exponent(all.absolute.value);
    }
    if (r_exponent || c_exponent || d_exponent || !std::isfinite(all.absolute.value)) {
        const bool overflowed = !std::isfinite(all.absolute.value);  // then 2^-1000 of it does not
        const int shrink = overflowed ? -1000 : 0;
        if (overflowed) d_exponent = 1000;
        pairing.reference.scale = std::ldexp(1.0, -r_exponent);
        pairing.candidate.scale = std::ldexp(1.0, -c_exponent);
        for (Side *side : {&pairing.reference, &pairing.candidate})
            side->pivot = choose_pivot(isa, side->layout, side->type, side->scale);
        const double shrunk = std::ldexp(1.0, shrink), zoom = std::ldexp(1.0, -d_exponent - shrink);
        sums = by_chunks<Rescued>(count, bytes, [&](int64_t begin, int64_t end) {
            return rescue_chunk(isa, pairing, shrunk, zoom, begin, end);
        });
    }
    result.reference = summarize(sums.reference, r_exponent);
    result.candidate = summarize(sums.candidate, c_exponent);
    result.dot = std::ldexp(sums.dot, r_exponent + c_exponent);
    result.l2_error = std::ldexp(std::sqrt(sums.squares), d_exponent);
    const double norms = summarize(sums.reference, 0).l2 * summarize(sums.candidate, 0).l2;
    result.has_cosine = norms != 0;
    if (norms != 0) result.cosine = std::fmax(-1.0, std::fmin(1.0, sums.dot / norms));  // rounding can push 1 past 1
    return result;
}

// --------------------------------------------------------------------------------------------------------- strings

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

// ---------------------------------------------------------------------------------------------------------- Python

PyObject *statistics_type, *measurement_type, *contrast_type;
newfunc new_tuple;  // tuple.__new__: makes a named tuple without running its Python-level constructor

class NoInterpreterLock {
    PyThreadState *state_;

  public:
    explicit NoInterpreterLock(bool release) : state_(release ? PyEval_SaveThread() : nullptr) {}
    ~NoInterpreterLock() { if (state_) PyEval_RestoreThread(state_); }
    NoInterpreterLock(const NoInterpreterLock &) = delete;
    NoInterpreterLock &operator=(const NoInterpreterLock &) = delete;
};

// Takes the reference to `fields`, which may be null.
PyObject *make_named(PyObject *type, PyObject *fields) {
    if (!fields) return nullptr;
    PyObject *arguments = PyTuple_New(1);
    if (!arguments) { Py_DECREF(fields); return nullptr; }
    PyTuple_SetItem(arguments, 0, fields);
    PyObject *result = new_tuple(reinterpret_cast<PyTypeObject *>(type), arguments, nullptr);
    Py_DECREF(arguments);
    return result;
}

// Fills a tuple field by field; a field that could not be made leaves null.
class Fields {
    PyObject *tuple_;
    Py_ssize_t next_ = 0;
    bool failed_ = false;

  public:
    explicit Fields(Py_ssize_t n) : tuple_(PyTuple_New(n)) {}
    void add(PyObject *field) {
        if (!field || !tuple_ || PyTuple_SetItem(tuple_, next_++, field)) failed_ = true;
    }
    void real(double value) { add(PyFloat_FromDouble(value)); }
    void integer(int64_t value) { add(PyLong_FromLongLong(value)); }
    void none() { Py_INCREF(Py_None); add(Py_None); }
    void real_if(bool known, double value) { known ? real(value) : none(); }
    PyObject *take() {
        if (failed_) { Py_XDECREF(tuple_); return nullptr; }
        return tuple_;
    }
};

bool read_integer(PyObject *number, int64_t &value) {
    value = PyLong_AsLongLong(number);
    return value != -1 || !PyErr_Occurred();
}

// A tuple field of a tuple; new references are avoided throughout.
PyObject *tuple_at(PyObject *tuple, Py_ssize_t i) {
    PyObject *item = PyTuple_GetItem(tuple, i);
    if (item && !PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "Shapes, strides and offsets must be tuples of int.");
        return nullptr;
    }
    return item;
}

bool read_type(PyObject *name, Type &type, bool &complex) {
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
    if (!text) return false;
    for (const TypeName &known : kNames)
        if (std::strcmp(known.name, text) == 0) {
            type = known.type;
            complex = known.complex;
            return true;
        }
    PyErr_Format(PyExc_ValueError, "Unknown dtype %R.", name);
    return false;
}

bool read_shard(PyObject *shard, PyObject *shape, Layout &layout) {
    PyObject *offset = PyTuple_Check(shard) && PyTuple_Size(shard) == 2 ? tuple_at(shard, 0) : nullptr;
    PyObject *whole = offset ? tuple_at(shard, 1) : nullptr;
    if (!whole) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "A shard is a pair of offset and full shape.");
        return false;
    }
    const Py_ssize_t rank = PyTuple_Size(shape);
    bool inside = PyTuple_Size(offset) == rank && PyTuple_Size(whole) == rank;
    int64_t step = 1;
    for (Py_ssize_t i = rank - 1; inside && i >= 0; --i) {
        int64_t first, full;
        if (!read_integer(PyTuple_GetItem(offset, i), first) || !read_integer(PyTuple_GetItem(whole, i), full))
            return false;
        Dim &dim = layout.dim[rank - 1 - i];
        inside = first >= 0 && first + dim.size <= full;
        dim.step = step;
        layout.origin += static_cast<uint64_t>(first * step);
        step *= full;
    }
    if (!inside)
        PyErr_Format(PyExc_ValueError, "A shard of shape %R at %R does not lie within a tensor of shape %R.", shape,
                     offset, whole);
    return inside;
}

// Reads a Strided, as nested loops over real numbers: a complex element is a dimension of two.
bool read_tensor(PyObject *tensor, PyObject *shard, Layout &layout, Type &type, bool &complex) {
    if (!PyTuple_Check(tensor) || PyTuple_Size(tensor) != 4) {
        PyErr_SetString(PyExc_TypeError, "A tensor is given as Strided(address, dtype, shape, stride).");
        return false;
    }
    if (!read_type(PyTuple_GetItem(tensor, 1), type, complex)) return false;
    PyObject *shape = tuple_at(tensor, 2), *stride = shape ? tuple_at(tensor, 3) : nullptr;
    if (!stride) return false;
    const Py_ssize_t rank = PyTuple_Size(shape);
    if (rank != PyTuple_Size(stride) || rank > kMaxRank - 1) {
        PyErr_Format(PyExc_ValueError, "Shape %R and strides %R do not belong together.", shape, stride);
        return false;
    }
    layout.base = static_cast<const char *>(PyLong_AsVoidPtr(PyTuple_GetItem(tensor, 0)));
    if (!layout.base && PyErr_Occurred()) return false;
    layout.size = size_of(type);
    layout.rank = static_cast<int>(rank);
    for (Py_ssize_t i = 0; i < rank; ++i) {
        Dim &dim = layout.dim[rank - 1 - i];
        if (!read_integer(PyTuple_GetItem(shape, i), dim.size) || !read_integer(PyTuple_GetItem(stride, i), dim.stride))
            return false;
        if (dim.size < 0) {
            PyErr_Format(PyExc_ValueError, "Shape %R has a negative size.", shape);
            return false;
        }
    }
    for (int d = 0; d < layout.rank; ++d) {
        layout.dim[d].step = layout.count;
        layout.count *= layout.dim[d].size;
    }
    if (shard != Py_None && !read_shard(shard, shape, layout)) return false;
    if (complex) {
        for (int d = layout.rank; d; --d) {
            layout.dim[d] = layout.dim[d - 1];
            layout.dim[d].stride *= 2;
            layout.dim[d].step *= 2;
        }
        layout.dim[0] = {2, 1, 1};
        layout.rank += 1;
        layout.count *= 2;
        layout.origin *= 2;
    }
    return true;
}

bool expect(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return true;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are expected.", given, expected);
    return false;
}

// Runs `work` without the interpreter lock when there is enough of it, and turns C++ exceptions into Python's.
template <class Work> bool unlocked(int64_t bytes, const Work &work) {
    try {
        NoInterpreterLock lock(bytes > kReleaseBytes);
        work();
        return true;
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
        return false;
    }
}

PyObject *make_statistics(const MeasureResult &result, int64_t count) {
    const Measured &m = result.measured;
    const bool some = m.moments.count > 0;
    Fields fields(10);
    fields.real_if(some, result.low);
    fields.real_if(some, result.high);
    fields.real_if(some, result.summary.mean);
    fields.real_if(some, result.summary.std);
    fields.real_if(some, result.summary.l2);
    fields.real_if(some, result.absmax);
    fields.integer(m.zeros);
    fields.integer(m.nan);
    fields.integer(m.inf);
    fields.integer(count);
    return fields.take();
}

PyObject *measure_tensor(PyObject *const *args, Py_ssize_t nargs, bool named) {
    Request request;
    bool complex;
    if (!expect(nargs, 4) || !read_tensor(args[0], args[3], request.layout, request.type, complex)) return nullptr;
    const int statistics = PyObject_IsTrue(args[1]), fingerprint = PyObject_IsTrue(args[2]);
    if (statistics < 0 || fingerprint < 0) return nullptr;
    request.statistics = statistics;
    request.fingerprint = fingerprint;
    MeasureResult result{};
    const int64_t count = request.layout.count;
    if (count) {
        // The index of the last element bounds all indices.
        const Layout &layout = request.layout;
        uint64_t last = layout.origin;
        for (int d = 0; d < layout.rank; ++d) last += (layout.dim[d].size - 1) * layout.dim[d].step;
        request.wide_index = last >= UINT32_MAX / 2;  // 8-byte elements are two words
        if (!unlocked(count * request.layout.size, [&] { result = measure(request); })) return nullptr;
    }
    Fields fields(2);
    PyObject *measures = statistics ? make_statistics(result, count) : nullptr;
    if (statistics) fields.add(named ? make_named(statistics_type, measures) : measures);
    else fields.none();
    if (fingerprint) fields.add(PyLong_FromUnsignedLongLong(result.measured.fingerprint));
    else fields.none();
    return named ? make_named(measurement_type, fields.take()) : fields.take();
}

// measure(tensor, statistics, fingerprint, shard)
PyObject *py_measure(PyObject *, PyObject *const *args, Py_ssize_t nargs) { return measure_tensor(args, nargs, true); }

// measure_plain(…): the same in plain tuples, which cost less to make
PyObject *py_measure_plain(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    return measure_tensor(args, nargs, false);
}

PyObject *make_contrast(const ContrastResult &result, const Pairing &pairing, int64_t count) {
    const Contrasted &all = result.contrasted;
    const int64_t finite = all.reference.count;
    const bool some = finite > 0, ratios = all.rel_count > 0;
    const bool ulps = some && pairing.same_type() && is_float(pairing.reference.type);
    Fields fields(30);
    fields.integer(count);
    fields.integer(finite);
    fields.integer(all.different);
    for (const Summary *side : {&result.reference, &result.candidate})
        for (double value : {side->mean, side->std, side->l2}) fields.real_if(some, value);
    fields.real_if(some, result.dot);
    fields.real_if(result.has_cosine, result.cosine);
    fields.real_if(some, all.sum_abs);
    fields.real_if(some, result.l2_error);
    fields.real_if(some, all.absolute.value);
    fields.integer(all.absolute.index);
    fields.real_if(ratios, all.relative.value);
    fields.integer(all.relative.index);
    fields.real_if(ratios, all.sum_rel);
    fields.integer(all.rel_count);
    for (int64_t within : all.within) fields.integer(within);
    if (ulps) {
        fields.add(PyLong_FromUnsignedLongLong(all.max_ulp));
        const double sum = static_cast<double>(all.ulp_high) * 0x1p32 + static_cast<double>(all.ulp_low);
        fields.real(sum / static_cast<double>(finite));
    } else {
        fields.none();
        fields.none();
    }
    for (int64_t value : {all.nan_reference, all.nan_candidate, all.inf_reference, all.inf_candidate, all.mismatch,
                          all.first_mismatch})
        fields.integer(value);
    return make_named(contrast_type, fields.take());
}

// contrast(reference, candidate, rtol, atol)
PyObject *py_contrast(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    Pairing pairing;
    bool complex;
    if (!expect(nargs, 4) ||
        !read_tensor(args[0], Py_None, pairing.reference.layout, pairing.reference.type, complex) ||
        !read_tensor(args[1], Py_None, pairing.candidate.layout, pairing.candidate.type, complex))
        return nullptr;
    pairing.tolerance = {PyFloat_AsDouble(args[2]), PyFloat_AsDouble(args[3])};
    if (PyErr_Occurred()) return nullptr;
    const int64_t count = pairing.reference.layout.count;
    if (count != pairing.candidate.layout.count) {
        PyErr_SetString(PyExc_ValueError, "The tensors have different numbers of elements.");
        return nullptr;
    }
    ContrastResult result{};
    if (count && !unlocked(count * pairing.reference.layout.size, [&] { result = contrast(pairing); })) return nullptr;
    return make_contrast(result, pairing, count);
}

bool read_address(PyObject *number, void *&address) {
    address = PyLong_AsVoidPtr(number);
    return address || !PyErr_Occurred();
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

// read(address, bytes) -> sum of 64-bit words: what merely going over memory takes
PyObject *py_read(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    void *address;
    int64_t bytes;
    uint64_t total = 0;
    if (!expect(nargs, 2) || !read_address(args[0], address) || !read_integer(args[1], bytes)) return nullptr;
    if (!unlocked(bytes, [&] { total = read_all(static_cast<const char *>(address), bytes); })) return nullptr;
    return PyLong_FromUnsignedLongLong(total);
}

// set_threads(count)
PyObject *py_set_threads(PyObject *, PyObject *count) {
    int64_t value;
    if (!read_integer(count, value)) return nullptr;
    thread_limit = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(value, 256)));
    Py_RETURN_NONE;
}

// isas() -> the instruction sets this processor can use, the best one last
PyObject *py_isas(PyObject *, PyObject *) {
    const int count = supported_isas();
    Fields names(count);
    for (int i = 0; i < count; ++i) names.add(PyUnicode_FromString(kIsas[i]->name));
    return names.take();
}

// set_isa(name)
PyObject *py_set_isa(PyObject *, PyObject *name) {
    const char *text = PyUnicode_AsUTF8AndSize(name, nullptr);
    if (!text) return nullptr;
    for (int i = 0; i < supported_isas(); ++i)
        if (std::strcmp(kIsas[i]->name, text) == 0) {
            chosen_isa = kIsas[i];
            Py_RETURN_NONE;
        }
    PyErr_Format(PyExc_ValueError, "This processor cannot use %R.", name);
    return nullptr;
}

template <class Function> PyCFunction method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kMethods[] = {
    {"measure", method(py_measure), METH_FASTCALL, nullptr},
    {"measure_plain", method(py_measure_plain), METH_FASTCALL, nullptr},
    {"contrast", method(py_contrast), METH_FASTCALL, nullptr},
    {"pack", method(py_pack), METH_FASTCALL, nullptr},
    {"gather", method(py_gather), METH_FASTCALL, nullptr},
    {"factorize", method(py_factorize), METH_FASTCALL, nullptr},
    {"read", method(py_read), METH_FASTCALL, nullptr},
    {"set_threads", py_set_threads, METH_O, nullptr},
    {"isas", py_isas, METH_NOARGS, nullptr},
    {"set_isa", py_set_isa, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "astray.stats._native", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr,
};

PyObject *import_name(const char *module, const char *name) {
    PyObject *found = PyImport_ImportModule(module);
    if (!found) return nullptr;
    PyObject *result = PyObject_GetAttrString(found, name);
    Py_DECREF(found);
    return result;
}

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    statistics_type = import_name("astray.record", "Statistics");
    measurement_type = import_name("astray.stats.types", "Measurement");
    contrast_type = import_name("astray.stats.types", "Contrast");
    if (!statistics_type || !measurement_type || !contrast_type) return nullptr;
    new_tuple = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
    fill_tables();
    chosen_isa = kIsas[supported_isas() - 1];
    return PyModule_Create(&kModule);
}
