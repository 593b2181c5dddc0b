// Random configurations of index, session and call through the C ABI, against float64:
//
//   SQZ_PROPERTY_FIRST=7 SQZ_PROPERTY_SEEDS=1 property_test     # repeats seed 7
//   SQZ_PROPERTY_KEEP=folder property_test                      # keeps the indexes there
//
// Built with SQZ_PROPERTY_CUDA (tests/libruntime/cuda) the same configurations run on a GPU.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "tests/common/must.h"
#include "tests/libruntime/property_oracle.h"

#ifdef SQZ_PROPERTY_CUDA
#include "tests/libindex/cuda/capability.h"
#include "tests/libindex/cuda/device.h"
#endif

namespace sqz {
namespace {

using testing::PropertyCase;
using testing::PropertyOracle;
using testing::Random;

#ifdef SQZ_PROPERTY_CUDA
constexpr bool kGpu = true;
using Bytes = cuda::test::DeviceArray<std::byte>;
#else
constexpr bool kGpu = false;
class Bytes {
 public:
  explicit Bytes(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
  void* get() { return bytes_.data(); }
  const std::vector<std::byte>& host() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};
#endif

// Tokens of some query heads, as a session gets them.
struct Queries {
  DType dtype = DType::kF32;
  int64_t heads = 0, dim = 0, value_dim = 0;
  bool device_positions = false;
  std::vector<float> q, before;  // [tokens, heads, d]; before RoPE, or empty
  std::vector<int64_t> positions;

  int64_t tokens() const { return std::ssize(positions); }
  // Tokens [first, first + count), heads [head, head + some) of them.
  Queries part(int64_t first, int64_t count, int64_t head, int64_t some) const {
    Queries out{.dtype = dtype,
                .heads = some,
                .dim = dim,
                .value_dim = value_dim,
                .device_positions = device_positions};
    for (int64_t t = first; t < first + count; ++t) {
      const auto add = [&](const std::vector<float>& from, std::vector<float>& to) {
        const auto at = from.begin() + (t * heads + head) * dim;
        if (!from.empty()) to.insert(to.end(), at, at + some * dim);
      };
      add(q, out.q);
      add(before, out.before);
      out.positions.push_back(positions[t]);
    }
    return out;
  }
};

struct Output {
  std::vector<float> out, lse;  // [tokens, heads, dv]; [tokens, heads]
  bool operator==(const Output&) const = default;
};

sqz_tensor make_tensor(void* data, DType dtype, int64_t* shape, int32_t dims) {
  sqz_tensor t = runtime::f32_tensor(static_cast<float*>(data), shape, dims);
  t.device_type = kGpu ? 2 : 1;
  t.dtype_bits = dtype == DType::kF32 ? 32 : 16;
  t.dtype_code = dtype == DType::kBF16 ? 4 : 2;
  return t;
}

// A call and its memory. Arguments may be changed before it is made.
class Call {
 public:
  Call(const Queries& queries, int64_t layer, bool turned)
      : q(queries),
        q_(testing::stored(q.dtype, q.q)),
        before_(testing::stored(q.dtype, q.before)),
        positions_(bytes_of(q.positions)),
        out_(std::vector<std::byte>(
            q.positions.size() * q.heads * q.value_dim * dtype_size(q.dtype), std::byte{0xff})),
        lse_(std::vector<std::byte>(q.positions.size() * q.heads * 4, std::byte{0xff})),
        shape_{q.tokens(), q.heads, q.dim},
        out_shape_{q.tokens(), q.heads, q.value_dim},
        strides_{turned ? 1 : q.heads, turned ? q.tokens() : 1},
        q_tensor_(make_tensor(q_.get(), q.dtype, shape_, 3)),
        before_tensor_(make_tensor(before_.get(), q.dtype, shape_, 3)),
        out_tensor_(make_tensor(out_.get(), q.dtype, out_shape_, 3)),
        lse_tensor_(make_tensor(lse_.get(), DType::kF32, shape_, 2)),
        args(runtime::make<sqz_attend_args>()) {
    lse_tensor_.strides = strides_;
    args.layer = layer;
    args.q = &q_tensor_;
    args.out = &out_tensor_;
    args.lse = &lse_tensor_;
    if (q.device_positions) {
      args.device_positions = reinterpret_cast<const int64_t*>(positions_.get());
    } else {
      args.positions = q.positions.data();
    }
    if (!q.before.empty()) args.q_before_rope = &before_tensor_;
  }

  Output output() const {
    Output out;
    const std::vector<std::byte> bytes = out_.host(), lse = lse_.host();
    for (int64_t i = 0; i < q.tokens() * q.heads * q.value_dim; ++i) {
      out.out.push_back(static_cast<float>(reference::element(q.dtype, bytes.data(), i)));
    }
    for (int64_t t = 0; t < q.tokens(); ++t) {
      for (int64_t h = 0; h < q.heads; ++h) {
        const int64_t at = t * strides_[0] + h * strides_[1];
        out.lse.push_back(static_cast<float>(reference::element(DType::kF32, lse.data(), at)));
      }
    }
    return out;
  }

  const Queries q;

 private:
  static std::vector<std::byte> bytes_of(std::span<const int64_t> of) {
    const auto bytes = std::as_bytes(of);
    return {bytes.begin(), bytes.end()};
  }

  Bytes q_, before_, positions_, out_, lse_;
  int64_t shape_[3], out_shape_[3], strides_[2];
  sqz_tensor q_tensor_, before_tensor_, out_tensor_, lse_tensor_;

 public:
  sqz_attend_args args;
};

// The tolerance of outputs, relative to 1 + their magnitude. CUDA rounds queries to the dtype of
// the index, and for prompts unpacks rows of codes to it: of 300 seeds in bf16, that alone moves an
// output by .064 and the logarithm of a sum by .0097.
double tolerance_of(const PropertyCase& c) {
  if (kGpu) {
    const bool bf16 = c.dtype == DType::kBF16 || c.build.dtype == DType::kBF16;
    return (bf16 ? 1.2e-2 : 6e-3) * (c.build.compress.rows == RowKind::k16 ? 1 : 8);
  }
  return c.dtype == DType::kF32 ? 3e-4 : c.dtype == DType::kF16 ? 1e-3 : 6e-3;
}

// The tolerance of the logarithms of sums, as tolerance_of(). One of 6,000 cases on a CPU, with
// rows of codes, is off by 2.2e-5.
double lse_tolerance_of(const PropertyCase& c) {
  return !kGpu ? 3e-5 : c.build.compress.rows == RowKind::k16 ? 2e-3 : 1.6e-2;
}

void expect_close(const Output& found, const Output& expected, const PropertyCase& c,
                  const char* what) {
  if (!kGpu) {
    ASSERT_TRUE(found == expected)
        << what << ": not the same bits, first at "
        << std::mismatch(found.out.begin(), found.out.end(), expected.out.begin()).first -
               found.out.begin();
    return;
  }
  for (size_t i = 0; i < found.out.size(); ++i) {
    const double limit = tolerance_of(c) * (1 + std::abs(expected.out[i]));
    ASSERT_NEAR(found.out[i], expected.out[i], limit) << what;
  }
}

class Property {
 public:
  Property(const PropertyCase& c, const testing::TemporaryDirectory& directory)
      : c_(c), path_(directory.file("index.sqz")), base_(directory.file("base.sqz")) {}

  void run() {
    must(build_index(c_, base_, path_));
    const auto file = must(SqzFile::open(path_, OpenMode::kRead));
    ASSERT_EQ(file->verify().message(), "");
    if (const char* folder = std::getenv("SQZ_PROPERTY_KEEP")) keep(folder);
    oracle_.emplace(c_, file);
    index_.emplace(path_);
    if (kGpu) index_->upload();
    if (oracle_->refused()) {
      const auto options = c_.options(1);
      sqz_session* none = nullptr;
      EXPECT_EQ(sqz_session_create(index_->handle(), &options, &none), SQZ_INVALID_ARGUMENT);
      return;
    }
    session_.emplace(*index_, c_.options(2));
    for (int64_t layer = 0; layer < c_.model.layers; ++layer) {
      const LayerGeometry own = c_.model.layer(layer);
      if (own.has_keys()) {
        draw_queries(layer);
        check_layer(layer);
      } else {
        check_other_layer(layer, own.of);
      }
      if (::testing::Test::HasFatalFailure()) return;
    }
    check_totals();
    for (int64_t layer = 0; layer < c_.model.layers; ++layer) {
      if (!c_.model.layer(layer).has_keys()) continue;
      if (!kGpu) same_by(runtime::Session(*index_, c_.options(3)), layer, "3 threads");
      if (!kGpu && c_.model.kv_heads > 1) check_ranks(layer);
      check_contexts(layer);
      check_whole(layer);
      if (c_.pruned_keep > 0) check_pruned(layer);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  int64_t clear = 0, unclear = 0;  // selections that were compared, or too close to decide

 private:
  // A copy of the index as session_fuzz takes it, with settings behind it.
  void keep(const std::string& folder) const {
    const std::string copy = concat(folder, "/", c_.seed, ".sqz");
    std::filesystem::copy_file(path_, copy, std::filesystem::copy_options::overwrite_existing);
    Random random(c_.seed);
    std::ofstream out(copy, std::ios::binary | std::ios::app);
    for (int i = 0; i < 8; ++i) out.put(static_cast<char>(random.below(256)));
  }

  // Noise and part of some key, so that few clusters matter to a query.
  void draw_queries(int64_t layer) {
    const LayerView& view = oracle_->decoded(layer);
    Random random(c_.seed * 100 + static_cast<uint64_t>(layer));
    const LayerGeometry own = c_.model.layer(layer);
    Queries q{.dtype = c_.dtype,
              .heads = own.query_heads,
              .dim = own.head_dim,
              .value_dim = own.value_dim,
              .device_positions = c_.device_positions};
    const int64_t rows = c_.indptr.back() * q.heads;
    q.q = random.normals(rows * q.dim);
    for (int64_t row = 0; row < rows && view.slots > 0; ++row) {
      const int64_t head = row % q.heads / c_.group();
      const auto* key = static_cast<const float*>(view.keys) +
                        (head * view.slots + random.below(view.slots)) * q.dim;
      for (int64_t i = 0; i < q.dim; ++i) q.q[row * q.dim + i] += key[i];
    }
    q.q = testing::rounded(q.dtype, q.q);
    for (size_t r = 0; r + 1 < c_.indptr.size(); ++r) {
      const int64_t first = c_.tokens + random.below(60);
      for (int64_t t = c_.indptr[r]; t < c_.indptr[r + 1]; ++t) {
        q.positions.push_back(first + t - c_.indptr[r]);
      }
    }
    if (c_.before_rope) q.before = testing::rounded(q.dtype, unroped(q));
    queries_.push_back(q);
  }

  // A layer without keys of its own is served as layer `of`, or refused.
  void check_other_layer(int64_t layer, int64_t of) {
    queries_.push_back(of < 0 ? Queries{.heads = 1, .dim = 1} : queries_[of]);
    outputs_.push_back(of < 0 ? Output() : outputs_[of]);
    known_.push_back(of < 0 ? std::vector<bool>() : known_[of]);
    runtime::Session other(*index_, c_.options(2));  // with stats of its own
    if (of >= 0) {
      return expect_close(attend(other, layer, queries_[of]), outputs_[of], c_, "shared");
    }
    Call call(queries_[layer], layer, false);
    EXPECT_EQ(sqz_attend(other.handle(), &call.args), SQZ_INVALID_ARGUMENT);
  }

  std::vector<float> unroped(const Queries& q) const {
    const auto& rope = c_.model.rope;
    const auto frequencies = rope_frequencies(rope, q.dim);
    const double shrink = rope.kind == RopeDescription::Kind::kYarn ? 1 / rope.attention_factor : 1;
    std::vector<float> out = q.q;
    for (int64_t row = 0; row < std::ssize(q.q) / q.dim; ++row) {
      for (int64_t i = 0; i < q.dim / 2; ++i) {
        const float angle = static_cast<float>(q.positions[row / q.heads]) * frequencies[i];
        float& a = out[row * q.dim + i];
        float& b = out[row * q.dim + i + q.dim / 2];
        const double x = a, y = b, cosine = std::cos(double{angle}), sine = std::sin(double{angle});
        a = static_cast<float>((x * cosine + y * sine) * shrink);
        b = static_cast<float>((y * cosine - x * sine) * shrink);
      }
    }
    return out;
  }

  void set_requests(Call& call) const {
    call.args.indptr = c_.indptr.data();
    call.args.requests = std::ssize(c_.indptr) - 1;
  }
  Output attend(runtime::Session& session, int64_t layer, const Queries& q) const {
    Call call(q, layer, c_.turned_lse);
    set_requests(call);
    session.attend(call.args);
    return call.output();
  }

  void check_layer(int64_t layer) {
    const Queries& q = queries_[layer];
    const LayerGeometry own = c_.model.layer(layer);
    const int64_t group = own.group_size();
    outputs_.push_back(attend(*session_, layer, q));
    known_.emplace_back(q.tokens() * q.heads, false);
    const auto stats = session_->stats(layer);
    uint64_t blocks = 0, keys = 0, bytes = 0;
    bool all_clear = true;
    for (size_t r = 0; r + 1 < c_.indptr.size(); ++r) {
      const int64_t end = c_.indptr[r + 1];
      const int64_t step = c_.block == 0 ? end - c_.indptr[r] : c_.block;
      for (int64_t t = c_.indptr[r]; t < end; t += step, ++blocks) {
        const int64_t tokens = std::min(step, end - t);
        Call call(q.part(t, tokens, 0, q.heads), layer, false);
        const auto runs = session_->select(call.args, own.kv_heads);
        for (int64_t head = 0; head < own.kv_heads; ++head) {
          const auto selected =
              check_selection(layer, head, q.part(t, tokens, head * group, group), runs[head]);
          if (::testing::Test::HasFailure()) return;
          keys +=
              static_cast<uint64_t>(std::count(selected.slots.begin(), selected.slots.end(), true));
          bytes += static_cast<uint64_t>(oracle_->bytes_read(layer, head, selected));
          const bool known = selected.margin > margin();
          all_clear &= known;
          (known ? clear : unclear) += 1;
          for (int64_t i = 0; i < tokens * group && known; ++i) {
            const int64_t token = t + i / group, query_head = head * group + i % group;
            known_[layer][token * q.heads + query_head] = true;
            check_row(layer, head, token, query_head, selected);
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
    const LayerView& view = oracle_->view(layer);
    if (own.kind == LayerKind::kRecent) {  // the next token sees what is stored, and itself
      const int64_t seen = own.window - (c_.model.geometry.empty() ? 0 : 1);
      EXPECT_EQ(view.exact, own.chunk > 0 ? c_.tokens % own.chunk : std::min(seen, c_.tokens));
    }
    const auto& [rows, layers16] = c_.build.compress;
    const bool coded = rows != RowKind::k16 && view.slots > 0 &&
                       std::find(layers16.begin(), layers16.end(), layer) == layers16.end();
    EXPECT_EQ(view.coded_keys.bits > 0, coded);
    const auto possible = static_cast<uint64_t>(oracle_->possible(layer) * own.kv_heads);
    const auto row =
        static_cast<uint64_t>((view.head_dim + view.value_dim) * dtype_size(view.dtype));
    EXPECT_EQ(stats.selections, blocks);
    EXPECT_EQ(stats.keys_possible, blocks * possible);
    EXPECT_EQ(stats.bytes_dense,
              blocks * row * (possible + static_cast<uint64_t>(view.exact * own.kv_heads)));
    // On a GPU, requests that are looked up together round otherwise than alone.
    EXPECT_NEAR(static_cast<double>(stats.keys_read), static_cast<double>(keys),
                all_clear || !kGpu ? 0 : 0.03 * static_cast<double>(keys));
    if (all_clear) {
      EXPECT_EQ(stats.bytes_read, bytes) << "layer " << layer;
    }
  }

  static double margin() { return kGpu ? 1e-3 : 5e-5; }

  // The runs are legal, and those of the oracle unless rounding decides.
  reference::Selected check_selection(int64_t layer, int64_t head, const Queries& q,
                                      const std::vector<sqz_run>& runs) const {
    const LayerView& view = oracle_->view(layer);
    std::vector<bool> slots(static_cast<size_t>(view.slots));
    int64_t end = -1, keys = 0;  // of the run before: runs ascend and do not touch
    for (const sqz_run& run : runs) {
      EXPECT_GT(int64_t{run.first}, end);
      EXPECT_GT(run.length, 0u);
      end = int64_t{run.first} + run.length;
      EXPECT_LE(end, view.slots);
      if (::testing::Test::HasFailure()) return {};
      std::fill(slots.begin() + run.first, slots.begin() + end, true);
      keys += run.length;
    }
    const auto before = q.before.empty() ? unroped(q) : q.before;
    auto expected = oracle_->select(layer, head, q.q, before, q.tokens(), keys);
    if (expected.margin > margin()) {
      const auto difference = std::mismatch(slots.begin(), slots.end(), expected.slots.begin());
      EXPECT_TRUE(slots == expected.slots)
          << "layer " << layer << " head " << head << ": " << keys << " keys, expected "
          << std::count(expected.slots.begin(), expected.slots.end(), true) << ", first at slot "
          << difference.first - slots.begin() << " with margin " << expected.margin;
    } else {
      expected.slots = slots;
    }
    return expected;
  }

  void check_row(int64_t layer, int64_t head, int64_t token, int64_t query_head,
                 const reference::Selected& selected) const {
    const Queries& q = queries_[layer];
    const LayerView& view = oracle_->decoded(layer);
    int64_t first = oracle_->first_exact(layer);
    const LayerGeometry own = c_.model.layer(layer);
    if (own.kind == LayerKind::kRecent) {
      const int64_t position = q.positions[token];
      const int64_t seen =
          own.chunk > 0 ? position / own.chunk * own.chunk : position - own.window + 1;
      first = std::clamp<int64_t>(seen - (c_.tokens - view.exact), 0, view.exact);
    }
    const int64_t row = token * q.heads + query_head;
    const auto expected = reference::attend(q.q.data() + row * q.dim, view, head,
                                            own.attention_scale, selected, first);
    const auto& [out, lse] = outputs_[layer];
    if (std::isinf(expected.lse)) {
      ASSERT_EQ(lse[row], expected.lse) << "layer " << layer << " row " << row;
    } else {
      ASSERT_NEAR(lse[row], expected.lse, lse_tolerance_of(c_) * (1 + std::abs(expected.lse)))
          << "lse of layer " << layer << ", token " << token << ", head " << query_head;
    }
    for (int64_t i = 0; i < q.value_dim; ++i) {
      ASSERT_NEAR(out[row * q.value_dim + i], expected.out[i],
                  tolerance_of(c_) * (1 + std::abs(expected.out[i])))
          << "layer " << layer << ", token " << token << ", head " << query_head << ", " << i;
    }
  }

  void check_totals() const {
    const auto stats = session_->stats();
    EXPECT_EQ(stats.dense_fallback, oracle_->fallback());
    EXPECT_NEAR(stats.asked_budget, oracle_->asked_budget(), 1e-9);
    EXPECT_NEAR(stats.asked_keep, oracle_->asked_keep(), 1e-9);
    EXPECT_EQ(stats.delivered_budget, double(stats.bytes_read) / double(stats.bytes_dense));
    if (stats.keys_possible > 0) {
      EXPECT_EQ(stats.delivered_keep, double(stats.keys_read) / double(stats.keys_possible));
    }
    double read = 0, dense = 0;
    for (int64_t layer = 0; layer < c_.model.layers; ++layer) {
      if (oracle_->view(layer).slots == 0) continue;
      if (!oracle_->selects(layer)) return;  // what the others keep is not the average
      read += static_cast<double>(session_->stats(layer).bytes_read);
      dense += static_cast<double>(session_->stats(layer).bytes_dense);
    }
    if (stats.asked_budget == 0) return;
    EXPECT_LE(read / dense, stats.asked_budget + oracle_->slack());
  }

  void same_by(runtime::Session session, int64_t layer, const char* what) const {
    expect_close(attend(session, layer, queries_[layer]), outputs_[layer], c_, what);
  }

  // Each range of KV heads gives its part of the whole.
  void check_ranks(int64_t layer) const {
    const Queries& q = queries_[layer];
    uint64_t bytes = 0;
    const int64_t cut = 1 + static_cast<int64_t>(c_.seed) % (c_.model.kv_heads - 1);
    for (const auto& [first, count] :
         {std::pair{int64_t{0}, cut}, {cut, c_.model.kv_heads - cut}}) {
      auto options = c_.options(1);
      options.first_kv_head = first;
      options.kv_heads = count;
      runtime::Session rank(*index_, options);
      const int64_t each = q.heads / c_.model.kv_heads;
      const int64_t head = first * each, heads = count * each;
      const Output found = attend(rank, layer, q.part(0, q.tokens(), head, heads));
      Output expected;
      for (int64_t t = 0; t < q.tokens(); ++t) {
        const Output& whole = outputs_[layer];
        const int64_t row = t * q.heads + head;
        expected.lse.insert(expected.lse.end(), whole.lse.begin() + row,
                            whole.lse.begin() + row + heads);
        expected.out.insert(expected.out.end(), whole.out.begin() + row * q.value_dim,
                            whole.out.begin() + (row + heads) * q.value_dim);
      }
      expect_close(found, expected, c_, "rank");
      bytes += rank.stats(layer).bytes_read;
    }
    EXPECT_EQ(bytes, session_->stats(layer).bytes_read);
  }

  // A call over two slots and none gives what each gives alone.
  void check_contexts(int64_t layer) {
    const Queries& q = queries_[layer];
    const int64_t requests = std::ssize(c_.indptr) - 1;
    Random random(c_.seed);
    session_->put(7, *index_);
    std::vector<sqz_context> contexts;
    Output expected;
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t which = random.below(4);
      contexts.push_back({which == 0 ? -1 : which == 1 ? 7 : 0, 0, 0});
      const int64_t first = c_.indptr[r], tokens = c_.indptr[r + 1] - first;
      Call call(q.part(first, tokens, 0, q.heads), layer, false);
      Output one{std::vector<float>(tokens * q.heads * q.value_dim, 0),
                 std::vector<float>(tokens * q.heads, -INFINITY)};
      if (which != 0 && tokens > 0) {
        session_->attend(call.args);
        one = call.output();
      }
      expected.out.insert(expected.out.end(), one.out.begin(), one.out.end());
      expected.lse.insert(expected.lse.end(), one.lse.begin(), one.lse.end());
    }
    Call call(q, layer, c_.turned_lse);
    set_requests(call);
    call.args.contexts = contexts.data();
    session_->attend(call.args);
    expect_same_rows(call.output(), expected, layer);
  }
  // Requests that are served together may be cut otherwise than alone.
  void expect_same_rows(const Output& found, const Output& expected, int64_t layer) const {
    SCOPED_TRACE(concat("several contexts, layer ", layer));
    const double limit = tolerance_of(c_), lse_limit = kGpu ? lse_tolerance_of(c_) : 1e-3;
    const int64_t each = queries_[layer].value_dim;
    for (int64_t row = 0; row < std::ssize(found.lse); ++row) {
      const double lse = expected.lse[row], grown = kGpu ? 1 + std::abs(lse) : 1;
      const bool known = !kGpu || known_[layer][row];
      if (std::isinf(lse)) {
        ASSERT_EQ(found.lse[row], lse);
      } else if (known) {
        ASSERT_NEAR(found.lse[row], lse, lse_limit * grown);
      }
      for (int64_t i = row * each; known && i < (row + 1) * each; ++i) {
        ASSERT_NEAR(found.out[i], expected.out[i], limit * (1 + std::abs(expected.out[i])));
      }
    }
  }

  sqz_session_options dense_options() const {
    auto options = runtime::dense_options();
    options.device_type = kGpu ? 2 : 1;
    options.max_tokens = c_.indptr.back() + 1;
    options.threads = 1;
    if (c_.pruned_keep > 0) options = c_.options(1);  // it serves nothing else
    return options;
  }

  // A budget of 1 is dense attention.
  void check_whole(int64_t layer) {
    if (c_.pruned_keep > 0 || !c_.thresholds.empty() || c_.selector == SQZ_SELECTOR_DENSE) return;
    auto options = c_.options(1);
    options.budget = 1;
    options.keep = 0;
    runtime::Session whole(*index_, options);
    runtime::Session dense(*index_, dense_options());
    const Output found = attend(whole, layer, queries_[layer]);
    expect_close(found, attend(dense, layer, queries_[layer]), c_, "budget 1");
    EXPECT_EQ(whole.stats(layer).delivered_keep, oracle_->view(layer).slots > 0 ? 1 : 0);
  }

  // The index that was not pruned gives the same.
  void check_pruned(int64_t layer) const {
    runtime::Index base(base_);
    if (kGpu) base.upload();
    PropertyCase c = c_;
    c.keep = c.pruned_keep;
    c.layer_scales = c.pruned_scales;
    c.by_auto = false;
    same_by(runtime::Session(base, c.options(1)), layer, "not pruned");
  }

  const PropertyCase& c_;
  std::string path_, base_;
  std::optional<PropertyOracle> oracle_;
  std::optional<runtime::Index> index_;
  std::optional<runtime::Session> session_;
  std::vector<Queries> queries_;          // [layers]
  std::vector<Output> outputs_;           // [layers]
  std::vector<std::vector<bool>> known_;  // [layers][T, Hq]: no rounding decides what is selected
};

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoll(value);
}

TEST(Property, RandomConfigurations) {
#ifdef SQZ_PROPERTY_CUDA
  SQZ_SKIP_WITHOUT_GPU();
#endif
  const int64_t first = from_environment("SQZ_PROPERTY_FIRST", 1);
  const int64_t seeds = from_environment("SQZ_PROPERTY_SEEDS", kGpu ? 300 : 200);
  const testing::TemporaryDirectory directory;
  int64_t clear = 0, unclear = 0;
  for (int64_t seed = first; seed < first + seeds; ++seed) {
    const PropertyCase c = testing::draw_case(static_cast<uint64_t>(seed), kGpu);
    SCOPED_TRACE(describe(c) +
                 concat("\n  repeat: SQZ_PROPERTY_FIRST=", seed, " SQZ_PROPERTY_SEEDS=1"));
    Property property(c, directory);
    try {
      property.run();
    } catch (const runtime::Error& error) {
      FAIL() << error.what();
    }
    if (HasFailure()) return;
    clear += property.clear;
    unclear += property.unclear;
  }
  if (seeds > 50) {
    EXPECT_LT(unclear * 10, clear) << "most selections are decided by more than rounding";
  }
}

}  // namespace
}  // namespace sqz
