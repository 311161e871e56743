#include "async_ops.h"

#include <deque>
#include <vector>

#include "fibers.h"

namespace emu {
namespace {
std::vector<std::shared_ptr<AsyncOp>> copies;
std::deque<std::shared_ptr<AsyncOp>> tensor_queue;
int next_slot = 0;
Tick slot_ticks[kAsyncSlots];

void run_eagerly() {
  if (options.schedule != Schedule::Eager) return;
  while (run_async_step()) {
  }
}
}  // namespace

bool AsyncOp::races_checked() { return options.races; }

int take_slot(Tick& tick) {
  const int slot = next_slot++ % kAsyncSlots;
  tick = ++slot_ticks[slot];
  return first_slot_agent() + slot;
}

void stamp(AsyncOp& op, Site site) {
  op.slot_agent = take_slot(op.tick);
  op.owner = current->thread;
  op.site = site;
  if (!options.races) return;
  op.issued = current->clock.snapshot();
  current->clock.advance();
}

void submit_copy(std::shared_ptr<AsyncOp> op) {
  copies.push_back(std::move(op));
  run_eagerly();
  maybe_yield();
}

void submit_tensor(std::shared_ptr<AsyncOp> op) {
  tensor_queue.push_back(std::move(op));
  run_eagerly();
  maybe_yield();
}

bool run_async_step() {
  const size_t choices = copies.size() + (tensor_queue.empty() ? 0 : 1);
  if (!choices) return false;
  const size_t choice = options.schedule == Schedule::Random ? random_below(choices) : 0;
  std::shared_ptr<AsyncOp> op;
  if (choice < copies.size()) {
    op = copies[choice];
    copies.erase(copies.begin() + choice);
  } else {
    op = tensor_queue.front();
    tensor_queue.pop_front();
  }
  op->run();
  op->done = true;
  progress++;
  if (fibers[op->owner].waits_for_bulk) wake(op->owner);
  return true;
}

void reset_async() {
  copies.clear();
  tensor_queue.clear();
  next_slot = 0;
  for (auto& tick : slot_ticks) tick = 0;
}

void check_async_at_exit() {
  if (!copies.empty() || !tensor_queue.empty())
    report(Severity::Error, "in-flight", 0, 0, "the block ends with %zu copies and %zu tensor-core operations in flight",
           copies.size(), tensor_queue.size());
  while (run_async_step()) {
  }
}
}  // namespace emu
