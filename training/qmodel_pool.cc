#include "training/qmodel_pool.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

namespace sqz::training {

SamplePool::SamplePool(const NetworkShape& shape, int64_t windows, int64_t rows,
                       at::Device device) {
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(device);
  queries_ = at::zeros({windows, shape.heads, rows, shape.dim}, options);
  masses_ = at::zeros({windows, shape.heads, rows, shape.buckets}, options.dtype(at::kHalf));
  log_sizes_ = at::zeros_like(masses_);
  counts_ = at::zeros({windows, shape.heads}, options.dtype(at::kDouble));
}

uint64_t SamplePool::window_bytes(const NetworkShape& shape, int64_t rows) {
  return static_cast<uint64_t>(shape.heads) * static_cast<uint64_t>(rows) *
         static_cast<uint64_t>(shape.dim * int64_t{sizeof(float)} +
                               2 * shape.buckets * int64_t{sizeof(at::Half)});
}

void SamplePool::put(int64_t window, int64_t first, const TrainSamples& samples) {
  const int64_t slot = window % windows(), heads = samples.queries.size(0);
  queries_.select(0, slot).narrow(0, first, heads).copy_(samples.queries);
  masses_.select(0, slot).narrow(0, first, heads).copy_(samples.masses);
  log_sizes_.select(0, slot).narrow(0, first, heads).copy_(samples.log_sizes);
  counts_.select(0, slot).narrow(0, first, heads).copy_(samples.counts);
}

NetworkBatch SamplePool::draw(int64_t end, int64_t rows, uint64_t seed) const {
  const c10::InferenceMode off(false);
  const int64_t heads = queries_.size(1), most = queries_.size(2);
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::Device device = queries_.device();
  const at::Tensor window =
      at::randint(std::min(end, windows()), {rows}, random, at::kLong).to(device);
  const at::Tensor place = at::rand({rows}, random, at::kDouble).to(device);
  const at::Tensor counts = counts_.index_select(0, window).t();  // [n, rows]
  const at::Tensor row = (counts * place).floor().to(at::kLong);  // below counts: place < 1
  const at::Tensor head = at::arange(heads, window.options()).unsqueeze(1);
  const at::Tensor flat = ((window.unsqueeze(0) * heads + head) * most + row).view({-1});
  const auto pick = [&](const at::Tensor& from) {
    return from.view({-1, from.size(3)})
        .index_select(0, flat)
        .view({heads, rows, from.size(3)})
        .to(at::kFloat);
  };
  return {pick(queries_), pick(masses_), pick(log_sizes_), (counts > 0).to(at::kFloat)};
}

}  // namespace sqz::training
