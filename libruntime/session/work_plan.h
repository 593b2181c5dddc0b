// How the attention of some blocks is cut into tasks for threads, and the memory that the tasks
// share: selections, the keys of the layer, and partial states. Every cut depends on the call and
// on one head alone, and partial states are added in the order of their keys, so that results are
// the same bits for any number of threads and any range of heads.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "libruntime/attention/attend.h"
#include "libruntime/select/selector.h"
#include "libruntime/session/query_blocks.h"
#include "libruntime/session/served_index.h"

namespace sqz {

// Some query rows of a block in one KV head, against a part of their keys.
struct AttendTask {
  int64_t block = 0, head = 0;
  int64_t row = 0, rows = 0;   // of the block; row = token * group + head in group
  int64_t begin = 0, end = 0;  // of the KeySequence
  int64_t parts = 1;           // tasks that these rows are split into: this one and those behind it
  int64_t state = -1;          // where its partial state is kept; -1: the task has all keys
};

class WorkPlan {
 public:
  // Memory for `blocks` blocks with at most `max_tokens` tokens in all, and for `threads` threads.
  WorkPlan(const ModelDescription& model, const SelectorLimits& limits, int64_t blocks,
           int64_t max_tokens, int threads);

  // Bytes of a block's selections.
  static int64_t block_bytes(const ModelDescription& model, const SelectorLimits& limits);

  // What follows is of this layer. all_heads: its KV heads in the whole index, of which the model
  // may be a range.
  void begin(const LayerGeometry& layer, int64_t all_heads) {
    kv_heads_ = layer.kv_heads;
    all_heads_ = all_heads;
    group_ = layer.group_size();
  }

  // The selection of each block and KV head, numbered block * Hkv + head.
  std::span<HeadSelection> selections(int64_t blocks) {
    return std::span(selections_).first(static_cast<size_t>(blocks * kv_heads_));
  }

  // Once these selections are made. The tasks of the same rows follow each other.
  std::span<const AttendTask> make(const LayerView& view, std::span<const QueryBlock> blocks);
  KeySequence keys_of(const AttendTask& task) const {
    return {&keys_[task.head], &selections_[task.block * kv_heads_ + task.head]};
  }
  // Where a task leaves its state: its own place, or that of the thread.
  PartialRows state_of(const AttendTask& task, int thread) const;

 private:
  PartialRows state(int64_t place) const;

  int64_t kv_heads_ = 0, all_heads_ = 0, group_ = 0;
  int64_t dim_ = 0;  // dv of the widest layer
  std::vector<HeadSelection> selections_;
  std::unique_ptr<KeyRun[]> read_;
  std::vector<HeadKeys> keys_;  // [Hkv] of the layer
  std::vector<AttendTask> tasks_;
  std::unique_ptr<float[]> states_;  // [kMostStates + threads, kTileRows, dv + 2]
};

}  // namespace sqz
