// cp.async: copies of 4 to 16 bytes that land any time between issue and wait.
#include <cstring>

#include "../device/abi.h"
#include "barriers.h"
#include "fibers.h"
#include "memory.h"
#include "races.h"

namespace emu {
namespace {
void land(CpAsyncCopy& copy) {
  if (copy.landed) return;
  copy.landed = true;
  if (copy.copy)
    memcpy(copy.shared, copy.global, copy.bytes);
  else
    memset(copy.shared, 0, copy.bytes);
}

bool lands_at_issue() {
  return options.schedule == Schedule::Eager || (options.schedule == Schedule::Random && random_below(2));
}

// Groups complete in order, so one tick says how far this thread's copies are known to have landed.
Tick land_all_but(int pending) {
  auto& groups = current->copy_groups;
  for (; int(groups.size()) > pending; groups.pop_front())
    for (auto& copy : groups.front()) land(copy);
  return current->copy_group - 1 - Tick(groups.size());
}
}  // namespace
}  // namespace emu

using namespace emu;

extern "C" {
void emu_cp_async(void* to, const void* global, int bytes, int copy) {
  const Site site = EMU_SITE;
  const unsigned offset = shared_offset(to, site);
  check_shared_range(offset, bytes, "cp.async", site);
  if (offset % bytes || uintptr_t(global) % bytes)
    report(Severity::Error, "misaligned", site, 0, "cp.async of %d bytes", bytes);
  if (copy && !check_global(global, bytes, "cp.async read", site)) copy = 0;
  if (options.races) check_shared(cp_async_access(*current, current->copy_group, site), offset, bytes, true);
  CpAsyncCopy request{to, global, bytes, bool(copy), false};
  if (lands_at_issue()) land(request);
  current->open_copies.push_back(request);
}

void emu_cp_async_commit() {
  current->copy_groups.push_back(std::move(current->open_copies));
  current->open_copies.clear();
  current->copy_group++;
}

void emu_cp_async_wait(int pending) {
  if (pending == 0 && !current->open_copies.empty()) emu_cp_async_commit();
  current->clock.own[CpAsync][HappensBefore] = land_all_but(pending);
}

void emu_cp_async_arrive(void* barrier, int increment) {
  const Site site = EMU_SITE;
  const unsigned offset = mbarrier_offset(barrier, site);
  if (!current->open_copies.empty()) emu_cp_async_commit();
  // The arrival follows the copies, for those who wait on the barrier; the issuing thread itself has not waited.
  ThreadClock landed = current->clock;
  landed.own[CpAsync][HappensBefore] = land_all_but(0);
  arrive_after_copies(offset, increment, landed);
  current->clock.advance();
}
}
