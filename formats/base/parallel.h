// One loop over threads, for work whose pieces do not depend on each other.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "formats/base/status.h"

namespace sqz {

// The number of threads that an option asks for. 0 stands for all cores that this process may use
// by its affinity and the CPU quota of its cgroup.
int resolve_threads(int threads);

// The cores that the CPU quotas of cgroups (version 2) leave: of the group that the file `groups`
// names (/proc/self/cgroup), a folder below `root` (/sys/fs/cgroup), and of those above it. INT_MAX
// if there is no quota.
int quota_cores(const std::string& groups, const std::string& root);

// Calls task(0) .. task(count - 1), each once, on at most `threads` threads including the caller's.
// After a failure no new task is started. Returns the failure of the lowest index, which does not
// depend on the number of threads. An exception of a task becomes a Status.
Status parallel_for(int64_t count, int threads, const std::function<Status(int64_t)>& task);

}  // namespace sqz
