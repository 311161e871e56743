// tcgen05: tensor memory, mma from shared or tensor memory, commits, loads and stores, fences.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../device/abi.h"
#include "async_ops.h"
#include "barriers.h"
#include "fibers.h"
#include "layouts.h"
#include "memory.h"
#include "numbers.h"
#include "warp_ops.h"

namespace emu {
namespace {
struct InstructionDescriptor {
  int sum_format, a_format, b_format, M, N;
  bool negates, a_mn_major, b_mn_major;
  explicit InstructionDescriptor(uint32_t d)
      : sum_format((d >> 4) & 3), a_format((d >> 7) & 7), b_format((d >> 10) & 7), M(int((d >> 24) & 31) * 16),
        N(int((d >> 17) & 63) * 8), negates(d >> 13 & 3), a_mn_major(d >> 15 & 1), b_mn_major(d >> 16 & 1) {}
};

struct Multiply : AsyncOp {
  uint64_t a, b;
  uint32_t d;
  bool accumulate, warp_split, a_in_tmem;
  int operand;
  InstructionDescriptor shape{0};
  Clock ordered;  // `issued` with this thread's earlier mma visible for tensor memory

  int bytes() const { return operand_bytes(operand); }
  int k_extent() const { return 32 / bytes(); }

  bool shape_exists() const {
    const int M = shape.M, N = shape.N;
    const bool plain = (M == 64 && N % 8 == 0) || (M == 128 && N % 16 == 0);
    const bool split = (M == 32 || M == 64 || M == 128) && (N == 64 || N == 128 || N == 256);
    const bool exists = N >= 8 && N <= 256 && (warp_split ? split : plain);
    if (!exists)
      report(Severity::Error, "tcgen05", site, 0, "no such instruction shape: m%d n%d%s", M, N, warp_split ? " .ws" : "");
    if (shape.sum_format != 1) report(Severity::Error, "unsupported", site, 0, "tcgen05 sum format %d", shape.sum_format);
    if (shape.negates) report(Severity::Error, "unsupported", site, 0, "tcgen05 negated operands");
    const int expected = operand == EMU_TF32 ? 2 : operand == EMU_BF16 ? 1 : 0;
    if (shape.a_format != expected || shape.b_format != expected)
      report(Severity::Error, "tcgen05", site, 0, "operand formats %d and %d do not fit the instruction kind",
             shape.a_format, shape.b_format);
    return exists;
  }

  float shared_element(uint64_t descriptor, int mn, int k, bool mn_major) const {
    const OperandLayout layout = decode_descriptor(descriptor, tcgen05_swizzle_mode(descriptor));
    const unsigned offset = operand_address(layout, mn, k, mn_major, bytes());
    check_shared_range(offset, bytes(), "tcgen05 operand", site);
    if (options.races) check_shared(access(Proxy::Async), offset, bytes(), false);
    return read_operand(shared + offset, operand);
  }

  float tmem_element(int m, int k) const {
    const int lane = a_operand_lane(shape.M, m), column = int(a & 0xffff) + k * bytes() / 4;
    if (!columns_allocated(column, 1)) {
      report(Severity::Error, "tensor-memory", site, 0, "operand in column %d, which is not allocated", column);
      return 0.0f;
    }
    if (options.races) check_tensor(tensor_access(), lane, column, false);
    uint32_t word;
    memcpy(&word, &tmem[lane][column], 4);
    return operand == EMU_TF32 ? from_tf32(word) : from_16_bits(uint16_t(word >> (k & 1 ? 16 : 0)), operand);
  }

  Access tensor_access() const { return {nullptr, options.races ? &*ordered : nullptr, slot_agent, tick, Proxy::TensorCore, site}; }

  void check_descriptor(uint64_t descriptor) const {
    if (tcgen05_swizzle_mode(descriptor) < 0)
      report(Severity::Error, "unsupported", site, 0, "tcgen05 shared-memory layout type %d", int(descriptor >> 61));
    if (((descriptor >> 46) & 3) != 1) report(Severity::Error, "tcgen05", site, 0, "descriptor version is not 1");
  }

  void run() override {
    if (!shape_exists()) return;
    if (!a_in_tmem) check_descriptor(a);
    check_descriptor(b);
    const int M = shape.M, N = shape.N, k_count = k_extent();
    std::vector<float> left(size_t(M) * k_count), right(size_t(k_count) * N), sums(N);
    for (int m = 0; m < M; m++)
      for (int k = 0; k < k_count; k++)
        left[size_t(m) * k_count + k] = a_in_tmem ? tmem_element(m, k) : shared_element(a, m, k, shape.a_mn_major);
    for (int n = 0; n < N; n++)
      for (int k = 0; k < k_count; k++) right[size_t(k) * N + n] = shared_element(b, n, k, shape.b_mn_major);
    for (int m = 0; m < M; m++) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int k = 0; k < k_count; k++) {
        const float x = left[size_t(m) * k_count + k];
        const float* y = &right[size_t(k) * N];
        for (int n = 0; n < N; n++) sums[n] += x * y[n];
      }
      store_row(m, sums.data());
    }
    statistics.mma++;
  }

  void store_row(int m, const float* sums) {
    const int first_column = int(d & 0xffff);
    for (int n = 0; n < shape.N; n++) {
      const TmemPlace place = accumulator_place(shape.M, shape.N, m, n, warp_split);
      const int column = first_column + place.column;
      if (!columns_allocated(column, 1)) {
        report(Severity::Error, "tensor-memory", site, 0, "mma writes column %d, which is not allocated", column);
        continue;
      }
      if (options.races) check_tensor(tensor_access(), place.lane, column, true, accumulate);
      float& sum = tmem[place.lane][column];
      sum = added(accumulate ? sum : 0.0f, sums[n]);
    }
  }
};

struct Commit : AsyncOp {
  unsigned barrier;
  Clock known;
  void run() override { arrive_async(barrier, known); }
};

// Later mma of the same thread see earlier ones in tensor memory without any fence; commits announce them all.
void order_mma(Multiply& op) {
  if (!options.races) return;
  op.ordered = copy_clock(op.issued);
  for (int slot = 0; slot < kAsyncSlots; slot++) {
    Tick& tick = op.ordered->at(TensorCore, first_slot_agent() + slot);
    tick = std::max(tick, current->mma_slots[slot]);
  }
  current->mma_slots[op.slot_agent - first_slot_agent()] = op.tick;
  Clock known = current->mma_clock ? current->mma_clock : zero_clock();
  for (int agent = 0; agent < num_agents(); agent++) {
    Tick& tick = known->at(HappensBefore, agent);
    tick = std::max(tick, op.issued->at(HappensBefore, agent));
  }
  known->at(HappensBefore, op.slot_agent) = op.tick;
  current->mma_clock = known;
}

void allocate(const WarpCall& call, int columns, Site site) {
  if (columns < 32 || columns > kTmemColumns || (columns & (columns - 1)))
    report(Severity::Error, "tensor-memory", site, 0, "allocation of %d columns: must be a power of two from 32 to 512",
           columns);
  const int need = std::max(1, columns / kTmemGranule);
  for (int at = 0; at + need <= kTmemColumns / kTmemGranule; at += need) {
    if (std::any_of(tmem_allocated + at, tmem_allocated + at + need, [](bool used) { return used; })) continue;
    std::fill(tmem_allocated + at, tmem_allocated + at + need, true);
    const uint32_t address = at * kTmemGranule;
    const unsigned offset = shared_offset(call.lanes[0], site);
    if (options.races) check_shared(generic_access(*current, site), offset, 4, true);
    memcpy(shared + offset, &address, 4);
    return;
  }
  report(Severity::Error, "tensor-memory", site, 0, "no %d columns left to allocate", columns);
  abandon_launch();
}

void deallocate(uint32_t address, int columns, Site site) {
  const int first = int(address & 0xffff);
  if (first % kTmemGranule || !columns_allocated(first, std::max(columns, 1)))
    report(Severity::Error, "tensor-memory", site, 0, "columns %d to %d are freed but not allocated", first,
           first + columns - 1);
  if (options.races) check_tensor_free(generic_access(*current, site), first, std::min(columns, kTmemColumns - first));
  for (int c = first / kTmemGranule; c < std::min(first + columns, kTmemColumns) / kTmemGranule; c++)
    tmem_allocated[c] = false;
}

void copy_lanes(const WarpCall& call, int first, uint32_t address, int count, bool store, Site site) {
  const int column = int(address & 0xffff), lane_field = int(address >> 16), group = first / 32 % 4;
  if (lane_field && lane_field / 32 != group)
    report(Severity::Error, "tensor-memory", site, 0, "warp %d may not touch lane %d", first / 32, lane_field);
  if (!columns_allocated(column, count)) {
    report(Severity::Error, "tensor-memory", site, 0, "%s of columns %d to %d, which are not all allocated",
           store ? "store" : "load", column, column + count - 1);
    return;
  }
  for (int i = 0; i < 32; i++) {
    auto* registers = static_cast<uint32_t*>(call.lanes[i]);
    const int lane = group * 32 + i;
    if (options.races) {
      const Access who = tcgen05_access(fibers[first + i], site);
      for (int c = 0; c < count; c++) check_tensor(who, lane, column + c, store);
    }
    if (store)
      memcpy(&tmem[lane][column], registers, size_t(count) * 4);
    else
      memcpy(registers, &tmem[lane][column], size_t(count) * 4);
  }
}
}  // namespace
}  // namespace emu

using namespace emu;

extern "C" {
void emu_tmem_allocate(void* destination, int columns) {
  const Site site = EMU_SITE;
  warp_collective(WarpOp::TmemAllocate, columns, destination, site,
                  [=](const WarpCall& call, int) { allocate(call, columns, site); });
}

void emu_tmem_deallocate(uint32_t address, int columns) {
  const Site site = EMU_SITE;
  warp_collective(WarpOp::TmemDeallocate, long(address) << 10 | columns, nullptr, site,
                  [=](const WarpCall&, int) { deallocate(address, columns, site); });
}

void emu_tcgen05_mma(uint64_t a, uint64_t b, uint32_t d, uint32_t accumulate, uint32_t descriptor, int warp_split,
                     int a_in_tmem, int operand) {
  auto op = std::make_shared<Multiply>();
  op->a = a, op->b = b, op->d = d, op->accumulate = accumulate;
  op->warp_split = warp_split, op->a_in_tmem = a_in_tmem, op->operand = operand;
  op->shape = InstructionDescriptor(descriptor);
  stamp(*op, EMU_SITE);
  order_mma(*op);
  submit_tensor(op);
}

void emu_tcgen05_lane_masks(int any) {
  if (any) report(Severity::Error, "unsupported", EMU_SITE, 0, "tcgen05.mma with a disable-output-lane mask");
}

void emu_tcgen05_commit(const void* barrier) {
  const Site site = EMU_SITE;
  auto op = std::make_shared<Commit>();
  op->barrier = mbarrier_offset(barrier, site);
  check_mbarrier_for_async(op->barrier, site);
  op->owner = current->thread;
  op->site = site;
  if (options.races && current->mma_clock) op->known = copy_clock(current->mma_clock);
  submit_tensor(op);
}

void emu_tcgen05_copy(uint32_t address, uint32_t* registers, int count, int store) {
  const Site site = EMU_SITE;
  warp_collective(store ? WarpOp::TmemStore : WarpOp::TmemLoad, long(address) << 10 | count, registers, site,
                  [=](const WarpCall& call, int first) { copy_lanes(call, first, address, count, store, site); });
}

void emu_tcgen05_before_thread_sync() {
  if (!options.races) return;
  current->clock.own[Tcgen05][HappensBefore] = current->tcgen05_tick;  // after_thread_sync raises the tensor-core order
  current->tcgen05_tick++;
}

void emu_tcgen05_after_thread_sync() {
  if (options.races) current->clock.raise(TensorCore);
}
}
