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
                                                   SessionOptions options = {}) {
  options.selection = selection;
  auto session = create_session(served.index, uploaded(served), options);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return session.ok() ? std::move(*session) : nullptr;
}

// A session of each backend over one index.
struct Backends {
  const Served& served;
  std::unique_ptr<ServingSession> gpu;
  std::unique_ptr<Session> cpu;

  Backends(const Served& index, const SelectionRequest& selection, int64_t block = 0,
           bool sm80_kernels = false)
      : served(index) {
    SessionOptions options;
    options.selection = selection;
    options.block = block;
    options.sm80_kernels = sm80_kernels;
    options.threads = 4;
    gpu = gpu_session(served, selection, options);
    auto on_cpu = Session::create(served.index, options);
    EXPECT_TRUE(on_cpu.ok()) << on_cpu.status().message();
    if (on_cpu.ok()) cpu = std::move(*on_cpu);
  }
  explicit operator bool() const { return gpu != nullptr && cpu != nullptr; }
};

using Lengths = std::vector<int64_t>;  // tokens of the requests of a call

inline Lengths single_tokens(int64_t requests) {
  return Lengths(static_cast<size_t>(requests), 1);
}

// A call on the GPU whose memory stays, so that it can be made again with other queries. lse is
// [heads, tokens] if the number of tokens is even.
class DeviceCall {
 public:
  DeviceCall(const Served& served, int64_t layer, const Lengths& lengths, DType dtype)
      : DeviceCall(LayerGeometry{.query_heads = served.options.query_heads,
                                 .head_dim = served.options.head_dim,
                                 .value_dim = served.options.head_dim},
                   layer, lengths, dtype) {}
  DeviceCall(const LayerGeometry& shape, int64_t layer, const Lengths& lengths, DType dtype)
      : options_{.dtype = dtype, .positions = {}, .indptr = {0}},
        tokens_(std::accumulate(lengths.begin(), lengths.end(), int64_t{0})),
        row_(shape.query_heads * shape.value_dim),
        q_(static_cast<size_t>(tokens_ * shape.query_heads * shape.head_dim * dtype_size(dtype))),
        out_(static_cast<size_t>(tokens_ * row_ * dtype_size(dtype))),
        lse_(static_cast<size_t>(tokens_ * shape.query_heads)) {
    for (const int64_t length : lengths) options_.indptr.push_back(options_.indptr.back() + length);
    call = testing::make_call(layer, tokens_, q_.get(), options_);
    call.out = out_.get();
    const int64_t heads = shape.query_heads;
    call.query_heads = heads;
    call.head_dim = shape.head_dim;
    call.value_dim = shape.value_dim;
    const bool turned = tokens_ % 2 == 0;
    call.lse = {lse_.get(), heads, turned ? 1 : heads, turned ? tokens_ : 1};
  }
  DeviceCall(const DeviceCall&) = delete;

  void set_queries(const std::vector<float>& queries, cudaStream_t stream = nullptr) {
    host_q_ = testing::stored(options_.dtype, queries);
    EXPECT_EQ(
        cudaMemcpyAsync(q_.get(), host_q_.data(), host_q_.size(), cudaMemcpyHostToDevice, stream),
        cudaSuccess);
  }
  Output output() const {
    Output output;
    const std::vector<std::byte> out = out_.host();
    for (int64_t i = 0; i < tokens_ * row_; ++i) {
      output.out.push_back(static_cast<float>(reference::element(options_.dtype, out.data(), i)));
    }
    const std::vector<float> lse = lse_.host();
    const LseRows& rows = call.lse;
    for (int64_t r = 0; r < std::ssize(lse); ++r) {
      output.lse.push_back(lse[static_cast<size_t>(&rows[r] - rows.data)]);
    }
    return output;
  }
  const CallOptions& options() const { return options_; }  // for the same call on the CPU

 private:
  CallOptions options_;
  int64_t tokens_, row_;  // row_: of out
  DeviceArray<std::byte> q_, out_;
  DeviceArray<float> lse_;
  std::vector<std::byte> host_q_;

 public:
  AttendCall call;
};

// How far results may be apart: rows of `out` and all of them, relative to their lengths, and
// log-sum-exps, absolutely or relatively.
struct Limits {
  double row = 2e-3, all = 2e-3, lse = 1e-3, relative_lse = 0, lse_slack = 0;
};

// Weights are rounded to the type of the values before they meet them, and so is the result: each
// by up to 2^-9 in bf16. Rows of a single heavy key see both in full.
inline constexpr Limits kRoundedRows = {6e-3, 3e-3, 1e-3, 1e-4};

inline void expect_within(const Limits& limits, const Output& found, const Output& expected,
                          int64_t dim) {
  ASSERT_EQ(found.out.size(), expected.out.size());
  ASSERT_EQ(found.lse.size(), expected.lse.size());
  double all_errors = 0, all_lengths = 0;
  for (size_t row = 0; row < found.lse.size(); ++row) {
    const double lse = expected.lse[row];
    if (std::isinf(lse)) {
      ASSERT_EQ(found.lse[row], lse) << "row " << row;
    } else {
      const double limit = std::max(limits.lse, limits.relative_lse * std::abs(lse));
      ASSERT_NEAR(found.lse[row], lse, limit + limits.lse_slack) << "row " << row;
    }
    double error = 0, length = 0;
    for (int64_t c = 0; c < dim; ++c) {
      const size_t i = row * static_cast<size_t>(dim) + static_cast<size_t>(c);
      error += std::pow(double{found.out[i]} - expected.out[i], 2);
      length += std::pow(double{expected.out[i]}, 2);
    }
    ASSERT_LE(std::sqrt(error), limits.row * std::sqrt(length)) << "row " << row;
    all_errors += error;
    all_lengths += length;
  }
  EXPECT_LE(std::sqrt(all_errors), limits.all * std::sqrt(all_lengths));
}
inline void expect_close(const Output& found, const Output& expected, int64_t dim) {
  expect_within({}, found, expected, dim);
}
inline void expect_rows_close(const Output& found, const Output& expected, int64_t dim) {
  expect_within(kRoundedRows, found, expected, dim);
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

// The call twice: the second must not disturb the first.
inline Captured captured(ServingSession& session, AttendCall call) {
  return Captured([&](cudaStream_t stream) {
    call.stream = stream;
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(session.attend(call).ok());
  });
}

class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

}  // namespace sqz::cuda::test
