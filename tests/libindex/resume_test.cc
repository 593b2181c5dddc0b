// BuildOptions::resume: wherever a build ends, the next one goes on and gives the same bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "libindex/builder.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_qmodel.h"
#include "tests/formats/fault_env.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/libindex/clustered_data.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;
using testing::FailNth;
using testing::FaultEnv;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kTokens = 120, kDim = 8, kHeads = 2, kLayers = 4;

// One kind of build: what a test does to all kinds, it does to `name`.
struct Kind {
  const char* name;
  void (*change)(BuildOptions&);
};

const QmodelFile& qmodel() {
  static const QmodelFile file = [] {
    testing::TinyQmodelOptions o;
    o.head_dim = kDim;
    o.layers = kLayers;
    QmodelFile q = testing::tiny_qmodel(o);
    q.model.hidden_size = 32;
    q.model.vocab_size = 1000;
    q.model.max_positions = 4096;
    q.model.sliding_window = {0, 30, 0, 0};
    return q;
  }();
  return file;
}

class Resume : public ::testing::TestWithParam<Kind> {
 protected:
  Resume() {
    model_ = qmodel().model;
    options_.sink = 4;
    options_.tail = 20;
    options_.threads = 1;
    options_.engine = "faiss";  // also where there is a GPU
    options_.resume = true;
    if (GetParam().change) GetParam().change(options_);
    for (uint64_t l = 0; l < kLayers; ++l) {
      rows_.push_back({test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, 10 * l),
                       test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, 10 * l + 1),
                       test::clustered_points(4 * 20, kDim, 5, 1.0f, 10 * l + 2)});
    }
    for (int64_t i = 0; i < kHeads * kTokens; ++i)
      attention_.push_back(static_cast<float>(i * 7919 % 40));
    BuildOptions whole = options_;
    whole.resume = false;
    EXPECT_TRUE(build(Env::posix(), whole, kLayers).ok());
    whole_ = testing::read_file(path_);
    std::filesystem::remove(path_);
  }

  // Adds `layers` layers; the report of the whole build if these are all.
  Result<BuildReport> build(Env& env, const BuildOptions& options, int64_t layers) {
    SQZ_ASSIGN_OR_RETURN(auto builder,
                         IndexBuilder::create(env, path_, false, model_, tokens_, "", options));
    for (int64_t l = 0; l < layers; ++l) {
      const Rows& rows = rows_[static_cast<size_t>(l)];
      SQZ_RETURN_IF_ERROR(
          builder->add_layer(l, {rows.keys, rows.values, rows.queries, nullptr, attention_}));
    }
    if (layers < kLayers) return BuildReport();
    return builder->finish();
  }
  Result<BuildReport> build() { return build(Env::posix(), options_, kLayers); }

  void expect_whole(int64_t resumed, const std::string& what) {
    const auto report = build();
    ASSERT_TRUE(report.ok()) << what << ": " << report.status().message();
    EXPECT_EQ(report->resumed, resumed) << what;
    EXPECT_TRUE(testing::read_file(path_) == whole_) << what;
    EXPECT_THAT(dir_.names(), ElementsAre("x.sqz")) << what;
    std::filesystem::remove(path_);
  }

  struct Rows {
    std::vector<float> keys, values, queries;
  };
  testing::TemporaryDirectory dir_;
  const std::string path_ = dir_.file("x.sqz"), partial_ = path_ + ".tmp.resume";
  const std::vector<int32_t> tokens_ = std::vector<int32_t>(kTokens, 7);
  ModelDescription model_;
  BuildOptions options_;
  std::vector<Rows> rows_;
  std::vector<float> attention_;
  std::string whole_;  // the bytes of an uninterrupted build
};

constexpr Kind kKinds[] = {
    {"Clusters", nullptr},
    {"KeysAndHitters", [](BuildOptions& o) { o.calibrate_keys = o.heavy_hitters = true; }},
    {"Pages", [](BuildOptions& o) { o.partition = Partition::kPages; }},
    {"Buckets", [](BuildOptions& o) {
       o.partition = Partition::kBuckets;
       o.qmodel = &qmodel();
       o.calibrate_keys = true;
     }}};
const auto name_of = [](const auto& kind) { return kind.param.name; };
INSTANTIATE_TEST_SUITE_P(Builds, Resume, ::testing::ValuesIn(kKinds), name_of);

// These run hundreds of builds, and so of two kinds only.
class ResumeAtAnyCall : public Resume {};
INSTANTIATE_TEST_SUITE_P(Builds, ResumeAtAnyCall, ::testing::Values(kKinds[2], kKinds[3]), name_of);

TEST_P(Resume, GoesOnAfterAnyNumberOfLayers) {
  for (int64_t layers = 0; layers < kLayers; ++layers) {
    ASSERT_TRUE(build(Env::posix(), options_, layers).ok());
    EXPECT_EQ(std::filesystem::exists(partial_), layers > 0) << "nothing to go on from is nothing";
    expect_whole(layers, concat(layers, " layers"));
  }
}

TEST_P(ResumeAtAnyCall, GoesOnAfterAFailure) {
  FailNth count;
  FaultEnv counted(count.hook());
  ASSERT_TRUE(build(counted, options_, kLayers).ok());
  std::filesystem::remove(path_);
  for (int nth = 0; !testing::is_after_publishing(count.calls[static_cast<size_t>(nth)]); ++nth) {
    FailNth fail;
    fail.fail_at = nth;
    FaultEnv env(fail.hook());
    EXPECT_EQ(build(env, options_, kLayers).status().code(), Code::kIo);
    EXPECT_FALSE(std::filesystem::exists(path_));
    const auto report = build();
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_TRUE(testing::read_file(path_) == whole_) << "call " << nth;
    std::filesystem::remove(path_);
  }
}

TEST_P(ResumeAtAnyCall, GoesOnAfterAKill) {
  int64_t kills = 0, resumed = 0;
  for (;; ++kills) {
    const pid_t child = ::fork();
    if (child == 0) {
      int64_t call = 0;
      FaultEnv env([&](const std::string&) {
        if (call++ == kills) ::kill(::getpid(), SIGKILL);
        return Status();
      });
      ::_exit(build(env, options_, kLayers).ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (!WIFSIGNALED(status)) break;
    if (std::filesystem::exists(path_)) {
      ASSERT_TRUE(testing::read_file(path_) == whole_) << "killed at call " << kills;
      std::filesystem::remove(path_);
      continue;
    }
    const auto report = build();
    ASSERT_TRUE(report.ok()) << report.status().message();
    resumed += report->resumed;
    ASSERT_TRUE(testing::read_file(path_) == whole_) << "killed at call " << kills;
    ASSERT_THAT(dir_.names(), ElementsAre("x.sqz"));
    std::filesystem::remove(path_);
  }
  EXPECT_GT(kills, 20);
  EXPECT_GT(resumed, kills / 2) << "most kills come after a layer";
}

TEST_P(Resume, ALayerOfOtherInputOrWithADamageIsMadeAgain) {
  ASSERT_TRUE(build(Env::posix(), options_, 3).ok());
  std::swap(rows_[2].values, rows_[3].values);
  const auto other = build();
  ASSERT_TRUE(other.ok()) << other.status().message();
  EXPECT_EQ(other->resumed, 2);
  EXPECT_FALSE(testing::read_file(path_) == whole_);
  std::filesystem::remove(path_);
  std::swap(rows_[2].values, rows_[3].values);

  ASSERT_TRUE(build(Env::posix(), options_, 3).ok());
  std::string bytes = testing::read_file(partial_);
  bytes.back() ^= 1;  // the last byte that was written is of layer 2
  testing::write_file(partial_, bytes);
  expect_whole(2, "a flipped bit");

  ASSERT_TRUE(build(Env::posix(), options_, 3).ok());
  std::filesystem::resize_file(partial_, bytes.size() - 1);
  expect_whole(2, "a file that ends early");

  testing::write_file(partial_, std::string(100000, 'x'));
  expect_whole(0, "a file of something else");
}

TEST_P(Resume, AnotherBuildIsRefusedAndNothingIsLost) {
  ASSERT_TRUE(build(Env::posix(), options_, 2).ok());
  const std::string before = testing::read_file(partial_);
  const auto expect_refused = [&](const std::function<void(BuildOptions&)>& change,
                                  const std::string& field) {
    BuildOptions options = options_;
    change(options);
    const Status refused = build(Env::posix(), options, kLayers).status();
    EXPECT_EQ(refused.code(), Code::kMismatch) << refused.message();
    EXPECT_THAT(refused.message(), HasSubstr(concat(partial_, ": ", field, ": found ")));
    EXPECT_TRUE(testing::read_file(partial_) == before);
  };
  expect_refused([](BuildOptions& o) { o.sink = 5; }, "sink");
  expect_refused([](BuildOptions& o) { o.dtype = DType::kF16; }, "dtype");
  if (options_.partition == Partition::kKmeans) {
    expect_refused([](BuildOptions& o) { o.iterations = 3; }, "build.iterations");
    expect_refused([](BuildOptions& o) { o.seed = 3; }, "build.seed");
  }
  if (options_.partition == Partition::kBuckets) {
    QmodelFile other = qmodel();
    other.layers[1].centroids[0] += 0.5f;
    expect_refused([&](BuildOptions& o) { o.qmodel = &other; }, "build.query_classifier");
  }
  model_.weights_hash = "fedcba9876543210";
  if (options_.partition != Partition::kBuckets)
    expect_refused([](BuildOptions&) {}, "model.weights_hash");
  model_.weights_hash = qmodel().model.weights_hash;
  expect_whole(2, "the build that it was begun by");
}

TEST_P(Resume, AnIndexThatIsThereIsFoundIfItIsOfThisBuild) {
  const auto find = [&](const BuildOptions& options) {
    return IndexBuilder::find(Env::posix(), path_, model_, tokens_, "", options);
  };
  EXPECT_EQ(find(options_).status().code(), Code::kNotFound);
  ASSERT_TRUE(build().ok());
  const auto found = find(options_);
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(found->resumed, kLayers);
  EXPECT_EQ(found->bytes, whole_.size());
  const auto expect_other = [&](const BuildOptions& options, const std::string& field) {
    const Status other = find(options).status();
    EXPECT_EQ(other.code(), Code::kMismatch);
    EXPECT_THAT(other.message(), HasSubstr(concat(path_, ": ", field, ": found ")));
  };
  BuildOptions other = options_;
  other.sink = 5;
  expect_other(other, "sink");
  other = options_;
  other.pass = "bf16, cuda";
  expect_other(other, "build.pass");
  if (options_.partition == Partition::kBuckets) {
    QmodelFile classifier = qmodel();
    classifier.layers[1].centroids[0] += 0.5f;
    other = options_;
    other.qmodel = &classifier;
    expect_other(other, "build.query_classifier");
  }
  std::string bytes = whole_;
  bytes[100] ^= 1;
  testing::write_file(path_, bytes);
  EXPECT_EQ(find(options_).status().code(), Code::kCorrupt) << "its header is damaged";
}

}  // namespace
}  // namespace sqz
