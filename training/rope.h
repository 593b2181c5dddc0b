// Rotary position embedding in its four kinds (libruntime/rope.h). Angles are computed in float32,
// in the steps of Hugging Face, because weights were trained with their rounding (1e-3 at position
// 30000).
#pragma once

#include <cstdint>

#include "libruntime/rope.h"
#include "training/aten.h"

namespace sqz::training {

// cos and sin of positions first .. first + count - 1, attention_factor multiplied in:
// [count, 1, d / 2] float32 on the CPU.
struct RopeTable {
  at::Tensor cos, sin;
  RopeTable narrow(int64_t start, int64_t count) const {
    return {cos.narrow(0, start, count), sin.narrow(0, start, count)};
  }
};
RopeTable rope_table(const RopeDescription& rope, int64_t head_dim, int64_t first, int64_t count);

// x: [T, heads, d] rotated, in x's dtype; pairs are (i, i + d / 2).
at::Tensor apply_rope(const at::Tensor& x, const RopeTable& table);

}  // namespace sqz::training
