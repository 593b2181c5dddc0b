// Makes calls of CUDA fail on purpose. Programs that link sqz_cuda_faults make every call of the
// CUDA runtime that the libraries use, kernel launches and the driver's functions included, through
// this (the linker's --wrap). Until begin() nothing fails.
#pragma once

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <cstdint>
#include <string>
#include <vector>

namespace sqz::cuda::test::faults {

// Calls are counted from here on, those of all threads, and call number `first` fails; with `lost`
// every later one fails, too, as on a GPU that is gone. A call that fails does nothing, but what
// frees still frees, and what waits still waits. It also leaves the error for cudaGetLastError().
void begin(int64_t first, bool lost = false);
// From here on nothing fails. The name of the call that failed first; "" if there were fewer.
std::string end();
// Blocks of memory, streams and events that there are.
int64_t live();

// Takes the memory of the GPU but for `left` bytes.
class Ballast {
 public:
  explicit Ballast(size_t left) {
    size_t free = 0, total = 0;
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    for (size_t bytes = size_t{1} << 40; bytes >= size_t{1} << 20; bytes /= 2) {
      void* block = nullptr;
      while (bytes + left <= free && cudaMalloc(&block, bytes) == cudaSuccess) {
        blocks_.push_back(block);
        EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
      }
      cudaGetLastError();
    }
  }
  ~Ballast() {
    for (void* block : blocks_) cudaFree(block);
  }
  Ballast(const Ballast&) = delete;
  Ballast& operator=(const Ballast&) = delete;

 private:
  std::vector<void*> blocks_;
};

// `step` once for each call of CUDA in it, of which that one fails, and then with all after it
// failing, too. A step that fails says so: failed() is its message, or "" if it did without the
// call. Then nothing that it made is there any more, no error waits for the host's next launch, and
// `after`, which is told whether it failed, does the same without faults. With `every` > 1 the
// second part takes one call in so many.
template <class Step, class After>
void fail_each_call(const char* name, Step&& step, After&& after, int64_t every = 1) {
  int64_t calls = 0, refused = 0;
  for (const bool lost : {false, true}) {
    for (int64_t n = 0;; n += lost ? every : 1) {
      const int64_t before = live();
      begin(n, lost);
      const std::string message = step();
      const std::string call = end();
      calls += !call.empty();
      SCOPED_TRACE(::testing::Message()
                   << name << ", call " << n << ", " << call << (lost ? " and all after it" : ""));
      if (!message.empty()) {
        ++refused;
        EXPECT_EQ(live(), before) << message;
        if (!lost) {
          const bool launch = call.find("LaunchKernel") != call.npos;
          EXPECT_THAT(message, ::testing::ContainsRegex(launch ? "kernel|LaunchKernel" : call));
        }
      }
      EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
      after(!message.empty());
      EXPECT_EQ(live(), before);
      if (::testing::Test::HasFailure()) return;
      if (call.empty()) break;
    }
  }
  EXPECT_GT(refused, 0) << name << ": no failed call was noticed";
  std::printf("%s: %lld calls failed, %lld of them ended it\n", name, static_cast<long long>(calls),
              static_cast<long long>(refused));
}

// `step` with so many bytes left on the GPU, from none to 4 GiB. It says whether it failed for want
// of memory, and then left nothing; after(failed) follows it.
template <class Step, class After>
void with_little_memory(Step&& step, After&& after) {
  int refused = 0;
  for (size_t left = 0; left <= size_t{4} << 30; left = left == 0 ? size_t{1} << 20 : 2 * left) {
    SCOPED_TRACE(::testing::Message() << left << " bytes left");
    const int64_t before = live();
    bool failed = false;
    {
      const Ballast ballast(left);
      failed = step();
    }
    refused += failed;
    EXPECT_EQ(live(), before);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    after(failed);
  }
  EXPECT_GT(refused, 0);
}

}  // namespace sqz::cuda::test::faults
