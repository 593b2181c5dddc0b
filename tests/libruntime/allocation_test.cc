// Every operator new of the process counts, and can be made to fail: sqz_attend() allocates
// nothing, and no failed allocation of the calls that read a file's header or its contents ends the
// process.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>

#include "tests/libruntime/c_index.h"

namespace {
std::atomic<int64_t> allocations{0};
std::atomic<int64_t> failing{-1};  // the number of the one that fails

void* counted(size_t size) {
  if (allocations++ == failing) throw std::bad_alloc();
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
}  // namespace

// Default visibility, so that libsqz.so uses them too.
#define SQZ_REPLACED __attribute__((visibility("default")))
SQZ_REPLACED void* operator new(size_t size) {
  return counted(size);
}
SQZ_REPLACED void* operator new[](size_t size) {
  return counted(size);
}
SQZ_REPLACED void operator delete(void* memory) noexcept {
  std::free(memory);
}
SQZ_REPLACED void operator delete[](void* memory) noexcept {
  std::free(memory);
}
SQZ_REPLACED void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
SQZ_REPLACED void operator delete[](void* memory, size_t) noexcept {
  std::free(memory);
}

namespace sqz {
namespace {

using testing::Call;

using Allocation = testing::CIndexTest;

TEST_F(Allocation, NoneInAttend) {
  const runtime::Index index(path());
  for (const int rule : {SQZ_RULE_THRESHOLD, SQZ_RULE_BUDGET}) {
    for (const int residual : {SQZ_RESIDUAL_DROP, SQZ_RESIDUAL_ESTIMATE}) {
      for (const int64_t block : {0, 1, 16}) {
        const double thresholds[] = {1e-4, 1e-4};
        auto options = testing::held_budget(0.2);
        if (rule == SQZ_RULE_THRESHOLD) {
          options.rule = rule;
          options.budget = 0;
          options.thresholds = thresholds;
        }
        options.residual = residual;
        options.block = block;
        options.max_tokens = 100;
        const int64_t before_creation = allocations;
        runtime::Session session(index, options);
        ASSERT_GT(allocations, before_creation) << "the counter must see libsqz's allocations";
        int64_t positions[100], indptr[] = {0, 1, 40, 100};
        for (int64_t t = 0; t < 100; ++t) positions[t] = 5000 + t;
        for (const int64_t layer : {0, 1}) {
          Call one(1, 1, layer), many(100, 2, layer);
          one.args.positions = many.args.positions = positions;
          many.args.indptr = indptr;
          many.args.requests = 3;
          const int64_t before = allocations;
          const sqz_status first = sqz_attend(session.handle(), &one.args);
          const sqz_status second = sqz_attend(session.handle(), &many.args);
          const int64_t after = allocations;
          ASSERT_EQ(first, SQZ_OK) << sqz_last_error();
          ASSERT_EQ(second, SQZ_OK) << sqz_last_error();
          EXPECT_GT(session.stats(0).keys_read, 0u);
          EXPECT_EQ(after - before, 0) << "rule " << rule << " residual " << residual;
        }
      }
    }
  }
}

// Calls once for each of its allocations, of which that one fails: the call says so, or did without
// it.
void fail_each_allocation(const std::function<sqz_status()>& call) {
  int64_t failed = 0, refused = 0;
  for (bool more = true; more; ++failed) {
    failing = allocations + failed;
    const sqz_status status = call();
    more = allocations > failing;
    failing = -1;
    refused += status != SQZ_OK;
    ASSERT_TRUE(status == SQZ_OK || status == SQZ_OUT_OF_MEMORY)
        << "allocation " << failed << ": status " << status << ", " << sqz_last_error();
  }
  EXPECT_GT(refused, 0) << "no failed allocation was noticed";
}

TEST_F(Allocation, AFailedOneIsAStatus) {
  const std::string file = path();
  for (const sqz_open_mode mode : {SQZ_OPEN_MMAP, SQZ_OPEN_READ}) {
    fail_each_allocation([&] {
      sqz_index* index = nullptr;
      const sqz_status status = sqz_index_open(file.c_str(), mode, &index);
      sqz_index_close(index);
      return status;
    });
  }
  sqz_index* index = nullptr;
  ASSERT_EQ(sqz_index_open(file.c_str(), SQZ_OPEN_MMAP, &index), SQZ_OK) << sqz_last_error();
  fail_each_allocation([&] { return sqz_index_verify(index); });
  // What has no allocation that can fail is never refused.
  const int64_t before = allocations;
  sqz_index_info info{.struct_size = sizeof(sqz_index_info)};
  EXPECT_EQ(sqz_index_describe(index, &info), SQZ_OK) << sqz_last_error();
  EXPECT_EQ(allocations, before);
  sqz_index_close(index);
}

}  // namespace
}  // namespace sqz
