// The memories of one block: shared memory, tensor memory, and an arena that holds the tensor arguments.
#pragma once
#include <cstddef>
#include <cstdint>

#include "report.h"

namespace emu {
constexpr unsigned kSharedArena = 232 * 1024;
constexpr unsigned kMostShared = 227 * 1024;
constexpr int kTmemLanes = 128, kTmemColumns = 512, kTmemGranule = 32;

extern unsigned char* shared;                       // kSharedArena bytes
extern float tmem[kTmemLanes][kTmemColumns];
extern bool tmem_allocated[kTmemColumns / kTmemGranule];

// Lays out static and dynamic shared memory and poisons every memory before a block starts.
void start_block_memory(unsigned static_bytes, unsigned dynamic_bytes);

inline bool in_shared(const void* p) { return uintptr_t(p) - uintptr_t(shared) < kSharedArena; }
unsigned shared_offset(const void* p, Site site);  // reports a pointer that is not in shared memory
void check_shared_range(unsigned offset, unsigned bytes, const char* what, Site site);
bool check_global(const void* p, size_t bytes, const char* what, Site site);  // true: it is safe to touch
bool columns_allocated(int column, int count);
}  // namespace emu
