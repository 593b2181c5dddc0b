#include "tools/sqz_bench/memory_reads.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace sqz::bench {
namespace {

constexpr size_t kPiece = size_t{1} << 20;

// 256 bytes in flight, in vectors as wide as the machine's.
#if defined(__x86_64__)
[[gnu::target_clones("default", "avx2", "avx512f")]]
#endif
uint64_t
read_vectors(const std::byte* at, size_t size) {
  typedef uint64_t Vector __attribute__((vector_size(64)));
  constexpr size_t kStreams = 4, kStep = kStreams * sizeof(Vector);
  Vector sum[kStreams] = {};
  const std::byte* const end = at + size / kStep * kStep;
  for (const std::byte* p = at; p != end; p += kStep) {
    for (size_t i = 0; i < kStreams; ++i) {
      Vector x;
      std::memcpy(&x, p + i * sizeof(Vector), sizeof(Vector));
      sum[i] ^= x;
    }
  }
  uint64_t words[kStep / 8];
  std::memcpy(words, sum, sizeof(words));
  uint64_t total = 0;
  for (const uint64_t word : words) total ^= word;
  for (size_t i = size / kStep * kStep; i < size; ++i) total ^= std::to_integer<uint64_t>(at[i]);
  return total;
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
