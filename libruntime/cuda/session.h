// A session that serves from a GPU: plans on the host, everything else on the caller's stream. All
// memory is taken when it is created; a call puts its kernels on the stream and returns. There are
// one or two for a decoded token, and more for a prompt. Its memory may be freed while work that
// uses it is under way: that waits.
#pragma once

#include <memory>
#include <vector>

#include "libruntime/cuda/batch_server.h"
#include "libruntime/cuda/block_server.h"
#include "libruntime/cuda/bucket_lookup.h"
#include "libruntime/cuda/static_lists.h"
#include "libruntime/kernels/cuda/decode/context_layer.h"

namespace sqz::cuda {

class CudaSession final : public ServingSession {
 public:
  static Result<std::unique_ptr<CudaSession>> create(std::shared_ptr<const ServedIndex> index,
                                                     std::shared_ptr<DeviceIndex> uploaded,
                                                     const SessionOptions& options);

  Status attend(const AttendCall& call) override;
  // Waits for the GPU.
  Result<std::span<const HeadSelection>> select(const AttendCall& call) override;
  const ServedIndex& index() const override { return *index_; }
  const SelectionPlan& plan() const override { return plan_; }
  int64_t max_tokens() const override { return max_tokens_; }
  int64_t max_request_tokens() const override { return max_request_tokens_; }
  int device() const override { return uploaded_->device(); }
  const char* route() const override { return route_; }
  // Counts the calls whose work has ended.
  Result<Counters> totals(int64_t layer) override;
  Status clear_totals() override;
  SelectorKind selector() const { return selector_; }
  const std::shared_ptr<const ServedIndex>& shared_index() const { return index_; }
  // The layers as the rows of a ContextTable read them, once their upload has ended.
  Result<std::vector<ContextLayer>> context_layers() const;
  bool has_usual_keys(int64_t layer) const { return uploaded_->has_usual_keys(layer); }

 private:
  // The kernels add to these counters of a layer.
  struct DeviceCounters {
    unsigned long long selections, keys, vectors;
  };

  CudaSession(std::shared_ptr<const ServedIndex> index, std::shared_ptr<DeviceIndex> uploaded,
              const SessionOptions& options);
  Status prepare(const SelectionRequest& request);
  Status check_layers();
  std::vector<LookupParams> lookups_of(const LookupParams& shape) const;
  void list_static_runs(const Selector& selector);
  Status allocate();
  Status create_servers();
  size_t lay_out(void* base);

  Counters counters_of(int64_t layer, const DeviceCounters& found) const;
  bool selects(int64_t layer) const;
  static size_t at(int64_t layer) { return static_cast<size_t>(layer); }
  // The kernels that serve a call. This is the one place that decides.
  enum class Route {
    kDecode,       // a token a request; each reads its own selection
    kBatch,        // a token a request; what any of them selected is read once
    kPrefillSm90,  // requests of several tokens: sm90
    kPrefillSm80   // the same on any GPU, and what the others do not do
  };
  Route route_of(const AttendCall& call) const;
  bool serves_batch(const AttendCall& call, bool selects) const;
  Status check_call(const AttendCall& call) const;
  AttendParams attend_params(const AttendCall& call, int64_t first, int64_t requests) const;
  Status count_known(const AttendCall& call);
  Status write_positions(const AttendCall& call) const;
  Status attend_batch(const AttendCall& call, bool looks_up);
  Status look_up(const AttendCall& call, int64_t first, int64_t requests);
  Status read_runs(const AttendCall& call, const RunLists& lists);
  bool is_coded(int64_t layer) const { return uploaded_->layer(layer).keys.coded.present(); }
  bool is_recent(int64_t layer) const { return geometry_[at(layer)].kind == LayerKind::kRecent; }
  bool is_saap() const { return selector_ == SelectorKind::kSaap; }

  std::shared_ptr<const ServedIndex> index_;
  std::shared_ptr<DeviceIndex> uploaded_;
  SelectionPlan plan_;
  SelectorKind selector_;
  int64_t block_, max_tokens_, max_request_tokens_;
  int64_t chunk_ = 1;  // most requests of one launch
  const char* route_ = "";
  TeamSizes team_sizes_;
  int64_t decoded_ = 0;  // most requests whose selections decode_lookup() makes at once
  Device gpu_;
  std::vector<LayerGeometry> geometry_;  // [layers]
  // [layers] Whether all kernels serve it: it has the shape of the model's full layers, and keys
  // and values of a usual dimension. The sm80 ones serve the others.
  std::vector<bool> usual_;
  const bool sm80_only_;                            // the sm80 kernels serve everything, for tests
  std::unique_ptr<BlockServer> blocks_;             // null: one token a request only
  std::vector<StaticLists::HeadRuns> static_runs_;  // [layers] until they are on the GPU
  std::unique_ptr<StaticLists> static_;             // of selectors that look at no query; else null
  std::vector<int64_t> static_means_;               // [layers] means that a selection stands on
  int64_t exact_skipped_ = 0;          // first exact keys that a layer that selects does not read
  std::vector<LookupParams> lookups_;  // by layer, without what a call brings
  std::vector<KeyMaps> key_maps_;      // [layers]
  std::unique_ptr<BucketLookup> buckets_;  // of the selector saap; else null
  std::unique_ptr<BatchServer> batch_;     // null: every request reads its own
  DeviceMemory memory_;
  RunLists lists_;
  DeviceCounters* counters_ = nullptr;  // [layers], device
  void* attend_workspace_ = nullptr;
  uint32_t* wanted_ = nullptr;    // [scopes, layers, Hkv], device; zeros where nothing is counted
  int64_t* positions_ = nullptr;  // [max_tokens], device; of recent layers

  // The last select().
  std::vector<HeadSelection> selections_;
  std::vector<std::vector<KeyRun>> found_;  // of a KV head each
};

}  // namespace sqz::cuda
