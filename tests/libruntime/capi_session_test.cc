// Sessions through the C ABI: which selector, which options, many threads, what they count.
#include <latch>
#include <thread>

#include "tests/common/tiny_buckets.h"
#include "tests/libruntime/c_index.h"

namespace sqz {
namespace {

using runtime::make;
using testing::Call;
using testing::CApi;

TEST_F(CApi, SelectorsHaveNamesAndNumbers) {
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_AUTO), "auto");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_SQUEEZED), "squeezed");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_DENSE), "dense");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_QUEST), "quest");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_IDEAL), "ideal");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_STREAM), "stream");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_WINDOW), "window");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_H2O), "h2o");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_SAAP), "saap");
  const volatile int none = 9;
  EXPECT_EQ(sqz_selector_name(static_cast<sqz_selector>(none)), nullptr);
}

TEST_F(CApi, SaapTakesQueriesBeforeRopeOrPositions) {
  testing::TinyQmodelOptions o;
  o.head_dim = 16;
  o.buckets = 12;
  const testing::TemporaryDirectory dir;
  ASSERT_TRUE(testing::write_tiny_buckets(dir.file("b"), testing::tiny_qmodel(o), 5000).ok());
  sqz_index* index = nullptr;
  ASSERT_EQ(sqz_index_open(dir.file("b").c_str(), SQZ_OPEN_MMAP, &index), SQZ_OK);
  auto info = make<sqz_index_info>();
  ASSERT_EQ(sqz_index_describe(index, &info), SQZ_OK);
  EXPECT_EQ(info.partition, SQZ_PARTITION_BUCKETS);
  EXPECT_EQ(info.levels, 0);
  auto options = make<sqz_session_options>();
  options.selector = SQZ_SELECTOR_SAAP;
  options.keep = 0.2;
  options.threads = 2;
  sqz_session* session = nullptr;
  ASSERT_EQ(sqz_session_create(index, &options, &session), SQZ_OK) << sqz_last_error();

  Call call(3, 7, 1);
  EXPECT_EQ(sqz_attend(session, &call.args), SQZ_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sqz_last_error()).find("q_before_rope"), std::string::npos);
  // At position 0 RoPE turns nothing: q is its own query before RoPE.
  const int64_t zeros[3] = {0, 0, 0};
  call.args.positions = zeros;
  ASSERT_EQ(sqz_attend(session, &call.args), SQZ_OK) << sqz_last_error();
  const auto turned = call.out;
  call.args.positions = nullptr;
  call.args.q_before_rope = &call.q_tensor;
  ASSERT_EQ(sqz_attend(session, &call.args), SQZ_OK) << sqz_last_error();
  EXPECT_EQ(call.out, turned);
  Call other(3, 8, 1);
  call.args.q_before_rope = &other.q_tensor;
  ASSERT_EQ(sqz_attend(session, &call.args), SQZ_OK) << sqz_last_error();
  EXPECT_NE(call.out, turned) << "other buckets are read";
  int64_t short_shape[3] = {2, 4, 16};
  sqz_tensor wrong = runtime::f32_tensor(other.q.data(), short_shape, 3);
  call.args.q_before_rope = &wrong;
  EXPECT_EQ(sqz_attend(session, &call.args), SQZ_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sqz_last_error()).find("q_before_rope"), std::string::npos);
  sqz_session_destroy(session);
  sqz_index_close(index);
}

TEST_F(CApi, TheSelectorThatFitsTheIndex) {
  testing::TinyIndexOptions pages = testing::c_index_options();
  pages.windows.clear();
  pages.page_size = 16;
  ASSERT_TRUE(testing::write_tiny_index(directory_->file("fit_pages"), pages).ok());
  testing::TinyQmodelOptions buckets;
  buckets.head_dim = 16;
  buckets.buckets = 12;
  ASSERT_TRUE(testing::write_tiny_buckets(directory_->file("fit_buckets"),
                                          testing::tiny_qmodel(buckets), 5000)
                  .ok());
  const std::tuple<std::string, sqz_selector, int64_t> cases[] = {
      {path(), SQZ_SELECTOR_SQUEEZED, 0},  // its layer 1 has a window
      {directory_->file("fit_pages"), SQZ_SELECTOR_QUEST, 1},
      {directory_->file("fit_buckets"), SQZ_SELECTOR_SAAP, 1}};  // layer 0 is dense
  for (const auto& [file, expected, layer] : cases) {
    const runtime::Index index(file);
    const std::vector<int64_t> positions = {5000, 5001, 5002};
    const auto answer = [&](sqz_selector selector, const Call& call) {
      auto options = make<sqz_session_options>();
      options.keep = 0.2;
      options.selector = selector;
      options.dense_layers = -1;
      runtime::Session session(index, options);
      session.attend(call.args);
      return std::pair(call.out, session.stats().keys_read);
    };
    Call own(3, 7, layer), fitting(3, 7, layer), other(3, 7, layer);
    for (Call* call : {&own, &fitting, &other}) call->args.positions = positions.data();
    EXPECT_EQ(answer(expected, own), answer(SQZ_SELECTOR_AUTO, fitting)) << file;
    EXPECT_NE(own.out, answer(SQZ_SELECTOR_STREAM, other).first) << file;
  }
}

TEST_F(CApi, LayersThatAreAllDenseReportWhatWasAsked) {
  testing::TinyIndexOptions o = testing::c_index_options();
  o.windows.clear();
  o.dense_layers = {0, 1};
  ASSERT_TRUE(testing::write_tiny_index(directory_->file("dense"), o).ok());
  const runtime::Index index(directory_->file("dense"));
  for (const sqz_selector selector :
       {SQZ_SELECTOR_SQUEEZED, SQZ_SELECTOR_STREAM, SQZ_SELECTOR_AUTO}) {
    auto options = runtime::options_for_budget(0.25);
    options.selector = selector;
    runtime::Session session(index, options);
    session.attend(Call(2, 1, 1).args);
    EXPECT_EQ(session.stats().asked_budget, 0.25) << selector;
    EXPECT_EQ(session.stats().delivered_budget, 1) << selector;
    EXPECT_EQ(session.stats().dense_fallback, 1) << selector;
  }
}

TEST_F(CApi, PagesAreServedWithTheFirstLayersWhole) {
  testing::TinyIndexOptions o = testing::c_index_options();
  o.layers = 3;
  o.windows.clear();
  o.page_size = 16;
  const std::string pages = directory_->file("pages.sqz");
  ASSERT_TRUE(testing::write_tiny_index(pages, o).ok());
  const runtime::Index index(pages);
  EXPECT_EQ(index.describe().partition, SQZ_PARTITION_PAGES);
  EXPECT_EQ(index.describe().page_size, 16);
  EXPECT_EQ(index.describe().levels, 0);
  auto options = runtime::options_for_budget(0.25);
  options.selector = SQZ_SELECTOR_QUEST;
  runtime::Session session(index, options);
  for (int64_t layer = 0; layer < 3; ++layer) {
    const Call call(2, 1, layer);
    session.attend(call.args);
    const auto heads = session.select(call.args, 2);
    ASSERT_EQ(heads.size(), 2u);
    EXPECT_EQ(heads[0].size() == 1 && heads[0][0].length == 4884, layer < 2);
    EXPECT_EQ(session.stats(layer).delivered_budget == 1.0, layer < 2);
  }
  EXPECT_LE(session.stats(2).delivered_budget, 0.25);
  EXPECT_GT(session.stats(2).delivered_budget, 0.245);
  EXPECT_EQ(session.stats().asked_budget, 0.25);
}

TEST_F(CApi, SessionOptionsOutOfRange) {
  const double thresholds[] = {1e-4, 1e-4};
  static const double scales[] = {1, 2, 1};
  using Change = void (*)(sqz_session_options&);
  const std::pair<Change, sqz_status> bad[] = {
      {[](auto& o) { o.budget = 0; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.budget = -0.1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.budget = 1.5; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.budget = 0.01; }, SQZ_INVALID_ARGUMENT},  // below the centroids
      {[](auto& o) { o.keep = 0.1; }, SQZ_INVALID_ARGUMENT},     // both
      {[](auto& o) { o.device_type = 2; }, SQZ_UNSUPPORTED},
      {[](auto& o) { o.device_type = 7; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.device_id = 1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.selector = 9; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.selector = -1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.selector = SQZ_SELECTOR_QUEST; }, SQZ_UNSUPPORTED},  // of pages
      {[](auto& o) { o.selector = SQZ_SELECTOR_IDEAL; }, SQZ_UNSUPPORTED},  // not calibrated
      {[](auto& o) { o.selector = SQZ_SELECTOR_H2O; }, SQZ_UNSUPPORTED},    // no order
      {[](auto& o) { o.selector = SQZ_SELECTOR_SAAP; }, SQZ_UNSUPPORTED},   // no buckets
      {[](auto& o) { o.layer_scales = scales; }, SQZ_INVALID_ARGUMENT},     // no count
      {[](auto& o) { o.layer_scale_count = 2; }, SQZ_INVALID_ARGUMENT},     // no scales
      {[](auto& o) { o.layer_scales = scales, o.layer_scale_count = -2; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.layer_scales = scales, o.layer_scale_count = 3; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.uniform_layers = 2; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.dense_layers = 3; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.dense_layers = -2; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.selector = SQZ_SELECTOR_DENSE; }, SQZ_INVALID_ARGUMENT},  // with a budget
      {[](auto& o) { o.rule = 2; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.levels = 3; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.levels = -1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.block = -1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.max_tokens = -1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.max_request_tokens = -1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.threads = -1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.threads = 1 << 20; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.struct_size = 0; }, SQZ_INVALID_ARGUMENT}};
  auto good = runtime::options_for_budget(0.125);
  good.threads = 1;
  good.max_tokens = 16;
  EXPECT_EQ(create(good), SQZ_OK) << sqz_last_error();
  for (const auto& [change, status] : bad) {
    sqz_session_options options = good;
    change(options);
    EXPECT_EQ(create(options), status) << "case " << &change - &bad[0].first;
  }
  good.budget = 0;
  good.thresholds = thresholds;
  EXPECT_EQ(create(good), SQZ_OK) << sqz_last_error();
  good.rule = SQZ_RULE_BUDGET;
  EXPECT_EQ(create(good), SQZ_INVALID_ARGUMENT);
  sqz_session* session = nullptr;
  EXPECT_EQ(sqz_session_create(index_->handle(), nullptr, &session), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_create(nullptr, &good, &session), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_create(index_->handle(), &good, nullptr), SQZ_INVALID_ARGUMENT);
}

TEST_F(CApi, IndexMayBeClosedBeforeItsSessions) {
  runtime::Session session(*index_, testing::held_budget(0.2));
  index_.reset();
  Call call(2);
  session.attend(call.args);
}

TEST_F(CApi, SessionsOfOneIndexInManyThreads) {
  Call expected(4);
  runtime::Session(*index_, testing::held_budget(0.2)).attend(expected.args);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      auto options = testing::held_budget(0.2);
      runtime::Session session(*index_, options);
      for (int repeat = 0; repeat < 20; ++repeat) {
        Call call(4);
        session.attend(call.args);
        EXPECT_EQ(call.out, expected.out);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Many threads with two sessions each on one index, which is closed while they attend; meanwhile
// others open, check and close the same file.
TEST_F(CApi, EverythingAtOnce) {
  constexpr int kThreads = 6;
  Call expected(4);
  runtime::Session(*index_, testing::held_budget(0.2)).attend(expected.args);
  for (int round = 0; round < 3; ++round) {
    auto shared = std::make_unique<runtime::Index>(path());
    std::latch created(kThreads);
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        shared->verify();
        EXPECT_EQ(shared->describe().tokens, 5000);
        runtime::Session first(*shared, testing::held_budget(0.2));
        runtime::Session second(*shared, testing::held_budget(0.2));
        created.count_down();
        for (runtime::Session* session : {&first, &second, &first}) {
          Call call(4);
          session->attend(call.args);
          EXPECT_EQ(call.out, expected.out);
          EXPECT_GT(session->stats().keys_read, 0u);
          session->reset_stats();
        }
        for (const auto mode : {SQZ_OPEN_MMAP, SQZ_OPEN_READ, SQZ_OPEN_VERIFY}) {
          EXPECT_EQ(runtime::Index(path(), mode).describe().tokens, 5000);
          EXPECT_THROW(runtime::Index("/nowhere", mode), runtime::Error);
        }
      });
    }
    created.wait();
    shared.reset();
  }
}

TEST_F(CApi, StatsReportAskedAndDelivered) {
  auto options = testing::held_budget(0.2);
  options.levels = 1;
  runtime::Session session(*index_, options);
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Call call(1, seed);
    session.attend(call.args);
    int64_t position = 5000;
    Call windowed(1, seed, 1);
    windowed.args.positions = &position;
    session.attend(windowed.args);
  }
  const sqz_stats sparse = session.stats(0);
  EXPECT_STREQ(sparse.route, "cpu");
  EXPECT_EQ(sparse.dense_fallback, 0);
  EXPECT_EQ(sparse.asked_budget, 0.2);
  // 10 selections of 2 heads, each within half a cluster: what was asked comes out.
  EXPECT_NEAR(sparse.delivered_keep, sparse.asked_keep, 0.002);
  EXPECT_NEAR(sparse.delivered_budget, 0.2, 0.002);
  EXPECT_EQ(sparse.selections, 10u);
  EXPECT_EQ(sparse.keys_possible, 10u * 2 * (5000 - 116));
  EXPECT_EQ(sparse.bytes_dense, 10u * 2 * 5000 * 16 * 2 * 2);
  EXPECT_EQ(sparse.bytes_read, (2 * sparse.keys_read + 20 * 2 * 116 + 20 * 250) * 16 * 2);
  const sqz_stats window = session.stats(1);
  EXPECT_EQ(window.bytes_read, 10u * 2 * 300 * 16 * 2 * 2);
  EXPECT_EQ(window.delivered_budget, 1.0);
  EXPECT_EQ(session.stats(-1).bytes_read, sparse.bytes_read + window.bytes_read);
  session.reset_stats();
  EXPECT_EQ(session.stats().bytes_read, 0u);
  auto stats = make<sqz_stats>();
  EXPECT_EQ(sqz_session_stats(session.handle(), 2, &stats), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_stats(session.handle(), -2, &stats), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_stats(session.handle(), 0, nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_stats(nullptr, 0, &stats), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_reset_stats(nullptr), SQZ_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace sqz
