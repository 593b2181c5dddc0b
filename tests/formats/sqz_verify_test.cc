// Damage after writing: a flipped or cut header is refused at open, damaged contents are found by
// verify(), and so are contents that were wrong from the start.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <random>
#include <sstream>

#include "formats/sqz_file.h"
#include "tests/common/json.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::RawIndex;
using testing::TemporaryDirectory;
using testing::TinyIndexOptions;

TinyIndexOptions smallest() {
  TinyIndexOptions options;
  options.layers = 1;
  options.query_heads = options.kv_heads = 1;
  options.head_dim = 2;
  options.tokens = 8;
  options.sink = options.tail = 1;
  options.clusters = {2};
  return options;
}

// A file whose bytes are in memory: thousands of damaged versions are opened without a disk.
class MemoryEnv : public Env {
 public:
  explicit MemoryEnv(std::string bytes) : bytes_(std::move(bytes)) {}
  std::string& bytes() { return bytes_; }

  Result<std::unique_ptr<ReadFile>> open_read(const std::string& path) override {
    return std::unique_ptr<ReadFile>(new File(path, bytes_));
  }
  Result<std::unique_ptr<WriteFile>> create(const std::string&, Temporary) override {
    return refuse();
  }
  Status rename(const std::string&, const std::string&, bool) override { return refuse(); }
  Status remove(const std::string&) override { return refuse(); }
  Status sync_directory(const std::string&) override { return refuse(); }
  bool exists(const std::string&) override { return true; }

 private:
  static Status refuse() { return {Code::kUnsupported, "read only"}; }

  // Not on a page, as a real mapping is: fit for open(), which follows no pointer.
  struct Borrowed : Mapping {
    explicit Borrowed(std::span<const std::byte> bytes) { bytes_ = bytes; }
  };

  class File : public ReadFile {
   public:
    File(std::string path, const std::string& bytes) : path_(std::move(path)), bytes_(bytes) {}
    const std::string& path() const override { return path_; }
    uint64_t size() const override { return bytes_.size(); }
    Status read(uint64_t offset, std::span<std::byte> out) const override {
      std::memcpy(out.data(), bytes_.data() + offset, out.size());
      return {};
    }
    Result<std::unique_ptr<Mapping>> map() const override {
      return std::unique_ptr<Mapping>(new Borrowed(std::as_bytes(std::span(bytes_))));
    }

   private:
    std::string path_;
    const std::string& bytes_;
  };

  std::string bytes_;
};

std::string tiny_bytes(const TinyIndexOptions& options) {
  TemporaryDirectory dir;
  EXPECT_TRUE(testing::write_tiny_index(dir.file("x"), options).ok());
  return testing::read_file(dir.file("x"));
}

Result<std::shared_ptr<const SqzFile>> open(MemoryEnv& env, OpenMode mode = OpenMode::kMmap) {
  return SqzFile::open("x.sqz", mode, env);
}

TEST(SqzDamage, EveryFlippedHeaderBitIsRefusedAtOpen) {
  MemoryEnv env(tiny_bytes(smallest()));
  const auto whole = open(env);
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  const auto header = static_cast<size_t>((*whole)->header().data_offset);
  const size_t size = env.bytes().size();
  std::vector<size_t> places(header + 16);  // the header, and its hash at the end of the file
  for (size_t i = 0; i < places.size(); ++i) places[i] = i < header ? i : size - 16 + i - header;
  for (const size_t at : places) {
    for (int bit = 0; bit < 8; ++bit) {
      const char flip = static_cast<char>(1 << bit);
      env.bytes()[at] ^= flip;
      ASSERT_FALSE(open(env).ok()) << "byte " << at << " bit " << bit;
      env.bytes()[at] ^= flip;
    }
  }
  EXPECT_TRUE(open(env).ok()) << "every flip was undone";
}

TEST(SqzDamage, EveryTruncationIsRefusedAtOpen) {
  TinyIndexOptions dense = smallest();
  dense.dense_layers = {0};  // no calibration: 8 KiB
  const std::string whole = tiny_bytes(dense);
  MemoryEnv env(whole);
  for (size_t length = 0; length < whole.size(); ++length) {
    env.bytes() = whole.substr(0, length);
    ASSERT_FALSE(open(env).ok()) << length;
  }
}

TEST(SqzDamage, TruncationAtEveryTensorsEdgeIsRefusedAtOpen) {
  const std::string whole = tiny_bytes(TinyIndexOptions{});
  MemoryEnv env(whole);
  for (const TensorInfo& tensor : SafetensorsHeader((*open(env))->header()).tensors) {
    for (const size_t length : {tensor.offset - 1, tensor.offset, tensor.offset + 1}) {
      env.bytes() = whole.substr(0, length);
      ASSERT_FALSE(open(env).ok()) << tensor.name << " " << length;
    }
  }
}

TEST(SqzDamage, EveryPayloadFlipIsFoundByVerify) {
  MemoryEnv env(tiny_bytes(TinyIndexOptions{}));
  const size_t first = static_cast<size_t>((*open(env))->header().data_offset);
  std::mt19937_64 rng(7);
  for (int i = 0; i < 500; ++i) {
    const size_t at = first + rng() % (env.bytes().size() - 16 - first);
    const char flip = static_cast<char>(1 << rng() % 8);
    env.bytes()[at] ^= flip;
    const auto file = open(env, OpenMode::kRead);
    ASSERT_TRUE(file.ok()) << "the header is whole: " << file.status().message();
    const auto report = (*file)->verify();
    ASSERT_TRUE(report.ok());
    EXPECT_FALSE(report->problems.empty()) << "byte " << at;
    env.bytes()[at] ^= flip;
  }
}

// Contents that were wrong before the checksums were taken.
struct Wrong {
  const char* name;
  std::function<void(RawIndex&)> change;
  std::string says;
  bool fix_checksums = true;
};

// The tiny index: 2 layers, 2 KV heads, d = 8, 56 slots, tokens 2 .. 57, 3 and 9 clusters.
std::vector<Wrong> wrong_contents() {
  const auto key = [](size_t i, uint16_t bits) {
    return [=](RawIndex& index) { index.set("layers.1.keys", i, bits); };
  };
  const auto entry = [](const char* tensor, size_t i, auto value) {
    return [=](RawIndex& index) { index.set(tensor, i, value); };
  };
  return {
      {"PositionTwice",
       [](RawIndex& index) {
         index.set("layers.0.positions", 5, index.get<uint32_t>("layers.0.positions", 4));
       },
       "layers.0.positions: head 0, slot 5: found "},
      {"PositionOfTheSink", entry("layers.0.positions", 56 + 3, uint32_t{1}),
       "layers.0.positions: head 1, slot 3: found 1, expected each token from 2 to 57 once"},
      {"PositionOfTheTail", entry("layers.0.positions", 0, uint32_t{58}), "found 58"},
      {"PositionHuge", entry("layers.0.positions", 0, UINT32_MAX), "found 4294967295"},
      {"OffsetsNotFromZero", entry("layers.0.level.2.offsets", 0, uint32_t{1}),
       "layers.0.level.2.offsets: head 0, entry 0: found 1, expected 0"},
      {"OffsetsDecrease", entry("layers.0.level.2.offsets", 10 + 4, uint32_t{0}),
       "layers.0.level.2.offsets: head 1, entry 4: found 0, expected more"},
      {"OffsetsBeyondTheEnd", entry("layers.0.level.2.offsets", 9, uint32_t{57}),
       "entry 9: found 57, expected 56"},
      {"OffsetsShortOfTheEnd", entry("layers.1.level.2.offsets", 9, uint32_t{55}),
       "layers.1.level.2.offsets: head 0, entry 9: found 55, expected 56"},
      {"CoarseOffsetsBeyondTheEnd", entry("layers.0.level.1.offsets", 3, uint32_t{10}),
       "layers.0.level.1.offsets: head 0, entry 3: found 10, expected 9"},
      {"OffsetHuge", entry("layers.0.level.1.offsets", 1, UINT32_MAX), "layers.0.level.1.offsets"},
      {"EmptyCluster",
       [](RawIndex& index) {
         index.set("layers.0.level.2.offsets", 4,
                   index.get<uint32_t>("layers.0.level.2.offsets", 3));
       },
       "layers.0.level.2.offsets: head 0, entry 4"},
      {"NanKey", key(100, 0x7fc0), "layers.1.keys\": found NaN or infinity"},
      {"InfiniteKey", key(17, 0xff80), "layers.1.keys\": found NaN or infinity"},
      {"NanValueMean", entry("layers.0.level.1.value_means", 3, uint16_t{0xffff}),
       "layers.0.level.1.value_means\": found NaN or infinity"},
      {"CentroidOff", entry("layers.0.level.2.centroids", (9 + 2) * 8 + 5, uint16_t{0x4120}),
       "layers.0.level.2.centroids: head 1: cluster 2, dimension 5: found 10, expected "},
      {"CoarseCentroidOff", entry("layers.1.level.1.centroids", 1 * 8, uint16_t{0xc120}),
       "layers.1.level.1.centroids: head 0: cluster 1, dimension 0: found -10, expected "},
      {"ValueMeanOff", entry("layers.0.level.2.value_means", 0, uint16_t{0x4120}),
       "layers.0.level.2.value_means: head 0: cluster 0, dimension 0: found 10"},
      {"KeyMoved",
       [](RawIndex& index) {  // within range, but its cluster's mean is no longer
         index.set("layers.0.keys", 0, uint16_t{0x4240});
       },
       "layers.0.level.2.centroids: head 0: cluster 0, dimension 0"},
      {"PaddingNotZero", [](RawIndex& index) { index.at("padding.0").data[3] = 'x'; },
       "tensor \"padding.0\": found other bytes, expected zeros"},
      {"ThresholdRises", entry("calibration.thresholds", 1025 + 7, 2.0f),
       "calibration.thresholds[1032]: found 2, expected at most the one before"},
      {"ThresholdNan", entry("calibration.thresholds", 0, NAN), "calibration.thresholds[0]"},
      {"ThresholdInfinite", entry("calibration.thresholds", 2050, INFINITY),
       "calibration.thresholds[2050]: found inf"},
      {"CoarseNan", entry("calibration.coarse", 2, NAN), "calibration.coarse[2]"},
      {"ShareAboveOne", entry("calibration.shares", 9, 1.5f),
       "calibration.shares[9]: found 1.5, expected a number in [0, 1]"},
      {"ShareNegative", entry("calibration.shares", 9, -0.25f), "calibration.shares[9]"},
      {"CalibrationNotJson", [](RawIndex& index) { index.metadata["calibration"] = "x"; },
       "calibration: not valid JSON"},
      {"CoarseKeepMissing",
       [](RawIndex& index) { index.set_json("calibration", "/coarse_keep", Json::array()); },
       "coarse_keep: found an array of 0, expected an array of 1"},
      {"CoarseKeepZero",
       [](RawIndex& index) { index.set_json("calibration", "/coarse_keep/0", 0.0); },
       "coarse_keep: found 0.0"},
      {"ChecksumsNotJson", [](RawIndex& index) { index.metadata["checksums"] = "no checksums"; },
       "checksums: not valid JSON", false},
      {"ChecksumsNotAnObject", [](RawIndex& index) { index.metadata["checksums"] = "[]"; },
       "checksums: found an array", false},
      {"ChecksumMissing",
       [](RawIndex& index) {
         auto json = Json::parse(index.metadata["checksums"]);
         json.erase("layers.0.keys");
         index.metadata["checksums"] = json.dump();
       },
       "tensor \"layers.0.keys\": XXH3-64"},
      {"ChecksumWrong",
       [](RawIndex& index) { index.set_json("checksums", "/layers.0.keys", "0123456789abcdef"); },
       "tensor \"layers.0.keys\": XXH3-64", false},
      {"ChecksumOfNothing",
       [](RawIndex& index) { index.set_json("checksums", "/layers.9.keys", "0"); },
       "checksums: found "},
  };
}

class SqzVerify : public ::testing::TestWithParam<Wrong> {};

TEST_P(SqzVerify, NamesWhatIsWrong) {
  TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  ASSERT_TRUE(testing::write_tiny_index(path).ok());
  RawIndex index = RawIndex::read(path);
  GetParam().change(index);
  if (GetParam().fix_checksums && Json::accept(index.metadata["checksums"])) index.fix_checksums();
  testing::write_file(path, index.bytes());
  const auto file = SqzFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto report = (*file)->verify();
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->problems, ::testing::Contains(HasSubstr(GetParam().says)));
}

INSTANTIATE_TEST_SUITE_P(All, SqzVerify, ::testing::ValuesIn(wrong_contents()),
                         [](const auto& test) { return test.param.name; });

// scripts/check_index.py reads the file by the format page alone. It must like what we like, and
// see what we see.
TEST(SqzVerify, TheIndependentCheckerAgrees) {
  const char* named = std::getenv("SQZ_PYTHON");
  const std::string python = named ? named : "python3";
  if (std::system((python + " -c 'import numpy' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << "no numpy for " << python << "; SQZ_PYTHON names another Python";
  }
  TemporaryDirectory dir;
  const auto check = [&](const std::string& files) {
    const std::string command = "cd " + dir.path() + " && " + python +
                                " " SQZ_SOURCE_DIR "/scripts/check_index.py " + files + " > out";
    const int code = WEXITSTATUS(std::system(command.c_str()));
    return std::pair(code, testing::read_file(dir.file("out")));
  };
  TinyIndexOptions other;
  other.layers = 3;
  other.dtype = DType::kF16;
  other.dense_layers = {0};
  other.windows = {{1, 10}};
  ASSERT_TRUE(testing::write_tiny_index(dir.file("good.sqz")).ok());
  ASSERT_TRUE(testing::write_tiny_index(dir.file("other.sqz"), other).ok());
  TinyIndexOptions paged;
  paged.page_size = 16;
  paged.key_calibration = true;
  paged.heavy_hitters = true;
  ASSERT_TRUE(testing::write_tiny_index(dir.file("paged.sqz"), paged).ok());
  const auto [good, said] = check("good.sqz other.sqz paged.sqz");
  EXPECT_EQ(good, 0) << said;

  std::string files;
  const auto damage_pages = [&](const std::string& name, const auto& change) {
    RawIndex index = RawIndex::read(dir.file("paged.sqz"));
    change(index);
    index.fix_checksums();
    testing::write_file(dir.file(name), index.bytes());
    files.append(name).append(" ");
  };
  damage_pages("PageMin",
               [](auto& index) { index.template set<uint16_t>("layers.0.pages.min", 9, 0x4000); });
  damage_pages("PageMax",
               [](auto& index) { index.template set<uint16_t>("layers.1.pages.max", 5, 0x4400); });
  damage_pages("PageOrder", [](auto& index) {
    index.template set<uint32_t>("layers.0.positions", 0, 3);
    index.template set<uint32_t>("layers.0.positions", 1, 2);
  });
  damage_pages("Heavy", [](auto& index) { index.template set<uint32_t>("layers.1.heavy", 0, 60); });
  damage_pages("KeyShares", [](auto& index) { index.set("calibration.keys.shares", 0, -1.0f); });
  for (const Wrong& wrong : wrong_contents()) {
    const std::string name = wrong.name;  // the checker leaves some of the metadata to the reader
    if (name.starts_with("Check") || name.ends_with("NotJson") || name.starts_with("CoarseKeep")) {
      continue;
    }
    RawIndex index = RawIndex::read(dir.file("good.sqz"));
    wrong.change(index);
    index.fix_checksums();
    testing::write_file(dir.file(name), index.bytes());
    files += name + " ";
  }
  const auto [bad, found] = check(files);
  EXPECT_EQ(bad, 1) << found;
  std::istringstream names(files);
  for (std::string name; names >> name;) {
    EXPECT_THAT(found, HasSubstr(name + ": "));
    EXPECT_THAT(found, ::testing::Not(::testing::ContainsRegex(name + ": .*no problem found")));
  }
}

TEST(SqzVerify, CalibrationRefusesWhatVerifyWouldReport) {
  TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  ASSERT_TRUE(testing::write_tiny_index(path).ok());
  RawIndex index = RawIndex::read(path);
  index.set("calibration.thresholds", 3, std::nanf(""));
  testing::write_file(path, index.bytes());
  const auto file = SqzFile::open(path);
  ASSERT_TRUE(file.ok()) << "contents are not looked at when a file is opened";
  EXPECT_EQ((*file)->calibration().status().code(), Code::kCorrupt);
}

// Means in the file are rounded, and so are the keys: the check must allow for that and no more.
TEST(SqzVerify, RoundedMeansOfManyKeysPass) {
  TemporaryDirectory dir;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    TinyIndexOptions options;
    options.dtype = dtype;
    options.tokens = 3000;
    options.clusters = {1, 4};
    ASSERT_TRUE(testing::write_tiny_index(dir.file("x.sqz"), options).ok());
    const auto file = SqzFile::open(dir.file("x.sqz"));
    ASSERT_TRUE(file.ok());
    EXPECT_THAT((*file)->verify()->problems, ::testing::IsEmpty());
  }
}

// Large enough to be worth several threads; what they find comes in the order of the file.
TEST(SqzVerify, SameReportForAnyNumberOfThreads) {
  TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  TinyIndexOptions options;
  options.layers = 2;
  options.head_dim = 64;
  options.tokens = 12000;
  options.clusters = {3, 60};
  const auto made = testing::write_tiny_index(path, options);
  ASSERT_TRUE(made.ok());
  ASSERT_GT(made->bytes, uint64_t{8} << 20);
  std::string bytes = testing::read_file(path);
  size_t damaged = 0;
  {
    const auto file = SqzFile::open(path);
    ASSERT_TRUE(file.ok());
    for (const TensorInfo& tensor : (*file)->header().tensors) {
      if (tensor.name.ends_with(".keys") || tensor.name.ends_with(".values")) {
        bytes[tensor.offset + tensor.bytes / 2] ^= 1;
        ++damaged;
      }
    }
  }
  testing::write_file(path, bytes);
  const auto file = SqzFile::open(path);
  ASSERT_TRUE(file.ok());
  uint64_t last = 0;
  const auto grows = [&](uint64_t done, uint64_t) {
    EXPECT_GT(done, last);
    last = done;
  };
  const auto alone = (*file)->verify(grows, 1);
  ASSERT_TRUE(alone.ok());
  EXPECT_EQ(alone->problems.size(), damaged);
  for (const int threads : {2, 5}) {
    last = 0;
    const auto report = (*file)->verify(grows, threads);
    ASSERT_TRUE(report.ok());
    EXPECT_EQ(report->problems, alone->problems);
    EXPECT_EQ(report->checked, alone->checked);
  }
}

}  // namespace
}  // namespace sqz
