#include <utility>

#include "tools/common/qmodel_table.h"
#include "tools/report/sections.h"
#include "tools/report/svg_plot.h"

namespace sqz {
namespace {

// What a selectivity is a share of, as sqz-train-qmodel names it.
constexpr std::pair<const char*, const char*> kKeys[] = {{"window", "all keys of the window"},
                                                         {"seen", "all keys up to the query"},
                                                         {"far", "the keys far back"}};

Plot recall_plot() {
  Plot plot;
  plot.title = "Recall against selectivity";
  plot.x_label = "selectivity: share of the keys that are read";
  plot.y_label = "recalled attention mass";
  plot.from_zero = true;
  return plot;
}

PlotSeries recall_series(const std::string& name, const std::vector<QmodelRecall>& recall) {
  PlotSeries out{name, Mark::kLine, {}};
  for (const QmodelRecall& row : recall) out.points.push_back({row.selectivity, row.recall, 0});
  return out;
}

}  // namespace

void add_qmodel_section(const QmodelFile& qmodel, HtmlPage& page) {
  page.rows(qmodel_rows(qmodel));
  if (qmodel.recall.empty()) return;
  Plot plot = recall_plot();
  plot.series = {recall_series("classifier", qmodel.recall)};
  page.figure(plot_svg(plot), "On texts that were not trained on, mean over layers and heads.");
}

void add_training_section(const TrainingResult& training, HtmlPage& page) {
  if (!training.checks.empty()) {
    Plot plot;
    plot.title = "Loss while training";
    plot.x_label = "step";
    plot.y_label = "loss";
    plot.series = {{"loss", Mark::kLine, training.checks}};
    page.figure(plot_svg(plot), "Loss at the checks of held-out recall.");
  }
  for (const bool far_queries : {false, true}) {
    for (const auto& [keys, of] : kKeys) {
      Plot plot = recall_plot();
      for (const MethodRecall& method : training.scores) {
        if (method.far_queries == far_queries && method.keys == keys) {
          plot.series.push_back(recall_series(method.method, method.recall));
        }
      }
      if (plot.series.empty()) continue;
      page.figure(plot_svg(plot),
                  concat(far_queries ? "Queries whose best key is far back" : "All queries",
                         "; selectivity is a share of ", of, "."));
    }
  }
}

}  // namespace sqz
