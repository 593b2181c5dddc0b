// Rows of codes that the GPU unpacks, against float64.
#include <gmock/gmock.h>

#include "libruntime/cuda/call_parts.h"
#include "libruntime/kernels/cuda/prefill/unpack_rows/kernel.h"
#include "tests/libruntime/coded_rows.h"
#include "tests/libruntime/cuda/blocks.h"
#include "tests/libruntime/cuda/prefill_device.h"

namespace sqz::cuda {
namespace {

using test::DeviceRuns;
using test::shape;
using test::SlotRun;
using testing::serve_coded;
using testing::Served;
using testing::TinyIndexOptions;

class CodedRowsTest : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

// Calls body(options) for both types and every dimension.
template <class Body>
void for_rows(const Body& body) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t dim : {64, 96, 128, 256}) {
      TinyIndexOptions options = shape(dim, 1, {40, 211});
      options.dtype = dtype;
      options.tokens = 1500;
      SCOPED_TRACE(concat(dtype_name(dtype), ", dim ", dim));
      body(options);
      if (::testing::Test::HasFatalFailure()) return;
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
    params.coded = layer.keys.coded;
    params.dtype = view.dtype;
    params.dim = params.value_dim = static_cast<int32_t>(view.head_dim);
    params.kv_heads = static_cast<int32_t>(view.kv_heads);
    params.slots = view.slots;
  }
  std::array<std::vector<float>, 2> host() const {
    return {testing::floats(view, keys.host().data(), view.slots, view.head_dim),
            testing::floats(view, values.host().data(), view.slots, view.head_dim)};
  }
};

// Rows of float64, rounded once.
TEST_F(CodedRowsTest, UnpackedRows) {
  for_rows([](const TinyIndexOptions& options) {
    const Served served = serve_coded(options, {.rows = RowKind::kQ8});
    const auto on_gpu = test::uploaded(served);
    const testing::Decoded expected = testing::decode(served.index->layers[0]);
    const Unpacked unpacked(served.index->layers[0], on_gpu->layer(0));
    ASSERT_TRUE(unpack_rows(unpacked.params, 1, unpacked.to, nullptr, nullptr).ok());
    const auto both = unpacked.host();
    for (const bool values : {false, true}) {
      const std::vector<float>& want = values ? expected.values : expected.keys;
      const std::vector<float>& found = both[values ? 1 : 0];
      ASSERT_EQ(found.size(), want.size());
      const double half = options.dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;  // of the last place
      for (size_t i = 0; i < want.size(); ++i) {
        const double magnitude = std::abs(double{want[i]});
        ASSERT_NEAR(found[i], want[i], 1.001 * half * magnitude + 1e-5)
            << (values ? "value " : "key ") << i;
      }
    }
  });
}

// With lists their rows alone, and each once in a call.
TEST_F(CodedRowsTest, UnpackedRowsOfLists) {
  TinyIndexOptions options = shape(96, 1, {40, 211});
  options.tokens = 1500;
  const Served served = serve_coded(options, {.rows = RowKind::kQ8});
  const auto on_gpu = test::uploaded(served);
  const LayerView& view = served.index->layers[0];
  const Unpacked all(view, on_gpu->layer(0)), some(view, on_gpu->layer(0));
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
    // Rows that are there are not written again.
    ASSERT_EQ(cudaMemset(some.keys.get(), 0xFF, keys.size() * 2), cudaSuccess);
    ASSERT_TRUE(unpack_rows(params, 2, some.to, nullptr, nullptr).ok());
    ASSERT_THAT(some.keys.host(), ::testing::Each(0xFFFF));
    ASSERT_EQ(cudaMemcpy(some.keys.get(), found.data(), found.size() * 2, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
}

}  // namespace
}  // namespace sqz::cuda
