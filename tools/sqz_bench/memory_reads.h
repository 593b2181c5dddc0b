// Plain vector reads of memory: what the machine's bandwidth is measured with.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "libruntime/session/thread_pool.h"
#include "tools/sqz_bench/measure.h"

namespace sqz::bench {

using Regions = std::vector<std::span<const std::byte>>;

class MemoryReader {
 public:
  explicit MemoryReader(int threads) : pool_(threads) {}
  // Reads every byte of `regions` once, in pieces of 1 MiB that the threads take in turn; returns
  // the exclusive or of their words, so that no read can be left out.
  uint64_t read(const Regions& regions);

 private:
  ThreadPool pool_;
};

// A contender that reads `regions`, which `owner` keeps.
Contender reading(std::string name, int threads, Regions regions,
                  std::shared_ptr<const void> owner);

}  // namespace sqz::bench
