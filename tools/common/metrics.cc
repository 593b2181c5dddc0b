#include "tools/common/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace sqz {
namespace {

double ratio(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

double mean(std::span<const double> values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double standard_error(std::span<const double> values) {
  if (values.size() < 2) return 0;
  const double center = mean(values);
  double squares = 0;
  for (const double value : values) squares += (value - center) * (value - center);
  const auto n = static_cast<double>(values.size());
  return std::sqrt(squares / (n - 1) / n);
}

double binomial_error(double fraction, int64_t trials) {
  return trials == 0 ? 0 : std::sqrt(fraction * (1 - fraction) / static_cast<double>(trials));
}

std::vector<double> difference(std::span<const double> a, std::span<const double> b) {
  std::vector<double> out;
  for (size_t i = 0; i < a.size(); ++i) out.push_back(a[i] - b[i]);
  return out;
}

std::vector<double> block_means(std::span<const double> values, int64_t block) {
  const auto size = static_cast<size_t>(block);
  if (!values.empty() && values.size() < size) return {mean(values)};
  std::vector<double> out;
  for (; values.size() >= size; values = values.subspan(size)) {
    out.push_back(mean(values.first(size)));
  }
  return out;
}

double relative_error(std::span<const float> a, std::span<const float> b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double delta = static_cast<double>(a[i]) - b[i];
    difference += delta * delta;
    norm += static_cast<double>(b[i]) * b[i];
  }
  if (difference == 0) return 0;
  return norm == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(difference / norm);
}

std::vector<float> merged_attention(const ObservedAttention& seen, const float* out,
                                    const float* lse) {
  const int64_t rows = seen.count * seen.heads, dim = seen.dim;
  std::vector<float> merged;
  merged.reserve(static_cast<size_t>(rows * dim));
  for (int64_t row = 0; row < rows; ++row) {
    const float highest = std::max(lse[row], seen.own_lse[row]);
    const bool none = std::isinf(highest) && highest < 0;
    const float weight = none ? 0 : std::exp(lse[row] - highest);
    const float own_weight = none ? 0 : std::exp(seen.own_lse[row] - highest);
    const float sum = none ? 1 : weight + own_weight;
    for (int64_t i = row * dim; i < (row + 1) * dim; ++i) {
      merged.push_back((weight * out[i] + own_weight * seen.own_out[i]) / sum);
    }
  }
  return merged;
}

Result<OtherAttention> attention_with(FixedContext& context, const ObservedAttention& seen) {
  const auto rows = static_cast<size_t>(seen.count * seen.heads);
  std::vector<float> out(rows * static_cast<size_t>(seen.dim)), lse(rows);
  const int64_t indptr[] = {0, seen.count};
  SQZ_RETURN_IF_ERROR(context.attend(seen.layer, {.q = seen.queries,
                                                  .out = out.data(),
                                                  .lse = lse.data(),
                                                  .heads = seen.heads,
                                                  .dim = seen.dim,
                                                  .indptr = indptr,
                                                  .first = {&seen.first, 1}}));
  return OtherAttention{merged_attention(seen, out.data(), lse.data()), std::move(lse)};
}

double recalled_mass(float lse, float dense_lse) {
  if (std::isinf(dense_lse)) return 1;  // a window that sees none of the context
  return std::exp(static_cast<double>(lse) - dense_lse);
}

void Reads::add(const sqz_stats& stats) {
  asked_budget = stats.asked_budget;
  asked_keep = stats.asked_keep;
  dense_fallback = dense_fallback || stats.dense_fallback != 0;
  keys_read += stats.keys_read;
  keys_possible += stats.keys_possible;
  bytes_read += stats.bytes_read;
  bytes_dense += stats.bytes_dense;
  const double delivered = ratio(stats.bytes_read, stats.bytes_dense);
  lowest = std::min(lowest, delivered);
  highest = std::max(highest, delivered);
}

double Reads::delivered_budget() const {
  return ratio(bytes_read, bytes_dense);
}

double Reads::delivered_keep() const {
  return ratio(keys_read, keys_possible);
}

}  // namespace sqz
