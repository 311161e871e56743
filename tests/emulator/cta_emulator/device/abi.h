// The calls that emitted device code makes into the runtime. Included by both sides, so a drift fails to compile.
#pragma once
#include <cstddef>
#include <cstdint>

// Stands in for CUtensorMap: 64-byte aligned and at most 256 bytes, the room the emitted host stub leaves.
struct alignas(64) EmuTensorMap {
  char* base;
  int64_t extent[5];        // elements
  int64_t stride_bytes[5];  // stride_bytes[0] is the element size
  int32_t box[5];           // elements
  int32_t rank;
  int32_t element_bytes;
  int32_t element_type;  // CUtensorMapDataType
  int32_t swizzle;       // 0 none, 1 32 B, 2 64 B, 3 128 B
};
static_assert(sizeof(EmuTensorMap) <= 256, "the host stub reserves 256 bytes at least");

// One __global__ function of the emitted source.
struct EmuKernel {
  const char* name;
  void (*entry)(void** arguments);
  const char* parameter_kinds;  // T tensor map, P pointer, I int32, L int64, F float
  unsigned static_shared_bytes;
  int uses_dynamic_shared;  // then its size is the last launch argument
};

// Operand types of tensor-core instructions.
enum EmuOperand : int { EMU_BF16 = 0, EMU_FP16 = 1, EMU_TF32 = 2 };

extern "C" {
// Shared memory
unsigned char* emu_dynamic_shared();
unsigned char* emu_static_shared(unsigned offset);
uint32_t emu_shared_address(const void* pointer);
// Barriers and fences
void emu_syncthreads();
void emu_named_barrier(int id, int count, int wait);
void emu_syncwarp(unsigned mask);
void emu_mbarrier_init(void* barrier, uint32_t count);
void emu_mbarrier_wait(void* barrier, uint32_t parity);
bool emu_mbarrier_test(void* barrier, uint32_t parity);
void emu_mbarrier_arrive(void* barrier);
void emu_mbarrier_expect(void* barrier, uint32_t bytes, int arrive);
void emu_fence_mbarrier_init();
void emu_fence_proxy_async();
// Bulk copies (TMA) and cp.async
void emu_tma_load(const EmuTensorMap* map, void* barrier, void* shared, int rank, const int* coordinates);
void emu_tma_store(const EmuTensorMap* map, const void* shared, int rank, const int* coordinates, int add);
void emu_bulk_load(void* shared, const void* global, void* barrier, uint32_t bytes);
void emu_bulk_store(void* global, const void* shared, uint32_t bytes, int add_float);
void emu_bulk_commit();
void emu_bulk_wait(int pending, int read_only);
void emu_cp_async(void* shared, const void* global, int bytes, int copy);
void emu_cp_async_commit();
void emu_cp_async_wait(int pending);
void emu_cp_async_arrive(void* barrier, int increment);
// Warp collectives
bool emu_elect_one();
uint32_t emu_shuffle(uint32_t value, int mode, int argument, int width, unsigned mask);
void emu_ldmatrix(const void* row, uint32_t* registers, int count, int transposed);
void emu_stmatrix(void* row, const uint32_t* registers, int count, int transposed);
void emu_mma_sync(float* d, const uint32_t* a, const uint32_t* b, int k, int operand);
void emu_setmaxnreg(int count, int increase);
// wgmma
void emu_wgmma(uint64_t a, uint64_t b, float* d, int accumulate, int n, int a_mn_major, int b_mn_major, int operand,
               const uint32_t* a_registers);
void emu_wgmma_arrive();
void emu_wgmma_commit();
void emu_wgmma_wait(int pending);
// tcgen05
void emu_tmem_allocate(void* shared_destination, int columns);
void emu_tmem_deallocate(uint32_t address, int columns);
void emu_tcgen05_mma(uint64_t a, uint64_t b, uint32_t d, uint32_t accumulate, uint32_t descriptor, int warp_split,
                     int a_in_tmem, int operand);
void emu_tcgen05_lane_masks(int any);
void emu_tcgen05_commit(const void* barrier);
void emu_tcgen05_copy(uint32_t address, uint32_t* registers, int count, int store);
void emu_tcgen05_before_thread_sync();
void emu_tcgen05_after_thread_sync();
}
