#include "tools/sqz_bench/memory_reads.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace sqz::bench {
namespace {

constexpr size_t kPiece = size_t{1} << 20;

// One body for every instruction set; 16 vectors in flight where registers are 64 bytes wide.
template <size_t kBytes>
[[gnu::always_inline]] inline uint64_t read_piece(const std::byte* at, size_t size) {
  typedef uint64_t Vector __attribute__((vector_size(kBytes)));
  constexpr size_t kStreams = 8, kStep = kStreams * kBytes;
  Vector sum[kStreams] = {};
  const std::byte* const end = at + size / kStep * kStep;
  for (const std::byte* p = at; p != end; p += kStep) {
    for (size_t i = 0; i < kStreams; ++i) {
      Vector x;
      std::memcpy(&x, p + i * kBytes, kBytes);
      sum[i] ^= x;
    }
  }
  uint64_t words[kStreams * kBytes / 8];
  std::memcpy(words, sum, sizeof(words));
  uint64_t total = 0;
  for (const uint64_t word : words) total ^= word;
  for (size_t i = size / kStep * kStep; i < size; ++i) total ^= std::to_integer<uint64_t>(at[i]);
  return total;
}

uint64_t read_base(const std::byte* at, size_t size) {
  return read_piece<16>(at, size);
}
#if defined(__x86_64__)
[[gnu::target("avx2")]] uint64_t read_avx2(const std::byte* at, size_t size) {
  return read_piece<32>(at, size);
}
[[gnu::target("avx512f")]] uint64_t read_avx512(const std::byte* at, size_t size) {
  return read_piece<64>(at, size);
}
#endif

auto best_read() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
  return read_base;
}

}  // namespace

uint64_t MemoryReader::read(const std::vector<std::span<const std::byte>>& regions) {
  const auto read = best_read();
  std::atomic<uint64_t> total{0};
  for (const auto& region : regions) {
    const auto pieces = static_cast<int64_t>((region.size() + kPiece - 1) / kPiece);
    pool_.for_each(pieces, [&](int64_t piece, int) {
      const size_t at = static_cast<size_t>(piece) * kPiece;
      total ^= read(region.data() + at, std::min(kPiece, region.size() - at));
    });
  }
  return total;
}

}  // namespace sqz::bench
