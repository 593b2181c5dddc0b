// Calls through the C ABI, used rightly and wrongly.
#include <array>
#include <cstddef>
#include <cstring>

#include "tests/libruntime/c_index.h"

namespace sqz {
namespace {

using runtime::make;
using testing::Call;
using testing::CApi;

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
  }
}

TEST_F(CApi, AttendRefusesWrongCalls) {
  auto options = runtime::options_for_budget(0.125);
  options.max_tokens = 8;
  options.threads = 1;
  runtime::Session session(*index_, options);
  using Change = void (*)(Call&);
  static int64_t strides[3] = {64, 16, 2};
  const std::pair<Change, sqz_status> bad[] = {
      {[](Call& c) { c.args.layer = 2; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.layer = -1; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.layer = 1; }, SQZ_INVALID_ARGUMENT},  // window without positions
      {[](Call& c) { c.args.q = nullptr; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.out = nullptr; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.lse = nullptr; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.struct_size = 4; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.stream = &c; }, SQZ_INVALID_ARGUMENT},
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
      {[](Call& c) { c.args.q_before_rope = &c.lse_tensor; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { c.args.requests = 2; }, SQZ_INVALID_ARGUMENT},
      {[](Call& c) { std::fill(c.q.begin(), c.q.end(), 3e38f); }, SQZ_NUMERIC}};
  for (const auto& [change, status] : bad) {
    Call call(5);
    change(call);
    EXPECT_EQ(sqz_attend(session.handle(), &call.args), status)
        << "case " << &change - &bad[0].first;
  }
  Call call(5);
  for (const std::vector<int64_t>& indptr :
       {std::vector<int64_t>{0, 3, 2, 5}, {1, 5}, {0, 4}, {0, 6, 5}, {0}}) {
    call.args.indptr = indptr.data();
    call.args.requests = std::ssize(indptr) - 1;
    EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_INVALID_ARGUMENT);
  }
  call.args.indptr = nullptr;
  call.args.requests = 0;
  EXPECT_EQ(sqz_attend(nullptr, &call.args), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_attend(session.handle(), nullptr), SQZ_INVALID_ARGUMENT);
  call.q_tensor.dtype_code = 9;
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(sqz_last_error(), "code 9: 32 with 1 lane"), nullptr) << sqz_last_error();
  call.q_tensor.dtype_code = 0;
  EXPECT_EQ(sqz_attend(session.handle(), &call.args), SQZ_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(sqz_last_error(), "int32 with 1 lane"), nullptr) << sqz_last_error();
  call.q_tensor.dtype_code = 2;
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

TEST_F(CApi, TheStrideOfASingleTokenSaysNothing) {
  runtime::Session session(*index_, runtime::options_for_budget(0.125));
  int64_t strides[] = {12345, 16, 1}, of_lse[] = {-1, 1};
  Call call(1);
  call.q_tensor.strides = call.out_tensor.strides = strides;
  call.lse_tensor.strides = of_lse;
  session.attend(call.args);
}

TEST_F(CApi, TensorsMayTouch) {
  runtime::Session session(*index_, runtime::options_for_budget(0.125));
  Call call(3);
  const size_t size = call.q.size();
  for (const auto& [q, out] : {std::pair(size_t{0}, size), {size, size_t{0}}}) {
    std::vector<float> both(2 * size + call.lse.size());
    std::copy(call.q.begin(), call.q.end(), both.begin() + static_cast<std::ptrdiff_t>(q));
    call.q_tensor.data = &both[q];
    call.out_tensor.data = &both[out];
    call.lse_tensor.data = &both[2 * size];
    session.attend(call.args);
  }
}

TEST_F(CApi, NoTokensIsNoWork) {
  runtime::Session session(*index_, runtime::options_for_budget(0.125));
  Call call(0);
  session.attend(call.args);
  EXPECT_EQ(session.stats().selections, 0u);
}

TEST_F(CApi, SelectNeedsRoomForTheRuns) {
  runtime::Session session(*index_, testing::held_budget(0.2));
  Call call(3);
  call.args.out = nullptr;
  call.args.lse = nullptr;
  const auto heads = session.select(call.args, 2);
  ASSERT_EQ(heads.size(), 2u);
  EXPECT_EQ(session.stats().selections, 0u);
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

}  // namespace
}  // namespace sqz
