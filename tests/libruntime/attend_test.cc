// Attention through a session against the float64 reference: dense, sparse, blocks, requests.
#include <gtest/gtest.h>

#include "libruntime/kernels/cpu/kernels.h"
#include "tests/libruntime/served_index.h"

namespace sqz {
namespace {

using testing::CallOptions;
using testing::Output;
using testing::Served;

std::unique_ptr<Session> open(const Served& served, const SessionOptions& options) {
  auto session = Session::create(served.index, options);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return session.ok() ? *std::move(session) : nullptr;
}

SessionOptions dense_options() {
  SessionOptions options;
  options.selection.selector = SelectorKind::kDense;
  options.max_tokens = 256;
  options.threads = 2;
  return options;
}

// Tokens that select together.
struct Block {
  int64_t first = 0, tokens = 0;
};

std::vector<Block> blocks_of(int64_t tokens, int64_t block, std::vector<int64_t> indptr) {
  if (indptr.empty()) indptr = {0, tokens};
  std::vector<Block> blocks;
  for (size_t r = 0; r + 1 < indptr.size(); ++r) {
    const int64_t step = block == 0 ? tokens : block;
    for (int64_t t = indptr[r]; t < indptr[r + 1]; t += step) {
      blocks.push_back({t, std::min(step, indptr[r + 1] - t)});
    }
  }
  return blocks;
}

reference::Selected everything(const LayerView& view) {
  reference::Selected all;
  all.slots.assign(view.slots, true);
  return all;
}

// How far `output` is from a reference state; relative to the outputs' size for the 16-bit types.
void expect_state(const reference::State& expected, const Output& output, int64_t row, int64_t dim,
                  double tolerance) {
  ASSERT_NEAR(output.lse[row], expected.lse, 2e-5) << "lse of row " << row;
  for (int64_t c = 0; c < dim; ++c) {
    ASSERT_NEAR(output.out[row * dim + c], expected.out[c],
                tolerance * (1 + std::abs(expected.out[c])))
        << "row " << row << " dim " << c;
  }
}

double tolerance_of(DType dtype) {
  return dtype == DType::kF32 ? 2e-5 : dtype == DType::kF16 ? 6e-4 : 5e-3;
}

// What every row of queries [tokens, Hq, d] gives with all keys.
std::vector<reference::State> dense_states(const Served& served,
                                           const std::vector<float>& queries) {
  const auto& o = served.options;
  const LayerView& view = served.index->layers[0];
  std::vector<reference::State> states;
  for (int64_t row = 0; row < std::ssize(queries) / o.head_dim; ++row) {
    const int64_t head = row % o.query_heads / served.group();
    states.push_back(reference::attend(queries.data() + row * o.head_dim, view, head,
                                       served.scale(), everything(view), false));
  }
  return states;
}

void expect_states(const std::vector<reference::State>& expected, DType dtype,
                   const Output& output) {
  ASSERT_EQ(output.lse.size(), expected.size());
  for (size_t row = 0; row < expected.size(); ++row) {
    expect_state(expected[row], output, static_cast<int64_t>(row), std::ssize(expected[row].out),
                 tolerance_of(dtype));
  }
}

TEST(Attend, DenseEqualsReferenceForAllShapes) {
  for (const int64_t dim : {64, 80, 96, 128, 256, 8, 5}) {
    for (const int64_t group : {1, 2, 4, 7, 8}) {
      const Served served = testing::serve({.layers = 1,
                                            .query_heads = 2 * group,
                                            .kv_heads = 2,
                                            .head_dim = dim,
                                            .tokens = 700,
                                            .sink = 3,
                                            .tail = 20,
                                            .clusters = {60},
                                            .dtype = dim % 3 == 0 ? DType::kF16 : DType::kBF16});
      const auto session = open(served, dense_options());
      for (const int64_t tokens : {1, 3, 20}) {
        SCOPED_TRACE(concat("dim ", dim, " group ", group, " tokens ", tokens));
        const auto queries = testing::make_queries(served, 0, tokens, 5);
        const auto output = testing::attend(*session, 0, queries);
        ASSERT_TRUE(output.ok()) << output.status().message();
        expect_states(dense_states(served, queries), DType::kF32, *output);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The head sizes that kernels are specialised for, and 80, which they are not.
TEST(Attend, EveryInstructionSetAndQueryType) {
  for (const auto& [stored_as, dim] : {std::pair{DType::kBF16, 64},
                                       {DType::kBF16, 80},
                                       {DType::kBF16, 96},
                                       {DType::kBF16, 128},
                                       {DType::kF16, 80}}) {
    const Served served = testing::serve({.layers = 1,
                                          .query_heads = 8,
                                          .kv_heads = 2,
                                          .head_dim = dim,
                                          .tokens = 700,
                                          .clusters = {60},
                                          .dtype = stored_as});
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t tokens : {1, 2, 20}) {
        const auto queries = testing::rounded(dtype, testing::make_queries(served, 0, tokens, 6));
        const auto expected = dense_states(served, queries);
        for (const CpuKernels* kernels : available_cpu_kernels()) {
          SCOPED_TRACE(
              concat(kernels->name, " ", dtype_name(dtype), " dim ", dim, " tokens ", tokens));
          SessionOptions options = dense_options();
          options.kernels = kernels;
          const auto session = open(served, options);
          const auto output = testing::attend(*session, 0, queries, {.dtype = dtype});
          ASSERT_TRUE(output.ok()) << output.status().message();
          expect_states(expected, dtype, *output);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

struct SparseCase {
  int levels;
  GroupPolicy group;
  bool budget_rule;
  int64_t block;
  int64_t tokens;
  std::vector<int64_t> indptr;
};

// Compares one call with the reference; returns whether the selection was clear enough to compare.
bool check_sparse(const Served& served, const SparseCase& c) {
  const auto& o = served.options;
  const LayerView& view = served.index->layers[0];
  const int index_levels = view.levels;
  const double keep = 0.2;
  SessionOptions options;
  options.threads = 2;
  options.max_tokens = 256;
  options.block = c.block;
  options.selection.group = c.group;
  options.selection.rule = c.budget_rule ? RuleKind::kBudget : RuleKind::kThreshold;
  options.selection.levels = c.levels;
  // T relative to 1 / M, the mean of S over keys; a maximum over more queries is larger.
  const double relative = c.group == GroupPolicy::kMean  ? 0.35
                          : c.group == GroupPolicy::kMax ? 1.0
                                                         : 4.0;
  std::vector<double> thresholds(c.levels, relative / static_cast<double>(view.slots));
  if (c.budget_rule) {
    options.selection.keep = keep;
  } else {
    options.selection.thresholds = thresholds.data();
  }
  const auto session = open(served, options);
  if (session == nullptr) return false;

  const auto queries = testing::make_queries(served, 0, c.tokens, 7);
  const auto output = testing::attend(*session, 0, queries, {.indptr = c.indptr});
  EXPECT_TRUE(output.ok()) << output.status().message();
  if (!output.ok()) return false;
  uint64_t keys = 0, centroids = 0, blocks = 0;
  bool clear = true;
  for (const Block& block : blocks_of(c.tokens, c.block, c.indptr)) {
    ++blocks;
    for (int64_t head = 0; head < o.kv_heads; ++head) {
      reference::SelectParameters p;
      p.levels = c.levels;
      p.group = c.group;
      p.budget_rule = c.budget_rule;
      p.share = keep;  // the tiny index calibrates every head alike
      for (const double t : thresholds) p.log_thresholds.push_back(std::log(t));
      if (c.budget_rule) {
        for (int k = 0; k + 1 < c.levels; ++k) {
          p.log_thresholds[k] = -3.0 - (index_levels - c.levels + k);  // tiny_index.h's coarse T
        }
      }
      const auto group = testing::group_of(served, queries, block.first, block.tokens, head);
      const auto selected =
          reference::select(view, head, group, block.tokens, served.group(), served.scale(), p);
      if (selected.margin < 2e-5) {
        clear = false;
        continue;
      }
      keys += std::count(selected.slots.begin(), selected.slots.end(), true);
      centroids += selected.centroids;
      for (int64_t r = 0; r < block.tokens * served.group(); ++r) {
        const int64_t row = (block.first + r / served.group()) * o.query_heads +
                            head * served.group() + r % served.group();
        const auto expected = reference::attend(queries.data() + row * o.head_dim, view, head,
                                                served.scale(), selected, false);
        expect_state(expected, *output, row, o.head_dim, 2e-5);
        if (::testing::Test::HasFatalFailure()) return true;
      }
    }
  }
  if (clear) {
    const Counters& counters = session->counters(0);
    const uint64_t unit = static_cast<uint64_t>(o.head_dim) * 2;
    EXPECT_EQ(counters.selections, blocks);
    EXPECT_EQ(counters.keys_read, keys);
    EXPECT_EQ(counters.keys_possible, blocks * o.kv_heads * view.slots);
    EXPECT_EQ(counters.bytes_read,
              unit * (2 * keys + 2 * blocks * o.kv_heads * view.exact + centroids));
    EXPECT_EQ(counters.bytes_dense, unit * 2 * blocks * o.kv_heads * o.tokens);
    // A test in which everything or nothing is read would test little.
    EXPECT_LT(keys, counters.keys_possible * 9 / 10);
    EXPECT_GT(keys, 0u);
  }
  return clear;
}

TEST(Attend, SparseEqualsReference) {
  const Served served = testing::serve({.layers = 1,
                                        .query_heads = 8,
                                        .kv_heads = 2,
                                        .head_dim = 64,
                                        .tokens = 900,
                                        .sink = 4,
                                        .tail = 30,
                                        .clusters = {6, 30, 120}});
  int clear = 0, total = 0;
  for (const int levels : {1, 2, 3}) {
    for (const GroupPolicy group : kGroupPolicies) {
      for (const bool budget_rule : {false, true}) {
        const SparseCase shapes[] = {{levels, group, budget_rule, 0, 1, {}},
                                     {levels, group, budget_rule, 0, 13, {}},
                                     {levels, group, budget_rule, 4, 10, {}},
                                     {levels, group, budget_rule, 3, 9, {0, 1, 1, 5, 9}},
                                     {levels, group, budget_rule, 0, 6, {0, 1, 2, 3, 4, 5, 6}}};
        for (const SparseCase& c : shapes) {
          SCOPED_TRACE(concat("levels ", levels, " group ", static_cast<int>(group), " rule ",
                              budget_rule, " block ", c.block, " tokens ", c.tokens, " requests ",
                              c.indptr.size()));
          clear += check_sparse(served, c) ? 1 : 0;
          ++total;
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(clear, total * 9 / 10);
}

TEST(Attend, GroupSizesAndDims) {
  int clear = 0, total = 0;
  for (const int64_t dim : {64, 80, 96, 128, 256}) {
    for (const int64_t group : {1, 2, 4, 7, 8}) {
      const Served served = testing::serve({.layers = 1,
                                            .query_heads = 2 * group,
                                            .kv_heads = 2,
                                            .head_dim = dim,
                                            .tokens = 700,
                                            .clusters = {9, 60},
                                            .dtype = group % 2 == 0 ? DType::kF16 : DType::kBF16});
      for (const int64_t tokens : {1, 11}) {
        SCOPED_TRACE(concat("dim ", dim, " group ", group, " tokens ", tokens));
        clear += check_sparse(served, {2, GroupPolicy::kMean, false, 0, tokens, {}}) ? 1 : 0;
        ++total;
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_GT(clear, total * 9 / 10);
}

TEST(Attend, KeepOneEqualsDense) {
  const Served served =
      testing::serve({.layers = 1, .head_dim = 64, .tokens = 900, .clusters = {6, 60}});
  const auto dense = open(served, dense_options());
  SessionOptions options = dense_options();
  options.selection = {.keep = 1.0};
  const auto all = open(served, options);
  // Thresholds of zero go through the whole selection and keep everything.
  const double zeros[] = {0.0, 0.0};
  options.selection = {.thresholds = zeros};
  const auto selected = open(served, options);
  EXPECT_FALSE(selected->plan().dense);
  for (const int64_t tokens : {1, 30}) {
    const auto queries = testing::make_queries(served, 0, tokens, 8);
    const auto expected = testing::attend(*dense, 0, queries);
    EXPECT_EQ(*testing::attend(*all, 0, queries), *expected);
    EXPECT_EQ(*testing::attend(*selected, 0, queries), *expected);
  }
  EXPECT_EQ(selected->counters(0).keys_read, selected->counters(0).keys_possible);
}

TEST(Attend, SameBitsForAnyNumberOfThreads) {
  const Served served = testing::serve({.layers = 1,
                                        .query_heads = 8,
                                        .kv_heads = 2,
                                        .head_dim = 64,
                                        .tokens = 9000,
                                        .clusters = {30, 300}});
  const double thresholds[] = {1e-5, 5e-5};
  for (const bool dense : {true, false}) {
    for (const int64_t tokens : {1, 5, 70}) {
      const auto queries = testing::make_queries(served, 0, tokens, 9);
      std::vector<Output> outputs;
      for (const int threads : {1, 2, 4, 7}) {
        SessionOptions options = dense_options();
        if (!dense) options.selection = {.thresholds = thresholds};
        options.threads = threads;
        options.block = 16;
        const auto session = open(served, options);
        for (int repeat = 0; repeat < 3; ++repeat) {
          outputs.push_back(*testing::attend(*session, 0, queries));
        }
      }
      for (const Output& output : outputs) EXPECT_EQ(output, outputs.front());
    }
  }
}

TEST(Attend, WavesOfManyBlocksEqualSingleBlocks) {
  // More one-token blocks than a wave holds give what each token gives alone.
  const Served served = testing::serve({.layers = 1,
                                        .query_heads = 8,
                                        .kv_heads = 8,
                                        .head_dim = 8,
                                        .tokens = 20000,
                                        .clusters = {16000}});
  SessionOptions options = dense_options();
  const double threshold = 1e-4;
  options.selection = {.thresholds = &threshold};
  options.block = 1;
  const auto session = open(served, options);
  const int64_t tokens = 150;
  const auto queries = testing::make_queries(served, 0, tokens, 10, 3.0f);
  const auto together = testing::attend(*session, 0, queries);
  ASSERT_TRUE(together.ok()) << together.status().message();
  EXPECT_EQ(session->counters(0).selections, 150u);
  for (const int64_t t : {int64_t{0}, int64_t{60}, int64_t{61}, int64_t{149}}) {
    const std::vector<float> one(queries.begin() + t * 64, queries.begin() + (t + 1) * 64);
    const auto alone = testing::attend(*session, 0, one);
    for (int64_t i = 0; i < 64; ++i) {
      EXPECT_NEAR(together->out[t * 64 + i], alone->out[i], 1e-5) << "token " << t;
    }
  }
}

TEST(Attend, SlidingWindowMasksByPosition) {
  const Served served = testing::serve(
      {.layers = 2, .head_dim = 64, .tokens = 600, .clusters = {20}, .windows = {{1, 200}}});
  const auto& o = served.options;
  const LayerView& view = served.index->layers[1];
  ASSERT_EQ(view.exact, 200);
  SessionOptions options = dense_options();
  options.selection = {.keep = 0.3};
  const auto session = open(served, options);
  // From "all but nothing of the window is in the context" to "nothing is".
  for (const int64_t tokens : {2, 30}) {
    CallOptions call;
    for (int64_t t = 0; t < tokens; ++t) call.positions.push_back(600 + t * 230 / (tokens - 1));
    const auto queries = testing::make_queries(served, 1, tokens, 11);
    const auto output = testing::attend(*session, 1, queries, call);
    ASSERT_TRUE(output.ok()) << output.status().message();
    for (int64_t row = 0; row < tokens * o.query_heads; ++row) {
      const int64_t position = call.positions[row / o.query_heads];
      // Key j is visible from position p if p - j < 200; key i of the layer is token 400 + i.
      const int64_t first = std::min<int64_t>(200, position - 199 - 400);
      const auto expected =
          reference::attend(queries.data() + row * o.head_dim, view,
                            row % o.query_heads / served.group(), served.scale(), {}, false, first);
      if (first == 200) {
        ASSERT_EQ(output->lse[row], -INFINITY);
        ASSERT_EQ(output->out[row * o.head_dim], 0.0f);
      } else {
        expect_state(expected, *output, row, o.head_dim, 2e-5);
      }
    }
  }
  const auto queries = testing::make_queries(served, 1, 1, 12);
  EXPECT_EQ(testing::attend(*session, 1, queries).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(testing::attend(*session, 1, queries, {.positions = {599}}).status().code(),
            Code::kInvalidArgument);
}

TEST(Attend, HugeLogitsAreNeitherNanNorNothing) {
  const Served served =
      testing::serve({.layers = 1, .head_dim = 64, .tokens = 900, .clusters = {6, 60}});
  const double thresholds[] = {0.3 / 828, 0.3 / 828};
  SessionOptions options = dense_options();
  options.selection = {.thresholds = thresholds};
  const auto session = open(served, options);
  for (const int64_t tokens : {1, 20}) {
    const auto queries = testing::make_queries(served, 0, tokens, 13, 5000.0f);
    const auto output = testing::attend(*session, 0, queries);
    ASSERT_TRUE(output.ok()) << output.status().message();
    EXPECT_GT(*std::max_element(output->lse.begin(), output->lse.end()), 10000.0f);
    for (const float x : output->out) ASSERT_TRUE(std::isfinite(x));
    for (const float x : output->lse) ASSERT_TRUE(std::isfinite(x));
  }
  EXPECT_GT(session->counters(0).keys_read, 0u);
}

TEST(Attend, NanNamesTokenAndHead) {
  const Served served =
      testing::serve({.layers = 1, .head_dim = 64, .tokens = 900, .clusters = {60}});
  for (const bool dense : {true, false}) {
    SessionOptions options = dense_options();
    if (!dense) options.selection = {.keep = 0.3};
    const auto session = open(served, options);
    for (const float bad : {std::nanf(""), INFINITY}) {
      auto queries = testing::make_queries(served, 0, 7, 14);
      queries[(5 * 4 + 3) * 64 + 17] = bad;
      queries[(6 * 4 + 0) * 64 + 1] = bad;
      const auto output = testing::attend(*session, 0, queries);
      EXPECT_EQ(output.status().code(), Code::kNumeric);
      EXPECT_NE(output.status().message().find("token 5, query head 3"), std::string::npos)
          << output.status().message();
    }
    // Finite queries whose logits are not.
    auto queries = testing::make_queries(served, 0, 7, 14, 3e38f);
    EXPECT_EQ(testing::attend(*session, 0, queries).status().code(), Code::kNumeric);
  }
}

TEST(Select, RunsAreTheReferencesSlots) {
  const Served served = testing::serve({.layers = 1,
                                        .query_heads = 8,
                                        .kv_heads = 2,
                                        .head_dim = 64,
                                        .tokens = 900,
                                        .clusters = {6, 60}});
  const LayerView& view = served.index->layers[0];
  const double thresholds[] = {0.3 / 800, 0.7 / 800};
  SessionOptions options = dense_options();
  options.selection = {.thresholds = thresholds};
  options.block = 5;
  const auto session = open(served, options);
  int compared = 0;
  for (uint64_t seed = 20; seed < 30; ++seed) {
    const auto queries = testing::make_queries(served, 0, 9, seed);
    const auto heads = session->select(testing::make_call(0, 9, queries.data(), {}));
    ASSERT_TRUE(heads.ok()) << heads.status().message();
    for (int64_t head = 0; head < 2; ++head) {
      const HeadSelection& selection = (*heads)[head];
      std::vector<bool> slots(view.slots, false);
      for (int64_t r = 0; r < selection.run_count; ++r) {
        const KeyRun& run = selection.runs[r];
        ASSERT_GT(run.length, 0u);
        if (r > 0) {
          const KeyRun& before = selection.runs[r - 1];
          ASSERT_GT(run.first, before.first + before.length) << "neighbours must be merged";
        }
        for (uint32_t i = 0; i < run.length; ++i) slots.at(run.first + i) = true;
      }
      reference::SelectParameters p;
      p.levels = 2;
      p.log_thresholds = {std::log(thresholds[0]), std::log(thresholds[1])};
      const auto expected = reference::select(
          view, head, testing::group_of(served, queries, 0, 5, head), 5, 4, served.scale(), p);
      if (expected.margin < 2e-5) continue;
      EXPECT_EQ(slots, expected.slots);
      ++compared;
    }
  }
  EXPECT_GT(compared, 15);
}

}  // namespace
}  // namespace sqz
