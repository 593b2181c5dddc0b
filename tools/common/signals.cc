#include "tools/common/signals.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <filesystem>
#include <mutex>
#include <thread>
#include <vector>

#include "tools/common/exit_codes.h"

namespace sqz {
namespace {

constexpr timespec kGrace = {1, 500000000};

std::atomic<int> stop_signal{0};

struct Outputs {
  std::mutex mutex;
  std::vector<std::string> paths;
};

// Never destroyed: the watching thread may outlive main().
Outputs& outputs() {
  static auto* const instance = new Outputs;
  return *instance;
}

void remove_temporaries(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  const std::string prefix = concat(fs::path(path).filename().string(), ".tmp.", ::getpid(), ".");
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, error)) {
    if (entry.path().filename().string().starts_with(prefix)) fs::remove(entry.path(), error);
  }
}

void watch(sigset_t signals, std::string tool) {
  int signal = 0;
  if (sigwait(&signals, &signal) != 0) return;
  stop_signal = signal;
  const std::string message = tool + ": stopping\n";
  (void)!::write(STDERR_FILENO, message.data(), message.size());
  (void)sigtimedwait(&signals, nullptr, &kGrace);
  Outputs& protected_outputs = outputs();
  const std::lock_guard lock(protected_outputs.mutex);
  for (const std::string& path : protected_outputs.paths) remove_temporaries(path);
  ::_exit(stop_exit_code());
}

}  // namespace

void watch_signals(const std::string& tool) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  // Threads inherit the mask, so that only the watching thread ever takes these signals.
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread(watch, signals, tool).detach();
}

bool stop_requested() {
  return stop_signal != 0;
}

Status check_stop() {
  return stop_requested() ? Status(Code::kCancelled, "stopped by a signal") : Status();
}

int stop_exit_code() {
  return stop_signal == SIGTERM ? kExitTerminated : kExitInterrupted;
}

void protect_output(const std::string& path) {
  Outputs& all = outputs();
  const std::lock_guard lock(all.mutex);
  all.paths.push_back(path);
}

}  // namespace sqz
