#include "formats/sqz_verify.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>
#include <thread>

#include "formats/sqz_checksums.h"

namespace sqz {
namespace {

// How far a stored mean may be from the mean of the stored vectors, relative to the size of the
// terms: every vector and the mean were rounded to the file's dtype (half a unit in the last place
// each, doubled here), and the mean was summed in float32.
double relative_tolerance(DType dtype, double count) {
  return (dtype == DType::kBF16 ? 0x1p-8 : 0x1p-10) + count * 0x1p-24;
}
constexpr double kAbsoluteTolerance = 0x1p-23;  // float16's subnormal steps

// Sums over the slots below each cluster: of the vectors, and of their absolute values.
struct Sums {
  std::vector<double> sum, absolute;  // [n, d]
  std::vector<double> count;          // [n]

  Sums(int64_t n, int64_t d)
      : sum(static_cast<size_t>(n * d)),
        absolute(static_cast<size_t>(n * d)),
        count(static_cast<size_t>(n)) {}
};

template <class T>
void add_vector(const T* __restrict x, int64_t d, float* __restrict sum,
                float* __restrict absolute) {
  for (int64_t i = 0; i < d; ++i) {
    const float value = to_float(x[i]);
    sum[i] += value;
    absolute[i] += std::abs(value);
  }
}

// In float32 over kBlock vectors at a time, which is exact enough by far (kBlock * 2^-24, relative)
// and four times as fast as double precision.
template <class T>
Sums sum_slots(const uint32_t* offsets, int64_t n, const T* vectors, int64_t d) {
  constexpr int64_t kBlock = 32;
  Sums out(n, d);
  std::vector<float> sum(static_cast<size_t>(d)), absolute(static_cast<size_t>(d));
  for (int64_t c = 0; c < n; ++c) {
    const int64_t end = offsets[c + 1];
    for (int64_t first = offsets[c]; first < end; first += kBlock) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      std::fill(absolute.begin(), absolute.end(), 0.0f);
      for (int64_t slot = first; slot < std::min(first + kBlock, end); ++slot) {
        add_vector(vectors + slot * d, d, sum.data(), absolute.data());
      }
      for (int64_t i = 0; i < d; ++i) {
        out.sum[static_cast<size_t>(c * d + i)] += double{sum[static_cast<size_t>(i)]};
        out.absolute[static_cast<size_t>(c * d + i)] += double{absolute[static_cast<size_t>(i)]};
      }
    }
    out.count[static_cast<size_t>(c)] = double(offsets[c + 1] - offsets[c]);
  }
  return out;
}

Sums sum_children(const uint32_t* offsets, int64_t n, const Sums& children, int64_t d) {
  Sums out(n, d);
  for (int64_t c = 0; c < n; ++c) {
    for (size_t child = offsets[c]; child < offsets[c + 1]; ++child) {
      for (int64_t i = 0; i < d; ++i) {
        const size_t from = child * static_cast<size_t>(d) + static_cast<size_t>(i);
        const auto to = static_cast<size_t>(c * d + i);
        out.sum[to] += children.sum[from];
        out.absolute[to] += children.absolute[from];
      }
      out.count[static_cast<size_t>(c)] += children.count[child];
    }
  }
  return out;
}

// item(0) .. item(count - 1), each once, on `threads` threads, the caller's among them.
void for_each_item(size_t count, int threads, const std::function<void(size_t)>& item) {
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto work = [&] {
    try {
      for (size_t i = next++; i < count; i = next++) item(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
      next = count;
    }
  };
  {
    std::vector<std::jthread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

class Verifier {
 public:
  Verifier(const SqzFile& file, std::span<const std::byte> bytes,
           const std::function<void(uint64_t, uint64_t)>& progress)
      : file_(file), bytes_(bytes), progress_(progress) {}

  // Items are independent; what they find is reported in their order, whatever the threads.
  VerifyReport run(int threads) {
    VerifyReport report;
    report.checked = static_cast<int64_t>(file_.header().tensors.size());
    const auto& tensors = file_.header().tensors;
    const Checksums checksums = read_checksums(file_.header(), file_.path(), report.problems);
    const IndexMetadata& metadata = file_.metadata();
    const auto heads = static_cast<size_t>(metadata.model.kv_heads);
    std::vector<Problems> found(tensors.size() + heads * metadata.layers.size());
    for_each_item(found.size(), threads, [&](size_t i) {
      if (i < tensors.size()) {
        check_bytes(
            tensors[i], bytes_, checksums, [&](size_t n) { advance(n); }, found[i]);
      } else {
        const size_t head = i - tensors.size();
        check_head(static_cast<int64_t>(head / heads), static_cast<int64_t>(head % heads),
                   found[i]);
      }
    });
    for (Problems& problems : found) {
      for (std::string& text : problems) note(report.problems, std::move(text));
    }
    if (const auto calibration = file_.calibration(); !calibration.ok()) {
      note(report.problems, calibration.status().message());
    }
    return report;
  }

 private:
  void advance(size_t bytes) {
    if (!progress_) return;
    const std::lock_guard lock(progress_mutex_);
    done_ += bytes;
    progress_(done_, bytes_.size());
  }

  void check_head(int64_t index, int64_t head, Problems& problems) const {
    const LayerView layer = file_.layer(index);
    if (layer.slots == 0) return;
    check_positions(layer, index, head, problems);
    if (file_.metadata().pruned) return;
    if (layer.heavy != nullptr) check_heavy(layer, index, head, problems);
    if (layer.pages > 0) {
      check_token_order(layer, index, head, problems);
      if (layer.dtype == DType::kBF16) {
        check_bounds<BFloat16>(layer, index, head, problems);
      } else {
        check_bounds<Float16>(layer, index, head, problems);
      }
      return;
    }
    if (layer.buckets > 0) {
      check_bucket_offsets(layer, index, head, problems);
      check_classifier(layer, index, head, problems);
      return;
    }
    if (!check_offsets(layer, index, head, problems)) return;  // nothing below can be walked
    if (layer.dtype == DType::kBF16) {
      check_means<BFloat16>(layer, index, head, problems);
    } else {
      check_means<Float16>(layer, index, head, problems);
    }
  }

  void check_token_order(const LayerView& layer, int64_t index, int64_t head,
                         Problems& problems) const {
    const uint32_t* positions = layer.positions + head * layer.slots;
    for (int64_t slot = 0; slot < layer.slots; ++slot) {
      const int64_t token = file_.metadata().sink + slot;
      if (positions[slot] == token) continue;
      note(problems,
           bad_field(concat("layers.", index, ".positions"), concat("head ", head, ", slot ", slot),
                     concat(positions[slot]), concat(token, ": pages are in token order")));
      return;
    }
  }

  // The least and the greatest numbers of every page are those of its keys, and in order.
  template <class T>
  void check_bounds(const LayerView& layer, int64_t index, int64_t head, Problems& problems) const {
    const int64_t d = layer.head_dim;
    const auto rows = [&](const void* data, int64_t count) {
      return data == nullptr ? nullptr : static_cast<const T*>(data) + head * count * d;
    };
    const T* least = rows(layer.page_min, layer.pages);
    const T* greatest = rows(layer.page_max, layer.pages);
    const T* keys = rows(layer.keys, layer.slots);
    std::vector<float> min(static_cast<size_t>(d)), max(min.size());
    for (int64_t page = 0; page < layer.pages; ++page) {
      const int64_t first = page * layer.page_size;
      const int64_t end = std::min(first + layer.page_size, layer.slots);
      for (int64_t i = 0; i < d; ++i) {
        min[i] = to_float(keys == nullptr ? least[page * d + i] : keys[first * d + i]);
        max[i] = to_float(keys == nullptr ? greatest[page * d + i] : keys[first * d + i]);
      }
      for (int64_t slot = first; slot < end && keys != nullptr; ++slot) {
        for (int64_t i = 0; i < d; ++i) {
          min[i] = std::min(min[i], to_float(keys[slot * d + i]));
          max[i] = std::max(max[i], to_float(keys[slot * d + i]));
        }
      }
      for (int64_t i = 0; i < d; ++i) {
        const float low = to_float(least[page * d + i]), high = to_float(greatest[page * d + i]);
        if (low <= high && low == min[i] && high == max[i]) continue;
        note(problems, bad_field(concat("layers.", index, ".pages"),
                                 concat("head ", head, ", page ", page, ", dimension ", i),
                                 concat(low, " to ", high),
                                 concat(min[i], " to ", max[i], ", the range of its keys")));
        return;
      }
    }
  }

  void check_positions(const LayerView& layer, int64_t index, int64_t head,
                       Problems& problems) const {
    // As many as there are slots, unless the index is pruned.
    const int64_t sink = file_.metadata().sink, clustered = file_.metadata().tokens - layer.exact;
    std::vector<bool> seen(static_cast<size_t>(clustered));
    for (int64_t slot = 0; slot < layer.slots; ++slot) {
      const uint32_t position = layer.positions[head * layer.slots + slot];
      const int64_t rank = int64_t{position} - sink;
      const bool inside = rank >= 0 && rank < clustered;
      if (!inside || seen[static_cast<size_t>(rank)]) {
        note(problems,
             bad_field(concat("layers.", index, ".positions"),
                       concat("head ", head, ", slot ", slot),
                       concat(position, inside ? " again" : ""),
                       concat("each token from ", sink, " to ", sink + clustered - 1, " once")));
        return;
      }
      seen[static_cast<size_t>(rank)] = true;
    }
  }

  static void check_heavy(const LayerView& layer, int64_t index, int64_t head, Problems& problems) {
    std::vector<bool> seen(static_cast<size_t>(layer.slots));
    for (int64_t i = 0; i < layer.slots; ++i) {
      const uint32_t slot = layer.heavy[head * layer.slots + i];
      const bool inside = slot < layer.slots;
      if (inside && !seen[slot]) {
        seen[slot] = true;
        continue;
      }
      note(problems, bad_field(concat("layers.", index, ".heavy"), concat("head ", head, ", ", i),
                               concat(slot, inside ? " again" : ""),
                               concat("each slot below ", layer.slots, " once")));
      return;
    }
  }

  bool check_offsets(const LayerView& layer, int64_t index, int64_t head,
                     Problems& problems) const {
    for (int k = 0; k < layer.levels; ++k) {
      const LevelView& level = layer.level[static_cast<size_t>(k)];
      const int64_t end =
          k + 1 < layer.levels ? layer.level[static_cast<size_t>(k) + 1].clusters : layer.slots;
      const uint32_t* offsets = level.offsets + head * (level.clusters + 1);
      for (int64_t c = 0; c <= level.clusters; ++c) {
        const bool right = c == 0                ? offsets[c] == 0
                           : c == level.clusters ? offsets[c] == end && offsets[c] > offsets[c - 1]
                                                 : offsets[c] > offsets[c - 1];
        if (right) continue;
        note(problems,
             bad_field(concat("layers.", index, ".level.", k + 1, ".offsets"),
                       concat("head ", head, ", entry ", c), concat(offsets[c]),
                       c == 0                ? "0"
                       : c == level.clusters ? concat(end, ", the end, above the one before")
                                             : "more than the one before"));
        return false;
      }
    }
    return true;
  }

  void check_bucket_offsets(const LayerView& layer, int64_t index, int64_t head,
                            Problems& problems) const {
    const uint32_t* offsets = layer.bucket_offsets + head * (layer.buckets + 1);
    for (int64_t c = 0; c <= layer.buckets; ++c) {
      const int64_t least = c == 0 ? 0 : c == layer.buckets ? layer.slots : offsets[c - 1];
      const int64_t most = c == 0 ? 0 : layer.slots;
      if (offsets[c] >= least && offsets[c] <= most) continue;
      note(problems, bad_field(concat("layers.", index, ".buckets.offsets"),
                               concat("head ", head, ", entry ", c), concat(offsets[c]),
                               least == most ? concat(least) : concat(least, " to ", most)));
      return;
    }
  }

  void check_classifier(const LayerView& layer, int64_t index, int64_t head,
                        Problems& problems) const {
    const ClassifierView& c = layer.classifier;
    const int64_t buckets = layer.buckets, d = layer.head_dim;
    const auto finite = [&](const char* name, const float* data, int64_t count) {
      const float* first = data + head * count;
      const float* bad =
          std::find_if_not(first, first + count, [](float x) { return std::isfinite(x); });
      if (bad == first + count) return;
      note(problems, bad_field(concat("layers.", index, ".buckets.", name),
                               concat("head ", head, ", element ", bad - first), concat(*bad),
                               "a finite number"));
    };
    finite("centroids", c.centroids, buckets * d);
    finite("hidden.weight", c.hidden_weight, c.hidden * d);
    finite("hidden.bias", c.hidden_bias, c.hidden);
    finite("output.weight", c.output_weight, buckets * c.hidden);
    finite("output.bias", c.output_bias, buckets);
  }

  template <class T>
  void check_means(const LayerView& layer, int64_t index, int64_t head, Problems& problems) const {
    if (layer.keys) {
      const auto of = [](const LevelView& level) { return level.centroids; };
      check_tree<T>(layer, index, head, layer.keys, of, "centroids", problems);
    }
    if (layer.values && layer.level[0].value_means) {
      const auto of = [](const LevelView& level) { return level.value_means; };
      check_tree<T>(layer, index, head, layer.values, of, "value_means", problems);
    }
  }

  // The means of every level, finest first, against the vectors of the slots below.
  template <class T, class Of>
  void check_tree(const LayerView& layer, int64_t index, int64_t head, const void* vectors, Of of,
                  const char* name, Problems& problems) const {
    const int64_t d = layer.head_dim;
    const auto at = [&](int k) { return layer.level[static_cast<size_t>(k)]; };
    const auto offsets = [&](int k) { return at(k).offsets + head * (at(k).clusters + 1); };
    Sums sums = sum_slots(offsets(layer.levels - 1), at(layer.levels - 1).clusters,
                          static_cast<const T*>(vectors) + head * layer.slots * d, d);
    for (int k = layer.levels - 1; k >= 0; --k) {
      const int64_t n = at(k).clusters;
      if (k < layer.levels - 1) sums = sum_children(offsets(k), n, sums, d);
      const T* stored = static_cast<const T*>(of(at(k))) + head * n * d;
      if (!compare(stored, sums, n, d, layer.dtype,
                   concat("layers.", index, ".level.", k + 1, ".", name, ": head ", head),
                   problems)) {
        return;
      }
    }
  }

  template <class T>
  bool compare(const T* stored, const Sums& sums, int64_t n, int64_t d, DType dtype,
               const std::string& label, Problems& problems) const {
    for (int64_t c = 0; c < n; ++c) {
      const double count = sums.count[static_cast<size_t>(c)];
      const double relative = relative_tolerance(dtype, count);
      for (int64_t i = 0; i < d; ++i) {
        const double found = to_float(stored[c * d + i]);
        const double mean = sums.sum[static_cast<size_t>(c * d + i)] / count;
        const double size = sums.absolute[static_cast<size_t>(c * d + i)] / count + std::abs(mean);
        if (std::abs(found - mean) <= relative * size + kAbsoluteTolerance) continue;
        note(problems, bad_field(label, concat("cluster ", c, ", dimension ", i), concat(found),
                                 concat(mean, ", the mean of its ", count, " vectors")));
        return false;
      }
    }
    return true;
  }

  const SqzFile& file_;
  std::span<const std::byte> bytes_;
  const std::function<void(uint64_t, uint64_t)>& progress_;
  std::mutex progress_mutex_;
  uint64_t done_ = 0;
};

}  // namespace

VerifyReport verify_index(const SqzFile& file, std::span<const std::byte> bytes,
                          const std::function<void(uint64_t, uint64_t)>& progress, int threads) {
  if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  // A thread costs more than it gains where there are a few MiB to check.
  const auto useful = static_cast<int>(std::min<size_t>(1 + bytes.size() / kChecksumChunk, 1024));
  return Verifier(file, bytes, progress).run(std::clamp(threads, 1, useful));
}

}  // namespace sqz
