// Every operator new of the process counts, and can be made to fail; so can the start of a thread.
// For the one source file of a test program.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <new>

#include "sqz/sqz.h"

namespace {
std::atomic<int64_t> allocations{0};
std::atomic<int64_t> failing{-1};                    // the number of the one that fails
std::atomic<int64_t> started{0}, failing_start{-1};  // threads

std::atomic<int64_t> live{0}, most_live{0};  // bytes

void* counted(size_t size) {
  if (allocations++ == failing) throw std::bad_alloc();
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  const int64_t bytes = live += static_cast<int64_t>(::malloc_usable_size(memory));
  for (int64_t most = most_live; bytes > most && !most_live.compare_exchange_weak(most, bytes);) {
  }
  return memory;
}
void freed(void* memory) noexcept {
  if (memory != nullptr) live -= static_cast<int64_t>(::malloc_usable_size(memory));
  std::free(memory);
}
}  // namespace

// Default visibility, so that libsqz.so uses them too.
#define SQZ_REPLACED __attribute__((visibility("default")))
SQZ_REPLACED void* operator new(size_t size) {
  return counted(size);
}
SQZ_REPLACED void* operator new(size_t size, const std::nothrow_t&) noexcept {
  try {
    return counted(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
SQZ_REPLACED void* operator new[](size_t size) {
  return counted(size);
}
SQZ_REPLACED void operator delete(void* memory) noexcept {
  freed(memory);
}
SQZ_REPLACED void operator delete[](void* memory) noexcept {
  freed(memory);
}
SQZ_REPLACED void operator delete(void* memory, size_t) noexcept {
  freed(memory);
}
SQZ_REPLACED void operator delete[](void* memory, size_t) noexcept {
  freed(memory);
}

extern "C" SQZ_REPLACED int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                                           void* (*run)(void*), void* argument) {
  static const auto real =
      reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  return started++ == failing_start ? EAGAIN : real(thread, attributes, run, argument);
}

namespace sqz::testing {

// Calls once for each of its allocations, or of so many, of which that one fails: the call says so,
// or did without it. With `starts`, instead, for each thread that it starts.
inline void fail_each_allocation(const std::function<sqz_status()>& call, int64_t every = 1,
                                 bool starts = false) {
  std::atomic<int64_t>&count = starts ? started : allocations,
  &fail = starts ? failing_start : failing;
  const sqz_status expected = starts ? SQZ_IO : SQZ_OUT_OF_MEMORY;
  int64_t refused = 0;
  bool more = true;
  for (int64_t failed = 0; more; failed += every) {
    fail = count + failed;
    const sqz_status status = call();
    more = count > fail;
    fail = -1;
    refused += status != SQZ_OK;
    ASSERT_TRUE(status == SQZ_OK || status == expected)
        << (starts ? "thread " : "allocation ") << failed << ": status " << status << ", "
        << sqz_last_error();
  }
  EXPECT_GT(refused, 0) << "nothing that failed was noticed";
}

}  // namespace sqz::testing
