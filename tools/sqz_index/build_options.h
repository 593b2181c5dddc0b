// The options of `sqz-index build`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "libindex/builder.h"
#include "tools/common/calibration.h"
#include "tools/sqz_index/source.h"

namespace sqz {

struct BuildArguments {
  SourceOptions source;
  std::string capture;   // F.h5 instead of a model and texts
  std::string manifest;  // F.jsonl: a corpus instead of one context
  std::string shard;     // of the manifest: I/N, auto, auto/N
  std::string status;    // folder of status files; empty: none
  int together = 0;      // documents of the manifest in work at a time, a device; 0: a default
  std::string output;    // file; folder with `separate` or a manifest
  bool separate = false, force = false, dry_run = false;
  bool update = false;                // replace what another build of the corpus has made
  std::optional<int64_t> sink, tail;  // absent: the defaults of the partition
  int levels = 2;
  std::vector<double> level_fractions;  // empty: the defaults of `levels`
  bool no_kv = false;
  std::string dtype = "bf16";
  std::vector<std::string> calibrate_with;  // files of prompts; empty: the tail calibrates
  int64_t answer_tokens = kAnswerTokens;
  std::string partition = "kmeans";
  std::string layers;  // a layer profile to embed; empty: none
  std::string qmodel;  // F.sqz: the partition is its buckets
  BuildOptions build;
};

void add_build_options(CLI::App& app, BuildArguments& arguments);

// Combinations that CLI11 cannot check.
Status check_arguments(const BuildArguments& arguments);

// The options, with what their files hold: the layer profile that is to be embedded, and the query
// classifier, which `qmodel` keeps.
Result<BuildOptions> full_options(const BuildArguments& arguments, const CommonOptions& common,
                                  const ModelDescription& model, QmodelFile& qmodel);

// `arguments.build` with everything else that was given put into it, but the query classifier.
BuildOptions build_options(const BuildArguments& arguments, const CommonOptions& common);

}  // namespace sqz
