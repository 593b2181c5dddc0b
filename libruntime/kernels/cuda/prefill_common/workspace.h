// A workspace given by the caller, cut into arrays.
#pragma once

#include <cstdint>
#include <type_traits>

namespace sqz::cuda {

class Workspace {
 public:
  // Null only counts.
  explicit Workspace(uint8_t* base) : base_(base) {}

  template <class T>
  void take(T*& pointer, int64_t count) {
    if (base_ != nullptr) pointer = reinterpret_cast<T*>(base_ + used_);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;
  uint8_t* base_;
  int64_t used_ = 0;
};

}  // namespace sqz::cuda
