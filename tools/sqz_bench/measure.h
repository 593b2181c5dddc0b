// Timing: contenders of one case take turns, round by round, so that whatever else the machine does
// hits all of them alike; what is compared is always of the same round.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "formats/base/json.h"
#include "formats/base/status.h"

namespace sqz::bench {

struct Contender {
  std::string name;
  std::function<Status(int64_t round)> run;  // what is timed
  double bytes = 0;                          // that a run reads; 0 = no such figure
  double flop = 0;                           // multiplications and additions; 0 = no such figure
  double part = 1;  // of the case's work that a run does; comparisons take it into account
  // Fields for its row, asked for after the last round. Of "bytes_read" and "flop", those of a run,
  // rates are made.
  std::function<JsonMembers()> details = {};
  std::function<double()> seconds =
      {};  // that the last run took, by a clock of the contender's own
};

struct Spread {
  double least = 0, median = 0, p90 = 0;
};
// Of at least one value; p90 is the value that 90 % do not exceed.
Spread spread_of(std::vector<double> values);

struct Measured {
  std::vector<std::vector<double>> seconds;  // [contender][round]
};
// One round that is not counted, then `rounds`. `step` is called after every run.
Result<Measured> measure(const std::vector<Contender>& contenders, int64_t rounds,
                         const std::function<void()>& step);

// How many times faster than `baseline` contender `of` was: the median over rounds of the ratio
// within a round.
double times_faster(const Measured& measured, size_t of, size_t baseline);

}  // namespace sqz::bench
