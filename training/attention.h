// The keys and values of one layer, and causal attention over them. Never an N x N matrix: the CPU
// cache runs the blocked kernel of libruntime/kernels/cpu/causal.h; the one for other devices
// LibTorch's flash attention where it can (LibTorch 2.5, CUDA, bf16, all tokens in one call), and
// else as many query rows at a time as fit 256 MiB of scores.
#pragma once

#include <cstdint>
#include <memory>

#include "formats/model_description.h"
#include "libruntime/kernels/cpu/kernels.h"
#include "training/aten.h"

namespace sqz::training {

// A partial result over some of the keys; states over disjoint keys merge exactly.
struct AttentionState {
  at::Tensor out;  // [T, Hq, d] float32
  at::Tensor lse;  // [T, Hq] float32, natural log
};

class KvCache {
 public:
  virtual ~KvCache() = default;
  virtual int64_t size() const = 0;  // tokens held
  // Grows or shrinks; memory is kept, tokens added are undefined until written. Like std::vector,
  // growth moves what is there: not while others read or write.
  virtual void resize(int64_t tokens) = 0;
  // k, v: [T, Hkv, d] of tokens first .. first + T - 1, keys after RoPE. Several threads may write
  // different tokens at once.
  virtual void write(int64_t first, const at::Tensor& k, const at::Tensor& v) = 0;
  // q: [T, Hq, d] of tokens first .. first + T - 1. Each sees itself and the tokens before it, of
  // those the last `window` only (itself counted) if window > 0. Thread-safe.
  virtual AttentionState attend(const at::Tensor& q, int64_t first, int64_t window) const = 0;
  // The tokens held, [Hkv, size, d], or undefined tensors where they have no such form.
  virtual at::Tensor keys() const { return {}; }
  virtual at::Tensor values() const { return {}; }
};

// float32, in the layout of causal.h.
std::unique_ptr<KvCache> make_cpu_cache(const ModelDescription& model,
                                        const CpuKernels& kernels = cpu_kernels());
// LibTorch operations only: any device and dtype.
std::unique_ptr<KvCache> make_torch_cache(const ModelDescription& model);

// `b` merged into `a`.
void merge_states(AttentionState& a, const AttentionState& b);

}  // namespace sqz::training
