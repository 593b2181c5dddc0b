#include "formats/base/temporaries.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <utility>

namespace sqz {
namespace {

enum : int { kFree, kBusy, kUsed };

// Not a container: a signal handler reads it.
struct Slot {
  std::atomic<int> state{kFree};
  std::array<char, 4096> path{};
};
static_assert(std::atomic<int>::is_always_lock_free);

std::array<Slot, 2048> slots;

}  // namespace

void remember_temporary(const std::string& path) {
  if (path.size() >= slots[0].path.size()) return;
  for (Slot& slot : slots) {
    int expected = kFree;
    if (!slot.state.compare_exchange_strong(expected, kBusy)) continue;
    std::memcpy(slot.path.data(), path.c_str(), path.size() + 1);
    slot.state = kUsed;
    return;
  }
}

void forget_temporary(const std::string& path) {
  for (Slot& slot : slots) {
    if (slot.state == kUsed && path == slot.path.data()) slot.state = kFree;
  }
}

void remove_temporaries() {
  for (Slot& slot : slots) {
    if (slot.state == kUsed) ::unlink(slot.path.data());
  }
}

TemporaryName::TemporaryName(std::string path) : path_(std::move(path)) {
  remember_temporary(path_);
}

TemporaryName::TemporaryName(TemporaryName&& other) noexcept
    : path_(std::exchange(other.path_, {})) {}

TemporaryName::~TemporaryName() {
  if (path_.empty()) return;
  ::unlink(path_.c_str());
  forget_temporary(path_);
}

}  // namespace sqz
