// XXH3, as our files use it: one-shot and streaming. Results are printed as lower-case hexadecimal,
// most significant digit first (the canonical form of xxHash).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace sqz {

uint64_t xxh3_64(std::span<const std::byte> data);
// Canonical (big-endian) bytes of XXH3-128.
std::array<std::byte, 16> xxh3_128(std::span<const std::byte> data);

std::string hex(uint64_t value);                    // 16 digits
std::string hex(std::span<const std::byte> bytes);  // 2 digits a byte

// XXH3-64 of data that arrives in pieces.
class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();

  void update(std::span<const std::byte> data);
  uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sqz
