// prefill_lookup() against the CPU backend's scores and rules.
#include <algorithm>
#include <cmath>

#include "libruntime/select/rule.h"
#include "libruntime/select/score.h"
#include "tests/libruntime/alive_mask.h"
#include "tests/libruntime/cuda/prefill_device.h"

namespace sqz::cuda::test {
namespace {

struct Case {
  DType dtype = DType::kBF16;
  int dim = 128, kv_heads = 2, group = 4;
  int tokens = 70, block = 32;
  int clusters = 500;
  float query_scale = 1.5f;
  float opposed = 0;    // first element of every centroid, and the negative of every query's
  int empty_every = 0;  // every how many-th cluster is empty; 0 = none
  int distinct = 0;     // centroids of a head, which its clusters have in turn; 0 = each its own
  bool some_alive = false;
  double keep = 0.2;  // of the keys: as threshold or as budget
  bool budget = false, finest = true;
};

// A level on the GPU and on the CPU, one call and its check.
class Problem {
 public:
  Problem(const Case& c, uint64_t seed)
      : c_(c),
        random_(seed),
        queries_(c.dtype, int64_t{c.tokens} * c.kv_heads * c.group * c.dim, c.query_scale, random_),
        centroids_(c.dtype, int64_t{c.kv_heads} * c.clusters * c.dim, 1, random_) {
    for (int h = 0; h < c.kv_heads; ++h) {
      offsets_.push_back(0);
      for (int i = 0; i < c.clusters; ++i) {
        const bool empty = c.empty_every > 0 && i % c.empty_every == 1;
        sizes_.push_back(empty ? 0 : static_cast<uint32_t>(1 + random_.below(40)));
        offsets_.push_back(offsets_.back() + sizes_.back());
      }
    }
    if (c.opposed != 0) {
      set_first(queries_, -c.opposed);
      set_first(centroids_, c.opposed);
    }
    if (c.distinct > 0) repeat_centroids();
    blocks_ = (c.tokens + c.block - 1) / c.block;
    for (int l = 0; l < blocks_ * c.kv_heads; ++l) alive_.push_back(alive_runs());
  }

  int lists() const { return blocks_ * c_.kv_heads; }
  int64_t keys(int h) const { return offsets_[(h + 1) * (c_.clusters + 1) - 1]; }

  void run_and_check() {
    std::vector<std::vector<float>> scores;
    for (int l = 0; l < lists(); ++l) scores.push_back(cpu_scores(l));
    choose_thresholds(scores);
    const auto chosen = gpu_runs();
    ASSERT_EQ(faults_, 0u);
    int64_t different = 0, total = 0;
    for (int l = 0; l < lists(); ++l) {
      const int h = l % c_.kv_heads;
      std::vector<uint8_t> expected(c_.clusters);
      choose(h, scores[l], expected);
      const uint32_t* offsets = &offsets_[h * (c_.clusters + 1)];
      std::vector<uint8_t> slots(offsets[c_.clusters], 0);
      for (const SlotRun& run : chosen[l]) {
        ASSERT_LE(run.first + run.length, slots.size());
        std::fill_n(slots.begin() + run.first, run.length, 1);
      }
      float cutoff = INFINITY;  // the worst score that is chosen
      for (int i = 0; i < c_.clusters; ++i) {
        if (expected[i] != 0) cutoff = std::min(cutoff, scores[l][i]);
      }
      for (int i = 0; i < c_.clusters; ++i) {
        total += expected[i];
        for (uint32_t slot = offsets[i]; slot < offsets[i + 1]; ++slot) {
          ASSERT_EQ(slots[slot], slots[offsets[i]]) << "list " << l << " cluster " << i;
        }
        if (offsets[i] == offsets[i + 1] || slots[offsets[i]] == expected[i]) continue;
        ++different;
        // Ties within rounding may fall either way.
        EXPECT_NEAR(scores[l][i], c_.budget ? cutoff : log_threshold_, 2e-3)
            << "list " << l << " cluster " << i;
      }
    }
    std::printf("[          ] %ld chosen, %ld ties\n", total, different);
    EXPECT_LE(different, 2 + total / 50);
    if (c_.keep > 0) {
      EXPECT_GT(total, 0);
    }
  }

  uint32_t run_with_query(float value) {
    queries_.values[5] = value;
    queries_.upload();
    gpu_runs();
    return faults_;
  }

 private:
  // The first element of every row; `value` is one that the type has.
  void set_first(Tensor& tensor, float value) const {
    for (size_t i = 0; i < tensor.values.size(); i += c_.dim) tensor.values[i] = value;
    tensor.upload();
  }

  void repeat_centroids() {
    for (int row = 0; row < c_.kv_heads * c_.clusters; ++row) {
      const int cluster = row % c_.clusters, same = row - cluster + cluster % c_.distinct;
      std::copy_n(centroids_.values.begin() + int64_t{same} * c_.dim, c_.dim,
                  centroids_.values.begin() + int64_t{row} * c_.dim);
    }
    centroids_.upload();
  }

  std::vector<SlotRun> alive_runs() {
    if (!c_.some_alive) return {{0, static_cast<uint32_t>(c_.clusters)}};
    std::vector<SlotRun> runs;
    for (int64_t at = random_.below(9); at < c_.clusters;) {
      const int64_t length = std::min<int64_t>(1 + random_.below(12), c_.clusters - at);
      runs.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(length)});
      at += length + 1 + random_.below(15);
    }
    return runs;
  }

  std::vector<float> cpu_scores(int list) {
    const int block = list / c_.kv_heads, h = list % c_.kv_heads;
    const int first = block * c_.block, count = std::min(c_.block, c_.tokens - first);
    const auto bytes = testing::stored(
        DType::kF32, {centroids_.values.begin() + int64_t{h} * c_.clusters * c_.dim,
                      centroids_.values.begin() + int64_t{h + 1} * c_.clusters * c_.dim});
    testing::AliveMask alive(c_.clusters, 0);
    for (const SlotRun& run : alive_[list]) std::fill_n(alive.begin() + run.first, run.length, 1);
    const std::vector<ClusterRange> ranges = testing::ranges_of(alive);
    const auto sizes = sizes_.begin() + int64_t{h} * c_.clusters;
    const std::vector<uint32_t> alive_sizes =
        testing::packed(std::vector<uint32_t>(sizes, sizes + c_.clusters), alive);
    ScoreProblem problem;
    problem.dtype = DType::kF32;
    problem.dim = c_.dim;
    problem.clusters = std::ssize(alive_sizes);
    problem.ranges = ranges;
    problem.centroids = bytes.data();
    problem.sizes = alive_sizes.data();
    problem.queries = &queries_.values[(int64_t{first} * c_.kv_heads + h) * c_.group * c_.dim];
    problem.tokens = count;
    problem.token_stride = int64_t{c_.kv_heads} * c_.group * c_.dim;
    problem.group = c_.group;
    problem.scale = 1 / std::sqrt(static_cast<float>(c_.dim));
    std::vector<float> scores(alive_sizes.size()), workspace(score_workspace(problem));
    const Status status = score_clusters(problem, scores, workspace);
    EXPECT_TRUE(status.ok()) << status.message();
    return testing::unpacked(scores, alive);
  }

  // The threshold that keeps about c_.keep of the scored clusters of all lists.
  void choose_thresholds(const std::vector<std::vector<float>>& scores) {
    std::vector<float> all;
    for (const auto& list : scores) {
      for (const float score : list) {
        if (score > -INFINITY) all.push_back(score);
      }
    }
    std::sort(all.begin(), all.end(), std::greater<>());
    if (!all.empty()) {
      log_threshold_ = all[std::min(
          all.size() - 1, static_cast<size_t>(c_.keep * static_cast<double>(all.size())))];
    }
    for (int h = 0; h < c_.kv_heads; ++h) {
      wanted_.push_back(
          static_cast<uint32_t>(std::llround(c_.keep * static_cast<double>(keys(h)))));
    }
  }

  void choose(int h, const std::vector<float>& scores, std::vector<uint8_t>& chosen) const {
    std::vector<uint32_t> order(c_.clusters);
    Choice choice;
    choice.kv_head = h;
    choice.finest = c_.finest;
    choice.keys = keys(h);
    choice.scores = scores;
    choice.sizes = {&sizes_[h * c_.clusters], static_cast<size_t>(c_.clusters)};
    SelectionPlan plan;
    plan.log_thresholds = {{log_threshold_}};
    plan.layer_keep = {1};
    if (c_.budget) plan.head_keep.emplace_back();
    for (int i = 0; i < c_.kv_heads && c_.budget; ++i) {
      plan.head_keep[0].push_back(
          static_cast<float>(static_cast<double>(wanted_[i]) / static_cast<double>(keys(i))));
    }
    sqz::choose(plan, choice, order, chosen);
  }

  std::vector<std::vector<SlotRun>> gpu_runs() {
    DeviceArray<uint32_t> offsets(offsets_),
        wanted(wanted_.empty() ? std::vector<uint32_t>{0} : wanted_);
    DeviceArray<uint32_t> sizes(sizes_);
    DeviceArray<unsigned long long> counters(std::vector<unsigned long long>(3, 0));
    DeviceRuns alive(alive_, c_.clusters), chosen(lists(), (c_.clusters + 1) / 2);
    PrefillLookup call;
    call.shape = {c_.dtype, c_.dim, c_.kv_heads, c_.group,
                  1 / std::sqrt(static_cast<float>(c_.dim))};
    call.blocks = {c_.tokens, blocks_, c_.block, nullptr};
    call.level.centroids = centroids_.device->get();
    call.level.offsets = offsets.get();
    call.level.sizes = sizes.get();
    call.level.clusters = c_.clusters;
    call.level.finest = c_.finest;
    // Blocks of one token have a scope of their own.
    const int scope = c_.block > 1 ? 1 : 0;
    call.level.log_threshold[scope] = log_threshold_;
    if (c_.budget) call.level.wanted[scope] = wanted.get();
    if (c_.some_alive) call.alive = alive.lists;
    call.queries = queries_.device->get();
    call.q_dtype = c_.dtype;
    call.chosen = chosen.lists;
    call.counters = counters.get();
    const int64_t bytes = prefill_lookup_workspace(call.shape, call.blocks, c_.clusters, true);
    DeviceArray<uint8_t> workspace(bytes);
    const Status status =
        prefill_lookup(call, workspace.get(), bytes, *read_device(0), true, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    faults_ = 0;
    for (const RunTotals& totals : chosen.totals.host()) faults_ += totals.fault;
    const auto found = chosen.host();
    if (faults_ == 0) check_counters(counters.host(), found);
    return found;
  }

  void check_counters(const std::vector<unsigned long long>& counted,
                      const std::vector<std::vector<SlotRun>>& found) const {
    unsigned long long keys = 0, centroids = 0;
    for (const auto& list : found) {
      for (const SlotRun& run : list) keys += run.length;
    }
    for (const auto& list : alive_) {
      for (const SlotRun& run : list) centroids += run.length;
    }
    EXPECT_EQ(counted[0], c_.finest ? static_cast<unsigned long long>(blocks_) : 0);
    EXPECT_EQ(counted[1], c_.finest ? keys : 0);
    EXPECT_EQ(counted[2], centroids);
  }

  Case c_;
  testing::Random random_;
  Tensor queries_, centroids_;
  std::vector<uint32_t> sizes_, offsets_, wanted_;
  std::vector<std::vector<SlotRun>> alive_;
  int blocks_ = 0;
  float log_threshold_ = 0;
  uint32_t faults_ = 0;  // lists with one
};

void check(const Case& c, uint64_t seed) {
  Problem(c, seed).run_and_check();
}

class PrefillLookupTest : public OnHopper {};

TEST_F(PrefillLookupTest, DimensionsTypesAndGroups) {
  uint64_t seed = 1;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int dim : {64, 96, 128, 256}) {
      for (const int group : {1, 4, 7, 16}) {
        if (dtype == DType::kF16 && group != 4) continue;
        SCOPED_TRACE(concat("d ", dim, " group ", group, " ", dtype_name(dtype)));
        check({.dtype = dtype, .dim = dim, .group = group}, seed++);
      }
    }
  }
}

TEST_F(PrefillLookupTest, Rules) {
  uint64_t seed = 100;
  for (const bool budget : {false, true}) {
    for (const bool finest : {false, true}) {
      for (const double keep : {0.0, 0.05, 0.5, 2.0}) {
        SCOPED_TRACE(concat("budget ", budget, " finest ", finest, " keep ", keep));
        check({.clusters = 777, .keep = keep, .budget = budget, .finest = finest}, seed++);
      }
    }
  }
}

// The denominators run over the survivors alone, and runs are those of their children.
TEST_F(PrefillLookupTest, Survivors) {
  for (const bool budget : {false, true}) {
    check({.clusters = 5000, .some_alive = true, .keep = 0.1, .budget = budget}, 200);
  }
}

TEST_F(PrefillLookupTest, ManyTilesOneClusterAndEmptyOnes) {
  // Several pieces and several row tiles.
  check({.tokens = 300, .block = 300, .clusters = 4500}, 300);
  check({.tokens = 300, .block = 300, .clusters = 4500, .budget = true}, 301);
  check({.tokens = 300, .block = 300, .clusters = 4500, .empty_every = 7}, 303);
  check({.tokens = 3, .block = 300, .clusters = 1}, 304);
}

// More clusters share the rank of the cutoff than a block of threads keeps apart, where lists are
// few and where they are many.
TEST_F(PrefillLookupTest, ManyEqualScores) {
  for (const double keep : {0.2, 0.5, 0.8}) {
    check({.clusters = 4500, .distinct = 3, .keep = keep, .budget = true}, 330);
    check(
        {.tokens = 300, .block = 1, .clusters = 4500, .distinct = 3, .keep = keep, .budget = true},
        331);
  }
}

TEST_F(PrefillLookupTest, BlocksOfOneToken) {
  check({.tokens = 5, .block = 1}, 350);
  check({.tokens = 5, .block = 1, .budget = true}, 351);
}

TEST_F(PrefillLookupTest, LargeLogits) {
  check({.query_scale = 30, .keep = 0.02}, 400);
}

// So small that without a maximum every exponential is zero: -1600 / sqrt(128) and what is random.
TEST_F(PrefillLookupTest, LogitsFarBelowZero) {
  check({.opposed = 40}, 410);
  check({.clusters = 4500, .opposed = 40, .empty_every = 3}, 411);
}

TEST_F(PrefillLookupTest, NanAndInfinityAreReported) {
  EXPECT_EQ(Problem({}, 500).run_with_query(1.0f), 0u);
  EXPECT_EQ(Problem({}, 500).run_with_query(NAN), 1u);  // of the one list with that query
  EXPECT_EQ(Problem({}, 500).run_with_query(INFINITY), 1u);
}

}  // namespace
}  // namespace sqz::cuda::test
