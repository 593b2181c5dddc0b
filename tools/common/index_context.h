// The fixed context of an index, for a Runner: sqz.hpp behind FixedContext.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "formats/model_description.h"
#include "formats/tokenizer.h"
#include "sqz/sqz.hpp"
#include "training/runner.h"

namespace sqz {

// An index that several contexts may share.
class OpenIndex {
 public:
  static Result<std::shared_ptr<OpenIndex>> open(const std::string& path);
  // Copies the index to this CUDA device. Contexts that are created afterwards serve from there.
  Status upload(int gpu);

  const runtime::Index& index() const { return index_; }
  const sqz_index_info& info() const { return info_; }
  std::optional<int> gpu() const { return gpu_; }

 private:
  explicit OpenIndex(const std::string& path) : index_(path), info_(index_.describe()) {}

  runtime::Index index_;
  sqz_index_info info_;
  std::optional<int> gpu_;
};

// Opens indexes that must be of this model and tokenizer (null: of any).
Result<std::vector<std::shared_ptr<OpenIndex>>> open_indexes(const std::vector<std::string>& paths,
                                                             const ModelDescription& model,
                                                             const Tokenizer* tokenizer,
                                                             const std::string& model_path);

class IndexContext final : public FixedContext {
 public:
  // Serves from the GPU of the indexes if they were uploaded, else on the CPU. The first index is
  // at position 0, the others stand one behind the other. `options` is borrowed for the call; its
  // device is ignored, and max_contexts is at least that of the indexes.
  static Result<std::unique_ptr<IndexContext>> create(
      const std::vector<std::shared_ptr<OpenIndex>>& indexes, sqz_session_options options);
  // On the CPU, of an index that is not shared.
  static Result<std::unique_ptr<IndexContext>> open(const std::string& path,
                                                    const sqz_session_options& options);
  // Puts another index behind those that are there, from position `offset` of the text on. The
  // options said how many contexts there will be.
  Status append(const std::shared_ptr<const OpenIndex>& index, int64_t offset);
  const sqz_index_info& info() const { return index_->info(); }
  int64_t tokens() const override { return tokens_; }
  // The next token stands at this position, whatever the length of the index.
  void place(int64_t tokens) { tokens_ = tokens; }
  // The next token stands at position 0, and the contexts in front of it. The options said that
  // there are at least two contexts.
  void end_at_zero();
  std::optional<int> device() const override { return index_->gpu(); }
  DType device_dtype() const override;
  Status attend(int64_t layer, const ContextQueries& queries) override;

  // Totals since open() or reset_stats(), of one layer or (-1) of all.
  Result<sqz_stats> stats(int64_t layer = -1) const;
  Status reset_stats();

 private:
  explicit IndexContext(std::shared_ptr<const OpenIndex> index)
      : index_(std::move(index)), tokens_(index_->info().tokens) {}

  std::shared_ptr<const OpenIndex> index_;
  int64_t tokens_;
  std::optional<runtime::Session> session_;
  std::vector<sqz_context> documents_ = {{0, 0, 0}};
  std::vector<sqz_context> contexts_;  // of the requests of a call
  std::vector<int64_t> positions_;
};

}  // namespace sqz
