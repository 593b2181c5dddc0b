// A small index whose layers are of every kind, with state in two of them.
#pragma once

#include <string>
#include <vector>

#include "libindex/builder.h"
#include "tests/common/tiny_model.h"
#include "tests/libruntime/random_data.h"

namespace sqz::testing {

// Full with narrower values, sliding, state, shared, chunked with heads of its own, none.
inline ModelDescription layered_model() {
  ModelDescription model = tiny_model(6, 4, 2, 8);
  model.sliding_window[1] = 9;
  std::vector<LayerGeometry> layers;
  for (int64_t l = 0; l < model.layers; ++l) layers.push_back(model.layer(l));
  layers[0].value_dim = 6;
  layers[2].kind = LayerKind::kState;
  layers[3] = layers[0];
  layers[3].kind = LayerKind::kShared;
  layers[3].of = 0;
  layers[4] = {.kind = LayerKind::kRecent,
               .query_heads = 8,
               .kv_heads = 4,
               .head_dim = 4,
               .value_dim = 5,
               .attention_scale = 0.75,
               .chunk = 10};
  layers[5].kind = LayerKind::kNone;
  model.geometry = layers;
  return model;
}

inline std::vector<std::vector<StateTensor>> layered_state() {
  static const float conv[] = {1, -2, INFINITY, 4, 5, NAN};
  static const int64_t steps[] = {47, -1};
  static const uint16_t ssm[] = {1, 2, 3};
  std::vector<std::vector<StateTensor>> out(6);
  out[0] = {{"ssm", DType::kBF16, {1, 3}, ssm}};
  out[2] = {{"steps", DType::kI64, {2}, steps}, {"conv", DType::kF32, {2, 3}, conv}};
  return out;
}

constexpr int64_t kLayeredTokens = 47;

struct LayeredRows {
  std::vector<float> keys, values, queries;
};
// Of the last `tokens` tokens; queries of `tail`.
inline LayeredRows layered_rows(const LayerGeometry& own, int64_t layer, int64_t tokens,
                                int64_t tail) {
  const auto rows = [&](int64_t dim, uint64_t seed) {
    std::vector<float> out;
    for (int64_t h = 0; h < own.kv_heads; ++h) {
      const auto all = Random(100 * seed + static_cast<uint64_t>(h)).normals(kLayeredTokens * dim);
      out.insert(out.end(), all.end() - tokens * dim, all.end());
    }
    return out;
  };
  const auto seed = static_cast<uint64_t>(layer);
  return {rows(own.head_dim, seed), rows(own.value_dim, 10 + seed),
          Random(20 + seed).normals(own.query_heads * tail * own.head_dim)};
}

// The recent layers get all tokens, or those alone that they store.
inline Status write_layered_index(const std::string& path, BuildOptions options = {},
                                  bool all_tokens = true) {
  options.sink = 2;
  options.tail = 5;
  options.level_fractions = {0.1, 0.3};
  options.iterations = 2;
  options.threads = 1;
  options.engine = "faiss";
  options.state = layered_state();
  const ModelDescription model = layered_model();
  const std::vector<int32_t> ids(kLayeredTokens, 3);
  SQZ_ASSIGN_OR_RETURN(const auto builder,
                       IndexBuilder::create(Env::posix(), path, true, model, ids, "", options));
  for (int64_t l = 0; l < model.layers; ++l) {
    const LayerGeometry own = model.layer(l);
    for (const StateTensor& state : options.state[static_cast<size_t>(l)]) {
      SQZ_RETURN_IF_ERROR(builder->add_state(l, state));
    }
    if (!own.has_keys()) continue;
    const int64_t unseen = all_tokens ? 0 : own.first_seen(kLayeredTokens);
    const auto rows = layered_rows(own, l, kLayeredTokens - unseen, options.tail);
    SQZ_RETURN_IF_ERROR(
        builder->add_layer(l, {.keys = rows.keys, .values = rows.values, .queries = rows.queries}));
  }
  return builder->finish().status();
}

}  // namespace sqz::testing
