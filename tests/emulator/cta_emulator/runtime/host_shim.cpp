// What the emitted host stub calls: looking up functions, building tensor maps, launching, raising errors.
#include <cstdint>
#include <cstring>
#include <string>

#include "../device/abi.h"
#include "launch.h"
#include "report.h"

// The kernel library's table, written by the front end.
extern "C" const EmuKernel emu_kernels[];
extern "C" const int emu_num_kernels;

namespace emu {
namespace {
struct FfiValue {  // TVMFFIAny
  int32_t type;
  uint32_t padding;
  union {
    int64_t integer;
    double real;
    void* pointer;
  };
};
char create_tensor_map, set_device;  // addresses serve as function handles
std::string last_error;
constexpr int kMostParameters = 64;

// Sizes by CUtensorMapDataType.
int element_size(int type) {
  static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  return type >= 0 && type < 13 ? sizes[type] : 0;
}

void check_tensor_map(const EmuTensorMap& map) {
  const int inner = map.box[0] * map.element_bytes;
  const auto fail = [](const char* format, long a, long b) { report(Severity::Error, "tensor-map", 0, 0, format, a, b); };
  if (map.swizzle && inner > 16 << map.swizzle) fail("inner box of %ld bytes, swizzle spans %ld", inner, 16 << map.swizzle);
  if (inner % 16) fail("inner box of %ld bytes is no multiple of %ld", inner, 16);
  if (uintptr_t(map.base) % 16) fail("tensor address is not a multiple of %ld (remainder %ld)", 16, uintptr_t(map.base) % 16);
  for (int i = 0; i < map.rank; i++) {
    if (map.box[i] < 1 || map.box[i] > 256) fail("box[%ld] is %ld, allowed are 1 to 256", i, map.box[i]);
    if (i && map.stride_bytes[i] % 16) fail("stride[%ld] is %ld bytes, no multiple of 16", i, map.stride_bytes[i]);
    if (map.extent[i] < 1 || map.extent[i] > int64_t(1) << 32) fail("extent[%ld] is %ld", i, map.extent[i]);
  }
}

// Arguments: map, type, rank, address, extents, strides in bytes, box, element strides, interleave, swizzle, L2, fill.
int encode_tensor_map(const FfiValue* a) {
  auto* map = static_cast<EmuTensorMap*>(a[0].pointer);
  memset(map, 0, sizeof *map);
  map->element_type = int(a[1].integer);
  map->rank = int(a[2].integer);
  map->base = static_cast<char*>(a[3].pointer);
  map->element_bytes = element_size(map->element_type);
  const int rank = map->rank;
  if (rank < 1 || rank > 5 || !map->element_bytes) {
    report(Severity::Error, "tensor-map", 0, 0, "rank %d, data type %d", rank, map->element_type);
    return -1;
  }
  for (int i = 0; i < rank; i++) {
    map->extent[i] = a[4 + i].integer;
    map->stride_bytes[i] = a[4 + rank + i].integer;
    map->box[i] = int(a[4 + 2 * rank + i].integer);
    if (a[4 + 3 * rank + i].integer != 1) report(Severity::Error, "unsupported", 0, 0, "tensor map with element strides");
  }
  const FfiValue* rest = a + 4 + 4 * rank;
  if (rest[0].integer) report(Severity::Error, "unsupported", 0, 0, "interleaved tensor map");
  map->swizzle = int(rest[1].integer);
  if (map->swizzle > 3) report(Severity::Error, "unsupported", 0, 0, "tensor-map swizzle %d", map->swizzle);
  if (rest[3].integer) report(Severity::Error, "unsupported", 0, 0, "tensor map that fills with NaN");
  check_tensor_map(*map);
  return 0;
}

// Arguments of a launch: the parameters, the grid's extents, the block's three, dynamic shared memory if used.
int launch_kernel(const EmuKernel& kernel, FfiValue* a, int count) {
  const int parameters = int(strlen(kernel.parameter_kinds)), tail = kernel.uses_dynamic_shared ? 4 : 3;
  const int grid_extents = count - parameters - tail;
  if (parameters > kMostParameters || grid_extents < 1 || grid_extents > 3) {
    last_error = "RuntimeError: launch of " + std::string(kernel.name) + " with " + std::to_string(count) + " arguments";
    return -1;
  }
  void* arguments[kMostParameters];
  float reals[kMostParameters];
  for (int i = 0; i < parameters; i++) {
    const char kind = kernel.parameter_kinds[i];
    reals[i] = kind == 'F' ? float(a[i].real) : 0.0f;
    arguments[i] = kind == 'T' ? a[i].pointer : kind == 'F' ? static_cast<void*>(&reals[i]) : &a[i].integer;
  }
  LaunchShape shape{{1, 1, 1}, {1, 1, 1}, 0};
  for (int i = 0; i < grid_extents; i++) {
    const int64_t extent = a[parameters + i].integer;
    if (extent < 1 || extent > (i ? 65535 : INT32_MAX)) {
      report(Severity::Error, "launch", 0, 0, "grid extent %d is %ld: the device's runtime refuses it", i, long(extent));
      return -1;
    }
    shape.grid[i] = unsigned(extent);
  }
  for (int i = 0; i < 3; i++) shape.block[i] = unsigned(a[count - tail + i].integer);
  if (kernel.uses_dynamic_shared) shape.dynamic_shared_bytes = unsigned(a[count - 1].integer);
  return launch(kernel, arguments, shape) ? 0 : -1;
}
}  // namespace

extern "C" {
const char* emu_last_error() { return last_error.c_str(); }
void emu_clear_error() { last_error.clear(); }

int TVMBackendGetFuncFromEnv(void*, const char* name, void** out) {
  *out = nullptr;
  if (!strcmp(name, "__tvm_tensormap_create_tiled")) *out = &create_tensor_map;
  if (!strcmp(name, "__tvm_set_device")) *out = &set_device;
  for (int i = 0; i < emu_num_kernels; i++)
    if (!strcmp(name, emu_kernels[i].name)) *out = const_cast<EmuKernel*>(&emu_kernels[i]);
  if (*out) return 0;
  last_error = "RuntimeError: the host stub asks for a function the emulator lacks: " + std::string(name);
  return -1;
}

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) {
  last_error = std::string(kind) + ": " + message;
}

void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int count) {
  last_error = std::string(kind) + ": ";
  for (int i = 0; i < count; i++) last_error += parts[i];
}

int TVMFFIFunctionCall(void* function, FfiValue* arguments, int count, FfiValue*) {
  if (function == &set_device) return 0;
  if (function == &create_tensor_map) return encode_tensor_map(arguments);
  return launch_kernel(*static_cast<EmuKernel*>(function), arguments, count);
}
}
}  // namespace emu
