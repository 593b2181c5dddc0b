#include "tools/sqz_bench/kernel_times.h"

#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>

namespace sqz::bench {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;

// CUPTI's callbacks carry no argument of ours.
struct Collector {
  decltype(&cuptiActivityGetNextRecord) next = nullptr;
  std::mutex mutex;
  std::vector<KernelRecord> records;
};
Collector& collector() {
  static Collector one;
  return one;
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free);
  return status == 0 ? text.get() : name;
}

void give_buffer(uint8_t** buffer, size_t* size, size_t* most) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = *buffer == nullptr ? 0 : kBufferBytes;
  *most = 0;
}

void take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  Collector& to = collector();
  const std::lock_guard lock(to.mutex);
  CUpti_Activity* activity = nullptr;
  while (valid > 0 && to.next(buffer, valid, &activity) == CUPTI_SUCCESS) {
    if (activity->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(activity);
    to.records.push_back({short_kernel_name(demangled(kernel->name)), kernel->start, kernel->end});
  }
  std::free(buffer);
}

template <class Function>
bool find(const char* name, Function& function) {
  static void* const library = [] {
    for (const char* file : {"libcupti.so.13", "libcupti.so.12", "libcupti.so"}) {
      if (void* opened = ::dlopen(file, RTLD_NOW)) return opened;
    }
    return static_cast<void*>(nullptr);
  }();
  function = reinterpret_cast<Function>(library == nullptr ? nullptr : ::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

Result<std::vector<KernelRecord>> record_kernels(const std::function<Status()>& work) {
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityFlushAll) flush = nullptr;
  Collector& to = collector();
  if (!find("cuptiActivityRegisterCallbacks", register_callbacks) ||
      !find("cuptiActivityEnable", enable) || !find("cuptiActivityDisable", disable) ||
      !find("cuptiActivityFlushAll", flush) || !find("cuptiActivityGetNextRecord", to.next)) {
    return Status(Code::kUnsupported, "libcupti.so was not found");
  }
  if (register_callbacks(give_buffer, take_buffer) != CUPTI_SUCCESS ||
      enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) != CUPTI_SUCCESS) {
    return Status(Code::kUnsupported, "libcupti.so refused to record kernels");
  }
  const Status status = work();
  flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  disable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  SQZ_RETURN_IF_ERROR(status);
  const std::lock_guard lock(to.mutex);
  return std::exchange(to.records, {});
}

}  // namespace sqz::bench
