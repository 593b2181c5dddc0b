#include "libruntime/session/session.h"

#include <algorithm>

#include "formats/base/parallel.h"
#include "libruntime/select/static_selection.h"

namespace sqz {
namespace {

constexpr int64_t kWaveBytes = int64_t{32} << 20;
constexpr int kMostThreads = 1024;
constexpr int64_t kMostTokens = int64_t{1} << 24;

Status out_of_range(const char* field, int64_t found, int64_t low, int64_t high) {
  return {Code::kInvalidArgument,
          concat(field, ": found ", found, ", expected ", low, " to ", high)};
}

}  // namespace

void Counters::add(const Counters& other) {
  selections += other.selections;
  keys_read += other.keys_read;
  keys_possible += other.keys_possible;
  bytes_read += other.bytes_read;
  bytes_dense += other.bytes_dense;
  read_whole += other.read_whole;
}

Result<std::unique_ptr<Session>> Session::create(std::shared_ptr<const ServedIndex> index,
                                                 const SessionOptions& options) {
  if (options.block < 0) return out_of_range("block", options.block, 0, kMostTokens);
  if (options.max_tokens < 0 || options.max_tokens > kMostTokens) {
    return out_of_range("max_tokens", options.max_tokens, 0, kMostTokens);
  }
  if (options.threads < 0 || options.threads > kMostThreads) {
    return out_of_range("threads", options.threads, 0, kMostThreads);
  }
  const int threads = std::min(resolve_threads(options.threads), kMostThreads);
  std::unique_ptr<Session> session(new Session(std::move(index), options));
  SQZ_RETURN_IF_ERROR(session->prepare(options.selection));
  session->allocate(threads);
  return session;
}

Session::Session(std::shared_ptr<const ServedIndex> index, const SessionOptions& options)
    : index_(std::move(index)),
      kernels_(options.kernels != nullptr ? *options.kernels : cpu_kernels()),
      block_(options.block),
      max_tokens_(options.max_tokens != 0 ? options.max_tokens : 4096),
      max_request_tokens_(options.max_request_tokens != 0 ? options.max_request_tokens
                                                          : max_tokens_),
      rope_(index_->metadata().model.rope, index_->metadata().model.head_dim) {
  const ModelDescription& model = index_->metadata().model;
  query_heads_ = model.query_heads;
  kv_heads_ = model.kv_heads;
  group_ = model.group_size();
  dim_ = model.head_dim;
  scale_ = static_cast<float>(model.attention_scale);
  counters_.resize(static_cast<size_t>(model.layers));
}

Status Session::prepare(const SelectionRequest& request) {
  const ServedIndex& whole = index_->whole();
  const SelectableIndex selectable = {.layers = whole.layers,
                                      .tables = whole.tables,
                                      .group = group_,
                                      .scale = scale_,
                                      .kernels = &kernels_};
  dense_ = make_dense_selector(selectable);
  SQZ_ASSIGN_OR_RETURN(PreparedSelector prepared,
                       prepare_selector({.metadata = whole.metadata(),
                                         .calibration = whole.calibration,
                                         .index = selectable,
                                         .path = index_->file->path()},
                                        request));
  plan_ = std::move(prepared.plan);
  selector_ = std::move(prepared.selector);
  if (plan_.block > 0) block_ = plan_.block;
  return {};
}

void Session::allocate(int threads) {
  SelectorLimits limits = dense_->limits();
  if (selector_ != nullptr) {
    limits = selector_->limits();
    limits.runs = std::max<int64_t>(limits.runs, 1);
  }
  const int64_t block_bytes =
      kv_heads_ * static_cast<int64_t>((limits.runs + limits.guessed) * sizeof(KeyRun) +
                                       limits.estimated * sizeof(ClusterRun) +
                                       limits.rests * sizeof(ClusterRest) + sizeof(HeadSelection) +
                                       sizeof(KeyList));
  chunk_blocks_ =
      selector_ == nullptr ? 1 : std::clamp<int64_t>(kWaveBytes / block_bytes, 1, max_tokens_);
  const auto entries = static_cast<size_t>(chunk_blocks_ * kv_heads_);
  blocks_.reserve(static_cast<size_t>(chunk_blocks_));
  selections_.resize(entries);
  lists_.resize(entries);
  const auto share_out = [&](auto& memory, int64_t each, auto HeadSelection::*capacity) {
    const auto count = static_cast<size_t>(each);
    memory.reset(new std::remove_reference_t<decltype(memory[0])>[entries * count]);
    for (size_t i = 0; i < entries; ++i) {
      selections_[i].*capacity = {memory.get() + i * count, count};
    }
  };
  share_out(runs_, limits.runs, &HeadSelection::runs);
  share_out(estimated_, limits.estimated, &HeadSelection::estimated);
  share_out(guessed_, limits.guessed, &HeadSelection::guessed);
  share_out(rests_, limits.rests, &HeadSelection::rests);

  // A block of t tokens has ceil(t * group / kTileRows) items a head.
  const int64_t items = kv_heads_ * (max_tokens_ * group_ / kTileRows + chunk_blocks_ + 1);
  items_.reserve(static_cast<size_t>(items));
  splits_.reserve(static_cast<size_t>(items + kTargetSplits));
  // Not touched until used, so that what a short call does not need costs no memory.
  converted_.reset(new float[static_cast<size_t>(max_tokens_ * query_heads_ * dim_)]);
  if (selector_ != nullptr && selector_->before_rope()) {
    unroped_.reset(new float[static_cast<size_t>(max_tokens_ * query_heads_ * dim_)]);
  }
  partials_.reset(new float[static_cast<size_t>((kMostSlots + threads) * kTileRows * (dim_ + 2))]);

  for (int i = 0; i < threads; ++i) {
    Worker worker;
    worker.select = limits.workspace;
    worker.attend =
        std::make_unique<AttendWorkspace>(kernels_, dim_, index_->metadata().has_codes());
    workers_.push_back(std::move(worker));
  }
  pool_ = std::make_unique<ThreadPool>(threads);
}

Result<Counters> Session::totals(int64_t layer) {
  if (layer >= 0) return counters_[static_cast<size_t>(layer)];
  Counters sum;
  for (const Counters& of_layer : counters_) sum.add(of_layer);
  return sum;
}

void Session::reset_counters() {
  std::fill(counters_.begin(), counters_.end(), Counters());
}

}  // namespace sqz
