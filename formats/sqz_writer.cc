#include "formats/sqz_writer.h"

#include "formats/container_writer.h"
#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

// Room in the header for the one text that is not known at create(): the calibration's parameters.
constexpr size_t kCalibrationRoom = 2048;

JsonText layers_to_json(const IndexMetadata& metadata) {
  std::vector<JsonText> out;
  for (const LayerPolicy& layer : metadata.layers) {
    JsonMembers members = {{"dense", layer.dense}, {"window", layer.window}};
    if (metadata.pruned) members["kept"] = layer.kept;
    if (layer.rows16) members["rows"] = rows_name(RowKind::k16);
    out.push_back(members);
  }
  return out;
}

Result<ContainerLayout> lay_out(const IndexMetadata& metadata, const ClusterCounts& clusters,
                                const std::string& path) {
  auto strings = metadata_to_strings(metadata);
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, metadata_json(strings, path));
  const Status checked = read_metadata(JsonFields(json.root(), path)).status();  // as a reader will
  if (!checked.ok()) return Status(Code::kInvalidArgument, checked.message());
  SQZ_ASSIGN_OR_RETURN(auto tensors, plan_tensors(metadata, clusters, path));
  return ContainerLayout::make(std::move(strings), std::move(tensors), kCalibrationRoom);
}

}  // namespace

std::map<std::string, std::string> metadata_to_strings(const IndexMetadata& m) {
  auto out = origin_strings(FileKind::kIndex, m.version, m);
  out["tokens_hash"] = m.tokens_hash;
  out["tokens"] = std::to_string(m.tokens);
  out["sink"] = std::to_string(m.sink);
  out["tail"] = std::to_string(m.tail);
  out["partition"] = partition_name(m.partition);
  out["levels"] = std::to_string(m.levels);
  out["dtype"] = dtype_name(m.dtype);
  out["kv"] = "true";  // earlier readers want it
  out["value_means"] = JsonText(m.has_value_means).str();
  out["layers"] = layers_to_json(m).str();
  out["build"] = m.build.str();
  if (m.partition == Partition::kPages) out["page_size"] = std::to_string(m.page_size);
  if (m.partition == Partition::kBuckets) {
    out["buckets"] = std::to_string(m.buckets);
    out["hidden"] = std::to_string(m.hidden);
    out[kLogitsKey] = kLogitsOfKeys;
  }
  if (m.rows != RowKind::k16) out["rows"] = rows_name(m.rows);
  if (m.heavy_hitters) out["heavy_hitters"] = "true";
  if (m.pruned) {
    const PrunedPolicy& p = *m.pruned;
    out["pruned"] =
        JsonText({{"selector", p.selector}, {"budget", p.budget}, {"keep", p.keep}}).str();
  }
  if (m.layer_budgets) out["layer_budgets"] = to_json(*m.layer_budgets).str();
  if (!m.chat.is_null()) out["chat"] = m.chat.str();
  if (!m.after.empty()) out["after"] = JsonText(m.after).str();
  return out;
}

std::string calibration_text(const Calibration& calibration) {
  return JsonText({{"queries", calibration.queries},
                   {"source", calibration.source},
                   {"coarse_keep", calibration.coarse_keep}})
      .str();
}

struct SqzWriter::State {
  IndexMetadata metadata;
  ContainerWriter file;
};

SqzWriter::SqzWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
SqzWriter::~SqzWriter() = default;

Result<uint64_t> SqzWriter::planned_bytes(const IndexMetadata& metadata,
                                          const ClusterCounts& clusters) {
  SQZ_ASSIGN_OR_RETURN(const ContainerLayout layout, lay_out(metadata, clusters, "index"));
  return layout.bytes;
}

Result<std::unique_ptr<SqzWriter>> SqzWriter::create(Env& env, const std::string& path,
                                                     bool replace, IndexMetadata metadata,
                                                     const ClusterCounts& clusters) {
  if (metadata.producer.empty()) metadata.producer = producer_name();
  metadata.version = std::max(metadata.version, kFormatVersion);
  SQZ_ASSIGN_OR_RETURN(ContainerLayout layout, lay_out(metadata, clusters, path));
  SQZ_ASSIGN_OR_RETURN(ContainerWriter file,
                       ContainerWriter::create(env, path, replace, std::move(layout)));
  std::unique_ptr<State> state(new State{std::move(metadata), std::move(file)});
  return std::unique_ptr<SqzWriter>(new SqzWriter(std::move(state)));
}

Status SqzWriter::write_state(int64_t layer, const StateTensor& tensor) {
  State& s = *state_;
  const std::string name = layer_prefix(layer) + kStatePrefix + tensor.name;
  const PlannedTensor* planned = s.file.find(name);
  const auto type = [](const auto& one) {
    return concat(dtype_name(one.dtype), shape_text(one.shape));
  };
  if (planned == nullptr || type(*planned) != type(tensor)) {
    return Refuse{s.file.path(), Code::kInvalidArgument}(
        name, type(tensor), planned == nullptr ? "no such tensor" : type(*planned));
  }
  if (s.file.was_put(*planned)) {
    return Refuse{s.file.path(), Code::kInvalidArgument}(name, "it again", "each tensor once");
  }
  return s.file.put(
      *planned, {static_cast<const std::byte*>(tensor.data), static_cast<size_t>(planned->bytes)});
}

Status SqzWriter::write_layer(int64_t layer, const LayerView& data) {
  State& s = *state_;
  const Refuse refuse{s.file.path(), Code::kInternal};
  Status status;
  for (const StateTensor& state : data.state) {
    if (state.data != nullptr) SQZ_RETURN_IF_ERROR(write_state(layer, state));
  }
  each_tensor(
      s.metadata, data, [&](const std::string& name, const auto* pointer, DType dtype, Dims dims) {
        if (!status.ok()) return;
        dims.insert(dims.begin(), data.kv_heads);
        const PlannedTensor* planned = s.file.find(layer_prefix(layer) + name);
        if (pointer == nullptr || planned == nullptr || planned->dtype != dtype ||
            planned->shape != dims) {
          status =
              refuse(layer_prefix(layer) + name, pointer == nullptr ? "nothing" : shape_text(dims),
                     planned == nullptr ? "nothing" : shape_text(planned->shape));
          return;
        }
        status = s.file.put(*planned,
                            std::as_bytes(std::span(reinterpret_cast<const std::byte*>(pointer),
                                                    static_cast<size_t>(planned->bytes))));
      });
  return status;
}

Result<uint64_t> SqzWriter::commit(const Calibration& calibration) {
  State& s = *state_;
  const auto table_of = [&](const CalibrationTable& table) {
    return std::span<const float>(calibration.*table.values);
  };
  SQZ_RETURN_IF_ERROR(
      check_calibration(calibration, table_of, s.metadata, s.file.path(), Code::kInternal));
  for (const CalibrationTable& table : calibration_tables(s.metadata)) {
    SQZ_RETURN_IF_ERROR(
        s.file.put(table.name, std::as_bytes(std::span(calibration.*table.values))));
  }
  return s.file.commit({{kCalibrationKey, calibration_text(calibration)}});
}

}  // namespace sqz
