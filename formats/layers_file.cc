#include "formats/layers_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "formats/metadata_strings.h"
#include "formats/sqz_checksums.h"

namespace sqz {
namespace {

constexpr int64_t kMaxInProfile = int64_t{UINT32_MAX};  // of texts, tokens, keys
constexpr int64_t kMinLayers = 3;                       // one a group
constexpr int32_t kGroups = 3;

struct Count {
  const char* name;
  int64_t LayersFile::*value;
};
constexpr Count kCounts[] = {{"texts", &LayersFile::texts},
                             {"windows", &LayersFile::windows},
                             {"window", &LayersFile::window},
                             {"tokens", &LayersFile::tokens},
                             {"context", &LayersFile::context}};

// Calls visit(name, element type, values) for each tensor, in file order.
template <class File, class Visit>
void each_of_layers(File& file, Visit visit) {
  visit("cosine", DType::kF64, file.cosine);
  visit("cosine_error", DType::kF64, file.cosine_error);
  visit("group", DType::kI32, file.group);
  visit("budget", DType::kI64, file.budget);
}

Result<std::vector<PlannedTensor>> plan(const LayersFile& file, const std::string& label) {
  std::vector<PlannedTensor> tensors;
  each_of_layers(file, [&](const char* name, DType dtype, const auto&) {
    tensors.push_back({name, dtype, {file.model.layers}});
  });
  tensors.push_back(header_hash_tensor());
  SQZ_RETURN_IF_ERROR(size_tensors(tensors, label));
  return tensors;
}

std::map<std::string, std::string> to_strings(const LayersFile& file) {
  auto out = origin_strings(FileKind::kLayers, file);
  for (const Count& count : kCounts) out[count.name] = std::to_string(file.*count.value);
  out["allocation"] = file.allocation;
  out["uniform_budget"] = std::to_string(file.uniform_budget);
  out["p"] = JsonText(file.p).str();
  if (!file.measured.is_null()) out["measured"] = file.measured.str();
  return out;
}

Result<LayersFile> layers_from_strings(const std::map<std::string, std::string>& strings,
                                       const std::string& path) {
  MetadataStrings in(strings, path);
  LayersFile out;
  for (const Count& count : kCounts) out.*count.value = in.integer(count.name, 1, kMaxInProfile);
  out.allocation = in.string("allocation");
  out.uniform_budget = in.integer("uniform_budget", 1, kMaxInProfile);
  out.p = in.number("p", 0, 1);
  if (in.has("measured")) out.measured = JsonText(in.json("measured").root());
  read_origin(in, out);
  if (!in.status().ok()) return in.status();
  return out;
}

// Ranges, and that the fields fit each other.
Status check_fields(const LayersFile& f, const Refuse& refuse) {
  if (f.model.layers < kMinLayers) {
    return refuse("model: layers", f.model.layers, concat("at least ", kMinLayers));
  }
  SQZ_RETURN_IF_ERROR(check_tokenizer_hash(refuse, f.tokenizer_hash));
  for (const Count& count : kCounts) {
    SQZ_RETURN_IF_ERROR(check_range(refuse, count.name, f.*count.value, 1, kMaxInProfile));
  }
  // No overflow: each is below 2^32, unsigned.
  const auto most = static_cast<uint64_t>(f.windows) * static_cast<uint64_t>(f.window);
  if (static_cast<uint64_t>(f.tokens) > most) {
    return refuse("tokens", f.tokens, concat("at most windows * window = ", most));
  }
  SQZ_RETURN_IF_ERROR(
      check_range(refuse, "uniform_budget", f.uniform_budget, 1, f.context, ", the context"));
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

Result<LayersFile> open_layers(const std::string& path, Env& env, VerifyReport& report) {
  SQZ_ASSIGN_OR_RETURN(const SqzContainer container,
                       open_container(path, FileKind::kLayers, OpenMode::kMmap, env));
  SQZ_ASSIGN_OR_RETURN(LayersFile out, layers_from_strings(container.header.metadata, path));
  SQZ_RETURN_IF_ERROR(check_fields(out, Refuse{path + ": __metadata__"}));
  SQZ_RETURN_IF_ERROR(match_tensors(container.header, plan(out, path), path));
  each_of_layers(out, [&](const char* name, DType, auto& values) {
    const std::span<const std::byte> bytes = container.tensor(name);
    values.resize(static_cast<size_t>(out.model.layers));
    std::memcpy(values.data(), bytes.data(), bytes.size());
  });
  report = check_tensors(container);
  check_contents(out, report.problems);
  return out;
}

Status check_to_write(const LayersFile& f, const std::string& path) {
  const Refuse refuse{path, Code::kInvalidArgument};
  SQZ_RETURN_IF_ERROR(check_fields(f, refuse));
  Status sizes;
  each_of_layers(f, [&](const char* name, DType, const auto& values) {
    if (!sizes.ok() || std::cmp_equal(values.size(), f.model.layers)) return;
    sizes = refuse(name, concat(values.size(), " values"), concat(f.model.layers, ", one a layer"));
  });
  SQZ_RETURN_IF_ERROR(sizes);
  Problems problems;
  check_contents(f, problems);
  return first_of(problems, path, Code::kInvalidArgument);
}

}  // namespace

Result<uint64_t> write_layers_file(Env& env, const std::string& path, bool replace,
                                   LayersFile layers) {
  if (layers.producer.empty()) layers.producer = producer_name();
  SQZ_RETURN_IF_ERROR(check_to_write(layers, path));
  SQZ_ASSIGN_OR_RETURN(const auto tensors, plan(layers, path));
  TensorContents contents;
  each_of_layers(layers, [&](const char* name, DType, const auto& values) {
    contents[name] = std::as_bytes(std::span(values));
  });
  return write_container(env, path, replace, to_strings(layers), tensors, contents);
}

Result<LayersFile> read_layers_file(const std::string& path, Env& env) {
  VerifyReport report;
  SQZ_ASSIGN_OR_RETURN(LayersFile out, open_layers(path, env, report));
  SQZ_RETURN_IF_ERROR(first_of(report.problems, path, Code::kCorrupt));
  return out;
}

Result<VerifyReport> verify_layers_file(const std::string& path, Env& env) {
  VerifyReport report;
  SQZ_RETURN_IF_ERROR(open_layers(path, env, report).status());
  return report;
}

}  // namespace sqz
