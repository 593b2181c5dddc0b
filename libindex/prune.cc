#include "libindex/prune.h"

#include "formats/sqz_layout.h"
#include "formats/sqz_writer.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/static_selection.h"
#include "libruntime/session/served_index.h"

namespace sqz {
namespace {

struct KeptKeys {
  PreparedSelector prepared;
  std::vector<std::vector<KeyRun>> runs;  // [layer * kv_heads + head]
};

Result<KeptKeys> choose(const ServedIndex& index, const SelectionRequest& policy) {
  const ModelDescription& model = index.metadata().model;
  KeptKeys out;
  SQZ_ASSIGN_OR_RETURN(
      out.prepared, prepare_selector({.metadata = index.metadata(),
                                      .calibration = index.calibration,
                                      .index = {.layers = index.layers,
                                                .tables = index.tables,
                                                .group = model.group_size(),
                                                .scale = static_cast<float>(model.attention_scale),
                                                .kernels = nullptr},
                                      .path = index.file->path()},
                                     policy));
  if (out.prepared.plan.dense) {
    return Status(
        Code::kInvalidArgument,
        concat(index.file->path(), ": the budget reads every key: there is nothing to leave out"));
  }
  const SelectorLimits limits = out.prepared.selector->limits();
  SelectWorkspace workspace = limits.workspace;
  std::vector<KeyRun> room(static_cast<size_t>(limits.read));
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const LayerView& view = index.layers[static_cast<size_t>(layer)];
    for (int64_t head = 0; head < model.kv_heads; ++head) {
      HeadSelection selection;
      selection.read.room = room;
      if (view.slots > 0) {
        SQZ_RETURN_IF_ERROR(
            out.prepared.selector->select({.layer = layer, .kv_head = head}, workspace, selection));
      }
      const auto runs = selection.read.runs();
      out.runs.emplace_back(runs.begin(), runs.end());
    }
  }
  return out;
}

// Rows of `width` items of the chosen slots, heads one after the other.
template <class T>
std::vector<T> gather(const void* rows, int64_t slots, int64_t width,
                      std::span<const std::vector<KeyRun>> heads) {
  std::vector<T> out;
  for (size_t head = 0; head < heads.size(); ++head) {
    const T* own = static_cast<const T*>(rows) + static_cast<int64_t>(head) * slots * width;
    for (const KeyRun& run : heads[head]) {
      out.insert(out.end(), own + run.first * width, own + (run.first + run.length) * width);
    }
  }
  return out;
}

Status write_layer(SqzWriter& writer, LayerView view, int64_t layer,
                   std::span<const std::vector<KeyRun>> heads) {
  const int64_t size = dtype_size(view.dtype);
  LayerView data = view;
  data.levels = 0;
  data.pages = data.buckets = 0;
  std::vector<std::byte> keys, values;
  std::vector<uint32_t> positions;
  if (view.slots > 0) {
    keys = gather<std::byte>(view.keys, view.slots, view.head_dim * size, heads);
    values = gather<std::byte>(view.values, view.slots, view.value_dim * size, heads);
    positions = gather<uint32_t>(view.positions, view.slots, 1, heads);
  }
  data.slots = std::ssize(positions) / view.kv_heads;
  data.keys = keys.data();
  data.values = values.data();
  data.positions = positions.data();
  return writer.write_layer(layer, data);
}

int64_t count(const std::vector<KeyRun>& runs) {
  int64_t keys = 0;
  for (const KeyRun& run : runs) keys += run.length;
  return keys;
}

Status check_prunable(const SqzFile& index, const SelectionRequest& policy) {
  if (!is_static(policy.selector)) {
    return {Code::kInvalidArgument,
            concat("selector: found ", selector_name(policy.selector),
                   ", expected window, stream or h2o: what others read depends on the question")};
  }
  if (policy.dense_layers > 0) {
    return {Code::kInvalidArgument,
            "dense_layers: found some, expected none: nothing of such a "
            "layer can be left out"};
  }
  const Refuse refuse{index.path(), Code::kUnsupported};
  if (index.metadata().has_codes()) {
    return refuse("rows", "codes",
                  "rows of 16 bits: what is pruned has no clusters for codes to stand on");
  }
  if (!index.metadata().pruned) return {};
  return refuse("partition", "pruned", "an index with all its keys");
}

}  // namespace

Result<PruneReport> prune_index(Env& env, std::shared_ptr<const SqzFile> index,
                                const SelectionRequest& policy, const std::string& output,
                                bool replace, int threads) {
  const auto prune = [&]() -> Result<PruneReport> {
    SQZ_RETURN_IF_ERROR(check_prunable(*index, policy));
    SQZ_RETURN_IF_ERROR(index->verify({}, threads));
    SQZ_ASSIGN_OR_RETURN(const auto served, make_served_index(index));
    SQZ_ASSIGN_OR_RETURN(const KeptKeys choice, choose(*served, policy));

    const auto heads = static_cast<size_t>(index->metadata().model.kv_heads);
    PruneReport report;
    report.budget = choice.prepared.plan.asked_budget;
    report.keep = choice.prepared.plan.asked_keep;
    IndexMetadata metadata = index->metadata();
    metadata.producer.clear();  // this build's
    metadata.partition = Partition::kPruned;
    metadata.page_size = metadata.buckets = metadata.hidden = 0;
    metadata.levels = 0;
    metadata.has_value_means = metadata.heavy_hitters = false;
    metadata.layer_budgets.reset();
    metadata.pruned = {selector_name(policy.selector), report.budget, report.keep};
    for (size_t l = 0; l < metadata.layers.size(); ++l) {
      const LayerView& view = served->layers[l];
      LayerPolicy& layer = metadata.layers[l];
      layer.kept = count(choice.runs[l * heads]);
      if (view.slots > 0 && layer.kept == 0) {
        return Status(Code::kInvalidArgument,
                      concat("layer ", l,
                             ": the budget leaves it no key but sink and tail, expected "
                             "one at least"));
      }
      report.kept.push_back(layer.kept);
    }
    SQZ_ASSIGN_OR_RETURN(const auto writer,
                         SqzWriter::create(env, output, replace, std::move(metadata),
                                           ClusterCounts(served->layers.size())));
    for (size_t l = 0; l < served->layers.size(); ++l) {
      SQZ_RETURN_IF_ERROR(write_layer(*writer, served->layers[l], static_cast<int64_t>(l),
                                      std::span(choice.runs).subspan(l * heads, heads)));
    }
    SQZ_ASSIGN_OR_RETURN(report.bytes, writer->commit({}));
    return report;
  };
  return within_memory(prune, "not enough memory to prune the index");
}

}  // namespace sqz
