#include <algorithm>

#include "tools/sqz_bench/kernel_times.h"

namespace sqz::bench {

std::string short_kernel_name(std::string_view demangled) {
  std::string plain;
  int depth = 0;
  for (size_t i = 0; i < demangled.size(); ++i) {
    constexpr std::string_view kHidden = "(anonymous namespace)::";
    if (demangled.substr(i).starts_with(kHidden)) {
      i += kHidden.size() - 1;
      continue;
    }
    const char c = demangled[i];
    if (c == '<') ++depth;
    if (c == '(' && depth == 0) break;
    if (depth == 0) plain += c;
    if (c == '>') --depth;
  }
  const size_t cut = plain.find_last_of(" :");
  return cut == std::string::npos ? plain : plain.substr(cut + 1);
}

std::map<std::string, double> kernel_parts(std::vector<KernelRecord> records, int64_t calls) {
  std::sort(records.begin(), records.end(),
            [](const KernelRecord& a, const KernelRecord& b) { return a.end < b.end; });
  std::map<std::string, double> out;
  const auto add = [&](const std::string& name, uint64_t ns) {
    out[name] += 1e-3 * static_cast<double>(ns) / static_cast<double>(calls);
  };
  uint64_t last = records.empty() ? 0 : records.front().begin;
  for (const KernelRecord& record : records) {
    const uint64_t begin = std::max(record.begin, last);
    if (begin > last) add("idle", begin - last);
    add(record.name, record.end - begin);
    last = record.end;
  }
  return out;
}

}  // namespace sqz::bench
