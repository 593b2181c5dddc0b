#include "libruntime/cuda/block_server.h"

#include <algorithm>
#include <numbers>

#include "libruntime/cuda/bucket_lookup.h"
#include "libruntime/cuda/call_parts.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/wanted_keys.h"
#include "libruntime/kernels/cuda/add_counters/kernel.h"

namespace sqz::cuda {
namespace {

// Of what grows with the blocks of a chunk.
constexpr int64_t kSm80Bytes = int64_t{64} << 20, kSm90Bytes = int64_t{512} << 20;
constexpr int64_t kPieceQueries = 256;  // whose parts a block of threads adds up, or more

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
      slots_ = std::max<int64_t>(slots_, lookup.slots);
    }
  }
}

// ---- Memory.

Status BlockServer::allocate() {
  const int64_t usual = chunks_.usual(setup_.max_tokens);
  SQZ_RETURN_IF_ERROR(take_chunk(sm80_.memory, kSm80Bytes, usual, sm80_.blocks,
                                 [&](void* base) { return lay_out_sm80(base); }));
  if (wanted_ != nullptr) {
    SQZ_RETURN_IF_ERROR(upload_wanted_keys(*setup_.plan, *setup_.index, kScopes, wanted_));
  }
  if (setup_.index->metadata().rows != RowKind::k16) {
    SQZ_RETURN_IF_ERROR(
        take_memory(unpacked_memory_, [&](void* base) { return lay_out_unpacked(base); }));
  }
  if (!setup_.device.has_wgmma() || setup_.max_request_tokens == 1) return {};
  // Of other selectors the sm80 lookups find what is read.
  const bool finds = setup_.clusters || !setup_.blocks_look_up;
  return take_chunk(sm90_.memory, kSm90Bytes, finds ? usual : std::min(usual, sm80_.blocks),
                    sm90_.blocks, [&](void* base) { return lay_out_sm90(base); });
}

size_t BlockServer::lay_out_sm80(void* base) {
  const ModelDescription& model = setup_.model();
  const int64_t pairs = sm80_.blocks * model.kv_heads;
  Layout layout(base);
  partials_ = layout.take<float>(static_cast<int64_t>(
      sm80_attend_workspace(setup_.device.multiprocessors, static_cast<int>(model.head_dim)) /
      sizeof(float)));
  if (width_ == 0) return layout.used();
  const int64_t block_tokens = chunks_.block_tokens(setup_.max_tokens);
  const int64_t tokens = std::min(setup_.max_tokens, sm80_.blocks * block_tokens);
  if (setup_.lookups[0].pages) {
    const int64_t queries = block_tokens * model.group_size();
    lookup_.pieces = static_cast<int32_t>(std::clamp<int64_t>(queries / kPieceQueries, 1, 16));
    lookup_.parts = layout.take<float>(pairs * lookup_.pieces * 2 * model.head_dim);
  } else if (setup_.buckets == nullptr) {
    lookup_.sums = layout.take<float2>(tokens * model.query_heads * kSm80Parts);
    lookup_.lse = layout.take<float>(tokens * model.query_heads);
  }
  lookup_.scores = layout.take<float>(pairs * width_);
  lookup_.chosen = layout.take<uint32_t>(pairs * width_);
  lookup_.state = layout.take<uint2>(pairs);
  lookup_.faults = layout.take<uint32_t>(pairs);
  lookup_.token.alive = layout.take<uint32_t>(pairs * 2 * width_);
  sm80_.table = layout.take<int2>(sm80_.blocks);
  wanted_ = layout.take<uint32_t>(kScopes * std::ssize(setup_.lookups) * model.kv_heads);
  uncounted_ = layout.take<unsigned long long>(3);
  // Lists have an entry beyond their last run, which is read with them.
  lists_.capacity = run_capacity(width_);
  lists_.mark_capacity = (slots_ + kMarkKeys - 1) / kMarkKeys;
  lists_.lay_out(layout, pairs);
  return layout.used();
}

size_t BlockServer::lay_out_sm90(void* base) {
  const int64_t heads = setup_.model().kv_heads;
  const int multiprocessors = setup_.device.multiprocessors;
  const auto tokens = static_cast<int32_t>(setup_.max_tokens);
  const QueryBlocks all = {tokens, 1, tokens, nullptr};
  const QueryBlocks chunk = {tokens, static_cast<int32_t>(sm90_.blocks),
                             static_cast<int32_t>(chunks_.block_tokens(tokens)), nullptr};
  Layout layout(base);
  attend_bytes_ = std::max(prefill_attend_workspace(shape_, all, multiprocessors),
                           prefill_attend_workspace(shape_, chunk, multiprocessors));
  attend_memory_ = layout.take<std::byte>(attend_bytes_);
  if (width_ == 0) return layout.used();
  sm90_.table = layout.take<int2>(sm90_.blocks);
  if (!setup_.clusters) return layout.used();
  lookup_bytes_ = prefill_lookup_workspace(shape_, chunk, static_cast<int32_t>(width_));
  lookup_memory_ = layout.take<std::byte>(lookup_bytes_);
  for (RunLists& to : level_lists_) {
    to.capacity = (width_ + 1) / 2;
    to.lay_out(layout, sm90_.blocks * heads);
  }
  return layout.used();
}

size_t BlockServer::lay_out_unpacked(void* base) {
  const ModelDescription& model = setup_.model();
  int64_t slots = 0;  // of the layer with most
  for (const LayerView& view : setup_.index->layers) {
    if (view.coded_keys.bits > 0) slots = std::max(slots, view.slots);
  }
  Layout layout(base);
  unpacked_.keys = layout.take<uint16_t>(model.kv_heads * slots * model.head_dim);
  unpacked_.values = layout.take<uint16_t>(model.kv_heads * slots * model.head_dim);
  unpacked_.bits = layout.take<uint32_t>(2 * model.kv_heads * UnpackedRows::words(slots));
  return layout.used();
}

// ---- Lookups.

Result<RunLists> BlockServer::look_up(const AttendCall& call, const BlockChunk& chunk, bool sm90,
                                      unsigned long long* counters) {
  if (sm90 && setup_.clusters) return look_up_sm90(call, chunk, counters);
  Sm80Lookup lookup = lookup_;
  lookup.token = setup_.lookups[static_cast<size_t>(call.layer)];
  LookupParams& params = lookup.token;
  params.q = rows_from(call, setup_.model(), chunk.first).q;
  params.q_dtype = call.dtype;
  params.width = width_;
  params.alive = lookup_.token.alive;
  params.lists = lists_;
  params.counters = counters;
  lookup.block = params;
  for (int scope = 0; scope < kScopes; ++scope) {
    LookupParams& to = scope == 0 ? lookup.token : lookup.block;
    // Selectors of pages and buckets count, and have none.
    for (int k = 0; k < setup_.plan->levels; ++k) {
      to.level[k].threshold =
          setup_.plan->log_thresholds[scope][k] * static_cast<float>(std::numbers::log2e);
    }
    to.wanted = wanted_of(scope, call.layer);
  }
  lookup.blocks = chunk.blocks;
  SQZ_RETURN_IF_ERROR(setup_.buckets != nullptr
                          ? setup_.buckets->look_up_blocks(call, chunk, lookup)
                          : sm80_lookup(lookup, static_cast<cudaStream_t>(call.stream)));
  return lists_;
}

Result<RunLists> BlockServer::look_up_sm90(const AttendCall& call, const BlockChunk& chunk,
                                           unsigned long long* counters) {
  const LookupParams& levels = setup_.lookups[static_cast<size_t>(call.layer)];
  PrefillLookup lookup;
  lookup.shape = shape_;
  lookup.blocks = chunk.blocks;
  lookup.queries = rows_from(call, setup_.model(), chunk.first).q;
  lookup.counters = counters;
  for (int k = 0; k < levels.levels; ++k) {
    const LookupLevel& from = levels.level[k];
    PrefillLevel& to = lookup.level;
    to = {.centroids = from.centroids,
          .offsets = from.offsets,
          .sizes = from.sizes,
          .clusters = from.clusters,
          .finest = k + 1 == levels.levels};
    for (int scope = 0; scope < kScopes; ++scope) {
      to.log_threshold[scope] = setup_.plan->log_thresholds[scope][k];
      if (!setup_.plan->head_keep.empty()) to.wanted[scope] = wanted_of(scope, call.layer);
    }
    lookup.alive = lookup.chosen;  // of the level before; at the first one all
    lookup.chosen = level_lists_[k % 2];
    SQZ_RETURN_IF_ERROR(prefill_lookup(lookup, lookup_memory_, lookup_bytes_,
                                       setup_.device.multiprocessors,
                                       static_cast<cudaStream_t>(call.stream)));
  }
  return lookup.chosen;
}

// ---- Attention.

bool BlockServer::takes_sm90(const AttendCall& call) const {
  return attend_memory_ != nullptr && call.dtype == setup_.index->metadata().dtype;
}

Status BlockServer::attend(const AttendCall& call, const AttendParams& params, bool looks_up,
                           bool sm90, unsigned long long* counters) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const Chunk& memory = sm90 ? sm90_ : sm80_;
  const bool coded = params.coded.present();
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
    const bool dense = params.lists.totals == nullptr;
    if (dense) {
      SQZ_RETURN_IF_ERROR(
          add_counters(counters, static_cast<unsigned long long>(blocks), 0, 0, stream));
    }
    SQZ_RETURN_IF_ERROR(unpack(blocks, dense ? counters + 2 : nullptr));
    // What is read is the same for all tokens: they share one reading of the keys.
    chunks_.list_whole(call.tokens);
  }
  for (size_t begin = 0; begin < chunks_.size();) {
    SQZ_ASSIGN_OR_RETURN(const BlockChunk chunk,
                         chunks_.next(begin, memory.blocks, memory.table, stream));
    const CallRows rows = rows_from(call, setup_.model(), chunk.first);
    own.q = rows.q;
    own.out = rows.out;
    own.lse = rows.lse;
    if (looks_up) {
      SQZ_ASSIGN_OR_RETURN(own.lists, look_up(call, chunk, sm90, counters));
      SQZ_RETURN_IF_ERROR(unpack(chunk.blocks.count, counters + 2));
    }
    SQZ_RETURN_IF_ERROR(sm90 ? attend_sm90(own, chunk.blocks, stream)
                             : attend_sm80(own, chunk.blocks, stream));
  }
  return {};
}

Status BlockServer::attend_sm90(const AttendParams& params, const QueryBlocks& blocks,
                                cudaStream_t stream) const {
  PrefillAttend attend;
  attend.shape = shape_;
  attend.blocks = blocks;
  attend.keys = prefill_keys(params);
  attend.selected = params.lists;
  attend.queries = params.q;
  attend.out = params.out;
  attend.lse = params.lse;
  return prefill_attend(attend, attend_memory_, attend_bytes_, setup_.device.multiprocessors,
                        stream);
}

Status BlockServer::attend_sm80(const AttendParams& params, const QueryBlocks& blocks,
                                cudaStream_t stream) const {
  Sm80Attend attend = {params, blocks, partials_};
  const bool single = blocks.block_tokens == 1 && blocks.count * params.kv_heads <= kMostPairs;
  if (!single) return sm80_attend(attend, stream);
  attend.params.requests = blocks.count;
  attend.params.after_lookup = false;
  return decode_attend(attend.params, stream);
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
  return look_up(call, chunk, sm90, uncounted_);
}

}  // namespace sqz::cuda
