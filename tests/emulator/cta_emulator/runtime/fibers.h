// One fiber per CUDA thread, and the scheduler that switches between them where the device code synchronises.
#pragma once
#include <cstdarg>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "clocks.h"
#include "report.h"

namespace emu {
struct AsyncOp;

enum class Schedule { Eager, Lazy, Random };  // asynchronous work: at issue, as late as possible, at any time
struct Options {
  Schedule schedule = Schedule::Eager;
  unsigned seed = 1;
  bool races = true;
  long max_switches = 0;  // 0: no limit
};
struct Statistics {
  long switches = 0, accesses = 0, mma = 0, bulk_copies = 0, blocks = 0;
};
extern Options options;
extern Statistics statistics;
extern long progress;  // grows whenever something happens that a polling loop may wait for

struct CpAsyncCopy {
  void* shared;
  const void* global;
  int bytes;
  bool copy;    // false: fill with zeros
  bool landed;
};

enum class State { Ready, Blocked, Done };
struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  int thread = 0;
  unsigned index[3] = {0, 0, 0};
  State state = State::Ready;
  std::string waits_for;
  ThreadClock clock;
  Tick tcgen05_tick = 1;                      // of tcgen05.ld and st, advanced by before_thread_sync
  Clock mma_clock;                            // everything known when this thread's mma were issued
  std::vector<Tick> mma_slots;                // by async slot: this thread's mma, in issue order
  std::vector<std::shared_ptr<AsyncOp>> open_bulk;
  std::deque<std::vector<std::shared_ptr<AsyncOp>>> bulk_groups;
  bool waits_for_bulk = false;
  std::vector<CpAsyncCopy> open_copies;
  std::deque<std::vector<CpAsyncCopy>> copy_groups;
  Tick copy_group = 1;                        // tick of the open cp.async group
  bool on_stack(const void* p) const;
};
extern std::vector<Fiber> fibers;
extern Fiber* current;
inline int warp_of(int thread) { return thread / 32; }

void block_on(const char* format, ...) __attribute__((format(printf, 1, 2)));  // until woken
void wake(int thread);
void yield_to_others();              // and come back later
void maybe_yield();                  // the same, sometimes, under the random schedule
unsigned random_below(unsigned n);
struct LaunchAbandoned {};
[[noreturn]] void abandon_launch();  // the state is beyond repair: back to the launcher, from a fiber or by exception

// Runs every thread of one block to its end. False: deadlock, livelock or abandoned.
bool run_block(const unsigned block_shape[3], void (*entry)(void**), void** arguments);
void seed_random(unsigned seed);
bool in_static_data(const void* p);  // constants and globals of the kernel library
void set_static_data(uintptr_t start, uintptr_t end);
}  // namespace emu
