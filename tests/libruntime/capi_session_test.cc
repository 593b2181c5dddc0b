// Sessions through the C ABI: which selector, which options, many threads, what they count.
#include <cstring>
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
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_STREAM), "stream");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_WINDOW), "window");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_H2O), "h2o");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_SAAP), "saap");
  const volatile int none = 8;
  EXPECT_EQ(sqz_selector_name(static_cast<sqz_selector>(none)), nullptr);
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

TEST_F(CApi, SessionOptionsOutOfRange) {
  const double thresholds[] = {1e-4, 1e-4};
  static const double scales[] = {1, 2, 1};
  using Change = void (*)(sqz_session_options&);
  const std::pair<Change, sqz_status> bad[] = {
      {[](auto& o) { o.budget = 0; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.budget = 0.01; }, SQZ_INVALID_ARGUMENT},  // below the centroids
      {[](auto& o) { o.keep = 0.1; }, SQZ_INVALID_ARGUMENT},     // both
      {[](auto& o) { o.device_type = 2; }, SQZ_UNSUPPORTED},
      {[](auto& o) { o.device_type = 7; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.device_id = 1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.selector = 8; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.selector = -1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.selector = SQZ_SELECTOR_QUEST; }, SQZ_UNSUPPORTED},  // of pages
      {[](auto& o) { o.layer_scales = scales; }, SQZ_INVALID_ARGUMENT},     // no count
      {[](auto& o) { o.layer_scale_count = 2; }, SQZ_INVALID_ARGUMENT},     // no scales
      {[](auto& o) { o.layer_scales = scales, o.layer_scale_count = -2; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.layer_scales = scales, o.layer_scale_count = 3; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.uniform_layers = 2; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.dense_layers = 3; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.selector = SQZ_SELECTOR_DENSE; }, SQZ_INVALID_ARGUMENT},  // with a budget
      {[](auto& o) { o.rule = 2; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.levels = 3; }, SQZ_INVALID_ARGUMENT},
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
  sqz_session* session = nullptr;
  EXPECT_EQ(sqz_session_create(index_->handle(), nullptr, &session), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_create(nullptr, &good, &session), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_create(index_->handle(), &good, nullptr), SQZ_INVALID_ARGUMENT);
}

TEST_F(CApi, QueriesBeforeRopeDecideWhichBucketsAreRead) {
  const QmodelFile qmodel = testing::tiny_qmodel({.head_dim = 16, .buckets = 12, .hidden = 21});
  ASSERT_TRUE(testing::write_tiny_buckets(directory_->file("buckets"), qmodel, 5000).ok());
  const runtime::Index index(directory_->file("buckets"));
  auto options = make<sqz_session_options>();
  options.selector = SQZ_SELECTOR_SAAP;
  options.keep = 0.1;
  runtime::Session session(index, options);
  std::vector<std::vector<float>> outs;
  for (const uint64_t seed : {7, 8, 7}) {
    Call call(1, 1, 1), before(1, seed);
    call.args.q_before_rope = &before.q_tensor;
    session.attend(call.args);
    outs.push_back(call.out);
  }
  EXPECT_EQ(outs[0], outs[2]);
  EXPECT_NE(outs[0], outs[1]);
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

TEST_F(CApi, StatsOfALayerAreReset) {
  runtime::Session session(*index_, testing::held_budget(0.2));
  session.attend(Call(1).args);
  EXPECT_STREQ(session.stats(0).route, "cpu");
  EXPECT_GT(session.stats().bytes_read, 0u);
  EXPECT_EQ(session.stats(1).bytes_read, 0u);
  session.reset_stats();
  EXPECT_EQ(session.stats().bytes_read, 0u);
  auto stats = make<sqz_stats>();
  EXPECT_EQ(sqz_session_stats(session.handle(), 0, 2, &stats), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_stats(session.handle(), 0, -2, &stats), SQZ_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(sqz_last_error(), "expected -1 to 1"), nullptr) << sqz_last_error();
  EXPECT_EQ(sqz_session_stats(nullptr, 0, 0, &stats), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_stats(session.handle(), 0, 0, nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_stats(session.handle(), 1, 0, &stats), SQZ_INVALID_ARGUMENT);  // empty
}

}  // namespace
}  // namespace sqz
