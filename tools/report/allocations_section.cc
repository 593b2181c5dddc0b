#include <algorithm>

#include "formats/layers_file.h"
#include "tools/report/sections.h"
#include "tools/report/svg_plot.h"

namespace sqz {
namespace {

void add_selector(const std::string& name, std::span<const MeasuredAllocations* const> measured,
                  HtmlPage& page) {
  Plot by_budget;
  by_budget.title = "Loss against budget, selector " + name;
  by_budget.x_label = "delivered budget";
  by_budget.y_label = "loss above dense, nats a token";
  Plot by_p;
  by_p.title = "Loss against p, selector " + name;
  by_p.x_label = "p: share of the budget that group 2 keeps";
  by_p.y_label = by_budget.y_label;
  bool groups = false;
  std::vector<std::vector<std::string>> lines;
  for (const MeasuredAllocations* one : measured) {
    for (const MeasuredCandidate& candidate : one->candidates) {
      const double loss = candidate.loss - one->dense_loss;
      by_budget.add(candidate.name, {candidate.delivered, loss, 0});
      if (candidate.allocation != kAllocationMeasured) {
        groups |= candidate.allocation == kAllocationGroups;
        by_p.add(concat("budget ", one->budget), {candidate.p, loss, 0});
      }
      lines.push_back({candidate.name, concat(one->budget), fixed_text(candidate.delivered, 4),
                       fixed_text(candidate.loss, 4), fixed_text(loss, 4),
                       fixed_text(candidate.gain, 4), fixed_text(candidate.gain_error, 4)});
    }
  }
  by_budget.sort();
  by_p.sort();
  page.subheading("Layer budgets on held-out text: " + name);
  page.figure(plot_svg(by_budget), "Each spread of the budget over the layers, at equal totals.");
  if (groups) {
    page.figure(plot_svg(by_p), "p = 1 is every layer alike; less goes to groups 0 and 1.");
  }
  page.table({"allocation", "asked", "delivered", "loss", "above dense", "gain on uniform", "±"},
             lines);
}

}  // namespace

void add_allocations_section(std::span<const MeasuredAllocations> measured, HtmlPage& page) {
  std::vector<std::string> names;
  const auto name_of = [](const MeasuredAllocations& one) {
    return one.selector + ", rule " + one.rule;
  };
  for (const MeasuredAllocations& one : measured) {
    if (std::find(names.begin(), names.end(), name_of(one)) == names.end()) {
      names.push_back(name_of(one));
    }
  }
  for (const std::string& name : names) {
    std::vector<const MeasuredAllocations*> own;
    for (const MeasuredAllocations& one : measured) {
      if (name_of(one) == name) own.push_back(&one);
    }
    add_selector(name, own, page);
  }
}

}  // namespace sqz
