// What the case `kmeans` clusters, on the CPU and on a GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/base/dtype.h"
#include "libindex/kmeans.h"
#include "tools/sqz_bench/cases.h"

namespace sqz::bench {

inline constexpr int kIterations = 10;

struct KmeansPoints {
  int64_t heads = 0;  // of the problem; more than there are in `rows` take turns with these
  int64_t points = 0, dim = 0, clusters = 0;
  std::string origin;                       // for people
  std::vector<std::vector<BFloat16>> rows;  // [some heads][points, dim]

  const std::vector<BFloat16>& row(int64_t head) const {
    return rows[static_cast<size_t>(head) % rows.size()];
  }
  JsonMembers shape() const;
  // Multiplications and additions of so many assignments of one head.
  double flop(int assignments) const;
};

// Keys of the layers of --capture, one head after another, whole or their first --tokens; else on a
// GPU Gaussian numbers, the same in every head (clusters differ, as every head has its own seed);
// else the keys of a made-up index. --kmeans-heads, or as many as the capture has, or 256 on a GPU,
// or 2. --kmeans-fraction of the points are clusters, at least one.
Result<KmeansPoints> kmeans_points(const Options& options);

// The first `heads` heads by an engine, from host memory and back.
Contender engine_contender(std::shared_ptr<KmeansEngine> engine, const KmeansPoints& points,
                           int64_t heads, const Options& options);

}  // namespace sqz::bench
