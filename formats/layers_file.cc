#include "formats/layers_file.h"

#include <limits>

#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

constexpr const char* kFormat = "sqz-layers";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxCount = int64_t{UINT32_MAX};  // of texts, windows and tokens
constexpr int64_t kMinLayers = 3;                   // one a group
constexpr uint64_t kMaxBytes = uint64_t{1} << 26;

Result<LayersFile> parse(const std::string& text, const std::string& path) {
  const auto json = parse_json_object(text, path);
  if (!json.ok()) {
    return Status(json.status().code(),
                  concat(json.status().message(), "; profile the layers with sqz-profile-layers"));
  }
  JsonFields in(json->root(), path);
  if (in.text("format") != kFormat) in.complain("format", in_quotes(kFormat));
  if (in.integer("format_version", 1, INT64_MAX) > kVersion) {
    in.complain("format_version", concat("at most ", kVersion), Code::kUnsupported);
  }
  LayersFile out;
  read_origin(in, out);
  if (out.model.layers < kMinLayers) in.complain("model", concat(kMinLayers, " layers or more"));
  out.texts = in.integer("texts", 1, kMaxCount);
  out.windows = in.integer("windows", 1, kMaxCount);
  out.window = in.integer("window", 1, kMaxCount);
  out.tokens = in.integer("tokens", 1, kMaxCount);
  static_cast<LayerBudgets&>(out) = read_budgets(in, out.model.layers);
  if (out.allocation != kAllocationGroups && out.allocation != kAllocationMeasured) {
    in.complain("allocation", concat(kAllocationGroups, " or ", kAllocationMeasured));
  }
  out.cosine_error = in.numbers("cosine_error", 0, std::numeric_limits<double>::max());
  out.group = in.integers("group", 0, 2);
  for (const auto& [key, size] :
       {std::pair("cosine_error", out.cosine_error.size()), {"group", out.group.size()}}) {
    if (std::cmp_not_equal(size, out.model.layers)) {
      in.complain(key, concat(out.model.layers, ", one a layer"));
    }
  }
  if (in.has("measured")) out.measured = JsonText(*in.find("measured"));
  const JsonMembers known = to_json(out);
  for (const JsonValue& member : json->root().items()) {
    if (known.contains(std::string(member.key()))) continue;
    in.complain_of(in_quotes(member.key()), found_text(member), "no such field");
  }
  SQZ_RETURN_IF_ERROR(in.status());
  return out;
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
  const std::string text = JsonText(to_json(layers)).str() + "\n";
  const Status checked = parse(text, path).status();  // as a reader will
  if (!checked.ok()) return {Code::kInvalidArgument, checked.message()};
  SQZ_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(env, path, replace));
  SQZ_RETURN_IF_ERROR(file.file().write(0, std::as_bytes(std::span(text))));
  return file.commit();
}

Result<LayersFile> read_layers_file(const std::string& path, Env& env) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(env, path, kMaxBytes));
  return parse(text, path);
}

}  // namespace sqz
