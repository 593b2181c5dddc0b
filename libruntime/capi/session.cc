#include <algorithm>

#include "libruntime/attention/state.h"
#include "libruntime/capi/fence.h"
#include "libruntime/capi/handles.h"
#include "libruntime/capi/tensor.h"

namespace {

using sqz::Code;
using sqz::concat;
using sqz::Result;
using sqz::Status;
using sqz::capi::fence;
using sqz::capi::TensorView;

constexpr int32_t kCuda = 2;  // DLDeviceType

Status invalid(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}

Status check_choice(const char* field, int32_t found, int32_t last) {
  if (found >= 0 && found <= last) return {};
  return invalid(concat("options.", field, ": found ", found, ", expected 0 to ", last));
}

Result<sqz::SessionOptions> read_options(const sqz_session_options& o) {
  SQZ_RETURN_IF_ERROR(check_choice("device_type", o.device_type, kCuda));
  if (o.device_type != kCuda && o.device_id != 0) {
    return invalid(concat("options.device_id: found ", o.device_id, ", expected 0 on the CPU"));
  }
  const auto last_selector = static_cast<int32_t>(sqz::selector_types().size()) - 1;
  if (o.selector != SQZ_SELECTOR_AUTO) {
    SQZ_RETURN_IF_ERROR(check_choice("selector", o.selector, last_selector));
  }
  SQZ_RETURN_IF_ERROR(check_choice("rule", o.rule, SQZ_RULE_BUDGET));
  SQZ_RETURN_IF_ERROR(check_choice("group", o.group, SQZ_GROUP_ANY));
  SQZ_RETURN_IF_ERROR(check_choice("residual", o.residual, SQZ_RESIDUAL_ESTIMATE));
  sqz::SessionOptions options;
  options.selection.selector = static_cast<sqz::SelectorKind>(o.selector);
  options.selection.rule = static_cast<sqz::RuleKind>(o.rule);
  options.selection.group = o.group;
  options.selection.estimate = o.residual == SQZ_RESIDUAL_ESTIMATE;
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

Result<std::unique_ptr<sqz::ServingSession>> create_session(sqz_index& index,
                                                            const sqz_session_options& options) {
  SQZ_ASSIGN_OR_RETURN(sqz::SessionOptions wanted, read_options(options));
  std::shared_ptr<const sqz::ServedIndex> served;
  std::shared_ptr<sqz::cuda::DeviceIndex> uploaded;
  {
    const std::lock_guard lock(index.mutex);
    SQZ_ASSIGN_OR_RETURN(served, sqz::capi::serve(index));
    const auto at = index.uploaded.find(options.device_id);
    if (at != index.uploaded.end()) uploaded = at->second;
  }
  if (options.selector == SQZ_SELECTOR_AUTO) {
    wanted.selection.selector = sqz::fitting_selector(served->metadata());
  }
  if (options.device_type == kCuda) {
    return sqz::cuda::create_session(std::move(served), std::move(uploaded), wanted);
  }
  SQZ_ASSIGN_OR_RETURN(std::unique_ptr<sqz::ServingSession> session,
                       sqz::Session::create(std::move(served), wanted));
  return session;
}

Status check_requests(const sqz_attend_args& args, int64_t tokens) {
  if (args.indptr == nullptr) {
    if (args.requests >= 0 && args.requests <= 1) return {};
    return invalid(concat("indptr: found null, expected ", args.requests, " + 1 offsets"));
  }
  if (args.requests < 1) {
    return invalid(concat("requests: found ", args.requests, ", expected at least 1 with indptr"));
  }
  if (args.indptr[0] != 0) {
    return invalid(concat("indptr[0]: found ", args.indptr[0], ", expected 0"));
  }
  for (int64_t i = 1; i <= args.requests; ++i) {
    if (args.indptr[i] < args.indptr[i - 1] || args.indptr[i] > tokens) {
      return invalid(concat("indptr[", i, "]: found ", args.indptr[i], ", expected ",
                            args.indptr[i - 1], " to ", tokens));
    }
  }
  if (args.indptr[args.requests] != tokens) {
    return invalid(concat("indptr[", args.requests, "]: found ", args.indptr[args.requests],
                          ", expected ", tokens, ", the tokens of q"));
  }
  return {};
}

Status check_request_tokens(const sqz::AttendCall& call, int64_t most) {
  for (int64_t r = 0; r < std::max<int64_t>(call.requests, 1); ++r) {
    const int64_t tokens =
        call.indptr == nullptr ? call.tokens : call.indptr[r + 1] - call.indptr[r];
    if (tokens <= most) continue;
    return invalid(concat("q: found ", tokens, " tokens of request ", r, ", expected at most ",
                          most, ", the session's max_request_tokens"));
  }
  return {};
}

Result<sqz::EngineCache> read_cache(const sqz_kv_cache* in, int64_t head_dim) {
  sqz_kv_cache cache;
  SQZ_RETURN_IF_ERROR(sqz::capi::read_struct(in, "args.cache", cache));
  const auto refuse = [](const char* field, int64_t found, const char* expected) {
    return invalid(concat("args.cache.", field, ": found ", found, ", expected ", expected));
  };
  if (cache.keys == nullptr || cache.values == nullptr) {
    return invalid("args.cache: found null keys or values, expected both");
  }
  const bool paged = cache.page_size != 0;
  if (cache.page_size < 0 || (cache.page_size & (cache.page_size - 1)) != 0) {
    return refuse("page_size", cache.page_size, "0 or a power of two");
  }
  if (paged && (cache.block_table == nullptr || cache.pages < 1)) {
    return refuse("pages", cache.pages, "at least 1, and a block_table, with a page_size");
  }
  if (cache.token_stride < head_dim || cache.token_stride % 8 != 0) {
    return refuse("token_stride", cache.token_stride, "a multiple of 8 not below head_dim");
  }
  if (cache.head_stride < 0 || cache.head_stride % 8 != 0) {
    return refuse("head_stride", cache.head_stride, "a multiple of 8");
  }
  if (paged && (cache.page_stride < 0 || cache.page_stride % 8 != 0)) {
    return refuse("page_stride", cache.page_stride, "a multiple of 8");
  }
  return sqz::EngineCache{.keys = cache.keys,
                          .values = cache.values,
                          .token_stride = cache.token_stride,
                          .head_stride = cache.head_stride,
                          .page_stride = cache.page_stride,
                          .page_size = cache.page_size,
                          .block_table = cache.block_table,
                          .pages = cache.pages};
}

// A checked call with what it points to.
struct Call {
  sqz::AttendCall call;
  sqz::EngineCache cache;
};

// With `outputs`, out and lse are checked, too. `call` is borrowed by what is returned.
Status read_call(const sqz::ServingSession& session, const sqz_attend_args* in, bool outputs,
                 Call& checked) {
  sqz_attend_args args;
  SQZ_RETURN_IF_ERROR(sqz::capi::read_struct(in, "args", args));
  const int device = session.device();
  const sqz::ModelDescription& model = session.index().metadata().model;
  if (args.layer < 0 || args.layer >= model.layers) {
    return invalid(concat("args.layer: found ", args.layer, ", expected 0 to ", model.layers - 1));
  }
  if (device < 0 && args.stream != nullptr)
    return invalid("args.stream: found a stream, expected null on the CPU");
  if (device < 0 && args.cache != nullptr)
    return invalid("args.cache: found a cache, expected null on the CPU");
  SQZ_ASSIGN_OR_RETURN(
      const TensorView q,
      sqz::capi::check_tensor(args.q, "q", {-1, model.query_heads, model.head_dim}, device));
  if (q.first_dim > session.max_tokens()) {
    return invalid(concat("q: found ", q.first_dim, " tokens, expected at most ",
                          session.max_tokens(), ", the session's max_tokens"));
  }
  sqz::AttendCall& call = checked.call;
  call.layer = args.layer;
  call.stream = args.stream;
  call.tokens = q.first_dim;
  call.dtype = q.dtype;
  call.q = q.data;
  call.positions = args.positions;
  call.indptr = args.indptr;
  call.requests = args.requests;
  SQZ_RETURN_IF_ERROR(check_requests(args, call.tokens));
  SQZ_RETURN_IF_ERROR(check_request_tokens(call, session.max_request_tokens()));
  if (args.q_before_rope != nullptr) {
    SQZ_ASSIGN_OR_RETURN(
        const TensorView before,
        sqz::capi::check_tensor(args.q_before_rope, "q_before_rope",
                                {q.first_dim, model.query_heads, model.head_dim}, device));
    if (before.dtype != q.dtype) {
      return invalid("q_before_rope: found another dtype, expected that of q");
    }
    call.q_before_rope = before.data;
  }
  if (args.cache != nullptr) {
    SQZ_ASSIGN_OR_RETURN(checked.cache, read_cache(args.cache, model.head_dim));
    call.cache = &checked.cache;
  }
  if (!outputs) return {};
  SQZ_ASSIGN_OR_RETURN(
      const TensorView out,
      sqz::capi::check_tensor(args.out, "out", {q.first_dim, model.query_heads, model.head_dim},
                              device));
  SQZ_ASSIGN_OR_RETURN(
      const TensorView lse,
      sqz::capi::check_tensor(args.lse, "lse", {q.first_dim, model.query_heads}, device));
  if (out.dtype != q.dtype) return invalid("out: found another dtype, expected that of q");
  if (lse.dtype != sqz::DType::kF32) return invalid("lse: found another dtype, expected f32");
  SQZ_RETURN_IF_ERROR(sqz::capi::check_disjoint(q, "q", out, "out"));
  SQZ_RETURN_IF_ERROR(sqz::capi::check_disjoint(q, "q", lse, "lse"));
  SQZ_RETURN_IF_ERROR(sqz::capi::check_disjoint(out, "out", lse, "lse"));
  call.out = out.data;
  call.lse = static_cast<float*>(lse.data);
  return {};
}

double ratio(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

// The ABI's numbers are the places in the list of selectors.
static_assert(static_cast<int>(sqz::SelectorKind::kSqueezed) == SQZ_SELECTOR_SQUEEZED);
static_assert(static_cast<int>(sqz::SelectorKind::kDense) == SQZ_SELECTOR_DENSE);
static_assert(static_cast<int>(sqz::SelectorKind::kQuest) == SQZ_SELECTOR_QUEST);
static_assert(static_cast<int>(sqz::SelectorKind::kIdeal) == SQZ_SELECTOR_IDEAL);
static_assert(static_cast<int>(sqz::SelectorKind::kStream) == SQZ_SELECTOR_STREAM);
static_assert(static_cast<int>(sqz::SelectorKind::kWindow) == SQZ_SELECTOR_WINDOW);
static_assert(static_cast<int>(sqz::SelectorKind::kH2o) == SQZ_SELECTOR_H2O);
static_assert(static_cast<int>(sqz::SelectorKind::kSaap) == SQZ_SELECTOR_SAAP);
static_assert(static_cast<int>(sqz::SelectorKind::kKmeans) == SQZ_SELECTOR_KMEANS);

extern "C" {

const char* sqz_selector_name(sqz_selector selector) {
  const int number = sqz::capi::enum_number(selector);
  const auto types = sqz::selector_types();
  return number < 0 || number >= std::ssize(types) ? nullptr : types[number].name;
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
    SQZ_ASSIGN_OR_RETURN(handle->session, create_session(*index, wanted));
    *session = handle.release();
    return {};
  });
}

void sqz_session_destroy(sqz_session* session) {
  delete session;
}

sqz_status sqz_attend(sqz_session* session, const sqz_attend_args* args) {
  return fence([&]() -> Status {
    if (session == nullptr) return invalid("session: found null");
    Call checked;
    SQZ_RETURN_IF_ERROR(read_call(*session->session, args, true, checked));
    return session->session->attend(checked.call);
  });
}

sqz_status sqz_select(sqz_session* session, const sqz_attend_args* args, sqz_run* runs,
                      int64_t capacity, int64_t* indptr, int64_t* count) {
  return fence([&]() -> Status {
    if (session == nullptr) return invalid("session: found null");
    if (indptr == nullptr || count == nullptr) return invalid("indptr or count: found null");
    if (capacity < 0 || (capacity > 0 && runs == nullptr)) {
      return invalid(concat("runs: found null or capacity ", capacity, ", expected room for runs"));
    }
    Call checked;
    SQZ_RETURN_IF_ERROR(read_call(*session->session, args, false, checked));
    SQZ_ASSIGN_OR_RETURN(const auto heads, session->session->select(checked.call));
    int64_t need = 0;
    for (const sqz::HeadSelection& head : heads) need += head.run_count;
    *count = need;
    if (need > capacity) {
      return invalid(concat("capacity: found ", capacity, ", expected at least ", need));
    }
    indptr[0] = 0;
    for (size_t h = 0; h < heads.size(); ++h) {
      indptr[h + 1] = indptr[h] + heads[h].run_count;
      std::transform(heads[h].runs.begin(), heads[h].runs.begin() + heads[h].run_count,
                     runs + indptr[h], [](const sqz::KeyRun& run) {
                       return sqz_run{run.first, run.length};
                     });
    }
    return {};
  });
}

sqz_status sqz_merge_states(sqz_tensor* out_a, sqz_tensor* lse_a, const sqz_tensor* out_b,
                            const sqz_tensor* lse_b) {
  return sqz_merge_states_on(out_a, lse_a, out_b, lse_b, nullptr);
}

sqz_status sqz_merge_states_on(sqz_tensor* out_a, sqz_tensor* lse_a, const sqz_tensor* out_b,
                               const sqz_tensor* lse_b, void* stream) {
  return fence([&]() -> Status {
    using sqz::capi::check_tensor;
    const bool cuda = out_a != nullptr && out_a->device_type == kCuda;
    const int device = cuda ? out_a->device_id : -1;
    if (!cuda && stream != nullptr) {
      return invalid("stream: found a stream, expected null on the CPU");
    }
    SQZ_ASSIGN_OR_RETURN(const TensorView a, check_tensor(out_a, "out_a", {-1, -1, -1}, device));
    const int64_t* shape = out_a->shape;
    SQZ_ASSIGN_OR_RETURN(const TensorView b,
                         check_tensor(out_b, "out_b", {shape[0], shape[1], shape[2]}, device));
    SQZ_ASSIGN_OR_RETURN(const TensorView la,
                         check_tensor(lse_a, "lse_a", {shape[0], shape[1]}, device));
    SQZ_ASSIGN_OR_RETURN(const TensorView lb,
                         check_tensor(lse_b, "lse_b", {shape[0], shape[1]}, device));
    if (a.dtype != b.dtype) return invalid("out_b: found another dtype, expected that of out_a");
    if (la.dtype != sqz::DType::kF32 || lb.dtype != sqz::DType::kF32) {
      return invalid("lse_a or lse_b: found another dtype, expected f32");
    }
    if (cuda) {
      return sqz::cuda::merge_states(device, a.dtype, shape[0] * shape[1], shape[2], a.data,
                                     static_cast<float*>(la.data), b.data,
                                     static_cast<const float*>(lb.data), stream);
    }
    const bool finite =
        sqz::merge_rows(a.dtype, shape[0] * shape[1], shape[2], a.data,
                        static_cast<float*>(la.data), b.data, static_cast<const float*>(lb.data));
    if (finite) return {};
    return Status(Code::kNumeric, "lse_a or lse_b: found NaN or +infinity, expected less");
  });
}

sqz_status sqz_session_stats(const sqz_session* session, int64_t layer, sqz_stats* stats) {
  return fence([&]() -> Status {
    if (session == nullptr) return invalid("session: found null");
    sqz::ServingSession& s = *session->session;
    const int64_t layers = s.index().metadata().model.layers;
    if (layer < -1 || layer >= layers) {
      return invalid(concat("layer: found ", layer, ", expected -1 to ", layers - 1));
    }
    sqz::Counters sum;
    for (int64_t l = std::max<int64_t>(layer, 0); l < (layer < 0 ? layers : layer + 1); ++l) {
      SQZ_ASSIGN_OR_RETURN(const sqz::Counters counters, s.totals(l));
      sum.add(counters);
    }
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
    return sqz::capi::write_struct(out, "stats", stats);
  });
}

sqz_status sqz_session_reset_stats(sqz_session* session) {
  return fence([&]() -> Status {
    if (session == nullptr) return invalid("session: found null");
    return session->session->clear_totals();
  });
}

}  // extern "C"
