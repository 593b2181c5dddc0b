// How a session is made: plans, what layers look up, memory.
#include "libruntime/cuda/session.h"

#include <algorithm>
#include <cmath>

#include "libruntime/cuda/call_parts.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/static_selection.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kChunkBytes = int64_t{128} << 20;  // of the workspace of lookups
constexpr int64_t kMostTokens = int64_t{1} << 24;
static_assert(kMostLevels == kMaxLevels);

// Sets `to.levels` and the levels that a selector looks up in a layer.
using SetLevels = void (*)(const DeviceLayer& from, const SelectionPlan& plan, int64_t layer,
                           LookupParams& to);

void set_nothing(const DeviceLayer&, const SelectionPlan&, int64_t, LookupParams& to) {
  to.levels = 0;
}

void set_buckets(const DeviceLayer& from, const SelectionPlan&, int64_t, LookupParams& to) {
  to.levels = 1;
  to.level[0] = from.buckets;
}

void set_pages(const DeviceLayer& from, const SelectionPlan&, int64_t, LookupParams& to) {
  to.levels = 1;
  to.level[0] = from.pages;
}

void set_clusters(const DeviceLayer& from, const SelectionPlan& plan, int64_t, LookupParams& to) {
  to.levels = plan.levels;
  for (int k = 0; k < plan.levels; ++k) {
    to.level[k] = from.level[static_cast<size_t>(from.levels - plan.levels + k)];
    to.level[k].threshold = plan.log_thresholds[0][k] * kLog2E;
  }
}

SelectorInputs inputs_of(const ServedIndex& index, const IndexMetadata& metadata,
                         std::span<const LayerView> layers) {
  return {.metadata = metadata,
          .calibration = index.calibration,
          .index = {.layers = layers,
                    .tables = index.tables,
                    .group = metadata.model.group_size(),
                    .scale = static_cast<float>(metadata.model.attention_scale),
                    .kernels = nullptr},
          .path = index.file->path()};
}

// Finest clusters of which a key is in these runs, of one KV head. offsets: [n + 1].
int64_t clusters_of(std::span<const KeyRun> runs, std::span<const uint32_t> offsets) {
  const auto cluster_of = [&](uint32_t slot) {
    return std::upper_bound(offsets.begin(), offsets.end(), slot) - offsets.begin() - 1;
  };
  int64_t count = 0, before = -1;
  for (const KeyRun& run : runs) {
    const int64_t first = cluster_of(run.first), last = cluster_of(run.first + run.length - 1);
    count += last - std::max(first, before + 1) + 1;
    before = last;
  }
  return count;
}

// Rules that count want so much of every KV head: the rule `budget` round(share * M) keys, the
// selector quest pages.
void count_pages(const SelectionPlan& plan, const ServedIndex& index,
                 std::vector<uint32_t>& wanted) {
  const LayerView* sparse = first_sparse(index.layers);
  if (plan.dense || sparse == nullptr || sparse->pages == 0) return;
  const auto heads = static_cast<size_t>(sparse->kv_heads);
  const std::vector<int64_t> keys = layer_keys(plan, sparse->slots);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!plan.selects(static_cast<int64_t>(i / heads))) continue;
    wanted[i] = static_cast<uint32_t>(keys[i / heads] / index.layers[i / heads].page_size);
  }
}

// [layers, Hkv]
std::vector<uint32_t> wanted_keys(const SelectionPlan& plan, int scope, const ServedIndex& index) {
  const auto heads = static_cast<size_t>(index.metadata().model.kv_heads);
  std::vector<uint32_t> wanted(index.layers.size() * heads);
  if (plan.head_keep.empty()) {
    count_pages(plan, index, wanted);
    return wanted;
  }
  const std::vector<float>& shares = plan.head_keep[static_cast<size_t>(scope)];
  const auto of_layer = static_cast<size_t>(index.whole().metadata().model.kv_heads);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto slots = static_cast<double>(index.layers[i / heads].slots);
    const size_t head = static_cast<size_t>(index.first_head) + i % heads;
    wanted[i] = static_cast<uint32_t>(std::llround(shares[i / heads * of_layer + head] * slots));
  }
  return wanted;
}

// Null: there are no kernels for the selector. Without a default: the compiler asks for those that
// are added.
SetLevels set_levels_of(SelectorKind selector) {
  switch (selector) {
    case SelectorKind::kSqueezed:
      return set_clusters;
    case SelectorKind::kDense:
    case SelectorKind::kStream:
    case SelectorKind::kWindow:
    case SelectorKind::kH2o:
      return set_nothing;
    case SelectorKind::kQuest:
      return set_pages;
    case SelectorKind::kSaap:
      return set_buckets;
    case SelectorKind::kAuto:
      return nullptr;
  }
  return nullptr;
}

}  // namespace

Result<std::unique_ptr<ServingSession>> create_session(std::shared_ptr<const ServedIndex> index,
                                                       std::shared_ptr<DeviceIndex> uploaded,
                                                       const SessionOptions& options) {
  SQZ_ASSIGN_OR_RETURN(std::unique_ptr<ServingSession> session,
                       CudaSession::create(std::move(index), std::move(uploaded), options));
  return session;
}

Result<std::unique_ptr<CudaSession>> CudaSession::create(std::shared_ptr<const ServedIndex> index,
                                                         std::shared_ptr<DeviceIndex> uploaded,
                                                         const SessionOptions& options) {
  if (uploaded == nullptr) {
    return Status(Code::kUnsupported,
                  "options.device_id: found a device without the index, expected one that "
                  "sqz_index_upload() put it on");
  }
  if (options.max_tokens < 0 || options.max_tokens > kMostTokens) {
    return Status(Code::kInvalidArgument, concat("max_tokens: found ", options.max_tokens,
                                                 ", expected 0 to ", kMostTokens));
  }
  if (options.block < 0 || options.block > kMostTokens) {
    return Status(Code::kInvalidArgument,
                  concat("block: found ", options.block, ", expected 0 to ", kMostTokens));
  }
  if (set_levels_of(options.selection.selector) == nullptr) {
    return unsupported_on_gpu("found a selector that it has no kernels for", "another");
  }
  const CurrentDevice current(uploaded->device());
  std::unique_ptr<CudaSession> session(
      new CudaSession(std::move(index), std::move(uploaded), options));
  SQZ_RETURN_IF_ERROR(session->prepare(options.selection));
  SQZ_RETURN_IF_ERROR(session->allocate());
  return session;
}

CudaSession::CudaSession(std::shared_ptr<const ServedIndex> index,
                         std::shared_ptr<DeviceIndex> uploaded, const SessionOptions& options)
    : index_(std::move(index)),
      uploaded_(std::move(uploaded)),
      selector_(options.selection.selector),
      block_(options.block),
      max_tokens_(options.max_tokens != 0 ? options.max_tokens : 4096),
      max_request_tokens_(options.max_request_tokens != 0 ? options.max_request_tokens
                                                          : max_tokens_),
      sm80_only_(options.sm80_kernels) {}

bool CudaSession::selects(int64_t layer) const {
  return plan_.selects(layer);
}

Status CudaSession::prepare(const SelectionRequest& request) {
  const ModelDescription& model = index_->metadata().model;
  const ServedIndex& whole = index_->whole();
  SQZ_ASSIGN_OR_RETURN(PreparedSelector prepared,
                       prepare_selector(inputs_of(whole, whole.metadata(), whole.layers), request));
  plan_ = std::move(prepared.plan);
  if (!plan_.dense && is_static(selector_)) list_static_runs(*prepared.selector);
  SQZ_ASSIGN_OR_RETURN(gpu_, read_device(device()));
  if (sm80_only_) gpu_.capability = gpu_.compiled = 80;
  SQZ_RETURN_IF_ERROR(check_layers());
  LookupParams shape;
  shape.dtype = index_->metadata().dtype;
  shape.dim = static_cast<int32_t>(model.head_dim);
  shape.kv_heads = static_cast<int32_t>(model.kv_heads);
  shape.group = static_cast<int32_t>(model.group_size());
  shape.scale = static_cast<float>(model.attention_scale) * kLog2E;
  shape.device = gpu_;
  shape.rule = !plan_.head_keep.empty() || selector_ != SelectorKind::kSqueezed
                   ? LookupRule::kBudget
                   : LookupRule::kThreshold;
  lookups_ = lookups_of(shape);
  return {};
}

Status CudaSession::check_layers() {
  const ModelDescription& model = index_->metadata().model;
  for (int64_t l = 0; l < model.layers; ++l) {
    const LayerGeometry& own = geometry_.emplace_back(model.layer(l));
    const bool same = own.head_dim == own.value_dim;
    usual_.push_back(model.may_select(l) && same && is_kernel_dim(own.head_dim));
    if (!own.has_keys()) continue;
    if (own.kv_heads > kMostPairs || own.group_size() > kMostGroup) {
      return {Code::kUnsupported,
              concat("device_type 2 (CUDA): found ", own.kv_heads, " KV heads with ",
                     own.group_size(), " query heads each in layer ", l, "; expected at most ",
                     kMostPairs, ", and at most ", kMostGroup)};
    }
    if (!are_kernel_dims(own.head_dim, own.value_dim)) {
      return no_such_dims(own.head_dim, own.value_dim);
    }
  }
  if (selector_ == SelectorKind::kQuest && !plan_.dense && model.head_dim > kMostPageDim) {
    return unsupported_on_gpu(concat("found pages of head dimension ", model.head_dim).c_str(),
                              "at most 256");
  }
  return {};
}

std::vector<LookupParams> CudaSession::lookups_of(const LookupParams& shape) const {
  std::vector<LookupParams> out(index_->layers.size(), shape);
  for (int64_t l = 0; l < std::ssize(out); ++l) {
    if (!selects(l)) continue;
    LookupParams& lookup = out[static_cast<size_t>(l)];
    lookup.slots = static_cast<uint32_t>(uploaded_->layer(l).keys.slots);
    set_levels_of(selector_)(uploaded_->layer(l), plan_, l, lookup);
  }
  return out;
}

// Lists the runs of a selector that looks at no query.
void CudaSession::list_static_runs(const Selector& selector) {
  std::vector<KeyRun> runs(static_cast<size_t>(selector.limits().read));
  SelectWorkspace workspace;
  static_runs_.resize(index_->layers.size());
  static_means_.resize(index_->layers.size());
  for (size_t l = 0; l < static_runs_.size(); ++l) {
    const LayerView& view = index_->layers[l];
    for (int64_t h = 0; selects(static_cast<int64_t>(l)) && h < view.kv_heads; ++h) {
      SelectQuery query;
      query.layer = static_cast<int64_t>(l);
      query.kv_head = index_->first_head + h;
      HeadSelection found;
      found.read.room = runs;
      (void)selector.select(query, workspace, found);  // it has nothing that could fail
      static_runs_[l].emplace_back(runs.begin(), runs.begin() + found.read.count);
      exact_skipped_ = found.exact_skipped;
      if (view.coded_keys.bits == 0) continue;
      const LevelView& finest = view.level[view.levels - 1];
      const auto each = static_cast<size_t>(finest.clusters + 1);
      const std::span offsets(finest.offsets + h * (finest.clusters + 1), each);
      static_means_[l] += 2 * clusters_of(static_runs_[l].back(), offsets);  // keys and values
    }
  }
}

size_t CudaSession::lay_out(void* base) {
  const ModelDescription& model = index_->metadata().model;
  int64_t width = 0;
  for (const LookupParams& lookup : lookups_) {
    for (int k = 0; k < lookup.levels; ++k) {
      width = std::max<int64_t>(width, lookup.level[k].clusters);
    }
  }
  const int64_t pairs = width == 0 ? 0 : chunk_ * model.kv_heads;
  Layout layout(base);
  counters_ = layout.take<DeviceCounters>(std::ssize(lookups_));
  attend_workspace_ = layout.take<std::byte>(static_cast<int64_t>(
      decode_attend_workspace(gpu_.multiprocessors, static_cast<int>(model.head_dim))));
  wanted_ = layout.take<uint32_t>(kScopes * std::ssize(lookups_) * model.kv_heads);
  positions_ = layout.take<int64_t>(max_tokens_);
  LookupParams shared;
  shared.width = width;
  shared.alive = layout.take<uint32_t>(pairs * 2 * width);
  lists_.capacity = run_capacity(width);
  lists_.lay_out(layout, pairs);
  for (int64_t l = 0; l < std::ssize(lookups_); ++l) {
    LookupParams& lookup = lookups_[static_cast<size_t>(l)];
    lookup.width = shared.width;
    lookup.alive = shared.alive;
    lookup.lists = lists_;
    lookup.wanted = wanted_ + l * model.kv_heads;
    lookup.counters = &counters_[l].selections;
  }
  return layout.used();
}

Status CudaSession::allocate() {
  const int64_t most = kMostPairs / index_->metadata().model.kv_heads;
  SQZ_RETURN_IF_ERROR(take_chunk(memory_, kChunkBytes, std::min(max_tokens_, most), chunk_,
                                 [&](void* base) { return lay_out(base); }));
  for (int scope = 0; scope < kScopes; ++scope) {
    const std::vector<uint32_t> keys = wanted_keys(plan_, scope, *index_);
    SQZ_RETURN_IF_ERROR(write_device(wanted_ + static_cast<size_t>(scope) * keys.size(), keys));
  }
  if (!static_runs_.empty()) {
    SQZ_ASSIGN_OR_RETURN(static_, StaticLists::create(std::move(static_runs_)));
  }
  return create_servers();
}

Status CudaSession::create_servers() {
  const LookupParams* selecting = nullptr;  // layers that select have the same shape
  for (int64_t l = 0; selecting == nullptr && l < std::ssize(lookups_); ++l) {
    if (selects(l) && static_ == nullptr) selecting = &lookups_[static_cast<size_t>(l)];
  }
  const bool clusters = selecting != nullptr && selector_ == SelectorKind::kSqueezed;
  if (clusters && gpu_.has_clusters()) {
    SQZ_ASSIGN_OR_RETURN(team_sizes_, team_sizes(*selecting));
    const int heads = selecting->kv_heads;
    for (decoded_ = chunk_; decoded_ > 0; --decoded_) {
      if (team_sizes_.of(static_cast<int>(decoded_) * heads) > 1) break;
    }
  }
  key_maps_.resize(lookups_.size());
  ServerSetup setup;
  setup.index = index_.get();
  setup.uploaded = uploaded_.get();
  setup.plan = &plan_;
  setup.lookups = lookups_;
  setup.clusters = clusters;
  setup.key_maps = key_maps_.data();
  setup.blocks_look_up = selecting != nullptr;
  setup.block = block_;
  setup.max_tokens = max_tokens_;
  setup.max_request_tokens = max_request_tokens_;
  setup.device = gpu_;
  if (is_saap() && !plan_.dense) {
    SQZ_ASSIGN_OR_RETURN(buckets_, BucketLookup::create(setup));
    setup.buckets = buckets_.get();
  }
  const int64_t dim = index_->metadata().model.head_dim;
  if (std::min(max_tokens_, chunk_) > 1 && gpu_.has_wgmma() && is_kernel_dim(dim)) {
    BatchServer::Room room;
    room.shape = prefill_shape(index_->metadata());
    room.device = gpu_;
    room.requests = max_tokens_;
    for (size_t l = 0; clusters && l < lookups_.size(); ++l) {
      const LayerView& view = index_->layers[l];
      room.width = std::max(room.width, lookups_[l].width);
      room.keys = std::max(room.keys, view.slots + view.exact);
      room.coded = room.coded || view.coded_keys.bits > 0;
    }
    room.budget = clusters && selecting->rule == LookupRule::kBudget;
    SQZ_ASSIGN_OR_RETURN(batch_, BatchServer::create(room));
  }
  const bool all_usual = std::find(usual_.begin(), usual_.end(), false) == usual_.end();
  if (max_request_tokens_ > 1 || !all_usual || (selecting != nullptr && decoded_ == 0)) {
    SQZ_ASSIGN_OR_RETURN(blocks_, BlockServer::create(setup));
  }
  return {};
}

}  // namespace sqz::cuda
