#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <string>
#include <vector>

#include "../device/abi.h"
#include "clocks.h"
#include "fibers.h"
#include "races.h"
#include "wgmma.h"

namespace emu {
unsigned char* shared = nullptr;
float tmem[kTmemLanes][kTmemColumns];
bool tmem_allocated[kTmemColumns / kTmemGranule];

namespace {
struct Tensor {
  char* start;
  size_t bytes;
  std::string name;
};
constexpr size_t kArena = size_t(64) << 30;  // reserved, not committed
constexpr size_t kGap = 1 << 16;             // between tensors, so that a small overrun meets nobody
std::vector<Tensor> tensors;
size_t last_tensor = 0;
char* arena = nullptr;
size_t arena_used = 0;
unsigned dynamic_start, shared_end;

void* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

bool in_arena(const void* p) { return arena && uintptr_t(p) - uintptr_t(arena) < kArena; }

bool inside_a_tensor(const char* p, size_t bytes) {
  const auto inside = [&](const Tensor& t) { return p >= t.start && p + bytes <= t.start + t.bytes; };
  if (last_tensor < tensors.size() && inside(tensors[last_tensor])) return true;
  for (size_t i = 0; i < tensors.size(); i++)
    if (inside(tensors[i])) {
      last_tensor = i;
      return true;
    }
  return false;
}

void describe_place(const char* p, char* text, size_t size) {
  for (const auto& t : tensors)
    if (p >= t.start - kGap / 2 && p < t.start + t.bytes + kGap / 2) {
      snprintf(text, size, "byte %ld of %s, which has %zu", long(p - t.start), t.name.c_str(), t.bytes);
      return;
    }
  snprintf(text, size, "far from every tensor");
}
}  // namespace

void start_block_memory(unsigned static_bytes, unsigned dynamic_bytes) {
  if (!shared) shared = static_cast<unsigned char*>(reserve(kSharedArena + 4096));
  dynamic_start = (static_bytes + 1023) / 1024 * 1024;
  shared_end = dynamic_start + dynamic_bytes;
  if (shared_end > kMostShared)
    report(Severity::Error, "launch", 0, 0, "shared memory: %u bytes asked, %u allowed", shared_end, kMostShared);
  memset(shared, 0xff, kSharedArena);
  memset(tmem, 0xff, sizeof tmem);
  memset(tmem_allocated, 0, sizeof tmem_allocated);
}

unsigned shared_offset(const void* p, Site site) {
  if (in_shared(p)) return unsigned(uintptr_t(p) - uintptr_t(shared));
  report(Severity::Error, "out-of-bounds", site, 0, "pointer does not point to shared memory");
  abandon_launch();
}

void check_shared_range(unsigned offset, unsigned bytes, const char* what, Site site) {
  if (offset + bytes <= shared_end) return;
  report(Severity::Error, "out-of-bounds", site, 0, "%s of %u bytes at shared offset %u, past the block's %u bytes", what,
         bytes, offset, shared_end);
  if (offset + bytes > kSharedArena) abandon_launch();
}

bool check_global(const void* p, size_t bytes, const char* what, Site site) {
  if (inside_a_tensor(static_cast<const char*>(p), bytes)) return true;
  char place[160];
  describe_place(static_cast<const char*>(p), place, sizeof place);
  report(Severity::Error, "out-of-bounds", site, 0, "global %s of %zu bytes at %s", what, bytes, place);
  return in_arena(p) && in_arena(static_cast<const char*>(p) + bytes);
}

bool columns_allocated(int column, int count) {
  if (column < 0 || column + count > kTmemColumns) return false;
  for (int c = column / kTmemGranule; c <= (column + count - 1) / kTmemGranule; c++)
    if (!tmem_allocated[c]) return false;
  return true;
}

namespace {
// Every load and store of the emitted code that the compiler could not keep in registers comes through here.
inline void on_access(void* p, unsigned bytes, bool write, const void* return_address) {
  const uintptr_t offset = uintptr_t(p) - uintptr_t(shared);
  if (offset < kSharedArena) {
    statistics.accesses++;
    const Site site = site_of(return_address);
    check_shared_range(unsigned(offset), bytes, write ? "write" : "read", site);
    if (bytes > 1 && bytes <= 16 && offset % bytes)
      report(Severity::Error, "misaligned", site, 0, "shared access of %u bytes at offset %lu", bytes, (long)offset);
    if (options.races) check_shared(generic_access(*current, site), unsigned(offset), bytes, write);
  } else if (in_arena(p)) {
    statistics.accesses++;
    const Site site = site_of(return_address);
    if (bytes > 1 && bytes <= 16 && uintptr_t(p) % bytes)
      report(Severity::Error, "misaligned", site, 0, "global access of %u bytes", bytes);
    check_global(p, bytes, write ? "write" : "read", site);
  } else if (current && current->on_stack(p)) {
    if (wgmma_in_flight) check_registers_in_flight(p, bytes, write, site_of(return_address));
  } else if (!in_static_data(p)) {
    report(Severity::Error, "out-of-bounds", site_of(return_address), 0, "%s of %u bytes at a wild address",
           write ? "write" : "read", bytes);
    abandon_launch();
  }
}
}  // namespace
}  // namespace emu

#define EMU_HOOK(name, bytes, write) \
  void name(void* p) { emu::on_access(p, bytes, write, __builtin_return_address(0)); }
#define EMU_HOOKS(n)                       \
  EMU_HOOK(__tsan_read##n, n, false)       \
  EMU_HOOK(__tsan_write##n, n, true)       \
  EMU_HOOK(__tsan_unaligned_read##n, n, false) \
  EMU_HOOK(__tsan_unaligned_write##n, n, true)

extern "C" {
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
void __tsan_read_range(void* p, unsigned long n) { emu::on_access(p, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long n) { emu::on_access(p, n, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

unsigned char* emu_dynamic_shared() { return emu::shared + emu::dynamic_start; }
unsigned char* emu_static_shared(unsigned offset) { return emu::shared + offset; }
uint32_t emu_shared_address(const void* p) { return emu::shared_offset(p, EMU_SITE); }

void* emu_tensor(const char* name, size_t bytes) {
  using namespace emu;
  if (!arena) arena = static_cast<char*>(reserve(kArena));
  const size_t room = (bytes + 2 * kGap + 255) / 256 * 256;
  if (!arena || arena_used + room > kArena) return nullptr;
  char* p = arena + arena_used + kGap / 2;
  arena_used += room;
  tensors.push_back({p, bytes, name});
  return p;
}

void emu_release_tensors() {
  using namespace emu;
  if (arena && arena_used) madvise(arena, arena_used, MADV_DONTNEED);
  tensors.clear();
  arena_used = 0;
}
}
