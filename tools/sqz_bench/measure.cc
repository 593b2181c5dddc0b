#include "tools/sqz_bench/measure.h"

#include <algorithm>
#include <cmath>

#include "formats/base/stopwatch.h"
#include "tools/common/signals.h"

namespace sqz::bench {

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  const auto p90 = static_cast<size_t>(std::ceil(0.9 * static_cast<double>(n))) - 1;
  return {values.front(), (values[(n - 1) / 2] + values[n / 2]) / 2, values[p90]};
}

Result<Measured> measure(const std::vector<Contender>& contenders, int64_t rounds,
                         const std::function<void()>& step) {
  Measured measured;
  measured.seconds.resize(contenders.size());
  for (int64_t round = -1; round < rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      if (stop_requested()) return Status(Code::kCancelled, "stopped");
      const Stopwatch watch;
      SQZ_RETURN_IF_ERROR(contenders[i].run(std::max<int64_t>(round, 0)));
      const double passed = watch.seconds();
      const double seconds = contenders[i].seconds ? contenders[i].seconds() : passed;
      if (round >= 0) measured.seconds[i].push_back(seconds);
      step();
    }
  }
  return measured;
}

double times_faster(const Measured& measured, size_t of, size_t baseline) {
  std::vector<double> ratios;
  for (size_t round = 0; round < measured.seconds[of].size(); ++round) {
    ratios.push_back(measured.seconds[baseline][round] / measured.seconds[of][round]);
  }
  return spread_of(std::move(ratios)).median;
}

}  // namespace sqz::bench
