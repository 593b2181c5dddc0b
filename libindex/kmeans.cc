#include "libindex/kmeans.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>
#include <vector>

#include "formats/base/random.h"

namespace sqz {
namespace {

float dot(const float* a, const float* b, int64_t dim) {
  float sum = 0;
  for (int64_t c = 0; c < dim; ++c) sum += a[c] * b[c];
  return sum;
}

// The member farthest from `from` by cosine; the first of equals.
int32_t farthest(const float* unit, int64_t dim, const std::vector<int32_t>& members,
                 const float* from) {
  int32_t best = members.front();
  float lowest = dot(unit + best * dim, from, dim);
  for (int32_t i : members) {
    const float cosine = dot(unit + i * dim, from, dim);
    if (cosine < lowest) {
      lowest = cosine;
      best = i;
    }
  }
  return best;
}

// Members that leave for the new cluster: never none, never all.
std::vector<int32_t> cut(const float* unit, int64_t dim, std::vector<int32_t>& members) {
  std::vector<double> sum(static_cast<size_t>(dim), 0.0);
  for (int32_t i : members) {
    for (int64_t c = 0; c < dim; ++c) sum[c] += unit[i * dim + c];
  }
  const std::vector<float> centre(sum.begin(), sum.end());
  const float* a = unit + farthest(unit, dim, members, centre.data()) * dim;
  const float* b = unit + farthest(unit, dim, members, a) * dim;
  std::vector<int32_t> stay, leave;
  for (int32_t i : members) {
    const bool nearer_a = dot(unit + i * dim, a, dim) > dot(unit + i * dim, b, dim);
    (nearer_a ? leave : stay).push_back(i);
  }
  if (stay.empty() || leave.empty()) {
    const auto middle = members.begin() + static_cast<int64_t>(members.size() / 2);
    stay.assign(members.begin(), middle);
    leave.assign(middle, members.end());
  }
  members = std::move(stay);
  return leave;
}

}  // namespace

Result<std::unique_ptr<KmeansEngine>> make_kmeans_engine(const EngineChoice& choice) {
  if (choice.name == "faiss") return make_faiss_kmeans();
  if (choice.name != "auto" && choice.name != "cuda") {
    return Status(Code::kInvalidArgument,
                  bad_field("options", "engine", choice.name, "auto, faiss or cuda"));
  }
  auto engine = make_cuda_kmeans(choice.dim, choice.gpu);
  if (engine.ok()) return engine;
  if (choice.name == "auto") return make_faiss_kmeans();
  // The choice is wrong, not a file.
  const bool cannot = engine.status().code() == Code::kUnsupported;
  return Status(cannot ? Code::kInvalidArgument : engine.status().code(),
                engine.status().message());
}

uint64_t kmeans_seed(uint64_t seed, int64_t layer, int64_t head, int64_t level) {
  uint64_t state = Random(seed).next();
  for (int64_t part : {layer, head, level}) {
    state = Random(state ^ static_cast<uint64_t>(part)).next();
  }
  return state;
}

void normalise_rows(const float* points, int64_t count, int64_t dim, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float* row = points + i * dim;
    double square = 0;  // double: the square of a large float overflows
    for (int64_t c = 0; c < dim; ++c) square += double{row[c]} * row[c];
    const double inverse = square > 0 ? 1.0 / std::sqrt(square) : 0.0;
    for (int64_t c = 0; c < dim; ++c) out[i * dim + c] = static_cast<float>(row[c] * inverse);
  }
}

void refill_empty_clusters(const float* unit, int64_t count, int64_t dim, int64_t clusters,
                           int32_t* assignment) {
  std::vector<int64_t> sizes(static_cast<size_t>(clusters), 0);
  for (int64_t i = 0; i < count; ++i) ++sizes[assignment[i]];
  if (std::find(sizes.begin(), sizes.end(), 0) == sizes.end()) return;

  std::vector<std::vector<int32_t>> members(static_cast<size_t>(clusters));
  for (int64_t i = 0; i < count; ++i) members[assignment[i]].push_back(static_cast<int32_t>(i));
  std::priority_queue<std::pair<int64_t, int64_t>> largest;  // size, minus the cluster's number
  for (int64_t k = 0; k < clusters; ++k) largest.emplace(sizes[k], -k);

  for (int64_t empty = 0; empty < clusters; ++empty) {
    if (sizes[empty] != 0) continue;
    const int64_t donor = -largest.top().second;
    largest.pop();
    members[empty] = cut(unit, dim, members[donor]);
    for (int32_t i : members[empty]) assignment[i] = static_cast<int32_t>(empty);
    for (int64_t k : {donor, empty}) {
      largest.emplace(static_cast<int64_t>(members[k].size()), -k);
    }
  }
}

}  // namespace sqz
