// Attention over the fixed context of an index, for Runner::generate: libruntime behind
// FixedContext.
#pragma once

#include <memory>
#include <string>

#include "sqz/sqz.h"
#include "tools/sqz_generate/device_staging.h"
#include "tools/sqz_generate/open_index.h"
#include "training/runner.h"

namespace sqz {

class IndexContext : public FixedContext {
 public:
  // A session where the index is: on its GPU, or on the CPU. `options` is borrowed for the call;
  // its device is not looked at.
  static Result<std::unique_ptr<IndexContext>> create(std::shared_ptr<const OpenIndex> index,
                                                      sqz_session_options options);
  // The same of an index that nobody else uses, on the CPU.
  static Result<std::unique_ptr<IndexContext>> open(const std::string& path,
                                                    const sqz_session_options& options);
  ~IndexContext() override;

  const sqz_index_info& info() const { return index_->info(); }
  int64_t tokens() const override { return info().tokens; }
  // kCancelled once the answer is interrupted or the tool stopped.
  Status attend(int64_t layer, int64_t first, int64_t count, const float* q, float* out,
                float* lse) override;
  Status attend_requests(int64_t layer, const HostQueries& queries) override;
  std::optional<int> device() const override { return index_->gpu(); }
  DType device_dtype() const override { return index_->dtype(); }
  Status attend_on_device(int64_t layer, const DeviceQueries& queries) override;

  // Totals since open() or reset_stats(), of one layer or (-1) of all.
  Result<sqz_stats> stats(int64_t layer = -1) const;
  Status reset_stats();

 private:
  explicit IndexContext(std::shared_ptr<const OpenIndex> index) : index_(std::move(index)) {}
  // The same through the GPU's memory. Prompts are rounded to the index's type there.
  Status attend_staged(sqz_attend_args& args, const HostQueries& queries);

  std::shared_ptr<const OpenIndex> index_;
  sqz_session* session_ = nullptr;
  std::vector<int64_t> positions_;
  std::unique_ptr<DeviceStaging> staging_;  // if the session serves from a GPU
  std::vector<std::byte> rounded_;          // q, then out
};

}  // namespace sqz
