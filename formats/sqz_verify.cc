#include <algorithm>
#include <mutex>

#include "formats/base/parallel.h"
#include "formats/sqz_layout.h"

namespace sqz {
namespace {

constexpr int64_t kNumbersAtOnce = int64_t{1} << 27;  // 16 MiB of bits

// The numbers of one KV head of a layer: orders, offsets and scales.
class HeadCheck {
 public:
  HeadCheck(const SqzFile& file, int64_t layer, int64_t head)
      : path_(file.path()),
        layer_(file.layer(layer)),
        prefix_(layer_prefix(layer)),
        first_token_(file.metadata().sink),
        end_token_(file.metadata().tokens - file.metadata().tail),
        head_(head) {}

  Status run() const {
    if (layer_.slots == 0) return {};
    SQZ_RETURN_IF_ERROR(check_once("positions", layer_.positions, first_token_, end_token_));
    if (layer_.heavy != nullptr) {
      SQZ_RETURN_IF_ERROR(check_once("heavy", layer_.heavy, 0, layer_.slots));
    }
    for (int k = 0; k < layer_.levels; ++k) {
      const LevelView& level = layer_.level[static_cast<size_t>(k)];
      const bool finest = k + 1 == layer_.levels;
      SQZ_RETURN_IF_ERROR(check_offsets(
          level_prefix(k + 1) + "offsets", level.offsets, level.clusters,
          finest ? layer_.slots : layer_.level[static_cast<size_t>(k) + 1].clusters, 1));
    }
    if (layer_.pages > 0) SQZ_RETURN_IF_ERROR(check_ascending(0, layer_.slots));
    if (layer_.buckets > 0) {
      SQZ_RETURN_IF_ERROR(
          check_offsets("buckets.offsets", layer_.bucket_offsets, layer_.buckets, layer_.slots, 0));
      const uint32_t* offsets = layer_.bucket_offsets + head_ * (layer_.buckets + 1);
      for (int64_t c = 0; c < layer_.buckets; ++c) {
        SQZ_RETURN_IF_ERROR(check_ascending(offsets[c], offsets[c + 1]));
      }
    }
    SQZ_RETURN_IF_ERROR(check_scales("keys.scales", layer_.coded_keys));
    return check_scales("values.scales", layer_.coded_values);
  }

 private:
  template <class Found>
  Status refuse(const std::string& tensor, int64_t i, const Found& found,
                const std::string& expected) const {
    return Refuse{path_}(concat(prefix_, tensor, ": head ", head_, ", entry ", i), found, expected);
  }

  // Every slot has another number from [low, end).
  Status check_once(const char* tensor, const uint32_t* numbers, int64_t low, int64_t end) const {
    numbers += head_ * layer_.slots;
    for (int64_t from = low; from < end; from += kNumbersAtOnce) {
      const int64_t to = std::min(from + kNumbersAtOnce, end);
      std::vector<bool> seen(static_cast<size_t>(to - from));
      for (int64_t i = 0; i < layer_.slots; ++i) {
        const int64_t number = numbers[i];
        const bool inside = number >= low && number < end;
        if (inside && (number < from || number >= to)) continue;
        if (!inside || seen[static_cast<size_t>(number - from)]) {
          return refuse(tensor, i, number,
                        concat("each number from ", low, " to ", end - 1, " at most once"));
        }
        seen[static_cast<size_t>(number - from)] = true;
      }
    }
    return {};
  }

  // [n + 1] numbers from 0 to `end`, each at least `step` above the one before.
  Status check_offsets(const std::string& tensor, const uint32_t* offsets, int64_t n, int64_t end,
                       int64_t step) const {
    offsets += head_ * (n + 1);
    for (int64_t i = 0; i <= n; ++i) {
      const int64_t least = i == 0 ? 0 : offsets[i - 1] + step, most = i == 0 ? 0 : end;
      if (offsets[i] >= (i == n ? std::max(least, end) : least) && offsets[i] <= most) continue;
      return refuse(
          tensor, i, offsets[i],
          i == n ? concat(end, ", the end") : concat("a number from ", least, " to ", most));
    }
    return {};
  }

  // The slots of a bucket, and of an index of pages, are in token order.
  Status check_ascending(int64_t slot, int64_t end) const {
    const uint32_t* positions = layer_.positions + head_ * layer_.slots;
    for (++slot; slot < end; ++slot) {
      if (positions[slot] > positions[slot - 1]) continue;
      return refuse("positions", slot, positions[slot], "more than the entry before");
    }
    return {};
  }

  // Scales of BF16 or F16, which TensorCheck finds finite: only their sign is left to check.
  Status check_scales(const char* tensor, const CodedRows& rows) const {
    if (rows.bits == 0) return {};
    const auto* scales = static_cast<const uint16_t*>(rows.scales) + head_ * layer_.slots;
    for (int64_t slot = 0; slot < layer_.slots; ++slot) {
      if (scales[slot] <= 0x8000) continue;
      return refuse(tensor, slot, "a negative number", "a number, at least 0");
    }
    return {};
  }

  const std::string path_;
  const LayerView layer_;
  const std::string prefix_;
  const int64_t first_token_, end_token_, head_;
};

}  // namespace

// Items are independent, and parallel_for() returns the failure of the first one.
Status SqzFile::verify(const std::function<void(uint64_t, uint64_t)>& progress, int threads) const {
  // A thread costs more than it gains where there are a few MiB to check.
  const auto useful = static_cast<int>(std::min<size_t>(1 + file_bytes() / kChecksumChunk, 1024));
  std::mutex mutex;
  uint64_t done = 0;
  const auto advance = [&](size_t count) {
    if (!progress) return;
    const std::lock_guard lock(mutex);
    done += count;
    progress(done, file_bytes());
  };
  TensorCheck check(container_);
  SQZ_RETURN_IF_ERROR(check.init());
  const auto& tensors = header().tensors;
  const auto task = [&](int64_t i) {
    if (i < std::ssize(tensors)) return check.run(tensors[static_cast<size_t>(i)], advance);
    for (int64_t head = 0; head < metadata_.model.kv_heads; ++head) {
      SQZ_RETURN_IF_ERROR(HeadCheck(*this, i - std::ssize(tensors), head).run());
    }
    return Status();
  };
  SQZ_RETURN_IF_ERROR(parallel_for(std::ssize(tensors) + metadata_.model.layers,
                                   std::min(resolve_threads(threads), useful), task));
  return checked_calibration().status();
}

}  // namespace sqz
