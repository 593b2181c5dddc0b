// The session of the CPU: a selection plan, threads and all the memory that serving needs. One call
// at a time; see sqz.h, which this implements.
//
// A call is served some blocks at a time (QueryBlocks), as many as WorkPlan has memory for: their
// selections, then their attention in tasks for the threads, then the Account of what was read.
// Requests with a query that is not finite are left out, and their rows become NaN.
#pragma once

#include <atomic>
#include <limits>
#include <memory>
#include <vector>

#include "libruntime/select/registry.h"
#include "libruntime/select/selector.h"
#include "libruntime/session/account.h"
#include "libruntime/session/query_blocks.h"
#include "libruntime/session/serving_session.h"
#include "libruntime/session/thread_pool.h"
#include "libruntime/session/work_plan.h"

namespace sqz {

// The first of the query rows in which the threads of a loop found a NaN or an infinity, whatever
// the order in which they found them.
class BadRow {
 public:
  void reset() { row_ = kNone; }
  // row: token * query heads + head.
  void note(int64_t row) {
    int64_t seen = row_;
    while (row < seen && !row_.compare_exchange_weak(seen, row)) {
    }
  }
  // kNumeric if there is one; `what` opens the sentence.
  Status status(const char* what, const AttendCall& call, int64_t query_heads) const {
    const int64_t row = row_;
    if (row == kNone) return {};
    return {Code::kNumeric,
            concat(what, " of layer ", call.layer, ", token ", call.first_token + row / query_heads,
                   ", query head ", row % query_heads, " is NaN or infinite")};
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> row_{kNone};
};

class Session final : public ServingSession {
 public:
  static Result<std::unique_ptr<Session>> create(std::shared_ptr<const ServedIndex> index,
                                                 const SessionOptions& options);

  Status attend(const AttendCall& call) override;
  Result<std::span<const HeadSelection>> select(const AttendCall& call) override;

  const ServedIndex& index() const override { return *index_; }
  const SelectionPlan& plan() const override { return plan_; }
  int64_t max_tokens() const override { return max_tokens_; }
  int64_t max_request_tokens() const override { return max_request_tokens_; }
  int device() const override { return -1; }
  // For other sessions that serve one call at a time with this one.
  const std::shared_ptr<ThreadPool>& pool() const { return pool_; }
  const char* route() const override { return "cpu"; }
  Result<Counters> totals(int64_t layer) override {
    return layer < 0 ? account_.total() : account_.of(layer);
  }
  Status clear_totals() override {
    account_.clear();
    return {};
  }
  // Whether a layer selects; others are read whole.
  bool selects(int64_t layer) const { return selector_ != nullptr && plan_.selects(layer); }
  const Counters& counters(int64_t layer) const { return account_.of(layer); }

 private:
  struct Worker {
    SelectWorkspace select;
    AttendWorkspace attend;
  };

  Session(std::shared_ptr<const ServedIndex> index, const SessionOptions& options,
          PreparedSelector prepared);

  Status check_positions(const AttendCall& call) const;
  // Of the call's layer.
  Status load(const AttendCall& call);
  // A HeadSelection of each block and KV head.
  Status select_blocks(const AttendCall& call, std::span<const QueryBlock> blocks);
  Status attend_blocks(const AttendCall& call, std::span<const QueryBlock> blocks);
  void run(const AttendCall& call, const AttendTask& task, const QueryBlock& block, int thread);
  // Writes out and lse of a task's rows.
  void finish(const AttendCall& call, const AttendTask& task, const QueryBlock& block,
              const PartialRows& state);

  std::shared_ptr<const ServedIndex> index_;
  const CpuKernels& kernels_;
  SelectionPlan plan_;
  std::unique_ptr<Selector> selector_;  // null: every layer is read whole
  std::unique_ptr<Selector> dense_;     // of layers that are read whole
  int64_t max_tokens_, max_request_tokens_;
  size_t at_once_ = 1;   // blocks
  LayerGeometry layer_;  // of the call

  std::shared_ptr<ThreadPool> pool_;
  std::vector<Worker> workers_;  // of the pool's threads
  std::unique_ptr<QueryBlocks> queries_;
  std::unique_ptr<WorkPlan> work_;
  Account account_;
  BadRow bad_;
};

}  // namespace sqz
