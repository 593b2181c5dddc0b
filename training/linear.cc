#include "training/linear.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>

#include "formats/base/parallel.h"
#include "libruntime/kernels/cpu/kernels.h"

namespace sqz::training {
namespace {

using SetBlasThreads = void (*)(int);

// Null if LibTorch uses another BLAS. Looked up at run time, because the system chooses the BLAS
// (update-alternatives), not the build.
SetBlasThreads openblas_set_threads() {
  return reinterpret_cast<SetBlasThreads>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
}

// Whether at::linear() would run on one thread: set_threads().
bool must_split(const at::Tensor& x) {
  static const bool openblas = openblas_set_threads() != nullptr;
  return openblas && x.device().is_cpu() && x.scalar_type() == at::kFloat;
}

// Up to so many rows a BLAS spends its time on copying the weights into panels.
constexpr int64_t kMostRows = 64;

bool few_rows(const at::Tensor& x) {
  return x.device().is_cpu() && x.scalar_type() == at::kFloat && x.size(0) <= kMostRows;
}

DType stored_type(const at::Tensor& weight) {
  if (weight.scalar_type() == at::kBFloat16) return DType::kBF16;
  return weight.scalar_type() == at::kHalf ? DType::kF16 : DType::kF32;
}

// kFewRows rows at a time are multiplied with weights that stay in the cache. The products of a row
// depend neither on the other rows nor on the threads.
at::Tensor apply_to_few(const Linear& linear, const at::Tensor& x) {
  const CpuKernels& kernels = cpu_kernels();
  const DType dtype = stored_type(linear.weight);
  const at::Tensor rows = x.contiguous(), weight = linear.weight.contiguous();
  const int64_t count = x.size(0), dim = x.size(1), features = weight.size(0);
  const int64_t d32 = padded_dim(dim), row_bytes = dim * dtype_size(dtype);
  const at::Tensor packed = at::empty({count, d32}, x.options());
  at::Tensor out = at::empty({count, features}, x.options());
  auto *queries = packed.data_ptr<float>(), *products = out.data_ptr<float>();
  const auto* stored = static_cast<const std::byte*>(weight.data_ptr());
  kernels.pack(dtype, rows.data_ptr<float>(), dim, count, dim, queries);
  constexpr int64_t kColumns = 64;  // of a block of the product
  at::parallel_for(0, (features + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    const void* weights[kColumns];
    for (int64_t first = begin * kColumns; first < std::min(features, end * kColumns);
         first += kColumns) {
      const int64_t columns = std::min(kColumns, features - first);
      for (int64_t i = 0; i < columns; ++i) weights[i] = stored + (first + i) * row_bytes;
      for (int64_t r = 0; r < count; r += kFewRows) {
        kernels.dots(dtype, queries + r * d32, std::min(kFewRows, count - r), weights, columns, dim,
                     products + r * features + first, features, {});
      }
    }
  });
  if (linear.bias.defined()) out.add_(linear.bias);
  return out;
}

// The blocks are the same for any number of threads, because OpenBLAS adds up the last rows and
// columns of a product in another order than the others.
at::Tensor apply_by_blocks(const Linear& linear, const at::Tensor& x) {
  constexpr int64_t kProductBlock = 512;
  const int64_t rows = x.size(0), features = linear.weight.size(0);
  const int64_t down = (rows + kProductBlock - 1) / kProductBlock;
  const int64_t across = (features + kProductBlock - 1) / kProductBlock;
  const auto cut = [&](const at::Tensor& whole, int64_t dim, int64_t block) {
    const int64_t first = block * kProductBlock;
    return whole.narrow(dim, first, std::min(kProductBlock, whole.size(dim) - first));
  };
  at::Tensor out = at::empty({rows, features}, x.options());
  for_blocks(down * across, 1, [&](int64_t block, int64_t) {
    const int64_t i = block % down, j = block / down;
    at::Tensor part = cut(cut(out, 0, i), 1, j);
    const at::Tensor weight = cut(linear.weight, 0, j).to(at::kFloat).t();
    if (linear.bias.defined()) {
      at::addmm_out(part, cut(linear.bias, 0, j), cut(x, 0, i), weight);
    } else {
      at::mm_out(part, cut(x, 0, i), weight);
    }
  });
  return out;
}

}  // namespace

at::Tensor apply(const Linear& linear, const at::Tensor& x) {
  if (few_rows(x)) return apply_to_few(linear, x);
  if (must_split(x)) return apply_by_blocks(linear, x);
  return at::linear(x, linear.weight.to(x.scalar_type()), linear.bias);
}

at::Tensor by_rows(const at::Tensor& x, at::Tensor& (*op)(at::Tensor&, const at::Tensor&)) {
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (!x.device().is_cpu()) return op(out, x);
  for_blocks(x.size(0), 16, [&](int64_t first, int64_t count) {
    for (int64_t r = first; r < first + count; ++r) {
      at::Tensor row = out.select(0, r);
      op(row, x.select(0, r));
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
  threads = resolve_threads(threads);
  at::set_num_threads(threads);
  if (const SetBlasThreads set = openblas_set_threads()) set(1);
}

}  // namespace sqz::training
