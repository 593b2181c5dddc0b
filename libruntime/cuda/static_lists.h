// The keys of selectors that look at no query (stream, window, h2o) on a GPU: known when a session
// is created, the same for every query. Lists of it stay in device memory.
#pragma once

#include <memory>
#include <vector>

#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/common/run_lists.h"
#include "libruntime/select/selector.h"

namespace sqz::cuda {

class StaticLists {
 public:
  using HeadRuns = std::vector<std::vector<KeyRun>>;  // [Hkv] ascending and disjoint

  // runs[layer]: empty where a layer is read whole. The device is current.
  static Result<std::unique_ptr<StaticLists>> create(std::vector<HeadRuns> runs);

  // The lists of one layer, in device memory: a list a KV head.
  const RunLists& lists(int64_t layer) const { return layers_[at(layer)].lists; }
  // That one selection reads of a layer, over its KV heads.
  int64_t keys(int64_t layer) const { return layers_[at(layer)].keys; }
  const HeadRuns& runs(int64_t layer) const { return runs_[at(layer)]; }

 private:
  struct Layer {
    RunLists lists;
    int64_t keys = 0, most_runs = 0;  // of all heads; of the head with most
  };
  static size_t at(int64_t layer) { return static_cast<size_t>(layer); }
  size_t lay_out(void* base);
  void fill();

  std::vector<HeadRuns> runs_;
  std::vector<Layer> layers_;
  DeviceMemory memory_;
};

}  // namespace sqz::cuda
