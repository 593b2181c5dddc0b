#include "libruntime/cuda/bucket_lookup.h"

#include <algorithm>

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {

BucketLookup::BucketLookup(const ServedIndex& index, const DeviceIndex& uploaded)
    : index_(index),
      uploaded_(uploaded),
      rope_(index.metadata().model.rope, index.metadata().model.head_dim) {}

Result<std::unique_ptr<BucketLookup>> BucketLookup::create(const ServedIndex& index,
                                                           const DeviceIndex& uploaded,
                                                           std::span<const LookupParams> lookups) {
  std::unique_ptr<BucketLookup> out(new BucketLookup(index, uploaded));
  for (int64_t l = 0; l < std::ssize(lookups); ++l) {
    const LookupParams& lookup = lookups[static_cast<size_t>(l)];
    if (lookup.levels == 0 || uploaded.layer(l).buckets == 0) continue;
    SQZ_ASSIGN_OR_RETURN(out->plan_, plan_classify(out->params_of(l, lookup)));
    break;  // layers that select have the same shape
  }
  const std::vector<float>& frequencies = out->rope_.frequencies();
  const size_t bytes = frequencies.size() * sizeof(float);
  SQZ_RETURN_IF_ERROR(out->frequencies_.reserve(bytes));
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(out->frequencies_.data(), frequencies.data(), bytes, cudaMemcpyHostToDevice));
  const auto scratch = static_cast<size_t>(out->plan_.scratch);
  SQZ_RETURN_IF_ERROR(out->scratch_.reserve(scratch));
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemset(out->scratch_.data(), 0, scratch));
  return out;
}

Status BucketLookup::check(const AttendCall& call) {
  if (call.q_before_rope != nullptr || call.positions != nullptr) return {};
  return {Code::kInvalidArgument,
          "positions: found null, expected the tokens' positions, or q_before_rope: the selector "
          "looks at queries before RoPE"};
}

ClassifyParams BucketLookup::params_of(int64_t layer, const LookupParams& lookup) const {
  const DeviceClassifier& network = uploaded_.layer(layer).classifier;
  ClassifyParams params;
  params.lookup = lookup;
  params.hidden = static_cast<int32_t>(network.hidden);
  params.hidden_weight = network.hidden_weight;
  params.hidden_bias = network.hidden_bias;
  params.output_weight = network.output_weight;
  params.output_bias = network.output_bias;
  return params;
}

Status BucketLookup::look_up(const AttendCall& call, int64_t first,
                             const LookupParams& lookup) const {
  ClassifyParams params = params_of(call.layer, lookup);
  if (call.q_before_rope != nullptr) {
    const ModelDescription& model = index_.metadata().model;
    params.lookup.q = static_cast<const std::byte*>(call.q_before_rope) +
                      first * model.query_heads * model.head_dim * dtype_size(call.dtype);
  } else {
    params.frequencies = frequencies();
    params.shrink = shrink();
    std::transform(call.positions + first, call.positions + first + lookup.requests,
                   params.positions, [](int64_t position) { return static_cast<float>(position); });
  }
  params.scratch = scratch_.data();
  return decode_classify(params, plan_, static_cast<cudaStream_t>(call.stream));
}

}  // namespace sqz::cuda
