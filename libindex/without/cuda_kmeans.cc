// In place of libindex/cuda/ where sqz is built without CUDA.
#include "libindex/kmeans.h"

namespace sqz {

Result<std::unique_ptr<KmeansEngine>> make_cuda_kmeans(int64_t, int) {
  return Status(Code::kUnsupported,
                "engine cuda: this sqz was built without CUDA; build it with -DSQZ_CUDA=ON, or "
                "choose --engine faiss");
}

}  // namespace sqz
