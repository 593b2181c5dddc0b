// The parts of sqz-bench that decide its figures: medians and ratios, made-up indexes, reads.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <filesystem>
#include <numeric>
#include <random>

#include "formats/capture.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_model.h"
#include "tools/sqz_bench/kernel_times.h"
#include "tools/sqz_bench/made_index.h"
#include "tools/sqz_bench/measure.h"
#include "tools/sqz_bench/memory_reads.h"

namespace sqz::bench {
namespace {

TEST(Measure, SpreadOfKnownValues) {
  const Spread odd = spread_of({5, 1, 3});
  EXPECT_EQ(odd.least, 1);
  EXPECT_EQ(odd.median, 3);
  EXPECT_EQ(odd.p90, 5);
  EXPECT_EQ(spread_of({4, 2, 1, 9}).median, 3);
  std::vector<double> ten(10);
  std::iota(ten.rbegin(), ten.rend(), 1);
  EXPECT_EQ(spread_of(ten).p90, 9);
  EXPECT_EQ(spread_of({7}).p90, 7);
}

// Ratios are of the same round: the medians' ratio would be 2 / 2 = 1.
TEST(Measure, RatiosWithinARound) {
  const Measured measured{{{1, 2, 4}, {2, 6, 1}}};
  EXPECT_EQ(times_faster(measured, 0, 1), 2);
  EXPECT_EQ(times_faster(measured, 1, 0), 0.5);
}

TEST(Measure, ContendersTakeTurns) {
  std::string order;
  const auto contender = [&](char name) {
    return Contender{.name = {name}, .run = [&order, name](int64_t round) {
                       order += name + std::to_string(round) + " ";
                       return Status();
                     }};
  };
  int steps = 0;
  const auto measured = measure({contender('a'), contender('b')}, 2, [&] { ++steps; });
  ASSERT_TRUE(measured.ok());
  EXPECT_EQ(order, "a0 b0 a0 b0 a1 b1 ");  // the first round is not counted
  EXPECT_EQ(steps, 6);
  ASSERT_EQ(measured->seconds.size(), 2u);
  EXPECT_EQ(measured->seconds[1].size(), 2u);
  const auto failing =
      measure({{.name = "f", .run = [](int64_t) { return Status(Code::kIo, "no"); }}}, 1, [] {});
  EXPECT_EQ(failing.status().code(), Code::kIo);
}

// Every byte is read once, whatever the threads and the odd bytes at the end.
TEST(MemoryReader, ReadsEveryByte) {
  const size_t size = (size_t{3} << 20) + 133;
  std::vector<std::byte> bytes(size);
  for (const int threads : {1, 3}) {
    MemoryReader reader(threads);
    for (const size_t at : {size_t{0}, size_t{1} << 20, size - 134, size - 1, size / 2}) {
      bytes[at] = std::byte{1};
      EXPECT_NE(reader.read({std::span<const std::byte>(bytes)}), 0u) << at;
      EXPECT_EQ(reader.read({std::span<const std::byte>(bytes), std::span<const std::byte>(bytes)}),
                0u);
      bytes[at] = std::byte{0};
    }
    EXPECT_EQ(reader.read({std::span<const std::byte>(bytes)}), 0u);
  }
}

Options small_options() {
  Options options;
  options.query_heads = 4;
  options.kv_heads = 2;
  options.head_dim = 16;
  options.threads = 2;
  return options;
}

// What is timed is an index that verify() finds nothing wrong with.
TEST(MadeIndex, IsAWholeIndex) {
  testing::TemporaryDirectory folder;
  Options options = small_options();
  options.directory = folder.path();
  std::string path;
  {
    const auto index = make_index(options, 2000);
    ASSERT_TRUE(index.ok()) << index.status().message();
    path = (*index)->path();
    const auto file = SqzFile::open(path);
    ASSERT_TRUE(file.ok()) << file.status().message();
    const auto report = (*file)->verify();
    ASSERT_TRUE(report.ok());
    EXPECT_EQ(report->problems, std::vector<std::string>());
    EXPECT_EQ((*file)->layer(0).level[1].clusters, 100);
    const auto queries = make_queries(**file, options, 2, 3);
    ASSERT_EQ(queries.size(), 2u);
    EXPECT_EQ(queries[1].size(), 3u * 4 * 16);
    EXPECT_NE(queries[0], queries[1]);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(MadeIndex, StaysWhereItIsAskedTo) {
  testing::TemporaryDirectory folder;
  Options options = small_options();
  options.save_index = folder.file("kept.sqz");
  ASSERT_TRUE(make_index(options, 2000).ok());
  EXPECT_TRUE(std::filesystem::exists(options.save_index));
}

TEST(Tiling, CopiesNeverNeedMoreThanWasCaptured) {
  for (const int64_t captured : {1000, 31000}) {
    for (const int64_t tokens : {1000, 30999, 31000, 31001, 131072, 524288}) {
      const Tiling one = tiling(tokens, captured);
      EXPECT_LE(one.slots + kSink + kTail, captured);
      EXPECT_LE(one.copies * one.slots + kSink + kTail, tokens);
      EXPECT_GT(one.copies * (one.slots + 1) + kSink + kTail, tokens);
      EXPECT_EQ(one.copies > 1, tokens > captured) << tokens << " of " << captured;
    }
  }
}

// A model of 2 layers with 2 KV heads of 8 dimensions, tiled up to 3 KV heads of 16: the heads 0, 1
// and 2 of its 4. Every copy has the model's clusters, and products are the model's.
TEST(CapturedIndex, HasTheModelsClustersAndProducts) {
  testing::TemporaryDirectory folder;
  constexpr int64_t kTokens = 1200, kDim = 8, kGroup = 2, kQueries = 6;
  CaptureInfo info;
  info.model = testing::tiny_model(2, 4, 2, kDim);
  info.model.attention_scale = 0.5;
  info.tokens.assign(kTokens, 1);
  for (int64_t i = 0; i < kQueries; ++i) info.query_positions.push_back(kTokens - kQueries + i);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto numbers = [&](int64_t count) {
    std::vector<float> out(static_cast<size_t>(count));
    for (float& x : out) x = to_float(to_bfloat16(normal(random)));
    return out;
  };
  std::vector<CapturedLayer> layers;
  {
    auto writer = CaptureWriter::create(folder.file("a.h5"), true, info).value();
    for (int64_t l = 0; l < 2; ++l) {
      layers.push_back({numbers(2 * kTokens * kDim),
                        numbers(2 * kTokens * kDim),
                        numbers(4 * kQueries * kDim),
                        {}});
      ASSERT_TRUE(writer->write_layer(l, layers.back()).ok());
    }
    ASSERT_TRUE(writer->commit().ok());
  }
  Options options;
  options.query_heads = 6;
  options.kv_heads = 3;
  options.head_dim = 2 * kDim;
  options.threads = 2;
  options.directory = folder.path();
  options.capture = folder.file("a.h5");
  options.kmeans_engine = "faiss";
  const auto made = make_captured_index(options, 2500, 2, 2);
  ASSERT_TRUE(made.ok()) << made.status().message();
  const auto file = SqzFile::open(made->file->path()).value();
  EXPECT_EQ(file->verify()->problems, std::vector<std::string>());
  const Tiling copies = tiling(2500, kTokens);
  ASSERT_EQ(copies.copies, 3);
  const LayerView view = file->layer(0);
  ASSERT_EQ(view.slots, 3 * copies.slots);
  // The copies are alike: one period of a level's sizes, three times.
  for (int k = 0; k < 2; ++k) {
    const int64_t n = view.level[k].clusters / 3;
    for (int64_t i = 0; i < n; ++i) {
      const auto size = [&](int64_t c) {
        return view.level[k].offsets[c + 1] - view.level[k].offsets[c];
      };
      EXPECT_EQ(size(i), size(i + n));
      EXPECT_EQ(size(i), size(i + 2 * n));
    }
  }
  // Query 3 (the second that is asked) of query head 5, which is head 1 of KV head 2: the model's
  // layer 1, KV head 0 (of 4 heads the ones at 0, 4/3 and 8/3).
  const float* q = made->queries[0].data() + (1 * 6 + 5) * 16;
  const float* model_q = layers[1].queries.data() + (0 * kGroup + 1) * kQueries * kDim + 3 * kDim;
  const auto* keys = static_cast<const BFloat16*>(view.keys) + 2 * view.slots * 16;
  const uint32_t* positions = view.positions + 2 * view.slots;
  for (const int64_t slot : {int64_t{0}, view.slots / 2, view.slots - 1}) {
    const int64_t token = kSink + (positions[slot] - kSink) % copies.slots;
    const float* model_key = layers[1].keys.data() + token * kDim;
    double product = 0, expected = 0;
    for (int64_t i = 0; i < 16; ++i) product += q[i] * to_float(keys[slot * 16 + i]) / 4;
    for (int64_t i = 0; i < kDim; ++i) expected += 0.5 * model_q[i] * model_key[i];
    EXPECT_NEAR(product, expected, 1e-5) << slot;
  }
}

TEST(Measure, ATimeOfTheContendersOwn) {
  const auto measured = measure(
      {{.name = "a", .run = [](int64_t) { return Status(); }, .seconds = [] { return 42.0; }}}, 2,
      [] {});
  ASSERT_TRUE(measured.ok());
  EXPECT_EQ(measured->seconds[0], (std::vector<double>{42, 42}));
}

TEST(KernelNames, WithoutNamespacesTemplatesAndArguments) {
  EXPECT_EQ(short_kernel_name("void a::(anonymous namespace)::attend_kernel<128, (bool)1, "
                              "b::C<(b::D)2>>(a::Params, int (*)(int))"),
            "attend_kernel");
  EXPECT_EQ(short_kernel_name("sqz::cuda::merge(sqz::cuda::Parts)"), "merge");
  EXPECT_EQ(short_kernel_name("plain"), "plain");
}

// Two calls: 'a' runs 0-10 and 40-60; 'b' is launched early, 5-30, and waits; nothing runs 30-40.
TEST(KernelParts, AddUpToTheWhole) {
  const auto parts = kernel_parts({{"a", 40000, 60000}, {"b", 5000, 30000}, {"a", 0, 10000}}, 2);
  EXPECT_EQ(parts, (std::map<std::string, double>{{"a", 15.0}, {"b", 10.0}, {"idle", 5.0}}));
  EXPECT_TRUE(kernel_parts({}, 2).empty());
}

// Passes open_read() on, and reads of whoever has the file; a mapping keeps its first and last
// pages and loses all others, so that touching one of them ends the test.
class HoleEnv : public Env {
 public:
  Result<std::unique_ptr<ReadFile>> open_read(const std::string& path) override {
    SQZ_ASSIGN_OR_RETURN(auto file, Env::posix().open_read(path));
    return std::unique_ptr<ReadFile>(new File(std::move(file)));
  }
  Result<std::unique_ptr<WriteFile>> create(const std::string&, Temporary) override {
    return refuse();
  }
  Status rename(const std::string&, const std::string&, bool) override { return refuse(); }
  Status remove(const std::string&) override { return refuse(); }
  Status sync_directory(const std::string&) override { return refuse(); }
  bool exists(const std::string&) override { return false; }

 private:
  static constexpr size_t kHead = size_t{4} << 20, kPage = 4096;

  static Status refuse() { return {Code::kUnsupported, "reads only"}; }

  struct File : ReadFile {
    explicit File(std::unique_ptr<ReadFile> file) : file_(std::move(file)) {}
    const std::string& path() const override { return file_->path(); }
    uint64_t size() const override { return file_->size(); }
    Status read(uint64_t offset, std::span<std::byte> out) const override {
      return file_->read(offset, out);
    }
    Result<std::unique_ptr<Mapping>> map() const override {
      SQZ_ASSIGN_OR_RETURN(auto mapping, file_->map());
      const auto bytes = mapping->bytes();
      const size_t last = (bytes.size() - 1) / kPage * kPage;
      if (::mprotect(const_cast<std::byte*>(bytes.data()) + kHead, last - kHead, PROT_NONE) != 0) {
        return Status(Code::kIo, "mprotect");
      }
      return mapping;
    }
    std::unique_ptr<ReadFile> file_;
  };
};

// Opening looks at the header and the last 16 bytes, whatever lies between: 100 GiB here, of which
// every page is out of reach.
TEST(SparseIndex, OpeningTouchesNoPayload) {
  testing::TemporaryDirectory folder;
  Options options;
  options.directory = folder.path();
  const int64_t tokens = 819200, layers = 32;
  const auto made = make_sparse_index(options, 4.0 * 8 * 128 * tokens * layers, layers);
  ASSERT_TRUE(made.ok()) << made.status().message();
  const std::string path = made->file->path();
  EXPECT_GT(made->bytes, uint64_t{100} << 30);
  EXPECT_EQ(std::filesystem::file_size(path), made->bytes);
  HoleEnv env;
  const auto file = SqzFile::open(path, OpenMode::kMmap, env);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_LT((*file)->header().data_offset, uint64_t{4} << 20);
  EXPECT_EQ((*file)->layer(31).slots, tokens - kSink - kTail);
  EXPECT_EQ((*file)->layer(31).level[1].clusters, 40960);
}

}  // namespace
}  // namespace sqz::bench
