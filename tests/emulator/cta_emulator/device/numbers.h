// 16-bit floating-point types with the conversions emitted code uses, and packing of pairs.
#pragma once
#include "prelude.h"

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float f) : bits(round_to_nearest(f)) {}
  explicit bfloat16_t(double f) : bits(round_to_nearest(float(f))) {}
  explicit bfloat16_t(int f) : bits(round_to_nearest(float(f))) {}
  bfloat16_t(__nv_bfloat16 b) { memcpy(&bits, &b, 2); }
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
  }
  __nv_bfloat16 to_nv_bfloat16() const {
    __nv_bfloat16 b;
    memcpy(&b, &bits, 2);
    return b;
  }
  static uint16_t round_to_nearest(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
};

struct half_t {
  uint16_t bits;
  half_t() = default;
  explicit half_t(float f) { from(__float2half_rn(f)); }
  explicit half_t(double f) { from(__float2half_rn(float(f))); }
  explicit half_t(int f) { from(__float2half_rn(float(f))); }
  half_t(__half h) { from(h); }
  operator float() const { return __half2float(to_half()); }
  __half to_half() const {
    __half h;
    memcpy(&h, &bits, 2);
    return h;
  }

 private:
  void from(__half h) { memcpy(&bits, &h, 2); }
};

inline unsigned emu_pack(uint16_t low, uint16_t high) { return unsigned(high) << 16 | low; }
inline unsigned __pack_half2(half_t a, half_t b) { return emu_pack(a.bits, b.bits); }
inline unsigned __pack_half2(bfloat16_t a, bfloat16_t b) { return emu_pack(a.bits, b.bits); }
inline unsigned __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return emu_pack(a.bits, b.bits); }

namespace tl {
inline unsigned long long pack_bfloat16x4(bfloat16_t a, bfloat16_t b, bfloat16_t c, bfloat16_t d) {
  return (unsigned long long)emu_pack(a.bits, b.bits) | (unsigned long long)emu_pack(c.bits, d.bits) << 32;
}
inline unsigned long long pack_float16x4(half_t a, half_t b, half_t c, half_t d) {
  return (unsigned long long)emu_pack(a.bits, b.bits) | (unsigned long long)emu_pack(c.bits, d.bits) << 32;
}
inline float2 add2(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
inline float2 sub2(float2 a, float2 b) { return make_float2(a.x - b.x, a.y - b.y); }
inline float2 mul2(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
inline float2 fma2(float2 a, float2 b, float2 c) { return make_float2(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)); }
inline float2 max2(float2 a, float2 b) { return make_float2(fmaxf(a.x, b.x), fmaxf(a.y, b.y)); }
inline float2 min2(float2 a, float2 b) { return make_float2(fminf(a.x, b.x), fminf(a.y, b.y)); }
inline float2 abs2(float2 a) { return make_float2(fabsf(a.x), fabsf(a.y)); }
// Pairs of 16-bit numbers travel as uint1. One rounding per result: the operation itself is done in double.
template <class T>
T from_uint1(uint1 v) {
  T out;
  memcpy(&out, &v, 4);
  return out;
}
template <class T>
uint1 to_uint1(T v) {
  uint1 out;
  memcpy(&out, &v, 4);
  return out;
}
inline uint1 pack_half2(bfloat16_t a, bfloat16_t b) { return make_uint1(emu_pack(a.bits, b.bits)); }
inline uint1 pack_half2(half_t a, half_t b) { return make_uint1(emu_pack(a.bits, b.bits)); }
inline double emu_wide(__nv_bfloat16 x) { return __bfloat162float(x); }
inline double emu_wide(__half x) { return __half2float(x); }
inline void emu_narrow(double x, __nv_bfloat16& out) { out = __double2bfloat16(x); }
inline void emu_narrow(double x, __half& out) { out = __double2half(x); }
#define EMU_PAIR_OPERATION(name, expression)                               \
  template <class P>                                                       \
  P name(P first, P second) {                                              \
    P out;                                                                 \
    auto one = [](double a, double b) { return expression; };              \
    emu_narrow(one(emu_wide(first.x), emu_wide(second.x)), out.x);         \
    emu_narrow(one(emu_wide(first.y), emu_wide(second.y)), out.y);         \
    return out;                                                            \
  }
EMU_PAIR_OPERATION(add2, a + b)
EMU_PAIR_OPERATION(sub2, a - b)
EMU_PAIR_OPERATION(mul2, a * b)
EMU_PAIR_OPERATION(max2, fmax(a, b))
EMU_PAIR_OPERATION(min2, fmin(a, b))
#undef EMU_PAIR_OPERATION
template <class P>
P fma2(P a, P b, P c) {
  P out;
  emu_narrow(fma(emu_wide(a.x), emu_wide(b.x), emu_wide(c.x)), out.x);
  emu_narrow(fma(emu_wide(a.y), emu_wide(b.y), emu_wide(c.y)), out.y);
  return out;
}
template <class T>
T fast_max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T fast_min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
bool Any(T* a, int size) {
  for (int i = 0; i < size; i++)
    if (a[i]) return true;
  return false;
}
template <class T>
bool All(T* a, int size) {
  for (int i = 0; i < size; i++)
    if (!a[i]) return false;
  return true;
}
template <int y = 1, class T>
T pow_of_int(T x) {
  T result = x;
  for (int i = 1; i < y; i++) result *= x;
  return result;
}
}  // namespace tl
