// A fixed set of threads for loops over independent items. Any thread may run any item, so results
// must not depend on the thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace sqz {

class ThreadPool {
 public:
  // `threads` >= 1 workers, the calling thread of for_each() being worker 0. Throws what
  // std::thread throws.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // f(item, worker) for item 0 .. count - 1, worker in [0, size()). Returns when all are done.
  // Allocation-free. An exception of f ends the loop early and std::bad_alloc is thrown here.
  template <class Function>
  void for_each(int64_t count, const Function& f) {
    run(
        count,
        [](const void* context, int64_t item, int worker) {
          (*static_cast<const Function*>(context))(item, worker);
        },
        &f);
  }

 private:
  using Call = void (*)(const void* context, int64_t item, int worker);
  void run(int64_t count, Call call, const void* context);
  void work(int worker);
  void serve(int worker);
  void stop();

  std::vector<std::thread> threads_;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int> generation_{0};  // counts loops; a change wakes the threads
  std::atomic<int> busy_{0};        // threads that have not finished the current loop
  std::atomic<bool> stopping_{false};
  std::atomic<bool> failed_{false};
};

}  // namespace sqz
