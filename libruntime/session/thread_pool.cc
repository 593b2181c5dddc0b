#include "libruntime/session/thread_pool.h"

#include <new>

namespace sqz {
namespace {

constexpr int kSpins = 500;  // 10 to 20 microseconds

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  threads_.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int worker = 1; worker < threads; ++worker) {
      threads_.emplace_back([this, worker] { serve(worker); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::stop() {
  stopping_ = true;
  ++generation_;
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadPool::run(int64_t count, Call call, const void* context) {
  call_ = call;
  context_ = context;
  count_ = count;
  next_ = 0;
  failed_ = false;
  const bool alone = threads_.empty() || count <= 1;
  if (!alone) {
    busy_ = static_cast<int>(threads_.size());
    ++generation_;
    generation_.notify_all();
  }
  work(0);
  if (!alone) {
    for (int spin = 0; spin < kSpins && busy_ != 0; ++spin) pause();
    for (int busy = busy_; busy != 0; busy = busy_) busy_.wait(busy);
  }
  if (failed_) throw std::bad_alloc();
}

void ThreadPool::work(int worker) {
  try {
    for (int64_t item = next_++; item < count_; item = next_++) call_(context_, item, worker);
  } catch (...) {
    failed_ = true;
    next_ = count_;
  }
}

void ThreadPool::serve(int worker) {
  int seen = 0;
  while (true) {
    // The loops of one call follow each other within microseconds; waking a thread takes longer.
    for (int spin = 0; spin < kSpins && generation_ == seen; ++spin) pause();
    generation_.wait(seen);
    seen = generation_;
    if (stopping_) return;
    work(worker);
    if (--busy_ == 0) busy_.notify_one();
  }
}

}  // namespace sqz
