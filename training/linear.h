// Matrix products of a transformer, and the threads that they may use.
#pragma once

#include <cstdint>
#include <functional>

#include "training/aten.h"

namespace sqz::training {

struct Linear {
  at::Tensor weight;  // [out, in], of the type of x, or with x of float32 on a CPU of 16 bits
  at::Tensor bias;    // [out] or undefined
};

// x [T, in] -> [T, out]. In float32 on OpenBLAS the same bits for any number of threads.
at::Tensor apply(const Linear& linear, const at::Tensor& x);

// op, as at::silu_out, of x [T, ...]. On a CPU the same bits for any number of threads: LibTorch
// itself cuts x for its threads, and rounds what is left of a vector at a cut in another way.
at::Tensor by_rows(const at::Tensor& x, at::Tensor& (*op)(at::Tensor&, const at::Tensor&));

// Sets the number of CPU threads for the whole process; 0 = all cores. LibTorch on OpenBLAS
// (Debian's) has a second pool of threads, which spins against the first: it is reduced to one
// thread, and apply() splits the work instead.
void set_threads(int threads);

// body(first, count) for every block of [0, total), on all threads, the last block first (in causal
// attention it is the longest). LibTorch's operations run single-threaded within. A single block
// runs on the calling thread, and then they may use all threads.
void for_blocks(int64_t total, int64_t block, const std::function<void(int64_t, int64_t)>& body);

}  // namespace sqz::training
