#include "libruntime/cuda/context_table.h"

#include <algorithm>
#include <numbers>

#include "libruntime/cuda/call_parts.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"
#include "libruntime/select/registry.h"

namespace sqz::cuda {
namespace {

Status refuse(const CudaSession& session, const std::string& found, const std::string& expected) {
  return {Code::kUnsupported, concat(session.index().file->path(), ": found ", found, ", expected ",
                                     expected, ": contexts in device memory are served together")};
}

// Fewer rows are served sooner when each reads its own.
constexpr int64_t least_batch(bool looks_up) {
  return looks_up ? 9 : 2;
}

// The most rows of a launch that looks up, and the most clusters of all of them, which take 12
// bytes of workspace each. In a call of up to so many rows such a launch serves contexts with few
// rows.
constexpr int64_t kMostApart = 32, kMostClusters = 4 << 20;

// Most clusters of a level.
int64_t width_of(const ServedIndex& index) {
  int64_t width = 0;
  for (const LayerView& view : index.layers) {
    for (int k = 0; k < view.levels; ++k) width = std::max(width, view.level[k].clusters);
  }
  return width;
}

// Whether all layers have full attention and the model's shape.
Status check_alike(const CudaSession& session) {
  const ModelDescription& model = session.index().metadata().model;
  for (int64_t l = 0; l < model.layers; ++l) {
    if (!model.may_select(l) || model.layer(l).value_dim != model.head_dim) {
      return refuse(session, concat("layer ", l, " of its own geometry"), "full layers, all alike");
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<ContextTable>> create_context_table(const ServingSession& first,
                                                           const ContextTableOptions& options) {
  SQZ_ASSIGN_OR_RETURN(std::unique_ptr<ContextTable> table,
                       DeviceContexts::create(static_cast<const CudaSession&>(first), options));
  return table;
}

Result<std::unique_ptr<DeviceContexts>> DeviceContexts::create(const CudaSession& first,
                                                               const ContextTableOptions& options) {
  if (first.selector() != SelectorKind::kSqueezed && first.selector() != SelectorKind::kDense) {
    return refuse(first, concat("the selector ", selector_name(first.selector())),
                  "squeezed or dense");
  }
  const CurrentDevice current(first.device());
  std::unique_ptr<DeviceContexts> table(new DeviceContexts(first, options));
  SQZ_ASSIGN_OR_RETURN(table->gpu_, read_device(first.device()));
  if (!table->gpu_.has_clusters()) {
    return refuse(first, "a GPU before compute capability 9.0", "one from 9.0 on");
  }
  SQZ_RETURN_IF_ERROR(table->allocate());
  SQZ_RETURN_IF_ERROR(table->put(0, &first));
  return table;
}

DeviceContexts::DeviceContexts(const CudaSession& first, const ContextTableOptions& options)
    : index_(first.shared_index()),
      options_(options),
      most_tokens_(std::max(options.tokens, index_->metadata().tokens)),
      gpu_id_(first.device()),
      looks_up_(first.selector() == SelectorKind::kSqueezed) {
  for (const LayerView& view : index_->layers) coded_.push_back(view.coded_keys.bits > 0);
}

size_t DeviceContexts::lay_out(void* base) {
  const int64_t heads = model().kv_heads, row = model().query_heads * model().head_dim;
  const int64_t rows = options_.requests * options_.each;
  const int64_t states = rows + std::min(rows, kMostApart);
  Layout layout(base);
  slots_ = layout.take<const ContextLayer*>(options_.slots);
  frequencies_ = layout.take<float>(std::max<int64_t>(rows_.half, 1));
  rows_.rows = layout.take<ContextLayer>(states);
  rows_.places = layout.take<int32_t>(rows);
  row_q_ = layout.take<std::byte>(4 * states * row);
  row_out_ = layout.take<std::byte>(4 * states * row);
  row_lse_ = layout.take<float>(states * model().query_heads);
  attend_.workspace = layout.take<std::byte>(static_cast<int64_t>(
      decode_attend_workspace(gpu_.multiprocessors, static_cast<int>(model().head_dim))));
  RunLists& lists = attend_.lists;
  const int64_t pairs = (looks_up_ ? rows_at_once_ : rows) * heads;
  lists.capacity = looks_up_ ? run_capacity(lookup_.width) : 1;
  lists.lay_out(layout, pairs);
  if (looks_up_) {
    lookup_.alive = layout.take<uint32_t>(pairs * 2 * lookup_.width);
    lookup_.lists = lists;
  } else {
    rows_.lists = lists;
  }
  return layout.used();
}

Status DeviceContexts::allocate() {
  const int64_t heads = model().kv_heads, most = kMostPairs / heads;
  attend_.dtype = lookup_.dtype = index_->metadata().dtype;
  attend_.dim = lookup_.dim = rows_.dim = static_cast<int32_t>(model().head_dim);
  attend_.kv_heads = lookup_.kv_heads = rows_.kv_heads = static_cast<int32_t>(heads);
  attend_.group = lookup_.group = static_cast<int32_t>(model().group_size());
  attend_.scale = lookup_.scale =
      static_cast<float>(model().attention_scale) * std::numbers::log2e_v<float>;
  attend_.device = lookup_.device = gpu_;
  lookup_.rule = options_.counts ? LookupRule::kBudget : LookupRule::kThreshold;
  rows_.query_heads = static_cast<int32_t>(model().query_heads);
  if (options_.shift != nullptr) {
    rows_.half = static_cast<int32_t>(options_.shift->frequencies().size());
  }
  rows_at_once_ = std::min(options_.requests * options_.each, most);
  lookup_.levels = 0;
  if (looks_up_) {
    for (const LayerView& view : index_->layers) {
      lookup_.levels = std::max(lookup_.levels, static_cast<int32_t>(view.levels));
    }
    const int64_t width = width_of(*index_);
    const double times =
        static_cast<double>(most_tokens_) / static_cast<double>(index_->metadata().tokens);
    // An index may have some more for as many tokens.
    const double more = times == 1 ? 1 : times * 1.0625;
    lookup_.width = std::max<int64_t>(static_cast<int64_t>(static_cast<double>(width) * more), 1);
    rows_at_once_ = std::min(
        {rows_at_once_, kMostApart, std::max<int64_t>(kMostClusters / (heads * lookup_.width), 1)});
    SQZ_ASSIGN_OR_RETURN(team_sizes_, team_sizes(lookup_));
    if (team_sizes_.least() == 1) {
      return {Code::kUnsupported,
              concat("options.device_tokens: found contexts of up to ", lookup_.width,
                     " clusters, expected at most what a GPU looks up for one token")};
    }
  }
  SQZ_RETURN_IF_ERROR(take_memory(memory_, [&](void* base) { return lay_out(base); }));
  if (rows_.half > 0) {
    SQZ_RETURN_IF_ERROR(write_device(frequencies_, options_.shift->frequencies()));
  }
  rows_.frequencies = options_.shift == nullptr ? nullptr : frequencies_;
  rows_.slots = slots_;
  rows_.most_slots = static_cast<int32_t>(options_.slots);
  rows_.row_q = row_q_;
  rows_.row_out = row_out_;
  rows_.row_lse = row_lse_;
  return create_batch();
}

Status DeviceContexts::create_batch() {
  const bool coded = std::find(coded_.begin(), coded_.end(), true) != coded_.end();
  const bool fits =
      is_kernel_dim(model().head_dim) && (!coded || model().head_dim <= kMostCodedDim);
  const int64_t rows = options_.requests * options_.each;
  if (rows < least_batch(looks_up_) || !gpu_.has_wgmma() || !fits) return {};
  BatchServer::Room room;
  room.shape = prefill_shape(index_->metadata());
  room.device = gpu_;
  room.requests = rows;
  room.width = looks_up_ ? lookup_.width : 0;
  room.keys = most_tokens_;
  room.budget = options_.counts;
  room.coded = coded;
  room.own = true;
  SQZ_ASSIGN_OR_RETURN(batch_, BatchServer::create(room));
  return {};
}

Status DeviceContexts::check(const CudaSession& session,
                             const std::vector<ContextLayer>& layers) const {
  const ServedIndex& index = session.index();
  if (index.metadata().dtype != index_->metadata().dtype) {
    return refuse(session, "another element type than the first index", "the same");
  }
  for (size_t l = 0; l < layers.size(); ++l) {
    const bool coded = layers[l].keys.coded.present();
    if (coded != coded_[l] && layers[l].keys.slots > 0) {
      return refuse(session, concat("layer ", l, coded ? " with" : " without", " rows of 8 bits"),
                    "them as in the first index");
    }
    if (batch_ != nullptr && !session.has_usual_keys(static_cast<int64_t>(l))) {
      return refuse(session, concat("layer ", l, " with huge keys"), "none beyond 2^60");
    }
  }
  if (batch_ != nullptr && looks_up_ && index.metadata().tokens > most_tokens_) {
    return refuse(session, concat(index.metadata().tokens, " tokens"),
                  concat("at most ", most_tokens_, ", as options.device_tokens says"));
  }
  if (session.plan().dense) return {};
  const int64_t found = width_of(index);
  if (!looks_up_ || session.selector() != SelectorKind::kSqueezed ||
      session.plan().head_keep.empty() == options_.counts) {
    return refuse(session, "another selector or rule than the session's", "the same");
  }
  if (found > lookup_.width) {
    return refuse(session, concat(found, " clusters"),
                  concat("at most ", lookup_.width, ", as options.device_tokens says"));
  }
  if (batch_ != nullptr && session.plan().levels > lookup_.levels) {
    return refuse(session, concat(session.plan().levels, " levels of clusters"),
                  concat("at most ", lookup_.levels, ", as in the first index"));
  }
  return {};
}

Status DeviceContexts::put(int64_t slot, const ServingSession* session) {
  const CurrentDevice current(gpu_id_);
  std::unique_ptr<DeviceMemory> memory;
  const ContextLayer* at = nullptr;
  if (session != nullptr) {
    const auto& cuda = static_cast<const CudaSession&>(*session);
    SQZ_RETURN_IF_ERROR(check_alike(cuda));
    SQZ_ASSIGN_OR_RETURN(std::vector<ContextLayer> layers, cuda.context_layers());
    SQZ_RETURN_IF_ERROR(check(cuda, layers));
    for (ContextLayer& layer : layers) layer.turns = options_.shift == nullptr ? 0 : 1;
    memory = std::make_unique<DeviceMemory>();
    SQZ_RETURN_IF_ERROR(
        memory->reserve(layers.size() * (sizeof(LayerMaps) + sizeof(ContextLayer))));
    auto* maps = static_cast<LayerMaps*>(memory->data());
    SQZ_RETURN_IF_ERROR(write_maps(layers, maps));
    auto* to = reinterpret_cast<ContextLayer*>(maps + layers.size());
    SQZ_RETURN_IF_ERROR(write_device(to, layers));
    at = to;
  }
  SQZ_RETURN_IF_ERROR(copy_memory(slots_ + slot, &at, sizeof(at)));
  layers_[slot].swap(memory);
  return {};  // the memory of the old one is freed when no kernel reads it any more
}

// The tensor maps of layers that batches read, to device memory.
Status DeviceContexts::write_maps(std::vector<ContextLayer>& layers, LayerMaps* to) const {
  if (batch_ == nullptr) return {};
  std::vector<LayerMaps> all(layers.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    if (coded_[l]) continue;
    KeyMaps maps;
    SQZ_RETURN_IF_ERROR(encode_key_maps(maps, prefill_shape(index_->metadata()), layers[l].keys));
    all[l] = maps;
    layers[l].maps = to + l;
  }
  return write_device(to, all);
}

Status DeviceContexts::attend(const AttendCall& call, const void* contexts, int64_t each) {
  if (call.tokens == 0) return {};
  const CurrentDevice current(gpu_id_);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  ContextRows rows = rows_;
  rows.dtype = call.dtype;
  rows.requests = static_cast<int32_t>(call.tokens);
  rows.each = static_cast<int32_t>(each);
  rows.contexts = static_cast<const RequestContext*>(contexts);
  rows.q = call.q;
  rows.out = call.out;
  rows.lse = call.lse;
  rows.layer = static_cast<int32_t>(call.layer);
  const int64_t heads = model().kv_heads, all = call.tokens * each;
  const bool batches =
      batch_ != nullptr && all >= least_batch(looks_up_) && call.dtype == index_->metadata().dtype;
  rows.in_order = batches;
  rows.alone = !batches || (looks_up_ && all <= kMostApart);
  if (batches) rows.lists = {};
  SQZ_RETURN_IF_ERROR(prepare_context_rows(rows, gpu_, stream));
  const int32_t bits = coded_[static_cast<size_t>(call.layer)] ? 8 : 0;
  const int64_t row_bytes = model().query_heads * model().head_dim * dtype_size(call.dtype);
  const auto params_from = [&](int64_t first, int64_t count) {
    AttendParams attend = attend_;
    attend.q = row_q_ + first * row_bytes;
    attend.q_dtype = call.dtype;
    attend.requests = static_cast<int32_t>(count);
    attend.own = rows.rows + first;
    attend.coded.keys.bits = bits;
    return attend;
  };
  for (int64_t first = 0; rows.alone && first < all; first += rows_at_once_) {
    AttendParams attend = params_from(first, std::min(rows_at_once_, all - first));
    attend.out = rows.merges() ? row_out_ : call.out;
    attend.lse = rows.merges() ? LseRows(row_lse_) : call.lse;
    if (looks_up_) {
      LookupParams lookup = lookup_;
      lookup.q = attend.q;
      lookup.q_dtype = call.dtype;
      lookup.requests = attend.requests;
      lookup.own = attend.own;
      lookup.named = rows;
      lookup.named.contexts += first;
      const int team =
          std::max(team_sizes_.of(static_cast<int>(lookup.requests * heads)), team_sizes_.least());
      SQZ_RETURN_IF_ERROR(decode_lookup(lookup, team, stream));
    } else {
      attend.lists.totals += first * heads;
      attend.lists.first += first * heads * (attend.lists.capacity + 1);
      attend.lists.before += first * heads * (attend.lists.capacity + 1);
    }
    SQZ_RETURN_IF_ERROR(decode_attend(attend, stream));
  }
  if (batches) {
    const int64_t first = rows.first_in_order();
    AttendParams attend = params_from(first, all);
    attend.out = row_out_ + first * row_bytes;
    attend.lse = LseRows(row_lse_ + first * model().query_heads);
    SQZ_RETURN_IF_ERROR(batch_->attend(attend, lookup_, nullptr, stream));
  }
  return rows.merges() ? merge_context_rows(rows, gpu_, stream) : Status();
}

}  // namespace sqz::cuda
