#include <algorithm>

#include "formats/sqz_metadata.h"
#include "libruntime/capi/fence.h"
#include "libruntime/capi/handles.h"

namespace {

using sqz::concat;
using sqz::Result;
using sqz::Status;
using sqz::capi::fence;
using sqz::capi::invalid;
using sqz::capi::kCuda;

Status check_choice(const char* field, int32_t found, int32_t last) {
  if (found >= 0 && found <= last) return {};
  return invalid(concat("options.", field, ": found ", found, ", expected 0 to ", last));
}

// The selector is resolved.
Result<sqz::SessionOptions> read_options(const sqz_session_options& o) {
  SQZ_RETURN_IF_ERROR(check_choice("device_type", o.device_type, kCuda));
  if (o.device_type != kCuda && o.device_id != 0) {
    return invalid(concat("options.device_id: found ", o.device_id, ", expected 0 on the CPU"));
  }
  const auto last_selector = sqz::kSelectorKinds - 1;
  SQZ_RETURN_IF_ERROR(check_choice("selector", o.selector, last_selector));
  SQZ_RETURN_IF_ERROR(check_choice("rule", o.rule, SQZ_RULE_THRESHOLD));
  sqz::SessionOptions options;
  options.selection.selector = static_cast<sqz::SelectorKind>(o.selector);
  options.selection.rule = static_cast<sqz::RuleKind>(o.rule);
  options.selection.levels = o.levels;
  options.selection.budget = o.budget;
  options.selection.keep = o.keep;
  options.selection.thresholds = o.thresholds;
  options.selection.dense_layers = o.dense_layers;
  if (o.layer_scale_count < 0 || (o.layer_scales == nullptr) != (o.layer_scale_count == 0)) {
    return invalid(concat("options.layer_scale_count: found ", o.layer_scale_count, ", expected ",
                          o.layer_scales == nullptr ? "0 without layer_scales"
                                                    : "that of the layers, with layer_scales"));
  }
  SQZ_RETURN_IF_ERROR(check_choice("uniform_layers", o.uniform_layers, 1));
  options.selection.layer_scales = {o.layer_scales, static_cast<size_t>(o.layer_scale_count)};
  options.selection.uniform_layers = o.uniform_layers != 0;
  options.block = o.block;
  if (o.max_request_tokens < 0) {
    return invalid(
        concat("options.max_request_tokens: found ", o.max_request_tokens, ", expected 0 or more"));
  }
  options.max_tokens = o.max_tokens;
  options.max_request_tokens = o.max_request_tokens;
  options.threads = o.threads;
  return options;
}

// A session on a GPU serves the KV heads that are there.
Status check_same_heads(const sqz::ServedIndex& asked, const sqz::ServedIndex& uploaded) {
  const int64_t a = asked.metadata().model.kv_heads, b = uploaded.metadata().model.kv_heads;
  if (asked.first_head == uploaded.first_head && a == b) return {};
  return invalid(concat("options.first_kv_head and kv_heads: found ", asked.first_head, " and ", a,
                        ", expected ", uploaded.first_head, " and ", b,
                        ", the KV heads that were uploaded"));
}

// Levels of the tree that a session uses, each with a threshold if there are any.
size_t used_levels(const sqz_session_options& options, const sqz_index& index) {
  const int levels = std::max(index.file->metadata().levels, 1);
  return static_cast<size_t>(options.levels > 0 ? std::min(options.levels, levels) : levels);
}

double ratio(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

namespace sqz::capi {

SlotTable::SlotTable(const sqz_session_options& in)
    : options_(in), max_contexts_(std::max(in.max_contexts, 1)) {
  if (in.layer_scales != nullptr) {
    layer_scales_.assign(in.layer_scales, in.layer_scales + in.layer_scale_count);
    options_.layer_scales = layer_scales_.data();
  }
}

Result<std::unique_ptr<SlotTable>> SlotTable::create(sqz_index& index,
                                                     const sqz_session_options& in) {
  static_assert(kMostInFront + 1 == SQZ_MOST_CONTEXTS);
  if (in.max_contexts < 0 || in.max_contexts > SQZ_MOST_CONTEXTS) {
    return invalid(concat("options.max_contexts: found ", in.max_contexts, ", expected 0 to ",
                          SQZ_MOST_CONTEXTS));
  }
  SQZ_RETURN_IF_ERROR(read_options(in).status());  // before arrays are copied
  std::unique_ptr<SlotTable> table(new SlotTable(in));
  SQZ_ASSIGN_OR_RETURN(std::unique_ptr<ServingSession> first, table->make(index));
  if (in.thresholds != nullptr) {
    table->thresholds_.assign(in.thresholds, in.thresholds + used_levels(in, index));
    table->options_.thresholds = table->thresholds_.data();
  }
  table->model_fingerprint_ = index.fingerprint;
  table->model_ = first->index().metadata().model;
  table->first_head_ = first->index().first_head;
  table->max_tokens_ = first->max_tokens();
  table->device_ = first->device();
  if (table->max_contexts_ > 1) {
    SQZ_ASSIGN_OR_RETURN(table->composition_, Composition::create(table->model_, table->max_tokens_,
                                                                  table->device_, table->pool_));
  }
  SQZ_RETURN_IF_ERROR(table->make_device_contexts(*first));
  table->slots_.push_back(std::move(first));
  return table;
}

Status SlotTable::make_device_contexts(const ServingSession& first) {
  constexpr int64_t kMost = 65536;
  if (options_.device_requests < 0 || options_.device_requests > kMost ||
      options_.device_tokens < 0) {
    return invalid(concat("options.device_requests and device_tokens: found ",
                          options_.device_requests, " and ", options_.device_tokens,
                          ", expected 0 to ", kMost, ", and 0 or more"));
  }
  if (options_.device_requests == 0) return {};
  if (device_ < 0) return invalid("options.device_requests: found some on the CPU, expected 0");
  const bool counts = options_.rule == SQZ_RULE_BUDGET && options_.thresholds == nullptr;
  const bool moves = composition_ != nullptr && composes(first.index().metadata());
  SQZ_ASSIGN_OR_RETURN(
      device_contexts_,
      cuda::create_context_table(first, {.slots = SQZ_MOST_SLOTS,
                                         .requests = options_.device_requests,
                                         .each = max_contexts_,
                                         .tokens = options_.device_tokens,
                                         .counts = counts,
                                         .shift = moves ? &composition_->shift() : nullptr}));
  return {};
}

Result<std::unique_ptr<ServingSession>> SlotTable::make(sqz_index& index) {
  sqz_session_options options = options_;
  // First, because other defaults follow from the selector.
  if (options.selector == SQZ_SELECTOR_AUTO) {
    options.selector = static_cast<int32_t>(fitting_selector(index.file->metadata()));
  }
  SQZ_ASSIGN_OR_RETURN(SessionOptions wanted, read_options(options));
  const bool cuda = options.device_type == kCuda;
  std::shared_ptr<const ServedIndex> served;
  Uploaded uploaded;
  {
    const std::lock_guard lock(index.mutex);
    SQZ_ASSIGN_OR_RETURN(served, serve(index));
    const auto at = index.uploaded.find(options.device_id);
    const auto* here = at == index.uploaded.end() ? nullptr : at->second.get();
    if (cuda && here != nullptr) uploaded = *here;
  }
  if (uploaded.heads != nullptr && options.first_kv_head == 0 && options.kv_heads == 0) {
    served = uploaded.heads;
  } else {
    SQZ_ASSIGN_OR_RETURN(
        served, range_of_heads(std::move(served), options.first_kv_head, options.kv_heads));
  }
  if (uploaded.heads != nullptr) SQZ_RETURN_IF_ERROR(check_same_heads(*served, *uploaded.heads));
  if (cuda) return cuda::create_session(std::move(served), std::move(uploaded.memory), wanted);
  wanted.pool = pool_;
  SQZ_ASSIGN_OR_RETURN(std::unique_ptr<Session> session,
                       Session::create(std::move(served), wanted));
  if (pool_ == nullptr) pool_ = session->pool();
  return std::unique_ptr<ServingSession>(std::move(session));
}

Status SlotTable::put(int64_t slot, sqz_index* index) {
  if (slot < 0 || slot >= SQZ_MOST_SLOTS) {
    return invalid(concat("slot: found ", slot, ", expected 0 to ", SQZ_MOST_SLOTS - 1));
  }
  std::unique_ptr<ServingSession> session;
  if (index != nullptr) {
    if (index->fingerprint != model_fingerprint_) {
      return {Code::kMismatch, concat(index->file->path(), ": found an index of another model, ",
                                      "expected that of the session's first index")};
    }
    if (options_.thresholds != nullptr && thresholds_.size() != used_levels(options_, *index)) {
      return invalid(concat(index->file->path(), ": found an index of other levels than the ",
                            thresholds_.size(), " thresholds of the session, expected as many"));
    }
    SQZ_ASSIGN_OR_RETURN(session, make(*index));
    if (session->index().first_head != first_head_ ||
        session->index().metadata().model.kv_heads != model_.kv_heads) {
      return invalid(concat(index->file->path(), ": found another range of KV heads on the GPU, ",
                            "expected that of the session's first index"));
    }
  }
  const std::lock_guard lock(mutex);
  const auto place = static_cast<size_t>(slot);
  if (place >= slots_.size()) {
    if (index == nullptr) return {};
    slots_.resize(place + 1);
  }
  if (device_contexts_ != nullptr) {
    SQZ_RETURN_IF_ERROR(device_contexts_->put(slot, session.get()));
  }
  slots_[place].swap(session);
  return {};
}

ServingSession* SlotTable::find(int64_t slot) const {
  return slot >= 0 && slot < std::ssize(slots_) ? slots_[static_cast<size_t>(slot)].get() : nullptr;
}

Status SlotTable::clear_totals() {
  for (const auto& session : slots_) {
    if (session != nullptr) SQZ_RETURN_IF_ERROR(session->clear_totals());
  }
  return {};
}

}  // namespace sqz::capi

extern "C" {

const char* sqz_selector_name(sqz_selector selector) {
  const int number = sqz::capi::enum_number(selector);
  if (number < 0 || number >= sqz::kSelectorKinds) return nullptr;
  return sqz::selector_name(static_cast<sqz::SelectorKind>(number));
}

sqz_status sqz_session_create(sqz_index* index, const sqz_session_options* options,
                              sqz_session** session) {
  return fence([&]() -> Status {
    if (session == nullptr) return invalid("session: found null, expected where to put the handle");
    *session = nullptr;
    if (index == nullptr) return invalid("index: found null");
    sqz_session_options wanted;
    SQZ_RETURN_IF_ERROR(sqz::capi::read_struct(options, "options", wanted));
    auto handle = std::make_unique<sqz_session>();
    SQZ_ASSIGN_OR_RETURN(auto made, sqz::capi::SlotTable::create(*index, wanted));
    handle->owned = sqz::capi::OfThisProcess(std::move(made));
    *session = handle.release();
    return {};
  });
}

void sqz_session_destroy(sqz_session* session) {
  delete session;
}

sqz_status sqz_session_put(sqz_session* session, int64_t slot, sqz_index* index) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(sqz::capi::SlotTable* const table, sqz::capi::session_here(session));
    return table->put(slot, index);
  });
}

sqz_status sqz_session_stats(const sqz_session* session, int64_t slot, int64_t layer,
                             sqz_stats* stats) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(sqz::capi::SlotTable* const table, sqz::capi::session_here(session));
    const std::lock_guard lock(table->mutex);
    sqz::ServingSession* const here = table->find(slot);
    if (here == nullptr) {
      return invalid(concat("slot: found slot ", slot, ", expected one that has an index"));
    }
    sqz::ServingSession& s = *here;
    const int64_t layers = s.index().metadata().model.layers;
    if (layer < -1 || layer >= layers) {
      return invalid(concat("layer: found ", layer, ", expected -1 to ", layers - 1));
    }
    SQZ_ASSIGN_OR_RETURN(const sqz::Counters sum, s.totals(layer));
    sqz_stats out = {};
    out.dense_fallback = s.plan().fallback ? 1 : 0;
    out.asked_budget = s.plan().asked_budget;
    out.delivered_budget = ratio(sum.bytes_read, sum.bytes_dense);
    out.asked_keep = s.plan().asked_keep;
    out.delivered_keep = ratio(sum.keys_read, sum.keys_possible);
    out.selections = sum.selections;
    out.keys_read = sum.keys_read;
    out.keys_possible = sum.keys_possible;
    out.bytes_read = sum.bytes_read;
    out.bytes_dense = sum.bytes_dense;
    out.least_budget = s.plan().least_budget;
    out.route = s.route();
    return sqz::capi::write_struct(out, "stats", stats);
  });
}

sqz_status sqz_session_reset_stats(sqz_session* session) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(sqz::capi::SlotTable* const table, sqz::capi::session_here(session));
    const std::lock_guard lock(table->mutex);
    return table->clear_totals();
  });
}

}  // extern "C"
