// sqz_attend() allocates nothing. No failed allocation of the calls that read a file's header or
// its contents ends the process, nor does a thread that cannot be started. Checking a file takes
// little memory however large it is.
#include "tests/libruntime/failing_allocations.h"

#include "tests/common/sparse_index.h"
#include "tests/libruntime/c_index.h"

namespace sqz {
namespace {

using testing::Call;
using testing::fail_each_allocation;

using Allocation = testing::CIndexTest;

TEST_F(Allocation, NoneInAttend) {
  const runtime::Index index(path());
  for (const int rule : {SQZ_RULE_THRESHOLD, SQZ_RULE_BUDGET}) {
    for (const int64_t block : {0, 1, 16}) {
      const double thresholds[] = {1e-4, 1e-4};
      auto options = testing::held_budget(0.2);
      if (rule == SQZ_RULE_THRESHOLD) {
        options.rule = rule;
        options.budget = 0;
        options.thresholds = thresholds;
      }
      options.block = block;
      options.max_tokens = 100;
      const int64_t before_creation = allocations;
      runtime::Session session(index, options);
      ASSERT_GT(allocations, before_creation) << "the counter must see libsqz's allocations";
      int64_t positions[100], indptr[] = {0, 1, 40, 100};
      for (int64_t t = 0; t < 100; ++t) positions[t] = 5000 + t;
      for (const int64_t layer : {0, 1}) {
        Call one(1, 1, layer), many(100, 2, layer);
        one.args.positions = many.args.positions = positions;
        many.args.indptr = indptr;
        many.args.requests = 3;
        const int64_t before = allocations;
        const sqz_status first = sqz_attend(session.handle(), &one.args);
        const sqz_status second = sqz_attend(session.handle(), &many.args);
        const int64_t after = allocations;
        ASSERT_EQ(first, SQZ_OK) << sqz_last_error();
        ASSERT_EQ(second, SQZ_OK) << sqz_last_error();
        EXPECT_GT(session.stats(0).keys_read, 0u);
        EXPECT_EQ(after - before, 0) << "rule " << rule;
      }
    }
  }
}

TEST_F(Allocation, NoneInAttendWithSeveralContexts) {
  testing::TinyIndexOptions plain = testing::c_index_options();
  plain.windows = {};
  const std::string file = directory_->file("plain.sqz");
  ASSERT_TRUE(testing::write_tiny_index(file, plain).ok());
  const runtime::Index index(file);
  auto options = testing::held_budget(0.2);
  options.max_contexts = 2;
  runtime::Session session(index, options);
  session.put(1, index);
  const sqz_context contexts[] = {{0, 0, 0}, {1, 4, 5000}, {-1, 0, 0}, {1, 0, 0}};
  const int64_t indptr[] = {0, 2, 3};
  Call call(3);
  call.args.indptr = indptr;
  call.args.requests = 2;
  call.args.contexts = contexts;
  call.args.contexts_each = 2;
  const int64_t before = allocations;
  const sqz_status status = sqz_attend(session.handle(), &call.args);
  const int64_t after = allocations;
  ASSERT_EQ(status, SQZ_OK) << sqz_last_error();
  EXPECT_EQ(after - before, 0);
}

TEST_F(Allocation, AFailedOneIsAStatus) {
  const std::string file = path();
  for (const sqz_open_mode mode : {SQZ_OPEN_MMAP, SQZ_OPEN_READ}) {
    fail_each_allocation([&] {
      sqz_index* index = nullptr;
      const sqz_status status = sqz_index_open(file.c_str(), mode, &index);
      sqz_index_close(index);
      return status;
    });
  }
  sqz_index* index = nullptr;
  ASSERT_EQ(sqz_index_open(file.c_str(), SQZ_OPEN_MMAP, &index), SQZ_OK) << sqz_last_error();
  fail_each_allocation([&] { return sqz_index_verify(index); });
  // A call that allocates nothing is never refused.
  const int64_t before = allocations;
  sqz_index_info info{.struct_size = sizeof(sqz_index_info)};
  EXPECT_EQ(sqz_index_describe(index, &info), SQZ_OK) << sqz_last_error();
  EXPECT_EQ(allocations, before);
  sqz_index_close(index);
}

// Everything that a session does, from its creation to its end.
sqz_status use_session(sqz_index* index, const sqz_session_options& options,
                       const sqz_attend_args& args, std::vector<sqz_run>& runs) {
  sqz_session* session = nullptr;
  int64_t heads[3] = {}, count = 0;
  sqz_status status = sqz_session_create(index, &options, &session);
  if (status == SQZ_OK) {
    status = sqz_select(session, &args, runs.data(), std::ssize(runs), heads, &count);
  }
  if (status == SQZ_OK) status = sqz_attend(session, &args);
  sqz_session_destroy(session);
  return status;
}

TEST_F(Allocation, AFailedOneOfASessionIsAStatus) {
  testing::TinyIndexOptions clusters = testing::c_index_options(), pages = clusters;
  clusters.heavy_hitters = true;
  clusters.tokens = pages.tokens = 700;
  clusters.clusters = {7, 35};
  pages.clusters = {};
  pages.page_size = 16;
  std::vector<sqz_run> runs(10000);
  const Call call(3);
  for (const testing::TinyIndexOptions& made : {clusters, pages}) {
    const std::string file = path() + ".made";
    ASSERT_TRUE(testing::write_tiny_index(file, made).ok());
    for (const sqz_selector selector :
         {SQZ_SELECTOR_AUTO, SQZ_SELECTOR_DENSE, SQZ_SELECTOR_STREAM, SQZ_SELECTOR_H2O}) {
      if (selector == SQZ_SELECTOR_H2O && made.page_size > 0) continue;
      auto options = testing::held_budget(selector == SQZ_SELECTOR_DENSE ? 0 : 0.3);
      options.selector = selector;
      if (made.page_size > 0 || selector != SQZ_SELECTOR_AUTO) options.rule = 0;
      options.kv_heads = 1;  // a range, which is made anew for every session
      options.first_kv_head = 1;
      SCOPED_TRACE(selector);
      Call rank(3);
      rank.out_shape[1] = rank.lse_shape[1] = 2;
      fail_each_allocation([&] {
        sqz_index* index = nullptr;  // fresh: what its sessions share is made with the first one
        sqz_status status = sqz_index_open(file.c_str(), SQZ_OPEN_MMAP, &index);
        if (status == SQZ_OK) status = use_session(index, options, rank.args, runs);
        sqz_index_close(index);
        return status;
      });
    }
  }
}

TEST_F(Allocation, AThreadThatDoesNotStartIsAStatus) {
  const std::string file = path();
  std::vector<sqz_run> runs(10000);
  const Call call(3);
  auto options = testing::held_budget(0.3);
  options.threads = 4;
  const runtime::Index index(file);
  fail_each_allocation([&] { return use_session(index.handle(), options, call.args, runs); }, 1,
                       true);
}

// Files of holes, hundreds of MB each, of which verify would once have held a part that grows with
// the file: the sums of clusters, what was found per head, calibration tables, the tokens seen.
TEST_F(Allocation, CheckingAFileTakesLittleMemory) {
  testing::TinyIndexOptions o = {
      .layers = 1, .query_heads = 1, .kv_heads = 1, .sink = 0, .tail = 1};
  struct Shape {
    const char* name;
    int64_t layers, heads, head_dim, tokens, clusters, page_size;
  };
  for (const Shape& shape :
       {Shape{"clusters", 1, 1, 4096, 8193, 8192, 0}, Shape{"heads", 32, 1 << 16, 1, 1, 0, 0},
        Shape{"tables", 1, 1 << 13, 1, 2, 1, 0}, Shape{"tokens", 1, 1, 1, 1 << 28, 0, 1 << 20}}) {
    o.layers = shape.layers;
    o.query_heads = o.kv_heads = shape.heads;
    o.head_dim = shape.head_dim;
    o.tokens = shape.tokens;
    o.clusters = {shape.clusters};
    o.page_size = shape.page_size;
    o.has_value_means = false;
    o.dense_layers.clear();
    for (int64_t l = 0; l < o.layers && shape.tokens == 1; ++l) o.dense_layers.insert(l);
    const IndexMetadata metadata = testing::tiny::metadata(o);
    ClusterCounts layers(static_cast<size_t>(o.layers));
    std::map<std::string, std::string> contents;
    if (metadata.levels > 0) {
      layers[0] = o.clusters;
      std::string offsets;
      for (uint32_t c = 0; c <= shape.clusters; ++c) {
        offsets.append(reinterpret_cast<const char*>(&c), sizeof(c));
      }
      contents["layers.0.level.1.offsets"] = offsets;
    }
    const std::string file = path() + ".sparse";
    const Status written = testing::write_sparse_index(file, metadata, layers, contents);
    ASSERT_TRUE(written.ok()) << shape.name << ": " << written.message();
    const runtime::Index index(file);
    const int64_t before = live;
    most_live = before;
    EXPECT_EQ(sqz_index_verify(index.handle()), SQZ_CORRUPT);
    EXPECT_LT(most_live - before, int64_t{24} << 20)
        << shape.name << ", of a file of " << index.describe().file_bytes << " bytes";
  }
}

}  // namespace
}  // namespace sqz
