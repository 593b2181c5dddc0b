#include "formats/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
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

// Cores that this process may use, by its affinity and the CPU quota of its container.
int usable_cores() {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  // The quota of this process's cgroup (version 2) and of those above it: "200000 100000" in
  // cpu.max is two cores.
  double quota = cores;
  std::string line;
  std::ifstream groups("/proc/self/cgroup");
  while (std::getline(groups, line) && !line.starts_with("0::")) {
  }
  std::filesystem::path group = "/sys/fs/cgroup";
  if (line.size() > 4) group += line.substr(3);
  for (; group.string().size() >= std::strlen("/sys/fs/cgroup"); group = group.parent_path()) {
    double microseconds = 0, period = 0;
    if (std::ifstream(group / "cpu.max") >> microseconds >> period && period > 0) {
      quota = std::min(quota, std::ceil(microseconds / period));
    }
  }
  return std::max(1, static_cast<int>(quota));
}

}  // namespace

int resolve_threads(int threads) {
  static const int cores = usable_cores();
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
