#include "libruntime/cuda/union_server.h"

#include <algorithm>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/prefill_server.h"
#include "libruntime/kernels/cuda/add_counters/kernel.h"

namespace sqz::cuda {
namespace {

// Fewer requests that select are served sooner when each reads its own.
constexpr int64_t kLeastRequests = 8;
constexpr int64_t kLeastDense = 2;

}  // namespace

Result<std::unique_ptr<UnionServer>> UnionServer::create(const UnionSetup& setup) {
  std::unique_ptr<UnionServer> server(new UnionServer(setup));
  const size_t bytes = server->lay_out(nullptr);
  SQZ_RETURN_IF_ERROR(server->memory_.reserve(bytes));
  server->lay_out(server->memory_.data());
  // Tiles of masks end past those of the last key.
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemset(server->memory_.data(), 0, bytes));
  return server;
}

UnionServer::UnionServer(const UnionSetup& setup)
    : setup_(setup), shape_(prefill_shape(setup.index->metadata())) {}

// Everything; from null it only counts.
size_t UnionServer::lay_out(void* base) {
  Layout layout(base);
  const auto requests = static_cast<int32_t>(setup_.max_requests);
  workspace_bytes_ =
      prefill_attend_workspace(shape_, {requests, 1, requests, nullptr}, setup_.device.multiprocessors);
  if (setup_.together.requests > 0) {
    const int most = setup_.together.requests, teams = (requests + most - 1) / most;
    const int64_t lists = teams * setup_.index->metadata().model.kv_heads;
    workspace_bytes_ = std::max(
        workspace_bytes_,
        prefill_attend_workspace(shape_, {requests, teams, most, nullptr}, setup_.device.multiprocessors));
    for (const LayerView& view : setup_.index->layers) {
      lists_.exact = std::max(lists_.exact, view.exact);
      lists_.mask_stride =
          std::max(lists_.mask_stride, (view.slots + view.exact + kMaskSlack + 3) / 4 * 4);
    }
    lists_.capacity = setup_.run_capacity;
    lists_.runs = layout.take<uint2>(lists * lists_.capacity);
    lists_.prefix = layout.take<uint32_t>(lists * lists_.capacity);
    lists_.counts = layout.take<uint32_t>(lists);
    lists_.totals = layout.take<uint32_t>(lists);
    lists_.faults = layout.take<uint32_t>(lists);
    lists_.masks = layout.take<uint32_t>(lists * lists_.mask_stride);
  }
  workspace_ = layout.take<std::byte>(workspace_bytes_);
  return layout.used();
}

bool UnionServer::serves(const AttendCall& call, bool selects) const {
  if (call.tokens < (selects ? kLeastRequests : kLeastDense) || call.tokens > setup_.max_requests ||
      call.cache != nullptr || !setup_.uploaded->keys_values() ||
      call.dtype != setup_.index->metadata().dtype) {
    return false;
  }
  if (!selects) return true;
  if (setup_.together.requests == 0) return false;
  const auto requests = static_cast<int32_t>(call.tokens);
  const int32_t block = setup_.together.of(requests);
  return prefill_narrow(shape_, {requests, (requests + block - 1) / block, block, nullptr},
                        setup_.device.multiprocessors);
}

Status UnionServer::attend(const AttendCall& call, const LookupParams* lookup,
                           unsigned long long* counters) {
  const DeviceLayer& layer = setup_.uploaded->layer(call.layer);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const auto requests = static_cast<int32_t>(call.tokens);
  PrefillAttend attend;
  attend.shape = shape_;
  attend.keys = {layer.keys,       layer.values,       static_cast<int32_t>(layer.slots),
                 layer.exact_keys, layer.exact_values, static_cast<int32_t>(layer.exact)};
  attend.queries = call.q;
  attend.out = call.out;
  attend.lse = call.lse;
  attend.blocks = {requests, 1, requests, nullptr};
  if (lookup == nullptr) {
    SQZ_RETURN_IF_ERROR(
        add_counters(counters, static_cast<unsigned long long>(requests), 0, stream));
  } else {
    LookupParams params = *lookup;
    params.unions = lists_;
    params.unions.exact = layer.exact;
    SQZ_RETURN_IF_ERROR(decode_lookup_together(params, setup_.together, stream));
    const int32_t block = setup_.together.of(requests);
    attend.blocks = {requests, (requests + block - 1) / block, block, nullptr};
    attend.selected = {lists_.runs, lists_.prefix, lists_.counts, lists_.totals,
                       static_cast<int32_t>(lists_.capacity)};
    attend.faults = lists_.faults;
    attend.masks = lists_.masks;
    attend.mask_stride = lists_.mask_stride;
  }
  return prefill_attend(attend, workspace_, workspace_bytes_, setup_.device.multiprocessors, stream);
}

}  // namespace sqz::cuda
