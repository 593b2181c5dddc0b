#include "formats/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace sqz {
namespace {

Status run_task(const std::function<Status(int64_t)>& task, int64_t index) {
  try {
    return task(index);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "out of memory");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, error.what());
  }
}

}  // namespace

int quota_cores(const std::string& groups, const std::string& root) {
  std::string line;  // "200000 100000" in cpu.max is two cores
  std::ifstream file(groups);
  while (std::getline(file, line) && !line.starts_with("0::")) {
  }
  std::filesystem::path group = root;
  if (line.size() > 4) group += line.substr(3);
  double least = std::numeric_limits<int>::max();
  for (; group.string().size() >= root.size(); group = group.parent_path()) {
    double microseconds = 0, period = 0;
    if (std::ifstream(group / "cpu.max") >> microseconds >> period && period > 0) {
      least = std::min(least, std::ceil(microseconds / period));
    }
  }
  return std::max(1, static_cast<int>(least));
}

int resolve_threads(int threads) {
  // hardware_concurrency() knows the affinity.
  static const int cores =
      std::min(std::max(1, static_cast<int>(std::thread::hardware_concurrency())),
               quota_cores("/proc/self/cgroup", "/sys/fs/cgroup"));
  return threads > 0 ? threads : cores;
}

Status parallel_for(int64_t count, int threads, const std::function<Status(int64_t)>& task) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  int64_t first_failure = count;
  Status failure;

  auto work = [&] {
    // Every index below a failed one was handed out before it and is still finished.
    while (!failed.load()) {
      const int64_t index = next.fetch_add(1);
      if (index >= count) return;
      Status status = run_task(task, index);
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      failed.store(true);
      if (index < first_failure) {
        first_failure = index;
        failure = std::move(status);
      }
    }
  };

  std::vector<std::jthread> helpers;
  const int64_t wanted = std::min<int64_t>(threads, count) - 1;
  try {
    for (int64_t i = 0; i < wanted; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads: the ones there are do the work.
  }
  work();
  helpers.clear();
  return failure;
}

}  // namespace sqz
