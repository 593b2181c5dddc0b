// What a step of generation does between its matrix products, on a GPU. All pointers are device
// memory; every function puts one kernel on `stream` and returns. Activations, weights and the
// tokens' own keys and values have type `dtype` (kF32 or kBF16), and are rounded where
// training/transformer.cc rounds them.
//
// A step runs rows: one token each, of a slot. A slot holds what one request has generated: its own
// keys and values, which stand behind the fixed context.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "formats/base/dtype.h"
#include "libruntime/cuda/device.h"

namespace sqz::training::cuda {

// Sizes that do not change from step to step.
struct ModelSizes {
  DType dtype = DType::kF32;
  // `hidden` is a multiple of 16 bytes.
  int32_t hidden = 0, query_heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0, vocab = 0;
  float rms_eps = 0, attention_scale = 0;
  sqz::cuda::Device device;
};

// The rows of a step. Tokens and positions that are negative are the slot's own.
struct RowParams {
  int32_t rows = 0;
  const int32_t* slot = nullptr;         // [rows]
  const int32_t* token = nullptr;        // [rows]; -1 = slot_token
  const int32_t* at = nullptr;           // [rows] own tokens before this one; -1 = slot_length
  const int32_t* slot_token = nullptr;   // [slots]
  const int32_t* slot_length = nullptr;  // [slots]
  int32_t* place = nullptr;              // [rows], out: `at`, resolved
};
// x [rows, hidden] from `embedding` [vocab, hidden].
Status embed(const ModelSizes& model, const RowParams& rows, const void* embedding, void* x,
             cudaStream_t stream);

// x += delta (null: nothing), out = RMS norm of x times `weight` [hidden]. With `picked` [rows],
// row r of out is of row picked[r] of x, which is left alone.
struct NormParams {
  int32_t rows = 0;
  void* x = nullptr;            // [.., hidden]
  const void* delta = nullptr;  // [.., hidden]
  const void* weight = nullptr;
  const int32_t* picked = nullptr;
  void* out = nullptr;  // [rows, hidden]
};
Status add_norm(const ModelSizes& model, const NormParams& params, cudaStream_t stream);

// out [out_features] = weight [out_features, in] y + bias (null: none), of one row. y is x; with
// `norm` [in] it is the RMS norm of x + delta (null: nothing), times `norm`, and x + delta goes to
// `sum` (null: nowhere), which is not x. Gated: the weight's first half makes gates g, its second
// half values v, and out [out_features / 2] = silu(g) * v.
struct ProductParams {
  const void* weight = nullptr;
  const void* bias = nullptr;
  const void* x = nullptr;
  const void *delta = nullptr, *norm = nullptr;
  void* sum = nullptr;
  void* out = nullptr;
  int64_t in = 0, out_features = 0;
  bool gated = false;
};
Status multiply_row(const ModelSizes& model, const ProductParams& params, cudaStream_t stream);
// Whether a row is whole 16-byte pieces and fits a block's shared memory.
bool fits_multiply_row(const ModelSizes& model, const ProductParams& params);

// Norms of heads (null: none), RoPE; keys and values go to the slots' own.
struct RotateParams {
  int32_t rows = 0;
  const int32_t* slot = nullptr;                         // [rows]
  const int32_t* place = nullptr;                        // [rows]
  const void* qkv = nullptr;                             // [rows, Hq + 2 Hkv, d]
  const void *q_norm = nullptr, *k_norm = nullptr;       // [d]
  const float *cosine = nullptr, *sine = nullptr;        // [capacity, d / 2], by place
  void* q = nullptr;                                     // [rows, Hq, d]
  DType context_dtype = DType::kF32;                     // of the next two
  void *context_q = nullptr, *context_before = nullptr;  // [rows, Hq, d] after and before RoPE
  void *keys = nullptr, *values = nullptr;               // [slots, Hkv, capacity, d] of this layer
  int64_t capacity = 0;
};
Status rotate(const ModelSizes& model, const RotateParams& params, cudaStream_t stream);

// The attention of each row to its slot's tokens up to itself, merged with what the fixed context
// answered.
struct OwnAttentionParams {
  int32_t rows = 0;
  const int32_t* slot = nullptr;
  const int32_t* place = nullptr;
  const void* q = nullptr;                        // [rows, Hq, d]
  const void *keys = nullptr, *values = nullptr;  // [slots, Hkv, capacity, d]
  int64_t capacity = 0;
  DType context_dtype = DType::kF32;
  const void* context_out = nullptr;   // [rows, Hq, d]
  const float* context_lse = nullptr;  // [rows, Hq]
  void* out = nullptr;                 // [rows, Hq, d]
};
Status attend_own(const ModelSizes& model, const OwnAttentionParams& params, cudaStream_t stream);

// out [rows, width] = silu(gate_up[:, :width]) * gate_up[:, width:].
Status gate(const ModelSizes& model, int32_t rows, const void* gate_up, void* out,
            cudaStream_t stream);

// The likeliest token of each part, the lowest id of equals; -1 if a logit is NaN or infinite. The
// part's slot gets it as the token that comes next, after the last of its rows.
struct ChoiceParams {
  int32_t parts = 0;
  const void* logits = nullptr;                           // [parts, vocab]
  const int32_t* last_row = nullptr;                      // [parts]
  const int32_t* slot = nullptr;                          // [rows]
  const int32_t* place = nullptr;                         // [rows]
  int32_t *slot_token = nullptr, *slot_length = nullptr;  // [slots], out
  int32_t* choice = nullptr;                              // [parts], out
};
Status choose(const ModelSizes& model, const ChoiceParams& params, cudaStream_t stream);

}  // namespace sqz::training::cuda
