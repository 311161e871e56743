// wgmma (sm_90a) and tcgen05 (sm_100a): descriptors and instructions.
#pragma once
#include "warps.h"

namespace tl {
struct GmmaDescriptor {
  uint64_t bits = 0;
  operator uint64_t() const { return bits; }
  template <class T>
  GmmaDescriptor operator+(T units) const {  // units of 16 bytes
    GmmaDescriptor moved;
    moved.bits = (bits & ~0xffffffffull) | uint32_t(uint32_t(bits) + uint32_t(units));
    return moved;
  }
};
template <int layout = 0, int leading = 0, int stride = 0, class T>
void initialize_wgmma_descriptor(GmmaDescriptor& d, T* start) {
  d.bits = uint64_t((emu_shared_address(start) >> 4) & 0x3fff) | uint64_t(leading & 0x3fff) << 16 |
           uint64_t(stride & 0x3fff) << 32 | uint64_t(layout & 3) << 62;
}
template <class T>
void increase_descriptor_offset(GmmaDescriptor& d, T bytes) {
  d.bits = (d.bits & ~0xffffffffull) | uint32_t(uint32_t(d.bits) + uint32_t(bytes >> 4));
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_mn, bool b_mn, int sign_a = 1, int sign_b = 1>
constexpr void emu_check_wgmma() {
  static_assert(M == 64 && sign_a == 1 && sign_b == 1, "wgmma: m64, no negation");
  static_assert(A == B && C == DataType::kFloat32 && emu_supported(A), "wgmma: bf16, fp16 or tf32, fp32 sums");
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma: n is a multiple of 8 up to 256");
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_mn, bool b_mn, int sign_a = 1, int sign_b = 1>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* d, bool accumulate) {
  emu_check_wgmma<A, B, C, M, N, K, a_mn, b_mn, sign_a, sign_b>();
  emu_wgmma(a, b, (float*)d, accumulate, N, a_mn, b_mn, emu_operand(A), nullptr);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_mn, bool b_mn, int sign_a = 1, int sign_b = 1>
void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* d, bool accumulate) {
  emu_check_wgmma<A, B, C, M, N, K, a_mn, b_mn, sign_a, sign_b>();
  emu_wgmma(0, b, (float*)d, accumulate, N, a_mn, b_mn, emu_operand(A), a);
}
inline void warpgroup_arrive() { emu_wgmma_arrive(); }
inline void warpgroup_commit_batch() { emu_wgmma_commit(); }
template <int pending>
void warpgroup_wait() {
  emu_wgmma_wait(pending);
}
template <int pending>
void wait_wgmma() {
  emu_wgmma_wait(pending);
}
template <class T>
void warpgroup_fence_operand(T*, int) {}  // only stops the device compiler from moving registers

struct Tcgen05SMemDescriptor {
  uint64_t bits = 0;
  operator uint64_t() const { return bits; }
  template <class T>
  Tcgen05SMemDescriptor operator+(T bytes) const {
    Tcgen05SMemDescriptor moved;
    moved.bits = (bits & ~0xffffffffull) | uint32_t(uint32_t(bits) + (uint32_t(bytes) >> 4));
    return moved;
  }
};
template <class T>
void initialize_tcgen05_descriptor(Tcgen05SMemDescriptor& d, T* start, int leading, int stride, int base_offset,
                                   bool leading_is_absolute, int swizzle) {
  d.bits = uint64_t((emu_shared_address(start) >> 4) & 0x3fff) | uint64_t(leading & 0x3fff) << 16 |
           uint64_t(stride & 0x3fff) << 32 | 1ull << 46 | uint64_t(base_offset & 7) << 49 |
           uint64_t(leading_is_absolute) << 52 | uint64_t(swizzle & 7) << 61;
}
template <class T>
void increase_descriptor_offset(Tcgen05SMemDescriptor& d, T bytes) {
  d.bits = (d.bits & ~0xffffffffull) | uint32_t(uint32_t(d.bits) + uint32_t(bytes >> 4));
}
template <DataType C, bool two_blocks = false>
void tcgen05mma_ss(uint64_t a, uint64_t b, uint32_t d, uint32_t accumulate, uint32_t descriptor, int mask0, int mask1,
                   int mask2, int mask3) {
  static_assert(!two_blocks && emu_supported(C), "tcgen05.mma: one block, 16-bit or tf32 operands");
  emu_tcgen05_lane_masks(mask0 | mask1 | mask2 | mask3);
  if (emu_elect_one()) emu_tcgen05_mma(a, b, d, accumulate, descriptor, 0, 0, emu_operand(C));
}
template <DataType C>
void tcgen05mma_ws_ss(uint64_t a, uint64_t b, uint32_t d, uint32_t accumulate, uint32_t descriptor, int mask0, int mask1,
                   int mask2, int mask3) {
  static_assert(emu_supported(C), "tcgen05.mma.ws: 16-bit or tf32 operands");
  emu_tcgen05_lane_masks(mask0 | mask1 | mask2 | mask3);
  if (emu_elect_one()) emu_tcgen05_mma(a, b, d, accumulate, descriptor, 1, 0, emu_operand(C));
}
template <DataType C, bool two_blocks = false>
void tcgen05mma_ts(uint32_t a, uint64_t b, uint32_t d, uint32_t accumulate, uint32_t descriptor, int mask0, int mask1,
                   int mask2, int mask3) {
  static_assert(!two_blocks && emu_supported(C), "tcgen05.mma: one block, 16-bit or tf32 operands");
  emu_tcgen05_lane_masks(mask0 | mask1 | mask2 | mask3);
  if (emu_elect_one()) emu_tcgen05_mma(a, b, d, accumulate, descriptor, 0, 1, emu_operand(C));
}
template <bool two_blocks = false>
void tcgen05_mma_arrive(const void* barrier, uint16_t = 3) {
  static_assert(!two_blocks, "tcgen05.commit: one block");
  if (emu_elect_one()) emu_tcgen05_commit(barrier);
}
template <bool two_blocks = false>
void tmem_allocate(void* destination, int columns) {
  static_assert(!two_blocks, "tcgen05.alloc: one block");
  emu_tmem_allocate(destination, columns);
}
template <bool two_blocks = false>
void tmem_deallocate(uint32_t* address, int columns) {
  static_assert(!two_blocks, "tcgen05.dealloc: one block");
  emu_tmem_deallocate(*address, columns);
}
inline void tcgen05_before_thread_sync() { emu_tcgen05_before_thread_sync(); }
inline void tcgen05_after_thread_sync() { emu_tcgen05_after_thread_sync(); }
// 32 lanes of 32 bits: each thread of a warp reads or writes `columns` words of its own lane.
template <int columns, bool packed, class T>
void tcgen05_ld_32dp32bNx(uint32_t start, uint32_t offset, T* out) {
  static_assert(!packed, "tcgen05.ld: 32-bit columns, no packing");
  emu_tcgen05_copy(start + offset, (uint32_t*)out, columns, 0);
}
template <int columns, bool unpacked, class T>
void tcgen05_st_32dp32bNx(uint32_t start, uint32_t offset, const T* in) {
  static_assert(!unpacked, "tcgen05.st: 32-bit columns, no unpacking");
  emu_tcgen05_copy(start + offset, (uint32_t*)in, columns, 1);
}
}  // namespace tl
