// The selector `quest` against brute force, and its budget.
#include <gtest/gtest.h>

#include "libruntime/kernels/cpu/kernels.h"
#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using testing::Served;
using testing::TinyIndexOptions;

constexpr SelectorKind kQuest = SelectorKind::kQuest;

TinyIndexOptions paged(int64_t page_size, int64_t dim, int64_t group) {
  return {.layers = 1,
          .query_heads = 2 * group,
          .kv_heads = 2,
          .head_dim = dim,
          .tokens = 700,
          .sink = 3,
          .tail = 20,
          .page_size = page_size};
}

TEST(Quest, KernelIsTheBoundOfThePage) {
  testing::Random random(3);
  for (const CpuKernels* kernels : available_cpu_kernels()) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      for (const int64_t dim : {1, 5, 31, 64, 80, 128}) {
        constexpr int64_t kPages = 7, kRows = 6;
        const auto a = random.normals(kPages * dim), b = random.normals(kPages * dim);
        std::vector<float> low(a.size()), high(a.size());
        for (size_t i = 0; i < a.size(); ++i) {
          low[i] = std::min(a[i], b[i]);
          high[i] = std::max(a[i], b[i]);
        }
        const auto min = testing::stored(dtype, low), max = testing::stored(dtype, high);
        const auto q = random.normals(kRows * dim);
        std::vector<float> upper(q.size()), lower(q.size());
        for (size_t i = 0; i < q.size(); ++i) {
          upper[i] = std::max(q[i], 0.0f);
          lower[i] = std::min(q[i], 0.0f);
        }
        std::vector<float> packed_upper(kRows * padded_dim(dim)), packed_lower(packed_upper);
        kernels->pack(dtype, upper.data(), dim, kRows, dim, packed_upper.data());
        kernels->pack(dtype, lower.data(), dim, kRows, dim, packed_lower.data());
        std::vector<float> out(kRows * (kPages + 2), -7.0f);
        kernels->page_bounds(dtype, packed_upper.data(), packed_lower.data(), kRows, min.data(),
                             max.data(), kPages, dim, out.data(), kPages + 2);
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t p = 0; p < kPages; ++p) {
            double expected = 0;
            for (int64_t c = 0; c < dim; ++c) {
              const double x = q[r * dim + c];
              expected += std::max(x * reference::element(dtype, min.data(), p * dim + c),
                                   x * reference::element(dtype, max.data(), p * dim + c));
            }
            ASSERT_NEAR(out[r * (kPages + 2) + p], expected, 1e-4)
                << kernels->name << " dim " << dim << " row " << r << " page " << p;
          }
          EXPECT_EQ(out[r * (kPages + 2) + kPages], -7.0f) << "written beyond the pages";
        }
      }
    }
  }
}

// Whether the choice was clear enough to be compared.
bool check_against_brute_force(const Served& served, GroupPolicy policy, int64_t tokens,
                               const CpuKernels* kernels) {
  const double keep = 0.2;
  auto options = testing::session_options(
      {.selector = kQuest, .group = policy, .keep = keep, .dense_layers = -1});
  options.kernels = kernels;
  const auto session = testing::open_session(served, options);
  if (session == nullptr) return false;
  const LayerView& view = served.index->layers[0];
  const auto queries = testing::make_queries(served, 0, tokens, 11);
  const auto slots = testing::selected_slots(*session, 0, queries);
  const auto count = static_cast<int64_t>(keep * static_cast<double>(view.slots)) / view.page_size;
  for (int64_t head = 0; head < served.options.kv_heads; ++head) {
    const auto block = testing::group_of(served, queries, 0, tokens, head);
    const auto bounds = reference::page_bounds(view, head, block, tokens, served.group(), policy);
    const auto expected = reference::best_pages(view, bounds, count);
    if (expected.margin < 1e-4) return false;
    EXPECT_EQ(slots[head], expected.slots) << "head " << head;
  }
  testing::expect_attention(served, *session, 0, queries, slots);
  return true;
}

TEST(Quest, EqualsBruteForce) {
  int clear = 0, total = 0;
  for (const int64_t page_size : {2, 3, 16, 100}) {
    for (const int64_t dim : {64, 80}) {
      for (const int64_t group : {1, 4}) {
        const Served served = testing::serve(paged(page_size, dim, group));
        for (const GroupPolicy policy : kGroupPolicies) {
          for (const int64_t tokens : {1, 5}) {
            SCOPED_TRACE(concat("page ", page_size, " dim ", dim, " group ", group, " policy ",
                                group_policy_name(policy), " tokens ", tokens));
            ++total;
            clear += check_against_brute_force(served, policy, tokens, nullptr);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_GT(clear, total * 8 / 10);
}

TEST(Quest, EveryInstructionSetChoosesTheSame) {
  const Served served = testing::serve(paged(16, 96, 3));
  for (const CpuKernels* kernels : available_cpu_kernels()) {
    SCOPED_TRACE(kernels->name);
    EXPECT_TRUE(check_against_brute_force(served, GroupPolicy::kAny, 3, kernels));
  }
}

TEST(Quest, TheBoundIsAboveEveryKeyOfThePage) {
  const Served served = testing::serve(paged(16, 64, 1));
  const LayerView& view = served.index->layers[0];
  const auto queries = testing::make_queries(served, 0, 4, 2);
  for (int64_t t = 0; t < 4; ++t) {
    const float* q = queries.data() + t * 128;
    for (int64_t slot = 0; slot < view.slots; ++slot) {
      EXPECT_LE(reference::dot(q, view.dtype, view.keys, slot, 64),
                reference::page_bound(q, view, 0, slot / 16) + 1e-9);
    }
  }
}

TEST(Quest, DeliveredBudgetIsAtMostTheAskedOneAndLessThanAPageBelow) {
  for (const int64_t page_size : {1, 7, 16, 64}) {
    TinyIndexOptions o = paged(page_size, 16, 2);
    o.tokens = 5000;
    const Served served = testing::serve(o);
    const LayerView& view = served.index->layers[0];
    const double least =
        static_cast<double>(view.exact + view.pages + page_size) / static_cast<double>(o.tokens);
    for (const double budget : {least, 0.3, 0.5, 0.77}) {
      if (budget < least || least >= 1) continue;
      const auto session = testing::open_session(
          served,
          testing::session_options({.selector = kQuest, .budget = budget, .dense_layers = -1}));
      ASSERT_NE(session, nullptr);
      for (const int64_t tokens : {1, 9}) {
        ASSERT_TRUE(testing::attend(*session, 0, testing::make_queries(served, 0, tokens, 5)).ok());
      }
      EXPECT_LE(testing::delivered(*session, 0), budget + 1e-12) << page_size;
      // Where the short last page is among the best, a whole one more is missing.
      const double page = static_cast<double>(page_size) / static_cast<double>(o.tokens);
      EXPECT_GT(testing::delivered(*session, 0), budget - 2 * page) << page_size;
    }
    // Less cannot be met: the message has the least budget, and that one works (above).
    const Status status = testing::refusal(served, {.selector = kQuest, .budget = least * 0.99});
    EXPECT_EQ(status.code(), page_size == 1 ? Code::kOk : Code::kInvalidArgument);
    if (page_size > 1) {
      EXPECT_NE(status.message().find(concat("expected at least ", least)), std::string::npos)
          << status.message();
    }
  }
}

TEST(Quest, EqualBoundsAreTakenInOrder) {
  const Served served = testing::serve(paged(16, 8, 1));
  const auto session = testing::open_session(
      served, testing::session_options({.selector = kQuest, .keep = 0.25, .dense_layers = -1}));
  const std::vector<float> zeros(16, 0.0f);
  for (const auto& slots : testing::selected_slots(*session, 0, zeros)) {
    const auto first_miss = std::find(slots.begin(), slots.end(), false) - slots.begin();
    EXPECT_EQ(first_miss, 677 / 4 / 16 * 16);
    EXPECT_EQ(std::count(slots.begin(), slots.end(), true), first_miss);
  }
}

TEST(Quest, TheFirstTwoLayersAreReadWholeUnlessAskedOtherwise) {
  TinyIndexOptions o = paged(16, 8, 1);
  o.layers = 4;
  const Served served = testing::serve(o);
  for (const auto& [asked, dense] : {std::pair{0, 2}, {-1, 0}, {1, 1}, {3, 3}, {4, 4}}) {
    const auto session = testing::open_session(
        served,
        testing::session_options({.selector = kQuest, .keep = 0.25, .dense_layers = asked}));
    for (int64_t layer = 0; layer < o.layers; ++layer) {
      const auto queries = testing::make_queries(served, layer, 3, 5);
      const auto slots = testing::selected_slots(*session, layer, queries);
      EXPECT_EQ(slots[0] == std::vector<bool>(677, true), layer < dense) << asked << " " << layer;
      testing::expect_attention(served, *session, layer, queries, slots);
      EXPECT_EQ(testing::delivered(*session, layer) == 1.0, layer < dense);
    }
  }
  EXPECT_EQ(testing::refusal(served, {.selector = kQuest, .keep = 0.2, .dense_layers = 5}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(testing::refusal(served, {.selector = kQuest, .keep = 0.2, .dense_layers = -2}).code(),
            Code::kInvalidArgument);
}

TEST(Quest, AShortContextIsReadWholeAndSaysSo) {
  // Sink, tail and bounds alone are 23 + 43 of 700.
  const Served served = testing::serve(paged(16, 8, 1));
  const auto session =
      testing::open_session(served, testing::session_options({.selector = kQuest, .budget = 0.05}));
  EXPECT_TRUE(session->plan().fallback);
  const auto queries = testing::make_queries(served, 0, 2, 5);
  testing::expect_attention(served, *session, 0, queries,
                            testing::selected_slots(*session, 0, queries));
  EXPECT_EQ(testing::delivered(*session, 0), 1.0);
  const auto worth =
      testing::open_session(served, testing::session_options({.selector = kQuest, .budget = 0.5}));
  EXPECT_FALSE(worth->plan().fallback);
}

TEST(Quest, RefusesWhatItCannotServe) {
  const Served served = testing::serve(paged(16, 8, 1));
  const double threshold = 0.1;
  const SelectionRequest bad[] = {
      {.selector = kQuest},
      {.selector = kQuest, .levels = 1, .keep = 0.2},
      {.selector = kQuest, .thresholds = &threshold},
      {.selector = kQuest, .budget = 0.2, .keep = 0.2},
      {.selector = kQuest, .budget = 1.5},
  };
  for (const auto& request : bad) {
    EXPECT_EQ(testing::refusal(served, request).code(), Code::kInvalidArgument) << &request - bad;
  }
  const Served clusters = testing::serve({.tokens = 700, .clusters = {20}});
  const Status status = testing::refusal(clusters, {.selector = kQuest, .keep = 0.2});
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("partition: found kmeans, expected pages"), std::string::npos);
  const Status other = testing::refusal(served, {.keep = 0.2});
  EXPECT_EQ(other.code(), Code::kUnsupported);
  EXPECT_NE(other.message().find("partition: found pages, expected kmeans"), std::string::npos);
}

TEST(Quest, AnInfiniteBoundIsAnError) {
  const Served served = testing::serve(paged(16, 8, 1));
  const auto session = testing::open_session(
      served, testing::session_options({.selector = kQuest, .keep = 0.25, .dense_layers = -1}));
  const std::vector<float> huge(16, 3e38f);
  EXPECT_EQ(testing::attend(*session, 0, huge).status().code(), Code::kNumeric);
}

}  // namespace
}  // namespace sqz
