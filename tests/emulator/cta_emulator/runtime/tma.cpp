// Bulk copies: tensor-map (TMA) and one-dimensional, loads and stores, with bulk groups.
#include <algorithm>
#include <cstring>

#include "../device/abi.h"
#include "async_ops.h"
#include "barriers.h"
#include "fibers.h"
#include "layouts.h"
#include "memory.h"
#include "numbers.h"

namespace emu {
namespace {
constexpr unsigned kChunk = 16;  // bytes that every swizzle keeps together

void add_elements(char* to, const unsigned char* from, int bytes, int element_type) {
  if (element_type == 7)  // CU_TENSOR_MAP_DATA_TYPE_FLOAT32
    for (int i = 0; i < bytes; i += 4) {
      float a, b;
      memcpy(&a, to + i, 4), memcpy(&b, from + i, 4);
      a += b;
      memcpy(to + i, &a, 4);
    }
  else
    report(Severity::Error, "unsupported", 0, 0, "reducing bulk store of tensor-map data type %d", element_type);
}

struct TensorCopy : AsyncOp {
  EmuTensorMap map;
  bool load, add = false;
  unsigned shared_start = 0, barrier = 0;
  int coordinates[5] = {0, 0, 0, 0, 0};

  long box_bytes() const {
    long bytes = map.element_bytes;
    for (int d = 0; d < map.rank; d++) bytes *= map.box[d];
    return bytes;
  }

  void run() override {
    const unsigned row_bytes = unsigned(map.box[0]) * map.element_bytes;
    const long rows = box_bytes() / row_bytes;
    int index[5] = {0, 0, 0, 0, 0};
    for (long row = 0; row < rows; row++) {
      copy_row(shared_start + unsigned(row) * row_bytes, row_bytes, index);
      for (int d = 1; d < map.rank; d++) {
        if (++index[d] < map.box[d]) break;
        index[d] = 0;
      }
    }
    statistics.bulk_copies++;
    if (load) complete_bytes(barrier, unsigned(box_bytes()), slot_agent, tick);
  }

  void copy_row(unsigned shared_row, unsigned row_bytes, const int* index) {
    char* row = map.base;
    bool outside = false;
    for (int d = 1; d < map.rank; d++) {
      const int64_t x = int64_t(coordinates[d]) + index[d];
      outside |= x < 0 || x >= map.extent[d];
      row += x * map.stride_bytes[d];
    }
    const int per_chunk = int(kChunk) / map.element_bytes;
    for (unsigned chunk = 0; chunk < row_bytes / kChunk; chunk++) {
      const int64_t first = int64_t(coordinates[0]) + int64_t(chunk) * per_chunk;
      const int64_t begin = outside ? 0 : std::clamp<int64_t>(-first, 0, per_chunk);
      const int64_t end = outside ? 0 : std::clamp<int64_t>(map.extent[0] - first, begin, per_chunk);
      copy_chunk(swizzle(shared_row + chunk * kChunk, map.swizzle), row + first * map.element_bytes,
                 int(begin) * map.element_bytes, int(end) * map.element_bytes);
    }
  }

  void copy_chunk(unsigned offset, char* global, int begin, int end) {  // bytes [begin, end) lie inside the tensor
    check_shared_range(offset, kChunk, load ? "bulk load" : "bulk store", site);
    if (options.races) check_shared(access(Proxy::Async), offset, kChunk, load);
    unsigned char* here = shared + offset;
    const bool usable = end > begin && check_global(global + begin, end - begin, load ? "bulk read" : "bulk write", site);
    if (load) memset(here, 0, kChunk);
    if (!usable) return;
    if (load)
      memcpy(here + begin, global + begin, end - begin);
    else if (add)
      add_elements(global + begin, here + begin, end - begin, map.element_type);
    else
      memcpy(global + begin, here + begin, end - begin);
  }
};

struct LinearCopy : AsyncOp {
  bool load, add = false;
  unsigned shared_start = 0, barrier = 0, bytes = 0;
  char* global = nullptr;

  void run() override {
    check_shared_range(shared_start, bytes, load ? "bulk load" : "bulk store", site);
    if (options.races) check_shared(access(Proxy::Async), shared_start, bytes, load);
    if (check_global(global, bytes, load ? "bulk read" : "bulk write", site)) {
      if (load)
        memcpy(shared + shared_start, global, bytes);
      else if (add)
        add_elements(global, shared + shared_start, int(bytes), 7);
      else
        memcpy(global, shared + shared_start, bytes);
    }
    statistics.bulk_copies++;
    if (load) complete_bytes(barrier, bytes, slot_agent, tick);
  }
};

std::shared_ptr<TensorCopy> make_tensor_copy(const EmuTensorMap* map, const void* shared_pointer, int rank,
                                             const int* coordinates, Site site) {
  auto op = std::make_shared<TensorCopy>();
  op->map = *map;  // the caller's copy dies with its frame
  op->shared_start = shared_offset(shared_pointer, site);
  if (op->shared_start % 128)
    report(Severity::Error, "tma", site, 0, "shared address at offset %u is not 128-byte aligned", op->shared_start);
  if (map->rank != rank)
    report(Severity::Error, "tma", site, 0, "%d coordinates for a tensor map of rank %d", rank, map->rank);
  std::copy(coordinates, coordinates + rank, op->coordinates);
  stamp(*op, site);
  return op;
}

std::shared_ptr<LinearCopy> make_linear_copy(const void* shared_pointer, const void* global, unsigned bytes, Site site) {
  auto op = std::make_shared<LinearCopy>();
  op->shared_start = shared_offset(shared_pointer, site);
  op->global = const_cast<char*>(static_cast<const char*>(global));
  op->bytes = bytes;
  if (op->shared_start % 16 || bytes % 16 || uintptr_t(global) % 16)
    report(Severity::Error, "tma", site, 0, "bulk copy of %u bytes: addresses and size must be multiples of 16", bytes);
  stamp(*op, site);
  return op;
}

template <class Op>
void start_store(std::shared_ptr<Op> op, bool add) {
  op->load = false;
  op->add = add;
  current->open_bulk.push_back(op);
  submit_copy(op);
}

template <class Op>
void start_load(std::shared_ptr<Op> op, void* barrier, Site site) {
  op->load = true;
  op->barrier = mbarrier_offset(barrier, site);
  check_mbarrier_for_async(op->barrier, site);
  submit_copy(op);
}
}  // namespace
}  // namespace emu

using namespace emu;

extern "C" {
void emu_tma_load(const EmuTensorMap* map, void* barrier, void* to, int rank, const int* coordinates) {
  const Site site = EMU_SITE;
  start_load(make_tensor_copy(map, to, rank, coordinates, site), barrier, site);
}

void emu_tma_store(const EmuTensorMap* map, const void* from, int rank, const int* coordinates, int add) {
  start_store(make_tensor_copy(map, from, rank, coordinates, EMU_SITE), add);
}

void emu_bulk_load(void* to, const void* global, void* barrier, uint32_t bytes) {
  const Site site = EMU_SITE;
  start_load(make_linear_copy(to, global, bytes, site), barrier, site);
}

void emu_bulk_store(void* global, const void* from, uint32_t bytes, int add_float) {
  start_store(make_linear_copy(from, global, bytes, EMU_SITE), add_float);
}

void emu_bulk_commit() {
  current->bulk_groups.push_back(std::move(current->open_bulk));
  current->open_bulk.clear();
}

void emu_bulk_wait(int pending, int) {
  auto& groups = current->bulk_groups;
  while (int(groups.size()) > pending) {
    const auto& group = groups.front();
    current->waits_for_bulk = true;
    while (!std::all_of(group.begin(), group.end(), [](const auto& op) { return op->done; }))
      block_on("at most %d pending groups of bulk stores", pending);
    current->waits_for_bulk = false;
    if (options.races) {
      Gathered gathered;
      for (const auto& op : group) gathered.add_slot(op->slot_agent, op->tick, true);
      current->clock.acquire(gathered.take());
    }
    groups.pop_front();
  }
}
}
