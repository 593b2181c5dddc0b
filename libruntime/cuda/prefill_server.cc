#include "libruntime/cuda/prefill_server.h"

#include <algorithm>

#include "libruntime/cuda/cache_source.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/wanted_keys.h"
#include "libruntime/kernels/cuda/add_counters/kernel.h"
#include "libruntime/kernels/cuda/gather_cache/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kWaveBytes = int64_t{512} << 20;  // of what grows with the blocks of a wave

}  // namespace

Result<std::unique_ptr<PrefillServer>> PrefillServer::create(const PrefillSetup& setup) {
  std::unique_ptr<PrefillServer> server(new PrefillServer(setup));
  SQZ_RETURN_IF_ERROR(server->allocate());
  return server;
}

PrefillServer::PrefillServer(const PrefillSetup& setup)
    : setup_(setup),
      shape_(prefill_shape(setup.index->metadata())),
      waves_(setup.block, setup.max_tokens) {}

bool PrefillServer::serves(const AttendCall& call) const {
  const bool from_cache = call.cache != nullptr;
  return from_cache != setup_.uploaded->keys_values() &&
         call.dtype == setup_.index->metadata().dtype;
}

PrefillShape prefill_shape(const IndexMetadata& metadata) {
  return {metadata.dtype, static_cast<int32_t>(metadata.model.head_dim),
          static_cast<int32_t>(metadata.model.kv_heads),
          static_cast<int32_t>(metadata.model.group_size()),
          static_cast<float>(metadata.model.attention_scale)};
}

PrefillKeys prefill_keys(const DeviceLayer& layer) {
  return {layer.keys,       layer.values,       static_cast<int32_t>(layer.slots),
          layer.exact_keys, layer.exact_values, static_cast<int32_t>(layer.exact)};
}

// Everything; from null it only counts.
size_t PrefillServer::lay_out(void* base) {
  const int64_t layers = std::ssize(setup_.index->layers);
  const int64_t heads = setup_.index->metadata().model.kv_heads;
  const int64_t lists = wave_blocks_ * heads;
  const auto tokens = static_cast<int32_t>(setup_.max_tokens);
  const QueryBlocks all = {tokens, 1, tokens, nullptr};
  const QueryBlocks wave = {tokens, static_cast<int32_t>(wave_blocks_),
                            static_cast<int32_t>(waves_.block_tokens(tokens)), nullptr};
  int64_t most = 0;
  for (int64_t l = 0; l < layers; ++l) {
    const DeviceLayer& layer = setup_.uploaded->layer(l);
    for (int k = layer.levels - setup_.plan->levels; setup_.selects && k < layer.levels; ++k) {
      if (k >= 0) most = std::max(most, layer.level[static_cast<size_t>(k)].clusters);
    }
  }
  Layout layout(base);
  attend_bytes_ = std::max(prefill_attend_workspace(shape_, all, setup_.device.multiprocessors),
                           prefill_attend_workspace(shape_, wave, setup_.device.multiprocessors));
  attend_ = layout.take<std::byte>(attend_bytes_);
  if (!setup_.uploaded->keys_values()) {
    int64_t slots = 0, exact = 0;  // of the layer with most
    for (const LayerView& view : setup_.index->layers) {
      slots = std::max(slots, view.slots);
      exact = std::max(exact, view.exact);
    }
    const int64_t row = heads * setup_.index->metadata().model.head_dim * 2;
    keys_ = layout.take<std::byte>(slots * row);
    values_ = layout.take<std::byte>(slots * row);
    exact_keys_ = layout.take<std::byte>(exact * row);
    exact_values_ = layout.take<std::byte>(exact * row);
  }
  if (most == 0 && setup_.finder == nullptr) return layout.used();
  table_ = layout.take<int2>(wave_blocks_);
  if (setup_.finder != nullptr) return layout.used();
  lookup_bytes_ = prefill_lookup_workspace(shape_, wave, static_cast<int32_t>(most), setup_.group);
  lookup_ = layout.take<std::byte>(lookup_bytes_);
  wanted_ = layout.take<uint32_t>(kScopes * layers * heads);
  for (RunLists& to : lists_) {
    to.capacity = (most + 1) / 2;
    to.lay_out(layout, lists);
  }
  return layout.used();
}

Status PrefillServer::allocate() {
  int64_t most = waves_.usual(setup_.max_tokens);
  if (setup_.finder != nullptr) most = std::min(most, setup_.finder->wave_blocks());
  wave_blocks_ = wave_size(kWaveBytes, most, [&](int64_t blocks) {
    wave_blocks_ = blocks;
    return lay_out(nullptr);
  });
  SQZ_RETURN_IF_ERROR(memory_.reserve(lay_out(nullptr)));
  lay_out(memory_.data());
  if (wanted_ == nullptr) return {};
  return upload_wanted_keys(*setup_.plan, *setup_.index, wanted_);
}

PrefillLevel PrefillServer::level_of(int64_t layer, int level) const {
  const SelectionPlan& plan = *setup_.plan;
  const DeviceLayer& from = setup_.uploaded->layer(layer);
  const DeviceLevel& device = from.level[static_cast<size_t>(from.levels - plan.levels + level)];
  PrefillLevel to;
  to.centroids = device.centroids;
  to.offsets = device.offsets;
  to.sizes = device.sizes;
  to.clusters = static_cast<int32_t>(device.clusters);
  to.finest = level + 1 == plan.levels;
  const int64_t heads = setup_.index->metadata().model.kv_heads;
  for (int scope = 0; scope < kScopes; ++scope) {
    to.log_threshold[scope] = plan.log_threshold(scope, layer, level);
    if (plan.head_keep.empty()) continue;
    to.wanted[scope] = wanted_ + (scope * std::ssize(setup_.index->layers) + layer) * heads;
  }
  return to;
}

const std::byte* PrefillServer::queries_of(const AttendCall& call, int64_t token) const {
  const ModelDescription& model = setup_.index->metadata().model;
  return static_cast<const std::byte*>(call.q) +
         token * model.query_heads * model.head_dim * dtype_size(call.dtype);
}

Result<RunLists> PrefillServer::look_up(const AttendCall& call, const BlockWave& wave,
                                        unsigned long long* counters) {
  if (setup_.finder != nullptr) return setup_.finder->look_up(call, wave, counters);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  PrefillLookup lookup;
  lookup.shape = shape_;
  lookup.blocks = wave.blocks;
  lookup.policy = setup_.group;
  lookup.queries = queries_of(call, wave.first);
  lookup.counters = counters;
  for (int level = 0; level < setup_.plan->levels; ++level) {
    lookup.level = level_of(call.layer, level);
    lookup.alive = lookup.chosen;  // of the level before; at the first one all
    lookup.chosen = lists_[level % 2];
    SQZ_RETURN_IF_ERROR(
        prefill_lookup(lookup, lookup_, lookup_bytes_, setup_.device.multiprocessors, stream));
  }
  return lookup.chosen;
}

// The cache's keys and values in the order of the index.
Status PrefillServer::gather(const AttendCall& call) {
  const DeviceLayer& layer = setup_.uploaded->layer(call.layer);
  const ModelDescription& model = setup_.index->metadata().model;
  return gather_cache({.cache = cache_source(*call.cache, *setup_.index, layer),
                       .kv_heads = static_cast<int32_t>(model.kv_heads),
                       .dim = static_cast<int32_t>(model.head_dim),
                       .slots = layer.slots,
                       .exact = layer.exact,
                       .keys = keys_,
                       .values = values_,
                       .exact_keys = exact_keys_,
                       .exact_values = exact_values_},
                      setup_.device.multiprocessors, static_cast<cudaStream_t>(call.stream));
}

Status PrefillServer::attend(const AttendCall& call, bool selects, unsigned long long* counters) {
  const DeviceLayer& layer = setup_.uploaded->layer(call.layer);
  const ModelDescription& model = setup_.index->metadata().model;
  const auto stream = static_cast<cudaStream_t>(call.stream);
  PrefillAttend attend;
  attend.shape = shape_;
  attend.keys = prefill_keys(layer);
  if (call.cache != nullptr) {
    SQZ_RETURN_IF_ERROR(gather(call));
    attend.keys.keys = keys_;
    attend.keys.values = values_;
    attend.keys.exact_keys = exact_keys_;
    attend.keys.exact_values = exact_values_;
  }
  const bool looks_up = selects && setup_.known == nullptr;
  waves_.list(call);
  if (!looks_up) {
    // Dense layers count like the others, one selection a block.
    if (!selects) {
      SQZ_RETURN_IF_ERROR(
          add_counters(counters, static_cast<unsigned long long>(waves_.size()), 0, stream));
    }
    // What is read is the same for all tokens: they share one reading of the keys.
    waves_.list_whole(call.tokens);
    if (selects) {
      attend.selected = setup_.known->lists(call.layer);
      attend.keys.exact_skipped = static_cast<int32_t>(setup_.exact_skipped);
    }
  }
  for (size_t begin = 0; begin < waves_.size();) {
    SQZ_ASSIGN_OR_RETURN(const BlockWave wave, waves_.next(begin, wave_blocks_, table_, stream));
    attend.blocks = wave.blocks;
    attend.queries = queries_of(call, wave.first);
    attend.out = static_cast<std::byte*>(call.out) +
                 (static_cast<const std::byte*>(attend.queries) - queries_of(call, 0));
    attend.lse = call.lse.from(wave.first * model.query_heads);
    if (looks_up) {
      SQZ_ASSIGN_OR_RETURN(attend.selected, look_up(call, wave, counters));
    }
    SQZ_RETURN_IF_ERROR(
        prefill_attend(attend, attend_, attend_bytes_, setup_.device.multiprocessors, stream));
  }
  return {};
}

Result<RunLists> PrefillServer::select(const AttendCall& call) {
  waves_.list(call);
  waves_.keep_first();
  size_t begin = 0;
  SQZ_ASSIGN_OR_RETURN(const BlockWave wave, waves_.next(begin, wave_blocks_, table_,
                                                         static_cast<cudaStream_t>(call.stream)));
  return look_up(call, wave, nullptr);
}

}  // namespace sqz::cuda
