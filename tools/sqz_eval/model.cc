#include "tools/sqz_eval/model.h"

#include "tools/common/load_runner.h"
#include "tools/common/model_options.h"

namespace sqz::eval {

Result<std::unique_ptr<EvalModel>> EvalModel::load(const std::string& directory,
                                                   const RunnerOptions& options) {
  SQZ_RETURN_IF_ERROR(check_model_folder(directory));
  SQZ_ASSIGN_OR_RETURN(auto tokenizer, Tokenizer::load(directory));
  SQZ_ASSIGN_OR_RETURN(auto runner, load_runner(directory, options));
  return std::unique_ptr<EvalModel>(new EvalModel(std::move(runner), std::move(tokenizer)));
}

}  // namespace sqz::eval
