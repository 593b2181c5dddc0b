#include "libindex/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace sqz {
namespace {

TEST(Parallel, EachIndexOnce) {
  for (int threads : {1, 2, 7}) {
    std::vector<std::atomic<int>> calls(100);
    EXPECT_TRUE(parallel_for(100, threads, [&](int64_t i) {
                  ++calls[i];
                  return Status();
                }).ok());
    for (const auto& count : calls) EXPECT_EQ(count.load(), 1);
  }
}

TEST(Parallel, ReportsTheLowestFailure) {
  for (int threads : {1, 2, 7}) {
    const Status status = parallel_for(500, threads, [](int64_t i) {
      return i == 3 || i > 5 ? Status(Code::kNumeric, std::to_string(i)) : Status();
    });
    EXPECT_EQ(status.code(), Code::kNumeric);
    EXPECT_EQ(status.message(), "3");
  }
}

TEST(Parallel, ExceptionsBecomeStatus) {
  EXPECT_EQ(parallel_for(4, 2, [](int64_t) -> Status { throw std::bad_alloc(); }).code(),
            Code::kOutOfMemory);
  const Status status =
      parallel_for(4, 2, [](int64_t) -> Status { throw std::runtime_error("x"); });
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_EQ(status.message(), "x");
}

TEST(Parallel, NothingToDo) {
  EXPECT_TRUE(parallel_for(0, 4, [](int64_t) { return Status(Code::kInternal, ""); }).ok());
}

}  // namespace
}  // namespace sqz
