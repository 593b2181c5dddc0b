#include "formats/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace sqz {
namespace {

TEST(Parallel, ReportsTheLowestFailure) {
  for (int round = 0; round < 200; ++round) {
    // Pieces 3 and 4 both fail, at the same time, now one and now the other a little earlier.
    std::atomic<int> waiting{0};
    const int threads = 2 + round % 3;
    const Status status = parallel_for(50, threads, [&](int64_t i) {
      if (i < 3) return Status();
      ++waiting;
      while (waiting.load() < 2) std::this_thread::yield();
      if ((round % 2 == 0) == (i == 3)) std::this_thread::sleep_for(std::chrono::microseconds(200));
      return Status(Code::kNumeric, std::to_string(i));
    });
    EXPECT_EQ(status.code(), Code::kNumeric);
    EXPECT_EQ(status.message(), "3") << "round " << round;
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

}  // namespace
}  // namespace sqz
