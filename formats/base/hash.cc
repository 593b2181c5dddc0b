#include "formats/base/hash.h"

#define XXH_INLINE_ALL  // header only: libruntime links no libxxhash
#include <xxhash.h>

#include <bit>
#include <cstring>

namespace sqz {

uint64_t xxh3_64(std::span<const std::byte> data) {
  return XXH3_64bits(data.data(), data.size());
}

std::array<std::byte, 16> xxh3_128(std::span<const std::byte> data) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data.data(), data.size()));
  return std::bit_cast<std::array<std::byte, 16>>(canonical);
}

std::string hex(uint64_t value) {
  std::array<std::byte, 8> bytes;
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(value >> (56 - 8 * i));
  return hex(bytes);
}

std::string hex(std::span<const std::byte> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(2 * bytes.size());
  for (std::byte byte : bytes) {
    out += kDigits[std::to_integer<unsigned>(byte) >> 4];
    out += kDigits[std::to_integer<unsigned>(byte) & 15u];
  }
  return out;
}

struct Xxh3Stream::State {
  XXH3_state_t xxh;
};

Xxh3Stream::Xxh3Stream() : state_(new State) {
  XXH3_64bits_reset(&state_->xxh);
}
Xxh3Stream::~Xxh3Stream() = default;

void Xxh3Stream::update(std::span<const std::byte> data) {
  XXH3_64bits_update(&state_->xxh, data.data(), data.size());
}

uint64_t Xxh3Stream::digest() const {
  return XXH3_64bits_digest(&state_->xxh);
}

}  // namespace sqz
