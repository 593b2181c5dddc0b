#include "formats/sqz_verify.h"

#include <algorithm>
#include <cmath>

#include "formats/base/hash.h"
#include "formats/json_fields.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

constexpr size_t kChunk = size_t{4} << 20;  // hashed and looked through while it is in the cache
constexpr size_t kMaxProblems = 1000;

template <class T>
bool all_finite(std::span<const std::byte> bytes) {
  const auto* x = reinterpret_cast<const T*>(bytes.data());
  bool finite = true;
  for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    finite &= std::abs(to_float(x[i])) < INFINITY;  // false for NaN
  }
  return finite;
}

// Integers are always finite. Calibration tables may hold -infinity: check_calibration() sees them.
bool finite_floats(const TensorInfo& tensor, std::span<const std::byte> bytes) {
  if (tensor.dtype == DType::kBF16) return all_finite<BFloat16>(bytes);
  if (tensor.dtype == DType::kF16) return all_finite<Float16>(bytes);
  return true;
}

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
Sums sum_slots(const uint32_t* offsets, int64_t n, const T* vectors, int64_t d) {
  Sums out(n, d);
  for (int64_t c = 0; c < n; ++c) {
    double* sum = &out.sum[static_cast<size_t>(c * d)];
    double* absolute = &out.absolute[static_cast<size_t>(c * d)];
    for (int64_t slot = offsets[c]; slot < int64_t{offsets[c + 1]}; ++slot) {
      for (int64_t i = 0; i < d; ++i) {
        const double x = to_float(vectors[slot * d + i]);
        sum[i] += x;
        absolute[i] += std::abs(x);
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

class Verifier {
 public:
  Verifier(const SqzFile& file, std::span<const std::byte> bytes,
           const std::function<void(uint64_t, uint64_t)>& progress)
      : file_(file), bytes_(bytes), progress_(progress) {}

  VerifyReport run() {
    check_tensors();
    const IndexMetadata& metadata = file_.metadata();
    for (int64_t l = 0; l < metadata.model.layers; ++l) {
      if (file_.layer(l).levels > 0) check_layer(l);
    }
    if (const auto calibration = file_.calibration(); !calibration.ok()) {
      problem(calibration.status().message());
    }
    return std::move(report_);
  }

 private:
  void problem(std::string text) {
    if (report_.problems.size() < kMaxProblems) report_.problems.push_back(std::move(text));
  }

  void check_tensors() {
    const std::string label = file_.path() + ": __metadata__: checksums";
    Result<Json> parsed = parse_json(file_.raw_metadata().at(kChecksumsKey), label);
    if (!parsed.ok()) problem(parsed.status().message());
    const Json checksums = parsed.ok() && parsed->is_object() ? *parsed : Json::object();
    if (parsed.ok() && !parsed->is_object()) {
      problem(concat(label, ": found ", found_text(*parsed), ", expected an object"));
    }
    size_t used = 0;
    for (const TensorInfo& tensor : file_.header().tensors) {
      if (tensor.name == kHeaderHashName) {
        ++report_.checked;  // open() compared it
        continue;
      }
      const bool padding = tensor.name.starts_with(kPaddingPrefix);
      const auto stored = checksums.find(tensor.name);
      if (stored != checksums.end()) ++used;
      check_tensor(tensor, padding, stored == checksums.end() ? Json() : *stored);
      ++report_.checked;
    }
    if (used != checksums.size()) {
      problem(concat(label, ": found ", checksums.size(), " names, expected ", used,
                     ": those of the tensors"));
    }
  }

  void check_tensor(const TensorInfo& tensor, bool padding, const Json& stored) {
    const auto data =
        bytes_.subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.bytes));
    Xxh3Stream hash;
    bool finite = true, zero = true;
    for (size_t at = 0; at < data.size(); at += kChunk) {
      const auto chunk = data.subspan(at, std::min(kChunk, data.size() - at));
      if (padding) {
        zero &=
            std::all_of(chunk.begin(), chunk.end(), [](std::byte b) { return b == std::byte{}; });
      } else {
        hash.update(chunk);
        finite &= finite_floats(tensor, chunk);
      }
      if (progress_) progress_(tensor.offset + at + chunk.size(), bytes_.size());
    }
    const std::string name = in_quotes(tensor.name);
    if (padding) {
      if (!zero) problem(concat("tensor ", name, ": found other bytes, expected zeros"));
      return;
    }
    const std::string found = hex(hash.digest());
    if (!stored.is_string() || stored.get_ref<const std::string&>() != found) {
      problem(
          bad_field("tensor " + name, "XXH3-64", found,
                    stored.is_null() ? "none: it is not in the checksums" : found_text(stored)));
    }
    if (!finite)
      problem(concat("tensor ", name, ": found NaN or infinity, expected finite numbers"));
  }

  void check_layer(int64_t index) {
    const LayerView layer = file_.layer(index);
    for (int64_t head = 0; head < layer.kv_heads; ++head) {
      check_positions(layer, index, head);
      if (!check_offsets(layer, index, head)) continue;  // nothing below can be walked
      if (layer.dtype == DType::kBF16) {
        check_means<BFloat16>(layer, index, head);
      } else {
        check_means<Float16>(layer, index, head);
      }
    }
  }

  void check_positions(const LayerView& layer, int64_t index, int64_t head) {
    const int64_t sink = file_.metadata().sink;
    std::vector<bool> seen(static_cast<size_t>(layer.slots));
    for (int64_t slot = 0; slot < layer.slots; ++slot) {
      const uint32_t position = layer.positions[head * layer.slots + slot];
      const int64_t rank = int64_t{position} - sink;
      const bool inside = rank >= 0 && rank < layer.slots;
      if (!inside || seen[static_cast<size_t>(rank)]) {
        problem(bad_field(
            concat("layers.", index, ".positions"), concat("head ", head, ", slot ", slot),
            concat(position, inside ? " again" : ""),
            concat("each token from ", sink, " to ", sink + layer.slots - 1, " once")));
        return;
      }
      seen[static_cast<size_t>(rank)] = true;
    }
  }

  bool check_offsets(const LayerView& layer, int64_t index, int64_t head) {
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
        problem(bad_field(concat("layers.", index, ".level.", k + 1, ".offsets"),
                          concat("head ", head, ", entry ", c), concat(offsets[c]),
                          c == 0                ? "0"
                          : c == level.clusters ? concat(end, ", the end, above the one before")
                                                : "more than the one before"));
        return false;
      }
    }
    return true;
  }

  template <class T>
  void check_means(const LayerView& layer, int64_t index, int64_t head) {
    if (layer.keys) {
      const auto of = [](const LevelView& level) { return level.centroids; };
      check_tree<T>(layer, index, head, layer.keys, of, "centroids");
    }
    if (layer.values && layer.level[0].value_means) {
      const auto of = [](const LevelView& level) { return level.value_means; };
      check_tree<T>(layer, index, head, layer.values, of, "value_means");
    }
  }

  // The means of every level, finest first, against the vectors of the slots below.
  template <class T, class Of>
  void check_tree(const LayerView& layer, int64_t index, int64_t head, const void* vectors, Of of,
                  const char* name) {
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
                   concat("layers.", index, ".level.", k + 1, ".", name, ": head ", head))) {
        return;
      }
    }
  }

  template <class T>
  bool compare(const T* stored, const Sums& sums, int64_t n, int64_t d, DType dtype,
               const std::string& label) {
    for (int64_t c = 0; c < n; ++c) {
      const double count = sums.count[static_cast<size_t>(c)];
      const double relative = relative_tolerance(dtype, count);
      for (int64_t i = 0; i < d; ++i) {
        const double found = to_float(stored[c * d + i]);
        const double mean = sums.sum[static_cast<size_t>(c * d + i)] / count;
        const double size = sums.absolute[static_cast<size_t>(c * d + i)] / count + std::abs(mean);
        if (std::abs(found - mean) <= relative * size + kAbsoluteTolerance) continue;
        problem(bad_field(label, concat("cluster ", c, ", dimension ", i), concat(found),
                          concat(mean, ", the mean of its ", count, " vectors")));
        return false;
      }
    }
    return true;
  }

  const SqzFile& file_;
  std::span<const std::byte> bytes_;
  const std::function<void(uint64_t, uint64_t)>& progress_;
  VerifyReport report_;
};

}  // namespace

VerifyReport verify_index(const SqzFile& file, std::span<const std::byte> bytes,
                          const std::function<void(uint64_t, uint64_t)>& progress) {
  return Verifier(file, bytes, progress).run();
}

}  // namespace sqz
