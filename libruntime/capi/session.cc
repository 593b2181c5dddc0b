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

Result<std::unique_ptr<sqz::ServingSession>> create_session(sqz_index& index,
                                                            sqz_session_options options) {
  // First, because other defaults follow from the selector.
  if (options.selector == SQZ_SELECTOR_AUTO) {
    options.selector = static_cast<int32_t>(sqz::fitting_selector(index.file->metadata()));
  }
  SQZ_ASSIGN_OR_RETURN(sqz::SessionOptions wanted, read_options(options));
  const bool cuda = options.device_type == kCuda;
  std::shared_ptr<const sqz::ServedIndex> served;
  sqz::capi::Uploaded uploaded;
  {
    const std::lock_guard lock(index.mutex);
    SQZ_ASSIGN_OR_RETURN(served, sqz::capi::serve(index));
    const auto at = index.uploaded.find(options.device_id);
    const auto* here = at == index.uploaded.end() ? nullptr : at->second.get();
    if (cuda && here != nullptr) uploaded = *here;
  }
  if (uploaded.heads != nullptr && options.first_kv_head == 0 && options.kv_heads == 0) {
    served = uploaded.heads;
  } else {
    SQZ_ASSIGN_OR_RETURN(
        served, sqz::range_of_heads(std::move(served), options.first_kv_head, options.kv_heads));
  }
  if (uploaded.heads != nullptr) SQZ_RETURN_IF_ERROR(check_same_heads(*served, *uploaded.heads));
  if (cuda) {
    return sqz::cuda::create_session(std::move(served), std::move(uploaded.memory), wanted);
  }
  SQZ_ASSIGN_OR_RETURN(std::unique_ptr<sqz::ServingSession> session,
                       sqz::Session::create(std::move(served), wanted));
  return session;
}

double ratio(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

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
    SQZ_ASSIGN_OR_RETURN(auto made, create_session(*index, wanted));
    handle->owned = sqz::capi::OfThisProcess(std::move(made));
    handle->model_fingerprint = index->fingerprint;
    *session = handle.release();
    return {};
  });
}

void sqz_session_destroy(sqz_session* session) {
  delete session;
}

sqz_status sqz_session_stats(const sqz_session* session, int64_t layer, sqz_stats* stats) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(sqz::ServingSession* const here, sqz::capi::session_here(session));
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
    SQZ_ASSIGN_OR_RETURN(sqz::ServingSession* const here, sqz::capi::session_here(session));
    return here->clear_totals();
  });
}

}  // extern "C"
