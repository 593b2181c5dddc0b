#include "libruntime/capi/fence.h"

#include <cstdio>

namespace sqz::capi {
namespace {

constexpr size_t kLongestMessage = 4096;
thread_local char last_error[kLongestMessage] = "";

// The two enums have the same numbers; the ABI promises its own.
static_assert(static_cast<int>(Code::kInvalidArgument) == SQZ_INVALID_ARGUMENT);
static_assert(static_cast<int>(Code::kNotFound) == SQZ_NOT_FOUND);
static_assert(static_cast<int>(Code::kIo) == SQZ_IO);
static_assert(static_cast<int>(Code::kCorrupt) == SQZ_CORRUPT);
static_assert(static_cast<int>(Code::kUnsupported) == SQZ_UNSUPPORTED);
static_assert(static_cast<int>(Code::kMismatch) == SQZ_MISMATCH);
static_assert(static_cast<int>(Code::kOutOfMemory) == SQZ_OUT_OF_MEMORY);
static_assert(static_cast<int>(Code::kNumeric) == SQZ_NUMERIC);
static_assert(static_cast<int>(Code::kExists) == SQZ_EXISTS);
static_assert(static_cast<int>(Code::kCancelled) == SQZ_CANCELLED);
static_assert(static_cast<int>(Code::kInternal) == SQZ_INTERNAL);

}  // namespace

sqz_status fail(Code code, const char* message) noexcept {
  std::snprintf(last_error, sizeof(last_error), "%s", message);
  return static_cast<sqz_status>(code);
}

}  // namespace sqz::capi

extern "C" {

const char* sqz_last_error(void) {
  return sqz::capi::last_error;
}

const char* sqz_status_string(sqz_status status) {
  return sqz::code_name(static_cast<sqz::Code>(sqz::capi::enum_number(status)));
}

const char* sqz_version(void) {
  return SQZ_VERSION;
}

}  // extern "C"
