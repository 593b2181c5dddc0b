// The options of `sqz-index build`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "libindex/builder.h"
#include "tools/common/calibration.h"
#include "tools/sqz_index/source.h"

namespace sqz {

// --rows, --key-codes, --layers16.
struct RowOptions {
  std::string rows;  // "bf16", "f16", "q8"; empty: the index's dtype
  int key_codes = 0;
  std::vector<int64_t> layers16;
};

void add_row_options(CLI::App& app, RowOptions& options);
// Of an index of this dtype. kInvalidArgument if it asks for 16-bit rows of another.
Result<CompressOptions> compress_options(const RowOptions& rows, DType dtype,
                                         const CommonOptions& common);

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
  std::string dtype;                    // empty: what the rows are of, or bf16
  RowOptions rows;
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

// The files that the options name, those of the model too; not the texts.
std::vector<std::string> files_of(const BuildArguments& arguments);

// The options, with what their files hold: the layer profile that is to be embedded, and the query
// classifier, which `qmodel` keeps.
Result<BuildOptions> full_options(const BuildArguments& arguments, const CommonOptions& common,
                                  const ModelDescription& model, QmodelFile& qmodel);

// `arguments.build` with everything else that was given put into it, but the query classifier.
BuildOptions build_options(const BuildArguments& arguments, const CommonOptions& common);

}  // namespace sqz
