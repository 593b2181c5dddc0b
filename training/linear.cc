#include "training/linear.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <thread>

namespace sqz::training {
namespace {

using SetBlasThreads = void (*)(int);

// Null if LibTorch brings another BLAS. Looked up at run time: which BLAS a program gets is the
// system's choice (update-alternatives), not the build's.
SetBlasThreads openblas_set_threads() {
  return reinterpret_cast<SetBlasThreads>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
}

bool splits_rows(const at::Tensor& x) {
  static const bool openblas = openblas_set_threads() != nullptr;
  return openblas && x.device().is_cpu() && x.scalar_type() == at::kFloat;
}

}  // namespace

at::Tensor apply(const Linear& linear, const at::Tensor& x) {
  const int64_t rows = x.size(0), threads = at::get_num_threads();
  if (threads == 1 || rows < 2 * threads || !splits_rows(x)) {
    return at::linear(x, linear.weight, linear.bias);
  }
  at::Tensor out = at::empty({rows, linear.weight.size(0)}, x.options());
  const at::Tensor weight = linear.weight.t();
  const int64_t step = (rows + threads - 1) / threads;
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const c10::InferenceMode inference;  // thread-local
    for (; begin < end; ++begin) {
      const int64_t first = begin * step, count = std::min(step, rows - first);
      if (count <= 0) continue;
      at::Tensor part = out.narrow(0, first, count);
      if (linear.bias.defined()) {
        at::addmm_out(part, linear.bias, x.narrow(0, first, count), weight);
      } else {
        at::mm_out(part, x.narrow(0, first, count), weight);
      }
    }
  });
  return out;
}

void set_threads(int threads) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  at::set_num_threads(threads);
  if (const SetBlasThreads set = openblas_set_threads()) set(1);
}

}  // namespace sqz::training
