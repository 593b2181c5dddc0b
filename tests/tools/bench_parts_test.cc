// The parts of sqz-bench that decide its figures: medians and ratios, made-up indexes, reads.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <filesystem>
#include <numeric>

#include "tests/common/temporary_directory.h"
#include "tools/sqz_bench/measure.h"
#include "tools/sqz_bench/memory_reads.h"
#include "tools/sqz_bench/sparse_index.h"
#include "tools/sqz_bench/synthetic_index.h"

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
TEST(SyntheticIndex, IsAWholeIndex) {
  testing::TemporaryDirectory folder;
  Options options = small_options();
  options.directory = folder.path();
  std::string path;
  {
    const auto index = make_synthetic_index(options, 2000, 2, 3);
    ASSERT_TRUE(index.ok()) << index.status().message();
    path = index->file->path();
    const auto file = SqzFile::open(path);
    ASSERT_TRUE(file.ok()) << file.status().message();
    const auto report = (*file)->verify();
    ASSERT_TRUE(report.ok());
    EXPECT_EQ(report->problems, std::vector<std::string>());
    EXPECT_EQ((*file)->layer(0).level[1].clusters, 100);
    ASSERT_EQ(index->queries.size(), 2u);
    EXPECT_EQ(index->queries[1].size(), 3u * 4 * 16);
    EXPECT_NE(index->queries[0], index->queries[1]);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

// Passes open_read() on, and reads of whoever has the file; a mapping keeps its first and last
// pages and loses all others, so that touching one of them ends the test.
class HoleEnv : public Env {
 public:
  Result<std::unique_ptr<ReadFile>> open_read(const std::string& path) override {
    SQZ_ASSIGN_OR_RETURN(auto file, Env::posix().open_read(path));
    return std::unique_ptr<ReadFile>(new File(std::move(file)));
  }
  Result<std::unique_ptr<WriteFile>> create(const std::string&) override { return refuse(); }
  Status rename(const std::string&, const std::string&) override { return refuse(); }
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
  const std::string path = folder.file("sparse.sqz");
  Options options;
  const int64_t tokens = 819200, layers = 32;
  const IndexMetadata metadata = synthetic_metadata(options, tokens, layers);
  const int64_t slots = tokens - metadata.sink - metadata.tail;
  const std::vector<LayerShape> shapes(
      static_cast<size_t>(layers),
      {synthetic_clusters(tokens, slots), slots, metadata.sink + metadata.tail});
  const auto bytes = write_sparse_index(Env::posix(), path, metadata, shapes);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  EXPECT_GT(*bytes, uint64_t{100} << 30);
  EXPECT_EQ(std::filesystem::file_size(path), *bytes);
  HoleEnv env;
  const auto file = SqzFile::open(path, OpenMode::kMmap, env);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_LT((*file)->header().data_offset, uint64_t{4} << 20);
  EXPECT_EQ((*file)->layer(31).slots, slots);
  EXPECT_EQ((*file)->layer(31).level[1].clusters, 40960);
}

}  // namespace
}  // namespace sqz::bench
