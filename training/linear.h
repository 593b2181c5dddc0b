// Matrix products of a transformer, and the threads that they may use.
#pragma once

#include <cstdint>
#include <functional>

#include "training/aten.h"

namespace sqz::training {

struct Linear {
  at::Tensor weight;  // [out, in], in the type of x; on a CPU also in 16 bits if x is float32
  at::Tensor bias;    // [out] or undefined
};

// x [T, in] -> [T, out]. In float32 with OpenBLAS the bits do not depend on the number of threads.
at::Tensor apply(const Linear& linear, const at::Tensor& x);

// Applies op, for example at::silu_out, to x [T, ...]. On a CPU the bits do not depend on the
// number of threads. LibTorch's own bits do: it cuts x for its threads, and rounds the last
// elements before a cut differently.
at::Tensor by_rows(const at::Tensor& x, at::Tensor& (*op)(at::Tensor&, const at::Tensor&));

// Sets the number of CPU threads for the whole process; 0 = all cores. LibTorch with OpenBLAS
// (Debian's) has a second pool of threads, which spins against the first. It is reduced to one
// thread, and apply() splits the work instead.
void set_threads(int threads);

// Calls body(first, count) for every block of [0, total), on all threads. The last block, which is
// the longest in causal attention, comes first. Within a body LibTorch's operations run on one
// thread. A single block runs on the calling thread, and its operations may use all threads.
void for_blocks(int64_t total, int64_t block, const std::function<void(int64_t, int64_t)>& body);

}  // namespace sqz::training
