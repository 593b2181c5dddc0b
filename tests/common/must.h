// Results that a test cannot go on without.
#pragma once

#include <gtest/gtest.h>

#include <utility>

#include "formats/base/status.h"

namespace sqz {

// Unless the status is ok, the test fails at the line of the call, and ends.
inline void must(const Status& status, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
  if (status.ok()) return;
  ADD_FAILURE_AT(file, line) << status.message();
  throw ::testing::AssertionException({::testing::TestPartResult::kFatalFailure, file, line, ""});
}

// The value of a result; without one the test ends likewise.
template <class T>
T must(Result<T> result, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  must(result.status(), file, line);
  return *std::move(result);
}

}  // namespace sqz
