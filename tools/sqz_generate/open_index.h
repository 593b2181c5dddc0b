// An index that sessions are created on, on a GPU too if they are to serve from one.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "formats/sqz_file.h"
#include "sqz/sqz.h"

namespace sqz {

// What libruntime answered, with its sentence.
Status to_status(sqz_status status);

class OpenIndex {
 public:
  // `gpu`: number of the CUDA device that the index is uploaded to, or none.
  static Result<std::shared_ptr<const OpenIndex>> open(const std::string& path,
                                                       std::optional<int> gpu);
  ~OpenIndex();
  OpenIndex(const OpenIndex&) = delete;
  OpenIndex& operator=(const OpenIndex&) = delete;

  sqz_index* get() const { return index_; }
  const sqz_index_info& info() const { return info_; }
  std::optional<int> gpu() const { return gpu_; }
  DType dtype() const { return dtype_; }  // of its keys and values

 private:
  OpenIndex() = default;

  sqz_index* index_ = nullptr;
  sqz_index_info info_ = {};
  std::optional<int> gpu_;
  DType dtype_ = DType::kBF16;
};

}  // namespace sqz
