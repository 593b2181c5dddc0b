#include "formats/layers_file.h"

#include <limits>

#include "formats/json_fields.h"
#include "formats/metadata_strings.h"
#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

constexpr const char* kFormat = "sqz-layers";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxCount = int64_t{UINT32_MAX};  // of texts, windows and tokens
constexpr int64_t kMinLayers = 3;                   // one a group
constexpr uint64_t kMaxBytes = uint64_t{1} << 26;

Status check_layers(const LayersFile& f, const Refuse& refuse) {
  if (f.model.layers < kMinLayers) {
    return refuse("model: layers", f.model.layers, concat("at least ", kMinLayers));
  }
  SQZ_RETURN_IF_ERROR(check_tokenizer_hash(refuse, f.tokenizer_hash));
  if (f.allocation != kAllocationGroups && f.allocation != kAllocationMeasured) {
    return refuse("allocation", in_quotes(f.allocation),
                  concat(in_quotes(kAllocationGroups), " or ", in_quotes(kAllocationMeasured)));
  }
  for (const auto& [field, size] :
       {std::pair("cosine_error", f.cosine_error.size()), {"group", f.group.size()}}) {
    if (std::cmp_equal(size, f.model.layers)) continue;
    return refuse(field, concat(size, " values"), concat(f.model.layers, ", one a layer"));
  }
  return check_budgets(f, f.model.layers, refuse);
}

}  // namespace

JsonMembers to_json(const LayersFile& f) {
  JsonMembers out = {{"format", kFormat},
                     {"format_version", kVersion},
                     {"producer", f.producer},
                     {"model", to_json(f.model)},
                     {"tokenizer_hash", f.tokenizer_hash},
                     {"texts", f.texts},
                     {"windows", f.windows},
                     {"window", f.window},
                     {"tokens", f.tokens},
                     {"allocation", f.allocation},
                     {"context", f.context},
                     {"uniform_budget", f.uniform_budget},
                     {"p", f.p},
                     {"budget", f.budget},
                     {"cosine", f.cosine},
                     {"cosine_error", f.cosine_error},
                     {"group", f.group}};
  if (!f.measured.is_null()) out["measured"] = f.measured;
  return out;
}

Status write_layers_file(Env& env, const std::string& path, bool replace,
                         const LayersFile& layers) {
  SQZ_RETURN_IF_ERROR(check_layers(layers, {path, Code::kInvalidArgument}));
  const std::string text = JsonText(to_json(layers)).str() + "\n";
  SQZ_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(env, path, replace));
  SQZ_RETURN_IF_ERROR(file.file().write(0, std::as_bytes(std::span(text))));
  return file.commit();
}

Result<LayersFile> read_layers_file(const std::string& path, Env& env) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(env, path, kMaxBytes));
  const auto json = parse_json_object(text, path);
  if (!json.ok()) {
    return Status(json.status().code(),
                  concat(json.status().message(), "; profile the layers with sqz-profile-layers"));
  }
  JsonFields fields(json->root(), path);
  if (fields.text("format") != kFormat) fields.complain("format", in_quotes(kFormat));
  if (fields.integer("format_version", 1, INT64_MAX) > kVersion) {
    fields.complain("format_version", concat("at most ", kVersion), Code::kUnsupported);
  }
  LayersFile out;
  out.producer = fields.text("producer");
  out.tokenizer_hash = fields.text("tokenizer_hash");
  out.texts = fields.integer("texts", 1, kMaxCount);
  out.windows = fields.integer("windows", 1, kMaxCount);
  out.window = fields.integer("window", 1, kMaxCount);
  out.tokens = fields.integer("tokens", 1, kMaxCount);
  out.cosine_error = fields.numbers("cosine_error", 0, std::numeric_limits<double>::max());
  out.group = fields.integers("group", 0, 2);
  if (fields.has("measured")) out.measured = JsonText(*fields.find("measured"));
  const JsonValue* model = fields.value("model");
  SQZ_RETURN_IF_ERROR(fields.status());
  SQZ_ASSIGN_OR_RETURN(out.model, model_from_json(*model, path + ": model"));
  SQZ_ASSIGN_OR_RETURN(static_cast<LayerBudgets&>(out), budgets_from_json(json->root(), path));
  const JsonMembers known = to_json(out);
  for (const JsonValue& member : json->root().items()) {
    if (known.contains(std::string(member.key()))) continue;
    return Refuse{path}(member.key(), found_text(member), "no such field");
  }
  SQZ_RETURN_IF_ERROR(check_layers(out, Refuse{path}));
  return out;
}

}  // namespace sqz
