#include "tools/sqz_bench/kmeans_points.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "formats/capture.h"

namespace sqz::bench {

int64_t cluster_count(const Options& options, int64_t points) {
  return std::clamp<int64_t>(std::llround(options.kmeans_fraction * static_cast<double>(points)), 1,
                             points);
}

KmeansPoints random_points(const Options& options) {
  KmeansPoints out;
  out.heads = options.kmeans_heads > 0 ? options.kmeans_heads : 256;
  out.points = options.tokens_or(131072);
  out.dim = options.head_dim;
  out.clusters = cluster_count(options, out.points);
  out.origin = "random";
  std::mt19937_64 random(options.seed);
  std::normal_distribution<float> normal;
  std::vector<BFloat16>& row = out.rows.emplace_back(static_cast<size_t>(out.points * out.dim));
  for (BFloat16& x : row) x = to_bfloat16(normal(random));
  return out;
}

Result<KmeansPoints> captured_points(const Options& options) {
  SQZ_ASSIGN_OR_RETURN(const auto capture, CaptureReader::open(options.capture));
  const CaptureInfo& info = capture->info();
  const auto tokens = static_cast<int64_t>(info.tokens.size());
  KmeansPoints out;
  out.points = options.tokens_or(tokens);
  if (out.points > tokens) {
    return Status(Code::kInvalidArgument,
                  bad_field("options", "--tokens", concat(out.points),
                            concat("at most ", tokens, ", which ", options.capture, " has")));
  }
  out.dim = info.model.head_dim;
  out.clusters = cluster_count(options, out.points);
  out.origin = options.capture;
  for (int64_t layer = 0; layer < info.model.layers; ++layer) {
    SQZ_ASSIGN_OR_RETURN(const CapturedLayer data, capture->read_layer(layer));
    for (int64_t head = 0; head < info.model.kv_heads; ++head) {
      const auto first = data.keys.begin() + head * tokens * out.dim;
      std::vector<BFloat16>& row = out.rows.emplace_back();
      std::transform(first, first + out.points * out.dim, std::back_inserter(row),
                     [](float x) { return to_bfloat16(x); });
    }
  }
  out.heads = options.kmeans_heads > 0 ? options.kmeans_heads : std::ssize(out.rows);
  return out;
}

}  // namespace sqz::bench
