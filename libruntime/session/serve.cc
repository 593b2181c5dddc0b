// Session's calls: blocks, chunks, items, splits.
#include <algorithm>
#include <limits>
#include <numeric>

#include "libruntime/attention/state.h"
#include "libruntime/session/session.h"

namespace sqz {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

}  // namespace

void Session::note_bad(int64_t index) {
  int64_t seen = first_bad_;
  while (index < seen && !first_bad_.compare_exchange_weak(seen, index)) {
  }
}

// first_bad_ is token * query_heads + head.
Status Session::numeric_error(const AttendCall& call, const char* what) {
  const int64_t bad = first_bad_;
  return {Code::kNumeric, concat(what, " of layer ", call.layer, ", token ", bad / query_heads_,
                                 ", query head ", bad % query_heads_, " is NaN or infinite")};
}

const float* Session::query(int64_t token, int64_t head) const {
  return queries_ + (token * query_heads_ + head) * dim_;
}

Status Session::load_queries(const AttendCall& call, int64_t tokens) {
  const bool direct = call.dtype == DType::kF32;
  queries_ = direct ? static_cast<const float*>(call.q) : converted_.get();
  first_bad_ = kNone;
  pool_->for_each(tokens, [&](int64_t token, int) {
    for (int64_t head = 0; head < query_heads_; ++head) {
      const int64_t row = token * query_heads_ + head;
      const auto* from =
          static_cast<const std::byte*>(call.q) + row * dim_ * dtype_size(call.dtype);
      float* to = direct ? nullptr : converted_.get() + row * dim_;
      if (!to_finite_floats(call.dtype, from, dim_, to)) note_bad(row);
    }
  });
  if (first_bad_ != kNone) return numeric_error(call, "query");
  return selects(call.layer) && selector_->before_rope() ? load_unroped(call, tokens) : Status();
}

// What the selector sees of the queries: as the caller gives it, or turned back from `positions`.
Status Session::load_unroped(const AttendCall& call, int64_t tokens) {
  if (call.q_before_rope == nullptr && call.positions == nullptr) {
    return {Code::kInvalidArgument,
            "positions: found null, expected the tokens' positions, or q_before_rope: the selector "
            "looks at queries before RoPE"};
  }
  const int64_t row = query_heads_ * dim_;
  pool_->for_each(tokens, [&](int64_t token, int worker) {
    float* to = unroped_.get() + token * row;
    if (call.q_before_rope == nullptr) {
      rope_.apply(call.positions[token], query(token, 0), query_heads_, slot_of(worker).values, to);
      return;
    }
    const auto* from =
        static_cast<const std::byte*>(call.q_before_rope) + token * row * dtype_size(call.dtype);
    if (!to_finite_floats(call.dtype, from, row, to)) note_bad(token * query_heads_);
  });
  return first_bad_ == kNone ? Status() : numeric_error(call, "query before RoPE");
}

Status Session::check_window(const AttendCall& call) const {
  const IndexMetadata& metadata = index_->metadata();
  const int64_t window = metadata.layers[call.layer].window;
  if (window == 0) return {};
  if (call.positions == nullptr) {
    return {Code::kInvalidArgument, concat("positions: found null, expected the tokens' positions: "
                                           "layer ",
                                           call.layer, " has a sliding window")};
  }
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.positions[t] < metadata.tokens) {
      return {Code::kInvalidArgument,
              concat("positions[", t, "]: found ", call.positions[t], ", expected at least ",
                     metadata.tokens, ", the length of the fixed context")};
    }
  }
  return {};
}

bool Session::next_block(const AttendCall& call, BlockCursor& cursor, Block& block) const {
  const int64_t requests = call.request_count();
  const auto end_of = [&](int64_t request) { return call.request_begin(request + 1); };
  while (cursor.request < requests && cursor.token == end_of(cursor.request)) ++cursor.request;
  if (cursor.request == requests) return false;
  const int64_t left = end_of(cursor.request) - cursor.token;
  block = {cursor.token, block_ == 0 ? left : std::min(block_, left)};
  cursor.token += block.tokens;
  return true;
}

int64_t Session::count_blocks(const AttendCall& call) const {
  BlockCursor cursor;
  Block block;
  int64_t count = 0;
  while (next_block(call, cursor, block)) ++count;
  return count;
}

Status Session::attend(const AttendCall& call) {
  SQZ_RETURN_IF_ERROR(check_window(call));
  SQZ_RETURN_IF_ERROR(load_queries(call, call.tokens));
  BlockCursor cursor;
  while (true) {
    blocks_.clear();
    Block block;
    if (!selects(call.layer)) {
      // Nothing is selected, so that all tokens share one reading of the keys.
      if (cursor.token < call.tokens) blocks_.push_back({0, call.tokens});
      cursor.token = call.tokens;
    } else {
      while (std::ssize(blocks_) < chunk_blocks_ && next_block(call, cursor, block)) {
        blocks_.push_back(block);
      }
    }
    if (blocks_.empty()) return {};
    SQZ_RETURN_IF_ERROR(select_chunk(call));
    SQZ_RETURN_IF_ERROR(attend_chunk(call));
    count_chunk(call);
  }
}

Result<std::span<const HeadSelection>> Session::select(const AttendCall& call) {
  blocks_.clear();
  BlockCursor cursor;
  Block block;
  if (!next_block(call, cursor, block)) {
    return Status(Code::kInvalidArgument,
                  "q: found no tokens, expected at least one to select for");
  }
  blocks_.push_back(block);
  SQZ_RETURN_IF_ERROR(load_queries(call, block.first + block.tokens));
  SQZ_RETURN_IF_ERROR(select_chunk(call));
  return std::span<const HeadSelection>(selections_).first(static_cast<size_t>(kv_heads_));
}

Status Session::select_chunk(const AttendCall& call) {
  const Selector& selector = selects(call.layer) ? *selector_ : *dense_;
  first_bad_ = kNone;
  pool_->for_each(std::ssize(blocks_) * kv_heads_, [&](int64_t i, int worker) {
    const Block& block = blocks_[i / kv_heads_];
    const int64_t head = i % kv_heads_;
    const int64_t row = (block.first * query_heads_ + head * group_) * dim_;
    const SelectQuery select = {
        .layer = call.layer,
        .kv_head = index_->first_head + head,
        .queries = (selector.before_rope() ? unroped_.get() : queries_) + row,
        .tokens = block.tokens,
        .token_stride = query_heads_ * dim_};
    const Status status = selector.select(select, workers_[worker].select, selections_[i]);
    if (!status.ok()) note_bad(block.first * query_heads_ + head * group_);
  });
  if (first_bad_ == kNone) return {};
  return numeric_error(call, "product of centroids and the queries of the block and group");
}

namespace {

// Finest clusters of which a key is in the runs.
int64_t clusters_of(const KeyList& list) {
  int64_t count = 0, before = -1;
  for (const KeyRun& run : list.runs) {
    const int64_t first = list.coded_keys.cluster_of(run.first, std::max<int64_t>(before, 0));
    const int64_t last = list.coded_keys.cluster_of(int64_t{run.first} + run.length - 1, first);
    count += last - std::max(first, before + 1) + 1;
    before = last;
  }
  return count;
}

}  // namespace

void Session::make_lists(const AttendCall& call) {
  const LayerView& view = index_->layers[call.layer];
  const int64_t row_bytes = dim_ * dtype_size(view.dtype);
  const auto rows = [&](const void* keys, const void* values, int64_t head, int64_t count) {
    const int64_t bytes = head * count * row_bytes;
    return KeyRows{static_cast<const std::byte*>(keys) + bytes,
                   static_cast<const std::byte*>(values) + bytes};
  };
  for (size_t i = 0; i < blocks_.size() * kv_heads_; ++i) {
    const HeadSelection& selection = selections_[i];
    const auto head = static_cast<int64_t>(i) % kv_heads_;
    KeyList& list = lists_[i];
    list.dtype = view.dtype;
    list.dim = dim_;
    list.exact_count = view.exact - selection.exact_skipped;
    list.runs = selection.runs.first(static_cast<size_t>(selection.run_count));
    list.run_keys = selection.keys;
    list.coded_keys = list.coded_values = list.key_codes = {};
    if (view.coded_keys.bits > 0) {
      list.coded_keys = coded_head(view, view.coded_keys, false, head);
    }
    list.rests = selection.rests.first(static_cast<size_t>(selection.rest_count));
    const bool by_codes = list.rests.empty() && selection.guessed_count > 0;
    list.guessed = selection.guessed.first(by_codes ? selection.guessed_count : 0);
    list.guessed_keys = by_codes ? selection.guessed_keys : 0;
    if (by_codes) list.key_codes = coded_head(view, view.key_codes, false, head);
    if (list.coded_keys.coded() || by_codes || !list.rests.empty()) {
      list.coded_values = coded_head(view, view.coded_values, true, head);
    }
    if (view.keys != nullptr) list.slots = rows(view.keys, view.values, head, view.slots);
    list.exact = rows(view.exact_keys, view.exact_values, head, view.exact);
    list.exact.keys += selection.exact_skipped * row_bytes;
    list.exact.values += selection.exact_skipped * row_bytes;
    list.estimated = selection.estimated.first(static_cast<size_t>(selection.estimated_count));
    list.estimated_clusters = selection.estimated_clusters;
    if (selection.estimated_count == 0) continue;
    for (int k = 0; k < view.levels; ++k) {
      const LevelView& level = view.level[k];
      list.centroids[k] = rows(level.centroids, level.value_means, head, level.clusters);
      list.log_sizes[k] =
          index_->tables[call.layer].level[k].log_sizes.data() + head * level.clusters;
    }
  }
}

void Session::make_items() {
  items_.clear();
  splits_.clear();
  int64_t total = 0;
  for (int64_t b = 0; b < std::ssize(blocks_); ++b) {
    const int64_t rows = blocks_[b].tokens * group_;
    for (int64_t head = 0; head < kv_heads_; ++head) {
      for (int64_t row = 0; row < rows; row += kTileRows) {
        items_.push_back(
            {.block = b, .head = head, .row = row, .rows = std::min(kTileRows, rows - row)});
        total += lists_[b * kv_heads_ + head].size();
      }
    }
  }
  const int64_t step =
      round_up(std::max((total + kTargetSplits - 1) / kTargetSplits, kLeastKeys), kKeyStep);
  int64_t slots = 0;
  for (int64_t i = 0; i < std::ssize(items_); ++i) {
    Item& item = items_[i];
    const int64_t keys = lists_[item.block * kv_heads_ + item.head].size();
    item.splits = std::max<int64_t>(1, (keys + step - 1) / step);
    item.slot = item.splits > 1 ? slots : -1;
    for (int64_t p = 0; p < item.splits; ++p) {
      splits_.push_back({.item = i,
                         .begin = p * step,
                         .end = std::min(keys, (p + 1) * step),
                         .slot = item.splits > 1 ? slots++ : -1});
    }
  }
}

PartialRows Session::slot(int64_t index) {
  float* const at = partials_.get() + index * kTileRows * (dim_ + 2);
  return {.maximum = at, .sum = at + kTileRows, .values = at + 2 * kTileRows};
}

void Session::run_split(const AttendCall& call, const Split& split, int worker) {
  const Item& item = items_[split.item];
  const Block& block = blocks_[item.block];
  const LayerView& view = index_->layers[call.layer];
  const int64_t window = index_->metadata().layers[call.layer].window;
  const float* queries[kTileRows];
  int64_t first_visible[kTileRows];
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t token = block.first + (item.row + r) / group_;
    queries[r] = query(token, item.head * group_ + (item.row + r) % group_);
    if (window > 0) {
      // The query at position p sees keys p - window + 1 .. p; the first stored one is at N - E.
      const int64_t first_stored = index_->metadata().tokens - view.exact;
      first_visible[r] = call.positions[token] - window + 1 - first_stored;
    }
  }
  const PartialRows out = split.slot >= 0 ? slot(split.slot) : slot_of(worker);
  const AttendRows work = {.list = &lists_[item.block * kv_heads_ + item.head],
                           .begin = split.begin,
                           .end = split.end,
                           .scale = scale_,
                           .rows = item.rows,
                           .queries = queries,
                           .first_visible = window > 0 ? first_visible : nullptr};
  attend_rows(kernels_, work, *workers_[worker].attend, out);
  if (split.slot < 0) finish_item(call, item, out);
}

void Session::finish_item(const AttendCall& call, const Item& item, const PartialRows& state) {
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t token = blocks_[item.block].first + (item.row + r) / group_;
    const int64_t row = token * query_heads_ + item.head * group_ + (item.row + r) % group_;
    auto* out = static_cast<std::byte*>(call.out) + row * dim_ * dtype_size(call.dtype);
    if (!finish_row(state, r, dim_, call.dtype, out, &call.lse[row])) note_bad(row);
  }
}

Status Session::attend_chunk(const AttendCall& call) {
  make_lists(call);
  make_items();
  first_bad_ = kNone;
  pool_->for_each(std::ssize(splits_),
                  [&](int64_t i, int worker) { run_split(call, splits_[i], worker); });
  pool_->for_each(std::ssize(items_), [&](int64_t i, int) {
    const Item& item = items_[i];
    if (item.slot < 0) return;
    const PartialRows state = slot(item.slot);
    for (int64_t p = 1; p < item.splits; ++p) {
      add_partial(state, slot(item.slot + p), item.rows, dim_);
    }
    finish_item(call, item, state);
  });
  return first_bad_ == kNone ? Status() : numeric_error(call, "attention");
}

void Session::count_chunk(const AttendCall& call) {
  const LayerView& view = index_->layers[call.layer];
  const int64_t row_bytes = dim_ * dtype_size(view.dtype);
  // Of a pruned layer, what was left out was possible, too.
  const bool pruned = view.slots > 0 && index_->metadata().pruned.has_value();
  const int64_t possible = pruned ? index_->metadata().tokens - view.exact : view.slots;
  Counters sum;
  for (size_t i = 0; i < blocks_.size() * kv_heads_; ++i) {
    const HeadSelection& s = selections_[i];
    sum.keys_read += s.keys;
    sum.keys_possible += possible;
    const int64_t whole = view.exact - s.exact_skipped;
    sum.bytes_read += (2 * whole + s.centroids + s.estimated_clusters) * row_bytes;
    sum.bytes_read += s.keys * view.slot_bytes();
    sum.bytes_read += s.codes * view.key_code_bytes() + s.means * row_bytes;
    if (lists_[i].coded_keys.coded() && s.means == 0) {
      // Rows of codes stand on their clusters' means, of which a lookup has read the centroids.
      sum.bytes_read += clusters_of(lists_[i]) * (s.centroids > 0 ? 1 : 2) * row_bytes;
    }
    sum.bytes_dense += 2 * (possible + view.exact) * row_bytes;
  }
  sum.selections = blocks_.size();
  // Dense layers are read once for all, but count like the others, so that totals over layers weigh
  // them alike.
  const int64_t times = selects(call.layer) ? 1 : count_blocks(call);
  for (int64_t i = 0; i < times; ++i) counters_[call.layer].add(sum);
}

}  // namespace sqz
