// The C ABI when CUDA fails: each call of it in turn, a GPU without memory, and one that
// is lost.
#include <unistd.h>

#include <filesystem>
#include <optional>

#include "libindex/compress.h"
#include "tests/common/temporary_directory.h"
#include "tests/libruntime/cuda/buckets.h"
#include "tests/libruntime/cuda/faults.h"
#include "tests/libruntime/cuda/tokens.h"
#include "tests/libruntime/failing_allocations.h"

namespace sqz {
namespace {

using cuda::test::held_budget;
using cuda::test::kDim;
using cuda::test::kGroup;
using cuda::test::kHeads;
using cuda::test::queries;
using cuda::test::Tokens;
using cuda::test::faults::fail_each_call;
using runtime::make;

constexpr int64_t kQueryHeads = kHeads * kGroup, kContext = 6000;

struct Case {
  const char* index;
  sqz_selector selector;
  int32_t rule;
};

// The message of what went wrong in `step`; "" if nothing did.
template <class Step>
std::string message_of(Step&& step) {
  try {
    step();
    return {};
  } catch (const runtime::Error& error) {
    return error.what();
  }
}

void write_index(const std::string& path, const std::string& kind) {
  testing::TinyIndexOptions options = cuda::test::shape();
  if (kind == "pages") {
    options.clusters = {};
    options.page_size = 16;
    options.heavy_hitters = false;
  }
  if (kind == "codes") {
    ASSERT_TRUE(testing::write_tiny_index(path, options).ok());
    const auto file = SqzFile::open(path);
    ASSERT_TRUE(file.ok()) << file.status().message();
    const auto report = compress_index(Env::posix(), **file, {.rows = RowKind::kQ8}, path, true, 1);
    ASSERT_TRUE(report.ok()) << report.status().message();
  } else if (kind == "buckets") {
    const auto written = testing::write_tiny_buckets(
        path, cuda::test::network({.dim = kDim, .group = kGroup, .heads = kHeads}), kContext);
    ASSERT_TRUE(written.ok()) << written.status().message();
  } else {
    const auto written = testing::write_tiny_index(path, options);
    ASSERT_TRUE(written.ok()) << written.status().message();
  }
}

// One index, and calls of every kind: a token, three requests of one token, a prompt.
class Serving {
 public:
  Serving(const std::string& path, const Case& c)
      : index(path), options(held_budget(c.selector == SQZ_SELECTOR_DENSE ? 0 : 0.3, true)) {
    options.selector = c.selector;
    options.rule = c.rule;
    options.dense_layers = -1;
    options.max_tokens = 64;
    if (c.selector == SQZ_SELECTOR_SAAP) std::swap(options.budget, options.keep);
    for (int64_t t = 0; t < 40; ++t) positions_.push_back(kContext + t);
    for (const int64_t tokens : {1, 3, 40}) {
      calls.push_back(std::make_unique<Tokens>(queries(tokens, kQueryHeads), kQueryHeads, true));
      sqz_attend_args& args = calls.back()->args;
      args.layer = 1;
      args.positions = positions_.data();
      if (tokens == 3) {
        args.indptr = indptr_;
        args.requests = 3;
      }
    }
    index.upload();
    runtime::Session session(index, options);
    for (const auto& call : calls) {
      session.attend(call->args);
      expected_.push_back(call->gpu_out());
    }
    index.unload();
  }

  void upload(bool background = false) {
    auto upload = make<sqz_upload_options>();
    upload.threads = 1;
    upload.background = background;
    runtime::check(sqz_index_upload(index.handle(), &upload));
  }

  void expect_output(size_t call) const {
    const std::vector<float> found = calls[call]->gpu_out();
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_NEAR(found[i], expected_[call][i], 6e-3) << "call " << call << ", element " << i;
    }
  }

  // From upload to unload.
  void serve(bool background) {
    struct Unload {
      sqz_index* index;
      ~Unload() { sqz_index_unload(index, 0); }
    };
    upload(background);
    const Unload unload{index.handle()};
    runtime::Session session(index, options);
    for (const auto& call : calls) session.attend(call->args);
    EXPECT_GT(session.stats().bytes_read, 0u);
  }

  runtime::Index index;
  sqz_session_options options;
  std::vector<std::unique_ptr<Tokens>> calls;

 private:
  int64_t indptr_[4] = {0, 1, 2, 3};
  std::vector<int64_t> positions_;
  std::vector<std::vector<float>> expected_;
};

class CudaFaults : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    SQZ_SKIP_WITHOUT_GPU();
    write_index(path(), GetParam().index);
  }
  std::string path() const { return directory_.file("a.sqz"); }

  testing::TemporaryDirectory directory_;
};

TEST_P(CudaFaults, EachCallOfASessionIsAStatus) {
  Serving serving(path(), GetParam());
  serving.upload();

  std::optional<runtime::Session> session;
  const auto create = [&] { session.emplace(serving.index, serving.options); };
  const auto attend = [&](size_t call) { session->attend(serving.calls[call]->args); };
  fail_each_call(
      "session", [&] { return message_of(create); },
      [&](bool failed) {
        if (failed) create();
        attend(0);
        serving.expect_output(0);
        session.reset();
      });
  ASSERT_FALSE(HasFailure());
  create();
  for (size_t call = 0; call < serving.calls.size(); ++call) {
    serving.calls[call]->clear();
    fail_each_call(
        "attend", [&] { return message_of([&] { attend(call); }); },
        [&](bool failed) {
          if (failed) attend(call);
          serving.expect_output(call);
          serving.calls[call]->clear();
        });
    ASSERT_FALSE(HasFailure()) << "call " << call;
  }
  const auto again = [](const auto& step) {
    return [&](bool failed) {
      if (failed) step();
    };
  };
  const auto each = [&](const char* name, const auto& step) {
    fail_each_call(
        name, [&] { return message_of(step); }, again(step));
  };
  each("stats", [&] { session->stats(); });
  each("reset", [&] { session->reset_stats(); });
  const bool looks_up =
      GetParam().selector != SQZ_SELECTOR_DENSE && GetParam().selector != SQZ_SELECTOR_H2O;
  for (const size_t call : {size_t{0}, size_t{2}}) {
    if (!looks_up) continue;
    const sqz_attend_args& args = serving.calls[call]->args;
    each("select", [&] { session->select(args, kHeads); });
  }
  const sqz_context contexts[] = {{0, 0, 0}, {-1, 0, 0}, {0, 0, 0}};
  sqz_attend_args mixed = serving.calls[1]->args;
  mixed.contexts = contexts;
  each("requests without a context", [&] { session->attend(mixed); });
  Tokens other(queries(1, kQueryHeads), kQueryHeads, true);
  const sqz_attend_args &a = serving.calls[0]->args, &b = other.args;
  each("merge", [&] { runtime::check(sqz_merge_states(a.out, a.lse, b.out, b.lse)); });
}

class CudaUploadFaults : public CudaFaults {};
TEST_P(CudaUploadFaults, EachCallIsAStatus) {
  Serving serving(path(), GetParam());
  fail_each_call(
      "upload", [&] { return message_of([&] { serving.upload(); }); },
      [&](bool failed) {
        if (failed) serving.upload();
        serving.index.unload();
      },
      5);
}

TEST_P(CudaUploadFaults, NothingIsLeftWhateverFailsAtTheEnd) {
  Serving serving(path(), GetParam());
  const int64_t before = cuda::test::faults::live();
  for (const bool lost : {false, true}) {
    std::string failed = "some";
    for (int64_t n = 0; !failed.empty(); ++n) {
      serving.upload();
      std::optional<runtime::Session> session(std::in_place, serving.index, serving.options);
      cuda::test::faults::begin(n, lost);
      session.reset();
      sqz_index_unload(serving.index.handle(), 0);
      failed = cuda::test::faults::end();
      ASSERT_EQ(cuda::test::faults::live(), before) << failed << ", call " << n;
      ASSERT_EQ(cudaPeekAtLastError(), cudaSuccess) << failed << ", call " << n;
    }
  }
}

// A layer waits for its upload, which must not be for ever.
TEST_P(CudaUploadFaults, InTheBackground) {
  Serving serving(path(), GetParam());
  const auto serve = [&] { serving.serve(true); };
  fail_each_call(
      "background", [&] { return message_of(serve); },
      [&](bool failed) {
        if (failed) serve();
        for (size_t call = 0; call < serving.calls.size(); ++call) serving.expect_output(call);
      },
      5);
}

// One allocation on the host in so many, and each thread that an upload starts.
TEST_P(CudaUploadFaults, OfTheHost) {
  Serving serving(path(), GetParam());
  const auto serve = [&] {
    const int64_t before = cuda::test::faults::live();
    sqz_status status = SQZ_OK;
    try {
      serving.serve(true);
    } catch (const runtime::Error& error) {
      status = error.status();
    }
    EXPECT_EQ(cuda::test::faults::live(), before);
    return status;
  };
  testing::fail_each_allocation(serve, 29);
  testing::fail_each_allocation(serve, 1, true);
  serve();
  serving.expect_output(0);
}

TEST_P(CudaUploadFaults, OutOfMemory) {
  Serving serving(path(), GetParam());
  const auto fails = [&] {
    try {
      serving.serve(false);
      return false;
    } catch (const runtime::Error& error) {
      EXPECT_EQ(error.status(), SQZ_OUT_OF_MEMORY) << error.what();
      return true;
    }
  };
  cuda::test::faults::with_little_memory(fails, [](bool) {});
  EXPECT_FALSE(fails());
  serving.expect_output(0);
}

std::string name_of(const ::testing::TestParamInfo<Case>& test) {
  const Case& c = test.param;
  return concat(sqz_selector_name(c.selector), c.rule);
}
constexpr Case kThreshold{"clusters", SQZ_SELECTOR_SQUEEZED, SQZ_RULE_THRESHOLD};
constexpr Case kQuest{"pages", SQZ_SELECTOR_QUEST, 0};
constexpr Case kSaap{"buckets", SQZ_SELECTOR_SAAP, 0};
constexpr Case kCodes{"codes", SQZ_SELECTOR_SQUEEZED, SQZ_RULE_BUDGET};
INSTANTIATE_TEST_SUITE_P(Partitions, CudaUploadFaults,
                         ::testing::Values(kThreshold, kQuest, kSaap, kCodes), name_of);
INSTANTIATE_TEST_SUITE_P(Selectors, CudaFaults,
                         ::testing::Values(kThreshold, kQuest, kSaap,
                                           Case{"clusters", SQZ_SELECTOR_SQUEEZED, SQZ_RULE_BUDGET},
                                           Case{"clusters", SQZ_SELECTOR_DENSE, 0},
                                           Case{"clusters", SQZ_SELECTOR_H2O, 0}),
                         name_of);

// Queries at an address that is not the GPU's: the kernel that reads them ends the context, as a
// GPU that falls off its bus does. Every call from then on is an error, and the program can end.
void lose_the_gpu(const std::string& path) {
  alarm(120);
  Serving serving(path, {"clusters", SQZ_SELECTOR_SQUEEZED, SQZ_RULE_BUDGET});
  int wrong = 0;
  const auto expect = [&](const char* name, bool failure, const std::string& message) {
    std::fprintf(stderr, "%s: %s\n", name, message.empty() ? "ok" : message.c_str());
    wrong += message.empty() == failure;
  };
  serving.upload();
  {
    runtime::Session session(serving.index, serving.options);
    sqz_attend_args& args = serving.calls[0]->args;
    expect("before", false, message_of([&] {
             session.attend(args);
             session.stats();
           }));
    sqz_tensor nowhere = *args.q;
    nowhere.data = reinterpret_cast<void*>(uintptr_t{256});
    sqz_attend_args bad = args;
    bad.q = &nowhere;
    (void)message_of([&] { session.attend(bad); });  // is told later
    expect("stats", true, message_of([&] { session.stats(); }));
    for (const auto& call : serving.calls) {
      expect("attend", true, message_of([&] { session.attend(call->args); }));
    }
    expect("select", true, message_of([&] { session.select(args, kHeads); }));
    expect("session", true,
           message_of([&] { runtime::Session another(serving.index, serving.options); }));
  }
  serving.index.unload();
  expect("upload", true, message_of([&] { serving.upload(); }));
  expect("background", true, message_of([&] { serving.serve(true); }));
  std::filesystem::remove_all(std::filesystem::path(path).parent_path());
  std::exit(wrong);
}

TEST(CudaFaultsOfTheGpu, ALostOneIsAnError) {
  SQZ_SKIP_WITHOUT_GPU();
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const testing::TemporaryDirectory directory;
  ASSERT_NO_FATAL_FAILURE(write_index(directory.file("a.sqz"), "clusters"));
  EXPECT_EXIT(lose_the_gpu(directory.file("a.sqz")), ::testing::ExitedWithCode(0), "stats: ");
}

}  // namespace
}  // namespace sqz
