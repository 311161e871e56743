// Shadow of shared and tensor memory: who wrote and read each cell last, checked against the accessor's clock.
#pragma once
#include "clocks.h"
#include "report.h"

namespace emu {
enum class Proxy : uint8_t { Generic, Async, TensorCore };

struct Fiber;

// One agent at one moment: own entries of a thread, or the snapshot an asynchronous operation took when issued.
struct Access {
  const ThreadClock* thread;  // null for asynchronous operations
  const ClockNode* snapshot;
  int agent;
  Tick tick;
  Proxy proxy;
  Site site;
  Tick seen(Order order, int other) const { return thread ? thread->seen(order, other) : snapshot->at(order, other); }
};

Access generic_access(const Fiber& fiber, Site site);
Access tcgen05_access(const Fiber& fiber, Site site);
Access cp_async_access(const Fiber& fiber, Tick group, Site site);

void reset_shadow();  // before a block
void check_shared(const Access& who, unsigned offset, unsigned bytes, bool write);
void check_tensor(const Access& who, int lane, int column, bool write, bool accumulates = false);
// A free is ordered like a write, for every lane of the columns.
void check_tensor_free(const Access& who, int column, int count);
}  // namespace emu
