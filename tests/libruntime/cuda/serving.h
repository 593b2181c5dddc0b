// A tiny index on the GPU and calls with device memory, beside the same on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "libruntime/cuda/backend.h"
#include "libruntime/session/session.h"
#include "tests/libindex/cuda/capability.h"
#include "tests/libindex/cuda/device.h"
#include "tests/libruntime/served_index.h"

namespace sqz::cuda::test {

using testing::CallOptions;
using testing::Output;
using testing::Served;

inline std::shared_ptr<DeviceIndex> uploaded(const Served& served) {
  auto index = upload_index(served.index, {.device = 0});
  EXPECT_TRUE(index.ok()) << index.status().message();
  return *index;
}

inline std::unique_ptr<ServingSession> gpu_session(const Served& served,
                                                   const SelectionRequest& selection,
                                                   int64_t max_tokens = 0) {
  SessionOptions options;
  options.selection = selection;
  options.max_tokens = max_tokens;
  auto session = create_session(served.index, uploaded(served), options);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return session.ok() ? std::move(*session) : nullptr;
}

inline std::unique_ptr<Session> cpu_session(const Served& served,
                                            const SelectionRequest& selection) {
  SessionOptions options;
  options.selection = selection;
  options.threads = 2;
  auto session = Session::create(served.index, options);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return session.ok() ? std::move(*session) : nullptr;
}

// One token a request.
inline std::vector<int64_t> single_tokens(int64_t requests) {
  std::vector<int64_t> indptr(static_cast<size_t>(requests) + 1);
  std::iota(indptr.begin(), indptr.end(), 0);
  return indptr;
}

// A call on the GPU whose memory stays, so that it can be made again with other queries. lse is
// [heads, tokens] if the number of tokens is even.
class DeviceCall {
 public:
  DeviceCall(const Served& served, int64_t layer, int64_t requests, DType dtype)
      : options_{.dtype = dtype, .positions = {}, .indptr = single_tokens(requests)},
        row_(served.options.query_heads * served.options.head_dim),
        q_(static_cast<size_t>(requests * row_ * dtype_size(dtype))),
        out_(q_.host().size()),
        lse_(static_cast<size_t>(requests * served.options.query_heads)) {
    call = testing::make_call(layer, requests, q_.get(), options_);
    call.out = out_.get();
    const int64_t heads = served.options.query_heads;
    const bool turned = requests % 2 == 0;
    call.lse = {lse_.get(), heads, turned ? 1 : heads, turned ? requests : 1};
  }

  void set_queries(const std::vector<float>& queries, cudaStream_t stream = nullptr) {
    host_q_ = testing::stored(options_.dtype, queries);
    EXPECT_EQ(
        cudaMemcpyAsync(q_.get(), host_q_.data(), host_q_.size(), cudaMemcpyHostToDevice, stream),
        cudaSuccess);
  }
  Output output() const {
    Output output;
    const std::vector<std::byte> out = out_.host();
    for (int64_t i = 0; i < call.tokens * row_; ++i) {
      output.out.push_back(static_cast<float>(reference::element(options_.dtype, out.data(), i)));
    }
    const std::vector<float> lse = lse_.host();
    const LseRows& rows = call.lse;
    for (int64_t r = 0; r < std::ssize(lse); ++r) {
      output.lse.push_back(lse[static_cast<size_t>(&rows[r] - rows.data)]);
    }
    return output;
  }

  AttendCall call;

 private:
  CallOptions options_;
  int64_t row_;
  DeviceArray<std::byte> q_, out_;
  DeviceArray<float> lse_;
  std::vector<std::byte> host_q_;
};

// Out within 2e-3 of each row's length, lse within 1e-3.
inline void expect_close(const Output& found, const Output& expected, int64_t dim) {
  ASSERT_EQ(found.out.size(), expected.out.size());
  ASSERT_EQ(found.lse.size(), expected.lse.size());
  for (size_t row = 0; row < found.lse.size(); ++row) {
    if (std::isinf(expected.lse[row])) {
      EXPECT_EQ(found.lse[row], expected.lse[row]) << "row " << row;
    } else {
      EXPECT_NEAR(found.lse[row], expected.lse[row], 1e-3) << "row " << row;
    }
    double error = 0, length = 0;
    for (int64_t c = 0; c < dim; ++c) {
      const size_t i = row * static_cast<size_t>(dim) + static_cast<size_t>(c);
      error += std::pow(double{found.out[i]} - expected.out[i], 2);
      length += std::pow(double{expected.out[i]}, 2);
    }
    EXPECT_LE(std::sqrt(error), 2e-3 * std::sqrt(length)) << "row " << row;
    if (::testing::Test::HasFailure()) return;
  }
}

// Weights are rounded to the type of the values before they meet them, and so is the result: each
// by up to 2^-9 in bf16. Rows of a single heavy key see both in full.
inline void expect_rows_within(const Output& found, const Output& expected, int64_t dim,
                               double lse_slack, double rounding) {
  ASSERT_EQ(found.out.size(), expected.out.size());
  double all_errors = 0, all_lengths = 0;
  for (size_t row = 0; row < found.lse.size(); ++row) {
    if (std::isinf(expected.lse[row])) {
      ASSERT_EQ(found.lse[row], expected.lse[row]) << "row " << row;
    } else {
      const double tolerance =
          1e-4 * rounding * std::max(10.0, std::abs(double{expected.lse[row]})) + lse_slack;
      ASSERT_NEAR(found.lse[row], expected.lse[row], tolerance) << "row " << row;
    }
    double error = 0, length = 0;
    for (int64_t c = 0; c < dim; ++c) {
      const size_t i = row * static_cast<size_t>(dim) + static_cast<size_t>(c);
      error += std::pow(double{found.out[i]} - expected.out[i], 2);
      length += std::pow(double{expected.out[i]}, 2);
    }
    ASSERT_LE(std::sqrt(error), 6e-3 * rounding * std::sqrt(length)) << "row " << row;
    all_errors += error;
    all_lengths += length;
  }
  EXPECT_LE(std::sqrt(all_errors), 3e-3 * rounding * std::sqrt(all_lengths));
}
inline void expect_rows_close(const Output& found, const Output& expected, int64_t dim) {
  expect_rows_within(found, expected, dim, 0, 1);
}

inline std::vector<std::vector<KeyRun>> runs_of(ServingSession& session, const AttendCall& call) {
  const auto heads = session.select(call);
  EXPECT_TRUE(heads.ok()) << heads.status().message();
  std::vector<std::vector<KeyRun>> out;
  if (!heads.ok()) return out;
  for (const HeadSelection& head : *heads) {
    const auto read = head.read.runs();
    out.emplace_back(read.begin(), read.end());
  }
  return out;
}

inline void expect_same_counters(const Counters& found, const Counters& expected) {
  EXPECT_EQ(found.selections, expected.selections);
  EXPECT_EQ(found.keys_read, expected.keys_read);
  EXPECT_EQ(found.keys_possible, expected.keys_possible);
  EXPECT_EQ(found.bytes_read, expected.bytes_read);
  EXPECT_EQ(found.bytes_dense, expected.bytes_dense);
}

inline bool same_runs(const std::vector<std::vector<KeyRun>>& a,
                      const std::vector<std::vector<KeyRun>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), [](KeyRun r, KeyRun s) {
      return r.first == s.first && r.length == s.length;
    });
  });
}

}  // namespace sqz::cuda::test
