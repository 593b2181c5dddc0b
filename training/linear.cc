#include "training/linear.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace sqz::training {
namespace {

using SetBlasThreads = void (*)(int);

// Null if LibTorch brings another BLAS. Looked up at run time: which BLAS a program gets is the
// system's choice (update-alternatives), not the build's.
SetBlasThreads openblas_set_threads() {
  return reinterpret_cast<SetBlasThreads>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
}

// Whether at::linear() would leave the other threads idle.
bool must_split(const Linear& linear, const at::Tensor& x) {
  static const bool openblas = openblas_set_threads() != nullptr;
  constexpr int64_t kWorthIt = int64_t{1} << 20;  // multiplications
  return openblas && x.device().is_cpu() && x.scalar_type() == at::kFloat &&
         at::get_num_threads() > 1 && !at::in_parallel_region() &&
         x.size(0) * linear.weight.numel() >= kWorthIt;
}

}  // namespace

at::Tensor apply(const Linear& linear, const at::Tensor& x) {
  if (!must_split(linear, x)) return at::linear(x, linear.weight, linear.bias);
  const int64_t features = linear.weight.size(0), threads = at::get_num_threads();
  at::Tensor out = at::empty({x.size(0), features}, x.options());
  at::parallel_for(0, features, (features + threads - 1) / threads,
                   [&](int64_t begin, int64_t end) {
                     const c10::InferenceMode inference;  // thread-local
                     at::Tensor part = out.narrow(1, begin, end - begin);
                     const at::Tensor weight = linear.weight.narrow(0, begin, end - begin).t();
                     if (linear.bias.defined()) {
                       at::addmm_out(part, linear.bias.narrow(0, begin, end - begin), x, weight);
                     } else {
                       at::mm_out(part, x, weight);
                     }
                   });
  return out;
}

void for_blocks(int64_t total, int64_t block, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t blocks = (total + block - 1) / block;
  if (blocks <= 1) return body(0, total);
  std::atomic<int64_t> left{blocks};
  const int64_t workers = std::min<int64_t>(blocks, at::get_num_threads());
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    const c10::InferenceMode inference;  // thread-local
    for (; begin < end; ++begin) {
      for (int64_t b; (b = left.fetch_sub(1) - 1) >= 0;) {
        body(b * block, std::min(block, total - b * block));
      }
    }
  });
}

void set_threads(int threads) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  at::set_num_threads(threads);
  if (const SetBlasThreads set = openblas_set_threads()) set(1);
}

}  // namespace sqz::training
