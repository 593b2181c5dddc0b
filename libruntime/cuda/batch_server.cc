#include "libruntime/cuda/batch_server.h"

#include <algorithm>

#include "libruntime/cuda/call_parts.h"
#include "libruntime/kernels/cuda/add_counters/kernel.h"
#include "libruntime/kernels/cuda/decode/contexts/kernel.h"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kMostRequests = kMostCut;         // of a launch
constexpr int64_t kMostBytes = int64_t{192} << 20;  // for all but the first of them,
constexpr int64_t kMostOwnBytes = 4 * kMostBytes;   // where each may have a list
// Query heads of a list of named contexts where layers have rows of 8 bits. The kernel for more
// takes 1.4 times as long where contexts have few requests.
constexpr int64_t kOwnCodedRows = 64;

// Requests of a part, where they are cut into as few as have at most `most`, of about one size.
int64_t part_of(int64_t requests, int64_t most) {
  const int64_t parts = (requests + most - 1) / most;
  return (requests + parts - 1) / parts;
}

}  // namespace

Result<std::unique_ptr<BatchServer>> BatchServer::create(const Room& room) {
  std::unique_ptr<BatchServer> server(new BatchServer(room));
  // Zeroed: tiles of masks end past those of the last key.
  SQZ_RETURN_IF_ERROR(take_chunk(server->memory_, room.own ? kMostOwnBytes : kMostBytes,
                                 std::min(room.requests, kMostRequests), server->room_.requests,
                                 [&](void* base) { return server->lay_out(base); }));
  return server;
}

// Lists of about the same size, unless the table tells.
QueryBlocks BatchServer::blocks_of(int64_t requests, bool selects) const {
  const int64_t most = batch_chunk(room_.shape.group);
  if (room_.own) {
    const int64_t rows = room_.coded ? kOwnCodedRows : kBatchRows;
    const int64_t each = std::min({most, requests, rows / room_.shape.group});
    return {static_cast<int32_t>(requests), static_cast<int32_t>(requests),
            static_cast<int32_t>(each), table_};
  }
  const int64_t each = part_of(requests, selects ? most : requests);
  return {static_cast<int32_t>(requests), static_cast<int32_t>((requests + each - 1) / each),
          static_cast<int32_t>(each), nullptr};
}

size_t BatchServer::lay_out(void* base) {
  Layout layout(base);
  workspace_bytes_ = 0;
  for (const bool selects : {false, room_.width > 0}) {
    workspace_bytes_ = std::max(
        workspace_bytes_, prefill_attend_workspace(room_.shape, blocks_of(room_.requests, selects),
                                                   room_.device.multiprocessors));
  }
  workspace_ = layout.take<std::byte>(workspace_bytes_);
  const int64_t heads = room_.shape.kv_heads, pairs = room_.requests * heads, width = room_.width;
  const int64_t lists = blocks_of(room_.requests, true).count * heads;
  if (room_.own) {
    table_ = layout.take<int2>(room_.requests);
    count_ = layout.take<int32_t>(1);
  }
  if (width == 0 && !room_.own) return layout.used();
  lookup_.runs.capacity = width == 0 ? 1 : run_capacity(width);
  lookup_.runs.lay_out(layout, lists);
  if (width == 0) return layout.used();
  lookup_.mask_stride = (room_.keys + kMaskSlack + 3) / 4 * 4;
  lookup_.masks = layout.take<uint32_t>(lists * lookup_.mask_stride);
  if (room_.coded) lookup_.rows = layout.take<uint32_t>(lists * lookup_.mask_stride);
  lookup_.words = layout.take<uint32_t>(4 * lists * width);
  lookup_.sums = layout.take<float2>(lists * kBatchParts * kBatchRows);
  lookup_.counts = layout.take<unsigned long long>(lists * (kBatchParts + 1));
  lookup_.faults = layout.take<uint32_t>(pairs);
  if (room_.budget) {
    lookup_.lookup.width = width;
    const int64_t stride = lookup_.score_stride();
    lookup_.scores = layout.take<float>(pairs * stride);
    lookup_.chosen = layout.take<uint32_t>(pairs * (stride / 32));
  }
  return layout.used();
}

Status BatchServer::attend(const AttendParams& params, const LookupParams& lookup, KeyMaps* maps,
                           cudaStream_t stream) const {
  const PrefillShape& shape = room_.shape;
  const int64_t query_heads = shape.kv_heads * shape.group;
  const int64_t each = part_of(params.requests, room_.requests);
  const bool coded = params.coded.present(), selects = lookup.levels > 0;
  PrefillAttend attend;
  attend.shape = shape;
  attend.keys = params;
  attend.maps = maps;
  for (int64_t first = 0; first < params.requests; first += each) {
    const int64_t requests = std::min(each, params.requests - first);
    const int64_t row = first * query_heads, bytes = row * shape.dim * dtype_size(shape.dtype);
    attend.queries = static_cast<const std::byte*>(params.q) + bytes;
    attend.out = static_cast<std::byte*>(params.out) + bytes;
    attend.lse = params.lse.from(row);
    attend.blocks = blocks_of(requests, selects);
    if (room_.own) {
      attend.own = params.own + first;
      SQZ_RETURN_IF_ERROR(cut_context_rows(attend.own, attend.blocks.count,
                                           attend.blocks.block_tokens, table_, count_, room_.device,
                                           stream));
    }
    if (!selects && !room_.own) {
      const int64_t means = 2 * requests * shape.kv_heads * (coded ? params.coded.count : 0);
      SQZ_RETURN_IF_ERROR(add_counters(params.counters, static_cast<unsigned long long>(requests),
                                       0, static_cast<unsigned long long>(means), stream));
    } else {
      BatchLookup batch = lookup_;
      batch.lookup = lookup;
      batch.lookup.q = attend.queries;
      batch.lookup.requests = static_cast<int32_t>(requests);
      batch.lookup.exact = static_cast<uint32_t>(params.exact - params.exact_skipped);
      batch.lookup.own = attend.own;
      batch.keys = params;
      batch.blocks = attend.blocks;
      batch.count = count_;
      if (!selects) batch.masks = nullptr;
      if (!selects || !coded) batch.rows = nullptr;
      SQZ_RETURN_IF_ERROR(batch_lookup(batch, stream));
      attend.selected = batch.runs;
      attend.masks = batch.masks;
      attend.mask_stride = batch.mask_stride;
      attend.rows = batch.rows;
    }
    SQZ_RETURN_IF_ERROR(
        prefill_attend(attend, workspace_, workspace_bytes_, room_.device.multiprocessors, stream));
  }
  return {};
}

}  // namespace sqz::cuda
