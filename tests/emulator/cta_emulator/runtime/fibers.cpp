#include "fibers.h"

#include <sys/mman.h>
#include <vector_types.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "async_ops.h"
#include "barriers.h"

uint3 threadIdx;

// Saves the callee-saved registers on the old stack and resumes the new one.
extern "C" void emu_switch_stack(void** save, void* resume);
asm(".text\n.globl emu_switch_stack\n.hidden emu_switch_stack\nemu_switch_stack:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

namespace emu {
Options options;
Statistics statistics;
long progress = 0;
std::vector<Fiber> fibers;
Fiber* current = nullptr;

namespace {
constexpr size_t kStackBytes = 512 * 1024;
std::vector<char*> stacks;
std::deque<int> ready;
void* launcher_stack = nullptr;
void (*kernel_entry)(void**);
void** kernel_arguments;
bool abandoned = false, in_fiber = false;
std::mt19937 generator;
uintptr_t static_start, static_end;

void leave_fiber() {
  statistics.switches++;
  emu_switch_stack(&current->stack_pointer, launcher_stack);
}

void check_exit(const Fiber& fiber) {
  if (!fiber.open_bulk.empty())
    report(Severity::Error, "bulk-store", 0, 0, "warp %d exits with bulk stores it did not commit", warp_of(fiber.thread));
  if (!fiber.bulk_groups.empty())
    report(Severity::Error, "bulk-store", 0, 0, "warp %d exits without waiting for its bulk stores",
           warp_of(fiber.thread));
  if (!fiber.open_copies.empty() || !fiber.copy_groups.empty())
    report(Severity::Warning, "cp-async", 0, 0, "warp %d exits without waiting for its cp.async copies",
           warp_of(fiber.thread));
}

void fiber_main() {
  kernel_entry(kernel_arguments);
  check_exit(*current);
  current->state = State::Done;
  leave_fiber();
  abort();  // a finished fiber is never resumed
}

void start_fiber(int thread, const unsigned shape[3], const Clock& zero) {
  Fiber& fiber = fibers[thread];
  fiber.thread = thread;
  fiber.index[0] = thread % shape[0];
  fiber.index[1] = thread / shape[0] % shape[1];
  fiber.index[2] = thread / (shape[0] * shape[1]);
  fiber.clock.start(thread, zero);
  fiber.mma_slots.assign(kAsyncSlots, 0);
  fiber.stack = stacks[thread];
  // As if emu_switch_stack had been called from a function that returns into fiber_main.
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.stack_pointer = top;
  ready.push_back(thread);
}

int pick_ready() {
  if (options.schedule == Schedule::Random) std::swap(ready.front(), ready[random_below(ready.size())]);
  const int thread = ready.front();
  ready.pop_front();
  return thread;
}

void report_stuck(const char* what) {
  report(Severity::Error, "deadlock", 0, 0, "%s", what);
  std::map<std::string, std::vector<int>> waiting;
  for (const auto& fiber : fibers)
    if (fiber.state == State::Blocked) waiting[fiber.waits_for].push_back(fiber.thread);
  for (const auto& [reason, threads] : waiting) {
    char text[256];
    snprintf(text, sizeof text, "%zu threads (first %d, last %d) wait for %s", threads.size(), threads.front(),
             threads.back(), reason.c_str());
    append_detail(text);
  }
  describe_barriers();
}
}  // namespace

bool Fiber::on_stack(const void* p) const { return uintptr_t(p) - uintptr_t(stack) < kStackBytes; }
void seed_random(unsigned seed) { generator.seed(seed); }
unsigned random_below(unsigned n) { return generator() % n; }
void set_static_data(uintptr_t start, uintptr_t end) { static_start = start, static_end = end; }
bool in_static_data(const void* p) { return uintptr_t(p) >= static_start && uintptr_t(p) < static_end; }

void block_on(const char* format, ...) {
  char text[192];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  current->waits_for = text;
  current->state = State::Blocked;
  leave_fiber();
}

void wake(int thread) {
  if (fibers[thread].state != State::Blocked) return;
  fibers[thread].state = State::Ready;
  ready.push_back(thread);
}

void yield_to_others() {
  ready.push_back(current->thread);
  leave_fiber();
}

void maybe_yield() {
  if (options.schedule == Schedule::Random && random_below(4) == 0) yield_to_others();
}

void abandon_launch() {
  if (!in_fiber) throw LaunchAbandoned();
  abandoned = true;
  leave_fiber();
  abort();
}

bool run_block(const unsigned shape[3], void (*entry)(void**), void** arguments) {
  while (int(stacks.size()) < num_threads) {
    void* p = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    stacks.push_back(static_cast<char*>(p));
  }
  kernel_entry = entry, kernel_arguments = arguments, abandoned = false;
  ready.clear();
  fibers.assign(num_threads, Fiber());
  const Clock zero = zero_clock();
  for (int thread = 0; thread < num_threads; thread++) start_fiber(thread, shape, zero);
  for (int alive = num_threads; alive;) {
    if (options.schedule == Schedule::Random && random_below(4) == 0) run_async_step();
    if (ready.empty()) {
      if (run_async_step()) continue;
      report_stuck("every thread waits and nothing is in flight");
      return false;
    }
    if (options.max_switches && statistics.switches > options.max_switches) {
      report_stuck("the limit of context switches is reached: a polling loop without progress?");
      return false;
    }
    current = &fibers[pick_ready()];
    threadIdx = uint3{current->index[0], current->index[1], current->index[2]};
    in_fiber = true;
    emu_switch_stack(&launcher_stack, current->stack_pointer);
    in_fiber = false;
    if (abandoned) return false;
    if (current->state == State::Done) alive--, progress++;
  }
  current = nullptr;
  return true;
}
}  // namespace emu
