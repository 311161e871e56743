// TMA, bulk and cp.async copies, wide global and shared accesses.
#pragma once
#include "barriers.h"
#include "numbers.h"

namespace tl {
inline void prefetch_tma_descriptor(const EmuTensorMap&) {}  // a hint: no effect that a kernel can observe

template <class... C>
void tma_load(const EmuTensorMap& map, Barrier& barrier, const void* shared, C... coordinates) {
  int c[] = {int(coordinates)...};
  emu_tma_load(&map, &barrier, const_cast<void*>(shared), sizeof...(C), c);
}
inline void tma_load(void* shared, const void* global, Barrier& barrier, uint32_t bytes) {
  emu_bulk_load(shared, global, &barrier, bytes);
}
template <class... C>
void tma_store(const EmuTensorMap& map, const void* shared, C... coordinates) {
  int c[] = {int(coordinates)...};
  emu_tma_store(&map, shared, sizeof...(C), c, 0);
}
inline void tma_store(void* global, void* shared, uint32_t bytes) { emu_bulk_store(global, shared, bytes, 0); }
template <class... C>
void tma_store_add(const EmuTensorMap& map, const void* shared, C... coordinates) {
  int c[] = {int(coordinates)...};
  emu_tma_store(&map, shared, sizeof...(C), c, 1);
}
inline void tma_store_add(float* shared, float* global, uint32_t bytes) { emu_bulk_store(global, shared, bytes, 1); }
inline void tma_store_arrive() { emu_bulk_commit(); }
template <int pending, bool read_only = true>
void tma_store_wait() {
  emu_bulk_wait(pending, read_only);
}

template <int bytes>
void cp_async_gs(const void* shared, const void* global) {
  emu_cp_async(const_cast<void*>(shared), global, bytes, 1);
}
template <int bytes>
void cp_async_gs_conditional(const void* shared, const void* global, bool copy) {
  emu_cp_async(const_cast<void*>(shared), global, bytes, copy);
}
inline void cp_async_commit() { emu_cp_async_commit(); }
template <int pending>
void cp_async_wait() {
  emu_cp_async_wait(pending);
}

#define EMU_WIDE_ACCESS(bits, type)                                                                             \
  inline type load_global_##bits(const void* p) { return *reinterpret_cast<const type*>(p); }                   \
  inline type load_global_##bits##_conditional(const void* p, bool on) { return on ? load_global_##bits(p) : type{}; } \
  inline type load_shared_##bits(const void* p) { return *reinterpret_cast<const type*>(p); }                   \
  inline void store_shared_##bits(void* p, type v) { *reinterpret_cast<type*>(p) = v; }                         \
  inline void store_global_##bits(void* p, type v) { *reinterpret_cast<type*>(p) = v; }                         \
  inline void store_global_##bits##_conditional(void* p, type v, bool on) {                                     \
    if (on) *reinterpret_cast<type*>(p) = v;                                                                    \
  }
EMU_WIDE_ACCESS(32, uint32_t)
EMU_WIDE_ACCESS(64, uint2)
EMU_WIDE_ACCESS(128, uint4)
#undef EMU_WIDE_ACCESS
template <class T>
T load_global_256(const T* p) {
  return *p;
}
template <class T>
void store_global_256(T* p, const T& v) {
  *p = v;
}
template <class T>
void store_global_256_conditional(T* p, const T& v, bool on) {
  if (on) *p = v;
}
}  // namespace tl

template <class T, class V>
void AtomicAdd(T* address, V value, int = 0) {
  *address = T(*address + T(value));  // fibers switch only at synchronising calls, so this is atomic here
}
template <class T, class V>
T AtomicAddRet(T* address, V value, int = 0) {
  T before = *address;
  *address = T(before + T(value));
  return before;
}
