#include "formats/base/checked.h"
#include "formats/base/parallel.h"
#include "formats/sqz_checksums.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <random>

namespace sqz {
namespace {

// How far a stored mean may be from the mean of the stored vectors, relative to the size of the
// terms: every vector and the mean were rounded to the file's dtype (half a unit in the last place
// each, doubled here), and the mean was summed in float32.
double relative_tolerance(DType dtype, double count) {
  return (dtype == DType::kBF16 ? 0x1p-8 : 0x1p-10) + count * 0x1p-24;
}
constexpr double kAbsoluteTolerance = 0x1p-23;  // float16's subnormal steps

constexpr int64_t kNumbersAtOnce = int64_t{1} << 27;  // 16 MiB of bits

// Sums over the slots below a cluster: of the vectors, and of their absolute values.
struct Sums {
  std::vector<double> sum, absolute;  // [d]
  double count = 0;
  double slack = 0;  // how far the sum of rows of codes may be off, in each dimension

  explicit Sums(int64_t d) : sum(static_cast<size_t>(d)), absolute(sum.size()) {}
  void clear() {
    std::fill(sum.begin(), sum.end(), 0.0);
    std::fill(absolute.begin(), absolute.end(), 0.0);
    count = slack = 0;
  }
  template <class T>
  void add(const T* more, const T* more_absolute, double vectors) {
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += double{more[i]};
      absolute[i] += double{more_absolute[i]};
    }
    count += vectors;
  }
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
void add_slots(int64_t first, int64_t end, const T* vectors, int64_t d, Sums& out) {
  constexpr int64_t kBlock = 32;
  std::vector<float> sum(static_cast<size_t>(d)), absolute(static_cast<size_t>(d));
  for (; first < end; first += kBlock) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    std::fill(absolute.begin(), absolute.end(), 0.0f);
    const int64_t last = std::min(first + kBlock, end);
    for (int64_t slot = first; slot < last; ++slot) {
      add_vector(vectors + slot * d, d, sum.data(), absolute.data());
    }
    out.add(sum.data(), absolute.data(), double(last - first));
  }
}

// Every invariant of one KV head of one layer.
class HeadCheck {
 public:
  HeadCheck(const SqzFile& file, int64_t layer, int64_t head, Problems& problems)
      : metadata_(file.metadata()),
        layer_(file.layer(layer)),
        prefix_(layer_prefix(layer)),
        head_(head),
        problems_(problems) {}

  void run() { layer_.dtype == DType::kBF16 ? run_as<BFloat16>() : run_as<Float16>(); }

 private:
  template <class T>
  void run_as() {
    if (layer_.slots == 0) return;
    // As many as there are slots, unless the index is pruned.
    const int64_t sink = metadata_.sink, end = metadata_.tokens - layer_.exact + sink;
    check_once("positions", "slot ", layer_.positions, sink, end,
               concat("each token from ", sink, " to ", end - 1, " once"));
    if (metadata_.pruned) return;
    if (layer_.heavy != nullptr) {
      check_once("heavy", "", layer_.heavy, 0, layer_.slots,
                 concat("each slot below ", layer_.slots, " once"));
    }
    if (layer_.pages > 0) {
      check_token_order();
      check_bounds<T>();
    } else if (layer_.buckets > 0) {
      check_bucket_offsets();
      check_classifier();
    } else if (check_offsets()) {  // else nothing below can be walked
      check_means<T>();
    }
  }

  // Notes a problem of a tensor of this layer; `place` is within the head.
  template <class Found, class Expected>
  void complain(const std::string& tensor, const std::string& place, const Found& found,
                const Expected& expected) {
    note(problems_,
         bad_field(prefix_ + tensor, concat("head ", head_, ", ", place), found, expected));
  }

  // The head's part of a tensor with `count` items a head.
  template <class T>
  const T* of_head(const void* data, int64_t count) const {
    return data == nullptr ? nullptr : static_cast<const T*>(data) + head_ * count;
  }

  // The numbers of all slots: from `low`, below `end`, none twice.
  void check_once(const char* tensor, const char* item, const uint32_t* numbers, int64_t low,
                  int64_t end, const std::string& expected) {
    for (int64_t from = low; from < end; from += kNumbersAtOnce) {
      const int64_t to = std::min(from + kNumbersAtOnce, end);
      std::vector<bool> seen(static_cast<size_t>(to - from));
      for (int64_t i = 0; i < layer_.slots; ++i) {
        const int64_t number = numbers[head_ * layer_.slots + i];
        const bool inside = number >= low && number < end;
        if (inside && (number < from || number >= to)) continue;
        if (!inside || seen[static_cast<size_t>(number - from)]) {
          complain(tensor, concat(item, i), concat(number, inside ? " again" : ""), expected);
          return;
        }
        seen[static_cast<size_t>(number - from)] = true;
      }
    }
  }

  void check_token_order() {
    const uint32_t* positions = layer_.positions + head_ * layer_.slots;
    for (int64_t slot = 0; slot < layer_.slots; ++slot) {
      const int64_t token = metadata_.sink + slot;
      if (positions[slot] == token) continue;
      complain("positions", concat("slot ", slot), positions[slot],
               concat(token, ": pages are in token order"));
      return;
    }
  }

  // The least and the greatest numbers of every page are those of its keys, and in order.
  template <class T>
  void check_bounds() {
    const int64_t d = layer_.head_dim;
    const T* least = of_head<T>(layer_.page_min, layer_.pages * d);
    const T* greatest = of_head<T>(layer_.page_max, layer_.pages * d);
    const T* keys = of_head<T>(layer_.keys, layer_.slots * d);
    std::vector<float> min(static_cast<size_t>(d)), max(min.size());
    for (int64_t page = 0; page < layer_.pages; ++page) {
      const int64_t first = page * layer_.page_size;
      const int64_t end = std::min(first + layer_.page_size, layer_.slots);
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
        complain("pages", concat("page ", page, ", dimension ", i), concat(low, " to ", high),
                 concat(min[i], " to ", max[i], ", the range of its keys"));
        return;
      }
    }
  }

  bool check_offsets() {
    for (int k = 0; k < layer_.levels; ++k) {
      const int64_t n = level(k).clusters;
      const int64_t end = k + 1 < layer_.levels ? level(k + 1).clusters : layer_.slots;
      const uint32_t* offsets = offsets_of(k);
      for (int64_t c = 0; c <= n; ++c) {
        const bool right =
            c == 0 ? offsets[c] == 0 : offsets[c] > offsets[c - 1] && (c < n || offsets[c] == end);
        if (right) continue;
        complain(concat("level.", k + 1, ".offsets"), concat("entry ", c), offsets[c],
                 c == 0   ? "0"
                 : c == n ? concat(end, ", the end, above the one before")
                          : "more than the one before");
        return false;
      }
    }
    return true;
  }

  void check_bucket_offsets() {
    const uint32_t* offsets = layer_.bucket_offsets + head_ * (layer_.buckets + 1);
    for (int64_t c = 0; c <= layer_.buckets; ++c) {
      const int64_t least = c == 0 ? 0 : c == layer_.buckets ? layer_.slots : offsets[c - 1];
      const int64_t most = c == 0 ? 0 : layer_.slots;
      if (offsets[c] >= least && offsets[c] <= most) continue;
      complain("buckets.offsets", concat("entry ", c), offsets[c],
               least == most ? concat(least) : concat(least, " to ", most));
      return;
    }
  }

  void check_classifier() {
    const ClassifierView& c = layer_.classifier;
    for (const auto& part : classifier_tensors(metadata_.model, layer_.buckets, c.hidden)) {
      const int64_t count = *checked_elements(part.shape) / layer_.kv_heads;
      const float* first = c.*part.view + head_ * count;
      const float* bad =
          std::find_if_not(first, first + count, [](float x) { return std::isfinite(x); });
      if (bad == first + count) continue;
      complain(concat("buckets.", part.name), concat("element ", bad - first), *bad,
               "a finite number");
    }
  }

  template <class T>
  void check_means() {
    const CodedRows keys = codes_of_head(layer_.coded_keys);
    const CodedRows values = codes_of_head(layer_.coded_values);
    const bool scales = check_scales<T>(keys, "keys") && check_scales<T>(values, "values") &&
                        check_scales<T>(codes_of_head(layer_.key_codes), "key_codes");
    if (!scales) return;
    if (layer_.keys || keys.bits == 8) {
      check_tree<T>(layer_.keys, keys, &LevelView::centroids, "centroids");
    }
    if ((layer_.values || values.bits == 8) && layer_.level[0].value_means) {
      check_tree<T>(layer_.values, values, &LevelView::value_means, "value_means");
    }
  }

  CodedRows codes_of_head(const CodedRows& rows) const {
    return rows.from_head(head_, layer_.slots, layer_.head_dim);
  }

  template <class T>
  bool check_scales(const CodedRows& rows, const std::string& name) {
    const T* scales = static_cast<const T*>(rows.scales);
    for (int64_t slot = 0; slot < layer_.slots && rows.bits > 0; ++slot) {
      const float scale = to_float(scales[slot]);
      const auto* codes = reinterpret_cast<const int8_t*>(rows.codes) + slot * layer_.head_dim;
      const bool least = rows.bits == 8 &&
                         std::find(codes, codes + layer_.head_dim, -128) != codes + layer_.head_dim;
      if (scale >= 0 && std::isfinite(scale) && !least) continue;
      complain(least ? name : name + ".scales", concat("slot ", slot),
               least ? concat(-128) : concat(scale),
               least ? "-127 to 127" : "a number, at least 0");
      return false;
    }
    return true;
  }

  // The same as add_slots() of rows of 8 bits, which are off by half a step each.
  template <class T>
  void add_coded(int64_t first, int64_t end, const CodedRows& rows, const T* mean, Sums& out) {
    const int64_t d = layer_.head_dim;
    for (int64_t slot = first; slot < end; ++slot, ++out.count) {
      const auto* numbers = reinterpret_cast<const int8_t*>(rows.codes) + slot * d;
      const float scale = to_float(static_cast<const T*>(rows.scales)[slot]);
      for (int64_t i = 0; i < d; ++i) {
        const float x = to_float(mean[i]) + scale * static_cast<float>(numbers[i]);
        out.sum[i] += double{x};
        out.absolute[i] += double{std::abs(x)};
      }
      out.slack += 0.5 * double{scale};
    }
  }

  // The means of every level against the vectors of the slots below, with the sums of one cluster
  // of each level in memory: a cluster that ends is compared and added to the one above.
  template <class T>
  void check_tree(const void* vectors, const CodedRows& coded, const void* LevelView::*means,
                  const char* name) {
    const int64_t d = layer_.head_dim;
    const int finest = layer_.levels - 1;
    const T* slots = of_head<T>(vectors, layer_.slots * d);
    std::vector<Sums> sums(static_cast<size_t>(layer_.levels), Sums(d));
    std::array<int64_t, kMaxLevels> cluster{};  // of each level
    for (int64_t& c = cluster[finest]; c < level(finest).clusters;) {
      const uint32_t first = offsets_of(finest)[c], end = offsets_of(finest)[c + 1];
      if (coded.bits == 0) {
        add_slots(first, end, slots, d, sums[finest]);
      } else {
        const T* mean = of_head<T>(level(finest).*means, level(finest).clusters * d) + c * d;
        add_coded(first, end, coded, mean, sums[finest]);
      }
      for (int k = finest; k >= 0; --k) {
        const int64_t done = cluster[k]++;
        const T* stored = of_head<T>(level(k).*means, level(k).clusters * d) + done * d;
        if (!compare(stored, sums[k], done, concat("level.", k + 1, ".", name))) return;
        if (k > 0) {
          sums[k - 1].add(sums[k].sum.data(), sums[k].absolute.data(), sums[k].count);
          sums[k - 1].slack += sums[k].slack;
        }
        sums[k].clear();
        if (k > 0 && cluster[k] < int64_t{offsets_of(k - 1)[cluster[k - 1] + 1]}) break;
      }
    }
  }

  template <class T>
  bool compare(const T* stored, const Sums& sums, int64_t c, const std::string& tensor) {
    const double relative = relative_tolerance(layer_.dtype, sums.count);
    for (int64_t i = 0; i < layer_.head_dim; ++i) {
      const double found = to_float(stored[i]);
      const double mean = sums.sum[i] / sums.count;
      const double size = sums.absolute[i] / sums.count + std::abs(mean);
      const double slack = sums.slack / sums.count + kAbsoluteTolerance;
      if (std::abs(found - mean) <= relative * size + slack) continue;
      note(problems_, bad_field(concat(prefix_, tensor, ": head ", head_),
                                concat("cluster ", c, ", dimension ", i), found,
                                concat(mean, ", the mean of its ", sums.count, " vectors")));
      return false;
    }
    return true;
  }

  const LevelView& level(int k) const { return layer_.level[static_cast<size_t>(k)]; }
  const uint32_t* offsets_of(int k) const {
    return level(k).offsets + head_ * (level(k).clusters + 1);
  }

  const IndexMetadata& metadata_;
  const LayerView layer_;
  const std::string prefix_;
  const int64_t head_;
  Problems& problems_;
};

// Whether row `a` of a matrix [d, d] is orthogonal to all rows and of length 1.
Status check_rotation_row(const float* rows, int64_t d, int64_t a) {
  for (int64_t b = 0; b < d; ++b) {
    double product = 0;
    for (int64_t i = 0; i < d; ++i) product += double{rows[a * d + i]} * double{rows[b * d + i]};
    const double expected = a == b ? 1 : 0;
    if (std::abs(product - expected) <= 1e-4) continue;
    return {Code::kCorrupt, bad_field(kRotationName, concat("product of rows ", a, " and ", b),
                                      product, concat(expected, ": it is orthogonal"))};
  }
  return {};
}

// R R' x = x for random signs x (Freivalds): a product of rows that is off shows in each of them
// with a probability of a half at least, and costs d^2 to look for instead of d^3.
Status check_rotation(const SqzFile& file) {
  constexpr int kTimes = 16;
  const auto bytes = file.tensor(kRotationName);
  const auto* rows = reinterpret_cast<const float*>(bytes.data());
  const int64_t d = bytes.empty() ? 0 : file.metadata().model.head_dim;
  std::mt19937_64 random(1);
  std::vector<double> signs(static_cast<size_t>(d)), turned(signs.size());
  for (int time = 0; time < kTimes; ++time) {
    std::fill(turned.begin(), turned.end(), 0.0);
    for (int64_t a = 0; a < d; ++a) {
      signs[a] = random() % 2 == 0 ? 1 : -1;
      for (int64_t i = 0; i < d; ++i) turned[i] += signs[a] * double{rows[a * d + i]};
    }
    for (int64_t a = 0; a < d; ++a) {
      double back = 0;
      for (int64_t i = 0; i < d; ++i) back += turned[i] * double{rows[a * d + i]};
      if (std::abs(back - signs[a]) <= 1e-4) continue;
      SQZ_RETURN_IF_ERROR(check_rotation_row(rows, d, a));
    }
  }
  return {};
}

// As SqzFile::calibration(), without a copy of the tables.
Status check_calibration_of(const SqzFile& file) {
  Calibration parameters;
  SQZ_RETURN_IF_ERROR(parse_calibration_text(file.raw_metadata().at(kCalibrationKey),
                                             file.metadata().levels, file.path(), parameters));
  const auto stored = [&](const CalibrationTable& table) {
    const auto bytes = file.tensor(table.name);
    return std::span(reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float));
  };
  return check_calibration(parameters, stored, file.metadata(), file.path(), Code::kCorrupt);
}

}  // namespace

// Items are independent; what they find is reported in their order, whatever the threads.
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
  const int64_t heads = file.metadata().model.kv_heads;
  const int64_t items = report.checked + heads * std::ssize(file.metadata().layers);
  std::map<int64_t, Problems> found;  // the first kMaxProblems items that have some
  const auto check = [&](int64_t i) {
    Problems problems;
    if (i < report.checked) {
      check_bytes(tensors[static_cast<size_t>(i)], bytes, checksums, advance, problems);
    } else {
      const int64_t head = i - report.checked;
      HeadCheck(file, head / heads, head % heads, problems).run();
    }
    if (problems.empty()) return Status();
    const std::lock_guard lock(mutex);
    found[i] = std::move(problems);
    if (found.size() > kMaxProblems) found.erase(std::prev(found.end()));
    return Status();
  };
  SQZ_RETURN_IF_ERROR(parallel_for(items, std::min(resolve_threads(threads), useful), check));
  for (auto& [item, problems] : found) {
    for (std::string& text : problems) note(report.problems, std::move(text));
  }
  for (const Status& status : {check_calibration_of(file), check_rotation(file)}) {
    if (!status.ok()) note(report.problems, status.message());
  }
  return report;
}

}  // namespace sqz
