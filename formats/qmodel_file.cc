#include "formats/qmodel_file.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "formats/base/checked.h"
#include "formats/container_writer.h"
#include "formats/sqz_layout.h"

namespace sqz {
namespace {

constexpr int64_t kMaxKeys = int64_t{UINT32_MAX};
constexpr int64_t kMaxUnits = int64_t{1} << 20;  // of buckets and hidden units
constexpr double kUnitTolerance = 1e-3;  // of a centroid's length: float32 rounding, no more

constexpr const char* kRopedCentroids = "roped_centroids";  // metadata of earlier files
constexpr const char* kCentroids = "centroids";

// Calls visit(name, values, dims) for each tensor of a layer with buckets, in file order.
template <class Layer, class Visit>
void each_field(const QmodelFile& f, Layer& layer, const Visit& visit) {
  each_classifier_tensor(layer, f.buckets, f.hidden, f.model.head_dim, visit);
}

std::string tensor_name(int64_t layer, const std::string& field) {
  return concat("layers.", layer, ".", field);
}

bool is_dense(const QmodelFile& f, int64_t layer) {
  return std::binary_search(f.dense.begin(), f.dense.end(), layer);
}

// Calls visit(name, values, dims, layer) for each tensor of the file, in file order.
template <class File, class Visit>
void each_tensor(File& f, const Visit& visit) {
  for (int64_t l = 0; l < f.model.layers; ++l) {
    if (is_dense(f, l)) continue;
    each_field(f, f.layers[static_cast<size_t>(l)],
               [&](const std::string& name, auto& values, const Dims& dims) {
                 visit(name, values, dims, l);
               });
  }
}

DType stored_type(const QmodelFile& f, const std::string& field) {
  return field.ends_with("weight") ? f.dtype : DType::kF32;
}

// `f.layers` may be empty layers.
Result<std::vector<PlannedTensor>> plan(const QmodelFile& f, const std::string& label) {
  std::vector<PlannedTensor> tensors;
  each_tensor(f, [&](const std::string& name, const auto&, Dims dims, int64_t layer) {
    dims.insert(dims.begin(), f.model.kv_heads);
    tensors.push_back({tensor_name(layer, name), stored_type(f, name), std::move(dims),
                       name == kCentroids ? kPage : kCacheLine});
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
  auto out = origin_strings(FileKind::kQmodel, 1, f);
  out["buckets"] = std::to_string(f.buckets);
  out["hidden"] = std::to_string(f.hidden);
  out["recent"] = std::to_string(f.recent);
  out[kLogitsKey] = kLogitsOfKeys;
  out["dtype"] = dtype_name(f.dtype);
  out["dense"] = JsonText(f.dense).str();
  out["training"] = JsonText(f.training).str();
  out["recall"] = recall_json(f).str();
  return out;
}

Result<QmodelFile> read_fields(JsonFields in) {
  QmodelFile out;
  out.buckets = in.integer("buckets", 2, kMaxUnits);
  out.hidden = in.integer("hidden", 1, kMaxUnits);
  out.recent = in.integer("recent", 0, kMaxKeys);
  check_logits(in, "train the query classifier again");
  const auto dtype = dtype_from_name(in.text("dtype"));
  if (dtype != DType::kF32 && dtype != DType::kBF16) in.complain("dtype", "F32 or BF16");
  out.dtype = dtype.value_or(DType::kF32);
  if (in.has(kRopedCentroids)) {
    in.complain(kRopedCentroids, "no such key: train the query classifier again");
  }
  read_origin(in, out);
  out.dense = in.integers("dense", 0, std::max<int64_t>(out.model.layers - 1, 0));
  const auto rises = [](int64_t a, int64_t b) { return a >= b; };
  if (std::adjacent_find(out.dense.begin(), out.dense.end(), rises) != out.dense.end() ||
      std::ssize(out.dense) == out.model.layers) {
    in.complain("dense", "ascending layers, not all of them");
  }
  JsonFields training = in.object("training");
  in.complain_of(training.status());
  for (const JsonValue& member : training.json().items()) {
    out.training.emplace(member.key(), JsonText(member));
  }
  const JsonValue* recall = in.array("recall");
  double last = 0;
  for (size_t i = 0; recall != nullptr && i < recall->size(); ++i) {
    JsonFields row = in.element("recall", i);
    out.recall.push_back({row.number("selectivity", 0, 1), row.number("recall", 0, 1)});
    if (out.recall.back().selectivity <= last) row.complain("selectivity", "ascending numbers");
    last = out.recall.back().selectivity;
    in.complain_of(row.status());
  }
  SQZ_RETURN_IF_ERROR(in.status());
  return out;
}

// Every bucket's centroid has length 1.
Status check_centroids(const QmodelFile& f, const std::string& tensor,
                       const std::vector<float>& centroids, const Refuse& refuse) {
  const auto d = static_cast<size_t>(f.model.head_dim), c = static_cast<size_t>(f.buckets);
  for (size_t row = 0; row * d < centroids.size(); ++row) {
    double square = 0;
    for (size_t i = 0; i < d; ++i) square += std::pow(double{centroids[row * d + i]}, 2);
    if (std::abs(std::sqrt(square) - 1) <= kUnitTolerance) continue;
    return refuse(concat(tensor, ": KV head ", row / c, ", bucket ", row % c, ": length"),
                  std::sqrt(square), "1");
  }
  return {};
}

Status check_to_write(const QmodelFile& f, const std::string& path) {
  const Refuse refuse{path, Code::kInvalidArgument};
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, metadata_json(to_strings(f), path));
  const Status fields = read_fields(JsonFields(json.root(), path)).status();  // as a reader will
  if (!fields.ok()) return Status(refuse.code, fields.message());
  if (std::ssize(f.layers) != f.model.layers) {
    return refuse("layers", f.layers.size(), f.model.layers);
  }
  Status status;
  for (int64_t l = 0; l < f.model.layers; ++l) {
    const auto check = [&](const std::string& name, const std::vector<float>& values, Dims dims) {
      const std::string tensor = tensor_name(l, name);
      dims.push_back(f.model.kv_heads);
      const int64_t expected = is_dense(f, l) ? 0 : checked_elements(dims).value_or(-1);
      const bool finite =
          std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
      if (!status.ok()) return;
      if (std::ssize(values) != expected) {
        status = refuse(tensor + ": values", values.size(), expected);
      } else if (!finite) {
        status = refuse(tensor + ": values", "NaN or infinity", "finite numbers");
      } else if (name == kCentroids) {
        status = check_centroids(f, tensor, values, refuse);
      }
    };
    each_field(f, f.layers[static_cast<size_t>(l)], check);
  }
  return status;
}

}  // namespace

Result<uint64_t> write_qmodel_file(Env& env, const std::string& path, bool replace,
                                   QmodelFile qmodel) {
  if (qmodel.producer.empty()) qmodel.producer = producer_name();
  SQZ_RETURN_IF_ERROR(check_to_write(qmodel, path));
  SQZ_ASSIGN_OR_RETURN(auto tensors, plan(qmodel, path));
  SQZ_ASSIGN_OR_RETURN(ContainerLayout layout,
                       ContainerLayout::make(to_strings(qmodel), std::move(tensors)));
  SQZ_ASSIGN_OR_RETURN(ContainerWriter file,
                       ContainerWriter::create(env, path, replace, std::move(layout)));
  Status status;
  each_tensor(qmodel, [&](const std::string& name, const std::vector<float>& values, const Dims&,
                          int64_t layer) {
    if (!status.ok()) return;
    std::vector<BFloat16> rounded;
    if (stored_type(qmodel, name) == DType::kBF16) {
      rounded.resize(values.size());
      std::transform(values.begin(), values.end(), rounded.begin(), to_bfloat16);
    }
    status =
        file.put(tensor_name(layer, name), rounded.empty() ? std::as_bytes(std::span(values))
                                                           : std::as_bytes(std::span(rounded)));
  });
  SQZ_RETURN_IF_ERROR(status);
  return file.commit();
}

ClassifierView view_of(const QmodelLayer& layer, int64_t hidden) {
  return {.hidden = hidden,
          .centroids = layer.centroids.data(),
          .hidden_weight = layer.hidden_weight.data(),
          .hidden_bias = layer.hidden_bias.data(),
          .output_weight = layer.output_weight.data(),
          .output_bias = layer.output_bias.data()};
}

Result<QmodelFile> read_qmodel_file(const std::string& path, Env& env) {
  SQZ_ASSIGN_OR_RETURN(const SqzContainer container,
                       open_container(path, FileKind::kQmodel, OpenMode::kMmap, env));
  SQZ_ASSIGN_OR_RETURN(QmodelFile f, read_fields(container.fields()));
  f.layers.resize(static_cast<size_t>(f.model.layers));
  SQZ_RETURN_IF_ERROR(match_tensors(container.header, plan(f, path), path));
  TensorCheck check(container);
  SQZ_RETURN_IF_ERROR(check.init());
  for (const TensorInfo& tensor : container.header.tensors) {
    SQZ_RETURN_IF_ERROR(check.run(tensor, {}));
  }
  Status status;
  each_tensor(f,
              [&](const std::string& name, std::vector<float>& values, const Dims&, int64_t layer) {
                const DType dtype = stored_type(f, name);
                const std::string tensor = tensor_name(layer, name);
                const std::span<const std::byte> bytes = container.tensor(tensor);
                values.resize(bytes.size() / static_cast<size_t>(dtype_size(dtype)));
                to_floats(bytes.data(), dtype, std::ssize(values), values.data());
                if (name != kCentroids || !status.ok()) return;
                status = check_centroids(f, tensor, values, Refuse{path});
              });
  SQZ_RETURN_IF_ERROR(status);
  return f;
}

}  // namespace sqz
