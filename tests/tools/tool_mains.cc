#include "tests/tools/tool_mains.h"

#include "tools/common/mains.h"

namespace sqz {

ToolMain tool_main(std::string_view name) {
  if (name == "sqz-index") return index_main;
#ifdef SQZ_WITH_TRAINING
  if (name == "sqz-eval") return eval_main;
  if (name == "sqz-generate") return generate_main;
  if (name == "sqz-profile-layers") return profile_layers_main;
  if (name == "sqz-train-qmodel") return train_qmodel_main;
#endif
  return nullptr;
}

}  // namespace sqz
