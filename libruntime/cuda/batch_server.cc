#include "libruntime/cuda/batch_server.h"

#include <algorithm>

#include "libruntime/cuda/call_parts.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/add_counters/kernel.h"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"

namespace sqz::cuda {
namespace {

// Fewer requests are served sooner when each reads its own.
int64_t least_requests(bool selects, bool coded) {
  if (selects) return coded ? 7 : 5;
  return coded ? 3 : 2;
}
constexpr int64_t kMostRequests = 256;              // of a launch
constexpr int64_t kMostBytes = int64_t{192} << 20;  // for all but the first of them

// Requests of a part, where they are cut into as few as have at most `most`, of about one size.
int64_t part_of(int64_t requests, int64_t most) {
  const int64_t parts = (requests + most - 1) / most;
  return (requests + parts - 1) / parts;
}

}  // namespace

Result<std::unique_ptr<BatchServer>> BatchServer::create(const ServerSetup& setup,
                                                         int64_t lookup_requests) {
  std::unique_ptr<BatchServer> server(new BatchServer(setup));
  int64_t most = std::min(setup.max_tokens, kMostRequests);
  if (server->selects_ && setup.lookups[0].rule == LookupRule::kBudget) {
    most = std::min(most, lookup_requests);
  }
  // Zeroed: tiles of masks end past those of the last key.
  SQZ_RETURN_IF_ERROR(take_chunk(server->memory_, kMostBytes, most, server->most_,
                                 [&](void* base) { return server->lay_out(base); }));
  return server;
}

BatchServer::BatchServer(const ServerSetup& setup)
    : setup_(setup), shape_(prefill_shape(setup.index->metadata())), selects_(setup.clusters) {}

// Lists of about the same size.
QueryBlocks BatchServer::blocks_of(int64_t requests, bool selects) const {
  const int64_t most = selects ? batch_chunk(shape_.group) : requests;
  const int64_t each = part_of(requests, most);
  return {static_cast<int32_t>(requests), static_cast<int32_t>((requests + each - 1) / each),
          static_cast<int32_t>(each), nullptr};
}

size_t BatchServer::lay_out(void* base) {
  Layout layout(base);
  const int multiprocessors = setup_.device.multiprocessors;
  workspace_bytes_ = 0;
  for (const bool selects : {false, selects_}) {
    workspace_bytes_ =
        std::max(workspace_bytes_,
                 prefill_attend_workspace(shape_, blocks_of(most_, selects), multiprocessors));
  }
  workspace_ = layout.take<std::byte>(workspace_bytes_);
  if (!selects_) return layout.used();
  const int64_t heads = shape_.kv_heads, most = batch_chunk(shape_.group);
  const int64_t lists = (most_ + most - 1) / most * heads, pairs = most_ * heads;
  int64_t width = 0;
  for (size_t l = 0; l < setup_.lookups.size(); ++l) {
    const LayerView& view = setup_.index->layers[l];
    width = std::max(width, setup_.lookups[l].width);
    lookup_.exact = std::max(lookup_.exact, static_cast<int32_t>(view.exact));
    lookup_.mask_stride =
        std::max(lookup_.mask_stride, (view.slots + view.exact + kMaskSlack + 3) / 4 * 4);
  }
  lookup_.runs.capacity = run_capacity(width);
  lookup_.runs.lay_out(layout, lists);
  lookup_.masks = layout.take<uint32_t>(lists * lookup_.mask_stride);
  lookup_.rows = layout.take<uint32_t>(lists * lookup_.mask_stride);
  lookup_.words = layout.take<uint32_t>(4 * lists * width);
  lookup_.sums = layout.take<float2>(lists * kBatchParts * kBatchRows);
  lookup_.counts = layout.take<unsigned long long>(lists * (kBatchParts + 1));
  lookup_.faults = layout.take<uint32_t>(pairs);
  if (setup_.lookups[0].rule == LookupRule::kBudget) {
    lookup_.scores = layout.take<float>(pairs * width);
    lookup_.chosen = layout.take<uint32_t>(pairs * ((width + 31) / 32));
  }
  return layout.used();
}

bool BatchServer::serves(const AttendCall& call, bool selects) const {
  const IndexMetadata& metadata = setup_.index->metadata();
  const AttendLayer& layer = setup_.uploaded->layer(call.layer).keys;
  const bool coded = layer.coded.present();
  const bool fits = !coded || (metadata.model.head_dim <= kMostCodedDim &&
                               metadata.model.kv_heads * layer.slots < int64_t{kExactRow});
  return call.tokens >= least_requests(selects, coded) && fits && call.dtype == metadata.dtype &&
         setup_.uploaded->has_usual_keys(call.layer) && (!selects || selects_);
}

Status BatchServer::attend(const AttendCall& call, const AttendParams& params, bool selects) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  PrefillAttend attend;
  attend.shape = shape_;
  attend.keys = params;
  attend.maps = &setup_.key_maps[call.layer];
  const bool coded = params.coded.present();
  const int64_t each = part_of(call.tokens, most_);
  for (int64_t first = 0; first < call.tokens; first += each) {
    const int64_t requests = std::min(each, call.tokens - first);
    const CallRows rows = rows_from(call, first);
    attend.queries = rows.q;
    attend.out = rows.out;
    attend.lse = rows.lse;
    attend.blocks = blocks_of(requests, selects);
    if (!selects) {
      const int64_t means = 2 * requests * shape_.kv_heads * (coded ? params.coded.count : 0);
      SQZ_RETURN_IF_ERROR(add_counters(params.counters, static_cast<unsigned long long>(requests),
                                       0, static_cast<unsigned long long>(means), stream));
    } else {
      BatchLookup batch = lookup_;
      batch.lookup = setup_.lookups[static_cast<size_t>(call.layer)];
      batch.lookup.q = rows.q;
      batch.lookup.q_dtype = call.dtype;
      batch.lookup.requests = static_cast<int32_t>(requests);
      batch.chunk = attend.blocks.block_tokens;
      batch.exact_skipped = static_cast<int32_t>(params.exact_skipped);
      batch.exact = static_cast<int32_t>(params.exact) - batch.exact_skipped;
      batch.means = coded ? params.coded.count : 0;
      if (!coded) batch.rows = nullptr;
      SQZ_RETURN_IF_ERROR(batch_lookup(batch, stream));
      attend.selected = batch.runs;
      attend.masks = batch.masks;
      attend.mask_stride = batch.mask_stride;
      attend.rows = batch.rows;
    }
    SQZ_RETURN_IF_ERROR(prefill_attend(attend, workspace_, workspace_bytes_,
                                       setup_.device.multiprocessors, stream));
  }
  return {};
}

}  // namespace sqz::cuda
