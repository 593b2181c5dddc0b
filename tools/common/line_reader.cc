#include "tools/common/line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "tools/common/signals.h"

namespace sqz {

bool LineReader::ready() const {
  pollfd input = {descriptor_, POLLIN, 0};
  return ended_ || buffer_.find('\n') != std::string::npos || ::poll(&input, 1, 0) > 0;
}

bool LineReader::next(std::string& line) {
  constexpr int kPollMilliseconds = 100;
  for (;;) {
    const size_t end = buffer_.find('\n');
    if (end != std::string::npos || (ended_ && !buffer_.empty())) {
      line = buffer_.substr(0, end);
      buffer_.erase(0, end == std::string::npos ? end : end + 1);
      return true;
    }
    if (ended_ || stop_requested()) return false;
    pollfd input = {descriptor_, POLLIN, 0};
    if (::poll(&input, 1, kPollMilliseconds) <= 0) continue;
    std::array<char, 4096> piece{};
    const ssize_t count = ::read(descriptor_, piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    ended_ = count <= 0;
    if (count > 0) buffer_.append(piece.data(), static_cast<size_t>(count));
  }
}

}  // namespace sqz
