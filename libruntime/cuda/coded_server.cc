#include "libruntime/cuda/coded_server.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "libruntime/cuda/call_parts.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/wanted_keys.h"
#include "libruntime/select/runs.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kCodedBytes = int64_t{128} << 20;  // of what grows with a launch's requests

}  // namespace

Result<std::unique_ptr<CodedServer>> CodedServer::create(const ServerSetup& setup) {
  std::unique_ptr<CodedServer> server(new CodedServer(setup));
  bool any = false;
  for (int64_t l = 0; l < std::ssize(setup.index->layers); ++l) any = any || server->serves(l);
  if (!any) return std::unique_ptr<CodedServer>();
  SQZ_RETURN_IF_ERROR(server->allocate());
  return server;
}

bool CodedServer::serves(int64_t layer) const {
  const DeviceLayer& from = setup_.uploaded->layer(layer);
  return from.coded_keys.bits > 0 || chooses_keys(layer);
}

bool CodedServer::unpacks(int64_t layer) const {
  return setup_.uploaded->layer(layer).coded_keys.bits > 0 &&
         serves_blocks(layer, setup_.blocks_choose_clusters);
}

FinestClusters CodedServer::finest_of(int64_t layer) const {
  const DeviceLayer& from = setup_.uploaded->layer(layer);
  const DeviceLevel& level = from.level[static_cast<size_t>(from.levels - 1)];
  return {level.offsets, static_cast<int32_t>(level.clusters),
          static_cast<int32_t>(setup_.model().kv_heads)};
}

CodedSource CodedServer::source_of(int64_t layer) const {
  const DeviceLayer& from = setup_.uploaded->layer(layer);
  const DeviceLevel& level = from.level[static_cast<size_t>(from.levels - 1)];
  return {.keys = from.coded_keys,
          .values = from.coded_values,
          .clusters = from.clusters_of_slots,
          .mean_keys = level.centroids,
          .mean_values = level.value_means,
          .count = static_cast<int32_t>(level.clusters)};
}

CodedParams CodedServer::params_of(int64_t layer) const {
  const bool selects = this->selects(layer);
  const DeviceLayer& from = setup_.uploaded->layer(layer);
  CodedParams out;
  out.lookup = setup_.lookups[static_cast<size_t>(layer)];
  LookupParams& lookup = out.lookup;
  lookup.slots = static_cast<uint32_t>(from.slots);
  lookup.exchange = exchange_;
  lookup.wanted = wanted_ == nullptr ? nullptr : wanted_ + layer * setup_.model().kv_heads;
  if (!selects) lookup.levels = 1;
  lookup.width = 0;
  for (int k = 0; k < lookup.levels; ++k) {
    const DeviceLevel& level = from.level[static_cast<size_t>(from.levels - lookup.levels + k)];
    if (!selects) {
      lookup.level[k] = {.centroids = level.centroids,
                         .offsets = level.offsets,
                         .sizes = level.sizes,
                         .log_sizes = level.log_sizes,
                         .clusters = static_cast<int32_t>(level.clusters)};
    }
    lookup.width = std::max<int64_t>(lookup.width, level.clusters);
    out.value_means[k] = level.value_means;
  }
  out.everything = !selects;
  out.estimate = selects && setup_.estimate;
  if (selects && from.key_codes.bits > 0) {
    out.alive =
        static_cast<uint32_t>(std::llround(setup_.plan->alive * static_cast<double>(from.slots)));
    out.key_codes = from.key_codes;
  }
  out.exact = static_cast<int32_t>(from.exact);
  out.exact_keys = from.exact_keys;
  out.exact_values = from.exact_values;
  out.keys = from.keys;
  out.values = from.values;
  out.coded_keys = from.coded_keys;
  out.coded_values = from.coded_values;
  out.rotation = from.rotation;
  out.workspace = workspace_;
  return out;
}

size_t CodedServer::lay_out(void* base) {
  const ModelDescription& model = setup_.model();
  const int64_t layers = std::ssize(setup_.index->layers), group = model.group_size();
  const int64_t pairs = chunk_ * model.kv_heads;
  const int64_t blocks = std::max<int64_t>(pairs, setup_.device.multiprocessors);
  int64_t key_words = 0, cluster_words = 0, unpacked_slots = 0;
  bool turns = false;  // rows that are unpacked
  for (int64_t l = 0; l < layers; ++l) {
    const DeviceLayer& layer = setup_.uploaded->layer(l);
    if (!serves(l)) continue;
    const CodedParams params = params_of(l);
    const int64_t total = params.total_clusters();
    most_slots_ = std::max(most_slots_, layer.slots);
    most_clusters_ = std::max(most_clusters_, total);
    key_words = std::max(key_words, coded_key_words(layer.slots, params.lookup.width, layer.exact,
                                                    static_cast<int>(group)));
    cluster_words = std::max(
        cluster_words, coded_cluster_words(total, params.lookup.levels, static_cast<int>(group)));
    if (!unpacks(l)) continue;
    unpacked_slots = std::max(unpacked_slots, layer.slots);
    turns = turns || layer.coded_values.rotated();
  }
  Layout layout(base);
  workspace_.turned = layout.take<float>(pairs * kMostGroup * model.head_dim);
  workspace_.born = layout.take<uint8_t>(pairs * most_clusters_);
  workspace_.search = layout.take<CodedSearchSpace>(pairs);
  workspace_.clusters = layout.take<uint32_t>(pairs * cluster_words);
  workspace_.keys = layout.take<uint32_t>(pairs * key_words);
  workspace_.partials = layout.take<float>(blocks * 2 * kMostGroup * (model.head_dim + 2));
  exchange_ = layout.take<TeamExchange>(setup_.device.multiprocessors);
  wanted_ = layout.take<uint32_t>(layers * model.kv_heads);
  uncounted_ = layout.take<unsigned long long>(5);
  totals_ = layout.take<RunTotals>(model.kv_heads);
  key_fates_ = layout.take<uint8_t>(model.kv_heads * most_slots_);
  cluster_fates_ = layout.take<uint8_t>(model.kv_heads * most_clusters_);
  if (unpacked_slots > 0) {
    unpacked_keys_ = layout.take<uint16_t>(model.kv_heads * unpacked_slots * model.head_dim);
    unpacked_values_ = layout.take<uint16_t>(model.kv_heads * unpacked_slots * model.head_dim);
  }
  if (turns) turned_back_ = layout.take<float>(model.head_dim * model.head_dim);
  return layout.used();
}

Status CodedServer::allocate() {
  const ModelDescription& model = setup_.model();
  SQZ_RETURN_IF_ERROR(take_chunk(memory_, kCodedBytes, setup_.max_tokens, chunk_,
                                 [&](void* base) { return lay_out(base); }));
  SQZ_RETURN_IF_ERROR(upload_wanted_keys(*setup_.plan, *setup_.index, 1, wanted_));
  if (turned_back_ != nullptr) SQZ_RETURN_IF_ERROR(upload_rotation());
  CodedParams shape;
  shape.lookup = setup_.lookups[0];
  shape.lookup.dim = static_cast<int32_t>(model.head_dim);
  SQZ_ASSIGN_OR_RETURN(team_sizes_, coded_team_sizes(shape));
  return {};
}

// Layers share one rotation.
Status CodedServer::upload_rotation() {
  const int64_t d = setup_.model().head_dim;
  std::vector<float> transposed(static_cast<size_t>(d * d));
  for (const LayerView& view : setup_.index->layers) {
    if (view.rotation == nullptr) continue;
    for (int64_t i = 0; i < d * d; ++i) {
      transposed[static_cast<size_t>(i)] = view.rotation[i % d * d + i / d];
    }
    return write_device(turned_back_, transposed);
  }
  return {};
}

Status CodedServer::unpack(int64_t layer, AttendParams& params, cudaStream_t stream) const {
  const DeviceLayer& from = setup_.uploaded->layer(layer);
  const DeviceLevel& level = from.level[static_cast<size_t>(from.levels - 1)];
  UnpackRows call;
  call.rows = from.coded_keys;
  call.finest = finest_of(layer);
  call.means = level.centroids;
  call.turned_back = turned_back_;
  call.slots = from.slots;
  call.dim = static_cast<int32_t>(setup_.model().head_dim);
  call.dtype = setup_.index->metadata().dtype;
  call.out = unpacked_keys_;
  SQZ_RETURN_IF_ERROR(unpack_rows(call, stream));
  call.rows = from.coded_values;
  call.means = level.value_means;
  call.out = unpacked_values_;
  SQZ_RETURN_IF_ERROR(unpack_rows(call, stream));
  params.keys = unpacked_keys_;
  params.values = unpacked_values_;
  params.coded = {};
  return {};
}

Status CodedServer::count_means(int64_t layer, const RunLists& lists, int64_t blocks,
                                unsigned long long* counters, cudaStream_t stream) const {
  return sqz::cuda::count_means(lists, finest_of(layer), blocks, counters + 2, stream);
}

Status CodedServer::attend(const AttendCall& call, unsigned long long* counters) {
  const ModelDescription& model = setup_.model();
  CodedParams params = params_of(call.layer);
  params.lookup.q_dtype = call.dtype;
  params.lookup.counters = counters;
  for (int64_t first = 0; first < call.tokens; first += chunk_) {
    const int64_t requests = std::min(chunk_, call.tokens - first);
    const CallRows rows = rows_from(call, model, first);
    params.lookup.q = rows.q;
    params.lookup.requests = static_cast<int32_t>(requests);
    params.out = rows.out;
    params.lse = rows.lse;
    SQZ_RETURN_IF_ERROR(decode_codes(params,
                                     team_sizes_.of(static_cast<int>(requests * model.kv_heads)),
                                     static_cast<cudaStream_t>(call.stream)));
  }
  return {};
}

Status CodedServer::select(const AttendCall& call, FoundRuns& out) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const auto heads = static_cast<size_t>(setup_.model().kv_heads);
  const DeviceLayer& layer = setup_.uploaded->layer(call.layer);
  CodedParams params = params_of(call.layer);
  params.lookup.q = call.q;
  params.lookup.q_dtype = call.dtype;
  params.lookup.requests = 1;
  params.lookup.counters = uncounted_;
  params.lookup.lists.totals = totals_;
  params.key_fates = key_fates_;
  params.cluster_fates = cluster_fates_;
  const auto slots = static_cast<size_t>(layer.slots);
  const auto clusters = static_cast<size_t>(params.total_clusters());
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(key_fates_, 0, heads * slots, stream));
  SQZ_RETURN_IF_ERROR(decode_codes(params, team_sizes_.of(static_cast<int>(heads)), stream));
  SQZ_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
  std::vector<RunTotals> totals(heads);
  std::vector<uint8_t> keys(heads * slots), fates(heads * clusters);
  SQZ_RETURN_IF_ERROR(read_back(totals_, totals));
  SQZ_RETURN_IF_ERROR(read_back(key_fates_, keys));
  SQZ_RETURN_IF_ERROR(read_back(cluster_fates_, fates));
  for (size_t h = 0; h < heads; ++h) {
    if (totals[h].fault != 0) {
      return {Code::kNumeric, concat("product of centroids or codes and the queries of layer ",
                                     call.layer, ", KV head ", h, " is NaN or infinite")};
    }
    for (size_t slot = 0; slot < slots; ++slot) {
      const uint8_t fate = keys[h * slots + slot];
      const KeyRun run = {static_cast<uint32_t>(slot), 1};
      if (fate == kFateChosen) extend(out.runs[h], run);
      if (fate == kFateEstimated && params.estimate) extend(out.guessed[h], run);
    }
    if (!params.estimate) continue;
    size_t at = h * clusters;
    for (int k = 0; k < params.lookup.levels; ++k) {
      const auto level = static_cast<uint32_t>(layer.levels - params.lookup.levels + k);
      for (int32_t c = 0; c < params.lookup.level[k].clusters; ++c, ++at) {
        if (fates[at] != kFateEstimated) continue;
        extend(out.estimated[h], {level, static_cast<uint32_t>(c), 1});
      }
    }
  }
  return {};
}

}  // namespace sqz::cuda
