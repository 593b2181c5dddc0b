// Attention over rows of codes against the float64 reference over what they decode to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "libruntime/kernels/cpu/kernels.h"
#include "sqz/sqz.h"
#include "tests/libruntime/coded_rows.h"

namespace sqz {
namespace {

using testing::decode;
using testing::Decoded;
using testing::Output;
using testing::serve_coded;
using testing::Served;
using testing::TinyIndexOptions;

std::vector<float> queries_of(const Served& served, const Decoded& layer, int64_t tokens) {
  const Served decoded = {served.options, [&] {
                            auto index = std::make_shared<ServedIndex>(*served.index);
                            index->layers[0] = layer.view;
                            return index;
                          }()};
  return testing::make_queries(decoded, 0, tokens, 7);
}

SessionOptions options_of(SelectorKind selector) {
  SessionOptions options;
  options.selection.selector = selector;
  options.max_tokens = 64;
  options.threads = 2;
  if (selector != SelectorKind::kDense) options.selection.keep = 0.3;
  return options;
}

// One block: every token shares the selection, which is asked for first.
void expect_reference(const Served& served, const SessionOptions& options, int64_t tokens) {
  const auto opened = Session::create(served.index, options);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  Session& session = **opened;
  const auto& o = served.options;
  const Decoded layer = decode(served.index->layers[0]);
  const auto queries = queries_of(served, layer, tokens);
  const auto selected = session.select(testing::make_call(0, tokens, queries.data(), {}));
  ASSERT_TRUE(selected.ok()) << selected.status().message();
  std::vector<reference::Selected> heads;
  for (const HeadSelection& s : *selected) {
    reference::Selected& head = heads.emplace_back();
    head.slots.assign(static_cast<size_t>(layer.view.slots), false);
    for (int64_t i = 0; i < s.run_count; ++i) {
      for (uint32_t j = 0; j < s.runs[i].length; ++j) head.slots[s.runs[i].first + j] = true;
    }
  }
  const auto output = testing::attend(session, 0, queries);
  ASSERT_TRUE(output.ok()) << output.status().message();
  for (int64_t row = 0; row < std::ssize(output->lse); ++row) {
    const int64_t head = row % o.query_heads / served.group();
    const auto expected =
        reference::attend(queries.data() + row * o.head_dim, layer.view, head, served.scale(),
                          heads[static_cast<size_t>(head)], false);
    ASSERT_NEAR(output->lse[row], expected.lse, 5e-5) << "row " << row;
    for (int64_t c = 0; c < o.head_dim; ++c) {
      ASSERT_NEAR(output->out[row * o.head_dim + c], expected.out[c], 5e-5) << "row " << row;
    }
  }
}

TinyIndexOptions tiny(int64_t dim, int64_t group = 4, DType dtype = DType::kBF16) {
  return {.layers = 1,
          .query_heads = 2 * group,
          .kv_heads = 2,
          .head_dim = dim,
          .tokens = 400,
          .sink = 3,
          .tail = 20,
          .clusters = {8, 40},
          .key_calibration = true,
          .heavy_hitters = true,
          .dtype = dtype};
}

TEST(CodedRows, DenseEqualsReferenceForAllShapes) {
  for (const int64_t dim : {64, 96, 128, 5}) {
    for (const int64_t group : {1, 7}) {
      const Served served = serve_coded(
          tiny(dim, group, dim % 3 == 0 ? DType::kF16 : DType::kBF16), {.rows = RowKind::kQ8});
      for (const int64_t tokens : {1, 3, 20}) {
        SCOPED_TRACE(concat("dim ", dim, " group ", group, " x ", tokens));
        expect_reference(served, options_of(SelectorKind::kDense), tokens);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(CodedRows, EveryInstructionSet) {
  const Served served = serve_coded(tiny(64), {.rows = RowKind::kQ8});
  for (const CpuKernels* kernels : available_cpu_kernels()) {
    for (const int64_t tokens : {1, 20}) {
      SCOPED_TRACE(concat(kernels->name, " x ", tokens));
      SessionOptions options = options_of(SelectorKind::kDense);
      options.kernels = kernels;
      expect_reference(served, options, tokens);
    }
  }
}

TEST(CodedRows, EverySelectorOfClusters) {
  const Served served = serve_coded(tiny(64), {.rows = RowKind::kQ8});
  // window is left out: it does not read the sink.
  for (const SelectorKind selector : {SelectorKind::kSqueezed, SelectorKind::kIdeal,
                                      SelectorKind::kStream, SelectorKind::kH2o}) {
    SCOPED_TRACE(concat("selector ", static_cast<int>(selector)));
    SessionOptions options = options_of(selector);
    options.selection.rule =
        selector == SelectorKind::kSqueezed ? RuleKind::kBudget : RuleKind::kThreshold;
    for (const int64_t tokens : {1, 20}) {
      if (tokens > 1 && selector == SelectorKind::kIdeal) continue;  // it selects token by token
      expect_reference(served, options, tokens);
    }
  }
}

// What a selection with key codes of one block must be: the clusters of `alive` of the keys, best
// first, and of their keys the best by code, as many as the clusters that are kept have.
struct ByCodes {
  std::vector<bool> read, guessed;            // [M]
  std::vector<reference::Cluster> estimated;  // not alive
  double margin = reference::kInfinity;
};

ScoreProblem problem_of(const Served& served, const std::vector<float>& queries, int64_t tokens,
                        const float* rows, const std::vector<uint32_t>& sizes) {
  ScoreProblem problem;
  problem.dtype = DType::kF32;
  problem.dim = served.options.head_dim;
  problem.clusters = std::ssize(sizes);
  problem.centroids = rows;
  problem.sizes = sizes.data();
  problem.queries = queries.data();
  problem.tokens = tokens;
  problem.group = served.group();
  problem.scale = static_cast<float>(served.scale());
  return problem;
}

std::vector<size_t> ranking(const std::vector<double>& scores) {
  std::vector<size_t> out(scores.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = i;
  std::stable_sort(out.begin(), out.end(),
                   [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  return out;
}

// `wanted` keys are read.
ByCodes choose_by_codes(const Served& served, const Decoded& layer, int64_t head,
                        const std::vector<float>& queries, int64_t tokens, GroupPolicy policy,
                        double alive_share, int64_t wanted) {
  const LayerView& view = layer.view;
  const LevelView& finest = view.level[static_cast<size_t>(view.levels - 1)];
  const uint32_t* offsets = finest.offsets + head * (finest.clusters + 1);
  std::vector<uint32_t> sizes;
  for (int64_t c = 0; c < finest.clusters; ++c) sizes.push_back(offsets[c + 1] - offsets[c]);
  const auto own = group_of(served, queries, 0, tokens, head);
  const std::vector<uint8_t> all(sizes.size(), 1);
  const auto* means =
      static_cast<const float*>(finest.centroids) + head * finest.clusters * view.head_dim;
  ScoreProblem clusters = problem_of(served, own, tokens, means, sizes);
  clusters.policy = policy;
  const auto scores = reference::scores(clusters, all);
  const int64_t through =
      std::max<int64_t>(wanted, std::llround(alive_share * static_cast<double>(view.slots)));
  ByCodes out;
  out.read.assign(static_cast<size_t>(view.slots), false);
  out.guessed = out.read;
  std::vector<uint8_t> alive(static_cast<size_t>(view.slots), 0);
  int64_t keys = 0;
  const auto order = ranking(scores);
  for (size_t r = 0; r < order.size(); ++r) {
    const size_t c = order[r];
    if (keys >= through) {
      if (out.estimated.empty()) out.margin = scores[order[r - 1]] - scores[c];
      out.estimated.push_back({view.levels - 1, static_cast<int64_t>(c)});
      continue;
    }
    keys += sizes[c];
    for (uint32_t slot = offsets[c]; slot < offsets[c + 1]; ++slot) alive[slot] = 1;
  }
  const std::vector<uint32_t> ones(alive.size(), 1);
  const float* codes = layer.codes.data() + head * view.slots * view.head_dim;
  ScoreProblem keys_alone = problem_of(served, own, tokens, codes, ones);
  keys_alone.policy = policy;
  const auto single = reference::scores(keys_alone, alive);
  const auto best = ranking(single);
  for (int64_t r = 0; r < keys; ++r) {
    (r < wanted ? out.read : out.guessed)[best[static_cast<size_t>(r)]] = true;
  }
  if (wanted > 0 && wanted < keys) {
    out.margin = std::min(out.margin, single[best[static_cast<size_t>(wanted - 1)]] -
                                          single[best[static_cast<size_t>(wanted)]]);
  }
  return out;
}

// Set and attention of every KV head against the reference. Of queries that are `longer` the set
// alone: float32 cannot tell their attention so exactly.
int64_t compare_by_codes(const Served& served, SessionOptions options, int64_t tokens,
                         float longer = 1) {
  const auto opened = Session::create(served.index, options);
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  Session& session = **opened;
  EXPECT_FALSE(session.plan().dense);
  const auto& o = served.options;
  const Decoded layer = decode(served.index->layers[0]);
  auto queries = queries_of(served, layer, tokens);
  for (float& x : queries) x *= longer;
  const auto selected = session.select(testing::make_call(0, tokens, queries.data(), {}));
  EXPECT_TRUE(selected.ok()) << selected.status().message();
  std::vector<HeadSelection> heads(selected->begin(), selected->end());
  std::vector<ByCodes> expected;
  const auto slots_of = [&](std::span<const KeyRun> runs, int64_t count) {
    std::vector<bool> out(static_cast<size_t>(layer.view.slots), false);
    for (const KeyRun& run : runs.first(static_cast<size_t>(count))) {
      for (uint32_t j = 0; j < run.length; ++j) out[run.first + j] = true;
    }
    return out;
  };
  for (int64_t head = 0; head < o.kv_heads; ++head) {
    const HeadSelection& s = heads[static_cast<size_t>(head)];
    expected.push_back(choose_by_codes(served, layer, head, queries, tokens,
                                       options.selection.group, session.plan().alive, s.keys));
    if (expected.back().margin < 1e-4) return 0;  // rounding may decide otherwise
    EXPECT_EQ(slots_of(s.runs, s.run_count), expected.back().read);
    EXPECT_EQ(s.codes,
              std::count(expected.back().read.begin(), expected.back().read.end(), true) +
                  std::count(expected.back().guessed.begin(), expected.back().guessed.end(), true));
    EXPECT_EQ(slots_of(s.guessed, s.guessed_count), expected.back().guessed);
    EXPECT_EQ(s.estimated_clusters, std::ssize(expected.back().estimated));
  }
  if (longer != 1) {
    for (const HeadSelection& s : heads) {
      EXPECT_NEAR(static_cast<double>(s.keys) / static_cast<double>(layer.view.slots),
                  options.selection.keep, 0.05);
    }
    return 1;
  }
  const auto output = testing::attend(session, 0, queries);
  EXPECT_TRUE(output.ok()) << output.status().message();
  const LevelView& finest = layer.view.level[static_cast<size_t>(layer.view.levels - 1)];
  for (int64_t row = 0; row < std::ssize(output->lse); ++row) {
    const int64_t head = row % o.query_heads / served.group(), d = o.head_dim;
    const ByCodes& chosen = expected[static_cast<size_t>(head)];
    const uint32_t* offsets = finest.offsets + head * (finest.clusters + 1);
    reference::Attention attention(queries.data() + row * d, layer.view, served.scale());
    for (int64_t i = 0; i < layer.view.exact; ++i) {
      attention.add(layer.exact_keys.data(), layer.exact_values.data(),
                    head * layer.view.exact + i);
    }
    for (int64_t c = 0; c < finest.clusters; ++c) {
      const auto* mean =
          static_cast<const float*>(finest.value_means) + (head * finest.clusters + c) * d;
      for (int64_t slot = offsets[c]; slot < offsets[c + 1]; ++slot) {
        const int64_t at = head * layer.view.slots + slot;
        if (chosen.read[static_cast<size_t>(slot)]) {
          attention.add(layer.keys.data(), layer.values.data(), at);
        } else if (chosen.guessed[static_cast<size_t>(slot)]) {
          attention.add(layer.codes.data() + at * d, mean, 0);
        }
      }
    }
    for (const reference::Cluster& c : chosen.estimated) {
      attention.add(finest.centroids, finest.value_means, head * finest.clusters + c.index,
                    std::log(static_cast<double>(offsets[c.index + 1] - offsets[c.index])));
    }
    const reference::State state = attention.state();
    EXPECT_NEAR(output->lse[row], state.lse, 5e-5) << "row " << row;
    for (int64_t c = 0; c < d; ++c) {
      EXPECT_NEAR(output->out[row * d + c], state.out[c], 5e-5) << "row " << row;
    }
  }
  return 1;
}

TEST(KeyCodes, ChooseSingleKeysAndEstimateTheOthers) {
  int64_t compared = 0;
  for (const RowKind rows : {RowKind::k16, RowKind::kQ8}) {
    for (const int bits : {1, 2}) {
      const Served served = serve_coded(tiny(64), {.rows = rows, .key_codes = bits});
      for (const RuleKind rule : {RuleKind::kThreshold, RuleKind::kBudget}) {
        for (const int64_t tokens : {1, 3, 20}) {
          SCOPED_TRACE(concat(rows_name(rows), " bits ", bits, " rule ", static_cast<int>(rule),
                              " tokens ", tokens));
          SessionOptions options = options_of(SelectorKind::kSqueezed);
          options.selection.levels = 1;
          options.selection.keep = 0.2;
          options.selection.rule = rule;
          compared += compare_by_codes(served, options, tokens);
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(compared, 13) << "of 24";
}

// Keys whose exponentials are 0 beside the greatest.
TEST(KeyCodes, HugeLogitsKeepTheirOrder) {
  const Served served = serve_coded(tiny(64), {.rows = RowKind::kQ8, .key_codes = 2});
  int64_t compared = 0;
  for (const int64_t tokens : {1, 2, 3, 20}) {
    SCOPED_TRACE(concat("tokens ", tokens));
    SessionOptions options = options_of(SelectorKind::kSqueezed);
    options.selection.levels = 1;
    options.selection.keep = 0.3;
    options.selection.rule = RuleKind::kBudget;
    compared += compare_by_codes(served, options, tokens, 60);
  }
  EXPECT_EQ(compared, 4);
}

TEST(KeyCodes, EveryGroupPolicy) {
  const Served served = serve_coded(tiny(64), {.rows = RowKind::kQ8, .key_codes = 2});
  for (const GroupPolicy policy : kGroupPolicies) {
    int64_t compared = 0;
    for (const int64_t tokens : {1, 2, 3, 4}) {
      SCOPED_TRACE(concat("policy ", group_policy_name(policy), " tokens ", tokens));
      SessionOptions options = options_of(SelectorKind::kSqueezed);
      options.selection.levels = 1;
      options.selection.keep = 0.2;
      options.selection.group = policy;
        compared += compare_by_codes(served, options, tokens);
    }
    EXPECT_GT(compared, 1) << "of 4, policy " << group_policy_name(policy);
  }
}

TEST(KeyCodes, EveryInstructionSet) {
  int64_t compared = 0, all = 0;
  for (const auto& [dim, bits] : {std::pair{24, 2}, {64, 2}, {128, 2}, {128, 1}, {256, 1}}) {
    const Served served = serve_coded(tiny(dim, 2), {.rows = RowKind::kQ8, .key_codes = bits});
    for (const CpuKernels* kernels : available_cpu_kernels()) {
      for (const int64_t tokens : {1, 20}) {
        SCOPED_TRACE(concat(kernels->name, " dim ", dim, " bits ", bits, " tokens ", tokens));
        SessionOptions options = options_of(SelectorKind::kSqueezed);
        options.selection.levels = 1;
        options.selection.keep = 0.2;
            options.kernels = kernels;
        compared += compare_by_codes(served, options, tokens);
        ++all;
      }
    }
  }
  EXPECT_GT(2 * compared, all);
}

TEST(KeyCodes, DeliverTheBudgetThatIsAsked) {
  TinyIndexOptions large = tiny(64, 2);
  large.tokens = 6000;
  large.clusters = {60, 300};
  for (const RowKind rows : {RowKind::k16, RowKind::kQ8}) {
    const Served served = serve_coded(large, {.rows = rows, .key_codes = 2});
    const Decoded layer = decode(served.index->layers[0]);
    for (const double budget : {0.1, 0.2, 0.4}) {
      SessionOptions options = options_of(SelectorKind::kSqueezed);
      options.selection.keep = 0;
      options.selection.budget = budget;
      options.selection.rule = RuleKind::kBudget;
      const auto session = Session::create(served.index, options);
      ASSERT_TRUE(session.ok()) << session.status().message();
      EXPECT_GT((*session)->plan().alive, (*session)->plan().asked_keep);
      for (int call = 0; call < 4; ++call) {
        const auto queries = queries_of(served, layer, 1);
        ASSERT_TRUE(testing::attend(**session, 0, queries).ok());
      }
      const Counters& c = (*session)->counters(0);
      const double delivered =
          static_cast<double>(c.bytes_read) / static_cast<double>(c.bytes_dense);
      EXPECT_NEAR(delivered / budget, 1, 0.08) << rows_name(rows) << " budget " << budget;
    }
  }
}

TEST(KeyCodes, ABudgetBelowWhatCodesCostIsRefusedWithTheLeast) {
  TinyIndexOptions large = tiny(64, 2);
  large.tokens = 6000;
  large.clusters = {300};
  const Served served = serve_coded(large, {.rows = RowKind::kQ8, .key_codes = 2});
  SessionOptions options = options_of(SelectorKind::kSqueezed);
  options.selection.keep = 0;
  options.selection.budget = 0.02;
  const auto refused = Session::create(served.index, options);
  ASSERT_FALSE(refused.ok());
  const std::string message = refused.status().message();
  EXPECT_THAT(message, ::testing::HasSubstr("the cost of centroids, sink and tail"));
  const auto at = message.find("more than ");
  ASSERT_NE(at, std::string::npos) << message;
  options.selection.budget = std::stod(message.substr(at + 10)) * 1.02;
  const auto session = Session::create(served.index, options);
  EXPECT_TRUE(session.ok()) << session.status().message();
}

// What the reference finds of clusters and exact keys: the estimated share of what was selected.
double share_of(const Served& served, const Decoded& layer, int64_t head,
                const std::vector<float>& queries, int64_t tokens, const HeadSelection& s) {
  const LayerView& view = layer.view;
  const LevelView& level = view.level[static_cast<size_t>(view.levels - 1)];
  const uint32_t* offsets = level.offsets + head * (level.clusters + 1);
  const auto own = group_of(served, queries, 0, tokens, head);
  double sum = 0;
  const int64_t rows = tokens * served.group(), d = view.head_dim;
  for (int64_t row = 0; row < rows; ++row) {
    const float* q = own.data() + row * d;
    double read = 0, all = 0;
    for (int64_t i = 0; i < view.exact; ++i) {
      const int64_t at = head * view.exact + i;
      read += std::exp(served.scale() * reference::dot(q, DType::kF32, view.exact_keys, at, d));
    }
    all = read;
    for (int64_t c = 0; c < level.clusters; ++c) {
      const int64_t at = head * level.clusters + c;
      const double mass =
          (offsets[c + 1] - offsets[c]) *
          std::exp(served.scale() * reference::dot(q, DType::kF32, level.centroids, at, d));
      all += mass;
      for (int64_t i = 0; i < s.run_count; ++i) {
        if (s.runs[i].first <= offsets[c] && offsets[c] < s.runs[i].first + s.runs[i].length) {
          read += mass;
        }
      }
    }
    sum += read / all;
  }
  return sum / static_cast<double>(rows);
}

TEST(Mass, WholeClustersUntilTheEstimateIsThere) {
  const Served served = serve_coded(tiny(64), {.rows = RowKind::kQ8});
  const Decoded layer = decode(served.index->layers[0]);
  for (const int64_t tokens : {1, 20}) {
    const auto queries = queries_of(served, layer, tokens);
    int64_t before = -1;
    for (const double mass : {0.3, 0.6, 0.9, 0.99}) {
      SCOPED_TRACE(concat("tokens ", tokens, " mass ", mass));
      SessionOptions options = options_of(SelectorKind::kSqueezed);
      options.selection.keep = 0;
      options.selection.rule = RuleKind::kMass;
      options.selection.mass = mass;
      options.selection.levels = 1;
      const auto session = Session::create(served.index, options);
      ASSERT_TRUE(session.ok()) << session.status().message();
      const auto selected = (*session)->select(testing::make_call(0, tokens, queries.data(), {}));
      ASSERT_TRUE(selected.ok());
      int64_t keys = 0;
      for (int64_t head = 0; head < served.options.kv_heads; ++head) {
        const HeadSelection& s = (*selected)[static_cast<size_t>(head)];
        EXPECT_GE(s.share, mass - 1e-5);
        EXPECT_NEAR(s.share, share_of(served, layer, head, queries, tokens, s), 1e-4);
        keys += s.keys;
      }
      EXPECT_GT(keys, before);
      before = keys;
    }
    EXPECT_LT(before, served.options.kv_heads * layer.view.slots);
  }
}

TEST(CodedRows, SameBitsForAnyNumberOfThreads) {
  const Served served = serve_coded(tiny(96), {.rows = RowKind::kQ8, .key_codes = 2});
  const Decoded layer = decode(served.index->layers[0]);
  for (const int64_t tokens : {1, 20}) {
    const auto queries = queries_of(served, layer, tokens);
    std::optional<Output> first;
    for (const int threads : {1, 2, 5}) {
      SessionOptions options = options_of(SelectorKind::kSqueezed);
      options.threads = threads;
        const auto session = Session::create(served.index, options);
      const auto output = testing::attend(**session, 0, queries);
      ASSERT_TRUE(output.ok());
      if (!first) first = *output;
      EXPECT_EQ(*output, *first) << threads << " threads";
    }
  }
}

// 64 numbers of a key in 64 bytes, of its value, too, and two scales of 2 bytes.
TEST(CodedRows, StatsCountTheBytesThatAreRead) {
  const Served served = serve_coded(tiny(64), {.rows = RowKind::kQ8});
  const auto session = Session::create(served.index, options_of(SelectorKind::kDense));
  const auto queries = queries_of(served, decode(served.index->layers[0]), 1);
  ASSERT_TRUE(testing::attend(**session, 0, queries).ok());
  const Counters& counters = (*session)->counters(0);
  const int64_t row = 64 * 2, exact = 23, slots = 400 - exact;
  // Every cluster has a mean key and a mean value.
  EXPECT_EQ(counters.bytes_read, 2 * (slots * 132 + 2 * exact * row + 2 * 40 * row));
  EXPECT_EQ(counters.bytes_dense, 2 * 2 * 400 * row);
}

}  // namespace
}  // namespace sqz
