#include "clocks.h"

#include <algorithm>

namespace emu {
int num_threads = 0;
namespace {
struct Remembered {
  Clock a, b, result;
};
constexpr int kRemembered = 64;
Remembered joins[kRemembered], raised[NumOrders][kRemembered];

size_t slot_for(const Clock& a, const Clock& b) {
  const auto x = reinterpret_cast<uintptr_t>(&*a), y = reinterpret_cast<uintptr_t>(&*b);
  return (x / 64 * 31 + y / 64) % kRemembered;
}
}  // namespace

Clock zero_clock() {
  auto* node = new ClockNode;
  node->ticks.assign(size_t(NumOrders) * num_agents(), 0);
  return Clock(node);
}

Clock copy_clock(const Clock& clock) {
  auto* node = new ClockNode;
  node->ticks = clock->ticks;
  return Clock(node);
}

void join_into(ClockNode& into, const ClockNode& from) {
  Tick* x = into.ticks.data();
  const Tick* y = from.ticks.data();
  const size_t n = into.ticks.size();
  for (size_t i = 0; i < n; i++) x[i] = std::max(x[i], y[i]);
}

Clock join_clocks(const Clock& a, const Clock& b) {
  if (!b || a == b) return a;
  Remembered& memo = joins[slot_for(a, b)];
  if (memo.result && memo.a == a && memo.b == b) return memo.result;
  Clock result = copy_clock(a);
  join_into(*result, *b);
  memo = {a, b, result};
  return result;
}

Clock raise_order(const Clock& clock, Order order) {
  Remembered& memo = raised[order][slot_for(clock, clock)];
  if (memo.result && memo.a == clock) return memo.result;
  Clock result = copy_clock(clock);
  for (int agent = 0; agent < num_agents(); agent++)
    result->at(order, agent) = std::max(result->at(order, agent), result->at(HappensBefore, agent));
  memo = {clock, clock, result};
  return result;
}

void forget_clocks() {
  for (auto& memo : joins) memo = {};
  for (auto& row : raised)
    for (auto& memo : row) memo = {};
}

void ThreadClock::start(int thread_index, const Clock& zero) {
  thread = thread_index;
  base = zero;
  for (auto& row : own)
    for (auto& tick : row) tick = 0;
  own[Generic][HappensBefore] = 1;
}

void ThreadClock::raise(Order order) {
  base = raise_order(base, order);
  for (auto& row : own) row[order] = std::max(row[order], row[HappensBefore]);
}

Clock ThreadClock::snapshot() const {
  Clock result = copy_clock(base);
  for (int kind = 0; kind < NumAgentKinds; kind++)
    for (int order = 0; order < NumOrders; order++)
      result->at(Order(order), agent_of(AgentKind(kind), thread)) = own[kind][order];
  return result;
}

ClockNode& Gathered::node() {
  if (!node_) node_ = zero_clock();
  return *node_;
}

void Gathered::add(const ThreadClock& clock) {
  if (!node_)
    node_ = copy_clock(clock.base);
  else if (!(last_ == clock.base))
    join_into(*node_, *clock.base);
  last_ = clock.base;
  for (int kind = 0; kind < NumAgentKinds; kind++)
    for (int order = 0; order < NumOrders; order++) {
      Tick& tick = node_->at(Order(order), agent_of(AgentKind(kind), clock.thread));
      tick = std::max(tick, clock.own[kind][order]);
    }
}

void Gathered::add(const Clock& clock) {
  if (clock) join_into(node(), *clock);
}

void Gathered::add_slot(int agent, Tick tick, bool async_visible) {
  Tick& before = node().at(HappensBefore, agent);
  before = std::max(before, tick);
  if (!async_visible) return;
  Tick& proxy = node().at(AsyncProxy, agent);
  proxy = std::max(proxy, tick);
}

Clock Gathered::take() {
  Clock published = node_ ? node_ : zero_clock();
  node_ = Clock();
  last_ = Clock();
  return published;
}
}  // namespace emu
