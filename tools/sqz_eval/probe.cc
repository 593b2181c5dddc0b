#include "tools/sqz_eval/probe.h"

#include "tools/common/metrics.h"

namespace sqz::eval {

Status Probe::observe(const ObservedAttention& dense) {
  if (first_ < 0) first_ = dense.first;
  terms_ = static_cast<double>((dense.layer + 1) * dense.heads);
  const auto heads = static_cast<size_t>(dense.heads), dim = static_cast<size_t>(dense.dim);
  const auto exact = merged_attention(dense, dense.context_out, dense.context_lse);
  for (size_t i = 0; i < sparse_.size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(const OtherAttention found, attention_with(*sparse_[i], dense));
    for (size_t row = 0; row < found.lse.size(); ++row) {
      const size_t token = static_cast<size_t>(dense.first - first_) + row / heads;
      sums_[i].error[token] += relative_error(std::span(found.merged).subspan(row * dim, dim),
                                              std::span(exact).subspan(row * dim, dim));
      sums_[i].recall[token] += recalled_mass(found.lse[row], dense.context_lse[row]);
    }
  }
  return {};
}

std::vector<ProbeResult> Probe::results() const {
  std::vector<ProbeResult> out = sums_;
  for (ProbeResult& result : out) {
    for (double& value : result.error) value /= terms_;
    for (double& value : result.recall) value /= terms_;
  }
  return out;
}

}  // namespace sqz::eval
