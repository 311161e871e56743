#include "warp_ops.h"

#include <algorithm>
#include <cstring>

#include "../device/abi.h"
#include "memory.h"
#include "numbers.h"
#include "races.h"

namespace emu {
std::vector<WarpCall> warp_calls;

const char* warp_op_name(WarpOp op) {
  static const char* names[] = {"nothing", "__syncwarp", "elect", "a shuffle", "ldmatrix", "stmatrix", "mma.sync", "wgmma",
                                "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "tcgen05.alloc",
                                "tcgen05.dealloc", "tcgen05.ld", "tcgen05.st", "setmaxnreg"};
  return names[int(op)];
}

namespace {
constexpr int kRegisterFile = 65536;
std::vector<std::vector<int>> register_counts;  // by warp: what setmaxnreg asked for, in order
}  // namespace

void reset_warps() {
  warp_calls.assign((num_threads + 31) / 32, WarpCall());
  register_counts.assign(warp_calls.size(), {});
}

// The launch gives every thread the same count, unknown here but at most an even share of the register file. What
// setmaxnreg adds comes from what it gave back; where the last counts do not fit, some warp waits for ever.
void check_warps_at_exit() {
  const int share = std::min(256, kRegisterFile / num_threads / 8 * 8);
  long total = 0;
  for (size_t warp = 0; warp < register_counts.size(); warp++) {
    const auto& counts = register_counts[warp];
    total += 32L * (counts.empty() ? share : counts.back());
    if (warp % 4 && counts != register_counts[warp - 1])
      report(Severity::Error, "registers", 0, 0, "warps %zu and %zu of one warpgroup run different setmaxnreg", warp - 1, warp);
  }
  if (total > long(share) * num_threads)
    report(Severity::Error, "registers", 0, 0, "setmaxnreg leaves %ld registers in use, the block was launched with at most %ld",
           total, long(share) * num_threads);
}

namespace {
void check_full_mask(unsigned mask, Site site) {
  if (mask != 0xffffffffu)
    report(Severity::Error, "unsupported", site, 0, "warp mask %08x: only full warps are emulated", mask);
}

struct MatrixLane {
  unsigned char* row;
  uint32_t* registers;
};

// Rows of the 8x8 matrices: matrix i, row r is addressed by lane 8 i + r.
unsigned char* matrix_row(const WarpCall& call, int first, int matrix, int row, bool write, Site site) {
  const int lane = matrix * 8 + row;
  unsigned char* p = static_cast<MatrixLane*>(call.lanes[lane])->row;
  const unsigned offset = shared_offset(p, site);
  if (offset % 16)
    report(Severity::Error, "misaligned", site, 0, "matrix row at shared offset %u is not 16-byte aligned", offset);
  check_shared_range(offset, 16, write ? "stmatrix" : "ldmatrix", site);
  if (options.races) check_shared(generic_access(fibers[first + lane], site), offset, 16, write);
  return p;
}

// Lane l holds, of matrix i, elements (l / 4, 2 (l % 4)) and the next one; transposed: with rows and columns swapped.
void load_matrices(const WarpCall& call, int first, int count, bool transposed, Site site) {
  uint16_t elements[4][8][8];
  for (int i = 0; i < count; i++)
    for (int r = 0; r < 8; r++) memcpy(elements[i][r], matrix_row(call, first, i, r, false, site), 16);
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < count; i++) {
      const int r = lane / 4, c = lane % 4 * 2;
      const uint32_t low = transposed ? elements[i][c][r] : elements[i][r][c];
      const uint32_t high = transposed ? elements[i][c + 1][r] : elements[i][r][c + 1];
      static_cast<MatrixLane*>(call.lanes[lane])->registers[i] = low | high << 16;
    }
}

void store_matrices(const WarpCall& call, int first, int count, bool transposed, Site site) {
  uint16_t elements[4][8][8];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < count; i++) {
      const int r = lane / 4, c = lane % 4 * 2;
      const uint32_t pair = static_cast<MatrixLane*>(call.lanes[lane])->registers[i];
      (transposed ? elements[i][c][r] : elements[i][r][c]) = uint16_t(pair);
      (transposed ? elements[i][c + 1][r] : elements[i][r][c + 1]) = uint16_t(pair >> 16);
    }
  for (int i = 0; i < count; i++)
    for (int r = 0; r < 8; r++) memcpy(matrix_row(call, first, i, r, true, site), elements[i][r], 16);
}

struct MmaLane {
  float* d;
  const uint32_t *a, *b;
};

void gather_fragments(const WarpCall& call, int operand, float a[16][16], float b[16][8]) {
  for (int lane = 0; lane < 32; lane++) {
    const MmaLane& mine = *static_cast<MmaLane*>(call.lanes[lane]);
    const int group = lane / 4, t = lane % 4;
    if (operand == EMU_TF32) {
      for (int i = 0; i < 4; i++) a[group + (i & 1) * 8][t + (i >> 1) * 4] = from_tf32(mine.a[i]);
      for (int i = 0; i < 2; i++) b[t + i * 4][group] = from_tf32(mine.b[i]);
      continue;
    }
    for (int half = 0; half < 2; half++) {
      for (int i = 0; i < 4; i++)
        a[group + (i & 1) * 8][t * 2 + half + (i >> 1) * 8] = from_16_bits(uint16_t(mine.a[i] >> (16 * half)), operand);
      for (int i = 0; i < 2; i++)
        b[t * 2 + half + i * 8][group] = from_16_bits(uint16_t(mine.b[i] >> (16 * half)), operand);
    }
  }
}

void multiply_fragments(const WarpCall& call, int k_extent, int operand) {
  float a[16][16], b[16][8];
  gather_fragments(call, operand, a, b);
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + (i >> 1) * 8, column = lane % 4 * 2 + (i & 1);
      float sum = 0;
      for (int k = 0; k < k_extent; k++) sum += a[row][k] * b[k][column];
      float& d = static_cast<MmaLane*>(call.lanes[lane])->d[i];
      d = added(d, sum);
    }
  statistics.mma++;
}

struct ShuffleLane {
  uint32_t value, result;
  int argument, width;
};

int shuffle_source(int lane, int mode, int argument, int width) {
  const int base = lane / width * width;
  const int source = mode == 0 ? base + argument % width : mode == 1 ? lane ^ argument : mode == 2 ? lane + argument
                                                                                                : lane - argument;
  return source < base || source >= base + width ? lane : source;
}
}  // namespace
}  // namespace emu

using namespace emu;

extern "C" {
void emu_syncwarp(unsigned mask) {
  const Site site = EMU_SITE;
  check_full_mask(mask, site);
  warp_collective(WarpOp::SyncWarp, 0, nullptr, site, [](const WarpCall&, int first) {
    if (!options.races) return;
    Gathered gathered;
    for (int i = 0; i < 32; i++) {
      gathered.add(fibers[first + i].clock);
      fibers[first + i].clock.advance();
    }
    const Clock all = gathered.take();
    for (int i = 0; i < 32; i++) fibers[first + i].clock.acquire(all);
  });
}

bool emu_elect_one() {
  warp_collective(WarpOp::Elect, 0, nullptr, EMU_SITE, [](const WarpCall&, int) {});
  return current->thread % 32 == 0;
}

uint32_t emu_shuffle(uint32_t value, int mode, int argument, int width, unsigned mask) {
  const Site site = EMU_SITE;
  check_full_mask(mask, site);
  ShuffleLane mine{value, value, argument, width};
  warp_collective(WarpOp::Shuffle, mode, &mine, site, [mode](const WarpCall& call, int) {
    for (int lane = 0; lane < 32; lane++) {
      auto& to = *static_cast<ShuffleLane*>(call.lanes[lane]);
      to.result = static_cast<ShuffleLane*>(call.lanes[shuffle_source(lane, mode, to.argument, to.width)])->value;
    }
  });
  return mine.result;
}

void emu_ldmatrix(const void* row, uint32_t* registers, int count, int transposed) {
  const Site site = EMU_SITE;
  MatrixLane mine{static_cast<unsigned char*>(const_cast<void*>(row)), registers};
  warp_collective(WarpOp::LoadMatrix, count * 2 + transposed, &mine, site,
                  [=](const WarpCall& call, int first) { load_matrices(call, first, count, transposed, site); });
}

void emu_stmatrix(void* row, const uint32_t* registers, int count, int transposed) {
  const Site site = EMU_SITE;
  MatrixLane mine{static_cast<unsigned char*>(row), const_cast<uint32_t*>(registers)};
  warp_collective(WarpOp::StoreMatrix, count * 2 + transposed, &mine, site,
                  [=](const WarpCall& call, int first) { store_matrices(call, first, count, transposed, site); });
}

void emu_mma_sync(float* d, const uint32_t* a, const uint32_t* b, int k, int operand) {
  MmaLane mine{d, a, b};
  warp_collective(WarpOp::Mma, k * 4 + operand, &mine, EMU_SITE,
                  [=](const WarpCall& call, int) { multiply_fragments(call, k, operand); });
}

void emu_setmaxnreg(int count, int increase) {
  const Site site = EMU_SITE;
  warp_collective(WarpOp::SetRegisters, count * 2 + increase, nullptr, site,
                  [=](const WarpCall&, int first) { register_counts[warp_of(first)].push_back(count); });
  if (count % 8 || count < 24 || count > 256)
    report(Severity::Error, "registers", site, 0, "setmaxnreg %d: must be a multiple of 8 between 24 and 256", count);
}
}
