// Warp collectives: election, shuffles, matrix loads and stores, reductions, mma.sync.
#pragma once
#include "barriers.h"
#include "numbers.h"

namespace tl {
enum class DataType : int {
  kInt4, kUInt4, kInt8, kUInt8, kInt16, kUInt16, kInt32, kUInt32, kInt64, kUInt64, kFloat8_e4m3, kFloat8_e5m2,
  kFloat16, kBFloat16, kFloat16x2, kFloat32, kTensorFloat32, kFloat64
};
constexpr bool emu_supported(DataType t) {
  return t == DataType::kFloat16 || t == DataType::kBFloat16 || t == DataType::kTensorFloat32;
}
constexpr int emu_operand(DataType t) {
  return t == DataType::kFloat16 ? EMU_FP16 : t == DataType::kTensorFloat32 ? EMU_TF32 : EMU_BF16;
}

inline int get_lane_idx(int = 32) { return threadIdx.x % 32; }
inline int get_warp_idx(int = 32) { return threadIdx.x / 32; }
inline int get_warp_idx_sync(int = 32) { return threadIdx.x / 32; }
inline int get_warp_group_idx(int = 32, int = 4) { return threadIdx.x / 128; }

// One lane of every (threads / 32)-th warp; threads == 0: one lane of the block.
template <int threads>
bool tl_shuffle_elect() {
  const bool leader = emu_elect_one();
  const int warp = threadIdx.x / 32;
  if (threads == 0) return leader && warp == 0;
  constexpr int warps = (threads + 31) / 32;
  return leader && warp % (warps ? warps : 1) == 0;
}

template <uint32_t count>
void warpgroup_reg_alloc() {
  emu_setmaxnreg(count, 1);
}
template <uint32_t count>
void warpgroup_reg_dealloc() {
  emu_setmaxnreg(count, 0);
}

template <class T>
T emu_shuffle_any(T value, int mode, int argument, int width, unsigned mask) {
  static_assert(sizeof(T) <= 8, "shuffled values have at most 8 bytes");
  uint32_t words[2] = {0, 0};
  memcpy(words, &value, sizeof(T));
  words[0] = emu_shuffle(words[0], mode, argument, width, mask);
  if (sizeof(T) > 4) words[1] = emu_shuffle(words[1], mode, argument, width, mask);
  memcpy(&value, words, sizeof(T));
  return value;
}
#define EMU_SHUFFLE(name, mode)                                   \
  template <class T>                                              \
  T name(unsigned mask, T value, int argument, int width = 32) {  \
    return emu_shuffle_any(value, mode, argument, width, mask);   \
  }
EMU_SHUFFLE(shfl_sync, 0)
EMU_SHUFFLE(shfl_xor_sync, 1)
EMU_SHUFFLE(shfl_down_sync, 2)
EMU_SHUFFLE(shfl_up_sync, 3)

#define EMU_LDMATRIX(n)                                                                                          \
  inline void ptx_ldmatrix_x##n(const void* row, void* out) { emu_ldmatrix(row, (uint32_t*)out, n, 0); }        \
  inline void ptx_ldmatrix_x##n##_trans(const void* row, void* out) { emu_ldmatrix(row, (uint32_t*)out, n, 1); }
EMU_LDMATRIX(1)
EMU_LDMATRIX(2)
EMU_LDMATRIX(4)
#undef EMU_LDMATRIX

template <int transposed, class... R>
void emu_stmatrix_any(const void* row, R... values) {
  const uint32_t registers[] = {uint32_t(values)...};
  emu_stmatrix(const_cast<void*>(row), registers, sizeof...(R), transposed);
}
#define EMU_STMATRIX(n, parameters, arguments)                                                                \
  inline void ptx_stmatrix_m8n8_x##n parameters { emu_stmatrix_any<0> arguments; }                            \
  inline void ptx_stmatrix_m8n8_x##n##_trans parameters { emu_stmatrix_any<1> arguments; }                    \
  inline void ptx_stmatrix_x##n parameters { emu_stmatrix_any<0> arguments; }                                 \
  inline void ptx_stmatrix_x##n##_trans parameters { emu_stmatrix_any<1> arguments; }
EMU_STMATRIX(1, (const void* p, int a), (p, a))
EMU_STMATRIX(2, (const void* p, int a, int b), (p, a, b))
EMU_STMATRIX(4, (const void* p, int a, int b, int c, int d), (p, a, b, c, d))
#undef EMU_STMATRIX

struct SumOp {
  template <class T>
  T operator()(T a, T b) {
    return T(a + b);
  }
};
struct MaxOp {
  template <class T>
  T operator()(T a, T b) {
    return a > b ? a : b;
  }
};
struct MinOp {
  template <class T>
  T operator()(T a, T b) {
    return a < b ? a : b;
  }
};
struct BitAndOp {
  template <class T>
  T operator()(T a, T b) {
    return a & b;
  }
};
struct BitOrOp {
  template <class T>
  T operator()(T a, T b) {
    return a | b;
  }
};

// The device library's reductions use barrier ids 1 and 2 whichever group calls them; so does this.
struct SyncThreadsBarrier {
  static void sync(int) { emu_syncthreads(); }
};
template <int threads>
struct NamedBarrier {
  static void sync(int id) { emu_named_barrier(id, threads, 1); }
};

template <class Reducer, int threads, int scale, int first_thread = 0, class Sync = SyncThreadsBarrier, int batch = 1,
          int workspace_stride = 0>
struct AllReduce {
  template <class T>
  static T run(T x, T* workspace = nullptr) {
    run_values<1>(&x, workspace);
    return x;
  }
  template <class T>
  static void run_batch(T* x, T* workspace = nullptr) {
    run_values<batch>(x, workspace);
  }

 private:
  template <int count, class T>
  static void run_values(T* x, T* workspace) {
    const int thread = int(threadIdx.x) - first_thread;
    for (int offset = threads / 2; offset >= scale; offset /= 2) {
      if (offset < 32) {
        for (int i = 0; i < count; i++) x[i] = Reducer()(x[i], shfl_xor_sync(~0u, x[i], offset));
        continue;
      }
      Sync::sync(1);
      for (int i = 0; i < count; i++) workspace[thread + i * workspace_stride] = x[i];
      Sync::sync(2);
      for (int i = 0; i < count; i++) x[i] = Reducer()(x[i], workspace[(thread ^ offset) + i * workspace_stride]);
    }
  }
};

template <class T, class Reducer>
T warp_reduce(T value, Reducer reduce) {
  for (int offset = 16; offset; offset /= 2) value = reduce(value, shfl_xor_sync(~0u, value, offset));
  return value;
}
template <class T>
T warp_reduce_sum(T value) {
  return warp_reduce(value, SumOp());
}
template <class T>
T warp_reduce_max(T value) {
  return warp_reduce(value, MaxOp());
}
template <class T>
T warp_reduce_min(T value) {
  return warp_reduce(value, MinOp());
}

template <DataType A, DataType B, DataType C, int M, int N, int K, bool transposed_a, bool transposed_b,
          bool saturate = false>
void mma_sync(float* c, const unsigned* a, const unsigned* b) {
  static_assert(M == 16 && N == 8 && !transposed_a && transposed_b && !saturate, "mma.sync: m16n8, TN only");
  static_assert(A == B && C == DataType::kFloat32 && emu_supported(A), "mma.sync: bf16, fp16 or tf32, fp32 sums");
  static_assert(K == (A == DataType::kTensorFloat32 ? 8 : 16), "mma.sync: k16 for 16-bit operands, k8 for tf32");
  emu_mma_sync(c, a, b, K, emu_operand(A));
}

// Blocks in serpentine panels of panel_width rows, as the launch order of T.use_swizzle.
template <int panel_width>
dim3 rasterization2DRow() {
  const unsigned linear = blockIdx.x + blockIdx.y * gridDim.x, panel_blocks = panel_width * gridDim.x;
  const unsigned panel = linear / panel_blocks, inside = linear % panel_blocks;
  const unsigned rows_left = gridDim.y - panel * panel_width, rows = rows_left < panel_width ? rows_left : panel_width;
  const unsigned column = inside / rows;
  return dim3(panel % 2 ? gridDim.x - 1 - column : column, panel * panel_width + inside % rows, blockIdx.z);
}
}  // namespace tl

template <class T>
T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
  return tl::shfl_sync(mask, v, lane, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32) {
  return tl::shfl_xor_sync(mask, v, lanes, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, int delta, int width = 32) {
  return tl::shfl_down_sync(mask, v, delta, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, int delta, int width = 32) {
  return tl::shfl_up_sync(mask, v, delta, width);
}
