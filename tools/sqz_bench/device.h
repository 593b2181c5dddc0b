// Where a benchmark's sessions run: memory for its tensors, and how its calls are timed.
#pragma once

#include <benchmark/benchmark.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "formats/base/status.h"

namespace sqz::bench {

// Methods throw std::runtime_error if the GPU fails.
class Device {
 public:
  virtual ~Device() = default;
  // CUDA's number of the GPU; -1 is the CPU.
  virtual int number() const = 0;
  virtual void* stream() const = 0;  // cudaStream_t of the calls
  // Memory there with a copy of `bytes`.
  virtual std::shared_ptr<void> copy(std::span<const std::byte> bytes) const = 0;
  // Times calls; `call` gets a number from 0 on. `warm` runs after the calls that warm up. A GPU
  // replays a CUDA graph of so many calls, and an iteration has the time of one.
  virtual void time(benchmark::State& state, int64_t graph_calls,
                    const std::function<void(int64_t)>& call,
                    const std::function<void()>& warm) const = 0;
};

// `capability` "8.6": serve as from a GPU of compute capability 8.6, with its shared memory and the
// kernels for it; empty: as from the GPU that there is. kInvalidArgument if there is no such GPU or
// sqz was built without CUDA.
Result<std::unique_ptr<Device>> make_gpu(int number, const std::string& capability);

}  // namespace sqz::bench
