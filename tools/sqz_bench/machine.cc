#include "tools/sqz_bench/machine.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace sqz::bench {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

// {"L1d": "32K", "L2": "1024K", ...} of the first core.
std::map<std::string, std::string> caches() {
  std::map<std::string, std::string> out;
  for (int i = 0; i < 8; ++i) {
    const std::string folder = concat("/sys/devices/system/cpu/cpu0/cache/index", i, "/");
    const std::string level = first_line(folder + "level"), type = first_line(folder + "type");
    if (level.empty() || type == "Instruction") continue;
    out[concat("L", level, type == "Data" ? "d" : "")] = first_line(folder + "size");
  }
  return out;
}

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

}  // namespace

Machine describe_machine(const std::string& isa, int threads) {
  const std::string cpu = cpu_name(), torch = torch_version();
  const auto cores = ::sysconf(_SC_NPROCESSORS_ONLN);
  const auto memory = ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE);
  const auto sizes = caches();
  std::string cache_text;
  for (const auto& [name, size] : sizes) {
    cache_text += concat(cache_text.empty() ? "" : ", ", name, " ", size);
  }
  double load = 0;
  (void)::getloadavg(&load, 1);
  return {{{"cpu", cpu},
           {"cores", cores},
           {"caches", sizes},
           {"memory_bytes", memory},
           {"isa", isa},
           {"compiler", kCompiler},
           {"version", SQZ_VERSION},
           {"libtorch", torch},
           {"threads", threads},
           {"load", load}},
          {{"processor", concat(cpu, ", ", cores, " cores")},
           {"caches", cache_text},
           {"memory", bytes_text(static_cast<double>(memory))},
           {"kernels", isa},
           {"built by", kCompiler},
           {"sqz", SQZ_VERSION},
           {"LibTorch", torch.empty() ? "not in this build" : torch},
           {"threads", concat(threads)},
           {"load before", concat(load)}}};
}

}  // namespace sqz::bench
