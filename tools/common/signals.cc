#include "tools/common/signals.h"

#include <poll.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tools/common/exit_codes.h"

namespace sqz {
namespace {

constexpr long kGraceNanoseconds = 500'000'000;
constexpr time_t kCheckpointSeconds = 1;  // more, for a checkpoint that is being written

// A handler rather than blocked signals and sigwait: OpenBLAS starts threads before main(), and a
// signal goes to whichever thread does not block it.
std::atomic<int> stop_signal{0};
std::atomic<bool> resumable{false}, interruptible{false}, was_interrupted{false};
static_assert(std::atomic<int>::is_always_lock_free);
sem_t signalled;

struct Outputs {
  std::mutex mutex;
  std::vector<std::string> paths;
};

struct LastWords {
  std::mutex mutex;
  std::function<void()> say;
};

LastWords& last_words() {
  static auto* const instance = new LastWords;
  return *instance;
}

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

// The handler only counts: everything else is the watching thread's.
void on_signal(int signal) {
  if (signal == SIGINT && interruptible.exchange(false)) {
    was_interrupted = true;
    return;
  }
  stop_signal = signal;
  sem_post(&signalled);
}

void wait_for_signal() {
  while (sem_wait(&signalled) != 0) {
  }
}

void watch(std::string tool, std::function<void()> goodbye) {
  wait_for_signal();
  const std::string message =
      tool + (resumable ? ": stopping; the same command with --resume goes on\n" : ": stopping\n");
  (void)!::write(STDERR_FILENO, message.data(), message.size());
  timespec until = {};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += kGraceNanoseconds;
  until.tv_sec += until.tv_nsec / 1'000'000'000 + (resumable ? kCheckpointSeconds : 0);
  until.tv_nsec %= 1'000'000'000;
  while (sem_timedwait(&signalled, &until) != 0 && errno == EINTR) {
  }
  say_last_words();
  Outputs& protected_outputs = outputs();
  const std::lock_guard lock(protected_outputs.mutex);
  for (const std::string& path : protected_outputs.paths) remove_temporaries(path);
  pollfd out = {STDOUT_FILENO, POLLOUT, 0};
  if (::poll(&out, 1, 0) == 1 && out.revents == POLLOUT) goodbye();  // else it would wait
  ::_exit(stop_exit_code());
}

}  // namespace

void watch_signals(const std::string& tool, std::function<void()> goodbye) {
  sem_init(&signalled, 0, 0);
  std::thread(watch, tool, std::move(goodbye)).detach();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action = {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;  // as nohup and shells ask for background jobs
    action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigaction(signal, &action, nullptr);
  }
}

bool stop_requested() {
  return stop_signal != 0;
}

Status check_stop() {
  return stop_requested() ? Status(Code::kCancelled, "stopped by a signal") : Status();
}

Interruptible::Interruptible() {
  was_interrupted = false;
  interruptible = true;
}

Interruptible::~Interruptible() {
  interruptible = false;
}

bool interrupted() {
  return was_interrupted;
}

void set_last_words(std::function<void()> words) {
  const std::lock_guard lock(last_words().mutex);
  last_words().say = std::move(words);
}

void say_last_words() {
  const std::lock_guard lock(last_words().mutex);
  if (last_words().say) std::exchange(last_words().say, nullptr)();
}

void set_resumable(const std::string& checkpoint) {
  resumable = !checkpoint.empty();
}

int stop_exit_code() {
  if (resumable) return kExitResumable;
  return stop_signal == SIGINT ? kExitInterrupted : kExitTerminated;
}

void protect_output(const std::string& path) {
  Outputs& all = outputs();
  const std::lock_guard lock(all.mutex);
  all.paths.push_back(path);
}

}  // namespace sqz
