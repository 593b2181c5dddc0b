#include "formats/layers_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "formats/metadata_strings.h"
#include "formats/sqz_checksums.h"
#include "formats/sqz_container.h"

namespace sqz {
namespace {

constexpr int64_t kMaxCount = int64_t{UINT32_MAX};  // of texts, tokens, keys
constexpr int64_t kMinLayers = 3;                   // one a group
constexpr int32_t kGroups = 3;

// In file order.
Result<std::vector<PlannedTensor>> plan(int64_t layers, const std::string& label) {
  std::vector<PlannedTensor> tensors = {
      plain_tensor("cosine", Part::kNamed, DType::kF64, {layers}),
      plain_tensor("cosine_error", Part::kNamed, DType::kF64, {layers}),
      plain_tensor("group", Part::kNamed, DType::kI32, {layers}),
      plain_tensor("budget", Part::kNamed, DType::kI64, {layers}),
      header_hash_tensor(),
  };
  SQZ_RETURN_IF_ERROR(size_tensors(tensors, label));
  return tensors;
}

std::map<std::string, std::string> to_strings(const LayersFile& layers) {
  std::map<std::string, std::string> out = {
      {"format", "sqz"},
      {"format_version", std::to_string(kFormatVersion)},
      {"kind", kind_name(FileKind::kLayers)},
      {"producer", layers.producer},
      {"model", to_json(layers.model).str()},
      {"tokenizer_hash", layers.tokenizer_hash},
      {"texts", std::to_string(layers.texts)},
      {"windows", std::to_string(layers.windows)},
      {"window", std::to_string(layers.window)},
      {"tokens", std::to_string(layers.tokens)},
      {"allocation", layers.allocation},
      {"context", std::to_string(layers.context)},
      {"uniform_budget", std::to_string(layers.uniform_budget)},
      {"p", JsonText(layers.p).str()}};
  if (!layers.measured.is_null()) out["measured"] = layers.measured.str();
  return out;
}

Result<LayersFile> from_strings(const std::map<std::string, std::string>& strings,
                                const std::string& path) {
  MetadataStrings in(strings, path);
  LayersFile out;
  out.producer = in.string("producer");
  out.tokenizer_hash = in.string("tokenizer_hash");
  out.texts = in.integer("texts", 1, kMaxCount);
  out.windows = in.integer("windows", 1, kMaxCount);
  out.window = in.integer("window", 1, kMaxCount);
  out.tokens = in.integer("tokens", 1, kMaxCount);
  out.allocation = in.string("allocation");
  out.context = in.integer("context", 1, kMaxCount);
  out.uniform_budget = in.integer("uniform_budget", 1, kMaxCount);
  out.p = in.number("p", 0, 1);
  if (strings.contains("measured")) out.measured = JsonText(in.json("measured").root());
  const JsonDocument model = in.json("model");
  if (!in.status().ok()) return in.status();
  SQZ_ASSIGN_OR_RETURN(out.model, model_from_json(model.root(), in.label("model")));
  return out;
}

// Ranges, and that the fields fit each other.
Status check_fields(const LayersFile& f, const std::string& label, Code code) {
  const auto refuse = [&](const char* field, const auto& found, const std::string& expected) {
    return Status(code, bad_field(label, field, concat(found), expected));
  };
  const auto in_range = [](int64_t value) { return value >= 1 && value <= kMaxCount; };
  if (f.model.layers < kMinLayers) {
    return refuse("model: layers", f.model.layers, concat("at least ", kMinLayers));
  }
  if (!f.tokenizer_hash.empty() && !is_hash(f.tokenizer_hash)) {
    return refuse("tokenizer_hash", in_quotes(f.tokenizer_hash), "16 hexadecimal digits or none");
  }
  for (const auto& [field, value] :
       {std::pair("texts", f.texts), std::pair("windows", f.windows), std::pair("window", f.window),
        std::pair("tokens", f.tokens), std::pair("context", f.context)}) {
    if (!in_range(value)) return refuse(field, value, concat("an integer in [1, ", kMaxCount, "]"));
  }
  // No overflow: each is below 2^32, unsigned.
  const auto most = static_cast<uint64_t>(f.windows) * static_cast<uint64_t>(f.window);
  if (static_cast<uint64_t>(f.tokens) > most) {
    return refuse("tokens", f.tokens, concat("at most windows * window = ", most));
  }
  if (f.uniform_budget < 1 || f.uniform_budget > f.context) {
    return refuse("uniform_budget", f.uniform_budget,
                  concat("an integer in [1, ", f.context, "], the context"));
  }
  if (!(f.p > 0 && f.p <= 1)) return refuse("p", f.p, "a number in (0, 1]");
  if (f.allocation != kAllocationGroups && f.allocation != kAllocationMeasured) {
    return refuse("allocation", in_quotes(f.allocation),
                  concat(in_quotes(kAllocationGroups), " or ", in_quotes(kAllocationMeasured)));
  }
  return {};
}

// Notes the first value of a tensor that breaks `rule`.
template <class T, class Rule>
void check_each(const char* name, const std::vector<T>& values, Rule rule,
                const std::string& expected, Problems& problems) {
  const auto bad = std::find_if_not(values.begin(), values.end(), rule);
  if (bad != values.end()) {
    note(problems, bad_field(name, concat("layer ", bad - values.begin()), concat(*bad), expected));
  }
}

// Groups are stretches of the ascending cosines.
void check_groups(const LayersFile& f, Problems& problems) {
  for (int32_t group = 0; group < kGroups; ++group) {
    if (std::count(f.group.begin(), f.group.end(), group) == 0) {
      note(problems, bad_field("group", concat("group ", group), "no layer", "at least one"));
    }
  }
  for (size_t a = 0; a < f.group.size(); ++a) {
    for (size_t b = 0; b < f.group.size(); ++b) {
      if (f.group[a] >= f.group[b] || f.cosine[a] <= f.cosine[b]) continue;
      note(problems, bad_field("group", concat("layer ", a), concat(f.group[a]),
                               concat("at least ", f.group[b], ", as layer ", b,
                                      " has with a lower cosine")));
      return;
    }
  }
}

void check_contents(const LayersFile& f, Problems& problems) {
  const auto is_cosine = [](double x) { return std::abs(x) <= 1; };
  const auto is_error = [](double x) { return x >= 0 && std::isfinite(x); };
  const auto is_group = [](int32_t x) { return x >= 0 && x < kGroups; };
  const auto is_budget = [&](int64_t x) { return x >= 1 && x <= f.context; };
  check_each("cosine", f.cosine, is_cosine, "a number in [-1, 1]", problems);
  check_each("cosine_error", f.cosine_error, is_error, "a finite number from 0", problems);
  check_each("group", f.group, is_group, "0, 1 or 2", problems);
  check_each("budget", f.budget, is_budget, concat("1 .. ", f.context, ", the context"), problems);
  if (!problems.empty()) return;
  check_groups(f, problems);
  const int64_t total = std::accumulate(f.budget.begin(), f.budget.end(), int64_t{0});
  const int64_t expected = f.uniform_budget * f.model.layers;
  if (total != expected) {
    note(problems, bad_field("budget", "sum", concat(total),
                             concat(expected, ", uniform_budget of every layer")));
  }
}

template <class T>
void load(const SqzContainer& container, const char* name, std::vector<T>& out) {
  const std::span<const std::byte> bytes = container.tensor(name);
  out.resize(bytes.size() / sizeof(T));
  std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
}

struct Opened {
  SqzContainer container;
  LayersFile layers;
};

Result<Opened> open(const std::string& path, Env& env) {
  Opened out;
  SQZ_ASSIGN_OR_RETURN(out.container,
                       open_container(path, FileKind::kLayers, OpenMode::kMmap, env));
  const SafetensorsHeader& header = out.container.header;
  SQZ_ASSIGN_OR_RETURN(out.layers, from_strings(header.metadata, path));
  SQZ_RETURN_IF_ERROR(check_fields(out.layers, path + ": __metadata__", Code::kCorrupt));
  auto tensors = plan(out.layers.model.layers, path);
  if (!tensors.ok()) return Status(Code::kCorrupt, tensors.status().message());
  SQZ_RETURN_IF_ERROR(match_tensors(header, *tensors, path));
  load(out.container, "cosine", out.layers.cosine);
  load(out.container, "cosine_error", out.layers.cosine_error);
  load(out.container, "group", out.layers.group);
  load(out.container, "budget", out.layers.budget);
  return out;
}

Problems find_problems(const Opened& opened) {
  Problems problems = check_tensors(opened.container);
  check_contents(opened.layers, problems);
  return problems;
}

Status check_to_write(const LayersFile& f, const std::string& path) {
  SQZ_RETURN_IF_ERROR(check_fields(f, path, Code::kInvalidArgument));
  const auto layers = static_cast<size_t>(f.model.layers);
  for (const auto& [field, size] :
       {std::pair("cosine", f.cosine.size()), std::pair("cosine_error", f.cosine_error.size()),
        std::pair("group", f.group.size()), std::pair("budget", f.budget.size())}) {
    if (size == layers) continue;
    return {Code::kInvalidArgument,
            bad_field(path, field, concat(size, " values"), concat(layers, ", one a layer"))};
  }
  Problems problems;
  check_contents(f, problems);
  return first_of(problems, path, Code::kInvalidArgument);
}

}  // namespace

Result<uint64_t> write_layers_file(Env& env, const std::string& path, bool replace,
                                   LayersFile layers) {
  if (layers.producer.empty()) layers.producer = producer_name();
  SQZ_RETURN_IF_ERROR(check_to_write(layers, path));
  SQZ_ASSIGN_OR_RETURN(const auto tensors, plan(layers.model.layers, path));
  return write_container(env, path, replace, to_strings(layers), tensors,
                         {{"cosine", std::as_bytes(std::span(layers.cosine))},
                          {"cosine_error", std::as_bytes(std::span(layers.cosine_error))},
                          {"group", std::as_bytes(std::span(layers.group))},
                          {"budget", std::as_bytes(std::span(layers.budget))}});
}

Result<LayersFile> read_layers_file(const std::string& path, Env& env) {
  SQZ_ASSIGN_OR_RETURN(Opened opened, open(path, env));
  const Problems problems = find_problems(opened);
  SQZ_RETURN_IF_ERROR(first_of(problems, path, Code::kCorrupt));
  return std::move(opened.layers);
}

Result<VerifyReport> verify_layers_file(const std::string& path, Env& env) {
  SQZ_ASSIGN_OR_RETURN(const Opened opened, open(path, env));
  VerifyReport report;
  report.checked = std::ssize(opened.container.header.tensors);
  report.problems = find_problems(opened);
  return report;
}

LayerBudgets embedded(const LayersFile& layers) {
  return {.allocation = layers.allocation,
          .context = layers.context,
          .uniform_budget = layers.uniform_budget,
          .p = layers.p,
          .budget = layers.budget,
          .cosine = layers.cosine};
}

bool is_layers_file(const std::string& path, Env& env) {
  return has_kind(path, FileKind::kLayers, env);
}

}  // namespace sqz
