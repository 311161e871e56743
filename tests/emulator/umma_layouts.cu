// Compares the emulator's address arithmetic with CuTe's layouts. Host code only: built with nvcc, run without a GPU.
#include <cuda_runtime.h>

#include <cstdio>
#include <cute/arch/mma_sm100_umma.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/tensor.hpp>

#include "layouts.h"

using namespace cute;
using Bf16 = cute::bfloat16_t;

namespace {
long mismatches = 0, compared = 0;

void conclude(const char* name, long bad, long count) {
  printf("%-40s %ld of %ld differ\n", name, bad, count);
  mismatches += bad;
  compared += count;
}

// `advance`: bytes that the descriptor's start moves per 16 elements of K.
template <class Layout>
void compare_operand(const char* name, Layout flagged, int mn_extent, int k_extent, int swizzle_mode, bool mn_major,
                     unsigned leading, unsigned stride, unsigned advance) {
  auto layout = as_position_independent_swizzle_layout(flagged);
  long bad = 0;
  for (int block = 0; block < k_extent / 16; block++)
    for (int mn = 0; mn < mn_extent; mn++)
      for (int k = 0; k < 16; k++) {
        const emu::OperandLayout descriptor{block * advance, leading, stride, swizzle_mode};
        bad += unsigned(layout(mn, block * 16 + k)) * 2 != emu::operand_address(descriptor, mn, k, mn_major, 2);
      }
  conclude(name, bad, long(mn_extent) * k_extent);
}

template <class Fragment>
void compare_accumulator(const char* name, Fragment fragment, int M, int N, bool warp_split) {
  auto layout = fragment.layout();
  long bad = 0;
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      const emu::TmemPlace place = emu::accumulator_place(M, N, m, n, warp_split);
      bad += uint32_t(layout(make_coord(make_coord(m, n), 0, 0))) != (uint32_t(place.lane) << 16 | uint32_t(place.column));
    }
  conclude(name, bad, long(M) * N);
}

template <class Shape>
auto accumulator(Shape shape) {
  return UMMA::tmem_frg_1sm<float, uint32_t>::make(make_shape(shape, _1{}, _1{}));
}
template <class Shape>
auto split_accumulator(Shape shape) {
  return UMMA::tmem_frg_ws_1sm<float, uint32_t>::make(make_shape(shape, _1{}, _1{}));
}
}  // namespace

int main() {
  compare_operand("K-major, 128 B", tile_to_shape(UMMA::Layout_K_SW128_Atom<Bf16>{}, Shape<_128, _64>{}), 128, 64, 3, false, 16, 1024, 32);
  compare_operand("K-major, 64 B", tile_to_shape(UMMA::Layout_K_SW64_Atom<Bf16>{}, Shape<_128, _32>{}), 128, 32, 2, false, 16, 512, 32);
  compare_operand("K-major, 32 B", tile_to_shape(UMMA::Layout_K_SW32_Atom<Bf16>{}, Shape<_128, _16>{}), 128, 16, 1, false, 16, 256, 32);
  compare_operand("K-major, no swizzle", tile_to_shape(UMMA::Layout_K_INTER_Atom<Bf16>{}, Shape<_128, _16>{}), 128, 16, 0, false, 128 * 16, 128, 0);
  compare_operand("MN-major, 128 B", tile_to_shape(UMMA::Layout_MN_SW128_Atom<Bf16>{}, Shape<_64, _64>{}), 64, 64, 3, true, 0, 1024, 2048);
  compare_operand("MN-major, 128 B, K inner", tile_to_shape(UMMA::Layout_MN_SW128_Atom<Bf16>{}, Shape<_128, _64>{}, Step<_2, _1>{}), 128, 64, 3, true, 8192, 1024, 2048);
  compare_operand("MN-major, 64 B", tile_to_shape(UMMA::Layout_MN_SW64_Atom<Bf16>{}, Shape<_64, _32>{}, Step<_2, _1>{}), 64, 32, 2, true, 32 * 64, 512, 1024);
  compare_operand("MN-major, 32 B", tile_to_shape(UMMA::Layout_MN_SW32_Atom<Bf16>{}, Shape<_32, _16>{}, Step<_2, _1>{}), 32, 16, 1, true, 16 * 32, 256, 512);
  compare_accumulator("accumulator 128 x 128", accumulator(make_shape(_128{}, _128{})), 128, 128, false);
  compare_accumulator("accumulator 64 x 64", accumulator(make_shape(_64{}, _64{})), 64, 64, false);
  compare_accumulator("accumulator 64 x 128, warp split", split_accumulator(make_shape(_64{}, _128{})), 64, 128, true);
  compare_accumulator("accumulator 32 x 128, warp split", split_accumulator(make_shape(_32{}, _128{})), 32, 128, true);
  printf("%ld of %ld mismatches\n", mismatches, compared);
  return mismatches != 0;
}
