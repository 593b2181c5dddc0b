// Sessions on the GPU against the CPU backend: the same keys, the same attention. The property test
// draws shapes, selectors, rules, levels, types and layers for up to 300 tokens; here are more
// requests, rows of 8 bits of all shapes, and the limits.
#include <gmock/gmock.h>

#include <algorithm>
#include <iterator>
#include <thread>

#include "libindex/prune.h"
#include "libruntime/cuda/device_index.h"
#include "libruntime/cuda/driver.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "tests/libruntime/coded_rows.h"
#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

using test::Backends;
using test::BlockOptions;
using test::by_budget;
using test::compare;
using test::DeviceCall;
using test::gpu_session;
using test::Lengths;
using test::shape;
using test::single_tokens;
using test::with_thresholds;
using testing::make_queries;
using testing::Output;
using testing::serve;
using testing::Served;
using testing::TinyIndexOptions;

const SelectionRequest kDense = {.selector = SelectorKind::kDense};

SelectionRequest quest(double keep) {
  return {.selector = SelectorKind::kQuest, .keep = keep, .dense_layers = -1};
}
TinyIndexOptions pages(int64_t dim, int64_t group, int64_t page_size = 16) {
  TinyIndexOptions o = shape(dim, group, {});
  o.page_size = page_size;
  return o;
}

// That an H200 holds at once, of 2 blocks each and more.
constexpr int kTeams[] = {66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7};

TEST(TeamSizes, LargestThatAllRunAtOnce) {
  TeamSizes sizes;
  EXPECT_EQ(sizes.of(1), 1);  // none could be gathered
  EXPECT_EQ(sizes.least(), 1);
  std::copy(std::begin(kTeams), std::end(kTeams), sizes.teams + 2);
  EXPECT_EQ(sizes.of(1), kMostTeam);
  EXPECT_EQ(sizes.of(7), kMostTeam);
  EXPECT_EQ(sizes.of(8), 9);
  EXPECT_EQ(sizes.of(15), 8);
  EXPECT_EQ(sizes.of(16), 6);
  EXPECT_EQ(sizes.of(66), 2);
  EXPECT_EQ(sizes.of(67), 1);
  EXPECT_EQ(sizes.least(), 2);
}

class Serving : public test::OnGpu {};

// Thresholds of this index say that a score at the cutoff is expected to be far from what scores
// are (-12, log2), but for a share of .45; they are all the same, close together or far apart.
TEST_F(Serving, CutoffsOfBudgets) {
  const Served served = serve(shape(128, 4, {9, 70, 500}));
  for (const double keep : {0.01, 0.1, 0.45, 0.9}) {
    for (const float strength : {0.0f, 0.05f, 3.0f}) {
      SCOPED_TRACE(concat("keep ", keep, ", queries of ", strength));
      const BlockOptions how = {.strength = strength};
      EXPECT_NEAR(compare(served, by_budget(keep, 1), {1}, how), keep, 0.01);
      compare(served, by_budget(keep), {1, 1}, how);
    }
  }
}

TEST_F(Serving, EverythingNothingAndOneCluster) {
  TinyIndexOptions options = shape(128, 4, {40, 211});
  const Served served = serve(options);
  options.sink = options.tail = 0;
  const Served bare = serve(options), one = serve(shape(128, 4, {1})),
               few = serve(shape(128, 4, {1, 2}));
  for (const auto& [lengths, sm80] : {std::pair{single_tokens(2), false},
                                      {single_tokens(9), false},
                                      {Lengths{20}, false},
                                      {Lengths{20}, true}}) {
    SCOPED_TRACE(concat(lengths.size(), " requests", sm80 ? ", sm80" : ""));
    const BlockOptions how = {.sm80_kernels = sm80};
    for (const double threshold : {0.0, 1.0}) {
      const auto selection = with_thresholds({threshold, threshold});
      EXPECT_EQ(compare(served, selection, lengths, how), 1 - threshold);
      EXPECT_EQ(compare(bare, selection, lengths, how), 1 - threshold);
    }
    EXPECT_EQ(compare(served, with_thresholds({0, 1}), lengths, how), 0);
    compare(one, with_thresholds({1e-4}), lengths, how);
    compare(few, with_thresholds({1e-4, 1e-4}), lengths, how);
  }
  const Served paged = serve(pages(128, 4));
  const double slots = 4321 - 116;
  EXPECT_NEAR(compare(paged, quest(16.5 / slots), {20}), 16 / slots, 1e-4);
  EXPECT_GT(compare(paged, quest(0.999), {20}), 0.99);
  compare(serve(pages(64, 2, 1500)), quest(0.4), {20, 3}, {.block = 8});
}

TEST_F(Serving, ManyRequests) {
  // 400 requests are more pairs than one launch takes. No score, coarse or fine, lies within 6e-6 T
  // of these thresholds: 400 requests have 170,000 of them, and nearer ones are decided by
  // rounding.
  const Served served = serve(shape(64, 2, {40, 211}));
  const auto far = with_thresholds({1.14e-4, 4.07e-4});
  for (const int64_t requests : {5, 17, 64, 400}) {
    SCOPED_TRACE(concat(requests, " requests"));
    compare(served, far, single_tokens(requests));
    compare(served, far, single_tokens(requests), {.dtype = DType::kF32});
    compare(served, by_budget(0.1), single_tokens(requests));
    compare(served, kDense, single_tokens(requests));
    if (HasFailure()) return;
  }
  // Decoding without teams of blocks and launches that overlap.
  const Served other = serve(shape(128, 4, {40, 211}));
  for (const int64_t requests : {1, 3, 20}) {
    for (const auto& selection : {with_thresholds({1e-4, 3e-4}), by_budget(0.1), kDense}) {
      compare(other, selection, single_tokens(requests), {.sm80_kernels = true});
    }
  }
}

// Requests that want most of the keys between them: reading everything would be faster the next
// time, but the next call reads the same and gives the same bits.
TEST_F(Serving, CallsDoNotDependOnCallsBefore) {
  TinyIndexOptions options = shape(64, 2, {40, 211});
  options.layers = 1;
  options.tokens = 70000;
  const Served served = serve(options);
  const auto gpu = gpu_session(served, with_thresholds({1e-5}));
  DeviceCall call(served, 0, single_tokens(16), DType::kBF16);
  call.set_queries(make_queries(served, 0, 16, 7));
  Output first;
  uint64_t keys = 0;
  for (uint64_t calls = 1; calls <= 3; ++calls) {
    ASSERT_TRUE(gpu->attend(call.call).ok());
    if (calls == 1) first = call.output();
    EXPECT_EQ(call.output(), first);
    const auto totals = gpu->totals(0);
    ASSERT_TRUE(totals.ok());
    if (calls == 1) keys = totals->keys_read;
    EXPECT_EQ(totals->keys_read, calls * keys);
    EXPECT_LT(totals->keys_read, totals->keys_possible);
  }
}

TEST_F(Serving, Routes) {
  const Served served = serve(shape(64, 2, {40, 211}));
  const auto gpu = gpu_session(served, by_budget(0.1));
  EXPECT_STREQ(gpu->route(), "");
  DeviceCall one(served, 0, {1}, DType::kBF16), many(served, 0, single_tokens(16), DType::kBF16);
  one.set_queries(make_queries(served, 0, 1, 7));
  many.set_queries(make_queries(served, 0, 16, 7));
  const auto device = read_device(0);
  ASSERT_TRUE(device.ok());
  const char* const single = device->has_clusters() ? "decode" : "prefill-sm80";
  ASSERT_TRUE(gpu->attend(one.call).ok());
  EXPECT_STREQ(gpu->route(), single);
  ASSERT_TRUE(gpu->attend(many.call).ok());
  EXPECT_STREQ(gpu->route(), device->has_wgmma() ? "batch" : single);
}

// Few rows, whose keys are cut into parts, and so many that they are not.
TEST_F(Serving, Dense) {
  for (const bool sm80 : {false, true}) {
    const Served served = serve(sm80 ? shape(64, 8, {40, 211}) : shape(128, 4, {40, 211}));
    for (const auto& [lengths, block] :
         {std::pair{Lengths{50}, 0}, {Lengths{2}, 0}, {Lengths{50, 3}, 32}, {Lengths{1800}, 0}}) {
      EXPECT_EQ(compare(served, kDense, lengths, {.block = block, .sm80_kernels = sm80}), 1);
    }
  }
}

// The same index before and after it was compressed. Queries look for keys of the first.
struct Compressed {
  Served whole, coded;
};
Compressed compress(const TinyIndexOptions& options) {
  return {serve(options), serve_coded(options, {.rows = RowKind::kQ8})};
}

// The share of the keys that was read must be about the one asked for.
double compare(const Compressed& index, const SelectionRequest& selection, const Lengths& lengths,
               BlockOptions how = {.dtype = DType::kF32}) {
  how.wanted = &index.whole;
  how.plain_queries = true;
  const double read = compare(index.coded, selection, lengths, how);
  if (selection.keep > 0) {
    EXPECT_NEAR(read, selection.keep, 0.05);
  }
  return read;
}

TEST_F(Serving, ShapesOfCodedRows) {
  const auto deep = with_thresholds({1e-4, 3e-4});
  for (const int64_t dim : {64, 96, 128, 160, 256}) {
    for (const int64_t group : {1, 4, 7, 12}) {
      SCOPED_TRACE(concat("dim ", dim, ", group ", group));
      TinyIndexOptions options = shape(dim, group, {40, 211});
      // Dimensions that are unpacked to 16 bits for single tokens, too: F16 rounds an eighth.
      if (dim == 160) options.dtype = DType::kF16;
      const Compressed index = compress(options);
      compare(index, by_budget(0.05), {1});
      compare(index, by_budget(0.2), single_tokens(11));
      compare(index, deep, {1, 1});
      if (HasFailure()) return;
      if (group != (dim == 96 ? 7 : 4)) continue;
      // Prompts share a selection of clusters a block, as on the CPU.
      options.dtype = DType::kF16;
      const Compressed half = compress(options);
      for (const bool sm80 : {false, true}) {
        BlockOptions how = {.block = 32, .dtype = DType::kF16, .sm80_kernels = sm80};
        compare(half, by_budget(0.1), {70}, how);
        compare(half, deep, {1, 40, 33, 0, 5}, how);
        EXPECT_EQ(compare(half, kDense, {50, 3}, how), 1);
        if (dim != 128) continue;
        how.block = 1;
        compare(half, by_budget(0.1), {70, 1, 33}, how);
        compare(half, deep, {70, 1, 33}, how);
      }
    }
  }
}

// A warp has more clusters of a list than its table holds.
TEST_F(Serving, SmallClustersOfCodedRows) {
  TinyIndexOptions options = shape(128, 4, {900, 9000});
  options.tokens = 20000;
  options.layers = 1;
  const Compressed index = compress(options);
  EXPECT_EQ(compare(index, kDense, {1}), 1);
  compare(index, by_budget(0.5), {1, 1});
}

// Requests that share what they read, for which rows become 16 bits.
TEST_F(Serving, ManyRequestsOfCodedRows) {
  for (const DType stored : {DType::kF16, DType::kBF16}) {
    for (const int64_t dim : {64, 96, 128, 256}) {
      TinyIndexOptions options = shape(dim, dim == 64 ? 7 : dim == 128 ? 12 : 4, {40, 211});
      options.dtype = stored;
      options.layers = 1;
      const Compressed index = compress(options);
      for (const int64_t requests : {2, 6, 16, 40, 70}) {
        SCOPED_TRACE(concat(dtype_name(stored), ", dim ", dim, ", ", requests, " requests"));
        const bool bf16 = stored == DType::kBF16;
        const BlockOptions how = {
            .dtype = stored, .lse_slack = bf16 ? 2e-3 : 0.0, .rounding = bf16 ? 4.0 : 2.0};
        for (const auto& selection : {kDense, with_thresholds({1e-4, 3e-4}), by_budget(0.1)}) {
          compare(index, selection, single_tokens(requests), how);
        }
        if (HasFailure()) return;
      }
    }
  }
}

// Requests that name one of two contexts in device memory, against each context alone.
TEST_F(Serving, ContextsInDeviceMemory) {
  if (!test::have_hopper()) GTEST_SKIP() << "no device of compute capability 9.0";
  TinyIndexOptions options = shape(128, 4, {300});
  const Compressed first = compress(options);
  ++options.seed;
  const Compressed second = compress(options);
  struct Case {
    int64_t requests, step;  // each step-th request is of the second context
    SelectionRequest selection;
    DType dtype;
    Served Compressed::*rows = &Compressed::coded;
  };
  // Queries of the index's type share their reading, but for two of a context among few. Rows of 16
  // bits have lists of up to 32 requests.
  for (const auto& [requests, step, selection, dtype, rows] :
       {Case{40, 3, by_budget(0.1), DType::kF32}, Case{40, 3, kDense, DType::kF32},
        Case{40, 3, by_budget(0.1), options.dtype}, Case{40, 3, kDense, options.dtype},
        Case{40, 3, by_budget(0.1), options.dtype, &Compressed::whole},
        Case{40, 3, kDense, options.dtype, &Compressed::whole},
        Case{14, 7, by_budget(0.1), options.dtype}}) {
    SCOPED_TRACE(concat(requests, " of ", dtype_name(dtype)));
    const Served &one = first.*rows, &other = second.*rows;
    std::vector<int32_t> contexts;  // slot, skip, and two words of offset
    for (int64_t r = 0; r < requests; ++r) {
      contexts.insert(contexts.end(), {r % step == 0 ? 3 : 0, 0, 0, 0});
    }
    const test::DeviceArray<int32_t> on_device(contexts);
    const auto queries = make_queries(first.whole, 0, requests, 7, 0.6f);
    const auto of_second = static_cast<double>((requests + step - 1) / step);
    const auto a = gpu_session(one, selection), b = gpu_session(other, selection);
    auto table = create_context_table(*a, {.slots = 4, .requests = requests});
    ASSERT_TRUE(table.ok()) << table.status().message();
    ASSERT_TRUE((*table)->put(3, b.get()).ok());
    DeviceCall all(one, 0, single_tokens(requests), dtype);
    all.set_queries(queries);
    ASSERT_TRUE((*table)->attend(all.call, on_device.get(), 1).ok());
    const Output found = all.output();
    const Counters counted = *b->totals(-1);
    Output expected = found;
    for (const bool of_b : {false, true}) {
      DeviceCall alone(one, 0, single_tokens(requests), dtype);
      alone.set_queries(queries);
      ASSERT_TRUE((of_b ? b : a)->attend(alone.call).ok());
      const Output output = alone.output();
      for (int64_t r = 0; r < requests; ++r) {
        if ((r % step == 0) != of_b) continue;
        const auto copy = [&](const std::vector<float>& from, std::vector<float>& to) {
          const int64_t each = std::ssize(from) / requests;
          std::copy_n(from.begin() + r * each, each, to.begin() + r * each);
        };
        copy(output.out, expected.out);
        copy(output.lse, expected.lse);
      }
    }
    test::expect_within(test::kRoundedRows, found, expected, options.head_dim);
    EXPECT_EQ(static_cast<double>(counted.selections), of_second);
    const double bytes = static_cast<double>(counted.bytes_read) / of_second;
    EXPECT_NEAR(bytes,
                static_cast<double>(b->totals(-1)->bytes_read) /
                    (of_second + static_cast<double>(requests)),
                0.05 * bytes);
  }
}

TEST_F(Serving, OneHeadTakesMost) {
  // Head 0 wants nearly everything, the others next to nothing.
  const Served served = serve(shape(128, 4, {40, 211}));
  const Backends both(served, with_thresholds({1.9e-4}));
  ASSERT_TRUE(bool{both});
  std::vector<float> queries = make_queries(served, 0, 1, 3, 1.0f);
  const auto head = static_cast<size_t>(4 * served.options.head_dim);
  for (size_t i = 0; i < head; ++i) queries[i] *= 1e-3f;
  DeviceCall call(served, 0, {1}, DType::kF32);
  call.set_queries(queries);
  ASSERT_TRUE(both.gpu->attend(call.call).ok());
  test::expect_close(call.output(), *testing::attend(*both.cpu, 0, queries), 128);
  const auto runs = test::runs_of(*both.gpu, call.call);
  std::vector<uint64_t> keys;
  for (const auto& list : runs) {
    keys.push_back(0);
    for (const KeyRun& run : list) keys.back() += run.length;
  }
  EXPECT_GT(keys[0], 3 * (keys[1] + keys[2]));
}

// A graph keeps the table of blocks, takes the queries that are there when it runs, and gives the
// bits of a direct call.
TEST_F(Serving, GraphReplayWithOtherQueries) {
  const Served served = serve(shape(128, 4, {40, 211})), paged = serve(pages(128, 4));
  struct Case {
    const Served& served;
    SelectionRequest selection;
    Lengths lengths;
    uint64_t selections;
    DType dtype = DType::kBF16;
  };
  const auto even = with_thresholds({1e-4, 1e-4});
  for (const Case& c : {Case{served, with_thresholds({1e-4, 3e-4}), {1, 1, 1}, 3},
                        {served, even, single_tokens(4), 4, DType::kF32},
                        {served, even, single_tokens(40), 40},
                        {served, by_budget(0.1), single_tokens(4), 4, DType::kF32},
                        {served, by_budget(0.1), single_tokens(40), 40},
                        {served, by_budget(0.1), {30, 7, 33}, 2 + 1 + 3},
                        {paged, quest(0.1), {40, 1}, 3 + 1}}) {
    SCOPED_TRACE(concat(c.lengths.size(), " requests, keep ", c.selection.keep));
    const Backends both(c.served, c.selection, 16);
    ASSERT_TRUE(bool{both});
    DeviceCall call(c.served, 1, c.lengths, c.dtype);
    call.set_queries(make_queries(c.served, 1, call.call.tokens, 1));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const test::Captured graph = test::captured(*both.gpu, call.call);
    for (const uint64_t seed : {2, 3, 4}) {
      const std::vector<float> queries = make_queries(c.served, 1, call.call.tokens, seed);
      call.set_queries(queries, graph.stream());
      graph.replay();
      const auto expected = testing::attend(*both.cpu, 1, queries, call.options());
      ASSERT_TRUE(expected.ok()) << expected.status().message();
      const bool f32 = c.dtype == DType::kF32;
      (f32 ? test::expect_close : test::expect_rows_close)(call.output(), *expected, 128);
    }
    EXPECT_EQ(both.gpu->totals(1)->selections, 3 * 2 * c.selections);
    const Output first = call.output();
    for (int i = 0; i < 10; ++i) {
      graph.replay();
      ASSERT_EQ(call.output(), first) << "the same bits again";
      ASSERT_TRUE(both.gpu->attend(call.call).ok());
      ASSERT_EQ(call.output(), first) << "of a direct call";
    }
  }
}

TEST_F(Serving, TheThreadsContextStays) {
  const Served served = serve(shape(128, 4, {40, 211}));
  DeviceCall call(served, 0, {1, 1, 1}, DType::kBF16);
  call.set_queries(make_queries(served, 0, 3, 5));
  decltype(&cuCtxGetCurrent) current = nullptr;
  ASSERT_TRUE(find_driver_function("cuCtxGetCurrent", current).ok());
  std::thread([&] {
    CUcontext context = nullptr;
    {
      const auto gpu = gpu_session(served, by_budget(0.1));
      EXPECT_TRUE(gpu->attend(call.call).ok());
      EXPECT_TRUE(gpu->totals(-1).ok());
    }
    EXPECT_EQ(current(&context), CUDA_SUCCESS);
    EXPECT_EQ(context, nullptr);
  }).join();
}

TEST_F(Serving, ANegativeBlockIsRefused) {
  const Served served = serve(shape(128, 4, {40, 211}));
  SessionOptions options;
  options.selection = by_budget(0.1);
  options.block = -1;
  const auto session = create_session(served.index, test::uploaded(served), options);
  EXPECT_EQ(session.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(session.status().message(), ::testing::HasSubstr("block: found -1"));
}

// A NaN is seen in the rows that share its selection, those of its block and KV head, and nowhere
// else.
TEST_F(Serving, NanStaysInItsBlockAndGroup) {
  enum Others { kLost, kKept, kAny };  // the other rows of the block and KV head
  struct Case {
    Served served;
    SelectionRequest selection;
    Lengths lengths;
    Others others;
    BlockOptions how;
  };
  const Served served = serve(shape(128, 4, {40, 211}));
  const Served paged = serve(pages(128, 4));
  const auto [whole, coded] = compress(shape(64, 4, {43}));
  const auto even = with_thresholds({1e-4, 1e-4});
  const BlockOptions f32 = {.dtype = DType::kF32}, prompt = {.block = 16},
                     sm80 = {.block = 16, .sm80_kernels = true};
  for (const Case& c : {Case{served, even, {1, 1}, kLost, f32},
                        {served, kDense, {1, 1}, kAny, f32},
                        {served, even, single_tokens(9), kAny, {}},
                        {coded, by_budget(0.1), {1}, kLost, f32},
                        {served, even, {32}, kLost, sm80},
                        {served, kDense, {32}, kKept, sm80},
                        {paged, quest(0.1), {32}, kLost, prompt}}) {
    SessionOptions options;
    options.block = c.how.block;
    options.sm80_kernels = c.how.sm80_kernels;
    const auto gpu = gpu_session(c.served, c.selection, options);
    ASSERT_NE(gpu, nullptr);
    DeviceCall call(c.served, 0, c.lengths, c.how.dtype);
    const Served& wanted = c.served.index == coded.index ? whole : c.served;  // has 16-bit keys
    std::vector<float> queries = make_queries(wanted, 0, call.call.tokens, 5);
    call.set_queries(queries);
    ASSERT_TRUE(gpu->attend(call.call).ok());
    const Output clean = call.output();
    // Head 5 is one of KV head 1; the token is one of the second block, if there are two.
    const int64_t dim = c.served.options.head_dim, heads = 12, tokens = call.call.tokens;
    const int64_t token = tokens == 32 ? 18 : tokens > 1 ? 1 : 0, bad = token * heads + 5;
    const int64_t block = std::max<int64_t>(c.how.block, 1);
    queries[static_cast<size_t>(bad * dim + 17)] = NAN;
    call.set_queries(queries);
    ASSERT_TRUE(gpu->attend(call.call).ok());
    const Output found = call.output();
    for (int64_t r = 0; r < tokens * heads; ++r) {
      const auto row = static_cast<size_t>(r), first = static_cast<size_t>(r * dim);
      const bool shares = r % heads / 4 == 1 && r / heads / block == token / block;
      if (r == bad || (shares && c.others == kLost)) {
        ASSERT_TRUE(std::isnan(found.lse[row]) && std::isnan(found.out[first])) << row;
      } else if (!shares || c.others == kKept) {
        // Rows of many requests that shared keys with it have them in other tiles.
        ASSERT_NEAR(found.lse[row], clean.lse[row], c.lengths.size() > 2 ? 1e-3 : 0) << row;
        if (c.how.sm80_kernels) {
          ASSERT_EQ(found.out[first], clean.out[first]) << row;
        }
      }
    }
    if (c.others != kLost) continue;
    queries[static_cast<size_t>(5 * dim + 17)] = INFINITY;
    call.set_queries(queries);
    EXPECT_EQ(gpu->select(call.call).status().code(), Code::kNumeric);
  }
}

TEST_F(Serving, APrunedIndexTakesTheMemoryOfItsBudget) {
  TinyIndexOptions o = shape(128, 4, {40, 211});
  o.tokens = 40000;
  const Served whole = serve(o);
  SelectionRequest policy;
  policy.selector = SelectorKind::kStream;
  policy.budget = 0.1;
  const testing::TemporaryDirectory directory;
  const std::string path = directory.file("pruned.sqz");
  ASSERT_TRUE(prune_index(Env::posix(), whole.index->file, policy, path, false, 1).ok());
  const auto index = make_served_index(*SqzFile::open(path, OpenMode::kRead));
  ASSERT_TRUE(index.ok()) << index.status().message();
  const size_t all = test::uploaded(whole)->bytes();
  EXPECT_GT(all, size_t{100} << 20);
  EXPECT_LT(test::uploaded({o, *index})->bytes(), all / 9);
}

}  // namespace
}  // namespace sqz::cuda
