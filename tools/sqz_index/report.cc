#include <filesystem>

#include "formats/base/file.h"
#include "tools/common/layers_table.h"
#include "tools/common/output_file.h"
#include "tools/common/signals.h"
#include "tools/report/sections.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

struct ReportArguments {
  std::vector<std::string> files;
  std::string output, figure, title = "sqz report";
  bool force = false;
};

// What is drawn together, whichever files it comes from.
struct Together {
  std::vector<EvalRow> rows;
  std::vector<MeasuredAllocations> measured;
  CorpusFiles corpus;
  bool has_corpus = false;
};

Status add_layers(const std::string& path, HtmlPage& page, Together& together) {
  SQZ_ASSIGN_OR_RETURN(const LayersFile layers, read_layers_file(path));
  page.heading("Layer profile " + path);
  page.rows(layers_rows(layers));
  add_layers_section(layers, page);
  if (layers.measured.is_null()) return {};
  const JsonDocument json = layers.measured.parsed();
  SQZ_ASSIGN_OR_RETURN(auto measured, measured_allocations(json.root(), path + ": measured"));
  together.measured.push_back(std::move(measured));
  return {};
}

Status add_qmodel(const std::string& path, HtmlPage& page) {
  SQZ_ASSIGN_OR_RETURN(const QmodelFile qmodel, read_qmodel_file(path));
  page.heading("Query classifier " + path);
  add_qmodel_section(qmodel, page);
  return {};
}

Status add_results(const std::string& path, HtmlPage& page, Together& together) {
  SQZ_ASSIGN_OR_RETURN(ToolResults results, read_results(path));
  if (results.layers) {
    page.heading("Result of sqz-profile-layers " + path);
    add_layers_section(*results.layers, page);
  }
  if (results.training) {
    page.heading("Result of sqz-train-qmodel " + path);
    add_training_section(*results.training, page);
  }
  if (results.measured) together.measured.push_back(std::move(*results.measured));
  together.rows.insert(together.rows.end(), results.rows.begin(), results.rows.end());
  return {};
}

// Appends what a file is; the kind, as the result says it.
Result<std::string> add_file(const std::string& path, HtmlPage& page, Together& together) {
  if (std::filesystem::is_directory(path)) {
    SQZ_RETURN_IF_ERROR(read_corpus(path, together.corpus));
    together.has_corpus = true;
    return std::string("corpus");
  }
  if (is_json_file(path)) {
    SQZ_RETURN_IF_ERROR(add_results(path, page, together));
    return std::string("results");
  }
  if (has_kind(path, FileKind::kLayers)) {
    SQZ_RETURN_IF_ERROR(add_layers(path, page, together));
    return std::string("layers");
  }
  if (has_kind(path, FileKind::kQmodel)) {
    SQZ_RETURN_IF_ERROR(add_qmodel(path, page));
    return std::string("qmodel");
  }
  SQZ_RETURN_IF_ERROR(add_index_section(path, page));
  return std::string("index");
}

Status write_page(const ReportArguments& arguments, const std::string& text) {
  protect_output(arguments.output);
  SQZ_ASSIGN_OR_RETURN(AtomicFile file,
                       AtomicFile::create(Env::posix(), arguments.output, arguments.force));
  SQZ_RETURN_IF_ERROR(file.file().write(0, std::as_bytes(std::span(text))));
  return file.commit();
}

Status run_report(const ReportArguments& arguments, const ToolContext& context) {
  std::vector<std::string> read;
  for (const std::string& path : arguments.files) {
    read.push_back(path);
    if (!std::filesystem::is_directory(path)) continue;
    SQZ_ASSIGN_OR_RETURN(const auto files, corpus_files(path));
    read.insert(read.end(), files.begin(), files.end());
  }
  SQZ_RETURN_IF_ERROR(check_output(arguments.output, arguments.force, read));
  HtmlPage page(arguments.title);
  Together together;
  std::vector<JsonText> inputs;
  for (const std::string& path : arguments.files) {
    SQZ_RETURN_IF_ERROR(check_stop());
    SQZ_ASSIGN_OR_RETURN(const std::string kind, add_file(path, page, together));
    inputs.push_back({{"path", path}, {"kind", kind}});
  }
  if (together.has_corpus) {
    page.heading("Corpus");
    add_corpus_section(together.corpus, page);
  }
  if (!together.measured.empty()) {
    page.heading("What layer budgets cost");
    add_allocations_section(together.measured, page);
  }
  if (!together.rows.empty()) {
    page.heading("Measured by sqz-eval");
    add_eval_section(together.rows, page);
  }
  std::string text = page.text();
  if (!arguments.figure.empty()) {
    SQZ_ASSIGN_OR_RETURN(text, needles_figure(together.rows));
  }
  const int64_t figures = arguments.figure.empty() ? page.figures() : 1;
  SQZ_RETURN_IF_ERROR(write_page(arguments, text));
  context.output.result({{"path", arguments.output},
                         {"bytes", text.size()},
                         {"inputs", inputs},
                         {"figures", figures}},
                        {{"report", arguments.output},
                         {"size", bytes_text(static_cast<double>(text.size()))},
                         {"figures", concat(figures)}});
  return {};
}

}  // namespace

void add_report_command(Tool& tool) {
  const auto arguments = std::make_shared<ReportArguments>();
  CLI::App* app = tool.command(
      "report", "Draw what files hold as one HTML page.",
      "Files are indexes, layer profiles, query classifiers (.sqz), and what sqz-eval,\n"
      "sqz-profile-layers and sqz-train-qmodel print with --json. Folders are a corpus:\n"
      "the indexes and the status files (build --manifest --status) in them are drawn\n"
      "together, sizes, times and failures. The page loads nothing else, is\n"
      "well-formed XML for light and dark screens, and the same files give the same page. Rows of\n"
      "sqz-eval, and losses of layer budgets, are drawn together whichever files they come "
      "from.\n\n"
      "Result: path, bytes, inputs[] with path and kind (index, layers, qmodel, results, corpus), "
      "figures.\n"
      "\n"
      "Examples:\n"
      "  sqz-index report book.sqz -o book.html\n"
      "  sqz-index report indexes/ status/ -o corpus.html\n"
      "  sqz-eval --model MODEL --text a.txt --tokens 8000 --budget 0.05,0.1,0.2 --json > e.jsonl\n"
      "  sqz-index report book.sqz layers.sqz e.jsonl -o report.html\n"
      "  sqz-index report e.jsonl --figure needles -o needles.svg\n",
      [arguments](const ToolContext& context) { return run_report(*arguments, context); });
  app->add_option("FILE", arguments->files,
                  "Indexes, profiles, classifiers, results, folders of a corpus")
      ->required();
  app->add_option("-o,--output", arguments->output,
                  "The page (.html) to write, or the figure (.svg)")
      ->required();
  app->add_option("--figure", arguments->figure,
                  "Write one figure alone, as SVG. needles: needles found, and error of the "
                  "attention output, against the bytes read; of sqz-eval's results")
      ->check(CLI::IsMember({"needles"}));
  app->add_option("--title", arguments->title, "Title of the page")->capture_default_str();
  app->add_flag("--force", arguments->force, "Replace an existing output");
}

}  // namespace sqz
