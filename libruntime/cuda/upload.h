// Many bytes to the GPU: several threads read pieces of the file, in order, into pinned buffers,
// and the copy engine takes them from there, one at a time.
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
  // Not 0: `from` are numbers of 16 bits; has_large() tells if the size of one, as bits, is above
  // it.
  int16_t most = 0;
  // Not 0: `from` is float32 [rows, columns] of the file, `to` gets the weights that the kernels
  // read (kernels/cuda/prefill/classify/weights.h), `bytes` of them.
  int64_t rows = 0, columns = 0;
  // Not 0: `from` are the offsets [clusters + 1] of a KV head, uint32; `to` gets the clusters of
  // its slots from `slot` on, with kFirstSlot (kernels/cuda/decode/attend/kernel.h).
  int64_t clusters = 0, slot = 0;
};

inline constexpr size_t kPiece = size_t{2} << 20;  // long enough for the bus, short for a cache

class Staging;

class Upload {
 public:
  // `copies` in the order of their layers. Threads start at once. 8 rows of weights
  // are at most kPiece bytes each.
  static Result<std::unique_ptr<Upload>> start(std::shared_ptr<const SqzFile> file, int device,
                                               int threads, int64_t layers,
                                               const std::vector<Copy>& copies);
  ~Upload();  // stops, and waits for the copies under way
  // Returns once a layer's copies are done, or with the first error of any.
  Status wait(int64_t layer);
  // Once wait() returned: whether a number of the layer is above its Copy::most.
  bool has_large(int64_t layer) const { return large_[static_cast<size_t>(layer)]; }
  // Returns when the threads have ended.
  void join();

 private:
  Upload() = default;
  void work();
  void cut(const Copy& copy);
  Status copy_pieces();
  Status read(const Copy& piece, std::vector<float>& weights, std::byte* out) const;
  Status finish(int64_t layer);
  void fail(const Status& status);

  std::shared_ptr<const SqzFile> file_;
  int device_ = 0;
  std::shared_ptr<Staging> staging_;
  std::vector<Copy> pieces_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  // By layer. Pieces, and 1 for the wait behind the last one.
  std::vector<std::atomic<int64_t>> left_;
  std::vector<std::atomic<bool>> large_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Status status_;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace sqz::cuda
