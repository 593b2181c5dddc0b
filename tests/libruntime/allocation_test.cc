// sqz_attend() allocates nothing: every operator new of the process counts.
#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/libruntime/c_index.h"

namespace {
std::atomic<int64_t> allocations{0};

void* counted(size_t size) {
  ++allocations;
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

}  // namespace
}  // namespace sqz
