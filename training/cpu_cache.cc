#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "training/attention.h"
#include "training/cpu_kernel.h"

namespace sqz::training {
namespace {

struct FreeAligned {
  void operator()(float* p) const { std::free(p); }
};
using AlignedFloats = std::unique_ptr<float[], FreeAligned>;

AlignedFloats aligned_floats(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
  auto* memory = static_cast<float*>(std::aligned_alloc(64, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  return AlignedFloats(memory);
}

// One KV head, as the kernel wants it. Lanes past the last token are zero.
struct Head {
  std::vector<float> panels;  // [ceil(size / kPanel), d, kPanel]
  std::vector<float> values;  // [size, padded_dim(d)]
};

class CpuCache final : public KvCache {
 public:
  CpuCache(const ModelDescription& model, int widest)
      : kernel_(cpu_kernel(widest)),
        dim_(model.head_dim),
        group_(model.group_size()),
        scale_(static_cast<float>(model.attention_scale)),
        heads_(static_cast<size_t>(model.kv_heads)) {}

  int64_t size() const override { return size_; }

  void clear() override {
    size_ = 0;
    for (Head& head : heads_) {
      head.panels.clear();
      head.values.clear();
    }
  }

  void append(const at::Tensor& k, const at::Tensor& v) override {
    const at::Tensor keys = k.to(at::kFloat).contiguous(), values = v.to(at::kFloat).contiguous();
    const int64_t count = keys.size(0), kv_heads = keys.size(1);
    at::parallel_for(0, kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) {
        append_head(heads_[static_cast<size_t>(h)], keys.data_ptr<float>() + h * dim_,
                    values.data_ptr<float>() + h * dim_, count, kv_heads * dim_);
      }
    });
    size_ += count;
  }

  AttentionState attend(const at::Tensor& q, int64_t window) const override {
    const at::Tensor queries = q.to(at::kFloat).contiguous();
    const int64_t count = queries.size(0), heads = queries.size(1);
    AttentionState state{at::empty_like(queries), at::empty({count, heads}, queries.options())};
    const int64_t kv_heads = static_cast<int64_t>(heads_.size());
    const int64_t block = std::max<int64_t>(1, kMaxRows / group_);  // tokens of one task
    const int64_t blocks = (count + block - 1) / block;
    const int64_t tasks = blocks * kv_heads;
    // Later blocks see more keys: tasks are handed out one by one, the longest first.
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(tasks, at::get_num_threads()), 1,
                     [&](int64_t begin, int64_t end) {
                       Scratch scratch(dim_);
                       for (; begin < end; ++begin) {
                         for (int64_t task; (task = next.fetch_add(1)) < tasks;) {
                           const int64_t b = blocks - 1 - task / kv_heads;
                           attend_block(queries, task % kv_heads, b * block,
                                        std::min(count, (b + 1) * block), window, scratch, state);
                         }
                       }
                     });
    return state;
  }

 private:
  struct Scratch {
    explicit Scratch(int64_t dim)
        : workspace(aligned_floats(workspace_floats(dim))),
          q(aligned_floats(kMaxRows * dim)),
          out(aligned_floats(kMaxRows * dim)) {}
    AlignedFloats workspace, q, out;
    int64_t begin[kMaxRows], end[kMaxRows];
    float lse[kMaxRows];
  };

  void append_head(Head& head, const float* k, const float* v, int64_t count, int64_t stride) {
    const int64_t total = size_ + count, width = padded_dim(dim_);
    head.panels.resize(static_cast<size_t>((total + kPanel - 1) / kPanel * kPanel * dim_));
    head.values.resize(static_cast<size_t>(total * width));
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = size_ + t;
      float* panel = head.panels.data() + token / kPanel * kPanel * dim_ + token % kPanel;
      for (int64_t j = 0; j < dim_; ++j) panel[j * kPanel] = k[t * stride + j];
      std::copy_n(v + t * stride, dim_, head.values.data() + token * width);
    }
  }

  // Tokens [first, last) of the queries. A group larger than kMaxRows goes in several calls.
  void attend_block(const at::Tensor& queries, int64_t h, int64_t first, int64_t last,
                    int64_t window, Scratch& scratch, AttentionState& state) const {
    for (int64_t g = 0; g < group_; g += kMaxRows) {
      attend_rows(queries, h * group_ + g, std::min(kMaxRows, group_ - g), first, last, window,
                  scratch, state);
    }
  }

  void attend_rows(const at::Tensor& queries, int64_t head, int64_t heads, int64_t first,
                   int64_t last, int64_t window, Scratch& scratch, AttentionState& state) const {
    const int64_t all_heads = queries.size(1), base = size_ - queries.size(0);
    const Head& kv = heads_[static_cast<size_t>(head / group_)];
    const float* q = queries.data_ptr<float>();
    for (int64_t t = first, r = 0; t < last; ++t) {
      for (int64_t i = 0; i < heads; ++i, ++r) {
        std::copy_n(q + (t * all_heads + head + i) * dim_, dim_, scratch.q.get() + r * dim_);
        scratch.end[r] = base + t + 1;
        scratch.begin[r] = window > 0 ? std::max<int64_t>(0, base + t + 1 - window) : 0;
      }
    }
    RowsTask task;
    task.rows = (last - first) * heads;
    task.dim = dim_;
    task.q = scratch.q.get();
    task.scale = scale_;
    task.begin = scratch.begin;
    task.end = scratch.end;
    task.panels = kv.panels.data();
    task.values = kv.values.data();
    task.workspace = scratch.workspace.get();
    task.out = scratch.out.get();
    task.lse = scratch.lse;
    kernel_.attend(task);

    float* out = state.out.data_ptr<float>();
    float* lse = state.lse.data_ptr<float>();
    for (int64_t t = first, r = 0; t < last; ++t) {
      for (int64_t i = 0; i < heads; ++i, ++r) {
        const int64_t row = t * all_heads + head + i;
        std::copy_n(scratch.out.get() + r * dim_, dim_, out + row * dim_);
        lse[row] = scratch.lse[r];
      }
    }
  }

  const CpuKernel& kernel_;
  int64_t dim_, group_;
  float scale_;
  int64_t size_ = 0;
  std::vector<Head> heads_;
};

}  // namespace

std::unique_ptr<KvCache> make_cpu_cache(const ModelDescription& model, int widest) {
  return std::make_unique<CpuCache>(model, widest);
}

}  // namespace sqz::training
