#include "tools/report/sections.h"
#include "tools/report/svg_plot.h"

namespace sqz {
namespace {

constexpr int kGroups = 3;

Plot cosine_plot(const LayersFile& layers) {
  Plot plot;
  plot.title = "Cosine by layer";
  plot.x_label = "layer";
  plot.y_label = "cosine";
  plot.whole_x = true;
  for (int group = 0; group < kGroups; ++group) {
    plot.series.push_back({concat("group ", group), Mark::kDots, {}});
  }
  for (size_t l = 0; l < layers.cosine.size(); ++l) {
    plot.series[static_cast<size_t>(layers.group[l])].points.push_back(
        {static_cast<double>(l), layers.cosine[l], layers.cosine_error[l]});
  }
  return plot;
}

}  // namespace

void add_budgets(std::span<const int64_t> budget, int64_t uniform, HtmlPage& page) {
  Plot plot;
  plot.title = "Budgets by layer";
  plot.x_label = "layer";
  plot.y_label = "keys";
  plot.whole_x = true;
  plot.series = {{"budget", Mark::kBars, {}}};
  for (size_t l = 0; l < budget.size(); ++l) {
    plot.series[0].points.push_back({static_cast<double>(l), static_cast<double>(budget[l]), 0});
  }
  plot.levels = {{"every layer alike", static_cast<double>(uniform)}};
  page.figure(plot_svg(plot), "Keys of each layer, at the same total.");
}

void add_layers_section(const LayersFile& layers, HtmlPage& page) {
  page.figure(plot_svg(cosine_plot(layers)),
              "Cosine of the hidden state before and after attention, with standard errors: near "
              "1, attention changed little.");
  add_budgets(layers.budget, layers.uniform_budget, page);
  std::vector<std::vector<std::string>> lines;
  for (size_t l = 0; l < layers.cosine.size(); ++l) {
    lines.push_back({concat(l), fixed_text(layers.cosine[l], 4),
                     fixed_text(layers.cosine_error[l], 4), concat(layers.group[l]),
                     concat(layers.budget[l])});
  }
  page.table({"layer", "cosine", "±", "group", "budget"}, lines);
}

}  // namespace sqz
