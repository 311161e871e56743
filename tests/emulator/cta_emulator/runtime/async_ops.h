// Work of the copy engine and the tensor cores: issued by a thread, run when the schedule says so.
#pragma once
#include <memory>

#include "clocks.h"
#include "races.h"
#include "report.h"

namespace emu {
struct AsyncOp {
  int owner = 0;       // issuing thread
  int slot_agent = 0;
  Tick tick = 0;
  Clock issued;        // what the issuer had seen
  Site site = 0;
  bool done = false;
  virtual ~AsyncOp() = default;
  virtual void run() = 0;
  Access access(Proxy proxy) const { return {nullptr, races_checked() ? &*issued : nullptr, slot_agent, tick, proxy, site}; }
  static bool races_checked();
};

void stamp(AsyncOp& op, Site site);                          // owner, slot, clock of the current thread
void submit_copy(std::shared_ptr<AsyncOp> op);               // any order
void submit_tensor(std::shared_ptr<AsyncOp> op);             // in issue order
bool run_async_step();                                       // false: nothing in flight
void reset_async();
void check_async_at_exit();
int take_slot(Tick& tick);                                   // next slot of the ring and its new tick
}  // namespace emu
