#include "tools/sqz_bench/machine.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "tools/sqz_bench/torch_attention.h"

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
JsonMembers caches() {
  JsonMembers out;
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

JsonMembers describe_machine(const std::string& isa, int threads) {
  double load = 0;
  (void)::getloadavg(&load, 1);
  return {{"cpu", cpu_name()},
          {"cores", ::sysconf(_SC_NPROCESSORS_ONLN)},
          {"caches", caches()},
          {"memory_bytes", ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE)},
          {"isa", isa},
          {"compiler", kCompiler},
          {"version", SQZ_VERSION},
          {"libtorch", torch_version()},
          {"threads", threads},
          {"load", load}};
}

Rows machine_rows(const JsonMembers& machine) {
  const JsonDocument document = JsonText(machine).parsed();
  const auto field = [&](const char* name) { return *document.root().find(name); };
  const auto text = [&](const char* name) { return std::string(field(name).string()); };
  std::string cache_text;
  for (const JsonValue& size : field("caches").items()) {
    cache_text += concat(cache_text.empty() ? "" : ", ", size.key(), " ", size.string());
  }
  const std::string torch = text("libtorch");
  return {{"processor", concat(text("cpu"), ", ", field("cores").number(), " cores")},
          {"caches", cache_text},
          {"memory", bytes_text(field("memory_bytes").number())},
          {"kernels", text("isa")},
          {"built by", text("compiler")},
          {"sqz", text("version")},
          {"LibTorch", torch.empty() ? "not in this build" : torch},
          {"threads", concat(field("threads").number())},
          {"load before", concat(field("load").number())}};
}

}  // namespace sqz::bench
