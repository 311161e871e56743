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
