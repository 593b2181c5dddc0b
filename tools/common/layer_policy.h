// Layer budgets as the tools take them: --layers L.json, a profile of sqz-profile-layers.
#pragma once

#include <string>

#include "formats/layers_file.h"

namespace sqz {

// What --layers says for "every layer alike", whatever an index embeds.
inline constexpr const char* kUniformLayers = "uniform";

// The budgets of a profile of this very model. kMismatch names what differs; else what
// read_layers_file() refuses.
Result<LayerBudgets> read_layer_budgets(const std::string& path, const ModelDescription& model);

}  // namespace sqz
