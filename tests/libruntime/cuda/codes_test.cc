// Rows of codes and key codes on the GPU: the rows that an upload makes, against float64; and what
// is served of them, against the CPU backend over those rows (it is tested against float64) and
// without key codes, by which a GPU does not choose.
#include <gmock/gmock.h>

#include "libruntime/cuda/call_parts.h"
#include "libruntime/kernels/cuda/unpack_rows/kernel.h"
#include "tests/libruntime/coded_rows.h"
#include "tests/libruntime/cuda/blocks.h"
#include "tests/libruntime/cuda/prefill_device.h"

namespace sqz::cuda {
namespace {

using test::by_budget;
using test::cpu_session;
using test::DeviceCall;
using test::DeviceRuns;
using test::gpu_session;
using test::shape;
using test::SlotRun;
using test::with_thresholds;
using testing::serve;
using testing::serve_coded;
using testing::Served;
using testing::TinyIndexOptions;

// What a GPU has of an index, for the CPU backend.
struct UploadedIndex : ServedIndex {
  std::shared_ptr<const ServedIndex> from;  // offsets are there
  std::shared_ptr<DeviceIndex> on_gpu;
  std::vector<std::vector<std::byte>> memory;

  CodedRows back(const CodedRows& rows, const LayerView& view) {
    const auto count = static_cast<size_t>(view.kv_heads * view.slots);
    const auto copy = [&](const void* data, size_t bytes) {
      std::vector<std::byte>& to = memory.emplace_back(bytes);
      EXPECT_EQ(cudaMemcpy(to.data(), data, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
      return to.data();
    };
    EXPECT_EQ(rows.bits, 8);
    return {.bits = 8,
            .codes = copy(rows.codes, count * static_cast<size_t>(view.head_dim)),
            .scales = copy(rows.scales, count * 2)};
  }
};

std::shared_ptr<UploadedIndex> as_uploaded(const Served& served) {
  auto out = std::make_shared<UploadedIndex>();
  static_cast<ServedIndex&>(*out) = *served.index;
  out->from = served.index;
  out->on_gpu = test::uploaded(served);
  out->of_range = served.index->metadata();
  out->of_range->key_codes = 0;
  for (int64_t l = 0; l < std::ssize(out->layers); ++l) {
    LayerView& view = out->layers[static_cast<size_t>(l)];
    const DeviceLayer& layer = out->on_gpu->layer(l);
    view.key_codes = {};
    if (view.coded_keys.bits == 0) continue;
    view.coded_keys = out->back(layer.coded_keys, view);
    view.coded_values = out->back(layer.coded_values, view);
  }
  return out;
}

// The same index before and after it was compressed, and as a GPU has it: queries look for keys of
// the first.
struct Compressed {
  Served whole, coded, uploaded;
};
Compressed compress(const TinyIndexOptions& options, const CompressOptions& how) {
  Compressed out = {serve(options), serve_coded(options, how), {}};
  out.uploaded = {options, as_uploaded(out.coded)};
  return out;
}

struct Call {
  std::vector<int64_t> lengths = {1};  // of its requests
  DType dtype = DType::kF32;
  int64_t block = 0;
  bool sm80 = false;
  double lse_slack = 0, rounding = 1;
};

// Both backends; the share of the keys that was read, which must be about the one asked for.
double compare(const Compressed& index, const SelectionRequest& selection, const Call& how) {
  SelectionRequest on_cpu = selection;
  const bool codes = index.coded.index->metadata().key_codes > 0;
  if (codes && selection.selector == SelectorKind::kSqueezed) on_cpu.estimate = false;
  const double read = test::compare_blocks(index.coded, selection, how.lengths,
                                           {.block = how.block,
                                            .dtype = how.dtype,
                                            .sm80_kernels = how.sm80,
                                            .wanted = &index.whole,
                                            .on_cpu = &index.uploaded,
                                            .cpu_selection = &on_cpu,
                                            .plain_queries = true,
                                            .lse_slack = how.lse_slack,
                                            .rounding = how.rounding});
  if (on_cpu.keep > 0) {
    EXPECT_NEAR(read, on_cpu.keep, 0.05);
  }
  return read;
}

SelectionRequest dense() {
  SelectionRequest request;
  request.selector = SelectorKind::kDense;
  return request;
}

SelectionRequest estimated(SelectionRequest request) {
  request.estimate = true;
  return request;
}

std::vector<int64_t> tokens(int64_t count) {
  return std::vector<int64_t>(static_cast<size_t>(count), 1);
}

class Codes : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

// ---- Rows.

// Rows of 8 bits are those of the index. Values of 4 bits become numbers of 8 bits, of a scale that
// is the largest magnitude m of the residual over 127, rounded to 16 bits (2^-9 of it at most, in
// bf16): each is within half a scale of what it was, .5 (1 + 2^-9) m / 127. The largest may be
// beyond 127 scales by 2^-9 of it, a quarter of a scale.
TEST_F(Codes, UploadedRows) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t dim : {64, 96, 128, 256}) {
      TinyIndexOptions options = shape(dim, 1, {40, 211});
      options.dtype = dtype;
      options.tokens = 1500;
      for (const RowKind rows : {RowKind::kQ8, RowKind::kQ4}) {
        SCOPED_TRACE(concat(dtype_name(dtype), ", dim ", dim, ", ", rows_name(rows)));
        const Served served = serve_coded(options, {.rows = rows, .key_codes = 1});
        const auto uploaded = as_uploaded(served);
        const LayerView &from = served.index->layers[1], &found = uploaded->layers[1];
        const LevelView& finest = from.level[static_cast<size_t>(from.levels - 1)];
        // Residuals: over means of zero.
        const std::vector<std::byte> zeros(
            static_cast<size_t>(from.kv_heads * finest.clusters * dim * 2));
        const auto residuals = [&](const LayerView& view, const CodedRows& coded) {
          return testing::decode(view, coded, zeros.data());
        };
        EXPECT_EQ(residuals(found, found.coded_keys), residuals(from, from.coded_keys));
        const std::vector<float> values = residuals(found, found.coded_values);
        const std::vector<float> want = residuals(from, from.coded_values);
        if (rows == RowKind::kQ8) {
          EXPECT_EQ(values, want);
          continue;
        }
        ASSERT_EQ(values.size(), want.size());
        for (size_t row = 0; row < want.size(); row += static_cast<size_t>(dim)) {
          float most = 0;
          for (int64_t i = 0; i < dim; ++i) {
            most = std::max(most, std::abs(want[row + static_cast<size_t>(i)]));
          }
          const double tolerance = 0.5 * (1 + 0x1p-9) * most / 127 + 1e-5 * most;  // of float32
          for (size_t i = row; i < row + static_cast<size_t>(dim); ++i) {
            ASSERT_NEAR(values[i], want[i], tolerance) << "row " << row / dim << ", number " << i;
          }
        }
      }
    }
  }
}

// A layer of several pieces of an upload, whose last block of rows is not whole: every row is there
// once, under its own scale.
TEST_F(Codes, UploadsInPieces) {
  TinyIndexOptions options = shape(64, 1, {300});
  options.layers = 1;
  options.tokens = 100000;  // of 4-bit values 3 KV heads have 10 MB
  const Served served = serve_coded(options, {.rows = RowKind::kQ4});
  const auto uploaded = as_uploaded(served);
  const LayerView &from = served.index->layers[0], &found = uploaded->layers[0];
  std::vector<int8_t> numbers(64);
  for (int64_t row = 0; row < from.kv_heads * from.slots; row += 17) {
    const auto number = [&](const LayerView& view, int64_t i) {
      const CodedRows& coded = view.coded_values;
      const int64_t bytes = code_bytes(64, coded.bits);
      decode_row(coded.codes + row * bytes, coded.bits, 64, numbers.data());
      double sum = 0;
      for (int64_t j = 0; j < 64; ++j) {
        const double turn = !coded.rotated() ? i == j : double{view.rotation[i * 64 + j]};
        sum += turn * numbers[static_cast<size_t>(j)];
      }
      return sum * reference::element(view.dtype, coded.scales, row);
    };
    const double scale = reference::element(found.dtype, found.coded_values.scales, row);
    for (int64_t i = row % 7; i < 64; i += 7) {
      ASSERT_NEAR(number(found, i), number(from, i), 0.51 * scale) << "row " << row;
    }
  }
}

// Where unpack_rows() writes the keys and values of a layer; NaN until then.
struct Unpacked {
  const LayerView& view;
  AttendParams params;
  test::DeviceArray<uint16_t> keys, values;
  test::DeviceArray<uint32_t> bits;
  UnpackedRows to;

  Unpacked(const LayerView& from, const DeviceLayer& layer)
      : view(from),
        keys(static_cast<size_t>(from.kv_heads * from.slots * from.head_dim)),
        values(static_cast<size_t>(from.kv_heads * from.slots * from.head_dim)),
        bits(static_cast<size_t>(2 * from.kv_heads * UnpackedRows::words(from.slots))),
        to{keys.get(), values.get(), bits.get()} {
    params.coded = coded_source(layer);
    params.dtype = view.dtype;
    params.dim = static_cast<int32_t>(view.head_dim);
    params.kv_heads = static_cast<int32_t>(view.kv_heads);
    params.slots = view.slots;
  }
  std::array<std::vector<float>, 2> host() const {
    return {testing::floats(view, keys.host().data(), view.slots),
            testing::floats(view, values.host().data(), view.slots)};
  }
};

// Those of float64, rounded once.
TEST_F(Codes, UnpackedRows) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t dim : {64, 96, 128, 256}) {
      TinyIndexOptions options = shape(dim, 1, {40, 211});
      options.dtype = dtype;
      options.tokens = 1500;
      for (const RowKind rows : {RowKind::kQ8, RowKind::kQ4}) {
        SCOPED_TRACE(concat(dtype_name(dtype), ", dim ", dim, ", ", rows_name(rows)));
        const auto uploaded = as_uploaded(serve_coded(options, {.rows = rows}));
        const testing::Decoded expected = testing::decode(uploaded->layers[0]);
        const Unpacked unpacked(uploaded->layers[0], uploaded->on_gpu->layer(0));
        ASSERT_TRUE(unpack_rows(unpacked.params, 1, unpacked.to, nullptr, nullptr).ok());
        const auto both = unpacked.host();
        for (const bool values : {false, true}) {
          const std::vector<float>& want = values ? expected.values : expected.keys;
          const std::vector<float>& found = both[values ? 1 : 0];
          ASSERT_EQ(found.size(), want.size());
          const double half = dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;  // of the last place
          for (size_t i = 0; i < want.size(); ++i) {
            const double magnitude = std::abs(double{want[i]});
            ASSERT_NEAR(found[i], want[i], 1.001 * half * magnitude + 1e-5)
                << (values ? "value " : "key ") << i;
          }
        }
      }
    }
  }
}

// With lists their rows alone, and each once in a call.
TEST_F(Codes, UnpackedRowsOfLists) {
  TinyIndexOptions options = shape(96, 1, {40, 211});
  options.tokens = 1500;
  const auto uploaded = as_uploaded(serve_coded(options, {.rows = RowKind::kQ8}));
  const LayerView& view = uploaded->layers[0];
  const Unpacked all(view, uploaded->on_gpu->layer(0)), some(view, uploaded->on_gpu->layer(0));
  ASSERT_TRUE(unpack_rows(all.params, 1, all.to, nullptr, nullptr).ok());
  const std::vector<uint16_t> keys = all.keys.host(), values = all.values.host();

  // Runs of two selections, three heads each: bits of one word, of some, of a whole tile and more.
  const std::vector<std::vector<SlotRun>> once = {
      {{3, 1}, {31, 2}, {200, 700}}, {}, {{0, 1}, {1383, 1}}, {{64, 32}}, {{5, 9}}, {{0, 1384}}};
  const std::vector<std::vector<SlotRun>> again = {{{0, 5}}, {{96, 1}}, {{1000, 384}},
                                                   {},       {{0, 32}}, {{40, 1}}};
  ASSERT_EQ(view.slots, 1384);
  std::vector<bool> listed(static_cast<size_t>(view.kv_heads * view.slots));
  uint64_t means = 0;
  test::DeviceArray<unsigned long long> counter(std::vector<unsigned long long>{0});
  ASSERT_TRUE(forget_rows(some.params, some.to, nullptr).ok());
  for (const auto* lists : {&once, &again}) {
    const DeviceRuns runs(*lists, 8);
    AttendParams params = some.params;
    params.lists = runs.lists;
    ASSERT_TRUE(unpack_rows(params, 2, some.to, counter.get(), nullptr).ok());
    const LevelView& finest = view.level[static_cast<size_t>(view.levels - 1)];
    for (size_t list = 0; list < lists->size(); ++list) {
      const size_t head = list % static_cast<size_t>(view.kv_heads);
      const uint32_t* ends = finest.offsets + head * static_cast<size_t>(finest.clusters + 1) + 1;
      const auto cluster_of = [&](uint32_t slot) {
        return std::upper_bound(ends, ends + finest.clusters, slot) - ends;
      };
      for (const SlotRun& run : (*lists)[list]) {
        const uint32_t last = run.first + run.length - 1;
        means += static_cast<uint64_t>(cluster_of(last) - cluster_of(run.first) + 1);
        for (uint32_t slot = run.first; slot <= last; ++slot) {
          listed[head * static_cast<size_t>(view.slots) + slot] = true;
        }
      }
    }
    EXPECT_EQ(counter.host()[0], means);
    const std::vector<uint16_t> found = some.keys.host(), found_values = some.values.host();
    for (size_t i = 0; i < keys.size(); ++i) {
      const bool there = listed[i / static_cast<size_t>(view.head_dim)];
      ASSERT_EQ(found[i], there ? keys[i] : 0xFFFF) << i;
      ASSERT_EQ(found_values[i], there ? values[i] : 0xFFFF) << i;
    }
    // What is there is not written again.
    ASSERT_EQ(cudaMemset(some.keys.get(), 0xFF, keys.size() * 2), cudaSuccess);
    ASSERT_TRUE(unpack_rows(params, 2, some.to, nullptr, nullptr).ok());
    ASSERT_THAT(some.keys.host(), ::testing::Each(0xFFFF));
    ASSERT_EQ(cudaMemcpy(some.keys.get(), found.data(), found.size() * 2, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
}

// ---- A token a request.

TEST_F(Codes, RowsAndBits) {
  const TinyIndexOptions options = shape(128, 4, {43});
  for (const RowKind rows : {RowKind::k16, RowKind::kQ8, RowKind::kQ4}) {
    for (const int bits : {0, 1, 2}) {
      if (rows == RowKind::k16 && bits == 0) continue;
      SCOPED_TRACE(concat(rows_name(rows), ", ", bits, " bits"));
      const Compressed index = compress(options, {.rows = rows, .key_codes = bits});
      compare(index, by_budget(0.1), {});
      compare(index, with_thresholds({1e-3}), {tokens(3)});
      compare(index, by_budget(0.1), {tokens(9), DType::kBF16, 0, false, 0, 4});
      compare(index, dense(), {tokens(2)});
      if (bits == 0) continue;  // nothing is estimated
      compare(index, estimated(by_budget(0.1)), {tokens(2)});
      compare(index, estimated(with_thresholds({1e-3})), {});
      if (HasFailure()) return;
    }
  }
}

TEST_F(Codes, ShapesAndGroups) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    for (const int64_t group : {1, 4, 7, 8}) {
      for (const RowKind rows : {RowKind::kQ8, RowKind::kQ4}) {
        const int bits = rows == RowKind::kQ8 ? 0 : group % 2 == 0 ? 2 : 1;
        SCOPED_TRACE(concat("dim ", dim, ", group ", group, ", ", rows_name(rows), ", ", bits));
        const Compressed index =
            compress(shape(dim, group, {40, 211}), {.rows = rows, .key_codes = bits});
        compare(index, by_budget(0.05), {});
        compare(index, by_budget(0.2), {tokens(11)});
        compare(index, with_thresholds({1e-4, 3e-4}), {tokens(2)});
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(Codes, Dtypes) {
  for (const DType stored : {DType::kBF16, DType::kF16}) {
    TinyIndexOptions options = shape(128, 4, {211});
    options.dtype = stored;
    for (const RowKind rows : {RowKind::kQ8, RowKind::kQ4}) {
      const Compressed index = compress(options, {.rows = rows, .key_codes = 2});
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        SCOPED_TRACE(
            concat(dtype_name(stored), ", ", rows_name(rows), " and queries ", dtype_name(dtype)));
        compare(index, by_budget(0.1), {tokens(3), dtype});
        // They share what they read, and rows become 16 bits.
        const double rounding = dtype == stored && dtype == DType::kBF16 ? 4 : 1;
        compare(index, dense(), {tokens(3), dtype, 0, false, 0, rounding});
      }
    }
  }
}

// Requests that share what they read, for which rows become 16 bits.
TEST_F(Codes, ManyRequests) {
  for (const DType stored : {DType::kF16, DType::kBF16}) {
    for (const int64_t dim : {64, 96, 128, 256}) {
      TinyIndexOptions options = shape(dim, dim == 64 ? 7 : 4, {40, 211});
      options.dtype = stored;
      options.layers = 1;
      const Compressed index = compress(options, {.rows = dim == 96 ? RowKind::kQ4 : RowKind::kQ8});
      for (const int64_t requests : {2, 6, 16, 40, 70}) {
        SCOPED_TRACE(concat(dtype_name(stored), ", dim ", dim, ", ", requests, " requests"));
        const Call call = {
            tokens(requests), stored, 0, false, 0, stored == DType::kBF16 ? 8.0 : 2.0};
        compare(index, dense(), call);
        compare(index, with_thresholds({1e-4, 3e-4}), call);
        compare(index, by_budget(0.1), call);
        if (HasFailure()) return;
      }
    }
  }
}

// As Decode.BatchesThatWantMost.
TEST_F(Codes, RequestsThatWantMost) {
  TinyIndexOptions options = shape(64, 2, {40, 211});
  options.layers = 1;
  options.tokens = 70000;
  const Compressed index = compress(options, {.rows = RowKind::kQ8});
  for (const int64_t requests : {16, 40}) {
    SCOPED_TRACE(concat(requests, " requests"));
    const auto gpu = gpu_session(index.coded, with_thresholds({1e-5}));
    const auto all = gpu_session(index.coded, dense());
    const auto queries = testing::make_queries(index.whole, 0, requests, 7, 0.6f);
    DeviceCall call(index.coded, 0, requests, DType::kBF16);
    DeviceCall whole(index.coded, 0, requests, DType::kBF16);
    call.set_queries(queries);
    whole.set_queries(queries);
    ASSERT_TRUE(all->attend(whole.call).ok());
    for (int64_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(gpu->attend(call.call).ok());
      if (std::string(gpu->route()) != "batch") GTEST_SKIP() << "no batches on this GPU";
    }
    test::expect_rows_close(call.output(), whole.output(), 64);
    const auto selected = gpu->totals(0), read = all->totals(0);
    ASSERT_TRUE(selected.ok() && read.ok());
    EXPECT_EQ(selected->read_whole, static_cast<uint64_t>(requests));
    ASSERT_TRUE(gpu->clear_totals().ok());
    ASSERT_TRUE(gpu->attend(call.call).ok());
    test::expect_same_counters(*gpu->totals(0), *read);
  }
}

TEST_F(Codes, LevelsAndPolicies) {
  const Compressed index =
      compress(shape(64, 4, {9, 70, 500}), {.rows = RowKind::kQ8, .key_codes = 2});
  for (int group = 0; group < 3; ++group) {
    SCOPED_TRACE(concat("policy ", group));
    compare(index, with_thresholds({2e-4, 2e-4, 2e-4}, group), {});
    compare(index, with_thresholds({2e-4, 2e-4}, group), {tokens(3)});
    SelectionRequest budget = by_budget(0.1);
    budget.group = group;
    compare(index, budget, {tokens(3)});
  }
  for (const double keep : {0.01, 0.05, 0.3}) {
    for (const int levels : {1, 2, 3}) compare(index, by_budget(keep, levels), {tokens(2)});
  }
}

// Layers of 16 bits and dense ones beside those of codes.
TEST_F(Codes, MixedLayers) {
  TinyIndexOptions options = shape(128, 4, {43});
  options.layers = 4;
  options.dense_layers = {1};
  for (const int bits : {0, 2}) {
    const Compressed index =
        compress(options, {.rows = RowKind::kQ8, .key_codes = bits, .layers16 = {2}});
    compare(index, by_budget(0.1), {tokens(2)});
    compare(index, dense(), {tokens(2)});
  }
}

// All rows, against float64 of what is on the GPU.
TEST_F(Codes, EverythingInFloat64) {
  for (const RowKind rows : {RowKind::kQ8, RowKind::kQ4}) {
    const Compressed index = compress(shape(128, 4, {43}), {.rows = rows});
    const Served& served = index.coded;
    const auto gpu = gpu_session(served, dense());
    ASSERT_NE(gpu, nullptr);
    const auto queries = testing::make_queries(index.whole, 0, 2, 7, 0.6f);
    DeviceCall call(served, 0, 2, DType::kF32);
    call.set_queries(queries);
    ASSERT_TRUE(gpu->attend(call.call).ok());
    const testing::Output found = call.output();
    const testing::Decoded layer = testing::decode(index.uploaded.index->layers[0]);
    const int64_t d = served.options.head_dim;
    reference::Selected all;
    all.slots.assign(static_cast<size_t>(layer.view.slots), true);
    for (int64_t row = 0; row < std::ssize(found.lse); ++row) {
      const int64_t head = row % served.options.query_heads / served.group();
      const auto expected =
          reference::attend(queries.data() + row * d, layer.view, head, served.scale(), all, false);
      EXPECT_NEAR(found.lse[static_cast<size_t>(row)], expected.lse, 1e-4) << "row " << row;
      for (int64_t c = 0; c < d; ++c) {
        EXPECT_NEAR(found.out[static_cast<size_t>(row * d + c)],
                    expected.out[static_cast<size_t>(c)], 2e-4)
            << "row " << row;
      }
      if (HasFailure()) return;
    }
  }
}

// What is estimated is served from unpacked rows, single tokens as well. Rows in bf16 would be
// rounded too much for these tolerances; UnpackedRows has both types.
TEST_F(Codes, Estimates) {
  for (const int64_t dim : {64, 128}) {
    TinyIndexOptions options = shape(dim, 4, {40, 211});
    options.dtype = DType::kF16;
    for (const RowKind rows : {RowKind::kQ8, RowKind::kQ4}) {
      SCOPED_TRACE(concat("dim ", dim, ", ", rows_name(rows)));
      const Compressed index = compress(options, {.rows = rows});
      compare(index, estimated(by_budget(0.1)), {tokens(1), DType::kF16});
      compare(index, estimated(by_budget(0.1)), {tokens(5), DType::kF16});
      compare(index, estimated(with_thresholds({1e-4, 3e-4})), {tokens(2), DType::kF16});
      SessionOptions one;
      one.selection = estimated(by_budget(0.1));
      one.max_request_tokens = 1;
      const auto session = create_session(index.coded.index, test::uploaded(index.coded), one);
      ASSERT_TRUE(session.ok()) << session.status().message();
      DeviceCall call(index.coded, 0, 2, DType::kF16);
      call.set_queries(testing::make_queries(index.whole, 0, 2, 7, 0.6f));
      ASSERT_TRUE((*session)->attend(call.call).ok());
      EXPECT_STREQ((*session)->route(), "prefill-sm80");
    }
  }
}

// Runs of any keys, not of whole clusters.
TEST_F(Codes, StaticSelectors) {
  TinyIndexOptions options = shape(128, 4, {40, 211});
  options.dtype = DType::kF16;
  options.heavy_hitters = true;
  for (const RowKind rows : {RowKind::kQ8, RowKind::kQ4}) {
    const Compressed index = compress(options, {.rows = rows, .key_codes = 1});
    for (const SelectorKind kind :
         {SelectorKind::kStream, SelectorKind::kWindow, SelectorKind::kH2o}) {
      SCOPED_TRACE(concat(rows_name(rows), ", selector ", static_cast<int>(kind)));
      SelectionRequest selection;
      selection.selector = kind;
      selection.keep = 0.1;
      compare(index, selection, {tokens(3)});
      for (const bool sm80 : {false, true}) {
        // A window of few keys: the rounding of one shows in the sum.
        compare(index, selection, {{70, 1, 33}, DType::kF16, 32, sm80, 5e-4});
      }
      if (HasFailure()) return;
    }
  }
}

// ---- Prompts.

// They share a selection of clusters a block, as on the CPU.
TEST_F(Codes, Prompts) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    TinyIndexOptions options = shape(dim, dim == 96 ? 7 : 4, {40, 211});
    options.dtype = DType::kF16;
    for (const RowKind rows : {RowKind::kQ8, RowKind::kQ4}) {
      const Compressed index = compress(options, {.rows = rows});
      for (const bool sm80 : {false, true}) {
        SCOPED_TRACE(concat("dim ", dim, ", ", rows_name(rows), sm80 ? ", sm80" : ""));
        const auto run = [&](const SelectionRequest& selection, std::vector<int64_t> lengths) {
          return compare(index, selection, {std::move(lengths), DType::kF16, 32, sm80});
        };
        run(by_budget(0.1), {70});
        run(with_thresholds({1e-4, 3e-4}), {1, 40, 33, 0, 5});
        EXPECT_EQ(run(dense(), {50, 3}), 1.0);
        run(estimated(by_budget(0.1)), {70});
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(Codes, PromptsOverMixedLayers) {
  TinyIndexOptions options = shape(128, 4, {43});
  options.dtype = DType::kF16;
  options.layers = 4;
  options.dense_layers = {1};
  const Compressed index = compress(options, {.rows = RowKind::kQ4, .layers16 = {2}});
  compare(index, by_budget(0.1), {{50, 1, 20}, DType::kF16, 16});
}

// Blocks of one token among them.
TEST_F(Codes, PromptsWithKeyCodes) {
  TinyIndexOptions options = shape(128, 4, {40, 211});
  options.dtype = DType::kF16;
  for (const RowKind rows : {RowKind::k16, RowKind::kQ8, RowKind::kQ4}) {
    const Compressed index = compress(options, {.rows = rows, .key_codes = 2});
    for (const bool sm80 : {false, true}) {
      SCOPED_TRACE(concat(rows_name(rows), sm80 ? ", sm80" : ""));
      for (const int64_t block : {32, 1}) {
        const Call call = {{70, 1, 33}, DType::kF16, block, sm80};
        compare(index, estimated(by_budget(0.1)), call);
        compare(index, with_thresholds({1e-4, 3e-4}), call);
      }
      if (HasFailure()) return;
    }
  }
}

// ---- Sessions.

// Plans are those of the index without key codes.
TEST_F(Codes, PlansWithoutKeyCodes) {
  const Compressed index =
      compress(shape(128, 4, {40, 211}), {.rows = RowKind::kQ8, .key_codes = 2});
  SelectionRequest selection = estimated(by_budget(0));
  selection.budget = 0.125;
  const auto gpu = gpu_session(index.coded, selection);
  selection.estimate = false;
  const auto cpu = cpu_session(index.uploaded, selection);
  ASSERT_NE(gpu, nullptr);
  ASSERT_NE(cpu, nullptr);
  const SelectionPlan &found = gpu->plan(), &want = cpu->plan();
  EXPECT_EQ(found.asked_budget, 0.125);
  EXPECT_EQ(found.asked_keep, want.asked_keep);
  EXPECT_EQ(found.least_budget, want.least_budget);
  EXPECT_FALSE(found.dense);
  EXPECT_FALSE(found.estimate);
  EXPECT_EQ(found.alive, 0);
}

TEST_F(Codes, FaultsAreNan) {
  const Compressed index = compress(shape(64, 4, {43}), {.rows = RowKind::kQ8, .key_codes = 2});
  const auto gpu = gpu_session(index.coded, by_budget(0.1));
  ASSERT_NE(gpu, nullptr);
  auto queries = testing::make_queries(index.whole, 0, 1, 7, 0.6f);
  const int64_t d = 64, group = 4;
  queries[static_cast<size_t>(group * d + 5)] = NAN;  // of the second KV head
  DeviceCall call(index.coded, 0, 1, DType::kF32);
  call.set_queries(queries);
  ASSERT_TRUE(gpu->attend(call.call).ok());
  const testing::Output output = call.output();
  for (int64_t row = 0; row < 3 * group; ++row) {
    EXPECT_EQ(std::isnan(output.lse[static_cast<size_t>(row)]), row / group == 1) << row;
    EXPECT_EQ(std::isnan(output.out[static_cast<size_t>(row * d)]), row / group == 1) << row;
  }
  EXPECT_EQ(gpu->select(call.call).status().code(), Code::kNumeric);
}

TEST_F(Codes, WhatIsRefused) {
  const auto refused = [](const Served& served, SelectorKind selector, bool keys_values) {
    SessionOptions options;
    options.selection.selector = selector;
    options.selection.keep = 0.1;
    const auto session = create_session(served.index, test::uploaded(served, keys_values), options);
    EXPECT_EQ(session.ok() ? Code::kUnsupported : session.status().code(), Code::kUnsupported);
    return session.ok() ? std::string() : session.status().message();
  };
  TinyIndexOptions shape_64 = shape(64, 4, {43});
  shape_64.key_calibration = true;
  const Served rows = serve_coded(shape_64, {.rows = RowKind::kQ8, .key_codes = 2});
  EXPECT_THAT(refused(rows, SelectorKind::kIdeal, true), ::testing::HasSubstr("selector ideal"));
  EXPECT_THAT(refused(rows, SelectorKind::kSqueezed, false),
              ::testing::HasSubstr("no keys and values on the GPU"));
  // Key codes are not there: an index of 16-bit rows is served as if it had none.
  const Served codes = serve_coded(shape_64, {.rows = RowKind::k16, .key_codes = 2});
  EXPECT_EQ(refused(codes, SelectorKind::kIdeal, true), "");
  EXPECT_EQ(refused(codes, SelectorKind::kSqueezed, false), "");
}

}  // namespace
}  // namespace sqz::cuda
