// Handlers that -fsanitize=signed-integer-overflow and object-size call: index arithmetic that leaves 32 (or 64) bits,
// and accesses past the end of a thread's own array.
#include <cstdint>
#include <string>

#include "report.h"

namespace {
struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
struct OverflowData {
  SourcePlace place;
  void* type;
};
void overflowed(const char* operation, const void* data) {
  const auto* d = static_cast<const OverflowData*>(data);
  emu::report_line(emu::Severity::Error, "index-overflow", int(d->place.line),
                   std::string("signed integer overflow in ") + operation);
}
}  // namespace

extern "C" {
void __ubsan_handle_type_mismatch_v1(void* data, uintptr_t) {
  emu::report_line(emu::Severity::Error, "out-of-bounds", int(static_cast<OverflowData*>(data)->place.line),
                   "access past the end of a thread's own array");
}
void __ubsan_handle_add_overflow(void* data, void*, void*) { overflowed("an addition", data); }
void __ubsan_handle_sub_overflow(void* data, void*, void*) { overflowed("a subtraction", data); }
void __ubsan_handle_mul_overflow(void* data, void*, void*) { overflowed("a product", data); }
void __ubsan_handle_negate_overflow(void* data, void*) { overflowed("a negation", data); }
void __ubsan_handle_divrem_overflow(void* data, void*, void*) { overflowed("a division", data); }
}
