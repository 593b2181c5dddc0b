#include "libruntime/session/work_plan.h"

#include <algorithm>

namespace sqz {
namespace {

// How rows are split. Constants, because the cut must not depend on the machine.
constexpr int64_t kTargetTasks = 256;  // enough for the cores of a large host
constexpr int64_t kLeastKeys = 1024;   // below, adding states costs more than it gains
constexpr int64_t kKeyStep = 512;      // tasks end on whole softmax steps
// Rows of a head with n keys are split into ceil(n / L) tasks, where L >= (sum of n) * heads /
// kTargetTasks. Rows that are split have n > L, hence fewer than 2 n / L tasks: at most this many
// in all.
constexpr int64_t kMostStates = 2 * kTargetTasks;

int64_t most_kv_heads(const ModelDescription& model) {
  return model.most([](const LayerGeometry& layer) { return layer.kv_heads; });
}

}  // namespace

int64_t WorkPlan::block_bytes(const ModelDescription& model, const SelectorLimits& limits) {
  return most_kv_heads(model) * (limits.read * static_cast<int64_t>(sizeof(KeyRun)) +
                                 static_cast<int64_t>(sizeof(HeadSelection)));
}

WorkPlan::WorkPlan(const ModelDescription& model, const SelectorLimits& limits, int64_t blocks,
                   int64_t max_tokens, int threads)
    : selections_(static_cast<size_t>(blocks * most_kv_heads(model))),
      keys_(static_cast<size_t>(most_kv_heads(model))) {
  const auto room = static_cast<size_t>(limits.read);
  read_.reset(new KeyRun[selections_.size() * room]);
  for (size_t i = 0; i < selections_.size(); ++i) {
    selections_[i].read.room = {read_.get() + i * room, room};
  }
  // A block of t tokens has ceil(t * group / kTileRows) tiles of rows a head.
  const int64_t tiles = model.most([&](const LayerGeometry& layer) {
    return layer.kv_heads * (max_tokens * layer.group_size() / kTileRows + blocks + 1);
  });
  dim_ = model.most([](const LayerGeometry& layer) { return layer.value_dim; });
  tasks_.reserve(static_cast<size_t>(tiles + kTargetTasks));
  states_.reset(new float[static_cast<size_t>((kMostStates + threads) * kTileRows * (dim_ + 2))]);
}

std::span<const AttendTask> WorkPlan::make(const LayerView& view,
                                           std::span<const QueryBlock> blocks) {
  tasks_.clear();
  int64_t states = 0;
  for (int64_t head = 0; head < kv_heads_; ++head) {
    keys_[head] = head_keys(view, head);
    const auto for_each_tile = [&](const auto& f) {
      for (int64_t block = 0; block < std::ssize(blocks); ++block) {
        const int64_t rows = blocks[block].tokens * group_;
        AttendTask task = {.block = block, .head = head};
        const int64_t keys = keys_of(task).size();
        for (; task.row < rows; task.row += kTileRows) {
          task.rows = std::min(kTileRows, rows - task.row);
          f(task, keys);
        }
      }
    };
    int64_t total = 0;
    for_each_tile([&](const AttendTask&, int64_t keys) { total += keys; });
    const int64_t share = (total * all_heads_ + kTargetTasks - 1) / kTargetTasks;
    const int64_t step = round_up(std::max(share, kLeastKeys), kKeyStep);
    for_each_tile([&](AttendTask task, int64_t keys) {
      task.parts = std::max<int64_t>(1, (keys + step - 1) / step);
      const bool split = task.parts > 1;
      for (; task.parts > 0; --task.parts) {
        task.end = std::min(keys, task.begin + step);
        task.state = split ? states++ : -1;
        tasks_.push_back(task);
        task.begin = task.end;
      }
    });
  }
  return tasks_;
}

PartialRows WorkPlan::state(int64_t place) const {
  float* const at = states_.get() + place * kTileRows * (dim_ + 2);
  return {.maximum = at, .sum = at + kTileRows, .values = at + 2 * kTileRows};
}

PartialRows WorkPlan::state_of(const AttendTask& task, int thread) const {
  return state(task.state >= 0 ? task.state : kMostStates + thread);
}

}  // namespace sqz
