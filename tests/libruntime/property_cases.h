// A random configuration, drawn from a seed: an index, a session and a call.
#pragma once

#include <array>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <numeric>

#include "libindex/builder.h"
#include "libindex/prune.h"
#include "sqz/sqz.hpp"
#include "tests/common/tiny_qmodel.h"
#include "tests/libindex/clustered_data.h"
#include "tests/libruntime/random_data.h"

namespace sqz::testing {

struct PropertyCase {
  uint64_t seed = 0;
  bool gpu = false;
  // Index.
  ModelDescription model;
  BuildOptions build;
  QmodelFile qmodel;  // if build.partition is kBuckets
  int64_t tokens = 0;
  double pruned_keep = 0;             // above 0: the index is pruned for the session's selector
  std::vector<double> pruned_scales;  // of its layers, or empty
  // Session; pointers are set by options().
  sqz_selector selector = SQZ_SELECTOR_DENSE;  // auto is resolved here
  bool by_auto = false, by_budget_rule = false;
  std::vector<double> thresholds, layer_scales;
  double keep = 0, budget = 0;  // at most one; both 0: `thresholds`, or nothing
  int64_t block = 0;
  int levels = 0, dense_layers = 0, uniform_layers = 0;
  // Call.
  DType dtype = DType::kF32;
  std::vector<int64_t> indptr;
  bool turned_lse = false, before_rope = false, device_positions = false;

  int64_t group() const { return model.group_size(); }
  sqz_session_options options(int threads) const {
    auto o = runtime::make<sqz_session_options>();
    o.device_type = gpu ? 2 : 1;
    o.selector = by_auto ? SQZ_SELECTOR_AUTO : selector;
    o.rule = by_budget_rule ? SQZ_RULE_BUDGET : SQZ_RULE_THRESHOLD;
    o.levels = levels;
    o.budget = budget;
    o.keep = keep;
    o.thresholds = thresholds.empty() ? nullptr : thresholds.data();
    o.block = block;
    o.max_tokens = indptr.back() + 1;
    o.threads = threads;
    o.dense_layers = dense_layers;
    o.layer_scales = layer_scales.empty() ? nullptr : layer_scales.data();
    o.layer_scale_count = std::ssize(layer_scales);
    o.uniform_layers = uniform_layers;
    return o;
  }
};

inline std::string describe(const PropertyCase& c) {
  std::string out =
      concat("seed ", c.seed, ": partition ", partition_name(c.build.partition),
             c.pruned_keep > 0 ? " pruned" : "", c.pruned_scales.empty() ? "" : " by scales",
             " layers ", c.model.layers, " heads ", c.model.query_heads, "/", c.model.kv_heads,
             " dim ", c.model.head_dim, " tokens ", c.tokens, " sink ", c.build.sink, " tail ",
             c.build.tail, " levels ", c.build.level_fractions.size(), " page ", c.build.page_size,
             " rows ", rows_name(c.build.compress.rows), " dtype ", dtype_name(c.build.dtype),
             "; selector ", sqz_selector_name(c.selector), c.by_auto ? " (auto)" : "", " rule ",
             c.by_budget_rule ? "budget" : "threshold", " budget ", c.budget, " keep ", c.keep,
             " block ", c.block, " levels ", c.levels, " dense_layers ", c.dense_layers,
             "; queries ", dtype_name(c.dtype), " indptr");
  for (const int64_t t : c.indptr) out += concat(" ", t);
  for (const double t : c.thresholds) out += concat(" T ", t);
  for (const double s : c.layer_scales) out += concat(" scale ", s);
  for (int64_t l = 0; l < c.model.layers; ++l) {
    const LayerGeometry own = c.model.layer(l);
    out +=
        concat(" ", layer_kind_name(own.kind), own.of, " ", own.query_heads, "/", own.kv_heads, " ",
               own.head_dim, "/", own.value_dim, " window ", own.window, " chunk ", own.chunk);
  }
  return out;
}

// Gives layers a geometry of their own, all but the one that is sparse for sure.
inline void draw_geometry(PropertyCase& c) {
  Random random(c.seed + 1000000);
  const auto pick = [&](std::initializer_list<int64_t> of) {
    return *(of.begin() + random.below(std::ssize(of)));
  };
  const int64_t d = c.model.head_dim;
  // What a GPU has kernels for.
  const auto gpu_values = [&](int64_t dim) { return dim == 192 ? pick({128, 192}) : dim; };
  const bool coded = c.build.compress.rows != RowKind::k16;  // the GPU's stats count rows of d
  const int64_t value_dim = !c.gpu ? pick({d, d, 8, 24, d + 5, 2 * d}) : coded ? d : gpu_values(d);
  std::vector<LayerGeometry> layers;
  bool usual = true;
  for (int64_t l = 0; l < c.model.layers; ++l) {
    const LayerGeometry before = c.model.layer(l);
    LayerGeometry own = before;
    own.value_dim = value_dim;
    const bool stays = c.build.partition == Partition::kBuckets ||
                       l == static_cast<int64_t>(c.seed) % c.model.layers;
    const int64_t draw = stays ? 0 : random.below(6);
    if (draw >= 1 && draw <= 3) {
      own.kv_heads *= pick({1, 1, 2});
      own.query_heads = own.kv_heads * pick({1, 3, 10, 12, 16});
      own.head_dim = c.gpu ? pick({64, 80, 192, 256, 512}) : pick({8, 9, 80, 192, 512});
      own.value_dim = c.gpu ? gpu_values(own.head_dim) : pick({own.head_dim, 7, 128});
      own.attention_scale *= 1.5;
      if (draw > 1 && own.window == 0) {
        own.kind = LayerKind::kRecent;
        own.chunk = 1 + random.below(c.tokens + 50);
      }
    } else if (draw == 4 && l > 0 && layers[0].has_keys() && layers[0].window == own.window) {
      own = layers[0];
      own.kind = LayerKind::kShared;
      own.of = 0;
    } else if (draw == 5 && own.window == 0) {
      own.kind = LayerKind::kState;
    }
    usual &= own == before;
    layers.push_back(own);
  }
  if (!usual) c.model.geometry = layers;
}

// The last `count` of N tokens of each head.
inline std::vector<float> last_tokens(const std::vector<float>& rows, int64_t heads, int64_t n,
                                      int64_t count) {
  const int64_t dim = std::ssize(rows) / (heads * n);
  std::vector<float> out;
  for (int64_t h = 1; h <= heads; ++h) {
    const auto end = rows.begin() + h * n * dim;
    out.insert(out.end(), end - count * dim, end);
  }
  return out;
}

inline PropertyCase draw_case(uint64_t seed, bool gpu) {
  Random random(seed);
  const auto pick = [&](std::initializer_list<int64_t> of) {
    return *(of.begin() + random.below(std::ssize(of)));
  };
  const auto between = [&](int64_t low, int64_t high) {
    return low + random.below(high - low + 1);
  };
  const auto chance = [&](int percent) { return random.below(100) < percent; };
  const auto real = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(random.below(1 << 20)) / (1 << 20);
  };
  PropertyCase c{.seed = seed, .gpu = gpu};
  // Requests of a call, and tokens of each. A GPU has kernels of its own for many requests and for
  // prompts, and tables of 256 blocks.
  struct Calls {
    int64_t fewest = 1, most = 5, shortest = 0, longest = 0;
  };
  constexpr Calls kTokens = {6, 40, 1, 1}, kPrompts = {1, 3, 40, 100};
  constexpr Calls kCalls[] = {
      {}, {}, {}, kTokens, kTokens, {6, 40, 0, 2}, kPrompts, kPrompts, {3, 3, 86, 100}};
  const Calls calls = gpu ? kCalls[random.below(std::ssize(kCalls))] : Calls();
  const bool usual = calls.longest == 0;
  const int64_t part = random.below(10);  // kmeans, pages, buckets
  BuildOptions& b = c.build;
  b.partition = part < 6 ? Partition::kKmeans : part < 8 ? Partition::kPages : Partition::kBuckets;
  // Few long contexts: they are split, and refuse what shorter ones serve densely.
  const bool is_long = chance(8) && usual;
  const int64_t most = is_long || !usual ? 2 : 3;
  const int64_t layers = between(b.partition == Partition::kBuckets ? 2 : 1, most);
  const int64_t kv_heads = between(1, most);
  const int64_t group = is_long ? between(1, 2)
                        : gpu   ? pick({1, 2, 3, 4, 7, 8, 10, 12, 16})
                                : pick({1, 1, 2, 2, 3, 4, 7, 8});
  const int64_t dim = gpu ? pick({64, 64, 80, 96, 128, 128, 160, 192, 256, part < 6 ? 512 : 256})
                      : is_long ? 16
                                : pick({8, 7, 10, 16, 16, 64, 64, 96, 128});
  c.tokens = is_long  ? between(4100, 4600)
             : !usual ? between(120, 300)
                      : between(120, chance(15) ? 1800 : 600);
  c.model = tiny_model(layers, kv_heads * group, kv_heads, dim);
  c.model.max_positions = 8192;
  b.sink = pick({0, 1, 4, 16});
  b.tail = between(1, 24);
  b.level_fractions = {real(0.03, chance(20) ? 0.5 : 0.12)};
  const int64_t index_levels = pick({1, 1, 2, 2, 3});
  for (int64_t l = 1; l < index_levels; ++l) {
    b.level_fractions.insert(b.level_fractions.begin(), b.level_fractions[0] * real(0.2, 0.6));
  }
  b.iterations = 3;
  b.seed = seed;
  b.threads = 1;
  b.engine = "faiss";
  b.dtype = chance(50) ? DType::kBF16 : DType::kF16;
  b.page_size = pick({1, 7, 16, 32});
  b.heavy_hitters = chance(40);
  if (b.partition == Partition::kKmeans) {
    b.compress.rows = chance(40) ? RowKind::kQ8 : RowKind::k16;
    const auto sparse = static_cast<int64_t>(seed) % layers;
    if (b.compress.rows != RowKind::k16 && layers > 1 && chance(30)) b.compress.layers16 = {sparse};
  }
  for (int64_t l = 0; l < layers && b.partition != Partition::kBuckets; ++l) {
    if (l == static_cast<int64_t>(seed) % layers) continue;  // one layer is sparse
    if (chance(15)) c.model.sliding_window[l] = between(1, c.tokens + 50);
  }
  if (seed % 2 == 0) draw_geometry(c);
  if (b.partition == Partition::kBuckets) {
    c.qmodel = tiny_qmodel({.layers = layers,
                            .query_heads = kv_heads * group,
                            .kv_heads = kv_heads,
                            .head_dim = dim,
                            .buckets = between(2, 40),
                            .hidden = between(1, 40),
                            .seed = seed});
    // Logits from a few to some thousand, so that most shares of the attention are 0 in float32.
    const auto wild = static_cast<float>(pick({1, 10, 300}));
    for (QmodelLayer& layer : c.qmodel.layers) {
      for (float& x : layer.hidden_weight) x *= wild / std::sqrt(static_cast<float>(dim));
      for (float& x : layer.output_weight) x *= 2 / std::sqrt(static_cast<float>(c.qmodel.hidden));
      // A GPU rounds weights to float16.
      for (auto* weights : {&layer.hidden_weight, &layer.output_weight}) {
        for (float& x : *weights) x = gpu ? to_float(to_float16(x)) : x;
      }
    }
    if (chance(30)) {
      c.model.rope = {.kind = RopeDescription::Kind::kYarn,
                      .factor = 4,
                      .original_max_positions = 1024,
                      .attention_factor = 1.2};
    }
    c.qmodel.model = c.model;
  }
  const auto scales = [&] {
    std::vector<double> out(layers);
    for (double& x : out) x = real(0.3, 2);
    return out;
  };
  if (layers > 1 && chance(20)) {
    LayerBudgets budgets{.context = c.tokens, .uniform_budget = c.tokens / 4};
    for (const double s : scales()) budgets.budget.push_back(1 + std::llround(s * 40));
    budgets.uniform_budget =
        std::accumulate(budgets.budget.begin(), budgets.budget.end(), 0) / layers;
    budgets.budget.back() += layers * budgets.uniform_budget -
                             std::accumulate(budgets.budget.begin(), budgets.budget.end(), 0);
    budgets.cosine.assign(layers, 0.5);
    b.layer_budgets = budgets;
    c.uniform_layers = chance(30);
  }

  // The selector: often the partition's own.
  const sqz_selector own = b.partition == Partition::kKmeans  ? SQZ_SELECTOR_SQUEEZED
                           : b.partition == Partition::kPages ? SQZ_SELECTOR_QUEST
                                                              : SQZ_SELECTOR_SAAP;
  std::vector<sqz_selector> fitting(6, own);
  for (const auto s : {SQZ_SELECTOR_DENSE, SQZ_SELECTOR_STREAM, SQZ_SELECTOR_WINDOW}) {
    fitting.push_back(s);
  }
  const bool coded = b.compress.rows != RowKind::k16;
  fitting.insert(fitting.end(), b.heavy_hitters ? 2 : 0, SQZ_SELECTOR_H2O);
  c.selector = fitting[static_cast<size_t>(random.below(std::ssize(fitting)))];
  const bool fixed = c.selector == SQZ_SELECTOR_STREAM || c.selector == SQZ_SELECTOR_WINDOW ||
                     c.selector == SQZ_SELECTOR_H2O;
  const bool ruled = c.selector == SQZ_SELECTOR_SQUEEZED;
  c.block = chance(50) ? 0 : between(1, 6);
  if (fixed && !coded && chance(60)) {
    c.pruned_keep = real(0.1, 0.9);
    c.keep = chance(50) ? c.pruned_keep : 0;
    c.by_auto = chance(50);
    if (layers > 1 && chance(30)) c.pruned_scales = scales();
  } else if (c.selector != SQZ_SELECTOR_DENSE) {
    c.by_auto = c.selector == own && chance(50);
    c.by_budget_rule = ruled && chance(60);
    c.dense_layers = static_cast<int>(pick({0, 0, -1, -1, -1, 1}));
    if (ruled) c.levels = static_cast<int>(between(0, index_levels));
    if (ruled && !c.by_budget_rule && chance(35)) {
      const int64_t used = c.levels == 0 ? index_levels : c.levels;
      for (int64_t k = 0; k < used; ++k) {
        c.thresholds.push_back(real(0.1, 1) * static_cast<double>(k + 1) /
                               static_cast<double>(used * c.tokens));
      }
    } else {
      const double amount = chance(4) ? 1 : chance(4) ? 0.001 : real(0.08, chance(50) ? 0.9 : 0.4);
      (chance(60) ? c.budget : c.keep) = amount;
      if (layers > 1 && (!ruled || c.by_budget_rule) && chance(20)) {
        c.layer_scales = scales();
        if (chance(30)) c.layer_scales[0] = INFINITY;
      }
    }
  }
  c.dtype = std::array{DType::kF32, DType::kF16, DType::kBF16}[random.below(3)];
  c.indptr = {0};
  for (int64_t requests = between(calls.fewest, calls.most); requests > 0; --requests) {
    const int64_t tokens = usual ? (chance(15) ? between(8, 30) : pick({0, 1, 1, 1, 2, 5}))
                           : calls.fewest == 1 && chance(25)
                               ? between(0, 1)
                               : between(calls.shortest, calls.longest);
    c.indptr.push_back(c.indptr.back() + tokens);
  }
  if (calls.longest == 100) c.block = calls.fewest == 3 ? 1 : pick({0, 0, 5, 16, 32, 1000});
  if (c.indptr.back() == 0) c.indptr.back() = 1;
  c.turned_lse = chance(30);
  c.before_rope = chance(50);
  c.device_positions = gpu && b.partition != Partition::kBuckets && chance(50);
  return c;
}

// Builds the case's index at `path`. base: the same before it is pruned.
inline Status build_index(const PropertyCase& c, const std::string& base, const std::string& path) {
  BuildOptions options = c.build;
  if (options.partition == Partition::kBuckets) options.qmodel = &c.qmodel;
  std::vector<int32_t> ids(static_cast<size_t>(c.tokens));
  std::iota(ids.begin(), ids.end(), 0);
  SQZ_ASSIGN_OR_RETURN(const auto builder,
                       IndexBuilder::create(Env::posix(), base, true, c.model, ids, "", options));
  for (int64_t l = 0; l < c.model.layers; ++l) {
    const LayerGeometry own = c.model.layer(l);
    if (!own.has_keys()) continue;
    const int64_t rows = own.kv_heads * c.tokens, dim = own.head_dim;
    Random random(c.seed * 10 + static_cast<uint64_t>(l));
    auto keys = test::clustered_points(rows, dim, 12, 0.5f, c.seed + static_cast<uint64_t>(l));
    auto values = random.normals(rows * own.value_dim);
    const auto queries = random.normals(own.query_heads * options.tail * dim, 1.5f);
    if (own.kind == LayerKind::kRecent && !c.model.geometry.empty() && c.seed % 3 == 0) {
      const int64_t stored = c.tokens - std::min(own.first_seen(c.tokens), c.tokens);
      keys = last_tokens(keys, own.kv_heads, c.tokens, stored);
      values = last_tokens(values, own.kv_heads, c.tokens, stored);
    }
    std::vector<float> attention = random.normals(rows);
    for (float& x : attention) x = std::abs(x);
    SQZ_RETURN_IF_ERROR(builder->add_layer(
        l, {.keys = keys, .values = values, .queries = queries, .attention = attention}));
  }
  SQZ_RETURN_IF_ERROR(builder->finish().status());
  if (c.pruned_keep == 0) {
    std::filesystem::rename(base, path);
    return {};
  }
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(base, OpenMode::kRead));
  SelectionRequest policy;
  policy.selector = static_cast<SelectorKind>(c.selector);
  policy.keep = c.pruned_keep;
  policy.uniform_layers = c.uniform_layers != 0;
  policy.layer_scales = c.pruned_scales;
  return prune_index(Env::posix(), file, policy, path, true, 1).status();
}

}  // namespace sqz::testing
