#include "libruntime/cuda/block_server.h"

#include <algorithm>

#include "libruntime/cuda/bucket_lookup.h"
#include "libruntime/cuda/call_parts.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/add_counters/kernel.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {
namespace {

// Most memory for the blocks of a chunk.
constexpr int64_t kSm80Bytes = int64_t{64} << 20, kSm90Bytes = int64_t{512} << 20;

// Whether each request has one token.
bool is_single(const AttendCall& call) {
  for (int64_t r = 0; r < call.request_count(); ++r) {
    if (call.request_tokens(r) > 1) return false;
  }
  return true;
}

}  // namespace

Result<std::unique_ptr<BlockServer>> BlockServer::create(const ServerSetup& setup) {
  std::unique_ptr<BlockServer> server(new BlockServer(setup));
  SQZ_RETURN_IF_ERROR(server->allocate());
  return server;
}

BlockServer::BlockServer(const ServerSetup& setup)
    : setup_(setup),
      shape_(prefill_shape(setup.index->metadata())),
      chunks_(setup.block, setup.max_tokens) {
  for (const LookupParams& lookup : setup.lookups) {
    for (int k = 0; setup.blocks_look_up && k < lookup.levels; ++k) {
      width_ = std::max<int64_t>(width_, lookup.level[k].clusters);
    }
  }
}

// ---- Memory.

Status BlockServer::allocate() {
  const int64_t usual = chunks_.usual(setup_.max_tokens);
  SQZ_RETURN_IF_ERROR(take_chunk(sm80_.memory, kSm80Bytes, usual, sm80_.blocks,
                                 [&](void* base) { return lay_out(false, base); }));
  const bool single = setup_.max_request_tokens == 1, usual_dim = is_kernel_dim(shape_.dim);
  if (setup_.index->metadata().rows != RowKind::k16 && !(single && usual_dim)) {
    SQZ_RETURN_IF_ERROR(
        take_memory(unpacked_memory_, [&](void* base) { return lay_out_unpacked(base); }));
  }
  if (single || !usual_dim || !setup_.device.has_wgmma()) return {};
  level_maps_.resize(setup_.lookups.size() * kMostLevels);
  // The sm80 lookups serve the other selectors.
  const bool finds = setup_.clusters || !setup_.blocks_look_up;
  return take_chunk(sm90_.memory, kSm90Bytes, finds ? usual : std::min(usual, sm80_.blocks),
                    sm90_.blocks, [&](void* base) { return lay_out(true, base); });
}

size_t BlockServer::lay_out(bool sm90, void* base) {
  const int64_t heads = setup_.model().kv_heads;
  const int multiprocessors = setup_.device.multiprocessors;
  const auto tokens = static_cast<int32_t>(setup_.max_tokens);
  Chunk& to = sm90 ? sm90_ : sm80_;
  const auto block_tokens = static_cast<int32_t>(chunks_.block_tokens(tokens));
  QueryBlocks chunk = {tokens, static_cast<int32_t>(to.blocks), block_tokens, nullptr};
  Layout layout(base);
  if (sm90) {
    const QueryBlocks all = {tokens, 1, tokens, nullptr};
    attend_bytes_ = std::max(prefill_attend_workspace(shape_, all, multiprocessors),
                             prefill_attend_workspace(shape_, chunk, multiprocessors));
    attend_memory_ = layout.take<std::byte>(attend_bytes_);
  } else {
    int64_t values = 0;
    for (const LayerView& view : setup_.index->layers) values = std::max(values, view.value_dim);
    const size_t bytes = sm80_attend_workspace(multiprocessors, static_cast<int>(values));
    partials_ = layout.take<float>(static_cast<int64_t>(bytes / sizeof(float)));
    chunk.tokens = static_cast<int32_t>(std::min<int64_t>(tokens, to.blocks * block_tokens));
  }
  if (width_ == 0) return layout.used();
  to.table = layout.take<int2>(to.blocks);
  if (sm90 && !setup_.clusters) return layout.used();
  const int64_t pairs = to.blocks * heads;
  // Single tokens have their clusters in more parts.
  const auto blocks = static_cast<int32_t>(to.blocks);
  const QueryBlocks singles = {std::min(tokens, blocks), blocks, 1, nullptr};
  const auto workspace = [&](const QueryBlocks& of) {
    return prefill_lookup_workspace(shape_, of, static_cast<int32_t>(width_), sm90);
  };
  to.lookup_bytes = setup_.buckets != nullptr ? pairs * width_ * static_cast<int64_t>(sizeof(float))
                                              : std::max(workspace(chunk), workspace(singles));
  to.lookup = layout.take<std::byte>(to.lookup_bytes);
  for (RunLists& lists : to.lists) {
    lists.capacity = (width_ + 1) / 2;
    lists.lay_out(layout, pairs);
  }
  return layout.used();
}

size_t BlockServer::lay_out_unpacked(void* base) {
  int64_t slots = 0, keys = 0, values = 0;  // of the layer with most
  for (const LayerView& view : setup_.index->layers) {
    if (view.coded_keys.bits == 0) continue;
    slots = std::max(slots, view.slots);
    keys = std::max(keys, view.kv_heads * view.slots * view.head_dim);
    values = std::max(values, view.kv_heads * view.slots * view.value_dim);
  }
  Layout layout(base);
  unpacked_.keys = layout.take<uint16_t>(keys);
  unpacked_.values = layout.take<uint16_t>(values);
  unpacked_.bits = layout.take<uint32_t>(2 * shape_.kv_heads * UnpackedRows::words(slots));
  return layout.used();
}

// ---- Lookups.

Result<RunLists> BlockServer::look_up(const AttendCall& call, const BlockChunk& chunk, bool sm90,
                                      unsigned long long* counters) {
  const bool hopper = sm90 && setup_.clusters;
  const Chunk& memory = hopper ? sm90_ : sm80_;
  const LookupParams& levels = setup_.lookups[static_cast<size_t>(call.layer)];
  PrefillLookup lookup;
  lookup.shape = shape_;
  lookup.blocks = chunk.blocks;
  lookup.queries = rows_from(call, chunk.first).q;
  lookup.q_dtype = call.dtype;
  lookup.counters = counters;
  for (int k = 0; k < levels.levels; ++k) {
    PrefillLevel& to = lookup.level;
    to = {levels.level[k]};
    to.finest = k + 1 == levels.levels;
    if (hopper) to.maps = &level_maps_[static_cast<size_t>(call.layer * kMostLevels + k)];
    for (int scope = 0; scope < kScopes; ++scope) {
      // Pages and buckets are counted, and have no thresholds.
      if (k < setup_.plan->levels) to.log_threshold[scope] = setup_.plan->log_thresholds[scope][k];
      if (levels.rule == LookupRule::kBudget) to.wanted[scope] = wanted_of(scope, call.layer);
    }
    lookup.alive = lookup.chosen;  // of the level before; at the first one all
    lookup.chosen = memory.lists[k % 2];
    SQZ_RETURN_IF_ERROR(
        setup_.buckets != nullptr
            ? setup_.buckets->look_up(call, chunk, lookup, reinterpret_cast<float*>(memory.lookup))
            : prefill_lookup(lookup, memory.lookup, memory.lookup_bytes, setup_.device, hopper,
                             static_cast<cudaStream_t>(call.stream)));
  }
  return lookup.chosen;
}

// ---- Attention.

bool BlockServer::takes_sm90(const AttendCall& call) const {
  return attend_memory_ != nullptr && call.dtype == setup_.index->metadata().dtype &&
         setup_.uploaded->has_usual_keys(call.layer);
}

Status BlockServer::attend(const AttendCall& call, const AttendParams& params, bool looks_up,
                           bool sm90, unsigned long long* counters) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const Chunk& memory = sm90 ? sm90_ : sm80_;
  // Single tokens read their own lists as decoding does, and codes as they are.
  const bool single = looks_up && !sm90 && is_kernel_dim(params.dim) && is_single(call);
  const bool coded = params.coded.present() && !single;
  const int64_t most = single ? kMostPairs / shape_.kv_heads : memory.blocks;
  AttendParams own = params;  // as attention reads it: no rows of codes
  if (coded) {
    SQZ_RETURN_IF_ERROR(forget_rows(params, unpacked_, stream));
    own.keys = unpacked_.keys;
    own.values = unpacked_.values;
    own.coded = {};
  }
  const auto unpack = [&](int64_t blocks, unsigned long long* means) -> Status {
    if (!coded) return {};
    AttendParams rows = params;
    rows.lists = own.lists;
    return unpack_rows(rows, blocks, unpacked_, means, stream);
  };
  chunks_.list(call);
  if (!looks_up) {
    // Dense layers count like the others, one selection a block.
    const auto blocks = static_cast<int64_t>(chunks_.size());
    if (params.lists.totals == nullptr) {
      const int64_t means = coded ? 2 * blocks * shape_.kv_heads * params.coded.count : 0;
      SQZ_RETURN_IF_ERROR(add_counters(counters, static_cast<unsigned long long>(blocks), 0,
                                       static_cast<unsigned long long>(means), stream));
    }
    SQZ_RETURN_IF_ERROR(unpack(blocks, nullptr));
    // All tokens read the same keys, so they share one reading of them.
    chunks_.list_whole(call.tokens);
  }
  for (size_t begin = 0; begin < chunks_.size();) {
    SQZ_ASSIGN_OR_RETURN(const BlockChunk chunk,
                         chunks_.next(begin, std::min(most, memory.blocks), memory.table, stream));
    const CallRows rows = rows_from(call, chunk.first);
    own.q = rows.q;
    own.out = rows.out;
    own.lse = rows.lse;
    if (looks_up) {
      SQZ_ASSIGN_OR_RETURN(own.lists, look_up(call, chunk, sm90, counters));
      SQZ_RETURN_IF_ERROR(unpack(chunk.blocks.count, counters + 2));
    }
    if (single) {
      own.requests = chunk.blocks.count;
      SQZ_RETURN_IF_ERROR(decode_attend(own, stream));
    } else if (sm90) {
      SQZ_RETURN_IF_ERROR(attend_sm90(own, chunk.blocks, &setup_.key_maps[call.layer], stream));
    } else {
      SQZ_RETURN_IF_ERROR(sm80_attend({own, chunk.blocks, partials_}, stream));
    }
  }
  return {};
}

Status BlockServer::attend_sm90(const AttendParams& params, const QueryBlocks& blocks,
                                KeyMaps* maps, cudaStream_t stream) const {
  PrefillAttend attend;
  attend.shape = shape_;
  attend.blocks = blocks;
  attend.keys = params;
  attend.maps = maps;
  attend.selected = params.lists;
  attend.queries = params.q;
  attend.out = params.out;
  attend.lse = params.lse;
  return prefill_attend(attend, attend_memory_, attend_bytes_, setup_.device.multiprocessors,
                        stream);
}

// ---- Selections.

Result<RunLists> BlockServer::select(const AttendCall& call, bool sm90) {
  const Chunk& memory = sm90 ? sm90_ : sm80_;
  chunks_.list(call);
  chunks_.keep_first();
  size_t begin = 0;
  SQZ_ASSIGN_OR_RETURN(
      const BlockChunk chunk,
      chunks_.next(begin, memory.blocks, memory.table, static_cast<cudaStream_t>(call.stream)));
  return look_up(call, chunk, sm90, nullptr);
}

}  // namespace sqz::cuda
