// mbarrier objects, named barriers, fences.
#pragma once
#include "prelude.h"

struct Barrier {
  uint64_t storage;
  Barrier() = delete;
  void init(uint32_t count) { emu_mbarrier_init(this, count); }
  void wait(uint32_t parity) { emu_mbarrier_wait(this, parity); }
  bool try_wait(uint32_t parity) { return emu_mbarrier_test(this, parity); }
  bool test_wait(uint32_t parity) { return emu_mbarrier_test(this, parity); }
  void arrive() { emu_mbarrier_arrive(this); }
  void expect_transaction(uint32_t bytes) { emu_mbarrier_expect(this, bytes, 0); }
  void arrive_and_expect_tx(uint32_t bytes) { emu_mbarrier_expect(this, bytes, 1); }
};

namespace tl {
inline void fence_proxy_async() { emu_fence_proxy_async(); }
inline void fence_barrier_init() { emu_fence_mbarrier_init(); }
inline void __sync_thread_partial(int id = 0, int count = 0) { emu_named_barrier(id, count, 1); }
inline void __named_barrier_arrive(int id, int count) { emu_named_barrier(id, count, 0); }
template <class B>
void mbarrier_cp_async_arrive(B& barrier) {
  emu_cp_async_arrive(&barrier, 1);
}
template <class B>
void mbarrier_cp_async_arrive_noinc(B& barrier) {
  emu_cp_async_arrive(&barrier, 0);
}
}  // namespace tl
