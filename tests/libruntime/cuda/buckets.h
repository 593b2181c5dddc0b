// An index of buckets with a query classifier on both backends, and calls that tell what queries
// were before RoPE.
#pragma once

#include <functional>
#include <utility>

#include "formats/base/dtype.h"
#include "libruntime/rope.h"
#include "tests/common/tiny_buckets.h"
#include "tests/libruntime/cuda/serving.h"

namespace sqz::cuda::test {

inline constexpr int64_t kBucketTokens = 4321;  // of the context

// Buckets and hidden units that fill tiles, and that do not.
inline constexpr std::pair<int64_t, int64_t> kNetworkSizes[] = {
    {2, 1}, {3, 7}, {8, 33}, {203, 300}, {1024, 1024}, {1101, 900}, {64, 1500}};

struct NetworkShape {
  int64_t dim = 128, group = 4, heads = 3, buckets = 53, hidden = 64, empty = 1;
  bool rounded = true;  // weights are float16 numbers, so that both backends have the same ones
};

inline void scale(std::vector<float>& weights, double by, bool rounded) {
  for (float& w : weights) {
    w = static_cast<float>(w * by);
    if (rounded) w = to_float(to_float16(w));
  }
}

inline QmodelFile network(const NetworkShape& s) {
  testing::TinyQmodelOptions o;
  o.query_heads = s.heads * s.group;
  o.kv_heads = s.heads;
  o.head_dim = s.dim;
  o.buckets = s.buckets;
  o.hidden = s.hidden;
  o.seed = static_cast<uint64_t>(s.dim + s.group + s.buckets);
  QmodelFile q = testing::tiny_qmodel(o);
  for (QmodelLayer& layer : q.layers) {
    scale(layer.hidden_weight, 1 / std::sqrt(static_cast<double>(s.dim)), s.rounded);
    scale(layer.output_weight, 2 / std::sqrt(static_cast<double>(s.hidden)), s.rounded);
  }
  return q;
}

inline Served serve_network(const QmodelFile& qmodel, int64_t empty = 1, bool even = false) {
  const testing::TemporaryDirectory dir;
  const auto written = testing::write_tiny_buckets(dir.file("x.sqz"), qmodel, kBucketTokens,
                                                   Env::posix(), empty, even);
  EXPECT_TRUE(written.ok()) << written.status().message();
  auto file = SqzFile::open(dir.file("x.sqz"), OpenMode::kRead);
  EXPECT_TRUE(file.ok()) << file.status().message();
  auto index = make_served_index(*file);
  EXPECT_TRUE(index.ok()) << index.status().message();
  Served served;
  served.index = *index;
  served.options.query_heads = qmodel.model.query_heads;
  served.options.kv_heads = qmodel.model.kv_heads;
  served.options.head_dim = qmodel.model.head_dim;
  return served;
}

inline Served serve_network(const NetworkShape& s) {
  return serve_network(network(s), s.empty);
}

inline SelectionRequest keep_buckets(double share) {
  SelectionRequest request;
  request.selector = SelectorKind::kSaap;
  request.keep = share;
  return request;
}

// Queries of tokens at positions kBucketTokens, kBucketTokens + 7, ...; [T, Hq, d] before RoPE and
// after it.
struct BucketQueries {
  std::vector<float> before, after;
  std::vector<int64_t> positions;
};

inline BucketQueries bucket_queries(const Served& served, int64_t tokens, uint64_t seed,
                                    float drift = 0) {
  const ModelDescription& model = served.index->metadata().model;
  const int64_t dim = model.head_dim, heads = model.query_heads;
  BucketQueries q;
  q.before = testing::Random(seed).normals(tokens * heads * dim);
  for (int64_t i = 0; i < std::ssize(q.before); ++i) {
    const bool last = i / (heads * dim) >= tokens / 2;
    q.before[static_cast<size_t>(i)] += (i % 2 == 0) == last ? drift : -drift;
  }
  q.after = q.before;
  const auto frequencies = rope_frequencies(model.rope, dim);
  for (int64_t row = 0; row < tokens * heads; ++row) {
    if (row % heads == 0) q.positions.push_back(kBucketTokens + 7 * (row / heads));
    float* x = q.after.data() + row * dim;
    for (int64_t i = 0; i < dim / 2; ++i) {
      const double angle = static_cast<double>(q.positions.back()) * double{frequencies[i]};
      const double a = x[i], b = x[i + dim / 2];
      x[i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
      x[i + dim / 2] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
    }
  }
  return q;
}

enum class Given { kBefore, kPositions };

// A call on both backends whose memory stays.
class BucketCalls {
 public:
  BucketCalls(const Served& served, const Lengths& lengths, DType dtype, Given given)
      : served_(served),
        dtype_(dtype),
        given_(given),
        gpu_(served, 1, lengths, dtype),
        before_(static_cast<size_t>(gpu_.call.tokens * row() * dtype_size(dtype))) {}

  void set(const BucketQueries& q, cudaStream_t stream = nullptr) {
    queries_ = q;
    host_q_ = testing::stored(dtype_, q.after);
    host_before_ = testing::stored(dtype_, q.before);
    gpu_.set_queries(q.after, stream);
    ASSERT_EQ(cudaMemcpyAsync(before_.get(), host_before_.data(), host_before_.size(),
                              cudaMemcpyHostToDevice, stream),
              cudaSuccess);
    if (given_ == Given::kBefore) gpu_.call.q_before_rope = before_.get();
    if (given_ == Given::kPositions) gpu_.call.positions = queries_.positions.data();
  }

  AttendCall& gpu() { return gpu_.call; }
  Output output() const { return gpu_.output(); }

  Output expected(Session& session) {
    const auto tokens = std::ssize(queries_.positions);
    std::vector<std::byte> out(host_q_.size());
    Output output;
    output.lse.resize(static_cast<size_t>(tokens * served_.options.query_heads));
    AttendCall call = cpu();
    call.out = out.data();
    call.lse = output.lse.data();
    const Status status = session.attend(call);
    EXPECT_TRUE(status.ok()) << status.message();
    for (int64_t i = 0; i < tokens * row(); ++i) {
      output.out.push_back(static_cast<float>(reference::element(dtype_, out.data(), i)));
    }
    return output;
  }
  AttendCall cpu() {
    AttendCall call = gpu_.call;
    call.q = host_q_.data();
    call.q_before_rope = given_ == Given::kBefore ? host_before_.data() : nullptr;
    return call;
  }

 private:
  int64_t row() const { return served_.options.query_heads * served_.options.head_dim; }

  const Served& served_;
  DType dtype_;
  Given given_;
  DeviceCall gpu_;
  DeviceArray<std::byte> before_;
  BucketQueries queries_;
  std::vector<std::byte> host_q_, host_before_;
};

// Sessions of both backends on one index of buckets, and what must be the same of the two.
using Close = void (*)(const Output& found, const Output& expected, int64_t dim);

struct BucketBackends : Backends {
  BucketBackends(const Served& index, double share, int64_t block = 0)
      : Backends(index, keep_buckets(share), block) {}

  // With the same queries: outputs, what is counted, and runs. Returns the share of the clustered
  // keys that were read.
  double compare(BucketCalls& calls, const BucketQueries& queries, Close close) {
    if (!*this) return 0;
    calls.set(queries);
    const Status status = gpu->attend(calls.gpu());
    EXPECT_TRUE(status.ok()) << status.message();
    const Output expected = calls.expected(*cpu);
    close(calls.output(), expected, served.options.head_dim);
    const auto found = gpu->totals(1);
    EXPECT_TRUE(found.ok()) << found.status().message();
    if (!found.ok()) return 0;
    expect_same_counters(*found, cpu->counters(1));
    EXPECT_TRUE(same_runs(runs_of(*gpu, calls.gpu()), runs_of(*cpu, calls.cpu())));
    return static_cast<double>(found->keys_read) / static_cast<double>(found->keys_possible);
  }

  // A graph of two calls, of which the second must not disturb the first, replayed with the queries
  // that it was captured with, with others, and then with the same again: the same bits. `calls`
  // are of `tokens` with `lists` selections.
  void replay(BucketCalls& calls, int64_t tokens, int64_t lists, Close close) {
    ASSERT_TRUE(bool{*this});
    calls.set(bucket_queries(served, tokens, 1));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the other stream does not wait for this one
    const Captured graph = captured(*gpu, calls.gpu());
    for (const uint64_t seed : {1, 2, 3}) {
      calls.set(bucket_queries(served, tokens, seed), graph.stream());
      graph.replay();
      close(calls.output(), calls.expected(*cpu), served.options.head_dim);
    }
    EXPECT_EQ(gpu->totals(1)->selections, static_cast<uint64_t>(3 * 2 * lists));
    const Output first = calls.output();
    for (int i = 0; i < 20; ++i) {
      graph.replay();
      ASSERT_EQ(calls.output(), first) << "the same bits again";
    }
  }

  // A NaN of a query that decides for the rows `is_lost(row)` is seen there and nowhere else; an
  // infinite query of the first block is an error where its selection is asked for.
  void lose(BucketCalls& calls, const BucketQueries& clean_queries, size_t element,
            const std::function<bool(size_t)>& is_lost) {
    ASSERT_TRUE(gpu != nullptr);
    calls.set(clean_queries);
    ASSERT_TRUE(gpu->attend(calls.gpu()).ok());
    const Output clean = calls.output();
    BucketQueries q = clean_queries;
    q.before[element] = NAN;
    calls.set(q);
    ASSERT_TRUE(gpu->attend(calls.gpu()).ok());
    const Output found = calls.output();
    for (size_t row = 0; row < found.lse.size(); ++row) {
      if (is_lost(row)) {
        ASSERT_TRUE(std::isnan(found.lse[row])) << row;
      } else {
        ASSERT_EQ(found.lse[row], clean.lse[row]) << row;
      }
    }
    q = clean_queries;
    q.before[0] = INFINITY;
    calls.set(q);
    EXPECT_EQ(gpu->select(calls.gpu()).status().code(), Code::kNumeric);
  }
};

}  // namespace sqz::cuda::test
