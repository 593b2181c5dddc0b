#include "tools/sqz_eval/probe.h"

#include "tools/sqz_eval/metrics.h"

namespace sqz::eval {

Probe::Probe(const ModelDescription& model, std::vector<FixedContext*> sparse, int64_t count)
    : model_(model),
      sparse_(std::move(sparse)),
      count_(count),
      sums_(sparse_.size()),
      out_(static_cast<size_t>(count * model_.query_heads * model_.head_dim)),
      lse_(static_cast<size_t>(count * model_.query_heads)) {
  const std::vector<double> zeros(static_cast<size_t>(count));
  for (ProbeResult& sums : sums_) sums = {zeros, zeros, zeros};
}

Status Probe::observe(const ObservedAttention& dense) {
  for (size_t i = 0; i < sparse_.size(); ++i) {
    SQZ_RETURN_IF_ERROR(sparse_[i]->attend(dense.layer, dense.first, dense.count, dense.queries,
                                           out_.data(), lse_.data()));
    compare({out_.data(), lse_.data()}, {dense.context_out, dense.context_lse},
            {dense.own_out, dense.own_lse}, sums_[i]);
  }
  return {};
}

void Probe::compare(const State& sparse, const State& dense, const State& own,
                    ProbeResult& sums) const {
  const auto d = static_cast<size_t>(model_.head_dim),
             heads = static_cast<size_t>(model_.query_heads);
  std::vector<float> merged_sparse(d), merged_dense(d);
  const auto row_of = [&](const State& state, size_t row) {
    return std::span(state.out + row * d, d);
  };
  for (size_t row = 0; row < static_cast<size_t>(count_) * heads; ++row) {
    const size_t token = row / heads;
    merge_out(row_of(sparse, row), sparse.lse[row], row_of(own, row), own.lse[row], merged_sparse);
    merge_out(row_of(dense, row), dense.lse[row], row_of(own, row), own.lse[row], merged_dense);
    sums.error[token] += relative_error(merged_sparse, merged_dense);
    sums.context_error[token] += relative_error(row_of(sparse, row), row_of(dense, row));
    sums.recall[token] += recalled_mass(sparse.lse[row], dense.lse[row]);
  }
}

std::vector<ProbeResult> Probe::results() const {
  std::vector<ProbeResult> out = sums_;
  const auto terms = static_cast<double>(model_.layers * model_.query_heads);
  for (ProbeResult& result : out) {
    for (auto* values : {&result.error, &result.context_error, &result.recall}) {
      for (double& value : *values) value /= terms;
    }
  }
  return out;
}

}  // namespace sqz::eval
