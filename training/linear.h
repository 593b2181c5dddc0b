// Matrix products of a transformer, and the threads that they may use.
#pragma once

#include <ATen/ATen.h>

namespace sqz::training {

struct Linear {
  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out] or undefined
};

// x [T, in] -> [T, out].
at::Tensor apply(const Linear& linear, const at::Tensor& x);

// Sets the number of CPU threads for the whole process; 0 = all cores. LibTorch on OpenBLAS
// (Debian's) has a second pool of threads, which spins against the first; it is reduced to one
// thread, and apply() splits the rows instead.
void set_threads(int threads);

}  // namespace sqz::training
