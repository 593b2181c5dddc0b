// The selector `stream` on a GPU: what it reads is known when a session is created, the most recent
// of the clustered keys, the same for every query. Lists of them stay in device memory.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/common/run_lists.h"
#include "libruntime/kernels/cuda/prefill.h"
#include "libruntime/select/selector.h"
#include "libruntime/session/served_index.h"

namespace sqz::cuda {

class StreamLists {
 public:
  // recent[layer] keys a KV head; 0 where a layer is read whole. The device is current.
  static Result<std::unique_ptr<StreamLists>> create(const ServedIndex& index,
                                                     std::span<const int64_t> recent);

  // Of one layer, in device memory; those for prompts are of one block of tokens.
  const RunLists& decode_lists(int64_t layer) const { return layers_[at(layer)].decode; }
  const PrefillRuns& prefill_lists(int64_t layer) const { return layers_[at(layer)].prefill; }
  // That one selection reads of a layer, over its KV heads.
  int64_t keys(int64_t layer) const { return keys_[at(layer)]; }
  // Of a KV head, in the order of slots.
  static std::vector<KeyRun> runs_of(const ServedIndex& index, int64_t layer, int64_t head,
                                     int64_t recent);

 private:
  struct Layer {
    RunLists decode;
    PrefillRuns prefill;
  };
  static size_t at(int64_t layer) { return static_cast<size_t>(layer); }
  size_t lay_out(void* base, int64_t heads, std::span<const int64_t> recent,
                 const std::vector<int64_t>& most_runs);
  Status fill(const ServedIndex& index, int64_t layer, int64_t recent);

  std::vector<Layer> layers_;
  std::vector<int64_t> keys_;
  DeviceMemory memory_;
};

}  // namespace sqz::cuda
