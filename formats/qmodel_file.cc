#include "formats/qmodel_file.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "formats/base/checked.h"
#include "formats/json_fields.h"
#include "formats/metadata_strings.h"
#include "formats/sqz_checksums.h"
#include "formats/sqz_layout.h"

namespace sqz {
namespace {

constexpr int64_t kMaxKeys = int64_t{UINT32_MAX};
constexpr int64_t kMaxUnits = int64_t{1} << 20;  // of buckets and hidden units
constexpr double kUnitTolerance = 1e-3;  // of a centroid's length: float32 rounding, no more

constexpr const char* kRopedCentroids = "roped_centroids";  // metadata: there, and "stored", or not
constexpr const char* kStored = "stored";

// The tensors of a layer with buckets, in file order.
std::vector<ClassifierTensor> fields_of(const QmodelFile& f, bool roped) {
  auto out = classifier_tensors(f.model, f.buckets, f.hidden);
  if (!roped) return out;
  out.push_back({kRopedCentroids, nullptr, &QmodelLayer::roped_centroids, out[0].shape});
  return out;
}

std::string tensor_name(int64_t layer, const ClassifierTensor& field) {
  return concat("layers.", layer, ".", field.name);
}

bool is_dense(const QmodelFile& f, int64_t layer) {
  return std::binary_search(f.dense.begin(), f.dense.end(), layer);
}

// Calls visit(layer, field, name of the tensor) for each tensor, in file order.
template <class Visit>
void each_tensor(const QmodelFile& f, Visit visit) {
  const auto fields = fields_of(f, f.has_roped_centroids);
  for (int64_t layer = 0; layer < f.model.layers; ++layer) {
    if (is_dense(f, layer)) continue;
    for (const ClassifierTensor& field : fields) {
      visit(static_cast<size_t>(layer), field, tensor_name(layer, field));
    }
  }
}

DType stored_type(const QmodelFile& f, const ClassifierTensor& field) {
  return std::string_view(field.name).ends_with("weight") ? f.dtype : DType::kF32;
}

Result<std::vector<PlannedTensor>> plan(const QmodelFile& f, const std::string& label) {
  std::vector<PlannedTensor> tensors;
  each_tensor(f, [&](size_t, const ClassifierTensor& field, const std::string& name) {
    const bool first = field.values == &QmodelLayer::centroids;
    tensors.push_back({name, stored_type(f, field), field.shape, first ? kPage : kCacheLine});
  });
  tensors.push_back(header_hash_tensor());
  SQZ_RETURN_IF_ERROR(size_tensors(tensors, label));
  return tensors;
}

JsonText recall_json(const QmodelFile& f) {
  std::vector<JsonText> out;
  for (const QmodelRecall& row : f.recall) {
    out.push_back({{"selectivity", row.selectivity}, {"recall", row.recall}});
  }
  return out;
}

std::map<std::string, std::string> to_strings(const QmodelFile& f) {
  auto out = origin_strings(FileKind::kQmodel, f);
  out["buckets"] = std::to_string(f.buckets);
  out["hidden"] = std::to_string(f.hidden);
  out["recent"] = std::to_string(f.recent);
  out[kLogitsKey] = kLogitsOfKeys;
  out["dtype"] = dtype_name(f.dtype);
  out["dense"] = JsonText(f.dense).str();
  out["training"] = JsonText(f.training).str();
  out["recall"] = recall_json(f).str();
  if (f.has_roped_centroids) out[kRopedCentroids] = kStored;
  return out;
}

Result<std::vector<int64_t>> parse_dense(const JsonValue& json, const std::string& label) {
  if (!json.is_array()) return unexpected(json, label, "an array");
  std::vector<int64_t> out;
  for (const JsonValue& layer : json.items()) {
    const auto number = layer.integer(0, kMaxKeys);
    if (!number) return unexpected(layer, label, "the number of a layer");
    out.push_back(*number);
  }
  return out;
}

Result<JsonMembers> parse_training(const JsonValue& json, const std::string& label) {
  if (!json.is_object()) return unexpected(json, label, "an object");
  JsonMembers out;
  for (const JsonValue& member : json.items()) out.emplace(member.key(), JsonText(member));
  return out;
}

Result<std::vector<QmodelRecall>> parse_recall(const JsonValue& json, const std::string& label) {
  if (!json.is_array()) return unexpected(json, label, "an array");
  std::vector<QmodelRecall> out;
  for (const JsonValue& row : json.items()) {
    JsonFields fields(row, label);
    out.push_back({fields.number("selectivity", 0, 1), fields.number("recall", 0, 1)});
    SQZ_RETURN_IF_ERROR(fields.status());
  }
  return out;
}

Result<QmodelFile> qmodel_from_strings(const std::map<std::string, std::string>& strings,
                                       const std::string& path) {
  MetadataStrings in(strings, path);
  QmodelFile out;
  out.buckets = in.integer("buckets", 2, kMaxUnits);
  out.hidden = in.integer("hidden", 1, kMaxUnits);
  out.recent = in.integer("recent", 0, kMaxKeys);
  check_logits(in, "train the query classifier again");
  const std::string dtype = in.string("dtype");
  const auto known = dtype_from_name(dtype);
  if (!known) in.fail("dtype", in_quotes(dtype), "F32 or BF16");
  out.dtype = known.value_or(DType::kF32);
  if (in.has(kRopedCentroids)) {
    const std::string roped = in.string(kRopedCentroids);
    out.has_roped_centroids = roped == kStored;
    if (roped != kStored) {
      in.fail(kRopedCentroids, in_quotes(roped), concat(in_quotes(kStored), ", or no such key"));
    }
  }
  in.parse("dense", out.dense, parse_dense);
  in.parse("training", out.training, parse_training);
  in.parse("recall", out.recall, parse_recall);
  read_origin(in, out);
  if (!in.status().ok()) return in.status();
  return out;
}

// Ranges, and that the fields fit each other.
Status check_fields(const QmodelFile& f, const Refuse& refuse) {
  SQZ_RETURN_IF_ERROR(check_tokenizer_hash(refuse, f.tokenizer_hash));
  SQZ_RETURN_IF_ERROR(check_range(refuse, "buckets", f.buckets, 2, kMaxUnits));
  SQZ_RETURN_IF_ERROR(check_range(refuse, "hidden", f.hidden, 1, kMaxUnits));
  SQZ_RETURN_IF_ERROR(check_range(refuse, "recent", f.recent, 0, kMaxKeys));
  if (f.dtype != DType::kF32 && f.dtype != DType::kBF16) {
    return refuse("dtype", dtype_name(f.dtype), "F32 or BF16");
  }
  int64_t previous = -1;
  for (const int64_t layer : f.dense) {
    if (layer <= previous || layer >= f.model.layers) {
      return refuse("dense", concat(layer, " after ", previous),
                    concat("ascending layers below ", f.model.layers));
    }
    previous = layer;
  }
  if (std::ssize(f.dense) == f.model.layers) {
    return refuse("dense", "every layer", "at least one layer with buckets");
  }
  double last = 0;
  for (const QmodelRecall& row : f.recall) {
    if (!(row.selectivity > last && row.selectivity <= 1)) {
      return refuse("recall: selectivity", concat(row.selectivity, " after ", last),
                    "ascending numbers in (0, 1]");
    }
    if (!(row.recall >= 0 && row.recall <= 1)) {
      return refuse("recall: recall", row.recall, "a number in [0, 1]");
    }
    last = row.selectivity;
  }
  return {};
}

void check_centroids(const QmodelFile& f, int64_t layer, const ClassifierTensor& field,
                     Problems& problems) {
  const std::vector<float>& centroids = f.layers[static_cast<size_t>(layer)].*field.values;
  const auto d = static_cast<size_t>(f.model.head_dim);
  for (size_t row = 0; row * d < centroids.size(); ++row) {
    double square = 0;
    for (size_t i = 0; i < d; ++i) square += std::pow(double{centroids[row * d + i]}, 2);
    if (std::abs(std::sqrt(square) - 1) <= kUnitTolerance) continue;
    const auto c = static_cast<size_t>(f.buckets);
    note(problems, bad_field(tensor_name(layer, field),
                             concat("KV head ", row / c, ", bucket ", row % c, ": length"),
                             concat(std::sqrt(square)), "1"));
    return;
  }
}

void check_contents(const QmodelFile& f, Problems& problems) {
  const auto finite = [](float x) { return std::isfinite(x); };
  for (int64_t l = 0; l < f.model.layers; ++l) {
    const QmodelLayer& layer = f.layers[static_cast<size_t>(l)];
    for (const ClassifierTensor& field : fields_of(f, f.has_roped_centroids)) {
      const std::vector<float>& values = layer.*field.values;
      const auto bad = std::find_if_not(values.begin(), values.end(), finite);
      const bool directions =
          field.values == &QmodelLayer::centroids || field.values == &QmodelLayer::roped_centroids;
      if (bad != values.end()) {
        note(problems, bad_field(tensor_name(l, field), concat("element ", bad - values.begin()),
                                 concat(*bad), "a finite number"));
      } else if (directions) {
        check_centroids(f, l, field, problems);
      }
    }
  }
}

Result<QmodelFile> open_qmodel(const std::string& path, Env& env, VerifyReport& report) {
  SQZ_ASSIGN_OR_RETURN(const SqzContainer container,
                       open_container(path, FileKind::kQmodel, OpenMode::kMmap, env));
  SQZ_ASSIGN_OR_RETURN(QmodelFile f, qmodel_from_strings(container.header.metadata, path));
  SQZ_RETURN_IF_ERROR(check_fields(f, Refuse{path + ": __metadata__"}));
  SQZ_RETURN_IF_ERROR(match_tensors(container.header, plan(f, path), path));
  f.layers.resize(static_cast<size_t>(f.model.layers));
  each_tensor(f, [&](size_t layer, const ClassifierTensor& field, const std::string& name) {
    const DType dtype = stored_type(f, field);
    const std::span<const std::byte> bytes = container.tensor(name);
    std::vector<float>& values = f.layers[layer].*field.values;
    values.resize(bytes.size() / static_cast<size_t>(dtype_size(dtype)));
    to_floats(bytes.data(), dtype, std::ssize(values), values.data());
  });
  report = check_tensors(container);
  check_contents(f, report.problems);
  return f;
}

Status check_to_write(const QmodelFile& f, const std::string& path) {
  const Refuse refuse{path, Code::kInvalidArgument};
  SQZ_RETURN_IF_ERROR(check_fields(f, refuse));
  if (std::ssize(f.layers) != f.model.layers) {
    return refuse("layers", f.layers.size(), f.model.layers);
  }
  for (int64_t l = 0; l < f.model.layers; ++l) {
    for (const ClassifierTensor& field : fields_of(f, true)) {
      const auto found = std::ssize(f.layers[static_cast<size_t>(l)].*field.values);
      const auto count = checked_elements(field.shape);
      const bool roped = field.values == &QmodelLayer::roped_centroids;
      const bool none = is_dense(f, l) || (roped && !f.has_roped_centroids);
      const int64_t expected = none ? 0 : count.value_or(-1);
      if (found == expected) continue;
      return refuse(tensor_name(l, field), concat(found, " values"), expected);
    }
  }
  Problems problems;
  check_contents(f, problems);
  return first_of(problems, path, Code::kInvalidArgument);
}

}  // namespace

Result<uint64_t> write_qmodel_file(Env& env, const std::string& path, bool replace,
                                   QmodelFile qmodel) {
  if (qmodel.producer.empty()) qmodel.producer = producer_name();
  SQZ_RETURN_IF_ERROR(check_to_write(qmodel, path));
  SQZ_ASSIGN_OR_RETURN(const auto tensors, plan(qmodel, path));
  std::map<std::string, std::vector<BFloat16>> rounded;
  std::set<std::string> names;  // what the views of `contents` look at
  TensorContents contents;
  each_tensor(qmodel, [&](size_t layer, const ClassifierTensor& field, const std::string& tensor) {
    const std::string& name = *names.insert(tensor).first;
    const std::vector<float>& values = qmodel.layers[layer].*field.values;
    contents[name] = std::as_bytes(std::span(values));
    if (stored_type(qmodel, field) == DType::kF32) return;
    std::vector<BFloat16>& out = rounded[name];
    out.resize(values.size());
    std::transform(values.begin(), values.end(), out.begin(), to_bfloat16);
    contents[name] = std::as_bytes(std::span(out));
  });
  return write_container(env, path, replace, to_strings(qmodel), tensors, contents);
}

Result<QmodelFile> read_qmodel_file(const std::string& path, Env& env) {
  VerifyReport report;
  SQZ_ASSIGN_OR_RETURN(QmodelFile out, open_qmodel(path, env, report));
  SQZ_RETURN_IF_ERROR(first_of(report.problems, path, Code::kCorrupt));
  return out;
}

Result<VerifyReport> verify_qmodel_file(const std::string& path, Env& env) {
  VerifyReport report;
  SQZ_RETURN_IF_ERROR(open_qmodel(path, env, report).status());
  return report;
}

}  // namespace sqz
