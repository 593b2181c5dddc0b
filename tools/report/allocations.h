// What sqz-profile-layers measured of spreads of a budget over the layers: the `measured` of a
// layer profile, and of the tool's result.
#pragma once

#include <string>
#include <vector>

#include "formats/base/json.h"
#include "formats/base/status.h"

namespace sqz {

struct MeasuredCandidate {
  std::string name;  // "uniform", "groups, p = 0.7", "measured", "measured, strength 0.5"
  std::string allocation;
  double p = 1;
  double loss = 0;                  // nats a token
  double gain = 0, gain_error = 0;  // uniform's loss less this one; its standard error
  double delivered = 0;             // budget
};

struct MeasuredAllocations {
  std::string selector, rule;
  double budget = 0;  // asked for
  double dense_loss = 0;
  std::vector<MeasuredCandidate> candidates;
};

// `label` opens the message of what is no such object: kCorrupt, with field, found and expected.
Result<MeasuredAllocations> measured_allocations(const JsonValue& measured,
                                                 const std::string& label);

}  // namespace sqz
