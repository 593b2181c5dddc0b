#include "training/attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

namespace sqz::training {
namespace {

constexpr int64_t kBlock = 128;  // query tokens at a time
constexpr int64_t kStripes =
    16;  // sums of their own, added in order: however many threads there are

}  // namespace

at::Tensor attention_mass(const at::Tensor& q, const at::Tensor& k, const ModelDescription& model,
                          int64_t window) {
  const int64_t count = q.size(0), group = model.group_size(), dim = model.head_dim;
  const at::Tensor keys = k.to(at::kFloat).permute({1, 2, 0}).contiguous();  // [Hkv, d, N]
  const at::Tensor queries = q.to(at::kFloat)
                                 .view({count, model.kv_heads, group, dim})
                                 .transpose(0, 1)
                                 .contiguous();  // [Hkv, N, group, d]
  const auto floats = queries.options();
  const at::Tensor sums = at::zeros({model.kv_heads, kStripes, count}, floats);
  const auto run_stripe = [&](int64_t head, int64_t stripe) {
    const at::Tensor own = sums.select(0, head).select(0, stripe);
    for (int64_t first = stripe * kBlock; first < count; first += kStripes * kBlock) {
      const int64_t rows = std::min(kBlock, count - first), end = first + rows;
      const int64_t low = window > 0 ? std::max<int64_t>(0, first - window + 1) : 0;
      const auto index = floats.dtype(at::kLong);
      const at::Tensor ahead =
          at::arange(low, end, index).unsqueeze(0) - at::arange(first, end, index).unsqueeze(1);
      at::Tensor hidden = ahead > 0;
      if (window > 0) hidden = hidden.logical_or(ahead <= -window);
      at::Tensor scores =
          at::mm(queries.select(0, head).narrow(0, first, rows).reshape({-1, dim}),
                 keys.select(0, head).narrow(1, low, end - low))
              .mul_(model.attention_scale)
              .view({rows, group, end - low})
              .masked_fill_(hidden.unsqueeze(1), -std::numeric_limits<double>::infinity());
      own.narrow(0, low, end - low).add_(scores.softmax(2).sum(std::vector<int64_t>{0, 1}));
    }
  };
  const int64_t tasks = model.kv_heads * kStripes;
  if (q.device().is_cpu()) {
    at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t last) {
      const c10::InferenceMode inference;  // each thread has its own
      for (int64_t task = begin; task < last; ++task)
        run_stripe(task % model.kv_heads, task / model.kv_heads);
    });
  } else {
    for (int64_t task = 0; task < tasks; ++task)
      run_stripe(task % model.kv_heads, task / model.kv_heads);
  }
  return sums.sum(1).to(at::kCPU);
}

}  // namespace sqz::training
