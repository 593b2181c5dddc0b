#include "tools/report/allocations.h"

#include "formats/json_fields.h"
#include "formats/layers_file.h"
#include "tools/report/svg_plot.h"

namespace sqz {
namespace {

Result<MeasuredCandidate> candidate_of(const JsonValue& row, const std::string& label) {
  JsonFields fields(row, label);
  MeasuredCandidate out;
  out.allocation = out.name = fields.text("allocation");
  out.p = fields.number("p", 0, 1);
  const double strength = fields.number("strength", 0, kMostPlotted);
  out.loss = fields.number("loss", -kMostPlotted, kMostPlotted);
  out.gain = fields.number("gain", -kMostPlotted, kMostPlotted);
  out.gain_error = fields.number("gain_stderr", 0, kMostPlotted);
  out.delivered = fields.number("delivered", 0, kMostPlotted);
  if (out.allocation == kAllocationGroups) out.name = concat("groups, p = ", out.p);
  if (out.allocation == kAllocationMeasured && strength != 1) {
    out.name = concat("measured, strength ", strength);
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  return out;
}

}  // namespace

Result<MeasuredAllocations> measured_allocations(const JsonValue& measured,
                                                 const std::string& label) {
  JsonFields fields(measured, label);
  MeasuredAllocations out;
  out.selector = fields.text("selector");
  out.rule = fields.text("rule");
  out.budget = fields.number("budget", 0, 1);
  out.dense_loss = fields.number("dense_loss", -kMostPlotted, kMostPlotted);
  const JsonValue* sweep = fields.array("sweep");
  SQZ_RETURN_IF_ERROR(fields.status());
  for (size_t i = 0; i < sweep->size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(MeasuredCandidate candidate,
                         candidate_of((*sweep)[i], concat(label, ": sweep[", i, "]")));
    out.candidates.push_back(std::move(candidate));
  }
  return out;
}

}  // namespace sqz
