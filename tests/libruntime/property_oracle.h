// The oracle of the property test: how a session must plan, select and read in a random
// configuration, in double precision and from the sentences of docs/runtime.md alone.
#pragma once

#include "libruntime/rope.h"
#include "tests/libruntime/coded_rows.h"
#include "tests/libruntime/property_cases.h"

namespace sqz::testing {

// Parts of `total` in proportion to the weights, none above its cap.
inline std::vector<double> dealt(double total, const std::vector<double>& weights,
                                 const std::vector<double>& caps) {
  std::vector<double> out(weights.size());
  double low = 0, high = 1e9;
  for (int i = 0; i < 200; ++i) {
    const double factor = (low + high) / 2;
    double sum = 0;
    for (size_t k = 0; k < out.size(); ++k) {
      sum += out[k] = std::min(factor * weights[k], caps[k]);
    }
    (sum < total ? low : high) = factor;
  }
  return out;
}

class PropertyOracle {
 public:
  PropertyOracle(const PropertyCase& c, const std::shared_ptr<const SqzFile>& file)
      : c_(c), file_(file), metadata_(file->metadata()) {
    for (int64_t l = 0; l < c.model.layers; ++l) {
      views_.push_back(file->layer(l));
      layers_.push_back(decode(views_.back()));
    }
    if (metadata_.levels > 0) calibration_ = *file->calibration();
    find_scales();
    make_plan();
  }

  const LayerView& view(int64_t layer) const { return views_[layer]; }
  double asked_budget() const { return budget_; }
  double asked_keep() const { return keep_; }
  bool fallback() const { return fallback_; }
  bool refused() const { return refused_; }  // the budget cannot be met
  bool selects(int64_t layer) const { return !dense_ && scales_[layer] > 0; }
  int64_t first_exact(int64_t layer) const {
    return c_.selector == SQZ_SELECTOR_WINDOW && selects(layer) ? metadata_.sink : 0;
  }

  // queries and before: [tokens, group, d] of one block and KV head. A margin that is tiny:
  // rounding decides. `keys`: how many are reported to be read, where whole keys may be shared out
  // either way.
  reference::Selected select(int64_t layer, int64_t head, const std::vector<float>& queries,
                             const std::vector<float>& before, int64_t tokens, int64_t keys) const {
    const LayerView& view = layers_[layer].view;
    reference::Selected all;
    all.slots.assign(view.slots, true);
    if (!selects(layer) || c_.pruned_keep > 0) return all;
    reference::SelectParameters p;
    p.budget_rule = c_.by_budget_rule;
    const int scope = tokens > 1 ? 1 : 0;
    if (c_.selector == SQZ_SELECTOR_SQUEEZED) {
      p.levels = levels_;
      for (int k = 0; k + 1 < levels_; ++k) {
        const auto row = std::ssize(calibration_.coarse) / Calibration::kScopes;
        p.log_thresholds.push_back(
            !c_.thresholds.empty()
                ? std::log(c_.thresholds[k])
                : double{calibration_.coarse[scope * row + metadata_.levels - levels_ + k]});
      }
      p.log_thresholds.push_back(log_threshold(scope));
      p.share = head_share(calibration_.shares, scope, layer, head);
      return reference::select(view, head, queries, tokens, c_.group(), scale(), p);
    }
    if (c_.selector == SQZ_SELECTOR_SAAP) return best_buckets(layer, head, before, tokens);
    // The others read as many whole keys as the layer's part pays, or one more or less.
    const double part = layer_keys()[layer];
    EXPECT_LE(std::abs(static_cast<double>(keys) - part),
              c_.selector == SQZ_SELECTOR_QUEST ? 2.0 * static_cast<double>(view.page_size) : 1.001)
        << "keys of layer " << layer;
    if (c_.selector == SQZ_SELECTOR_QUEST) {
      auto out = reference::best_pages(
          view, reference::page_bounds(view, head, queries, tokens, c_.group()),
          (keys + view.page_size - 1) / view.page_size);
      out.centroids = 2 * view.pages;
      return out;
    }
    all.slots = last_and_heavy(view, head, keys);
    return all;
  }

  const LayerView& decoded(int64_t layer) const { return layers_[layer].view; }
  double scale() const { return c_.model.attention_scale; }  // of layers that select

  // The bytes read for one block and KV head with this selection.
  int64_t bytes_read(int64_t layer, int64_t head, const reference::Selected& s) const {
    const LayerView& v = views_[layer];
    const int64_t row = v.head_dim * dtype_size(v.dtype);
    const int64_t value_row = v.value_dim * dtype_size(v.dtype);
    const int64_t keys = std::count(s.slots.begin(), s.slots.end(), true);
    int64_t bytes = keys * v.slot_bytes() + row * s.centroids;
    bytes += (row + value_row) * (v.exact - first_exact(layer));
    if (v.coded_keys.bits == 0) return bytes;
    // Mean value of each cluster of which a key is read, and its centroid unless it was scored.
    const LevelView& finest = v.level[v.levels - 1];
    const uint32_t* offsets = finest.offsets + head * (finest.clusters + 1);
    for (int64_t i = 0; i < finest.clusters; ++i) {
      const bool touched = std::find(s.slots.begin() + offsets[i], s.slots.begin() + offsets[i + 1],
                                     true) != s.slots.begin() + offsets[i + 1];
      bytes += touched ? value_row + (s.centroids > 0 ? 0 : row) : 0;
    }
    return bytes;
  }
  int64_t possible(int64_t layer) const {
    const LayerView& v = views_[layer];
    return c_.pruned_keep > 0 && v.slots > 0 ? c_.tokens - v.exact : v.slots;
  }

  // How far the delivered budget may be above the asked one: half a cluster a head and, of a tree
  // or rows of codes, what its own costs vary. The rule threshold promises nothing.
  double slack() const {
    const bool ruled = c_.selector == SQZ_SELECTOR_SQUEEZED;
    if (ruled && !c_.by_budget_rule) return 2;
    double most = 2, vectors = 0;
    for (const LayerView& v : views_) {
      const LevelView& finest = v.level[std::max(v.levels - 1, 0)];
      double clusters = 0;
      for (int64_t i = 0; i < v.kv_heads * (finest.clusters + 1) - 1 && v.levels > 0; ++i) {
        most = std::max(most, double(int64_t{finest.offsets[i + 1]} - finest.offsets[i]));
      }
      for (int64_t i = 0; i < v.kv_heads * (v.buckets + 1) - 1 && v.buckets > 0; ++i) {
        most = std::max(most, double(int64_t{v.bucket_offsets[i + 1]} - v.bucket_offsets[i]));
      }
      for (int k = 0; k < v.levels; ++k) clusters += static_cast<double>(v.level[k].clusters);
      if (levels_ > 1 || v.coded_keys.bits > 0) vectors = std::max(vectors, clusters);
    }
    return (most * 0.5 + vectors) / static_cast<double>(c_.tokens) + 0.01;
  }

 private:
  static constexpr int64_t kLast = Calibration::kGrid - 1;

  // Whole layers have 0, and the mean of the others is 1.
  void find_scales() {
    if (c_.selector == SQZ_SELECTOR_DENSE) dense_ = true;
    scales_.assign(views_.size(), 1);
    const bool ruled = c_.selector == SQZ_SELECTOR_SQUEEZED;
    if (!c_.layer_scales.empty()) {
      scales_ = c_.layer_scales;
    } else if (c_.uniform_layers == 0 && metadata_.layer_budgets && (!ruled || c_.by_budget_rule)) {
      const auto& budget = metadata_.layer_budgets->budget;
      scales_.assign(budget.begin(), budget.end());
    }
    const int64_t first = c_.dense_layers > 0 ? c_.dense_layers
                          : c_.dense_layers < 0 || c_.selector != SQZ_SELECTOR_QUEST ? 0
                                                                                     : 2;
    double sum = 0, count = 0;
    for (size_t l = 0; l < views_.size(); ++l) {
      if (std::cmp_less(l, first) || std::isinf(scales_[l]) || views_[l].slots == 0) scales_[l] = 0;
      if (c_.pruned_keep > 0 && views_[l].slots > 0) scales_[l] = 1;
      sum += scales_[l];
      count += scales_[l] > 0;
    }
    for (double& x : scales_) x *= sum > 0 ? count / sum : 1;
    spread_ = std::any_of(scales_.begin(), scales_.end(),
                          [](double x) { return x > 0 && std::abs(x - 1) > 1e-9; });
  }

  // Units of one key and its value, of an average sparse layer.
  struct Cost {
    double fixed = 0, per_keep = 0, least_keep = 0;
  };
  Cost cost(int levels) const {
    Cost out;
    double sparse = 0, slots = 0, unit = 0, coded = 0, key = 0;
    const LayerView* any = nullptr;
    for (const LayerView& v : views_) {
      if (v.slots == 0) continue;
      any = &v;
      ++sparse;
      slots = static_cast<double>(v.slots);
      const auto row = static_cast<double>((v.head_dim + v.value_dim) * dtype_size(v.dtype));
      key = static_cast<double>(v.head_dim) / static_cast<double>(v.head_dim + v.value_dim);
      unit += static_cast<double>(v.slot_bytes()) / row;
      coded += v.coded_keys.bits > 0;
    }
    unit /= sparse;
    coded /= sparse;
    out.fixed = static_cast<double>(any->exact);
    out.per_keep = slots * unit;
    const double finest =
        any->levels > 0 ? static_cast<double>(any->level[any->levels - 1].clusters) : 0;
    if (c_.selector == SQZ_SELECTOR_QUEST) {
      out.fixed += 2 * key * static_cast<double>(any->pages);
      out.least_keep = std::min(1.0, static_cast<double>(any->page_size) / slots);
    } else if (c_.selector != SQZ_SELECTOR_SQUEEZED) {
      if (c_.selector == SQZ_SELECTOR_WINDOW) out.fixed -= static_cast<double>(metadata_.sink);
      out.fixed += coded * finest;  // scattered keys stand on all means
    } else {
      const auto through = [&](int k) {  // share of the keys below the clusters of level k
        const auto& keep = calibration_.coarse_keep;
        return k == 0 ? 1.0 : keep[keep.size() - static_cast<size_t>(levels - k)];
      };
      for (int k = 0; k < levels; ++k) {
        const auto n = static_cast<double>(any->level[any->levels - levels + k].clusters);
        out.fixed += key * through(k) * n;
      }
      out.per_keep += (1 - key) * coded * finest;
    }
    return out;
  }

  void make_plan() {
    const bool sparse =
        std::any_of(views_.begin(), views_.end(), [](const LayerView& v) { return v.slots > 0; });
    levels_ = c_.levels == 0 ? metadata_.levels : c_.levels;
    if (dense_) return;
    if (c_.pruned_keep > 0) {
      budget_ = metadata_.pruned->budget;
      keep_ = metadata_.pruned->keep;
      return;
    }
    if (!c_.thresholds.empty()) {
      budget_ = keep_ = 0;
      return;
    }
    ASSERT_TRUE(sparse);
    const auto tokens = static_cast<double>(c_.tokens);
    Cost at;
    const auto plan = [&] {
      at = cost(levels_);
      keep_ = c_.keep > 0 ? c_.keep : (c_.budget * tokens - at.fixed) / at.per_keep;
      budget_ = c_.keep > 0 ? (at.fixed + c_.keep * at.per_keep) / tokens : c_.budget;
    };
    plan();
    if (c_.selector == SQZ_SELECTOR_SQUEEZED && levels_ > 1 &&
        keep_ > calibration_.coarse_keep.back()) {
      levels_ = 1;
      plan();
    }
    const double least = (at.fixed + at.least_keep * at.per_keep) / tokens;
    const bool nothing_to_gain = keep_ >= 1 || budget_ >= 1 || least >= 1;
    const bool too_little = keep_ <= 0 || keep_ < at.least_keep * (1 - 1e-9);
    refused_ = too_little && !nothing_to_gain && c_.tokens >= 4096;
    dense_ = fallback_ = nothing_to_gain || too_little;
    if (dense_) {
      budget_ = std::min(budget_, 1.0);
      keep_ = std::clamp(keep_, 0.0, 1.0);
    }
  }

  // ---- What each layer and KV head keeps.

  double share(const std::vector<float>& table, int scope, int64_t layer, int64_t head,
               double keep) const {
    const float* grid =
        table.data() + ((scope * c_.model.layers + layer) * c_.model.kv_heads + head) * (kLast + 1);
    const double at = keep * static_cast<double>(kLast);
    const auto low = std::min(static_cast<int64_t>(at), kLast - 1);
    return grid[low] + (at - static_cast<double>(low)) * (grid[low + 1] - grid[low]);
  }
  double layer_share(const std::vector<float>& table, int scope, int64_t layer, double keep) const {
    double sum = 0;
    for (int64_t h = 0; h < c_.model.kv_heads; ++h) sum += share(table, scope, layer, h, keep);
    return sum / static_cast<double>(c_.model.kv_heads);
  }
  double head_share(const std::vector<float>& table, int scope, int64_t layer, int64_t head) const {
    if (!c_.by_budget_rule) return 0;
    const double own = share(table, scope, layer, head, keep_);
    if (!spread_) return own;
    std::vector<double> weights;
    for (int64_t h = 0; h < c_.model.kv_heads; ++h) {
      weights.push_back(share(table, scope, layer, h, keep_));
    }
    std::vector<double> ones(views_.size(), 1.0);
    double total = 0;
    std::vector<double> by_layer;
    for (int64_t l = 0; l < c_.model.layers; ++l) {
      by_layer.push_back(layer_share(table, scope, l, keep_) * scales_[l]);
      if (scales_[l] > 0) total += layer_share(table, scope, l, keep_);
    }
    const double kept = dealt(total, by_layer, ones)[layer];
    return dealt(kept * static_cast<double>(c_.model.kv_heads), weights,
                 std::vector<double>(weights.size(), 1.0))[head];
  }
  double log_threshold(int scope) const {
    if (!c_.thresholds.empty()) return std::log(c_.thresholds.back());
    if (c_.by_budget_rule) return 0;
    const std::vector<float>& all = calibration_.thresholds;
    const int64_t curves = Calibration::kScopes * Calibration::kPaths;
    const int64_t curve = scope * Calibration::kPaths + (levels_ > 1 ? 1 : 0);
    const float* grid = all.data() + curve * (std::ssize(all) / curves);
    const double at = keep_ * static_cast<double>(kLast);
    const auto low = std::min(static_cast<int64_t>(at), kLast - 1);
    const float a = grid[low], b = grid[low + 1];
    if (at == static_cast<double>(low)) return a;
    if (a > 0 || std::isinf(a)) return b;
    if (b < -1e30f) return a;
    return a + (at - static_cast<double>(low)) * (b - a);
  }
  // [layers], of selectors that keep whole keys.
  std::vector<double> layer_keys() const {
    double layers = 0;
    std::vector<double> caps;
    for (size_t l = 0; l < views_.size(); ++l) {
      layers += scales_[l] > 0;
      caps.push_back(static_cast<double>(views_[l].slots));
    }
    const double slots = *std::max_element(caps.begin(), caps.end());
    return dealt(layers * std::floor(keep_ * slots + 1e-6), scales_, caps);
  }

  // ---- Selections.

  std::vector<bool> last_and_heavy(const LayerView& view, int64_t head, int64_t keys) const {
    std::vector<bool> out(static_cast<size_t>(view.slots));
    const bool heavy = c_.selector == SQZ_SELECTOR_H2O;
    const int64_t last = heavy ? keys - keys / 2 : keys;
    for (int64_t slot = 0; slot < view.slots; ++slot) {
      out[slot] = view.positions[head * view.slots + slot] >= metadata_.sink + view.slots - last;
    }
    int64_t left = keys - last;
    for (int64_t i = 0; left > 0; ++i) {
      const uint32_t slot = view.heavy[head * view.slots + i];
      left -= out[slot] ? 0 : 1;
      out[slot] = true;
    }
    return out;
  }

  // log(e^a + e^b)
  static double log_add(double a, double b) {
    const double most = std::max(a, b), least = std::min(a, b);
    return std::isinf(least) ? most : most + std::log1p(std::exp(least - most));
  }

  // The classifier's shares of the attention over the buckets' sizes, best first; as logarithms.
  reference::Selected best_buckets(int64_t layer, int64_t head, const std::vector<float>& before,
                                   int64_t tokens) const {
    const LayerView& view = layers_[layer].view;
    const QmodelLayer& network = c_.qmodel.layers[layer];
    const int64_t dim = view.head_dim, hidden = c_.qmodel.hidden, buckets = view.buckets;
    const uint32_t* offsets = view.bucket_offsets + head * (buckets + 1);
    std::vector<double> score(static_cast<size_t>(buckets), -INFINITY);
    for (int64_t r = 0; r < tokens * c_.group(); ++r) {
      const float* q = before.data() + r * dim;
      std::vector<double> h, logits;
      for (int64_t i = head * hidden; i < (head + 1) * hidden; ++i) {
        double sum = network.hidden_bias[i];
        for (int64_t k = 0; k < dim; ++k) sum += double{network.hidden_weight[i * dim + k]} * q[k];
        h.push_back(std::max(sum, 0.0));
      }
      double total = -INFINITY;
      for (int64_t b = 0; b < buckets; ++b) {
        double logit = network.output_bias[head * buckets + b];
        for (int64_t i = 0; i < hidden; ++i) {
          logit += network.output_weight[(head * buckets + b) * hidden + i] * h[i];
        }
        logits.push_back(logit);
        total = log_add(total, logit + std::log(offsets[b + 1] - offsets[b]));
      }
      for (int64_t b = 0; b < buckets; ++b) score[b] = log_add(score[b], logits[b] - total);
    }
    std::vector<double> ones(views_.size(), 1.0), weights = scales_;
    for (double& x : weights) x *= keep_;
    const double sparse = static_cast<double>(
        std::count_if(scales_.begin(), scales_.end(), [](double x) { return x > 0; }));
    const double part = dealt(keep_ * sparse, weights, ones)[layer];
    const double exact = (spread_ ? part : keep_) * static_cast<double>(view.slots);
    int64_t left = std::llround(exact);
    reference::Selected out;
    out.slots.assign(static_cast<size_t>(view.slots), false);
    out.margin = 2 * std::abs(exact - std::floor(exact) - 0.5);  // of 0.5: either way
    std::vector<int64_t> order;
    for (int64_t b = 0; b < buckets; ++b) {
      if (offsets[b + 1] > offsets[b]) order.push_back(b);
    }
    std::sort(order.begin(), order.end(),
              [&](int64_t x, int64_t y) { return score[x] > score[y]; });
    int64_t taken = 0;  // keys of the bucket before
    for (size_t r = 0; r < order.size(); ++r) {
      const int64_t keys = offsets[order[r] + 1] - offsets[order[r]];
      const bool ends = 2 * left <= keys;
      // The order of two buckets matters at the end, also for the one that is left out, and where
      // the one before would not be taken as the second. Scores of float32 are as exact as they are
      // small.
      const auto compare = [&](size_t first, size_t second) {
        const double last = score[order[first]], next = score[order[second]];
        out.margin = std::min(out.margin, (last - next) / std::max(1.0, -0.2 * next));
      };
      if (r > 0 && (ends || 2 * (left + taken - keys) <= taken)) compare(r - 1, r);
      if (ends && r + 1 < order.size()) compare(r, r + 1);
      if (ends) break;
      left -= keys;
      taken = keys;
      std::fill(out.slots.begin() + offsets[order[r]], out.slots.begin() + offsets[order[r] + 1],
                true);
    }
    return out;
  }

  const PropertyCase& c_;
  std::shared_ptr<const SqzFile> file_;
  const IndexMetadata& metadata_;
  std::vector<LayerView> views_;
  std::vector<Decoded> layers_;
  Calibration calibration_;
  std::vector<double> scales_;  // [layers]; 0: read whole
  bool spread_ = false, dense_ = false, fallback_ = false, refused_ = false;
  int levels_ = 1;
  double keep_ = 1, budget_ = 1;
};

}  // namespace sqz::testing
