#include "libruntime/select/registry.h"

#include <algorithm>

#include "libruntime/select/layer_spread.h"

namespace sqz {
namespace {

// Quest, section 3.4: attention of the first two layers is not sparse.
constexpr SelectorType kSelectors[] = {
    {"auto", nullptr, 0},          {"squeezed", prepare_squeezed, 0}, {"dense", prepare_dense, 0},
    {"quest", prepare_quest, 2},   {"ideal", prepare_ideal, 0},       {"stream", prepare_stream, 0},
    {"window", prepare_window, 0}, {"h2o", prepare_h2o, 0},           {"saap", prepare_saap, 0}};

}  // namespace

std::span<const SelectorType> selector_types() {
  return kSelectors;
}

SelectorKind fitting_selector(const IndexMetadata& metadata) {
  if (metadata.pruned) {
    const auto* own = std::find_if(
        std::begin(kSelectors), std::end(kSelectors),
        [&](const SelectorType& type) { return metadata.pruned->selector == type.name; });
    if (own != std::end(kSelectors)) return static_cast<SelectorKind>(own - kSelectors);
  }
  return metadata.partition == Partition::kPages     ? SelectorKind::kQuest
         : metadata.partition == Partition::kBuckets ? SelectorKind::kSaap
                                                     : SelectorKind::kSqueezed;
}

Result<PreparedSelector> prepare_selector(const SelectorInputs& inputs,
                                          const SelectionRequest& request) {
  const SelectorType& type = kSelectors[static_cast<int>(request.selector)];
  const auto layers = static_cast<int>(inputs.metadata.model.layers);
  if (request.dense_layers < -1 || request.dense_layers > layers) {
    return Status(Code::kInvalidArgument, concat("dense_layers: found ", request.dense_layers,
                                                 ", expected -1 to ", layers));
  }
  if (inputs.metadata.pruned && inputs.metadata.pruned->selector != type.name) {
    return Status(Code::kUnsupported,
                  bad_field(inputs.path, "partition", "pruned",
                            concat("an index with all its keys: this one was pruned for selector ",
                                   inputs.metadata.pruned->selector, " and serves that alone")));
  }
  const int dense_layers = request.dense_layers == 0    ? type.dense_layers
                           : request.dense_layers == -1 ? 0
                                                        : request.dense_layers;
  SelectorInputs spread = inputs;
  SQZ_ASSIGN_OR_RETURN(spread.layer_keep,
                       layer_scales(inputs.metadata, inputs.index.layers, request, dense_layers));
  return type.prepare(spread, request);
}

}  // namespace sqz
