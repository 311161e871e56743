// Vector clocks. Every thread is three agents (ordinary accesses, tcgen05 loads and stores, cp.async writes); each
// operation of the copy engine or the tensor cores takes one of a ring of slots. Three orders are kept side by side:
//   HappensBefore  synchronised by barriers
//   AsyncProxy     also visible to the copy engine and wgmma operands (fence.proxy.async)
//   TensorCore     also ordered for tensor memory (tcgen05.fence::after_thread_sync, mma issue order)
// A clock is a shared immutable base plus the thread's own few entries, so a barrier of 512 threads joins one vector,
// not 512: threads that leave a barrier share one base, and joins of the same two bases are remembered.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace emu {
using Tick = uint32_t;
enum Order { HappensBefore, AsyncProxy, TensorCore, NumOrders };
enum AgentKind { Generic, Tcgen05, CpAsync, NumAgentKinds };
constexpr int kAsyncSlots = 64;

extern int num_threads;  // of the running block
inline int num_agents() { return NumAgentKinds * num_threads + kAsyncSlots; }
inline int agent_of(AgentKind kind, int thread) { return int(kind) * num_threads + thread; }
inline int first_slot_agent() { return NumAgentKinds * num_threads; }

struct ClockNode {
  int references = 0;
  std::vector<Tick> ticks;  // [order][agent]
  Tick at(Order order, int agent) const { return ticks[std::size_t(order) * num_agents() + agent]; }
  Tick& at(Order order, int agent) { return ticks[std::size_t(order) * num_agents() + agent]; }
};

class Clock {  // counted reference to a node; the node of a published clock never changes
 public:
  Clock() = default;
  explicit Clock(ClockNode* node) : node_(node) { ++node_->references; }
  Clock(const Clock& o) : node_(o.node_) {
    if (node_) ++node_->references;
  }
  Clock(Clock&& o) noexcept : node_(std::exchange(o.node_, nullptr)) {}
  Clock& operator=(Clock o) noexcept {
    std::swap(node_, o.node_);
    return *this;
  }
  ~Clock() {
    if (node_ && --node_->references == 0) delete node_;
  }
  explicit operator bool() const { return node_ != nullptr; }
  bool operator==(const Clock& o) const { return node_ == o.node_; }
  ClockNode* operator->() const { return node_; }
  ClockNode& operator*() const { return *node_; }

 private:
  ClockNode* node_ = nullptr;
};

Clock zero_clock();
Clock copy_clock(const Clock& clock);
Clock join_clocks(const Clock& a, const Clock& b);           // remembered
Clock raise_order(const Clock& clock, Order raised);         // raised order := max(itself, HappensBefore); remembered
void join_into(ClockNode& into, const ClockNode& from);
void forget_clocks();                                        // drop remembered joins (new launch)

struct ThreadClock {
  int thread = 0;
  Clock base;
  Tick own[NumAgentKinds][NumOrders] = {};

  void start(int thread_index, const Clock& zero);
  Tick seen(Order order, int agent) const {
    for (int kind = 0; kind < NumAgentKinds; kind++)
      if (agent == agent_of(AgentKind(kind), thread)) return own[kind][order];
    return base->at(order, agent);
  }
  Tick now() const { return own[Generic][HappensBefore]; }
  void advance() { ++own[Generic][HappensBefore]; }
  void acquire(const Clock& published) { base = join_clocks(base, published); }
  void raise(Order order);
  Clock snapshot() const;  // base and own entries in one fresh node
};

// What arrives at a barrier until its phase completes.
class Gathered {
 public:
  void add(const ThreadClock& clock);
  void add(const Clock& clock);
  void add_slot(int slot_agent, Tick tick, bool async_visible);
  Clock take();  // publishes what was gathered and starts afresh

 private:
  ClockNode& node();
  Clock node_;
  Clock last_;  // base joined last: threads released by one barrier share it
};
}  // namespace emu
