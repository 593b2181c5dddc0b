#include "training/qmodel_checkpoint.h"

#include <cstring>
#include <functional>
#include <map>

#include "formats/json_fields.h"
#include "formats/metadata_strings.h"
#include "formats/sqz_checksums.h"
#include "formats/sqz_container.h"

namespace sqz::training {
namespace {

using Named = std::vector<std::pair<std::string, at::Tensor*>>;

void name_parameters(const std::string& prefix, NetworkTensors& t, Named& out) {
  out.emplace_back(prefix + "hidden.weight", &t.hidden_weight);
  out.emplace_back(prefix + "scale", &t.scale);
  out.emplace_back(prefix + "shift", &t.shift);
  out.emplace_back(prefix + "output.weight", &t.output_weight);
  out.emplace_back(prefix + "output.bias", &t.output_bias);
}

// Every tensor of a state, in file order.
Named tensors_of(TrainingState& state) {
  Named out = {{"centroids", &state.centroids}};
  name_parameters("network.", state.network.parameters, out);
  name_parameters("first.", state.network.first, out);
  name_parameters("second.", state.network.second, out);
  out.emplace_back("mean", &state.network.mean);
  out.emplace_back("variance", &state.network.variance);
  out.emplace_back("best.hidden.weight", &state.best.hidden_weight);
  out.emplace_back("best.hidden.bias", &state.best.hidden_bias);
  out.emplace_back("best.output.weight", &state.best.output_weight);
  out.emplace_back("best.output.bias", &state.best.output_bias);
  return out;
}

Result<std::vector<PlannedTensor>> plan(const Named& named, const std::string& path) {
  std::vector<PlannedTensor> tensors;
  for (const auto& [name, tensor] : named) {
    tensors.push_back({name, DType::kF32, tensor->sizes().vec()});
  }
  tensors.push_back(header_hash_tensor());
  SQZ_RETURN_IF_ERROR(size_tensors(tensors, path));
  return tensors;
}

JsonMembers progress_json(const TrainingState& s) {
  return {{"step", s.network.step},
          {"best_recall", s.best_recall},
          {"best_step", s.best_step},
          {"last_better", s.last_better},
          {"loss_sum", s.loss_sum},
          {"loss_steps", s.loss_steps},
          {"loss", s.loss}};
}

Status read_progress(const JsonValue& json, const std::string& label, TrainingState& s) {
  JsonFields in(json, label);
  constexpr double kMost = 1e300;
  s.network.step = in.integer("step", 0, INT64_MAX);
  s.best_recall = in.number("best_recall", -1, 1);
  s.best_step = in.integer("best_step", 0, INT64_MAX);
  s.last_better = in.integer("last_better", 0, INT64_MAX);
  s.loss_sum = in.number("loss_sum", -kMost, kMost);
  s.loss_steps = in.integer("loss_steps", 0, INT64_MAX);
  s.loss = in.number("loss", -kMost, kMost);
  return in.status();
}

// A state with every tensor in the shape that it must have.
TrainingState blank(const NetworkShape& shape, at::Device device) {
  TrainingState s;
  s.network = make_network(shape, 0, device);
  s.best = fold(s.network);
  s.centroids = at::empty({shape.heads, shape.buckets, shape.dim},
                          at::TensorOptions(at::kFloat).device(device));
  return s;
}

}  // namespace

Status write_checkpoint(Env& env, const std::string& path, const JsonMembers& settings,
                        const TrainingState& state) {
  TrainingState copy = state;
  const Named named = tensors_of(copy);
  for (const auto& [name, tensor] : named) *tensor = tensor->cpu().contiguous();
  SQZ_ASSIGN_OR_RETURN(const auto tensors, plan(named, path));
  TensorContents contents;
  for (const auto& [name, tensor] : named) {
    contents[name] =
        std::as_bytes(std::span(tensor->data_ptr<float>(), static_cast<size_t>(tensor->numel())));
  }
  return write_container(env, path, true,
                         {{"format", "sqz"},
                          {"format_version", "1"},
                          {"kind", kind_name(FileKind::kQmodelCheckpoint)},
                          {"producer", producer_name()},
                          {"settings", JsonText(settings).str()},
                          {"progress", JsonText(progress_json(state)).str()}},
                         tensors, contents)
      .status();
}

Result<TrainingState> read_checkpoint(Env& env, const std::string& path,
                                      const JsonMembers& settings, const NetworkShape& shape,
                                      at::Device device) {
  SQZ_ASSIGN_OR_RETURN(const SqzContainer container,
                       open_container(path, FileKind::kQmodelCheckpoint, OpenMode::kMmap, env));
  MetadataStrings in(container.header.metadata, path);
  const JsonDocument found = in.json("settings"), progress = in.json("progress");
  SQZ_RETURN_IF_ERROR(in.status());
  SQZ_RETURN_IF_ERROR(check_settings(found.root(), settings, path));
  TrainingState state = blank(shape, device);
  SQZ_RETURN_IF_ERROR(read_progress(progress.root(), in.label("progress"), state));
  const Named named = tensors_of(state);
  SQZ_ASSIGN_OR_RETURN(auto tensors, plan(named, path));
  SQZ_RETURN_IF_ERROR(match_tensors(container.header, tensors, path));
  SQZ_RETURN_IF_ERROR(first_of(check_tensors(container).problems, path, Code::kCorrupt));
  for (const auto& [name, tensor] : named) {
    at::Tensor host = at::empty(tensor->sizes(), at::kFloat);
    const auto bytes = container.tensor(name);
    std::memcpy(host.data_ptr<float>(), bytes.data(), bytes.size());
    *tensor = host.to(device);
  }
  return state;
}

}  // namespace sqz::training
