#include "formats/base/parallel.h"
#include "formats/sqz_checksums.h"
#include "formats/sqz_layout.h"

#include <algorithm>
#include <mutex>

namespace sqz {
namespace {

constexpr int64_t kNumbersAtOnce = int64_t{1} << 27;  // 16 MiB of bits

// The numbers of one KV head of a layer: orders, offsets and scales.
class HeadCheck {
 public:
  HeadCheck(const SqzFile& file, int64_t layer, int64_t head, Problems& problems)
      : layer_(file.layer(layer)),
        prefix_(layer_prefix(layer)),
        first_token_(file.metadata().sink),
        end_token_(file.metadata().tokens - file.metadata().tail),
        head_(head),
        problems_(problems) {}

  void run() {
    if (layer_.slots == 0) return;
    check_once("positions", layer_.positions, first_token_, end_token_);
    if (layer_.heavy != nullptr) check_once("heavy", layer_.heavy, 0, layer_.slots);
    for (int k = 0; k < layer_.levels; ++k) {
      const LevelView& level = layer_.level[static_cast<size_t>(k)];
      const bool finest = k + 1 == layer_.levels;
      check_offsets(level_prefix(k + 1) + "offsets", level.offsets, level.clusters,
                    finest ? layer_.slots : layer_.level[static_cast<size_t>(k) + 1].clusters, 1);
    }
    if (layer_.pages > 0) check_ascending(0, layer_.slots);
    if (layer_.buckets > 0 &&
        check_offsets("buckets.offsets", layer_.bucket_offsets, layer_.buckets, layer_.slots, 0)) {
      const uint32_t* offsets = layer_.bucket_offsets + head_ * (layer_.buckets + 1);
      for (int64_t c = 0; c < layer_.buckets; ++c) check_ascending(offsets[c], offsets[c + 1]);
    }
    check_scales("keys.scales", layer_.coded_keys);
    check_scales("values.scales", layer_.coded_values);
    check_scales("key_codes.scales", layer_.key_codes);
  }

 private:
  template <class Found>
  void complain(const std::string& tensor, int64_t i, const Found& found,
                const std::string& expected) {
    note(problems_,
         bad_field(prefix_ + tensor, concat("head ", head_, ", entry ", i), found, expected));
  }

  // Every slot has another number from [low, end).
  void check_once(const char* tensor, const uint32_t* numbers, int64_t low, int64_t end) {
    numbers += head_ * layer_.slots;
    for (int64_t from = low; from < end; from += kNumbersAtOnce) {
      const int64_t to = std::min(from + kNumbersAtOnce, end);
      std::vector<bool> seen(static_cast<size_t>(to - from));
      for (int64_t i = 0; i < layer_.slots; ++i) {
        const int64_t number = numbers[i];
        const bool inside = number >= low && number < end;
        if (inside && (number < from || number >= to)) continue;
        if (!inside || seen[static_cast<size_t>(number - from)]) {
          return complain(tensor, i, number,
                          concat("each number from ", low, " to ", end - 1, " at most once"));
        }
        seen[static_cast<size_t>(number - from)] = true;
      }
    }
  }

  // [n + 1] numbers from 0 to `end`, each at least `step` above the one before.
  bool check_offsets(const std::string& tensor, const uint32_t* offsets, int64_t n, int64_t end,
                     int64_t step) {
    offsets += head_ * (n + 1);
    for (int64_t i = 0; i <= n; ++i) {
      const int64_t least = i == 0 ? 0 : offsets[i - 1] + step, most = i == 0 ? 0 : end;
      if (offsets[i] >= (i == n ? std::max(least, end) : least) && offsets[i] <= most) continue;
      complain(tensor, i, offsets[i],
               i == n ? concat(end, ", the end") : concat("a number from ", least, " to ", most));
      return false;
    }
    return true;
  }

  // The slots of a bucket, and of an index of pages, are in token order.
  void check_ascending(int64_t slot, int64_t end) {
    const uint32_t* positions = layer_.positions + head_ * layer_.slots;
    for (++slot; slot < end; ++slot) {
      if (positions[slot] > positions[slot - 1]) continue;
      return complain("positions", slot, positions[slot], "more than the entry before");
    }
  }

  // Scales of BF16 or F16, which check_bytes() finds finite: only their sign is left to check.
  void check_scales(const char* tensor, const CodedRows& rows) {
    const auto* scales = static_cast<const uint16_t*>(rows.scales) + head_ * layer_.slots;
    for (int64_t slot = 0; slot < layer_.slots && rows.bits > 0; ++slot) {
      if (scales[slot] <= 0x8000) continue;
      return complain(tensor, slot, "a negative number", "a number, at least 0");
    }
  }

  const LayerView layer_;
  const std::string prefix_;
  const int64_t first_token_, end_token_, head_;
  Problems& problems_;
};

}  // namespace

// Items are independent. Their problems are reported in their order, whatever the threads.
Result<VerifyReport> verify_index(const SqzFile& file, std::span<const std::byte> bytes,
                                  const std::function<void(uint64_t, uint64_t)>& progress,
                                  int threads) {
  // A thread costs more than it gains where there are a few MiB to check.
  const auto useful = static_cast<int>(std::min<size_t>(1 + bytes.size() / kChecksumChunk, 1024));
  std::mutex mutex;
  uint64_t done = 0;
  const auto advance = [&](size_t count) {
    if (!progress) return;
    const std::lock_guard lock(mutex);
    done += count;
    progress(done, bytes.size());
  };

  VerifyReport report;
  const auto& tensors = file.header().tensors;
  report.checked = std::ssize(tensors);
  const Checksums checksums = read_checksums(file.header(), file.path(), report.problems);
  std::vector<Problems> found(tensors.size() + file.metadata().layers.size());
  const auto check = [&](int64_t i) {
    Problems& problems = found[static_cast<size_t>(i)];
    if (i < report.checked) {
      check_bytes(tensors[static_cast<size_t>(i)], bytes, checksums, advance, problems);
      return Status();
    }
    for (int64_t head = 0; head < file.metadata().model.kv_heads; ++head) {
      HeadCheck(file, i - report.checked, head, problems).run();
    }
    return Status();
  };
  SQZ_RETURN_IF_ERROR(
      parallel_for(std::ssize(found), std::min(resolve_threads(threads), useful), check));
  for (Problems& problems : found) {
    for (std::string& text : problems) note(report.problems, std::move(text));
  }
  const auto calibration = file.checked_calibration();
  if (!calibration.ok()) note(report.problems, calibration.status().message());
  return report;
}

}  // namespace sqz
