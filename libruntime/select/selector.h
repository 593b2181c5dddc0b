// Selectors decide which keys are read, for each block of query tokens and KV head. There are two
// kinds: those that score groups of keys (group_selector.h) and those whose keys no query changes
// (static_selection.h). The table in registry.cc names them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "formats/sqz_file.h"
#include "libruntime/index_tables.h"
#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/select/score.h"
#include "libruntime/selection.h"

namespace sqz {

// One block of query tokens against one KV head.
struct SelectQuery {
  int64_t layer = 0;
  int64_t kv_head = 0;
  const float* queries = nullptr;  // [tokens][group, d], token_stride floats apart
  int64_t tokens = 0;
  int64_t token_stride = 0;
};

// Workspace of one thread.
struct SelectWorkspace {
  std::vector<float> floats;
  std::vector<float> scores;
  std::vector<uint32_t> order;
  std::vector<uint32_t> sizes;
  std::vector<ClusterRange> ranges;
  std::vector<uint8_t> bytes;
};

struct SelectorLimits {
  int64_t read = 0;           // most runs of a HeadSelection
  SelectWorkspace workspace;  // sized; each thread copies it once

  // Room for a choice among n items of slots that follow each other.
  void choose_among(int64_t n) {
    read = std::max(read, (n + 1) / 2);
    workspace.scores.resize(std::max(workspace.scores.size(), static_cast<size_t>(n)));
    workspace.order.resize(workspace.scores.size());
    workspace.bytes.resize(workspace.scores.size());
  }
  void use_floats(int64_t n) {
    workspace.floats.resize(std::max(workspace.floats.size(), static_cast<size_t>(n)));
  }
};

class Selector {
 public:
  virtual ~Selector() = default;
  virtual SelectorLimits limits() const = 0;
  // Whether the queries that select() gets are those before RoPE.
  virtual bool before_rope() const { return false; }
  // Allocation-free; kNumeric if a score is NaN or infinite.
  virtual Status select(const SelectQuery& query, SelectWorkspace& workspace,
                        HeadSelection& out) const = 0;
};

// The layers of an index as a selector sees them; owned by the session's index.
struct SelectableIndex {
  std::span<const LayerView> layers;
  std::span<const LayerTable> tables;
  int64_t group = 0;  // query heads per KV head
  float scale = 0;
  const CpuKernels* kernels = nullptr;
};

}  // namespace sqz
