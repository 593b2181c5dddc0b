#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "libruntime/kernels/cpu/causal.h"
#include "training/attention.h"

namespace sqz::training {
namespace {

// One KV head, as the kernel wants it. Lanes past the last token are zero.
struct Head {
  std::vector<float> panels;  // [ceil(size / kCausalPanel), d, kCausalPanel]
  std::vector<float> values;  // [size, padded_dim(d)]
};

class CpuCache final : public KvCache {
 public:
  CpuCache(const ModelDescription& model, const OfflineKernels& kernels)
      : kernels_(kernels),
        dim_(model.head_dim),
        group_(model.group_size()),
        scale_(static_cast<float>(model.attention_scale)),
        heads_(static_cast<size_t>(model.kv_heads)) {}

  int64_t size() const override { return size_; }

  void resize(int64_t tokens) override {
    size_ = tokens;
    for (Head& head : heads_) {
      head.panels.resize(static_cast<size_t>(round_up(tokens, kCausalPanel) * dim_));
      head.values.resize(static_cast<size_t>(tokens * padded_dim(dim_)));
    }
  }

  void write(int64_t first, const at::Tensor& k, const at::Tensor& v) override {
    const at::Tensor keys = k.to(at::kFloat).contiguous(), values = v.to(at::kFloat).contiguous();
    const int64_t count = keys.size(0), kv_heads = keys.size(1);
    for (int64_t h = 0; h < kv_heads; ++h) {
      write_head(heads_[static_cast<size_t>(h)], first, keys.data_ptr<float>() + h * dim_,
                 values.data_ptr<float>() + h * dim_, count, kv_heads * dim_);
    }
  }

  AttentionState attend(const at::Tensor& q, int64_t first, int64_t window) const override {
    const at::Tensor queries = q.to(at::kFloat).contiguous();
    const int64_t count = queries.size(0), heads = queries.size(1);
    AttentionState state{at::empty_like(queries), at::empty({count, heads}, queries.options())};
    const int64_t kv_heads = static_cast<int64_t>(heads_.size());
    const int64_t step = std::max<int64_t>(1, kCausalRows / group_);  // tokens of one task
    const int64_t tasks = (count + step - 1) / step * kv_heads;
    at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(dim_);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t t = task / kv_heads * step, last = std::min(count, t + step);
        for (int64_t g = 0; g < group_; g += kCausalRows) {  // in one go, unless the group is huge
          const Rows rows{task % kv_heads * group_ + g, std::min(kCausalRows, group_ - g), t, last};
          attend_rows(queries, first, window, rows, scratch, state);
        }
      }
    });
    return state;
  }

 private:
  struct Scratch {
    explicit Scratch(int64_t dim)
        : workspace(at::empty({causal_workspace(dim)})),
          q(at::empty({kCausalRows * dim})),
          out(at::empty({kCausalRows * dim})) {}
    at::Tensor workspace, q, out;  // LibTorch aligns memory to 64 bytes
    int64_t begin[kCausalRows], end[kCausalRows];
    float lse[kCausalRows];
  };

  // Query heads [head, head + heads), tokens [first, last) of the queries.
  struct Rows {
    int64_t head, heads, first, last;
  };

  void write_head(Head& head, int64_t first, const float* k, const float* v, int64_t count,
                  int64_t stride) const {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = first + t;
      float* panel =
          head.panels.data() + token / kCausalPanel * kCausalPanel * dim_ + token % kCausalPanel;
      for (int64_t j = 0; j < dim_; ++j) panel[j * kCausalPanel] = k[t * stride + j];
      std::copy_n(v + t * stride, dim_, head.values.data() + token * padded_dim(dim_));
    }
  }

  void attend_rows(const at::Tensor& queries, int64_t base, int64_t window, const Rows& rows,
                   Scratch& scratch, AttentionState& state) const {
    const int64_t all_heads = queries.size(1);
    const Head& kv = heads_[static_cast<size_t>(rows.head / group_)];
    const float* q = queries.data_ptr<float>();
    float *task_q = scratch.q.data_ptr<float>(), *task_out = scratch.out.data_ptr<float>();
    for (int64_t t = rows.first, r = 0; t < rows.last; ++t) {
      for (int64_t i = 0; i < rows.heads; ++i, ++r) {
        std::copy_n(q + (t * all_heads + rows.head + i) * dim_, dim_, task_q + r * dim_);
        scratch.end[r] = base + t + 1;
        scratch.begin[r] = window > 0 ? std::max<int64_t>(0, base + t + 1 - window) : 0;
      }
    }
    CausalTask task;
    task.rows = (rows.last - rows.first) * rows.heads;
    task.dim = dim_;
    task.q = task_q;
    task.scale = scale_;
    task.begin = scratch.begin;
    task.end = scratch.end;
    task.panels = kv.panels.data();
    task.values = kv.values.data();
    task.workspace = scratch.workspace.data_ptr<float>();
    task.out = task_out;
    task.lse = scratch.lse;
    kernels_.attend_causal(task);

    float* out = state.out.data_ptr<float>();
    float* lse = state.lse.data_ptr<float>();
    for (int64_t t = rows.first, r = 0; t < rows.last; ++t) {
      for (int64_t i = 0; i < rows.heads; ++i, ++r) {
        const int64_t row = t * all_heads + rows.head + i;
        std::copy_n(task_out + r * dim_, dim_, out + row * dim_);
        lse[row] = scratch.lse[r];
      }
    }
  }

  const OfflineKernels& kernels_;
  int64_t dim_, group_;
  float scale_;
  int64_t size_ = 0;
  std::vector<Head> heads_;
};

}  // namespace

std::unique_ptr<KvCache> make_cpu_cache(const ModelDescription& model,
                                        const OfflineKernels& kernels) {
  return std::make_unique<CpuCache>(model, kernels);
}

}  // namespace sqz::training
