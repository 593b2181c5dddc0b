// Which kernels a piece of work consists of, and how long each holds up the end: through CUDA's
// profiling library (libcupti.so), which is loaded at run time.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/status.h"

namespace sqz::bench {

struct KernelRecord {
  std::string name;
  uint64_t begin = 0, end = 0;  // ns
};

// {kernel: microseconds a call, ..., "idle": those in which none ran}. A kernel's time is from its
// beginning, or from the end of the one before where that is later, to its end: they may overlap,
// and so the parts add up to the whole. Records in any order, of one stream.
std::map<std::string, double> kernel_parts(std::vector<KernelRecord> records, int64_t calls);

// "void a::(anonymous namespace)::attend_kernel<128, (bool)1>(a::Params)" -> "attend_kernel"
std::string short_kernel_name(std::string_view demangled);

// What `work`, which waits for the GPU, makes it run. kUnsupported without the library.
Result<std::vector<KernelRecord>> record_kernels(const std::function<Status()>& work);

}  // namespace sqz::bench
