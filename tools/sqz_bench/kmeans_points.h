// The points that the case `kmeans` clusters: made up, or keys of a capture.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "tools/sqz_bench/options.h"

namespace sqz::bench {

struct KmeansPoints {
  int64_t heads = 0;  // of the problem; more than there are in `rows` take turns with these
  int64_t points = 0, dim = 0, clusters = 0;
  std::string origin;                       // for people
  std::vector<std::vector<BFloat16>> rows;  // [some heads][points, dim]
};

// --kmeans-fraction of the points, at least one.
int64_t cluster_count(const Options& options, int64_t points);

// Gaussian numbers, the same in every head (clusters differ, as every head has its own seed). 256
// heads of 128K points by default.
KmeansPoints random_points(const Options& options);

// Keys of the layers of --capture, one head after another, whole or their first --tokens. As many
// heads as there are, or --kmeans-heads.
Result<KmeansPoints> captured_points(const Options& options);

}  // namespace sqz::bench
