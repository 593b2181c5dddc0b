// Engines need more of the C ABI than one call for one index: calls over several contexts and
// without one, ranks of KV heads. tests/python forks.
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "tests/libruntime/c_index.h"

namespace sqz {
namespace {

using runtime::make;
using testing::Call;

class Engine : public testing::CIndexTest {
 protected:
  // Another context of the same model.
  static std::string other_path() { return directory_->file("other.sqz"); }
  static void write_other(testing::TinyIndexOptions options) {
    options.seed = 2;
    ASSERT_TRUE(testing::write_tiny_index(other_path(), options).ok());
  }
};

TEST_F(Engine, StridesOfLseKeepItsElementsApart) {
  const runtime::Index index(path());
  runtime::Session session(index, testing::held_budget(0.2));
  std::vector<float> room(64);
  for (const auto& [token, head, status] :
       {std::tuple(4, 1, SQZ_OK), std::tuple(8, 2, SQZ_OK), std::tuple(1, 3, SQZ_OK),
        std::tuple(3, 1, SQZ_INVALID_ARGUMENT), std::tuple(1, 2, SQZ_INVALID_ARGUMENT),
        std::tuple(0, 1, SQZ_INVALID_ARGUMENT), std::tuple(-4, 1, SQZ_INVALID_ARGUMENT)}) {
    Call call(3);
    int64_t strides[] = {token, head};
    call.lse_tensor.data = room.data();
    call.lse_tensor.strides = strides;
    EXPECT_EQ(sqz_attend(session.handle(), &call.args), status) << token << ' ' << head;
  }
  Call huge(3);
  int64_t strides[] = {INT64_MAX / 2, 1};
  huge.lse_tensor.strides = strides;
  EXPECT_EQ(sqz_attend(session.handle(), &huge.args), SQZ_INVALID_ARGUMENT);
}

TEST_F(Engine, SlotsAreFilledAndEmptied) {
  ASSERT_NO_FATAL_FAILURE(write_other(testing::c_index_options()));
  const runtime::Index index(path()), other(other_path());
  runtime::Session session(index, testing::held_budget(0.2));
  const sqz_context second = {1, 0, 0}, none = {-1, 0, 0};
  Call call(3), expected(3);
  call.args.contexts = &second;
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_INVALID_ARGUMENT);  // empty
  for (const int64_t slot : {-1, SQZ_MOST_SLOTS}) {
    EXPECT_EQ(sqz_session_put(session.handle(), slot, other.handle()), SQZ_INVALID_ARGUMENT);
  }
  session.put(1, other);
  session.attend(call.args);
  runtime::Session(other, testing::held_budget(0.2)).attend(expected.args);
  EXPECT_EQ(call.out, expected.out);
  session.put(1, index);  // in its place
  session.attend(call.args);
  session.attend(expected.args);
  EXPECT_EQ(call.out, expected.out);
  EXPECT_EQ(session.stats(0, 1).selections, 1u);
  EXPECT_EQ(session.select(call.args, 2).size(), 2u);
  session.empty(1);
  session.empty(77);
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_session_put(nullptr, 0, other.handle()), SQZ_INVALID_ARGUMENT);
  // A session without any index serves requests without a context.
  session.empty(0);
  call.args.contexts = &none;
  session.attend(call.args);
  EXPECT_EQ(call.out, std::vector<float>(call.out.size(), 0.0f));
  EXPECT_EQ(call.lse, std::vector<float>(call.lse.size(), -INFINITY));
  EXPECT_THROW(session.select(call.args, 2), runtime::Error);
}

// Calls wait for each other, and those that fill and empty slots with them.
TEST_F(Engine, SlotsChangeWhileOthersAreServed) {
  ASSERT_NO_FATAL_FAILURE(write_other(testing::c_index_options()));
  const runtime::Index index(path()), other(other_path());
  runtime::Session session(index, testing::held_budget(0.2));
  Call expected(2), of_other(2);
  session.attend(expected.args);
  runtime::Session(other, testing::held_budget(0.2)).attend(of_other.args);
  std::atomic<bool> stop = false;
  std::atomic<int> served = 0;
  std::vector<std::thread> threads;
  for (const int32_t slot : {0, 0, 1}) {
    threads.emplace_back([&, slot] {
      const sqz_context context = {slot, 0, 0};
      while (!stop) {
        Call call(2);
        call.args.contexts = &context;
        const sqz_status status = sqz_attend(session.handle(), &call.args);
        if (slot == 1 && status == SQZ_INVALID_ARGUMENT) continue;  // it is empty
        EXPECT_EQ(status, SQZ_OK) << sqz_last_error();
        EXPECT_EQ(call.out, (slot == 0 ? expected : of_other).out);
        ++served;
      }
    });
  }
  for (int i = 0; i < 6 || served < 10; ++i) {
    session.put(1, other);
    std::this_thread::yield();
    session.empty(1);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Engine, IndexesOfOneSessionAreOfOneModel) {
  testing::TinyIndexOptions options = testing::c_index_options();
  options.query_heads = 8;
  options.kv_heads = 4;
  ASSERT_NO_FATAL_FAILURE(write_other(options));
  const runtime::Index index(path()), other(other_path());
  runtime::Session session(index, testing::held_budget(0.2));
  EXPECT_EQ(sqz_session_put(session.handle(), 1, other.handle()), SQZ_MISMATCH);
  EXPECT_NE(std::strstr(sqz_last_error(), "other.sqz"), nullptr) << sqz_last_error();
  options = testing::c_index_options();
  options.clusters = {250};
  ASSERT_NO_FATAL_FAILURE(write_other(options));
  const runtime::Index one_level(other_path());
  const double thresholds[] = {0.01, 0.02};
  auto given = make<sqz_session_options>();
  given.thresholds = thresholds;
  given.threads = 1;
  runtime::Session limits(index, given);
  EXPECT_EQ(sqz_session_put(limits.handle(), 1, one_level.handle()), SQZ_INVALID_ARGUMENT);
  limits.put(1, index);
}

// Neighbours with one context are served apart from the others, but a message counts all tokens.
TEST_F(Engine, MessagesNameTheTokenOfTheCall) {
  ASSERT_NO_FATAL_FAILURE(write_other(testing::c_index_options()));
  const runtime::Index index(path()), other(other_path());
  runtime::Session session(index, testing::held_budget(0.2));
  session.put(1, other);
  const int64_t indptr[] = {0, 2, 3}, positions[] = {5000, 5001, 10};
  const sqz_context contexts[] = {{0, 0, 0}, {1, 0, 0}};
  for (const int64_t layer : {0, 1}) {
    Call call(3, 1, layer);
    call.args.indptr = indptr;
    call.args.requests = 2;
    call.args.contexts = contexts;
    call.args.positions = positions;
    if (layer == 0) std::fill(call.q.end() - 64, call.q.end(), 3e38f);
    EXPECT_NE(sqz_attend(session.handle(), &call.args), SQZ_OK);
    const char* const place = layer == 0 ? "token 2" : "positions[2]";
    EXPECT_NE(std::strstr(sqz_last_error(), place), nullptr) << sqz_last_error();
  }
}

// Each request is checked, also where its neighbour has the same index at the same place.
TEST_F(Engine, AnIndexServesBehindWhatItWasMadeAfterInEveryRequest) {
  testing::TinyIndexOptions options = testing::c_index_options();
  options.windows = {};
  ASSERT_NO_FATAL_FAILURE(write_other(options));
  const std::string behind = directory_->file("behind.sqz"), third = directory_->file("third.sqz");
  options.tokens_hash = "00000000000000cc";
  ASSERT_TRUE(testing::write_tiny_index(third, options).ok());
  options.after = {"00000000000000bb"};
  ASSERT_TRUE(testing::write_tiny_index(behind, options).ok());
  const runtime::Index front(other_path()), after(behind), another(third);
  auto held = testing::held_budget(0.2);
  held.max_contexts = 2;
  runtime::Session session(front, held);
  session.put(1, after);
  session.put(2, another);
  Call call(2);
  const int64_t indptr[] = {0, 1, 2};
  call.args.indptr = indptr;
  call.args.requests = 2;
  call.args.contexts_each = 2;
  const sqz_context right[] = {{0, 0, 0}, {1, 0, 5000}, {0, 0, 0}, {1, 0, 5000}};
  call.args.contexts = right;
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_OK) << sqz_last_error();
  const sqz_context wrong[] = {{0, 0, 0}, {1, 0, 5000}, {2, 0, 0}, {1, 0, 5000}};
  call.args.contexts = wrong;
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_MISMATCH);
  const sqz_context far[] = {{0, 0, 0}, {1, 0, INT64_MIN}, {0, 0, 0}, {1, 0, 5000}};
  call.args.contexts = far;
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_INVALID_ARGUMENT);
}

// Queries are turned back by the offset, and states merged: tests/python has that against float64.
TEST_F(Engine, ContextsThatCannotFollowOneAnother) {
  testing::TinyIndexOptions options = testing::c_index_options();
  options.windows = {};
  ASSERT_NO_FATAL_FAILURE(write_other(options));
  const runtime::Index index(path()), plain(other_path());
  auto held = testing::held_budget(0.2);
  held.max_contexts = 3;
  runtime::Session session(plain, held);
  const auto refused = [&](sqz_session* in, sqz_context context, sqz_status status) {
    Call call(1);
    call.args.contexts = &context;
    EXPECT_EQ(sqz_attend(in, &call.args), status) << sqz_last_error();
  };
  refused(session.handle(), {0, 17, 0}, SQZ_INVALID_ARGUMENT);  // 16 sinks
  refused(session.handle(), {0, -1, 0}, SQZ_INVALID_ARGUMENT);
  refused(runtime::Session(plain, testing::held_budget(0.2)).handle(), {0, 0, 5},
          SQZ_INVALID_ARGUMENT);                                                // no max_contexts
  refused(runtime::Session(index, held).handle(), {0, 0, 5}, SQZ_UNSUPPORTED);  // windows
  const sqz_context none_of_four[] = {{-1, 0, 0}, {-1, 0, 0}, {-1, 0, 0}, {-1, 0, 0}};
  Call many(1);
  many.args.contexts = none_of_four;
  many.args.contexts_each = 4;
  EXPECT_EQ(sqz_attend(session.handle(), &many.args), SQZ_INVALID_ARGUMENT);
  held.max_contexts = 9;
  sqz_session* none = nullptr;
  EXPECT_EQ(sqz_session_create(plain.handle(), &held, &none), SQZ_INVALID_ARGUMENT);
}

// So many rows that their keys are cut into longer parts than the shortest.
TEST_F(Engine, RanksGiveTheBitsOfTheWholeOnLargeCalls) {
  const runtime::Index index(path());
  auto options = runtime::dense_options();
  runtime::Session session(index, options);
  constexpr int64_t kTokens = 1000;
  Call whole(kTokens);
  session.attend(whole.args);
  for (const int64_t head : {0, 1}) {
    options.first_kv_head = head;
    options.kv_heads = 1;
    runtime::Session rank(index, options);
    Call part(kTokens);
    part.out_shape[1] = part.lse_shape[1] = 2;
    const auto own = [&](const std::vector<float>& all, int64_t i) -> float {
      return all[i / 32 * 64 + head * 32 + i % 32];
    };
    for (int64_t i = 0; i < kTokens * 32; ++i) part.q[i] = own(whole.q, i);
    rank.attend(part.args);
    for (int64_t i = 0; i < kTokens * 32; ++i) ASSERT_EQ(part.out[i], own(whole.out, i)) << i;
  }
}

TEST_F(Engine, RangesOfKvHeadsAreChecked) {
  const runtime::Index index(path());
  for (const auto& [first, count] :
       {std::pair(-1, 1), std::pair(2, 0), std::pair(0, 3), std::pair(1, 2), std::pair(0, -1)}) {
    auto options = testing::held_budget(0.2);
    options.first_kv_head = first;
    options.kv_heads = count;
    sqz_session* session = nullptr;
    EXPECT_EQ(sqz_session_create(index.handle(), &options, &session), SQZ_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(sqz_last_error(), "2 KV heads"), nullptr) << sqz_last_error();
  }
}

// Every U32 tensor of the index filled with random numbers, in place. Floats stay, since one that
// is NaN ends a call before it follows an offset.
void rewrite_integers(const std::string& path, uint32_t most) {
  const auto file = SqzFile::open(path, OpenMode::kRead);
  ASSERT_TRUE(file.ok()) << file.status().message();
  testing::Random random(most);
  FILE* out = std::fopen(path.c_str(), "r+");
  ASSERT_NE(out, nullptr);
  int rewritten = 0;
  for (const TensorInfo& tensor : (*file)->header().tensors) {
    if (tensor.dtype != DType::kU32) continue;
    std::fseek(out, static_cast<long>(tensor.offset), SEEK_SET);
    for (uint64_t i = 0; i < tensor.bytes / 4; ++i) {
      const auto value = static_cast<uint32_t>(random.below(most));
      std::fwrite(&value, 4, 1, out);
    }
    ++rewritten;
  }
  EXPECT_GT(rewritten, 1);
  std::fclose(out);
}

// SQZ_OPEN_READ has no need of the file any more.
TEST_F(Engine, AnIndexThatIsCutWhileItServes) {
  ASSERT_NO_FATAL_FAILURE(write_other(testing::c_index_options()));
  const runtime::Index index(other_path(), SQZ_OPEN_READ);
  runtime::Session session(index, testing::held_budget(0.3));
  Call before(3), after(3);
  session.attend(before.args);
  std::filesystem::resize_file(other_path(), 100);
  session.attend(after.args);
  EXPECT_EQ(after.out, before.out);
  runtime::Session another(index, testing::held_budget(0.2));
  another.attend(after.args);
  EXPECT_EQ(sqz_index_verify(index.handle()), SQZ_OK) << sqz_last_error();
}

// A mapped index that is rewritten in place while it serves: AddressSanitizer looks on.
TEST_F(Engine, AnIndexRewrittenWhileItServes) {
  testing::TinyIndexOptions clusters = testing::c_index_options();
  clusters.heavy_hitters = true;
  clusters.windows = {};
  testing::TinyIndexOptions pages = clusters;
  pages.clusters = {};
  pages.page_size = 16;
  pages.heavy_hitters = false;
  for (const auto& options : {clusters, pages}) {
    ASSERT_NO_FATAL_FAILURE(write_other(options));
    const runtime::Index index(other_path());
    const sqz_selector selectors[] = {SQZ_SELECTOR_AUTO, SQZ_SELECTOR_H2O, SQZ_SELECTOR_STREAM};
    std::vector<runtime::Session> sessions;
    for (const sqz_selector selector : selectors) {
      if (selector == SQZ_SELECTOR_H2O && options.page_size > 0) continue;
      auto held = testing::held_budget(0.3);
      held.selector = selector;
      held.rule = selector == SQZ_SELECTOR_AUTO && options.page_size == 0 ? SQZ_RULE_BUDGET : 0;
      sessions.emplace_back(index, held);
    }
    for (const uint32_t most : {1000u, UINT32_MAX}) {
      rewrite_integers(other_path(), most);
      for (runtime::Session& session : sessions) {
        for (const int64_t tokens : {1, 40}) {
          Call call(tokens);
          const sqz_status status = sqz_attend(session.handle(), &call.args);
          EXPECT_TRUE(status == SQZ_OK || status == SQZ_NUMERIC) << sqz_last_error();
        }
      }
      for (const sqz_selector selector : selectors) {  // sessions made afterwards
        auto held = testing::held_budget(0.3);
        held.selector = selector;
        sqz_session* session = nullptr;
        if (sqz_session_create(index.handle(), &held, &session) == SQZ_OK) {
          Call call(2);
          (void)sqz_attend(session, &call.args);
        }
        sqz_session_destroy(session);
      }
    }
  }
}

}  // namespace
}  // namespace sqz
