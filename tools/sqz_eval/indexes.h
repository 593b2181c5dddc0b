// The indexes of a pass: one for every view and kind, all from one dense pass of the model.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "formats/base/temporaries.h"
#include "formats/tokenizer.h"
#include "libindex/builder.h"
#include "tools/sqz_eval/settings.h"
#include "tools/sqz_eval/trials.h"
#include "training/runner.h"

namespace sqz::eval {

// The model under evaluation.
struct EvalModel {
  std::unique_ptr<Runner> runner;
  std::unique_ptr<Tokenizer> tokenizer;

  const ModelDescription& description() const { return runner->config().description; }
};

// Temporary files, removed at the end.
class PassIndexes {
 public:
  PassIndexes() = default;
  PassIndexes(const PassIndexes&) = delete;
  PassIndexes& operator=(const PassIndexes&) = delete;

  // To be called once. An index of several documents is made of passes of their own.
  // `progress(done)`, 0 .. 1, is of the dense pass.
  Status make(EvalModel& model, const Pass& pass, const std::vector<IndexKind>& kinds,
              const BuildOptions& build, const std::function<void(double)>& progress);

  struct File {
    size_t view;
    IndexKind kind;
    size_t document;
    int64_t tokens;  // of the document, those included that the view leaves out
    TemporaryName name;
  };
  // The file of document number `document`.
  const File& file(size_t view, const IndexKind& kind, size_t document) const;

 private:
  Status make_document(EvalModel& model, const Pass& pass, const std::vector<IndexKind>& kinds,
                       size_t document, const BuildOptions& build,
                       const std::function<void(double)>& progress);
  std::vector<File> files_;
};

// The rows of a view out of [heads, N, d].
std::vector<float> visible_rows(std::span<const float> all, const View& view, int64_t heads,
                                int64_t tokens, int64_t dim);

}  // namespace sqz::eval
