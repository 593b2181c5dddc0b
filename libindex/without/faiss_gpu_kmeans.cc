// In place of libindex/faiss_gpu_kmeans.cc where FAISS has no GPU support.
#include "libindex/kmeans.h"

namespace sqz {

Result<std::unique_ptr<KmeansEngine>> make_faiss_gpu_kmeans(int) {
  return Status(Code::kUnsupported,
                "engine faiss-gpu: this sqz was built against a FAISS without GPU support; build "
                "it against one with it (docs/design.md), or choose --engine faiss");
}

}  // namespace sqz
