#include "libruntime/cuda/upload.h"

#include <algorithm>
#include <cstring>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/prefill/classify/weights.h"

namespace sqz::cuda {
namespace {

constexpr int kBuffers = 4;  // of a thread: one is read into, others copied from

// The CUDA objects of one thread.
struct Lane {
  cudaStream_t stream = nullptr;
  std::byte* buffer[kBuffers] = {};
  cudaEvent_t copied[kBuffers] = {};
  const Copy* pending[kBuffers] = {};

  Status create() {
    SQZ_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < kBuffers; ++i) {
      SQZ_RETURN_IF_CUDA_ERROR(
          cudaHostAlloc(reinterpret_cast<void**>(&buffer[i]), kPiece, cudaHostAllocDefault));
      SQZ_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&copied[i], cudaEventDisableTiming));
    }
    return {};
  }
  // Copies buffer `at` to its place.
  Status send(const Copy& piece, int at) {
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(piece.to, buffer[at], piece.bytes, cudaMemcpyHostToDevice, stream));
    SQZ_RETURN_IF_CUDA_ERROR(cudaEventRecord(copied[at], stream));
    pending[at] = &piece;
    return {};
  }
  ~Lane() {
    if (stream != nullptr) forget(cudaStreamSynchronize(stream));
    for (int i = 0; i < kBuffers; ++i) {
      if (buffer[i] != nullptr) forget(cudaFreeHost(buffer[i]));
      if (copied[i] != nullptr) forget(cudaEventDestroy(copied[i]));
    }
    if (stream != nullptr) forget(cudaStreamDestroy(stream));
  }
};

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
  const auto most = std::max<size_t>(1, std::min<size_t>(threads, upload->pieces_.size()));
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
  Lane lane;
  SQZ_RETURN_IF_ERROR(lane.create());
  const auto drain = [&](int i) -> Status {
    if (lane.pending[i] == nullptr) return {};
    SQZ_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(lane.copied[i]));
    finish(lane.pending[i]->layer);
    lane.pending[i] = nullptr;
    return {};
  };
  std::vector<float> weights;
  int at = 0;
  while (!stop_) {
    const size_t index = next_++;
    if (index >= pieces_.size()) break;
    const Copy& piece = pieces_[index];
    SQZ_RETURN_IF_ERROR(drain(at));
    SQZ_RETURN_IF_ERROR(read(piece, weights, lane.buffer[at]));
    if (piece.most > 0 && largest_of(lane.buffer[at], piece.bytes) > piece.most) {
      large_[static_cast<size_t>(piece.layer)] = true;
    }
    SQZ_RETURN_IF_ERROR(lane.send(piece, at));
    at = (at + 1) % kBuffers;
  }
  for (int i = 0; i < kBuffers; ++i) SQZ_RETURN_IF_ERROR(drain((at + i) % kBuffers));
  return {};
}

void Upload::finish(int64_t layer) {
  if (--left_[static_cast<size_t>(layer)] > 0) return;
  // With the mutex, so that a waiter is either before its test or asleep.
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Upload::fail(const Status& status) {
  stop_ = true;
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = status;
  changed_.notify_all();
}

}  // namespace sqz::cuda
