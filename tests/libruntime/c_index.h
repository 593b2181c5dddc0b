// A tiny index on disk for tests of the C ABI, and a call with its tensors.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "sqz/sqz.hpp"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/libruntime/random_data.h"

namespace sqz::testing {

// 5000 tokens: long enough not to fall back to dense. Layer 1 has a sliding window.
inline TinyIndexOptions c_index_options() {
  TinyIndexOptions o;
  o.layers = 2;
  o.query_heads = 4;
  o.kv_heads = 2;
  o.head_dim = 16;
  o.tokens = 5000;
  o.sink = 16;
  o.tail = 100;
  o.clusters = {50, 250};
  o.windows = {{1, 300}};
  return o;
}

// By the rule `budget`, because the tiny index's thresholds are made up and may keep nothing.
inline sqz_session_options held_budget(double budget) {
  auto options = runtime::options_for_budget(budget);
  options.rule = SQZ_RULE_BUDGET;
  options.threads = 2;
  return options;
}

class CIndexTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    directory_ = std::make_unique<TemporaryDirectory>();
    const auto written = write_tiny_index(path(), c_index_options());
    ASSERT_TRUE(written.ok()) << written.status().message();
  }
  static void TearDownTestSuite() { directory_.reset(); }
  static std::string path() { return directory_->file("tiny.sqz"); }

  static inline std::unique_ptr<TemporaryDirectory> directory_;
};

// A session is created over index_, which is open.
class CApi : public CIndexTest {
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

// q, out and lse of a call with T tokens of f32.
struct Call {
  explicit Call(int64_t tokens, uint64_t seed = 1, int64_t layer = 0)
      : q(Random(seed).normals(tokens * 4 * 16)),
        out(q.size()),
        lse(static_cast<size_t>(tokens * 4)),
        out_shape{tokens, 4, 16},
        lse_shape{tokens, 4},
        q_tensor(runtime::f32_tensor(q.data(), out_shape, 3)),
        out_tensor(runtime::f32_tensor(out.data(), out_shape, 3)),
        lse_tensor(runtime::f32_tensor(lse.data(), lse_shape, 2)),
        args(runtime::make<sqz_attend_args>()) {
    args.layer = layer;
    args.q = &q_tensor;
    args.out = &out_tensor;
    args.lse = &lse_tensor;
  }
  Call(const Call&) = delete;

  std::vector<float> q, out, lse;
  int64_t out_shape[3], lse_shape[2];
  sqz_tensor q_tensor, out_tensor, lse_tensor;
  sqz_attend_args args;
};

}  // namespace sqz::testing
