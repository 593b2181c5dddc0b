// The rules, and choosing the best of scored clusters until they hold a number of keys.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "libruntime/select/rule.h"

namespace sqz {
namespace {

// Buckets of 1/32 nat from a score of 1 down, the best ones first. Never lower for a lower score;
// kBuckets for -infinity.
constexpr uint32_t kBuckets = 1024;
constexpr float kPerNat = 32;

uint32_t bucket_of(float score) {
  const float bucket = std::clamp(score * -kPerNat, 0.0f, float{kBuckets - 1});
  return score > -INFINITY ? static_cast<uint32_t>(static_cast<int32_t>(bucket)) : kBuckets;
}

// The best of `order`, which have more than `left` keys in all. A selection by halves instead of a
// sort, since only the last one that fits matters. `reach`: at least `left`, else as near as can
// be.
void fill_last_bucket(const Choice& choice, int64_t left, bool reach, std::span<uint32_t> order,
                      std::span<uint8_t> chosen) {
  const auto& scores = choice.scores;
  const auto better = [&](uint32_t a, uint32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  const auto begin = order.begin();
  int64_t low = 0, high = std::ssize(order);
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    std::nth_element(begin + low, begin + middle, begin + high, better);
    int64_t keys = 0;
    for (int64_t i = low; i < middle; ++i) keys += choice.sizes[order[i]];
    if (keys <= left) {
      left -= keys;
      low = middle;
    } else {
      high = middle;
    }
  }
  // order[0 .. low) fits, order[low] does not fit whole.
  if (reach ? left > 0 : 2 * left > choice.sizes[order[low]]) ++low;
  for (int64_t i = 0; i < low; ++i) chosen[order[i]] = 1;
}

void choose_pages(const Choice& choice, int64_t count, std::span<uint32_t> order,
                  std::span<uint8_t> chosen) {
  const auto& scores = choice.scores;
  const auto pages = order.first(scores.size());
  std::iota(pages.begin(), pages.end(), 0u);
  std::nth_element(pages.begin(), pages.begin() + count, pages.end(), [&](uint32_t a, uint32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  std::fill(chosen.begin(), chosen.end(), uint8_t{0});
  for (const uint32_t page : pages.first(static_cast<size_t>(count))) chosen[page] = 1;
}

// Best first: the prefix of the ranking whose number of keys is nearest to `wanted`; of a level
// that is not the finest, the shortest one that holds as many. Only the bucket in which the wanted
// keys run out is looked at closely.
void choose_best(const Choice& choice, int64_t wanted, std::span<uint32_t> order,
                 std::span<uint8_t> chosen) {
  const size_t n = choice.scores.size();
  std::array<int64_t, kBuckets + 1> keys{};
  for (size_t i = 0; i < n; ++i) order[i] = bucket_of(choice.scores[i]);
  for (size_t i = 0; i < n; ++i) keys[order[i]] += choice.sizes[i];
  uint32_t last = 0;
  while (last < kBuckets && keys[last] <= wanted) wanted -= keys[last++];
  for (size_t i = 0; i < n; ++i) chosen[i] = order[i] < last ? 1 : 0;
  if (last == kBuckets) return;
  size_t tied = 0;
  for (size_t i = 0; i < n; ++i) {
    if (order[i] == last) order[tied++] = static_cast<uint32_t>(i);
  }
  fill_last_bucket(choice, wanted, !choice.finest, order.first(tied), chosen);
}

int64_t chosen_keys(const Choice& choice, std::span<const uint8_t> chosen) {
  int64_t keys = 0;
  for (size_t i = 0; i < chosen.size(); ++i) keys += chosen[i] != 0 ? choice.sizes[i] : 0;
  return keys;
}

}  // namespace

void choose(const SelectionPlan& plan, const Choice& choice, std::span<uint32_t> order,
            std::span<uint8_t> chosen) {
  if (!plan.layer_pages.empty()) {
    return choose_pages(choice, plan.layer_pages[choice.layer], order, chosen);
  }
  int64_t wanted = 0;
  const bool counts = !plan.head_keep.empty();
  if (counts) {
    const std::vector<float>& shares = plan.head_keep[choice.scope];
    const int64_t heads = std::ssize(shares) / std::ssize(plan.layer_keep);
    const double keep = shares[choice.layer * heads + choice.kv_head];
    wanted = std::llround(keep * static_cast<double>(choice.keys));
  }
  if (!counts || !choice.finest) {
    const float threshold = plan.log_thresholds[choice.scope][choice.level];
    for (size_t i = 0; i < choice.scores.size(); ++i) {
      const float score = choice.scores[i];
      chosen[i] = score >= threshold && score > -INFINITY ? 1 : 0;
    }
    if (!counts || chosen_keys(choice, chosen) >= wanted) return;
  }
  choose_best(choice, wanted, order, chosen);
}

}  // namespace sqz
