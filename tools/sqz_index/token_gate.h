// Limits the tokens that a device works on at a time. Documents enter in the order in which they
// came, as long as their tokens together are within the limit. A longer document enters alone.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace sqz {

class TokenGate {
 public:
  // 0: one document at a time, whatever its length.
  explicit TokenGate(int64_t limit) : limit_(std::max<int64_t>(limit, 1)) {}

  // Holds its tokens until it is destroyed.
  class Turn {
   public:
    Turn(TokenGate& gate, int64_t tokens)
        : gate_(gate), tokens_(std::min(std::max<int64_t>(tokens, 1), gate.limit_)) {
      std::unique_lock lock(gate_.mutex_);
      const int64_t place = gate_.arrived_++;
      gate_.changed_.wait(
          lock, [&] { return place == gate_.let_in_ && gate_.inside_ + tokens_ <= gate_.limit_; });
      ++gate_.let_in_;
      gate_.inside_ += tokens_;
      gate_.changed_.notify_all();
    }
    ~Turn() {
      const std::lock_guard lock(gate_.mutex_);
      gate_.inside_ -= tokens_;
      gate_.changed_.notify_all();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    TokenGate& gate_;
    const int64_t tokens_;
  };

 private:
  const int64_t limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t arrived_ = 0, let_in_ = 0, inside_ = 0;
};

}  // namespace sqz
