// Selectors: what decides, per block of query tokens and KV head, which keys are read. A selector
// is a scorer and a rule (select/rule.h). A new one is one class in one file and one line in
// select/registry.cc: see docs/runtime.md.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "formats/sqz_file.h"
#include "libruntime/attention/coded_products.h"
#include "libruntime/index_tables.h"
#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/select/score.h"

namespace sqz {

// Contiguous slots.
struct KeyRun {
  uint32_t first = 0;
  uint32_t length = 0;
};

// Contiguous clusters of one level that are not read but estimated.
struct ClusterRun {
  uint32_t level = 0;  // index into LayerView::level
  uint32_t first = 0;
  uint32_t length = 0;
};

// The keys of a finest cluster that are estimated by their codes, as one: for each query row the
// log of the sum of exp over their logits.
struct ClusterRest {
  uint32_t cluster = 0;
  std::array<float, kFewRows> logits = {};
};

// One block of query tokens against one KV head.
struct SelectQuery {
  int64_t layer = 0;
  int64_t kv_head = 0;
  const float* queries = nullptr;  // [tokens][group, d], token_stride floats apart
  int64_t tokens = 0;
  int64_t token_stride = 0;
};

// The answer, in buffers whose capacity the selector told (SelectorLimits).
struct HeadSelection {
  std::span<KeyRun> runs;           // capacity
  std::span<ClusterRun> estimated;  // capacity
  std::span<KeyRun> guessed;        // capacity
  std::span<ClusterRest> rests;     // capacity; may be empty
  int64_t run_count = 0;            // ascending, disjoint, neighbours merged
  int64_t estimated_count = 0;
  int64_t rest_count = 0;     // of `guessed`; 0 for many rows, whose logits are not kept
  int64_t guessed_count = 0;  // slots estimated by their key code: ascending, disjoint from runs
  int64_t keys = 0;           // in runs
  int64_t estimated_clusters = 0;  // in estimated
  int64_t guessed_keys = 0;        // in guessed
  int64_t codes = 0;               // key codes that were read to decide
  int64_t means = 0;               // finest clusters whose mean value the guessed keys stand on
  int64_t centroids = 0;           // vectors of d that were read to decide: centroids, page bounds
  int64_t exact_skipped = 0;       // first exact keys that are not read
};

// Workspace of one thread.
struct SelectWorkspace {
  std::vector<float> floats;
  std::vector<float> scores;
  std::vector<uint32_t> order;
  std::vector<uint32_t> sizes;
  std::vector<ClusterRange> ranges;
  std::vector<uint8_t> bytes;
  std::optional<CodedProducts> products;  // if rows of codes are scored
};

struct SelectorLimits {
  int64_t runs = 0;           // most runs of one HeadSelection
  int64_t estimated = 0;      // most ClusterRuns
  int64_t guessed = 0;        // most runs of guessed keys
  int64_t rests = 0;          // most ClusterRests
  SelectWorkspace workspace;  // sized; each thread copies it once

  // Room for a choice among n items of slots that follow each other.
  void choose_among(int64_t n) {
    runs = std::max(runs, (n + 1) / 2);
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
