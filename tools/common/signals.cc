#include "tools/common/signals.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace sqz {
namespace {

std::atomic<int> stop_signal{0};
static_assert(std::atomic<int>::is_always_lock_free);
std::string message;

void on_signal(int signal) {
  stop_signal = signal;
  (void)!::write(STDERR_FILENO, message.data(), message.size());
}

}  // namespace

void handle_signals(const std::string& tool) {
  message = "\n" + tool + ": stopping; once more to stop at once\n";
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action = {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESETHAND;  // no SA_RESTART: reading from a terminal ends
    sigaction(signal, &action, nullptr);
  }
}

Status check_stop() {
  return stop_signal != 0 ? Status(Code::kCancelled, "stopped by a signal") : Status();
}

void end_by_signal() {
  if (stop_signal == 0) return;
  ::signal(stop_signal, SIG_DFL);
  ::raise(stop_signal);
}

}  // namespace sqz
