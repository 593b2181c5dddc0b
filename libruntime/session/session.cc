#include "libruntime/session/session.h"

#include <algorithm>
#include <cmath>

#include "formats/base/parallel.h"
#include "libruntime/select/static_selection.h"

namespace sqz {
namespace {

constexpr int64_t kSelectionBytes = int64_t{32} << 20;  // of the blocks that are served at once
constexpr int kMostThreads = 1024;
constexpr int64_t kMostTokens = int64_t{1} << 24;

Status check_range(const char* field, int64_t found, int64_t high) {
  if (found >= 0 && found <= high) return {};
  return {Code::kInvalidArgument, concat(field, ": found ", found, ", expected 0 to ", high)};
}

const CpuKernels& kernels_of(const SessionOptions& options) {
  return options.kernels != nullptr ? *options.kernels : cpu_kernels();
}

// Selectors look at the whole index, so that every rank plans and selects the same.
SelectableIndex selectable(const ServedIndex& index, const SessionOptions& options) {
  const ModelDescription& model = index.metadata().model;
  return {.layers = index.whole().layers,
          .tables = index.whole().tables,
          .group = model.group_size(),
          .scale = static_cast<float>(model.attention_scale),
          .kernels = &kernels_of(options)};
}

}  // namespace

Result<std::unique_ptr<Session>> Session::create(std::shared_ptr<const ServedIndex> index,
                                                 const SessionOptions& options) {
  SQZ_RETURN_IF_ERROR(check_range("block", options.block, kMostTokens));
  SQZ_RETURN_IF_ERROR(check_range("max_tokens", options.max_tokens, kMostTokens));
  SQZ_RETURN_IF_ERROR(check_range("threads", options.threads, kMostThreads));
  SQZ_ASSIGN_OR_RETURN(PreparedSelector prepared,
                       prepare_selector({.metadata = index->whole().metadata(),
                                         .calibration = index->whole().calibration,
                                         .index = selectable(*index, options),
                                         .path = index->file->path()},
                                        options.selection));
  return std::unique_ptr<Session>(new Session(std::move(index), options, std::move(prepared)));
}

Session::Session(std::shared_ptr<const ServedIndex> index, const SessionOptions& options,
                 PreparedSelector prepared)
    : index_(std::move(index)),
      kernels_(kernels_of(options)),
      plan_(std::move(prepared.plan)),
      selector_(std::move(prepared.selector)),
      dense_(make_dense_selector(selectable(*index_, options))),
      max_tokens_(options.max_tokens != 0 ? options.max_tokens : 4096),
      max_request_tokens_(options.max_request_tokens != 0 ? options.max_request_tokens
                                                          : max_tokens_),
      account_(*index_) {
  const ModelDescription& model = index_->metadata().model;
  pool_ = options.pool;
  if (pool_ == nullptr) {
    pool_ = std::make_shared<ThreadPool>(
        options.threads > 0 ? options.threads : std::min(resolve_threads(0), kMostThreads));
  }
  const int threads = pool_->size();
  SelectorLimits limits = (selector_ != nullptr ? *selector_ : *dense_).limits();
  limits.read = std::max<int64_t>(limits.read, 1);
  const int64_t most = kSelectionBytes / WorkPlan::block_bytes(model, limits);
  const int64_t blocks = std::clamp<int64_t>(most, 1, max_tokens_);
  at_once_ = static_cast<size_t>(blocks);
  queries_ = std::make_unique<QueryBlocks>(
      model, options.block, max_tokens_, selector_ != nullptr && selector_->before_rope(), *pool_);
  work_ = std::make_unique<WorkPlan>(model, limits, blocks, max_tokens_, threads);
  const int64_t widest = model.most([](const LayerGeometry& layer) { return layer.widest(); });
  for (int i = 0; i < threads; ++i) {
    workers_.push_back(
        {.select = limits.workspace,
         .attend = {kernels_, model.head_dim, widest, index_->metadata().has_codes()}});
  }
}

Status Session::attend(const AttendCall& call) {
  SQZ_RETURN_IF_ERROR(check_positions(call));
  SQZ_RETURN_IF_ERROR(load(call));
  for (const QueryBlock& request : queries_->not_finite()) {
    const int64_t row = request.first * layer_.query_heads;
    auto* out = static_cast<std::byte*>(call.out) + row * layer_.value_dim * dtype_size(call.dtype);
    fill_rows(call.dtype, request.tokens * layer_.query_heads, layer_.value_dim, out,
              call.lse.from(row), NAN, NAN);
  }
  // Layers that are read whole are read once for all tokens, but count like the others, once a
  // block, so that totals over layers weigh them alike.
  const QueryBlock all = {0, call.tokens};
  std::span<const QueryBlock> left = queries_->blocks();
  const bool together = !selects(call.layer) && queries_->not_finite().empty() && !left.empty();
  const int64_t times = together ? std::ssize(left) : 1;
  if (together) left = {&all, 1};
  while (!left.empty()) {
    const auto blocks = left.first(std::min(left.size(), at_once_));
    left = left.subspan(blocks.size());
    SQZ_RETURN_IF_ERROR(select_blocks(call, blocks));
    SQZ_RETURN_IF_ERROR(attend_blocks(call, blocks));
    account_.add(call.layer, work_->selections(std::ssize(blocks)), times);
  }
  return {};
}

Result<std::span<const HeadSelection>> Session::select(const AttendCall& call) {
  SQZ_RETURN_IF_ERROR(load(call));
  if (!queries_->not_finite().empty()) {
    return Status(Code::kNumeric, "q: found NaN or infinity, expected finite queries");
  }
  if (queries_->blocks().empty()) {
    return Status(Code::kInvalidArgument,
                  "q: found no tokens, expected at least one to select for");
  }
  SQZ_RETURN_IF_ERROR(select_blocks(call, queries_->blocks().first(1)));
  return std::span<const HeadSelection>(work_->selections(1));
}

Status Session::check_positions(const AttendCall& call) const {
  const IndexMetadata& metadata = index_->metadata();
  if (metadata.model.layer(call.layer).kind != LayerKind::kRecent) return {};
  if (call.positions == nullptr) {
    return {Code::kInvalidArgument,
            concat("positions: found null, expected the tokens' positions: layer ", call.layer,
                   " has a sliding window or chunks")};
  }
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.position(t) >= metadata.tokens) continue;
    return {Code::kInvalidArgument,
            concat("positions[", call.first_token + t, "]: found ", call.positions[t],
                   ", expected at least ", call.offset + metadata.tokens,
                   ", where the fixed context ends")};
  }
  return {};
}

Status Session::load(const AttendCall& call) {
  layer_ = index_->geometry(call.layer);
  work_->begin(layer_, index_->whole().geometry(call.layer).kv_heads);
  return queries_->load(call, layer_, selects(call.layer) && selector_->before_rope());
}

Status Session::select_blocks(const AttendCall& call, std::span<const QueryBlock> blocks) {
  const Selector& selector = selects(call.layer) ? *selector_ : *dense_;
  const std::span<HeadSelection> selections = work_->selections(std::ssize(blocks));
  const int64_t heads = layer_.kv_heads, first_head = index_->first_head_of(call.layer);
  bad_.reset();
  pool_->for_each(std::ssize(selections), [&](int64_t i, int thread) {
    const QueryBlock& block = blocks[i / heads];
    const int64_t head = i % heads, first_query = head * layer_.group_size();
    const SelectQuery query = {
        .layer = call.layer,
        .kv_head = first_head + head,
        .queries = selector.before_rope() ? queries_->query_before_rope(block.first, first_query)
                                          : queries_->query(block.first, first_query),
        .tokens = block.tokens,
        .token_stride = queries_->token_stride()};
    const Status status = selector.select(query, workers_[thread].select, selections[i]);
    selections[i].exact_skipped = std::max(selections[i].exact_skipped, call.skip);
    if (!status.ok()) bad_.note(block.first * layer_.query_heads + first_query);
  });
  return bad_.status("product of centroids and the queries of the block and group", call,
                     layer_.query_heads);
}

Status Session::attend_blocks(const AttendCall& call, std::span<const QueryBlock> blocks) {
  const auto tasks = work_->make(index_->layers[call.layer], blocks);
  bad_.reset();
  pool_->for_each(std::ssize(tasks), [&](int64_t i, int thread) {
    run(call, tasks[i], blocks[tasks[i].block], thread);
  });
  // Rows that were split: their parts, in order.
  pool_->for_each(std::ssize(tasks), [&](int64_t i, int thread) {
    const AttendTask& first = tasks[i];
    if (first.parts == 1 || first.begin > 0) return;
    const PartialRows state = work_->state_of(first, thread);
    for (int64_t p = 1; p < first.parts; ++p) {
      add_partial(state, work_->state_of(tasks[i + p], thread), first.rows, layer_.value_dim);
    }
    finish(call, first, blocks[first.block], state);
  });
  return bad_.status("attention", call, layer_.query_heads);
}

void Session::run(const AttendCall& call, const AttendTask& task, const QueryBlock& block,
                  int thread) {
  const bool recent = layer_.kind == LayerKind::kRecent;
  const int64_t group = layer_.group_size();
  const int64_t first_stored = index_->metadata().tokens - index_->layers[call.layer].exact;
  const float* queries[kTileRows];
  int64_t first_visible[kTileRows];
  for (int64_t r = 0; r < task.rows; ++r) {
    const int64_t token = block.first + (task.row + r) / group;
    queries[r] = queries_->query(token, task.head * group + (task.row + r) % group);
    if (recent) first_visible[r] = layer_.first_seen(call.position(token)) - first_stored;
  }
  const PartialRows state = work_->state_of(task, thread);
  attend_rows(kernels_,
              {.sequence = work_->keys_of(task),
               .begin = task.begin,
               .end = task.end,
               .scale = static_cast<float>(layer_.attention_scale),
               .rows = task.rows,
               .queries = queries,
               .first_visible = recent ? first_visible : nullptr},
              workers_[thread].attend, state);
  if (task.state < 0) finish(call, task, block, state);
}

void Session::finish(const AttendCall& call, const AttendTask& task, const QueryBlock& block,
                     const PartialRows& state) {
  const int64_t group = layer_.group_size();
  for (int64_t r = 0; r < task.rows; ++r) {
    const int64_t token = block.first + (task.row + r) / group;
    const int64_t row = token * layer_.query_heads + task.head * group + (task.row + r) % group;
    auto* out = static_cast<std::byte*>(call.out) + row * layer_.value_dim * dtype_size(call.dtype);
    if (!finish_row(state, r, layer_.value_dim, call.dtype, out, &call.lse[row])) bad_.note(row);
  }
}

}  // namespace sqz
