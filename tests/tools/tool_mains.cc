#include "tests/tools/tool_mains.h"

#define main sqz_index_main
#include "tools/sqz_index/main.cc"
#undef main
#ifdef SQZ_WITH_TRAINING
#define main sqz_eval_main
#include "tools/sqz_eval/main.cc"
#undef main
#define main sqz_generate_main
#include "tools/sqz_generate/main.cc"
#undef main
#define main sqz_profile_layers_main
#include "tools/sqz_profile_layers/main.cc"
#undef main
#define main sqz_train_qmodel_main
#include "tools/sqz_train_qmodel/main.cc"
#undef main
#endif

namespace sqz {

ToolMain tool_main(std::string_view name) {
  if (name == "sqz-index") return sqz_index_main;
#ifdef SQZ_WITH_TRAINING
  if (name == "sqz-eval") return sqz_eval_main;
  if (name == "sqz-generate") return sqz_generate_main;
  if (name == "sqz-profile-layers") return sqz_profile_layers_main;
  if (name == "sqz-train-qmodel") return sqz_train_qmodel_main;
#endif
  return nullptr;
}

}  // namespace sqz
