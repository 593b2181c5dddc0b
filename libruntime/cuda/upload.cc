#include "libruntime/cuda/upload.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/prefill/classify/weights.h"

namespace sqz::cuda {

// The stream and the pinned buffers of all uploads to one GPU. They stay as long as there is an
// upload, because pinned memory is made and freed while others cannot use the GPU. With one stream,
// what others copy waits for one piece at most.
class Staging {
 public:
  struct Buffer {
    ~Buffer() {
      if (copied != nullptr) forget(cudaEventDestroy(copied));
      if (data != nullptr) forget(cudaFreeHost(data));
    }
    Status create() {
      SQZ_RETURN_IF_CUDA_ERROR(
          cudaHostAlloc(reinterpret_cast<void**>(&data), kPiece, cudaHostAllocDefault));
      // Threads that wait for it sleep and leave the core to others.
      SQZ_RETURN_IF_CUDA_ERROR(
          cudaEventCreateWithFlags(&copied, cudaEventDisableTiming | cudaEventBlockingSync));
      return {};
    }

    std::mutex mutex;  // held from the wait for `copied` until the next copy is queued
    std::byte* data = nullptr;
    cudaEvent_t copied = nullptr;
  };

  // With two buffers for each thread: one is read into, the other copied from. The device is
  // current.
  static Result<std::shared_ptr<Staging>> of(int device, size_t threads) {
    static std::map<int, std::weak_ptr<Staging>> all;
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Staging> staging = all[device].lock();
    if (staging == nullptr) {
      staging = std::make_shared<Staging>();
      SQZ_RETURN_IF_ERROR(staging->stream_.create());
      all[device] = staging;
    }
    while (staging->buffers_.size() < 2 * threads) {
      auto buffer = std::make_unique<Buffer>();
      SQZ_RETURN_IF_ERROR(buffer->create());
      staging->buffers_.push_back(std::move(buffer));
    }
    return staging;
  }

  cudaStream_t stream() const { return stream_.get(); }
  // The buffers in turn.
  Buffer& next() {
    const std::lock_guard lock(mutex_);
    return *buffers_[next_++ % buffers_.size()];
  }

 private:
  static inline std::mutex mutex_;
  Stream stream_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  size_t next_ = 0;
};

namespace {

void list_clusters(const Copy& piece, std::byte* out) {
  const auto* offsets = static_cast<const uint32_t*>(piece.from);
  const auto begin = static_cast<uint32_t>(piece.slot);
  const auto end = begin + static_cast<uint32_t>(piece.bytes / sizeof(uint32_t));
  auto* to = reinterpret_cast<uint32_t*>(out);
  // The cluster that holds `begin`: the last that does not begin behind it.
  auto c = static_cast<uint32_t>(std::upper_bound(offsets, offsets + piece.clusters + 1, begin) -
                                 offsets - 1);
  for (uint32_t slot = begin; slot < end; ++slot) {
    while (offsets[c + 1] <= slot) ++c;
    *to++ = slot == offsets[c] ? c | kFirstSlot : c;
  }
}

// The largest of these numbers of 16 bits, without their signs, as bits.
int16_t largest_of(const std::byte* from, size_t bytes) {
  const auto* numbers = reinterpret_cast<const uint16_t*>(from);
  int16_t most = 0;
  for (size_t i = 0; i < bytes / 2; ++i) {
    most = std::max(most, static_cast<int16_t>(numbers[i] & 0x7FFF));
  }
  return most;
}

}  // namespace

Result<std::unique_ptr<Upload>> Upload::start(std::shared_ptr<const SqzFile> file, int device,
                                              int threads, int64_t layers,
                                              const std::vector<Copy>& copies) {
  std::unique_ptr<Upload> upload(new Upload);
  upload->file_ = std::move(file);
  upload->device_ = device;
  upload->left_ = std::vector<std::atomic<int64_t>>(static_cast<size_t>(layers));
  upload->large_ = std::vector<std::atomic<bool>>(static_cast<size_t>(layers));
  for (const Copy& copy : copies) upload->cut(copy);
  for (std::atomic<int64_t>& left : upload->left_) left += left > 0;
  const auto most = std::max<size_t>(1, std::min<size_t>(threads, upload->pieces_.size()));
  SQZ_ASSIGN_OR_RETURN(upload->staging_, Staging::of(device, most));
  for (size_t i = 0; i < most; ++i) {
    upload->threads_.emplace_back([u = upload.get()] { u->work(); });
  }
  return upload;
}

void Upload::cut(const Copy& copy) {
  // Weights come in whole rows of tiles.
  const auto strip = static_cast<size_t>(copy.columns > 0 ? weight_bytes(1, copy.columns) : 1);
  const size_t most = kPiece / strip * strip;
  for (size_t done = 0; done < copy.bytes; done += most) {
    const size_t before = copy.columns > 0 ? done / strip * kWeightRows : 0;
    Copy piece = copy;
    piece.bytes = std::min(most, copy.bytes - done);
    piece.to = copy.to + done;
    piece.slot = static_cast<int64_t>(done / sizeof(uint32_t));
    piece.from = static_cast<const std::byte*>(copy.from) +
                 (copy.clusters > 0  ? 0
                  : copy.columns > 0 ? 4 * before * static_cast<size_t>(copy.columns)
                                     : done);
    piece.rows = std::min(static_cast<int64_t>(piece.bytes / strip) * kWeightRows,
                          copy.rows - static_cast<int64_t>(before));
    pieces_.push_back(piece);
    ++left_[static_cast<size_t>(copy.layer)];
  }
}

Upload::~Upload() {
  stop_ = true;
  join();
  if (staging_ != nullptr) forget(cudaStreamSynchronize(staging_->stream()));
}

void Upload::join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

Status Upload::wait(int64_t layer) {
  const std::atomic<int64_t>& left = left_[static_cast<size_t>(layer)];
  if (left.load(std::memory_order_acquire) == 0) return {};
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return left == 0 || !status_.ok(); });
  return left == 0 ? Status() : status_;
}

void Upload::work() {
  try {
    const Status status = copy_pieces();
    if (!status.ok()) fail(status);
  } catch (...) {
    fail({Code::kOutOfMemory, "upload: out of memory"});
  }
}

// `weights`: workspace.
Status Upload::read(const Copy& piece, std::vector<float>& weights, std::byte* out) const {
  if (piece.columns > 0) {
    weights.resize(static_cast<size_t>(piece.rows * piece.columns));
    SQZ_RETURN_IF_ERROR(file_->copy(piece.from, std::as_writable_bytes(std::span(weights))));
    if (pack_weights(weights.data(), piece.rows, piece.columns, out)) return {};
    return {Code::kUnsupported,
            bad_field(file_->path(), concat("layers.", piece.layer, ".classifier weights"),
                      "a number that is NaN or above 65504 in size",
                      "float16 numbers, which the GPU computes with")};
  }
  if (piece.clusters > 0) {
    list_clusters(piece, out);
    return {};
  }
  if (piece.of_file) return file_->copy(piece.from, {out, piece.bytes});
  std::memcpy(out, piece.from, piece.bytes);
  return {};
}

Status Upload::copy_pieces() {
  const CurrentDevice current(device_);
  std::vector<float> weights;
  for (size_t i = next_++; i < pieces_.size() && !stop_; i = next_++) {
    const Copy& piece = pieces_[i];
    {
      Staging::Buffer& buffer = staging_->next();
      const std::lock_guard lock(buffer.mutex);
      SQZ_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(buffer.copied));
      SQZ_RETURN_IF_ERROR(read(piece, weights, buffer.data));
      if (piece.most > 0 && largest_of(buffer.data, piece.bytes) > piece.most) {
        large_[static_cast<size_t>(piece.layer)] = true;
      }
      SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(piece.to, buffer.data, piece.bytes,
                                               cudaMemcpyHostToDevice, staging_->stream()));
      SQZ_RETURN_IF_CUDA_ERROR(cudaEventRecord(buffer.copied, staging_->stream()));
    }
    SQZ_RETURN_IF_ERROR(finish(piece.layer));
  }
  return {};
}

Status Upload::finish(int64_t layer) {
  std::atomic<int64_t>& left = left_[static_cast<size_t>(layer)];
  if (--left > 1) return {};
  SQZ_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(staging_->stream()));
  // With the mutex, so that a waiter is either before its test or asleep.
  const std::lock_guard lock(mutex_);
  left = 0;
  changed_.notify_all();
  return {};
}

void Upload::fail(const Status& status) {
  stop_ = true;
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = status;
  changed_.notify_all();
}

}  // namespace sqz::cuda
