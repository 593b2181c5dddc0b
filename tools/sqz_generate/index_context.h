// Attention over the fixed context of an index, for Runner::generate: libruntime behind
// FixedContext.
#pragma once

#include <memory>
#include <string>

#include "sqz/sqz.h"
#include "tools/sqz_generate/device_staging.h"
#include "training/runner.h"

namespace sqz {

class IndexContext : public FixedContext {
 public:
  // `options` is borrowed for the call. With device_type 2 the index is uploaded first.
  static Result<std::unique_ptr<IndexContext>> open(const std::string& path,
                                                    const sqz_session_options& options);
  ~IndexContext() override;

  int64_t tokens() const override { return info_.tokens; }
  Status attend(int64_t layer, int64_t first, int64_t count, const float* q, float* out,
                float* lse) override;

  // Totals since open() or reset_stats(), of one layer or (-1) of all.
  Result<sqz_stats> stats(int64_t layer = -1) const;
  Status reset_stats();

 private:
  IndexContext() = default;
  // The same through the GPU's memory. Prompts are rounded to the index's type there.
  Status attend_staged(sqz_attend_args& args, int64_t count, const float* q, float* out,
                       float* lse);

  sqz_index* index_ = nullptr;
  sqz_session* session_ = nullptr;
  sqz_index_info info_ = {};
  std::vector<int64_t> positions_;
  std::unique_ptr<DeviceStaging> staging_;  // if the session serves from a GPU
  int32_t device_id_ = 0;
  DType dtype_ = DType::kBF16;      // of the index
  std::vector<std::byte> rounded_;  // q, then out
};

}  // namespace sqz
