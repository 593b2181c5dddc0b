// A tiny index, written, opened and ready for sessions, with queries that look for some of its
// keys.
#pragma once

#include <gtest/gtest.h>

#include "libruntime/session/session.h"
#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/libruntime/random_data.h"
#include "tests/libruntime/reference.h"

namespace sqz::testing {

struct Served {
  TinyIndexOptions options;
  std::shared_ptr<const ServedIndex> index;

  int64_t group() const { return options.query_heads / options.kv_heads; }
  double scale() const { return index->metadata().model.attention_scale; }
};

inline Served serve(const TinyIndexOptions& options) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("tiny.sqz");
  must(write_tiny_index(path, options));
  return {options, must(make_served_index(must(SqzFile::open(path, OpenMode::kRead))))};
}

// [tokens, Hq, d]: noise, with part of some stored key, so that few clusters matter to a query.
inline std::vector<float> make_queries(const Served& served, int64_t layer, int64_t tokens,
                                       uint64_t seed, float strength = 1.0f) {
  const TinyIndexOptions& o = served.options;
  const LayerView& view = served.index->layers[layer];
  Random random(seed);
  std::vector<float> q = random.normals(tokens * o.query_heads * o.head_dim);
  for (int64_t row = 0; row < tokens * o.query_heads && view.slots > 0; ++row) {
    const int64_t head = row % o.query_heads / served.group();
    const int64_t key = head * view.slots + random.below(view.slots);
    for (int64_t c = 0; c < o.head_dim; ++c) {
      q[row * o.head_dim + c] += strength * static_cast<float>(reference::element(
                                                view.dtype, view.keys, key * o.head_dim + c));
    }
  }
  return q;
}

// The results of a call, as float32.
struct Output {
  std::vector<float> out;  // [T, Hq, d]
  std::vector<float> lse;  // [T, Hq]
  bool operator==(const Output&) const = default;
};

struct CallOptions {
  DType dtype = DType::kF32;
  std::vector<int64_t> positions;
  std::vector<int64_t> indptr;
};

inline AttendCall make_call(int64_t layer, int64_t tokens, const void* q,
                            const CallOptions& options) {
  AttendCall call;
  call.layer = layer;
  call.tokens = tokens;
  call.dtype = options.dtype;
  call.q = q;
  call.positions = options.positions.empty() ? nullptr : options.positions.data();
  call.indptr = options.indptr.empty() ? nullptr : options.indptr.data();
  call.requests = options.indptr.empty() ? 0 : std::ssize(options.indptr) - 1;
  return call;
}

inline Result<Output> attend(Session& session, int64_t layer, const std::vector<float>& queries,
                             const CallOptions& options = {}) {
  const ModelDescription& model = session.index().metadata().model;
  const int64_t row = model.query_heads * model.head_dim;
  const int64_t tokens = std::ssize(queries) / row;
  const std::vector<std::byte> q = stored(options.dtype, queries);
  std::vector<std::byte> out(q.size(), std::byte{0xff});
  Output output;
  output.lse.assign(tokens * model.query_heads, std::nanf(""));
  AttendCall call = make_call(layer, tokens, q.data(), options);
  call.out = out.data();
  call.lse = output.lse.data();
  SQZ_RETURN_IF_ERROR(session.attend(call));
  for (int64_t i = 0; i < tokens * row; ++i) {
    output.out.push_back(static_cast<float>(reference::element(options.dtype, out.data(), i)));
  }
  return output;
}

// The numbers that a query tensor of this dtype holds.
inline std::vector<float> rounded(DType dtype, std::vector<float> values) {
  const std::vector<std::byte> bytes = stored(dtype, values);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        static_cast<float>(reference::element(dtype, bytes.data(), static_cast<int64_t>(i)));
  }
  return values;
}

}  // namespace sqz::testing
