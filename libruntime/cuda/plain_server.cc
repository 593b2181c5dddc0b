#include "libruntime/cuda/plain_server.h"

#include <algorithm>
#include <numbers>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/wanted_keys.h"
#include "libruntime/kernels/cuda/add_counters/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kWaveBytes = int64_t{64} << 20;  // of what grows with the blocks of a wave
constexpr int64_t kPieceQueries = 256;  // whose parts a block of threads adds up, or more

}  // namespace

Result<std::unique_ptr<PlainServer>> PlainServer::create(const PlainSetup& setup) {
  std::unique_ptr<PlainServer> server(new PlainServer(setup));
  SQZ_RETURN_IF_ERROR(server->allocate());
  return server;
}

PlainServer::PlainServer(const PlainSetup& setup)
    : setup_(setup), waves_(setup.block, setup.max_tokens) {}

// Everything; from null it only counts.
size_t PlainServer::lay_out(void* base) {
  const ModelDescription& model = setup_.index->metadata().model;
  const int64_t pairs = wave_blocks_ * model.kv_heads;
  int64_t width = 0, slots = 0, scored = 0;
  for (const LookupParams& lookup : setup_.lookups) {
    int64_t clusters = 0;
    for (int k = 0; setup_.selects && k < lookup.levels; ++k) {
      clusters += lookup.level[k].clusters;
      scored = std::max(scored, clusters);
      width = std::max<int64_t>(width, lookup.level[k].clusters);
      slots = std::max<int64_t>(slots, lookup.slots);
    }
  }
  Layout layout(base);
  partials_ = layout.take<float>(static_cast<int64_t>(
      plain_attend_workspace(setup_.device.multiprocessors, static_cast<int>(model.head_dim)) /
      sizeof(float)));
  if (width == 0) return layout.used();
  const int64_t tokens =
      std::min(setup_.max_tokens, wave_blocks_ * waves_.block_tokens(setup_.max_tokens));
  if (setup_.lookups[0].pages) {
    const int64_t rows = setup_.group == PrefillGroup::kMax ? model.group_size() : 1;
    const int64_t queries = waves_.block_tokens(setup_.max_tokens) * model.group_size() / rows;
    lookup_.pieces = static_cast<int32_t>(std::clamp<int64_t>(queries / kPieceQueries, 1, 16));
    lookup_.parts = layout.take<float>(pairs * rows * lookup_.pieces * 2 * model.head_dim);
  } else if (setup_.buckets == nullptr) {
    lookup_.sums = layout.take<float2>(tokens * model.query_heads * kPlainParts);
    lookup_.lse = layout.take<float>(tokens * model.query_heads);
  }
  lookup_.scores = layout.take<float>(pairs * width);
  lookup_.state = layout.take<uint2>(pairs);
  lookup_.faults = layout.take<uint32_t>(pairs);
  lookup_.token.width = width;
  alive_ = layout.take<uint32_t>(pairs * 2 * width);
  table_ = layout.take<int2>(wave_blocks_);
  wanted_ = layout.take<uint32_t>(kScopes * std::ssize(setup_.lookups) * model.kv_heads);
  if (setup_.estimate) {
    PlainEstimates& estimates = lookup_.estimates;
    estimates.capacity = scored;
    estimates.list = layout.take<uint32_t>(pairs * scored);
    estimates.counts = layout.take<uint32_t>(pairs);
  }
  uncounted_ = layout.take<unsigned long long>(3);
  lists_.capacity = run_capacity(width);
  lists_.mark_capacity = (slots + kMarkKeys - 1) / kMarkKeys;
  lists_.lay_out(layout, pairs);
  return layout.used();
}

Status PlainServer::allocate() {
  wave_blocks_ = wave_size(kWaveBytes, waves_.usual(setup_.max_tokens), [&](int64_t blocks) {
    wave_blocks_ = blocks;
    return lay_out(nullptr);
  });
  const size_t bytes = lay_out(nullptr);
  SQZ_RETURN_IF_ERROR(memory_.reserve(bytes));
  lay_out(memory_.data());
  // Lists have an entry beyond their last run, which is read with them.
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemset(memory_.data(), 0, bytes));
  if (wanted_ == nullptr) return {};
  return upload_wanted_keys(*setup_.plan, *setup_.index, wanted_);
}

PlainEstimates PlainServer::estimates_of(int64_t layer) const {
  PlainEstimates out = lookup_.estimates;
  const DeviceLayer& from = setup_.uploaded->layer(layer);
  const int levels = setup_.lookups[static_cast<size_t>(layer)].levels;
  for (int k = 0; out.list != nullptr && k < levels; ++k) {
    const DeviceLevel& level = from.level[static_cast<size_t>(from.levels - levels + k)];
    out.level[k] = {level.centroids, level.value_means, level.log_sizes, level.clusters};
  }
  return out;
}

Result<RunLists> PlainServer::look_up(const AttendCall& call, const BlockWave& wave,
                                      unsigned long long* counters) {
  const ModelDescription& model = setup_.index->metadata().model;
  PlainLookup lookup = lookup_;
  const int64_t width = lookup.token.width;
  lookup.token = setup_.lookups[static_cast<size_t>(call.layer)];
  LookupParams& params = lookup.token;
  params.q = static_cast<const std::byte*>(call.q) +
             wave.first * model.query_heads * model.head_dim * dtype_size(call.dtype);
  params.q_dtype = call.dtype;
  params.width = width;
  params.alive = alive_;
  params.lists = lists_;
  params.counters = counters;
  lookup.block = params;
  for (int scope = 0; scope < kScopes; ++scope) {
    LookupParams& to = scope == 0 ? lookup.token : lookup.block;
    // Selectors of pages and buckets count, and have none.
    for (int k = 0; k < setup_.plan->levels; ++k) {
      to.level[k].threshold = setup_.plan->log_threshold(scope, call.layer, k) *
                              static_cast<float>(std::numbers::log2e);
    }
    to.wanted = wanted_ + (scope * std::ssize(setup_.lookups) + call.layer) * model.kv_heads;
  }
  lookup.blocks = wave.blocks;
  lookup.policy = setup_.group;
  SQZ_RETURN_IF_ERROR(setup_.buckets != nullptr
                          ? setup_.buckets->look_up(call, wave, lookup)
                          : plain_lookup(lookup, static_cast<cudaStream_t>(call.stream)));
  return lists_;
}

Status PlainServer::attend(const AttendCall& call, const AttendParams& params, bool looks_up,
                           unsigned long long* counters) {
  const ModelDescription& model = setup_.index->metadata().model;
  const auto stream = static_cast<cudaStream_t>(call.stream);
  waves_.list(call);
  if (!looks_up) {
    // Dense layers count like the others, one selection a block.
    if (params.lists.totals == nullptr) {
      SQZ_RETURN_IF_ERROR(
          add_counters(counters, static_cast<unsigned long long>(waves_.size()), 0, stream));
    }
    waves_.list_whole(call.tokens);
  }
  for (size_t begin = 0; begin < waves_.size();) {
    SQZ_ASSIGN_OR_RETURN(const BlockWave wave, waves_.next(begin, wave_blocks_, table_, stream));
    PlainAttend attend = {params, wave.blocks, {}, partials_};
    const int64_t skip = wave.first * model.query_heads * model.head_dim * dtype_size(call.dtype);
    attend.params.q = static_cast<const std::byte*>(call.q) + skip;
    attend.params.out = static_cast<std::byte*>(call.out) + skip;
    attend.params.lse = call.lse.from(wave.first * model.query_heads);
    if (looks_up) {
      SQZ_ASSIGN_OR_RETURN(attend.params.lists, look_up(call, wave, counters));
      attend.estimates = estimates_of(call.layer);
    }
    const int64_t pairs = wave.blocks.count * model.kv_heads;
    if (wave.blocks.block_tokens == 1 && pairs <= kMostPairs && !setup_.estimate) {
      attend.params.requests = wave.blocks.count;
      attend.params.after_lookup = false;
      SQZ_RETURN_IF_ERROR(decode_attend(attend.params, stream));
    } else {
      SQZ_RETURN_IF_ERROR(plain_attend(attend, stream));
    }
  }
  return {};
}

Result<RunLists> PlainServer::select(const AttendCall& call) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  waves_.list(call);
  waves_.keep_first();
  size_t begin = 0;
  SQZ_ASSIGN_OR_RETURN(const BlockWave wave, waves_.next(begin, wave_blocks_, table_, stream));
  return look_up(call, wave, uncounted_);
}

Result<std::vector<std::vector<ClusterRun>>> PlainServer::estimated(int64_t layer) const {
  const PlainEstimates& from = lookup_.estimates;
  std::vector<std::vector<ClusterRun>> out(
      static_cast<size_t>(setup_.index->metadata().model.kv_heads));
  if (from.list == nullptr) return out;
  const int first_level =
      setup_.uploaded->layer(layer).levels - setup_.lookups[static_cast<size_t>(layer)].levels;
  std::vector<uint32_t> list(static_cast<size_t>(from.capacity));
  for (size_t h = 0; h < out.size(); ++h) {
    uint32_t count = 0;
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(&count, from.counts + h, sizeof(count), cudaMemcpyDeviceToHost));
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(list.data(),
                                        from.list + static_cast<int64_t>(h) * from.capacity,
                                        count * sizeof(uint32_t), cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t level = static_cast<uint32_t>(first_level) + (list[i] >> kLevelShift);
      const uint32_t cluster = list[i] & ((1u << kLevelShift) - 1);
      std::vector<ClusterRun>& runs = out[h];
      if (!runs.empty() && runs.back().level == level &&
          runs.back().first + runs.back().length == cluster) {
        ++runs.back().length;
      } else {
        runs.push_back({level, cluster, 1});
      }
    }
  }
  return out;
}

}  // namespace sqz::cuda
