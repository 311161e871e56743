#include "barriers.h"

#include <cstdio>
#include <map>
#include <set>
#include <vector>

#include "../device/abi.h"
#include "async_ops.h"
#include "fibers.h"
#include "memory.h"

namespace emu {
namespace {
struct Mbarrier {
  int count = 0, pending = 0;
  long bytes = 0;  // expected minus completed
  uint32_t phase = 0;
  Gathered gathered;
  Clock completed[2];  // by parity
  std::vector<int> waiters;
  int init_thread = 0;
  Tick init_tick = 0;
  bool init_fenced = false;
  bool phase_has_bytes = false;
  bool bytes_unseen[2] = {false, false};  // by parity: a phase with bytes that no thread has waited for
};
std::map<unsigned, Mbarrier> mbarriers;
bool holds_mbarrier[kSharedArena / 8];  // by 8 bytes, for every store to look at

struct NamedBarrier {
  int arrived = 0;
  Gathered gathered;
  std::vector<int> waiters;
  std::set<int> warps, previous_warps;
  int count = 0;
};
std::map<int, NamedBarrier> named_barriers;

void release_into(Gathered& gathered) {
  progress++;
  if (!options.races) return;
  gathered.add(current->clock);
  current->clock.advance();
}

void complete_if_done(Mbarrier& barrier, unsigned offset, Site site) {
  if (barrier.pending < 0)
    report(Severity::Error, "mbarrier", site, 0, "more arrivals than the count %d in one phase (mbarrier at shared offset %u)",
           barrier.count, offset);
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  if (options.races) barrier.completed[barrier.phase & 1] = barrier.gathered.take();
  barrier.bytes_unseen[barrier.phase & 1] = barrier.phase_has_bytes;
  barrier.phase_has_bytes = false;
  barrier.phase++;
  barrier.pending = barrier.count;
  std::vector<int> woken;
  woken.swap(barrier.waiters);
  for (int thread : woken) wake(thread);
}

Mbarrier& find_mbarrier(unsigned offset, Site site) {
  auto found = mbarriers.find(offset);
  if (found != mbarriers.end()) return found->second;
  report(Severity::Error, "mbarrier", site, 0, "mbarrier at shared offset %u is used before it is initialised", offset);
  abandon_launch();
}

Mbarrier& mbarrier_for_thread(const void* p, unsigned& offset, Site site) {
  offset = shared_offset(p, site);
  Mbarrier& barrier = find_mbarrier(offset, site);
  if (options.races && barrier.init_thread != current->thread &&
      current->clock.seen(HappensBefore, agent_of(Generic, barrier.init_thread)) < barrier.init_tick)
    report(Severity::Error, "mbarrier", site, 0,
           "mbarrier at shared offset %u is used by thread %d without synchronising with its initialisation", offset,
           current->thread);
  return barrier;
}

bool phase_done(const Mbarrier& barrier, uint32_t parity) { return (barrier.phase & 1) != parity; }

void acquire_phase(Mbarrier& barrier, uint32_t parity) {
  barrier.bytes_unseen[parity] = false;
  if (options.races && barrier.completed[parity]) current->clock.acquire(barrier.completed[parity]);
}

// Many polls in a row during which nothing happened at all: the loop can never end.
void count_fruitless_poll(unsigned offset, Site site) {
  static long last_progress = -1, fruitless = 0;
  fruitless = progress == last_progress ? fruitless + 1 : 0;
  last_progress = progress;
  if (fruitless < 64L * num_threads) return;
  report(Severity::Error, "deadlock", site, 0, "polling the mbarrier at shared offset %u without any progress", offset);
  describe_barriers();
  abandon_launch();
}

void check_parity(uint32_t parity, Site site) {
  if (parity > 1) report(Severity::Error, "mbarrier", site, 0, "parity %u: must be 0 or 1", parity);
}

void check_named_barrier(int id, int count, const NamedBarrier& barrier, Site site) {
  if (count % 32 || count <= 0) report(Severity::Error, "named-barrier", site, 0, "count %d is no multiple of 32", count);
  if (barrier.arrived && barrier.count != count)
    report(Severity::Error, "named-barrier", site, 0, "id %d: counts %d and %d in one phase", id, barrier.count, count);
}

void check_named_barrier_warps(int id, int count, const NamedBarrier& barrier, Site site) {
  if (barrier.warps.size() * 32 > size_t(count))
    report(Severity::Error, "named-barrier", site, 0, "id %d of count %d is reached by %zu warps: two groups share it", id,
           count, barrier.warps.size());
}

void open_named_barrier(int id, NamedBarrier& barrier, bool waits, Site site) {
  if (!barrier.previous_warps.empty() && barrier.previous_warps != barrier.warps)
    report(Severity::Warning, "named-barrier", site, 0,
           "id %d is used by different groups of warps (they start at warps %d and %d): safe only if never at once", id,
           *barrier.previous_warps.begin(), *barrier.warps.begin());
  barrier.previous_warps.swap(barrier.warps);
  barrier.warps.clear();
  barrier.arrived = 0;
  const Clock published = options.races ? barrier.gathered.take() : Clock();
  std::vector<int> woken;
  woken.swap(barrier.waiters);
  for (int thread : woken) {
    if (options.races) fibers[thread].clock.acquire(published);
    wake(thread);
  }
  if (waits && options.races) current->clock.acquire(published);
}

void use_named_barrier(int id, int count, bool waits, Site site) {
  if (id < 0 || id > 15) {
    report(Severity::Error, "named-barrier", site, 0, "id %d: there are 16, hardware uses id %d", id, id & 15);
    id &= 15;
  }
  NamedBarrier& barrier = named_barriers[id];
  check_named_barrier(id, count, barrier, site);
  release_into(barrier.gathered);
  barrier.count = count;
  barrier.arrived++;
  barrier.warps.insert(warp_of(current->thread));
  check_named_barrier_warps(id, count, barrier, site);
  if (barrier.arrived == count)
    open_named_barrier(id, barrier, waits, site);
  else if (waits) {
    barrier.waiters.push_back(current->thread);
    block_on("barrier id %d of %d threads", id, count);
  }
}
}  // namespace

void reset_barriers() {
  for (const auto& [offset, barrier] : mbarriers) holds_mbarrier[offset / 8] = false;
  mbarriers.clear();
  named_barriers.clear();
}

bool touches_mbarrier(unsigned offset, unsigned bytes) {
  for (unsigned i = offset / 8; i <= (offset + bytes - 1) / 8; i++)
    if (holds_mbarrier[i]) return true;
  return false;
}

void check_barriers_at_exit() {
  for (const auto& [offset, barrier] : mbarriers) {
    if (barrier.bytes)
      report(Severity::Error, "mbarrier", 0, 0, "mbarrier at shared offset %u ends with %ld bytes outstanding", offset,
             barrier.bytes);
    if (barrier.bytes_unseen[0] || barrier.bytes_unseen[1])
      report(Severity::Error, "in-flight", 0, 0, "nobody waited for the last bytes of the mbarrier at shared offset %u",
             offset);
    if (barrier.pending != barrier.count)
      report(Severity::Warning, "mbarrier", 0, 0, "mbarrier at shared offset %u ends within a phase (%d of %d arrivals left)",
             offset, barrier.pending, barrier.count);
  }
  for (const auto& [id, barrier] : named_barriers)
    if (barrier.arrived)
      report(Severity::Error, "named-barrier", 0, 0, "id %d ends with %d of %d threads arrived", id, barrier.arrived,
             barrier.count);
}

void describe_barriers() {
  for (const auto& [offset, barrier] : mbarriers) {
    char text[160];
    snprintf(text, sizeof text, "mbarrier at shared offset %u: phase %u, %d of %d arrivals left, %ld bytes left", offset,
             barrier.phase, barrier.pending, barrier.count, barrier.bytes);
    append_detail(text);
  }
}

unsigned mbarrier_offset(const void* p, Site site) {
  unsigned offset;
  mbarrier_for_thread(p, offset, site);
  return offset;
}

void check_mbarrier_for_async(unsigned offset, Site site) {
  const Mbarrier& barrier = find_mbarrier(offset, site);
  const Tick visible = current->clock.seen(AsyncProxy, agent_of(Generic, barrier.init_thread));
  if (options.races && !barrier.init_fenced && visible < barrier.init_tick)
    report(Severity::Error, "mbarrier", site, 0,
           "mbarrier at shared offset %u: initialised without a fence for the asynchronous proxy", offset);
}

void complete_bytes(unsigned offset, unsigned bytes, int slot_agent, Tick tick) {
  Mbarrier& barrier = find_mbarrier(offset, 0);
  barrier.bytes -= bytes;
  barrier.phase_has_bytes = true;
  if (options.races) barrier.gathered.add_slot(slot_agent, tick, true);
  complete_if_done(barrier, offset, 0);
}

void arrive_async(unsigned offset, const Clock& known) {
  Mbarrier& barrier = find_mbarrier(offset, 0);
  if (options.races) barrier.gathered.add(known);
  barrier.pending--;
  complete_if_done(barrier, offset, 0);
}

void arrive_after_copies(unsigned offset, bool increment, const ThreadClock& clock) {
  Mbarrier& barrier = find_mbarrier(offset, 0);
  if (options.races) barrier.gathered.add(clock);
  if (!increment) barrier.pending--;
  complete_if_done(barrier, offset, 0);
}
}  // namespace emu

using namespace emu;

extern "C" {
void emu_syncthreads() { use_named_barrier(0, num_threads, true, EMU_SITE); }

void emu_named_barrier(int id, int count, int wait) {
  maybe_yield();
  use_named_barrier(id, count ? count : num_threads, wait, EMU_SITE);
}

void emu_mbarrier_init(void* p, uint32_t count) {
  const Site site = EMU_SITE;
  const unsigned offset = shared_offset(p, site);
  if (offset % 8) report(Severity::Error, "mbarrier", site, 0, "mbarrier at shared offset %u is not 8-byte aligned", offset);
  if (count == 0 || count >= 1u << 20) report(Severity::Error, "mbarrier", site, 0, "count %u is not allowed", count);
  if (mbarriers.count(offset))
    report(Severity::Error, "mbarrier", site, 0, "mbarrier at shared offset %u is initialised twice", offset);
  holds_mbarrier[offset / 8] = true;
  Mbarrier& barrier = mbarriers[offset];
  barrier.count = barrier.pending = int(count);
  barrier.init_thread = current->thread;
  barrier.init_tick = current->clock.now();
}

void emu_mbarrier_wait(void* p, uint32_t parity) {
  const Site site = EMU_SITE;
  maybe_yield();
  unsigned offset;
  Mbarrier& barrier = mbarrier_for_thread(p, offset, site);
  check_parity(parity, site);
  parity &= 1;
  while (!phase_done(barrier, parity)) {
    barrier.waiters.push_back(current->thread);
    block_on("parity %u of the mbarrier at shared offset %u (site %x)", parity, offset, site);
  }
  acquire_phase(barrier, parity);
}

bool emu_mbarrier_test(void* p, uint32_t parity) {
  const Site site = EMU_SITE;
  unsigned offset;
  Mbarrier& barrier = mbarrier_for_thread(p, offset, site);
  check_parity(parity, site);
  if (!phase_done(barrier, parity & 1)) {  // polling must not starve the others, nor work in flight
    count_fruitless_poll(offset, site);
    run_async_step();
    yield_to_others();
  }
  if (!phase_done(barrier, parity & 1)) return false;
  acquire_phase(barrier, parity & 1);
  return true;
}

void emu_mbarrier_arrive(void* p) {
  const Site site = EMU_SITE;
  maybe_yield();
  unsigned offset;
  Mbarrier& barrier = mbarrier_for_thread(p, offset, site);
  release_into(barrier.gathered);
  barrier.pending--;
  complete_if_done(barrier, offset, site);
}

void emu_mbarrier_expect(void* p, uint32_t bytes, int arrive) {
  const Site site = EMU_SITE;
  unsigned offset;
  Mbarrier& barrier = mbarrier_for_thread(p, offset, site);
  barrier.bytes += bytes;
  if (!arrive) return;
  release_into(barrier.gathered);
  barrier.pending--;
  complete_if_done(barrier, offset, site);
}

void emu_fence_mbarrier_init() {
  for (auto& [offset, barrier] : mbarriers)
    if (barrier.init_thread == current->thread) barrier.init_fenced = true;
}

void emu_fence_proxy_async() {
  if (!options.races) return;
  current->clock.raise(AsyncProxy);
  current->clock.advance();
}
}
