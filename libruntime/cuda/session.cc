#include "libruntime/cuda/session.h"

#include <algorithm>
#include <cstring>

#include "libruntime/cuda/call_parts.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/add_counters/kernel.h"
#include "libruntime/kernels/cuda/prefill/common/block_table.h"

namespace sqz::cuda {
namespace {

// Fewer requests are served sooner when each reads its own.
int64_t least_requests(bool selects, bool coded) {
  if (selects) return coded ? 7 : 5;
  return coded ? 3 : 2;
}

// Whether a request has several tokens.
bool has_blocks(const AttendCall& call) {
  for (int64_t r = 0; r < call.request_count(); ++r) {
    if (call.request_tokens(r) > 1) return true;
  }
  return false;
}

}  // namespace

CudaSession::Route CudaSession::route_of(const AttendCall& call) const {
  const bool selecting = selects(call.layer), looks_up = selecting && static_ == nullptr;
  if (!usual_[at(call.layer)]) return Route::kPrefillSm80;
  if (blocks_ != nullptr && has_blocks(call)) {
    return blocks_->takes_sm90(call) ? Route::kPrefillSm90 : Route::kPrefillSm80;
  }
  if (batch_ != nullptr && selecting == looks_up && serves_batch(call, looks_up)) {
    return Route::kBatch;
  }
  if (looks_up && decoded_ == 0) return Route::kPrefillSm80;
  return Route::kDecode;
}

bool CudaSession::serves_batch(const AttendCall& call, bool selects) const {
  const IndexMetadata& metadata = index_->metadata();
  const bool coded = is_coded(call.layer);
  const bool fits = !coded || (metadata.model.head_dim <= kMostCodedDim &&
                               metadata.model.kv_heads * uploaded_->layer(call.layer).keys.slots <
                                   int64_t{kExactRow});
  return call.tokens >= least_requests(selects, coded) && fits && call.dtype == metadata.dtype &&
         uploaded_->has_usual_keys(call.layer) &&
         (!selects || selector_ == SelectorKind::kSqueezed);
}

Status CudaSession::check_call(const AttendCall& call) const {
  if (is_recent(call.layer) && call.device_positions == nullptr && call.positions == nullptr) {
    return {Code::kInvalidArgument,
            concat("positions: found null, expected the tokens' positions: layer ", call.layer,
                   " has a sliding window")};
  }
  if (selects(call.layer) && buckets_ != nullptr) {
    SQZ_RETURN_IF_ERROR(BucketLookup::check(call));
  }
  if (is_coded(call.layer) || !usual_[at(call.layer)]) return {};
  if (max_request_tokens_ > 1 || !has_blocks(call)) return {};
  // Without a lookup every token reads the same keys.
  if (!selects(call.layer) || static_ != nullptr) return {};
  return unsupported_on_gpu("found a request with several query tokens",
                            "one token a request, as options.max_request_tokens says");
}

Status CudaSession::look_up(const AttendCall& call, int64_t first, int64_t requests) {
  LookupParams params = lookups_[at(call.layer)];
  params.q = rows_from(call, first).q;
  params.q_dtype = call.dtype;
  params.requests = static_cast<int32_t>(requests);
  const int team = team_sizes_.of(static_cast<int>(requests * params.kv_heads));
  return decode_lookup(params, team, static_cast<cudaStream_t>(call.stream));
}

Result<std::vector<ContextLayer>> CudaSession::context_layers() const {
  const IndexMetadata& metadata = index_->metadata();
  std::vector<ContextLayer> out(lookups_.size());
  AttendCall call;
  for (int64_t l = 0; l < std::ssize(out); ++l) {
    SQZ_RETURN_IF_ERROR(uploaded_->wait(l));
    const auto number = static_cast<size_t>(l);
    ContextLayer& layer = out[number];
    call.layer = l;
    layer.keys = attend_params(call, 0, 0);
    layer.keys.counters = &counters_[l].selections;
    layer.lookup = lookups_[number];
    layer.lookup.exact = static_cast<uint32_t>(layer.keys.exact);
    if (!selects(l)) layer.lookup.levels = 0;
    layer.skippable = metadata.layers[number].dense ? metadata.tokens : metadata.sink;
  }
  return out;
}

AttendParams CudaSession::attend_params(const AttendCall& call, int64_t first,
                                        int64_t requests) const {
  const LayerGeometry& geometry = geometry_[at(call.layer)];
  const CallRows rows = rows_from(call, first);
  AttendParams params;
  static_cast<AttendLayer&>(params) = uploaded_->layer(call.layer).keys;
  params.q = rows.q;
  params.out = rows.out;
  params.lse = rows.lse;
  params.q_dtype = call.dtype;
  params.dtype = index_->metadata().dtype;
  params.dim = static_cast<int32_t>(geometry.head_dim);
  params.value_dim = static_cast<int32_t>(geometry.value_dim);
  params.requests = static_cast<int32_t>(requests);
  params.kv_heads = static_cast<int32_t>(geometry.kv_heads);
  params.group = static_cast<int32_t>(geometry.group_size());
  params.scale = static_cast<float>(geometry.attention_scale) * kLog2E;
  params.exact_skipped = call.skip;
  if (selects(call.layer)) {
    params.lists = static_ != nullptr ? static_->lists(call.layer) : lists_;
    params.exact_skipped = std::max(exact_skipped_, call.skip);
  }
  if (is_recent(call.layer)) {
    params.positions = call.device_positions != nullptr ? call.device_positions : positions_;
    params.offset = call.offset;
    params.exact_position = index_->metadata().tokens - params.exact;
    params.window = geometry.window;
    params.chunk = geometry.chunk;
  }
  // The keys of a static selector are counted before.
  if (!params.lists.of_heads) params.counters = &counters_[call.layer].selections;
  params.workspace = attend_workspace_;
  params.device = gpu_;
  return params;
}

// Selections that were known before, as many as another selector would make.
Status CudaSession::count_known(const AttendCall& call) {
  int64_t blocks = 0;
  for (int64_t r = 0; r < call.request_count(); ++r) {
    const int64_t tokens = call.request_tokens(r);
    blocks += block_ == 0 ? std::min<int64_t>(tokens, 1) : (tokens + block_ - 1) / block_;
  }
  return add_counters(
      &counters_[call.layer].selections, static_cast<unsigned long long>(blocks),
      static_cast<unsigned long long>(blocks * static_->keys(call.layer)),
      static_cast<unsigned long long>(blocks * static_means_[static_cast<size_t>(call.layer)]),
      static_cast<cudaStream_t>(call.stream));
}

// Positions that the host has to positions_, by value, so that a graph keeps them.
Status CudaSession::write_positions(const AttendCall& call) const {
  for (int64_t first = 0; first < call.tokens; first += kTablePart) {
    TablePart part;
    part.count = static_cast<int32_t>(std::min<int64_t>(call.tokens - first, kTablePart));
    static_assert(sizeof(part.blocks[0]) == sizeof(int64_t));
    std::memcpy(part.blocks, call.positions + first, at(part.count) * sizeof(int64_t));
    SQZ_RETURN_IF_ERROR(write_table(part, reinterpret_cast<int2*>(positions_ + first),
                                    static_cast<cudaStream_t>(call.stream)));
  }
  return {};
}

Status CudaSession::attend(const AttendCall& call) {
  SQZ_RETURN_IF_ERROR(check_call(call));
  SQZ_RETURN_IF_ERROR(uploaded_->wait(call.layer));
  if (call.tokens == 0) return {};
  const CurrentDevice current(device());
  if (is_recent(call.layer) && call.device_positions == nullptr) {
    SQZ_RETURN_IF_ERROR(write_positions(call));
  }
  if (selects(call.layer) && static_ != nullptr) SQZ_RETURN_IF_ERROR(count_known(call));
  const bool looks_up = selects(call.layer) && static_ == nullptr;
  const auto all = [&] { return attend_params(call, 0, call.tokens); };
  unsigned long long* counters = &counters_[call.layer].selections;
  switch (const Route route = route_of(call)) {
    case Route::kPrefillSm90:
    case Route::kPrefillSm80:
      route_ = route == Route::kPrefillSm90 ? "prefill-sm90" : "prefill-sm80";
      return blocks_->attend(call, all(), looks_up, route == Route::kPrefillSm90, counters);
    case Route::kBatch:
      route_ = "batch";
      return attend_batch(call, looks_up);
    case Route::kDecode:
      route_ = "decode";
  }
  const int64_t most = looks_up ? decoded_ : chunk_;
  for (int64_t first = 0; first < call.tokens; first += most) {
    const int64_t requests = std::min(most, call.tokens - first);
    if (looks_up) SQZ_RETURN_IF_ERROR(look_up(call, first, requests));
    SQZ_RETURN_IF_ERROR(decode_attend(attend_params(call, first, requests),
                                      static_cast<cudaStream_t>(call.stream)));
  }
  return {};
}

Status CudaSession::attend_batch(const AttendCall& call, bool looks_up) {
  LookupParams lookup = lookups_[at(call.layer)];
  if (!looks_up) lookup.levels = 0;
  return batch_->attend(attend_params(call, 0, call.tokens), lookup, &key_maps_[at(call.layer)],
                        static_cast<cudaStream_t>(call.stream));
}

// Fills found_ from the lists of the first pairs, once the stream is done.
Status CudaSession::read_runs(const AttendCall& call, const RunLists& lists) {
  SQZ_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(static_cast<cudaStream_t>(call.stream)));
  std::vector<RunTotals> all(found_.size());
  SQZ_RETURN_IF_ERROR(read_back(lists.totals, all));
  for (size_t h = 0; h < all.size(); ++h) {
    const RunTotals& totals = all[h];
    const auto at = static_cast<int64_t>(h) * (lists.capacity + 1);
    if (totals.fault != 0) {
      return {Code::kNumeric, concat("product of centroids and the queries of layer ", call.layer,
                                     ", KV head ", h, " is NaN or infinite")};
    }
    std::vector<uint32_t> first(totals.runs), before(totals.runs + 1);
    SQZ_RETURN_IF_ERROR(read_back(lists.first + at, first));
    SQZ_RETURN_IF_ERROR(read_back(lists.before + at, before));
    for (uint32_t r = 0; r < totals.runs; ++r) {
      extend(found_[h], {first[r], before[r + 1] - before[r]});
    }
  }
  return {};
}

Result<std::span<const HeadSelection>> CudaSession::select(const AttendCall& call) {
  if (call.tokens == 0) {
    return Status(Code::kInvalidArgument,
                  "q: found no tokens, expected at least one to select for");
  }
  SQZ_RETURN_IF_ERROR(check_call(call));
  SQZ_RETURN_IF_ERROR(uploaded_->wait(call.layer));
  const CurrentDevice current(device());
  const auto heads = static_cast<size_t>(geometry_[at(call.layer)].kv_heads);
  const int64_t slots = uploaded_->layer(call.layer).keys.slots;
  const Route route = route_of(call);
  found_.assign(heads, {});
  if (!selects(call.layer)) {
    if (slots > 0) found_.assign(heads, {KeyRun{0, static_cast<uint32_t>(slots)}});
  } else if (static_ != nullptr) {
    found_ = static_->runs(call.layer);
  } else if (route == Route::kPrefillSm90 || route == Route::kPrefillSm80) {
    SQZ_ASSIGN_OR_RETURN(const RunLists lists, blocks_->select(call, route == Route::kPrefillSm90));
    SQZ_RETURN_IF_ERROR(read_runs(call, lists));
  } else {
    SQZ_RETURN_IF_ERROR(look_up(call, 0, 1));
    SQZ_RETURN_IF_ERROR(read_runs(call, lists_));
  }
  selections_.assign(heads, {});
  for (size_t h = 0; h < heads; ++h) {
    HeadSelection& to = selections_[h];
    to.read.room = found_[h];
    to.read.count = std::ssize(found_[h]);
    for (const KeyRun& run : found_[h]) to.read.total += run.length;
    if (selects(call.layer)) to.exact_skipped = exact_skipped_;
  }
  return std::span<const HeadSelection>(selections_);
}

Result<Counters> CudaSession::totals(int64_t layer) {
  const CurrentDevice current(device());
  std::vector<DeviceCounters> found(lookups_.size());
  SQZ_RETURN_IF_ERROR(read_back(counters_, found));
  Counters sum;
  for (int64_t l = 0; l < std::ssize(found); ++l) {
    if (layer < 0 || l == layer) sum.add(counters_of(l, found[static_cast<size_t>(l)]));
  }
  return sum;
}

Counters CudaSession::counters_of(int64_t layer, const DeviceCounters& found) const {
  const LayerView& view = index_->layers[static_cast<size_t>(layer)];
  const auto row = static_cast<uint64_t>(view.head_dim * dtype_size(view.dtype));
  const auto both =
      static_cast<uint64_t>((view.head_dim + view.value_dim) * dtype_size(view.dtype));
  const uint64_t heads = found.selections * static_cast<uint64_t>(view.kv_heads);
  const auto exact = static_cast<uint64_t>(view.exact);
  const auto skipped = selects(layer) ? static_cast<uint64_t>(exact_skipped_) : 0;
  Counters out;
  out.selections = found.selections;
  out.keys_possible = heads * static_cast<uint64_t>(view.slots);
  out.keys_read = selects(layer) ? found.keys : out.keys_possible;
  if (index_->metadata().pruned && view.slots > 0) {
    // The keys that a pruned layer left out were possible, too.
    out.keys_possible = heads * static_cast<uint64_t>(index_->metadata().tokens - view.exact);
  }
  out.bytes_read = heads * (exact - skipped) * both + found.vectors * row +
                   out.keys_read * static_cast<uint64_t>(view.slot_bytes());
  out.bytes_dense = (out.keys_possible + heads * exact) * both;
  return out;
}

Status CudaSession::clear_totals() {
  const CurrentDevice current(device());
  return zero_memory(counters_, sizeof(DeviceCounters) * lookups_.size());
}

}  // namespace sqz::cuda
