#include "training/attention.h"

#include <torch/version.h>

#include <algorithm>
#include <tuple>

// LibTorch's flash attention with heads that share keys, and with the log-sum-exp.
#define SQZ_FLASH_ATTENTION (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR >= 205)

namespace sqz::training {
namespace {

constexpr int64_t kScoreBytes = int64_t{256} << 20;

class TorchCache final : public KvCache {
 public:
  explicit TorchCache(const ModelDescription& model)
      : group_(model.group_size()), scale_(model.attention_scale) {}

  int64_t size() const override { return size_; }
  void resize(int64_t tokens) override { size_ = tokens; }

  void write(int64_t first, const at::Tensor& k, const at::Tensor& v) override {
    reserve(k);
    keys_.narrow(1, first, k.size(0)).copy_(k.transpose(0, 1));
    values_.narrow(1, first, k.size(0)).copy_(v.transpose(0, 1));
  }

  AttentionState attend(const at::Tensor& q, int64_t first, int64_t window) const override {
    const int64_t count = q.size(0), heads = q.size(1);
    if (flash_can(q, first, window)) return flash(q);
    const auto f32 = q.options().dtype(at::kFloat);
    AttentionState state{at::empty(q.sizes(), f32), at::empty({count, heads}, f32)};
    const int64_t row_bytes = heads * (first + count) * int64_t{sizeof(float)};
    const int64_t step = std::max<int64_t>(1, kScoreBytes / row_bytes);
    for (int64_t t = 0; t < count; t += step) {
      const int64_t rows = std::min(step, count - t);
      attend_rows(q.narrow(0, t, rows), first + t, window,
                  {state.out.narrow(0, t, rows), state.lse.narrow(0, t, rows)});
    }
    return state;
  }

  at::Tensor keys() const override { return keys_.defined() ? keys_.narrow(1, 0, size_) : keys_; }
  at::Tensor values() const override {
    return values_.defined() ? values_.narrow(1, 0, size_) : values_;
  }

 private:
#if SQZ_FLASH_ATTENTION
  bool flash_can(const at::Tensor& q, int64_t first, int64_t window) const {
    return q.is_cuda() && q.scalar_type() == at::kBFloat16 && first == 0 && q.size(0) == size_ &&
           (window == 0 || window >= size_) && q.size(2) % 8 == 0 && q.size(2) <= 256;
  }
  AttentionState flash(const at::Tensor& q) const {
    const auto result = at::_scaled_dot_product_flash_attention(
        q.transpose(0, 1).unsqueeze(0), keys().unsqueeze(0), values().unsqueeze(0),
        /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false, scale_);
    return {std::get<0>(result).squeeze(0).transpose(0, 1).to(at::kFloat).contiguous(),
            std::get<1>(result).squeeze(0).transpose(0, 1).contiguous()};
  }
#else
  static bool flash_can(const at::Tensor&, int64_t, int64_t) {
    return false;
  }
  static AttentionState flash(const at::Tensor&) {
    return {};
  }
#endif

  // Memory for size_ tokens, on the device and in the dtype of what is written.
  void reserve(const at::Tensor& like) {
    const int64_t capacity = keys_.defined() ? keys_.size(1) : 0;
    if (size_ <= capacity) return;
    const int64_t grown = std::max(size_, 2 * capacity);
    for (at::Tensor* tensor : {&keys_, &values_}) {
      at::Tensor wider = at::empty({like.size(1), grown, like.size(2)}, like.options());
      if (capacity > 0) wider.narrow(1, 0, capacity).copy_(*tensor);
      *tensor = wider;
    }
  }

  void attend_rows(const at::Tensor& q, int64_t first, int64_t window,
                   const AttentionState& state) const {
    const int64_t count = q.size(0), dim = q.size(2), kv_heads = keys_.size(0);
    const int64_t low = window > 0 ? std::max<int64_t>(0, first - window + 1) : 0;
    const int64_t keys = first + count - low;
    // [Hkv, group * count, d]: the rows of one KV head are the group's heads, then tokens.
    const at::Tensor rows = q.reshape({count, kv_heads, group_, dim})
                                .permute({1, 2, 0, 3})
                                .reshape({kv_heads, group_ * count, dim});
    at::Tensor scores =
        at::bmm(rows, keys_.narrow(1, low, keys).transpose(1, 2)).to(at::kFloat).mul_(scale_);
    const auto index = q.options().dtype(at::kLong);
    const at::Tensor ahead = at::arange(low, low + keys, index).unsqueeze(0) -
                             at::arange(first, first + count, index).unsqueeze(1);
    at::Tensor hidden = ahead > 0;
    if (window > 0) hidden = hidden.logical_or(ahead <= -window);
    scores = scores.view({kv_heads, group_, count, keys})
                 .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
    const at::Tensor lse = scores.logsumexp(3);  // [Hkv, group, count]
    const at::Tensor weights = scores.sub_(lse.unsqueeze(3)).exp_().to(values_.scalar_type());
    const at::Tensor out =
        at::bmm(weights.view({kv_heads, group_ * count, keys}), values_.narrow(1, low, keys))
            .view({kv_heads, group_, count, dim});
    state.out.copy_(out.permute({2, 0, 1, 3}).reshape({count, -1, dim}));
    state.lse.copy_(lse.permute({2, 0, 1}).reshape({count, -1}));
  }

  int64_t group_;
  double scale_;
  int64_t size_ = 0;
  at::Tensor keys_, values_;  // [Hkv, capacity, d]
};

}  // namespace

std::unique_ptr<KvCache> make_torch_cache(const ModelDescription& model) {
  return std::make_unique<TorchCache>(model);
}

void merge_states(AttentionState& a, const AttentionState& b) {
  const at::Tensor lse = at::logaddexp(a.lse, b.lse);
  a.out.mul_((a.lse - lse).exp_().unsqueeze(2));
  a.out.addcmul_(b.out, (b.lse - lse).exp_().unsqueeze(2));
  a.lse = lse;
}

}  // namespace sqz::training
