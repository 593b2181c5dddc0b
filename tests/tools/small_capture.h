// A capture of random keys, for tools that build from one.
#pragma once

#include <functional>
#include <random>
#include <string>

#include "tests/common/capture_file.h"
#include "tests/common/tiny_model.h"

namespace sqz {

inline ModelDescription small_model() {
  return testing::tiny_model(2, 4, 2, 16);
}

inline std::vector<float> noise(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = normal(random);
  return out;
}

using CaptureChange = std::function<void(CaptureInfo&, CapturedLayer&)>;

// `tokens` random keys and the queries of the last `queries` tokens.
inline void write_small_capture(const std::string& path, int64_t tokens, int64_t queries,
                                const CaptureChange& change = {}) {
  CaptureInfo info;
  info.model = small_model();
  for (int64_t i = 0; i < tokens; ++i) info.tokens.push_back(static_cast<int32_t>(i % 1000));
  for (int64_t i = tokens - queries; i < tokens; ++i) info.query_positions.push_back(i);
  CapturedLayer unused;
  if (change) change(info, unused);
  std::mt19937 random(1);
  const ModelDescription& model = info.model;
  testing::write_capture(path, info, [&](int64_t) {
    CapturedLayer data;
    data.keys = noise(model.kv_heads * tokens * model.head_dim, random);
    data.values = noise(model.kv_heads * tokens * model.head_dim, random);
    data.queries = noise(model.query_heads * queries * model.head_dim, random);
    if (change) change(info, data);
    return data;
  });
}

}  // namespace sqz
