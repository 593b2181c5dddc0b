#include "tools/sqz_eval/probe.h"

#include "tools/common/metrics.h"

namespace sqz::eval {

Status Probe::observe(const ObservedAttention& dense) {
  if (first_ < 0) first_ = dense.first;
  const auto heads = static_cast<size_t>(model_.query_heads);
  const auto dim = static_cast<size_t>(model_.head_dim);
  const size_t rows = static_cast<size_t>(dense.count) * heads;
  const auto exact = merged_attention(dense, dense.context_out, dense.context_lse, model_);
  std::vector<float> out(rows * dim), lse(rows);
  for (size_t i = 0; i < sparse_.size(); ++i) {
    SQZ_RETURN_IF_ERROR(sparse_[i]->attend(dense.layer, dense.first, dense.count, dense.queries,
                                           out.data(), lse.data()));
    const auto merged = merged_attention(dense, out.data(), lse.data(), model_);
    for (size_t row = 0; row < rows; ++row) {
      const size_t token = static_cast<size_t>(dense.first - first_) + row / heads;
      sums_[i].error[token] += relative_error(std::span(merged).subspan(row * dim, dim),
                                              std::span(exact).subspan(row * dim, dim));
      sums_[i].recall[token] += recalled_mass(lse[row], dense.context_lse[row]);
    }
  }
  return {};
}

std::vector<ProbeResult> Probe::results() const {
  std::vector<ProbeResult> out = sums_;
  const auto terms = static_cast<double>(model_.layers * model_.query_heads);
  for (ProbeResult& result : out) {
    for (double& value : result.error) value /= terms;
    for (double& value : result.recall) value /= terms;
  }
  return out;
}

}  // namespace sqz::eval
