// wgmma: each warp multiplies its 16 rows; operands are read when the operation runs, anywhere between issue and wait.
#include "wgmma.h"

#include <deque>
#include <memory>
#include <vector>

#include "../device/abi.h"
#include "async_ops.h"
#include "fibers.h"
#include "layouts.h"
#include "memory.h"
#include "numbers.h"
#include "warp_ops.h"

namespace emu {
int wgmma_in_flight = 0;
namespace {
struct WgmmaLane {
  float* d;
  const uint32_t* a;
};

struct WarpMultiply {
  uint64_t a, b;
  bool accumulate, a_mn_major, b_mn_major;
  int n, operand, warp;
  WgmmaLane lanes[32];
  int slot_agent;
  Tick tick;
  Clock issued;
  Site site;
  bool done = false;

  bool a_in_registers() const { return lanes[0].a != nullptr; }
  int k_extent() const { return 32 / operand_bytes(operand); }

  float shared_element(uint64_t descriptor, int mn, int k, bool mn_major) const {
    const int bytes = operand_bytes(operand);
    const OperandLayout layout = decode_descriptor(descriptor, wgmma_swizzle_mode(descriptor));
    const unsigned offset = operand_address(layout, mn, k, mn_major, bytes);
    check_shared_range(offset, bytes, "wgmma operand", site);
    if (options.races) check_shared({nullptr, &*issued, slot_agent, tick, Proxy::Async, site}, offset, bytes, false);
    return read_operand(shared + offset, operand);
  }

  float register_element(int m, int k) const {  // rows m and m + 8, columns k and k + half of the k extent
    const int half = k_extent() / 2;
    const int word = m / 8 + k / half * 2;
    if (operand == EMU_TF32) return from_tf32(lanes[m % 8 * 4 + k % half].a[word]);
    return from_16_bits(uint16_t(lanes[m % 8 * 4 + k % half / 2].a[word] >> (16 * (k & 1))), operand);
  }

  void run() {
    if (done) return;
    done = true;
    const int k_count = k_extent();
    std::vector<float> left(16 * k_count), right(size_t(k_count) * n), sums(n);
    for (int m = 0; m < 16; m++)
      for (int k = 0; k < k_count; k++)
        left[m * k_count + k] =
            a_in_registers() ? register_element(m, k) : shared_element(a, warp % 4 * 16 + m, k, a_mn_major);
    for (int column = 0; column < n; column++)
      for (int k = 0; k < k_count; k++) right[size_t(k) * n + column] = shared_element(b, column, k, b_mn_major);
    for (int m = 0; m < 16; m++) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int k = 0; k < k_count; k++) {
        const float x = left[m * k_count + k];
        const float* y = &right[size_t(k) * n];
        for (int column = 0; column < n; column++) sums[column] += x * y[column];
      }
      store_row(m, sums.data());
    }
    statistics.mma++;
  }

  void store_row(int m, const float* sums) {
    for (int column = 0; column < n; column++) {
      float& d = lanes[m % 8 * 4 + column % 8 / 2].d[column / 8 * 4 + m / 8 * 2 + column % 2];
      d = added(accumulate ? d : 0.0f, sums[column]);
    }
  }
};

using Group = std::vector<std::shared_ptr<WarpMultiply>>;
struct WarpState {
  Group open;
  std::deque<Group> committed;
  long issued = 0;  // operations in all, the last of them at:
  Site last_site = 0;
  bool fenced = false;  // wgmma.fence since the registers were last handed back
};
std::vector<WarpState> warps;

void issue(const WarpCall& call, int first, WarpMultiply request) {
  auto op = std::make_shared<WarpMultiply>(std::move(request));
  WarpState& warp = warps[op->warp];
  if (!warp.fenced)
    report(Severity::Error, "wgmma", op->site, 0, "issued without warpgroup_arrive after the registers were last waited for");
  for (int lane = 0; lane < 32; lane++) op->lanes[lane] = *static_cast<WgmmaLane*>(call.lanes[lane]);
  op->slot_agent = take_slot(op->tick);
  if (options.races) {
    Gathered gathered;
    for (int lane = 0; lane < 32; lane++) {
      gathered.add(fibers[first + lane].clock);
      fibers[first + lane].clock.advance();
    }
    op->issued = gathered.take();
  }
  warp.issued++;
  warp.last_site = op->site;
  warp.open.push_back(op);
  wgmma_in_flight++;
  if (options.schedule == Schedule::Eager || (options.schedule == Schedule::Random && random_below(2))) {
    for (auto& group : warp.committed)  // issue order holds within a warp
      for (auto& earlier : group) earlier->run();
    for (auto& earlier : warp.open) earlier->run();
  }
}

void finish_group(int warp, int first) {
  for (auto& op : warps[warp].committed.front()) {
    op->run();
    wgmma_in_flight--;
    if (!options.races) continue;
    Gathered gathered;
    gathered.add_slot(op->slot_agent, op->tick, true);
    const Clock known = gathered.take();
    for (int lane = 0; lane < 32; lane++) fibers[first + lane].clock.acquire(known);
  }
  warps[warp].committed.pop_front();
}

bool overlaps(const void* p, unsigned bytes, const void* start, size_t size) {
  return uintptr_t(p) < uintptr_t(start) + size && uintptr_t(p) + bytes > uintptr_t(start);
}

void check_against(const WarpMultiply& op, const void* p, unsigned bytes, bool write, Site site) {
  const WgmmaLane& lane = op.lanes[current->thread % 32];
  if (overlaps(p, bytes, lane.d, size_t(op.n) * 2))
    report(Severity::Error, "wgmma", site, op.site, "%s of accumulator registers before wgmma.wait_group",
           write ? "write" : "read");
  if (write && lane.a && overlaps(p, bytes, lane.a, 16))
    report(Severity::Error, "wgmma", site, op.site, "write to operand registers before wgmma.wait_group");
}
}  // namespace

void check_registers_in_flight(const void* p, unsigned bytes, bool write, Site site) {
  const WarpState& warp = warps[warp_of(current->thread)];
  for (const auto& op : warp.open) check_against(*op, p, bytes, write, site);
  for (const auto& group : warp.committed)
    for (const auto& op : group) check_against(*op, p, bytes, write, site);
}

void reset_wgmma() {
  warps.assign((num_threads + 31) / 32, WarpState());
  wgmma_in_flight = 0;
}

void check_wgmma_at_exit() {
  const WarpState none;
  for (size_t first = 0; first < warps.size(); first += 4)
    for (size_t i = first + 1; i < first + 4; i++) {
      const WarpState &one = warps[first], &other = i < warps.size() ? warps[i] : none;
      if (one.issued != other.issued)
        report(Severity::Error, "wgmma", one.issued ? one.last_site : other.last_site, 0,
               "warp %zu issues %ld wgmma, warp %zu of its warpgroup %ld", first,
               one.issued, i, other.issued);
    }
  if (wgmma_in_flight)
    report(Severity::Error, "wgmma", 0, 0, "the block ends with %d wgmma operations that nobody waited for", wgmma_in_flight);
}
}  // namespace emu

using namespace emu;

extern "C" {
void emu_wgmma(uint64_t a, uint64_t b, float* d, int accumulate, int n, int a_mn_major, int b_mn_major, int operand,
               const uint32_t* a_registers) {
  const Site site = EMU_SITE;
  WgmmaLane mine{d, a_registers};
  warp_collective(WarpOp::Wgmma, n * 4 + operand, &mine, site, [=](const WarpCall& call, int first) {
    WarpMultiply request{};
    request.a = a, request.b = b, request.accumulate = accumulate;
    request.a_mn_major = a_mn_major, request.b_mn_major = b_mn_major;
    request.n = n, request.operand = operand, request.warp = warp_of(first), request.site = site;
    issue(call, first, std::move(request));
  });
}

void emu_wgmma_arrive() {
  warp_collective(WarpOp::WgmmaArrive, 0, nullptr, EMU_SITE,
                  [](const WarpCall&, int first) { warps[warp_of(first)].fenced = true; });
}

void emu_wgmma_commit() {
  warp_collective(WarpOp::WgmmaCommit, 0, nullptr, EMU_SITE, [](const WarpCall&, int first) {
    WarpState& warp = warps[warp_of(first)];
    warp.committed.push_back(std::move(warp.open));
    warp.open.clear();
  });
}

void emu_wgmma_wait(int pending) {
  warp_collective(WarpOp::WgmmaWait, pending, nullptr, EMU_SITE, [=](const WarpCall&, int first) {
    WarpState& warp = warps[warp_of(first)];
    while (int(warp.committed.size()) > pending) finish_group(warp_of(first), first);
    warp.fenced = false;
  });
}
}
