// One session: a selection plan, a thread pool and all the memory that serving needs. One call at a
// time; see sqz.h, which this implements.
//
// A call is cut into blocks (tokens that share a selection), blocks into chunks (as many as the
// selection buffers hold), a chunk's attention into items (a block, a KV head, up to kTileRows
// query rows, a range of the key list). Every cut depends on the call and the index alone, and
// partial states are merged in the order of their keys, so that results are the same bits for any
// number of threads.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "libruntime/attention/attend.h"
#include "libruntime/rope.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/selector.h"
#include "libruntime/session/serving_session.h"
#include "libruntime/session/thread_pool.h"

namespace sqz {

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
  const char* route() const override { return "cpu"; }
  Result<Counters> totals(int64_t layer) override;
  Status clear_totals() override {
    reset_counters();
    return {};
  }
  // Whether a layer selects; others are read whole.
  bool selects(int64_t layer) const { return selector_ != nullptr && plan_.selects(layer); }
  const Counters& counters(int64_t layer) const { return counters_[layer]; }
  void reset_counters();

 private:
  struct Block {
    int64_t first = 0, tokens = 0;
  };
  // Where the next block of a call begins.
  struct BlockCursor {
    int64_t request = 0, token = 0;
  };
  // Rows [row, row + rows) of a block in one KV head; row = token * group + head in group.
  struct Item {
    int64_t block = 0, head = 0, row = 0, rows = 0;
    int64_t splits = 1;
    int64_t slot = -1;  // of its first partial state; -1: one split, finished at once
  };
  struct Split {
    int64_t item = 0, begin = 0, end = 0, slot = -1;
  };
  struct Worker {
    SelectWorkspace select;
    std::unique_ptr<AttendWorkspace> attend;
  };

  // How a chunk of attention is cut into splits. Constants, because the cut must not depend on the
  // machine.
  static constexpr int64_t kTargetSplits = 256;  // enough for the cores of a large host
  static constexpr int64_t kLeastKeys = 1024;    // below, the merge costs more than it gains
  static constexpr int64_t kKeyStep = 512;       // splits end on whole softmax steps
  // Splits of an item of n keys: ceil(n / L), where L >= (sum of n) / kTargetSplits. An item with
  // more than one split has n > L, hence fewer than 2 n / L splits: at most this many in all.
  static constexpr int64_t kMostSlots = 2 * kTargetSplits;

  Session(std::shared_ptr<const ServedIndex> index, const SessionOptions& options);
  Status prepare(const SelectionRequest& request);
  void allocate(int threads);

  Status load_queries(const AttendCall& call, int64_t tokens);
  Status load_unroped(const AttendCall& call, int64_t tokens);
  Status check_window(const AttendCall& call) const;
  bool next_block(const AttendCall& call, BlockCursor& cursor, Block& block) const;
  int64_t count_blocks(const AttendCall& call) const;
  Status select_chunk(const AttendCall& call);
  Status attend_chunk(const AttendCall& call);
  void make_lists(const AttendCall& call);
  void make_items();
  void run_split(const AttendCall& call, const Split& split, int worker);
  void finish_item(const AttendCall& call, const Item& item, const PartialRows& state);
  void count_chunk(const AttendCall& call);
  PartialRows slot(int64_t index);
  PartialRows slot_of(int worker) { return slot(kMostSlots + worker); }
  const float* query(int64_t token, int64_t head) const;
  Status numeric_error(const AttendCall& call, const char* what);
  void note_bad(int64_t index);

  std::shared_ptr<const ServedIndex> index_;
  SelectionPlan plan_;
  const CpuKernels& kernels_;
  std::unique_ptr<Selector> selector_, dense_;
  int64_t block_, max_tokens_, max_request_tokens_;
  int64_t query_heads_, kv_heads_, group_, dim_;
  float scale_;
  std::vector<Counters> counters_;

  // Memory of the calls, all sized at creation.
  const float* queries_ = nullptr;      // [T, Hq, d]: the caller's, or converted_
  std::unique_ptr<float[]> converted_;  // [max_tokens, Hq, d]
  RopeUndo rope_;
  std::unique_ptr<float[]> unroped_;       // [max_tokens, Hq, d], for a selector that wants them
  int64_t chunk_blocks_ = 1;               // most blocks of a chunk
  std::vector<Block> blocks_;              // of the chunk
  std::vector<HeadSelection> selections_;  // [chunk_blocks, Hkv]
  std::unique_ptr<KeyRun[]> runs_;
  std::unique_ptr<ClusterRun[]> estimated_;
  std::unique_ptr<KeyRun[]> guessed_;
  std::unique_ptr<ClusterRest[]> rests_;
  std::vector<KeyList> lists_;  // [chunk_blocks, Hkv]
  std::vector<Item> items_;
  std::vector<Split> splits_;
  std::unique_ptr<float[]> partials_;  // [kMostSlots + workers, kTileRows, d + 2]
  std::vector<Worker> workers_;
  std::atomic<int64_t> first_bad_{0};  // lowest offending index of a parallel loop
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace sqz
