// The indexes of a pass: one for every view and kind, all from one dense pass of the model.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "libindex/builder.h"
#include "tools/sqz_eval/model.h"
#include "tools/sqz_eval/settings.h"
#include "tools/sqz_eval/trials.h"

namespace sqz::eval {

// Where indexes go.
struct IndexStore {
  std::string folder;
  bool keep = false;   // false: temporaries, removed with PassIndexes
  bool reuse = false;  // those in the folder that fit are taken as they are
  bool force = false;  // those in the folder are replaced
};

// Keeps the files; removes them at the end if they are temporaries.
class PassIndexes {
 public:
  // `progress(done)`, 0 .. 1. The dense pass is skipped if every index is there already.
  static Result<PassIndexes> make(EvalModel& model, const Pass& pass,
                                  const std::vector<IndexKind>& kinds, const IndexStore& store,
                                  const EvalBuildOptions& build,
                                  const std::function<void(double)>& progress);
  ~PassIndexes();
  PassIndexes(PassIndexes&& other) noexcept = default;
  PassIndexes& operator=(PassIndexes&&) = delete;

  const std::string& path(size_t view, const IndexKind& kind) const;
  bool built() const { return built_; }  // false: all were reused

 private:
  struct File {
    size_t view;
    IndexKind kind;
    std::string path;
    bool present;  // to be reused
  };
  PassIndexes() = default;

  std::vector<File> files_;
  bool temporary_ = false, built_ = false;
};

// The rows of a view out of [heads, N, d].
std::vector<float> visible_rows(std::span<const float> all, const View& view, int64_t heads,
                                int64_t tokens, int64_t dim);

}  // namespace sqz::eval
