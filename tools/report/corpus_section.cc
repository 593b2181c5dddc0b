#include <algorithm>
#include <filesystem>

#include "formats/base/file.h"
#include "formats/json_fields.h"
#include "formats/sqz_file.h"
#include "tools/common/texts.h"
#include "tools/report/sections.h"
#include "tools/report/svg_plot.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

constexpr double kMegabyte = 1 << 20;

// Lines of other tools, and one that a killed process left torn, are left out.
Status add_status_line(const std::string& line, const std::string& label, CorpusFiles& corpus) {
  const auto json = parse_json_object(line, label);
  if (!json.ok()) return {};
  if (json->root().find("key") == nullptr || json->root().find("state") == nullptr) return {};
  JsonFields fields(json->root(), label);
  const std::string key = fields.text("key"), state = fields.text("state");
  SQZ_RETURN_IF_ERROR(fields.status());
  CorpusFiles::Document& document = corpus.documents[key];
  document.state = state;
  if (state == "failed") {
    document.code = fields.text("code", "");
    document.message = fields.text("message", "");
  } else if (state == "built") {
    document.tokens = fields.integer("tokens", 0, INT64_MAX);
    document.seconds = fields.number("seconds", 0, kMostPlotted);
  }
  return fields.status();
}

void add_index(const std::string& path, CorpusFiles& corpus) {
  const auto file = SqzFile::open(path);
  if (!file.ok()) {
    corpus.unreadable.push_back(file.status().message());
    return;
  }
  corpus.indexes.push_back({static_cast<double>((*file)->metadata().tokens),
                            static_cast<double>((*file)->file_bytes()) / kMegabyte, 0, path});
}

}  // namespace

Result<std::vector<std::string>> corpus_files(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (auto at = fs::recursive_directory_iterator(folder, error);
       !error && at != fs::recursive_directory_iterator(); at.increment(error)) {
    const std::string path = at->path().string();
    const bool known = path.ends_with(".sqz") || path.ends_with(".jsonl");
    if (known && at->is_regular_file()) paths.push_back(path);
  }
  if (error) return Status(Code::kIo, concat(folder, ": ", error.message()));
  std::sort(paths.begin(), paths.end());
  return paths;
}

Status read_corpus(const std::string& folder, CorpusFiles& corpus) {
  SQZ_ASSIGN_OR_RETURN(const std::vector<std::string> paths, corpus_files(folder));
  for (const std::string& path : paths) {
    if (path.ends_with(".sqz")) {
      add_index(path, corpus);
      continue;
    }
    SQZ_RETURN_IF_ERROR(each_line(Env::posix(), path,
                                  [&](const std::string& line, int64_t, const std::string& label) {
                                    return add_status_line(line, label, corpus);
                                  }));
  }
  if (!corpus.indexes.empty() || !corpus.documents.empty() || !corpus.unreadable.empty()) return {};
  return {Code::kCorrupt, bad_field(folder, "files", "none of them",
                                    "indexes (.sqz) or status files (.jsonl) of a corpus")};
}

void add_corpus_section(const CorpusFiles& corpus, HtmlPage& page) {
  Plot sizes, times;
  sizes.title = "Size of the indexes";
  sizes.y_label = "MiB";
  sizes.series = {{"index", Mark::kDots, corpus.indexes}};
  times.title = "Time of the builds";
  times.y_label = "seconds";
  sizes.x_label = times.x_label = "tokens";
  double tokens = 0, megabytes = 0, seconds = 0, built_tokens = 0;
  for (const PlotPoint& index : corpus.indexes) {
    tokens += index.x;
    megabytes += index.y;
  }
  std::vector<std::vector<std::string>> failures;
  PlotSeries built{"built", Mark::kDots, {}};
  for (const auto& [key, document] : corpus.documents) {
    if (document.tokens > 0) {
      built.points.push_back({static_cast<double>(document.tokens), document.seconds, 0, key});
      seconds += document.seconds;
      built_tokens += static_cast<double>(document.tokens);
    }
    if (document.state == "failed") failures.push_back({key, document.code, document.message});
  }
  page.rows({{"indexes", concat(corpus.indexes.size())},
             {"their tokens", fixed_text(tokens, 0)},
             {"their size", bytes_text(megabytes * kMegabyte)},
             {"indexes that do not open", concat(corpus.unreadable.size())},
             {"documents in status files", concat(corpus.documents.size())},
             {"of these failed", concat(failures.size())},
             {"tokens built", fixed_text(built_tokens, 0)},
             {"seconds of their builds", fixed_text(seconds, 1)}});
  if (!corpus.indexes.empty())
    page.figure(plot_svg(sizes), "Size of each index against its tokens.");
  if (!built.points.empty()) {
    times.series = {built};
    page.figure(plot_svg(times),
                "Seconds that each document took, beside the others in work at the same time, "
                "against its tokens.");
  }
  for (const std::string& message : corpus.unreadable) failures.push_back({"", "", message});
  if (failures.empty()) return;
  page.subheading("Failures");
  page.table({"key", "code", "message"}, failures);
}

}  // namespace sqz
