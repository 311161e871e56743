#include "races.h"

#include <cstdio>
#include <vector>

#include "barriers.h"
#include "fibers.h"
#include "memory.h"

namespace emu {
namespace {
struct Epoch {
  Tick tick = 0;
  uint16_t agent = 0;
  Proxy proxy = Proxy::Generic;
  Site site = 0;
};
struct Cell {
  Epoch write, read;
  uint32_t more_reads = 0;  // 1 + index into `overflow` when several agents read since the last write
  uint32_t generation = 0;
  bool written = false;
};
enum class Space { Shared, Tensor };
constexpr unsigned kCellBytes = 2;

std::vector<Cell> shared_cells(kSharedArena / kCellBytes), tensor_cells(size_t(kTmemLanes) * kTmemColumns);
std::vector<std::vector<Epoch>> overflow;
std::vector<uint32_t> free_overflow;
uint32_t generation = 0;

const char* space_name(Space space) { return space == Space::Tensor ? "tensor memory" : "shared memory"; }
const char* proxy_name(Proxy proxy) {
  return proxy == Proxy::Generic ? "ordinary" : proxy == Proxy::Async ? "asynchronous" : "tcgen05";
}

struct AgentName {
  char text[48];
  explicit AgentName(int agent) {
    const char* kinds[] = {"", ", tcgen05", ", cp.async"};
    if (agent < first_slot_agent())
      snprintf(text, sizeof text, "thread %d (warp %d%s)", agent % num_threads, agent % num_threads / 32,
               kinds[agent / num_threads]);
    else
      snprintf(text, sizeof text, "an asynchronous operation");
  }
};

bool same_agent(const Epoch& past, const Access& who) {
  return past.agent == who.agent && (past.agent < first_slot_agent() || past.tick == who.tick);
}

void report_race(const char* what, Space space, const Epoch& past, const Access& who, unsigned place) {
  report(Severity::Error, "race", who.site, past.site, "%s on %s (%s %u): %s access by %s, %s access by %s", what,
         space_name(space), space == Space::Tensor ? "column" : "offset", place, proxy_name(who.proxy),
         AgentName(who.agent).text, proxy_name(past.proxy), AgentName(past.agent).text);
}

// past is a write; who reads (or overwrites) what it wrote.
void check_after_write(const Epoch& past, const Access& who, Space space, bool write, unsigned place) {
  if (past.tick == 0 || same_agent(past, who)) return;
  const bool before = who.seen(HappensBefore, past.agent) >= past.tick;
  const bool tensor_ordered = space == Space::Tensor && who.seen(TensorCore, past.agent) >= past.tick;
  if (!before && !tensor_ordered)
    report_race(write ? "write after write" : "read after write", space, past, who, place);
  else if (space == Space::Shared && past.proxy == Proxy::Generic && who.proxy != Proxy::Generic &&
           who.seen(AsyncProxy, past.agent) < past.tick)
    report(write ? Severity::Warning : Severity::Error, "missing-proxy-fence", who.site, past.site,
           "ordinary write by %s, then %s by %s without fence.proxy.async", AgentName(past.agent).text,
           write ? "overwritten" : "read", AgentName(who.agent).text);
  else if (space == Space::Tensor && !tensor_ordered)
    report(Severity::Error, "missing-tcgen05-fence", who.site, past.site,
           "%s of tensor memory after a write by %s without tcgen05.fence::after_thread_sync", write ? "write" : "read",
           AgentName(past.agent).text);
}

// past is a read; who overwrites what it read.
void check_after_read(const Epoch& past, const Access& who, Space space, unsigned place) {
  if (past.tick == 0 || same_agent(past, who)) return;
  const bool before = who.seen(HappensBefore, past.agent) >= past.tick;
  const bool tensor_ordered = space == Space::Tensor && who.seen(TensorCore, past.agent) >= past.tick;
  if (!before && !tensor_ordered)
    report_race("write after read", space, past, who, place);
  else if (space == Space::Tensor && !tensor_ordered)
    report(Severity::Error, "missing-tcgen05-fence", who.site, past.site,
           "write to tensor memory after a read by %s without tcgen05.fence::after_thread_sync",
           AgentName(past.agent).text);
}

void forget_reads(Cell& cell) {
  cell.read.tick = 0;
  if (!cell.more_reads) return;
  overflow[cell.more_reads - 1].clear();
  free_overflow.push_back(cell.more_reads - 1);
  cell.more_reads = 0;
}

bool superseded(const Epoch& past, const Access& who) {
  return past.tick == 0 || past.agent == who.agent ||
         (past.proxy == who.proxy && who.seen(HappensBefore, past.agent) >= past.tick);
}

void note_read(Cell& cell, const Access& who) {
  const Epoch now{who.tick, uint16_t(who.agent), who.proxy, who.site};
  if (superseded(cell.read, who)) {
    cell.read = now;
    return;
  }
  if (!cell.more_reads) {
    if (free_overflow.empty()) {
      overflow.emplace_back();
      free_overflow.push_back(uint32_t(overflow.size() - 1));
    }
    cell.more_reads = free_overflow.back() + 1;
    free_overflow.pop_back();
  }
  auto& reads = overflow[cell.more_reads - 1];
  for (auto& past : reads)
    if (superseded(past, who)) {
      past = now;
      return;
    }
  reads.push_back(now);
}

Cell& fresh(Cell& cell) {
  if (cell.generation != generation) cell = Cell{{}, {}, 0, generation, false};
  return cell;
}

template <class Visit>
void for_reads(const Cell& cell, Visit visit) {
  visit(cell.read);
  if (cell.more_reads)
    for (const auto& past : overflow[cell.more_reads - 1]) visit(past);
}

void check_cell(Cell& cell, const Access& who, Space space, bool write, unsigned place) {
  check_after_write(cell.write, who, space, write, place);
  if (!write) {
    if (!cell.written)
      report(Severity::Error, "uninitialised-read", who.site, 0, "read of %s that nothing wrote (%s %u) by %s",
             space_name(space), space == Space::Tensor ? "column" : "offset", place, AgentName(who.agent).text);
    note_read(cell, who);
    return;
  }
  for_reads(cell, [&](const Epoch& past) { check_after_read(past, who, space, place); });
  forget_reads(cell);
  cell.write = {who.tick, uint16_t(who.agent), who.proxy, who.site};
  cell.written = true;
}
}  // namespace

Access generic_access(const Fiber& fiber, Site site) {
  const ThreadClock& clock = fiber.clock;
  return {&clock, nullptr, agent_of(Generic, fiber.thread), clock.now(), Proxy::Generic, site};
}
Access tcgen05_access(const Fiber& fiber, Site site) {
  return {&fiber.clock, nullptr, agent_of(Tcgen05, fiber.thread), fiber.tcgen05_tick, Proxy::TensorCore, site};
}
Access cp_async_access(const Fiber& fiber, Tick group, Site site) {
  return {&fiber.clock, nullptr, agent_of(CpAsync, fiber.thread), group, Proxy::Generic, site};
}

void reset_shadow() {
  ++generation;
  overflow.clear();
  free_overflow.clear();
}

void check_shared(const Access& who, unsigned offset, unsigned bytes, bool write) {
  if (write && touches_mbarrier(offset, bytes))
    report(Severity::Error, "mbarrier", who.site, 0, "%s write by %s to shared offset %u, over a live mbarrier",
           proxy_name(who.proxy), AgentName(who.agent).text, offset);
  const unsigned end = (offset + bytes + kCellBytes - 1) / kCellBytes;
  for (unsigned i = offset / kCellBytes; i < end; i++)
    check_cell(fresh(shared_cells[i]), who, Space::Shared, write, i * kCellBytes);
}

void check_tensor(const Access& who, int lane, int column, bool write, bool accumulates) {
  Cell& cell = fresh(tensor_cells[size_t(lane) * kTmemColumns + column]);
  if (accumulates && !cell.written)
    report(Severity::Error, "uninitialised-read", who.site, 0, "mma adds to tensor memory that nothing wrote (column %d)",
           column);
  check_cell(cell, who, Space::Tensor, write, unsigned(column));
}

void check_tensor_free(const Access& who, int column, int count) {
  const auto ordered = [&](const Epoch& past) {
    const bool same_warp = past.agent < first_slot_agent() && warp_of(past.agent % num_threads) == warp_of(who.agent);
    if (past.tick == 0 || same_warp) return;  // the free is a warp-wide instruction
    if (who.seen(HappensBefore, past.agent) < past.tick)
      report(Severity::Error, "tensor-memory", who.site, past.site,
             "freed while an access by %s is not ordered before the free", AgentName(past.agent).text);
  };
  for (int lane = 0; lane < kTmemLanes; lane++)
    for (int c = column; c < column + count; c++) {
      Cell& cell = fresh(tensor_cells[size_t(lane) * kTmemColumns + c]);
      ordered(cell.write);
      for_reads(cell, ordered);
      cell = Cell{{}, {}, 0, generation, false};
    }
}
}  // namespace emu
