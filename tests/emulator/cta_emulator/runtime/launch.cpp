// Runs the blocks of a launch one after the other.
#include <dlfcn.h>
#include <link.h>
#include <vector_types.h>

#include <cstdint>

#include "../device/abi.h"
#include "async_ops.h"
#include "barriers.h"
#include "fibers.h"
#include "launch.h"
#include "memory.h"
#include "races.h"
#include "warp_ops.h"
#include "wgmma.h"

uint3 blockIdx;
dim3 blockDim, gridDim;

namespace emu {
namespace {
// Code base for sites, and the range of the library's own constants.
int find_library(dl_phdr_info* info, size_t, void* anchor) {
  uintptr_t low = UINTPTR_MAX, high = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    low = std::min(low, uintptr_t(info->dlpi_addr + segment.p_vaddr));
    high = std::max(high, uintptr_t(info->dlpi_addr + segment.p_vaddr + segment.p_memsz));
  }
  if (uintptr_t(anchor) < low || uintptr_t(anchor) >= high) return 0;
  set_code_base(info->dlpi_addr);
  set_static_data(low, high);
  return 1;
}

void check_tmem_at_exit() {
  for (int c = 0; c < kTmemColumns / kTmemGranule; c++)
    if (tmem_allocated[c])
      report(Severity::Error, "tensor-memory", 0, 0, "columns from %d are never freed", c * kTmemGranule);
}

bool run_one_block(const EmuKernel& kernel, void** arguments, const LaunchShape& shape) {
  start_block_memory(kernel.static_shared_bytes, shape.dynamic_shared_bytes);
  reset_shadow();
  reset_barriers();
  reset_async();
  reset_warps();
  reset_wgmma();
  statistics.blocks++;
  try {
    if (!run_block(shape.block, kernel.entry, arguments)) return false;
    check_async_at_exit();
  } catch (const LaunchAbandoned&) {
    return false;
  }
  check_barriers_at_exit();
  check_wgmma_at_exit();
  check_warps_at_exit();
  check_tmem_at_exit();
  return true;
}
}  // namespace

bool launch(const EmuKernel& kernel, void** arguments, const LaunchShape& shape) {
  dl_iterate_phdr(find_library, reinterpret_cast<void*>(kernel.entry));
  seed_random(options.seed);
  num_threads = int(shape.block[0] * shape.block[1] * shape.block[2]);
  if (num_threads <= 0 || num_threads > 1024 || num_threads % 32) {
    report(Severity::Error, "launch", 0, 0, "%d threads: the emulator runs whole warps, at most 1024 threads", num_threads);
    return false;
  }
  forget_clocks();
  gridDim = dim3(shape.grid[0], shape.grid[1], shape.grid[2]);
  blockDim = dim3(shape.block[0], shape.block[1], shape.block[2]);
  for (unsigned z = 0; z < shape.grid[2]; z++)
    for (unsigned y = 0; y < shape.grid[1]; y++)
      for (unsigned x = 0; x < shape.grid[0]; x++) {
        blockIdx = uint3{x, y, z};
        if (!run_one_block(kernel, arguments, shape)) {
          char text[96];
          snprintf(text, sizeof text, "in block (%u, %u, %u)", x, y, z);
          append_detail(text);
          return false;
        }
      }
  return true;
}

extern "C" {
void emu_configure(int schedule, unsigned seed, int races, long max_switches) {
  options = {Schedule(schedule), seed, bool(races), max_switches};
  statistics = {};
  clear_findings();
}
long emu_statistic(int i) {
  const long values[] = {statistics.switches, statistics.accesses, statistics.mma, statistics.bulk_copies, statistics.blocks};
  return values[i];
}
}
}  // namespace emu
