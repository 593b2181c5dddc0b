#include <algorithm>

#include "formats/sqz_metadata.h"
#include "libindex/builder.h"
#include "libindex/capi/json.h"
#include "libindex/describe.h"
#include "libruntime/capi/handles.h"

namespace {

using sqz::BuildOptions;
using sqz::Code;
using sqz::concat;
using sqz::DType;
using sqz::JsonText;
using sqz::Result;
using sqz::Status;
using sqz::capi::fence;
using sqz::capi::invalid;
using sqz::capi::Options;

}  // namespace

struct sqz_build {
  std::string path;
  sqz::ModelDescription model;
  int64_t tokens = 0;
  sqz::capi::OfThisProcess<std::unique_ptr<sqz::IndexBuilder>> owned;
};

namespace {

struct Request {
  BuildOptions build;
  std::string tokenizer_hash;
  bool replace = false, dry_run = false;
};

// For each layer null or {name: [dtype, [shape]]}.
Result<std::vector<std::vector<sqz::StateTensor>>> state_from_json(const sqz::JsonValue& json,
                                                                   const std::string& label) {
  std::vector<std::vector<sqz::StateTensor>> out(json.size());
  for (size_t l = 0; l < json.size(); ++l) {
    if (!json[l].is_object() && !json[l].is_null()) {
      return sqz::unexpected(json[l], concat(label, "[", l, "]"), "an object or null");
    }
    for (const sqz::JsonValue& tensor : json[l].items()) {
      const bool pair = tensor.is_array() && tensor.size() == 2 && tensor[1].is_array();
      const auto dtype = pair ? sqz::dtype_from_name(tensor[0].string()) : std::nullopt;
      sqz::StateTensor& one = out[l].emplace_back();
      one.name = tensor.key();
      one.dtype = dtype.value_or(DType::kF32);
      for (size_t i = 0; dtype && i < tensor[1].size(); ++i) {
        one.shape.push_back(tensor[1][i].integer(0, INT64_MAX).value_or(-1));
      }
      if (dtype && std::find(one.shape.begin(), one.shape.end(), -1) == one.shape.end()) continue;
      return sqz::unexpected(tensor, concat(label, "[", l, "].", one.name),
                             "[dtype, [dimensions]], such as [\"F32\", [1, 8, 128]]");
    }
  }
  return out;
}

Result<Request> read_request(const char* text) {
  SQZ_ASSIGN_OR_RETURN(
      Options in,
      Options::parse(
          text,
          {"sink",        "tail",       "partition",      "page_size", "levels",  "level_fractions",
           "coarse_keep", "iterations", "rows",           "layers16",  "seed",    "threads",
           "engine",      "gpu",        "tokenizer_hash", "chat",      "replace", "dry_run",
           "after",       "state"}));
  Request out;
  BuildOptions& build = out.build;
  build.sink = in.integer("sink", 0, INT32_MAX, build.sink);
  build.tail = in.integer("tail", 1, INT32_MAX, build.tail);
  if (in.choice("partition", {"kmeans", "pages"}) == "pages") {
    build.partition = sqz::Partition::kPages;
    for (const char* name : {"levels", "level_fractions", "coarse_keep", "iterations", "engine"}) {
      if (in.has(name))
        return invalid(concat("options: ", name, ": found it, expected none with pages"));
    }
  } else if (in.has("page_size")) {
    return invalid("options: page_size: found it, expected partition pages with it");
  }
  build.page_size = in.integer("page_size", 1, sqz::kMaxPageSize, build.page_size);
  if (in.has("levels")) {
    if (in.has("level_fractions")) {
      return invalid("options: found levels and level_fractions, expected one of them");
    }
    build.level_fractions =
        sqz::default_level_fractions(static_cast<int>(in.integer("levels", 1, sqz::kMaxLevels)));
  }
  if (in.has("level_fractions")) build.level_fractions = in.numbers("level_fractions", 1e-9, 1);
  build.coarse_keep = in.number("coarse_keep", 1e-6, 1, build.coarse_keep);
  build.iterations = static_cast<int>(in.integer("iterations", 1, 10000, build.iterations));
  const std::string rows = in.choice("rows", {"bf16", "f16", "q8"});
  build.dtype = rows == "f16" ? DType::kF16 : DType::kBF16;
  build.compress = in.compress(rows);
  build.seed = static_cast<uint64_t>(in.integer("seed", 0, INT64_MAX, 0));
  build.threads = in.threads();
  build.engine = in.choice("engine", {"auto", "faiss", "cuda"});
  build.gpu = static_cast<int>(in.integer("gpu", 0, INT32_MAX, 0));
  out.tokenizer_hash = in.text("tokenizer_hash", "");
  if (const sqz::JsonValue* chat = in.find("chat")) {
    if (!chat->is_object()) in.complain("chat", "an object");
    build.chat = JsonText(*chat);
  }
  if (in.has("after")) in.JsonFields::parse("after", build.after, sqz::context_ids_from_json);
  if (in.has("state") && in.array("state") != nullptr)
    in.JsonFields::parse("state", build.state, state_from_json);
  out.replace = in.boolean("replace", false);
  out.dry_run = in.boolean("dry_run", false);
  SQZ_RETURN_IF_ERROR(in.status());
  return out;
}

Result<sqz::ModelDescription> read_model(const char* text) {
  if (text == nullptr) return invalid("model: found null, expected its description as JSON");
  const auto read = [&]() -> Result<sqz::ModelDescription> {
    SQZ_ASSIGN_OR_RETURN(const sqz::JsonDocument json, sqz::parse_json_object(text, "model"));
    return sqz::model_from_json(json.root(), "model");
  };
  auto out = read();
  if (!out.ok()) return invalid(out.status().message());
  return out;
}

Status check_ids(std::span<const int32_t> ids, int64_t vocabulary) {
  const int64_t end = vocabulary == 0 ? int64_t{INT32_MAX} + 1 : vocabulary;
  const auto bad =
      std::find_if(ids.begin(), ids.end(), [&](int32_t id) { return id < 0 || id >= end; });
  if (bad == ids.end()) return {};
  return invalid(concat("tokens[", bad - ids.begin(), "]: found ", *bad, ", expected 0 to ",
                        end - 1, ", the vocabulary of the model"));
}

JsonText plan_json(const sqz::BuildPlan& plan, int64_t tail, bool takes_gpu) {
  return {{"bytes", plan.bytes},
          {"tail", tail},
          {"peak_memory", plan.peak_memory},
          {"gpu_memory", plan.gpu_memory},
          {"clusters", plan.clusters},
          {"pages", plan.pages},
          {"takes_gpu", takes_gpu}};
}

// kUnsupported in a child of the process that made it.
Result<sqz::IndexBuilder*> builder_here(const sqz_build* build) {
  if (build == nullptr) return invalid("build: found null");
  if (const auto* builder = build->owned.get()) return builder->get();
  return Status(Code::kUnsupported, concat("build: found one of process ", build->owned.process(),
                                           ", expected one of this process"));
}

}  // namespace

extern "C" {

sqz_status sqz_build_create(const char* path, const char* model, const int32_t* tokens,
                            int64_t count, const char* options, sqz_build** build) {
  return fence([&]() -> Status {
    if (build == nullptr) return invalid("build: found null, expected where to put the handle");
    *build = nullptr;
    if (path == nullptr || *path == '\0') return invalid("path: found none, expected a file name");
    if (tokens == nullptr || count < 1) return invalid("tokens: found none, expected at least one");
    auto handle = std::make_unique<sqz_build>();
    handle->path = path;
    handle->tokens = count;
    SQZ_ASSIGN_OR_RETURN(handle->model, read_model(model));
    SQZ_ASSIGN_OR_RETURN(const Request request, read_request(options));
    const std::span<const int32_t> ids(tokens, static_cast<size_t>(count));
    SQZ_RETURN_IF_ERROR(check_ids(ids, handle->model.vocab_size));
    SQZ_ASSIGN_OR_RETURN(
        auto builder,
        sqz::IndexBuilder::prepare(handle->model, ids, request.tokenizer_hash, request.build));
    const bool takes_gpu = builder->takes_device_rows();
    SQZ_ASSIGN_OR_RETURN(const sqz::BuildPlan plan, builder->plan(takes_gpu));
    if (!request.dry_run) {
      SQZ_RETURN_IF_ERROR(builder->begin(sqz::Env::posix(), handle->path, request.replace));
    }
    handle->owned =
        sqz::capi::OfThisProcess<std::unique_ptr<sqz::IndexBuilder>>(std::move(builder));
    sqz::capi::set_result(plan_json(plan, request.build.tail, takes_gpu));
    *build = handle.release();
    return {};
  });
}

sqz_status sqz_build_add_layer(sqz_build* build, const sqz_tensor* keys, const sqz_tensor* values,
                               const sqz_tensor* queries, const sqz_progress* progress) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(sqz::IndexBuilder * builder, builder_here(build));
    const int64_t layer = builder->next_layer();
    if (layer == build->model.layers) {
      return invalid(concat("layer: found one more, expected the ", layer, " of the model"));
    }
    const sqz::LayerGeometry m = build->model.layer(layer);
    const bool on_gpu = keys != nullptr && keys->device_type == sqz::capi::kCuda;
    if (on_gpu && !builder->takes_device_rows()) {
      return invalid(
          "keys: found on CUDA, expected on the CPU: no engine on a GPU builds this index");
    }
    const int device = on_gpu ? keys->device_id : -1;
    // The builder checks how many tokens a recent layer has.
    int64_t tokens = m.kind == sqz::LayerKind::kRecent ? -1 : build->tokens;
    SQZ_ASSIGN_OR_RETURN(const auto k, sqz::capi::check_tensor(
                                           keys, "keys", {m.kv_heads, tokens, m.head_dim}, device));
    tokens = keys->shape[1];
    SQZ_ASSIGN_OR_RETURN(
        const auto v,
        sqz::capi::check_tensor(values, "values", {m.kv_heads, tokens, m.value_dim}, device));
    if (on_gpu && k.dtype != v.dtype) {
      return invalid(concat("values: dtype: found ", sqz::dtype_name(v.dtype), ", expected ",
                            sqz::dtype_name(k.dtype), ", that of keys"));
    }
    std::vector<float> key_room, value_room, query_room;
    sqz::LayerInput input;
    if (queries != nullptr) {
      SQZ_ASSIGN_OR_RETURN(const auto q, sqz::capi::check_tensor(
                                             queries, "queries",
                                             {m.query_heads, builder->options().tail, m.head_dim}));
      input.queries = sqz::capi::floats_of(q, query_room);
    }
    const sqz::DeviceRows rows{k.data, v.data, k.dtype, tokens * m.head_dim, device};
    if (on_gpu) {
      input.device = &rows;
    } else {
      input.keys = sqz::capi::floats_of(k, key_room);
      input.values = sqz::capi::floats_of(v, value_room);
    }
    const auto tell = sqz::capi::teller(progress);
    SQZ_RETURN_IF_ERROR(builder->add_layer(layer, input, [&](int64_t done, int64_t total) {
      tell(static_cast<double>(done) / static_cast<double>(total));
    }));
    return {};
  });
}

sqz_status sqz_build_add_state(sqz_build* build, int64_t layer, const char* name,
                               const sqz_tensor* tensor) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(sqz::IndexBuilder * builder, builder_here(build));
    if (name == nullptr) return invalid("name: found null, expected that of a state tensor");
    SQZ_ASSIGN_OR_RETURN(sqz::StateTensor state, sqz::capi::check_state(tensor, name));
    return builder->add_state(layer, state);
  });
}

sqz_status sqz_build_finish(sqz_build* build) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(sqz::IndexBuilder * builder, builder_here(build));
    SQZ_ASSIGN_OR_RETURN(const sqz::BuildReport report, builder->finish());
    sqz::capi::set_result(sqz::describe_build(build->path, report));
    return {};
  });
}

void sqz_build_destroy(sqz_build* build) {
  delete build;
}

}  // extern "C"
