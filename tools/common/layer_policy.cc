#include "tools/common/layer_policy.h"

namespace sqz {

Result<LayerBudgets> read_layer_budgets(const std::string& path, const ModelDescription& model) {
  SQZ_ASSIGN_OR_RETURN(const LayersFile file, read_layers_file(path));
  const Status same = check_same_model(file.model, model, path);
  if (!same.ok()) {
    return Status(same.code(),
                  concat("--layers: ", same.message(), "; profile this model's layers"));
  }
  return LayerBudgets(file);
}

}  // namespace sqz
