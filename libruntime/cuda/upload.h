// Many bytes to the GPU: several threads read pieces of the file, in order, into pinned buffers of
// their own and let the copy engine take them from there.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "formats/sqz_file.h"

namespace sqz::cuda {

// From the file (through SqzFile::copy) or from other memory that outlives the upload.
struct Copy {
  int64_t layer = 0;
  const void* from = nullptr;
  std::byte* to = nullptr;  // device
  size_t bytes = 0;
  bool of_file = true;
};

class Upload {
 public:
  // `copies` in the order of their layers. Threads start at once.
  static Result<std::unique_ptr<Upload>> start(std::shared_ptr<const SqzFile> file, int device,
                                               int threads, int64_t layers,
                                               const std::vector<Copy>& copies);
  ~Upload();  // stops and waits
  // Returns once a layer's copies are done, or with the first error of any.
  Status wait(int64_t layer);

 private:
  Upload() = default;
  void work();
  Status copy_pieces();
  void finish(int64_t layer);
  void fail(const Status& status);

  std::shared_ptr<const SqzFile> file_;
  int device_ = 0;
  std::vector<Copy> pieces_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::atomic<int64_t>> left_;  // pieces, by layer
  std::mutex mutex_;
  std::condition_variable changed_;
  Status status_;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace sqz::cuda
