// Address arithmetic of the hardware, free of state so that it can be compared with other implementations.
#pragma once
#include <cstdint>

namespace emu {
// Swizzle modes: 0 none, 1 32 B, 2 64 B, 3 128 B. XORs address bits 4-6 with bits 7-9.
inline unsigned swizzle(unsigned address, int mode) {
  const unsigned bits = mode == 3 ? 7 : mode == 2 ? 3 : mode == 1 ? 1 : 0;
  return address ^ (((address >> 7) & bits) << 4);
}

struct OperandLayout {
  unsigned start, leading, stride;  // bytes
  int swizzle_mode;
};

// Shared-memory address of element (mn, k) of a tensor-core operand.
inline unsigned operand_address(const OperandLayout& d, int mn, int k, bool mn_major, int element_bytes) {
  const int chunk = 16 / element_bytes;  // elements of one 16-byte chunk
  unsigned a;
  if (!mn_major) {
    if (d.swizzle_mode == 0)
      a = (mn % 8) * 16 + (mn / 8) * d.stride + (k / chunk) * d.leading + (k % chunk) * element_bytes;
    else
      a = (mn % 8) * (16u << d.swizzle_mode) + (mn / 8) * d.stride + k * element_bytes;
  } else if (d.swizzle_mode == 0) {
    a = (mn % chunk) * element_bytes + (mn / chunk) * d.stride + (k % 8) * 16 + (k / 8) * d.leading;
  } else {
    const int atom = chunk << d.swizzle_mode;
    a = (mn % atom) * element_bytes + (mn / atom) * d.leading + (k % 8) * (16u << d.swizzle_mode) + (k / 8) * d.stride;
  }
  return swizzle(d.start + a, d.swizzle_mode);
}

// Shared-memory descriptor of tcgen05 (layout types 0, 2, 4, 6); -1: a type the emulator lacks.
inline int tcgen05_swizzle_mode(uint64_t descriptor) {
  const int type = int(descriptor >> 61) & 7;
  return type == 0 ? 0 : type == 2 ? 3 : type == 4 ? 2 : type == 6 ? 1 : -1;
}
inline int wgmma_swizzle_mode(uint64_t descriptor) {
  const int type = int(descriptor >> 62) & 3;
  return type == 0 ? 0 : 4 - type;
}
inline OperandLayout decode_descriptor(uint64_t d, int swizzle_mode) {
  return {unsigned(d & 0x3fff) << 4, unsigned((d >> 16) & 0x3fff) << 4, unsigned((d >> 32) & 0x3fff) << 4, swizzle_mode};
}

struct TmemPlace {
  int lane, column;
};
// Where tcgen05.mma keeps element (m, n) of an accumulator of M rows and N columns.
inline TmemPlace accumulator_place(int M, int N, int m, int n, bool warp_split) {
  if (!warp_split) return M == 128 ? TmemPlace{m, n} : TmemPlace{m % 16 + 32 * (m / 16), n};
  if (M == 128) return {m, n};
  if (M == 64) return {m + 64 * (n / (N / 2)), n % (N / 2)};
  return {m + 32 * (n / (N / 4)), n % (N / 4)};
}
inline int a_operand_lane(int M, int m) { return M == 128 ? m : m % 16 + 32 * (m / 16); }
}  // namespace emu
