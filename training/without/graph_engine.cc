// In place of training/cuda/graph_engine.cc where sqz is built without CUDA or with a LibTorch
// without it.
#include "training/step_engine.h"

namespace sqz::training {

Result<std::unique_ptr<StepEngine>> make_graph_engine(const Transformer&, const FixedContext&,
                                                      int64_t) {
  return std::unique_ptr<StepEngine>();
}

}  // namespace sqz::training
