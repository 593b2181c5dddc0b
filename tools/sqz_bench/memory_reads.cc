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

#if defined(__x86_64__)
[[gnu::target("avx2")]] uint64_t read_avx2(const std::byte* at, size_t size) {
  return read_piece<32>(at, size);
}
[[gnu::target("avx512f")]] uint64_t read_avx512(const std::byte* at, size_t size) {
  return read_piece<64>(at, size);
}
#endif

uint64_t read_vectors(const std::byte* at, size_t size) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512(at, size);
  if (__builtin_cpu_supports("avx2")) return read_avx2(at, size);
#endif
  return read_piece<16>(at, size);
}

}  // namespace

uint64_t MemoryReader::read(const Regions& regions) {
  std::atomic<uint64_t> total{0};
  for (const auto& region : regions) {
    const auto pieces = static_cast<int64_t>((region.size() + kPiece - 1) / kPiece);
    pool_.for_each(pieces, [&](int64_t piece, int) {
      const size_t at = static_cast<size_t>(piece) * kPiece;
      total ^= read_vectors(region.data() + at, std::min(kPiece, region.size() - at));
    });
  }
  return total;
}

Contender reading(std::string name, int threads, Regions regions,
                  std::shared_ptr<const void> owner) {
  double bytes = 0;
  for (const auto& region : regions) bytes += static_cast<double>(region.size());
  const auto reader = std::make_shared<MemoryReader>(threads);
  const auto run = [reader, regions = std::move(regions), owner = std::move(owner)](int64_t) {
    static_cast<void>(reader->read(regions));
    return Status();
  };
  return {.name = std::move(name), .run = run, .bytes = bytes};
}

}  // namespace sqz::bench
