// An index that sessions are created on, on a GPU too if they are to serve from one.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "sqz/sqz.h"

namespace sqz {

// What libruntime answered, with its sentence.
Status to_status(sqz_status status);

class OpenIndex {
 public:
  static Result<std::shared_ptr<OpenIndex>> open(const std::string& path);
  // To the CUDA device of this number, where sessions will serve from.
  Status upload(int gpu);
  ~OpenIndex();
  OpenIndex(const OpenIndex&) = delete;
  OpenIndex& operator=(const OpenIndex&) = delete;

  sqz_index* get() const { return index_; }
  const sqz_index_info& info() const { return info_; }
  std::optional<int> gpu() const { return gpu_; }
  // Of its keys and values.
  DType dtype() const { return info_.dtype_code == 4 ? DType::kBF16 : DType::kF16; }

 private:
  OpenIndex() = default;

  sqz_index* index_ = nullptr;
  sqz_index_info info_ = {};
  std::optional<int> gpu_;
};

}  // namespace sqz
