// Operand values as the tensor cores read them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../device/abi.h"

namespace emu {
inline float from_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline float from_bf16(uint16_t u) { return from_bits(uint32_t(u) << 16); }
inline float from_fp16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) {
    const float f = float(mantissa) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  return from_bits(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}

// A sum of tensor cores and a product that they add to it: cut off, not rounded to nearest (Fasi et al., PeerJ Computer
// Science 7:e330), and the NaN that they make.
inline float added(float sum, float product) {
  const double exact = double(sum) + product;
  const float nearest = float(exact);
  if (nearest != nearest) return from_bits(0x7fffffffu);
  return std::fabs(double(nearest)) > std::fabs(exact) && !std::isinf(exact) ? std::nextafter(nearest, 0.0f) : nearest;
}

inline float from_tf32(uint32_t u) { return from_bits(u & 0xffffe000u); }  // the low 13 bits are ignored
inline int operand_bytes(int operand) { return operand == EMU_TF32 ? 4 : 2; }
inline float from_16_bits(uint16_t u, int operand) { return operand == EMU_FP16 ? from_fp16(u) : from_bf16(u); }
inline float read_operand(const unsigned char* p, int operand) {
  if (operand == EMU_TF32) {
    uint32_t u;
    memcpy(&u, p, 4);
    return from_tf32(u);
  }
  uint16_t u;
  memcpy(&u, p, 2);
  return from_16_bits(u, operand);
}
}  // namespace emu
