// The types an element can have, and how each is widened to float, or to double where float would not be exact.

#ifndef ASTRAY_STATS_ELEMENTS_H
#define ASTRAY_STATS_ELEMENTS_H

#include "lanes.h"

namespace {

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

// Moves exponent and mantissa to their positions in a float and corrects the bias by one multiplication: right for
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

}  // namespace

#endif
