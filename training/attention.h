// The keys and values of one layer, and causal attention over them, without an N x N matrix. The
// CPU cache runs the blocked kernel of libruntime/kernels/cpu/causal.h. The cache for other devices
// runs LibTorch's flash attention (LibTorch 2.5, CUDA, bf16, all tokens in one call), or it takes
// as many query rows at a time as fit 256 MiB of scores.
#pragma once

#include <cstdint>
#include <memory>

#include "formats/model_description.h"
#include "libruntime/kernels/cpu/offline_kernels.h"
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
  // Grows or shrinks. New tokens are undefined until they are written. Growth moves the tokens, as
  // in std::vector, so nobody may read or write meanwhile.
  virtual void resize(int64_t tokens) = 0;
  // k, v: [T, Hkv, d] of tokens first .. first + T - 1, keys after RoPE. Several threads may write
  // different tokens at once.
  virtual void write(int64_t first, const at::Tensor& k, const at::Tensor& v) = 0;
  // q: [T, Hq, d] of tokens first .. first + T - 1. A token sees itself and the tokens before it;
  // if window > 0, the last `window` of these. Thread-safe.
  virtual AttentionState attend(const at::Tensor& q, int64_t first, int64_t window) const = 0;
  // All tokens as [Hkv, size, d], or undefined tensors if the cache has another layout.
  virtual at::Tensor keys() const { return {}; }
  virtual at::Tensor values() const { return {}; }
};

// float32, in the layout of causal.h.
std::unique_ptr<KvCache> make_cpu_cache(const ModelDescription& model,
                                        const OfflineKernels& kernels = offline_kernels());
// By LibTorch's operations, on any device and in any dtype.
std::unique_ptr<KvCache> make_torch_cache(const ModelDescription& model);

// The attention that each token of a text gets from all tokens of the text, which ranks heavy
// hitters (H2O). It costs as much as the scores of a dense pass, and makes no N x N matrix.
// q: [N, Hq, d], k: [N, Hkv, d], after RoPE, on any device. Token t sees the tokens up to t; if
// window > 0, the last `window` of these. Returns [Hkv, N] float32 on the CPU: the softmax weights,
// summed over tokens and the heads of the group. The result does not depend on the number of
// threads.
at::Tensor attention_mass(const at::Tensor& q, const at::Tensor& k, const ModelDescription& model,
                          int64_t window);

// Merges `b` into `a`.
void merge_states(AttentionState& a, const AttentionState& b);

}  // namespace sqz::training
