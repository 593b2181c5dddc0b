// Reads the layer budgets of --layers L.json, a profile of sqz-profile-layers.
#pragma once

#include <string>

#include "formats/layers_file.h"

namespace sqz {

// The value of --layers that gives all layers the same budget, whatever the index embeds.
inline constexpr const char* kUniformLayers = "uniform";

// Returns the budgets of a profile. kMismatch, with the field that differs, if it is of another
// model; other errors are those of read_layers_file().
Result<LayerBudgets> read_layer_budgets(const std::string& path, const ModelDescription& model);

}  // namespace sqz
