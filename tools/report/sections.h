// What a report says of each kind of input. All append to a page; what is wrong with an input is
// refused as its reader refuses it.
#pragma once

#include <map>
#include <span>
#include <string>

#include "formats/layers_file.h"
#include "formats/qmodel_file.h"
#include "tools/report/allocations.h"
#include "tools/report/html_page.h"
#include "tools/report/results.h"
#include "tools/report/svg_plot.h"

namespace sqz {

// An index: what `sqz-index info` prints, the sizes of its clusters, its calibration, the budgets
// that it embeds, what a pruned one has left. kCorrupt where offsets of clusters are no offsets.
Status add_index_section(const std::string& path, HtmlPage& page);

// Cosines, groups and budgets by layer; what is there of `layers.measured` is not shown here.
void add_layers_section(const LayersFile& layers, HtmlPage& page);

// Budgets by layer as bars, with the budget that all would have alike.
void add_budgets(std::span<const int64_t> budget, int64_t uniform, HtmlPage& page);

// What spreads of a budget cost on held-out text: of each selector loss against budget, and loss
// against p where values of p were measured.
void add_allocations_section(std::span<const MeasuredAllocations> measured, HtmlPage& page);

// What folders hold of a corpus.
struct CorpusFiles {
  struct Document {
    std::string state, code, message;  // of its last line
    int64_t tokens = 0;                // of the last time that it was built
    double seconds = 0;
  };
  std::vector<PlotPoint> indexes;             // tokens, MiB
  std::vector<std::string> unreadable;        // why they do not open
  std::map<std::string, Document> documents;  // of status files, by key
};
// The indexes (*.sqz) and the status files (*.jsonl) of a folder and those below, sorted.
Result<std::vector<std::string>> corpus_files(const std::string& folder);
// Adds what they hold. kCorrupt without any.
Status read_corpus(const std::string& folder, CorpusFiles& corpus);
// Totals, sizes and seconds against tokens, a table of what failed.
void add_corpus_section(const CorpusFiles& corpus, HtmlPage& page);

// A query classifier and its recall.
void add_qmodel_section(const QmodelFile& qmodel, HtmlPage& page);

// Of each context length and task of sqz-eval the value against what was read, what was delivered
// against what was asked for, and a table.
void add_eval_section(std::span<const EvalRow> rows, HtmlPage& page);

// Needles found, and the error of the attention output where they are asked for, against what was
// read, a line a setting, at the longest context: an SVG file. kInvalidArgument without such rows.
Result<std::string> needles_figure(std::span<const EvalRow> rows);

// Recall of sqz-train-qmodel's methods against selectivity, and its loss as it trained.
void add_training_section(const TrainingResult& training, HtmlPage& page);

}  // namespace sqz
