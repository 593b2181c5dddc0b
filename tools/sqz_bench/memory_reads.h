// Plain vector reads of memory: what the machine's bandwidth is measured with.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "libruntime/session/thread_pool.h"

namespace sqz::bench {

class MemoryReader {
 public:
  explicit MemoryReader(int threads) : pool_(threads) {}
  // Reads every byte of `regions` once, in pieces of 1 MiB that the threads take in turn; returns
  // the exclusive or of their words, so that no read can be left out.
  uint64_t read(const std::vector<std::span<const std::byte>>& regions);

 private:
  ThreadPool pool_;
};

}  // namespace sqz::bench
