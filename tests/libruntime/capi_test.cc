// The C ABI as a host meets it: through libsqz.so, used rightly and wrongly.
#include <array>
#include <cstddef>
#include <cstring>
#include <latch>
#include <thread>

#include "tests/common/tiny_buckets.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/libruntime/c_index.h"

extern "C" int sqz_header_is_c99(void);

namespace sqz {
namespace {

using runtime::make;
using testing::Call;

class CApi : public testing::CIndexTest {
 protected:
  void SetUp() override { index_ = std::make_unique<runtime::Index>(path()); }

  sqz_status create(const sqz_session_options& options) {
    sqz_session* session = nullptr;
    const sqz_status status = sqz_session_create(index_->handle(), &options, &session);
    EXPECT_EQ(session != nullptr, status == SQZ_OK);
    sqz_session_destroy(session);
    return status;
  }

  std::unique_ptr<runtime::Index> index_;
};

TEST_F(CApi, HeaderIsC99) {
  EXPECT_EQ(sqz_header_is_c99(), 1);
}

TEST_F(CApi, OpenAndDescribe) {
  for (const sqz_open_mode mode : {SQZ_OPEN_MMAP, SQZ_OPEN_READ}) {
    const runtime::Index index(path(), mode);
    const sqz_index_info info = index.describe();
    EXPECT_EQ(info.tokens, 5000);
    EXPECT_EQ(info.sink, 16);
    EXPECT_EQ(info.tail, 100);
    EXPECT_EQ(info.layers, 2);
    EXPECT_EQ(info.query_heads, 4);
    EXPECT_EQ(info.kv_heads, 2);
    EXPECT_EQ(info.head_dim, 16);
    EXPECT_EQ(info.levels, 2);
    EXPECT_EQ(info.has_kv, 1);
    EXPECT_DOUBLE_EQ(info.attention_scale, 0.25);
    EXPECT_STREQ(info.architecture, "LlamaForCausalLM");
    EXPECT_STREQ(info.tokens_hash, "00000000000000bb");
    EXPECT_EQ(std::strlen(info.model_fingerprint), 16u);
    EXPECT_EQ(std::strncmp(info.producer, "sqz ", 4), 0);
    index.verify();
  }
}

// A flipped byte in any tensor is found when the file is opened, if that is asked for.
TEST_F(CApi, VerifyWhileOpening) {
  const testing::TemporaryDirectory dir;
  testing::TinyIndexOptions clusters, pages;
  clusters.heavy_hitters = clusters.key_calibration = pages.key_calibration = true;
  pages.page_size = 8;
  const std::string file = dir.file("a.sqz");
  ASSERT_TRUE(testing::write_tiny_index(file, clusters).ok());
  ASSERT_TRUE(testing::write_tiny_index(dir.file("b.sqz"), pages).ok());
  ASSERT_TRUE(testing::write_tiny_buckets(dir.file("c.sqz"), testing::tiny_qmodel(), 132).ok());
  for (const char* name : {"a.sqz", "b.sqz", "c.sqz"}) {
    std::string bytes = testing::read_file(dir.file(name));
    testing::write_file(file, bytes);
    const SafetensorsHeader header = (*SqzFile::open(file))->header();
    const runtime::Index whole(file, SQZ_OPEN_VERIFY);
    for (const TensorInfo& tensor : header.tensors) {
      if (tensor.name == "header.xxh3_128") continue;
      char& byte = bytes[static_cast<size_t>(tensor.offset + tensor.bytes / 2)];
      byte = static_cast<char>(byte ^ 1);
      testing::write_file(file, bytes);
      byte = static_cast<char>(byte ^ 1);
      const runtime::Index unchecked(file, SQZ_OPEN_READ);
      sqz_index* index = nullptr;
      EXPECT_EQ(sqz_index_open(file.c_str(), SQZ_OPEN_VERIFY, &index), SQZ_CORRUPT) << tensor.name;
      EXPECT_EQ(index, nullptr);
      EXPECT_NE(std::strstr(sqz_last_error(), file.c_str()), nullptr) << sqz_last_error();
      EXPECT_NE(std::strstr(sqz_last_error(), tensor.name.c_str()), nullptr) << sqz_last_error();
    }
  }
}

TEST_F(CApi, DescribeTellsTheElementType) {
  const testing::TemporaryDirectory dir;
  for (const auto& [dtype, code] : {std::pair(DType::kBF16, 4), std::pair(DType::kF16, 2)}) {
    testing::TinyIndexOptions options = testing::c_index_options();
    options.dtype = dtype;
    ASSERT_TRUE(testing::write_tiny_index(dir.file("index"), options).ok());
    const sqz_index_info info = runtime::Index(dir.file("index")).describe();
    EXPECT_EQ(info.dtype_code, code);
    EXPECT_EQ(info.dtype_bits, 16);
  }
}

TEST_F(CApi, OpenErrors) {
  const volatile int three = 3;  // C callers can pass anything
  sqz_index* index = reinterpret_cast<sqz_index*>(8);
  EXPECT_EQ(sqz_index_open("/nowhere/x.sqz", SQZ_OPEN_MMAP, &index), SQZ_NOT_FOUND);
  EXPECT_EQ(index, nullptr) << "a failed open must not leave a wild handle";
  EXPECT_NE(std::strstr(sqz_last_error(), "/nowhere/x.sqz"), nullptr);
  EXPECT_EQ(sqz_index_open(nullptr, SQZ_OPEN_MMAP, &index), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_open(path().c_str(), SQZ_OPEN_MMAP, nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_open(path().c_str(), static_cast<sqz_open_mode>(three), &index),
            SQZ_INVALID_ARGUMENT);
  const std::string text = directory_->file("text");
  FILE* file = std::fopen(text.c_str(), "w");
  std::fputs("this is not an index, whatever its name", file);
  std::fclose(file);
  EXPECT_EQ(sqz_index_open(text.c_str(), SQZ_OPEN_READ, &index), SQZ_CORRUPT);
  EXPECT_EQ(sqz_index_describe(nullptr, nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_describe(index_->handle(), nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_verify(nullptr), SQZ_INVALID_ARGUMENT);
  sqz_index_close(nullptr);
  sqz_session_destroy(nullptr);
}

TEST_F(CApi, LastErrorBelongsToTheThread) {
  EXPECT_EQ(sqz_index_verify(nullptr), SQZ_INVALID_ARGUMENT);
  const std::string mine = sqz_last_error();
  EXPECT_FALSE(mine.empty());
  std::thread([] {
    EXPECT_STREQ(sqz_last_error(), "");
    EXPECT_EQ(sqz_index_open("/other", SQZ_OPEN_MMAP, nullptr), SQZ_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(sqz_last_error(), mine);
  EXPECT_STREQ(sqz_status_string(SQZ_OK), "ok");
  EXPECT_NE(sqz_status_string(static_cast<sqz_status>(15)), nullptr);
}

TEST_F(CApi, SelectorsHaveNamesAndNumbers) {
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_SQUEEZED), "squeezed");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_DENSE), "dense");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_QUEST), "quest");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_IDEAL), "ideal");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_STREAM), "stream");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_WINDOW), "window");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_H2O), "h2o");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_SAAP), "saap");
  EXPECT_STREQ(sqz_selector_name(SQZ_SELECTOR_KMEANS), "kmeans");
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
      {[](auto& o) { o.rule = 3; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.rule = SQZ_RULE_MASS; }, SQZ_INVALID_ARGUMENT},      // a budget
      {[](auto& o) { o.mass = 0.5; }, SQZ_INVALID_ARGUMENT},                // both
      {[](auto& o) { o.budget = 0, o.mass = 0.5; }, SQZ_INVALID_ARGUMENT},  // another rule
      {[](auto& o) { o.budget = 0, o.mass = 1.5, o.rule = 2; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.budget = 0, o.mass = 0.5, o.rule = 2, o.group = 1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.budget = 0, o.mass = 0.5, o.rule = 2, o.device_type = 2; }, SQZ_UNSUPPORTED},
      {[](auto& o) { o.group = 3; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.group = -1; }, SQZ_INVALID_ARGUMENT},
      {[](auto& o) { o.residual = 3; }, SQZ_INVALID_ARGUMENT},
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

TEST_F(CApi, OlderAndNewerStructs) {
  auto options = runtime::options_for_budget(0.125);
  options.threads = 1 << 20;  // refused if it is read
  EXPECT_EQ(create(options), SQZ_INVALID_ARGUMENT);
  options.struct_size = offsetof(sqz_session_options, threads);
  EXPECT_EQ(create(options), SQZ_OK) << sqz_last_error();

  struct Newer {
    sqz_session_options known;
    uint64_t unknown;
  } newer = {runtime::options_for_budget(0.125), 0};
  newer.known.struct_size = sizeof(newer);
  EXPECT_EQ(create(newer.known), SQZ_OK) << sqz_last_error();
  newer.unknown = 1;
  EXPECT_EQ(create(newer.known), SQZ_UNSUPPORTED);

  // Results fill what the caller has, and no more.
  unsigned char room[sizeof(sqz_index_info) + 16];
  std::memset(room, 0xee, sizeof(room));
  auto* info = reinterpret_cast<sqz_index_info*>(room);
  info->struct_size = offsetof(sqz_index_info, sink);
  EXPECT_EQ(sqz_index_describe(index_->handle(), info), SQZ_OK);
  EXPECT_EQ(info->tokens, 5000);
  EXPECT_EQ(room[offsetof(sqz_index_info, sink)], 0xee);
  info->struct_size = sizeof(room);
  EXPECT_EQ(sqz_index_describe(index_->handle(), info), SQZ_OK);
  EXPECT_EQ(info->sink, 16);
  EXPECT_EQ(info->struct_size, sizeof(room));
  EXPECT_EQ(room[sizeof(room) - 1], 0);
}

TEST_F(CApi, StructSizesOfNoVersionAreRefused) {
  auto info = make<sqz_index_info>();
  info.struct_size = 0xcdcdcdcd;  // as memory is that nobody set
  EXPECT_EQ(sqz_index_describe(index_->handle(), &info), SQZ_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(sqz_last_error(), "struct_size"), nullptr);
  auto options = testing::held_budget(0.2);
  options.struct_size = 1u << 30;
  EXPECT_EQ(create(options), SQZ_INVALID_ARGUMENT);
}

TEST_F(CApi, ShapesWhoseProductsOverflow) {
  runtime::Session session(*index_, testing::held_budget(0.2));
  const int64_t huge = int64_t{1} << 62;
  int64_t strides[] = {huge, huge, 1};
  Call call(3);
  call.q_tensor.strides = strides;
  for (const auto& shape : {std::array{huge, huge, huge}, std::array{int64_t{0}, huge, huge}}) {
    std::copy(shape.begin(), shape.end(), call.out_shape);
    std::copy_n(shape.begin(), 2, call.lse_shape);
    EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_INVALID_ARGUMENT);
    sqz_session* none[] = {nullptr};  // any shape of q will do
    call.args.sessions = none;
    const sqz_status status = sqz_attend(nullptr, &call.args);
    EXPECT_EQ(status, shape[0] == 0 ? SQZ_OK : SQZ_INVALID_ARGUMENT);
    call.args.sessions = nullptr;
  }
}

TEST_F(CApi, AttendRefusesWrongCalls) {
  auto options = runtime::options_for_budget(0.125);
  options.max_tokens = 8;
  options.threads = 1;
  runtime::Session session(*index_, options);
  using Change = void (*)(Call&);
  static int64_t strides[3] = {64, 16, 2};
  static int64_t decreasing[] = {0, 3, 2, 5}, late[] = {1, 5}, short_of[] = {0, 4};
  static int64_t beyond[] = {0, 6, 5};
  const std::pair<Change, sqz_status> bad[] = {
      {[](Call& c) { c.args.layer = 2; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.layer = -1; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.layer = 1; }, SQZ_INVALID_ARGUMENT},  // window without positions
      {[](Call& c) { c.args.q = nullptr; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.out = nullptr; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.lse = nullptr; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.struct_size = 4; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.stream = &c; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) {
         static const sqz_kv_cache cache = make<sqz_kv_cache>();
         c.args.cache = &cache;
       },
       SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q_tensor.data = nullptr; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q_tensor.shape = nullptr; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q_tensor.ndim = 2; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q_tensor.device_type = 2; }, SQZ_UNSUPPORTED},
      {[](Call& c) { c.q_tensor.device_type = 0; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q_tensor.dtype_bits = 64; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q_tensor.dtype_code = 0; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q_tensor.dtype_lanes = 4; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q_tensor.dtype_bits = 16; }, SQZ_INVALID_ARGUMENT},  // unlike out
      {[](Call& c) { c.q_tensor.strides = strides; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q_tensor.byte_offset = 2; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.out_shape[2] = 8; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.out_shape[1] = 2; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.out_shape[0] = 9; }, SQZ_INVALID_ARGUMENT},  // max_tokens
      {[](Call& c) { c.out_shape[0] = -1; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.lse_shape[0] = 4; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.lse_tensor.dtype_bits = 16; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.out_tensor.data = c.q.data(); }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.lse_tensor.data = c.out.data() + 5 * 64 - 1; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.requests = 2; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) {
         c.args.indptr = decreasing;
         c.args.requests = 3;
       },
       SQZ_INVALID_ARGUMENT},
      {[](Call& c) {
         c.args.indptr = late;
         c.args.requests = 1;
       },
       SQZ_INVALID_ARGUMENT},
      {[](Call& c) {
         c.args.indptr = short_of;
         c.args.requests = 1;
       },
       SQZ_INVALID_ARGUMENT},
      {[](Call& c) {
         c.args.indptr = beyond;
         c.args.requests = 2;
       },
       SQZ_INVALID_ARGUMENT},
      {[](Call& c) {
         c.args.indptr = late;
         c.args.requests = 0;
       },
       SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.q[3 * 64 + 2 * 16 + 5] = NAN; }, SQZ_NUMERIC}};
  for (const auto& [change, status] : bad) {
    Call call(5);
    change(call);
    EXPECT_EQ(sqz_attend(session.handle(), &call.args), status)
        << "case " << &change - &bad[0].first;
  }
  Call call(5);
  EXPECT_EQ(sqz_attend(nullptr, &call.args), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_attend(session.handle(), nullptr), SQZ_INVALID_ARGUMENT);
  // After all these errors the session still serves, and nothing was counted.
  EXPECT_EQ(session.stats().selections, 0u);
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_OK) << sqz_last_error();
  EXPECT_EQ(session.stats().selections, 1u);
}

TEST_F(CApi, RequestsLongerThanTheSessionTakes) {
  auto options = runtime::options_for_budget(0.125);
  options.max_request_tokens = 2;
  const runtime::Session session(*index_, options);
  Call call(5);
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_INVALID_ARGUMENT);
  EXPECT_STREQ(
      sqz_last_error(),
      "q: found 5 tokens of request 0, expected at most 2, the session's max_request_tokens");
  int64_t indptr[] = {0, 2, 5};
  call.args.indptr = indptr;
  call.args.requests = 2;
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(sqz_last_error(), "3 tokens of request 1"), nullptr) << sqz_last_error();
  int64_t short_ones[] = {0, 2, 3, 5};
  call.args.indptr = short_ones;
  call.args.requests = 3;
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_OK) << sqz_last_error();
  // A caller of the time before the field: what is in its place is not the session's business.
  options.struct_size = offsetof(sqz_session_options, max_request_tokens);
  const runtime::Session older(*index_, options);
  call.args.indptr = nullptr;
  call.args.requests = 0;
  EXPECT_EQ(sqz_attend(older.handle(), &call.args), SQZ_OK) << sqz_last_error();
}

TEST_F(CApi, UploadSaysWhyItCannot) {
  auto options = make<sqz_upload_options>();
  options.device_id = 1000;
  EXPECT_EQ(sqz_index_upload(nullptr, &options), SQZ_INVALID_ARGUMENT);
  // No GPU of this number, no GPU at all, or no CUDA in this library.
  EXPECT_EQ(sqz_index_upload(index_->handle(), &options), SQZ_UNSUPPORTED);
  EXPECT_NE(std::strstr(sqz_last_error(), "device_type 2 (CUDA): "), nullptr) << sqz_last_error();
  options.threads = 257;
  EXPECT_EQ(sqz_index_upload(index_->handle(), &options), SQZ_INVALID_ARGUMENT);
  options.struct_size = 0;
  EXPECT_EQ(sqz_index_upload(index_->handle(), &options), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_unload(nullptr, 0), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_unload(index_->handle(), 0), SQZ_INVALID_ARGUMENT);
}

TEST_F(CApi, NoTokensIsNoWork) {
  runtime::Session session(*index_, runtime::options_for_budget(0.125));
  Call call(0);
  session.attend(call.args);
  EXPECT_EQ(session.stats().selections, 0u);
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

TEST_F(CApi, StatsOfAMass) {
  auto options = make<sqz_session_options>();
  options.rule = SQZ_RULE_MASS;
  options.mass = 0.6;
  options.threads = 1;
  for (const int32_t residual : {SQZ_RESIDUAL_DROP, SQZ_RESIDUAL_ESTIMATE}) {
    options.residual = residual;
    runtime::Session session(*index_, options);
    EXPECT_EQ(session.stats().estimated_mass, 0);
    Call call(1, 3);
    session.attend(call.args);
    const sqz_stats stats = session.stats();
    EXPECT_EQ(stats.asked_mass, 0.6);
    EXPECT_EQ(stats.asked_budget, 0);
    EXPECT_GE(stats.estimated_mass, 0.6);
    EXPECT_LT(stats.estimated_mass, 1);
    EXPECT_LT(stats.delivered_budget, 1);
    const bool known = residual == SQZ_RESIDUAL_ESTIMATE;
    EXPECT_EQ(stats.delivered_mass > 0, known);
    const double delivered = known ? stats.delivered_mass : 1;
    EXPECT_EQ(stats.estimated_error, 1 - std::min(stats.estimated_mass, delivered));
  }
}

TEST_F(CApi, SelectTellsTheRuns) {
  runtime::Session session(*index_, testing::held_budget(0.2));
  Call call(3);
  call.args.out = nullptr;
  call.args.lse = nullptr;
  const auto heads = session.select(call.args, 2);
  ASSERT_EQ(heads.size(), 2u);
  EXPECT_EQ(session.stats().selections, 0u);
  Call attended(3);
  session.attend(attended.args);
  uint64_t keys = 0;
  for (const auto& runs : heads) {
    for (const sqz_run& run : runs) keys += run.length;
  }
  EXPECT_EQ(keys, session.stats(0).keys_read);
  EXPECT_GT(keys, 0u);

  int64_t indptr[3] = {}, count = 0;
  sqz_run one;
  EXPECT_EQ(sqz_select(session.handle(), &call.args, &one, 1, indptr, &count),
            SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(count, static_cast<int64_t>(heads[0].size() + heads[1].size()));
  EXPECT_EQ(sqz_select(session.handle(), &call.args, nullptr, 1, indptr, &count),
            SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_select(session.handle(), &call.args, &one, 1, nullptr, &count),
            SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_select(session.handle(), &call.args, &one, 1, indptr, nullptr),
            SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_select(session.handle(), nullptr, &one, 1, indptr, &count), SQZ_INVALID_ARGUMENT);
}

TEST_F(CApi, ThreeKindsOfQueriesAgree) {
  runtime::Session session(*index_, runtime::dense_options());
  Call call(5);
  session.attend(call.args);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    Call half(5);
    std::vector<std::byte> q = testing::stored(dtype, half.q), out(q.size());
    half.q_tensor.data = q.data();
    half.out_tensor.data = out.data();
    half.q_tensor.dtype_bits = half.out_tensor.dtype_bits = 16;
    half.q_tensor.dtype_code = half.out_tensor.dtype_code = dtype == DType::kBF16 ? 4 : 2;
    session.attend(half.args);
    for (size_t i = 0; i < half.lse.size(); ++i) EXPECT_NEAR(half.lse[i], call.lse[i], 0.02);
  }
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

// Damaged offsets are not found at open (that reads the header alone) but before they are used.
TEST_F(CApi, DamagedOffsetsAreRefusedAtSessionCreation) {
  const auto file = SqzFile::open(path());
  ASSERT_TRUE(file.ok());
  for (const char* level : {"1", "2"}) {
    const TensorInfo* offsets =
        (*file)->header().find(std::string("layers.0.level.") + level + ".offsets");
    ASSERT_NE(offsets, nullptr);
    const int64_t entries = offsets->shape[0] * offsets->shape[1];
    for (const int64_t entry : {int64_t{0}, int64_t{7}, offsets->shape[1] - 1, entries - 1}) {
      for (const uint32_t value : {uint32_t{0xffffffff}, uint32_t{4885}, uint32_t{1}}) {
        const std::string damaged = directory_->file("damaged.sqz");
        std::filesystem::copy_file(path(), damaged,
                                   std::filesystem::copy_options::overwrite_existing);
        FILE* stream = std::fopen(damaged.c_str(), "r+b");
        std::fseek(stream, static_cast<long>(offsets->offset) + 4 * entry, SEEK_SET);
        std::fwrite(&value, 4, 1, stream);
        std::fclose(stream);
        const runtime::Index index(damaged);
        const auto options = runtime::options_for_budget(0.2);
        sqz_session* session = nullptr;
        EXPECT_EQ(sqz_session_create(index.handle(), &options, &session), SQZ_CORRUPT)
            << "level " << level << " entry " << entry << " value " << value;
        EXPECT_NE(std::strstr(sqz_last_error(), "offsets"), nullptr) << sqz_last_error();
        EXPECT_EQ(sqz_index_verify(index.handle()), SQZ_CORRUPT);
      }
    }
  }
}

}  // namespace
}  // namespace sqz
