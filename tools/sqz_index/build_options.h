// The options of `sqz-index build`.
#pragma once

#include <string>
#include <vector>

#include "libindex/builder.h"
#include "tools/sqz_index/source.h"

namespace sqz {

struct BuildArguments {
  SourceOptions source;
  std::string capture;             // F.h5 instead of a model and texts
  std::string manifest;            // F.jsonl: a corpus instead of one context
  std::string shard;               // of the manifest: I/N; empty: all of it
  std::vector<std::string> after;  // indexes that the texts continue, one behind the other
  std::string output;              // a file; a folder with a manifest
  bool force = false, dry_run = false;
  std::string layers;     // a layer profile to embed; empty: none
  std::string qmodel;     // a query classifier: the partition is its buckets
  QmodelFile classifier;  // what `qmodel` holds; `build` borrows it
  BuildOptions build;     // everything else
};

void add_build_options(CLI::App& app, BuildArguments& arguments);

// --layers16.
void add_code_options(CLI::App& app, CompressOptions& options);

// Puts into `arguments.build` what the common options say, and the classifier.
Status complete(BuildArguments& arguments, const CommonOptions& common);

// Builds one index, or those of a corpus: then kIo if some documents failed, kCorrupt if all did. A
// document that fails stops no other.
Status run_build(const BuildArguments& arguments, const ToolContext& context);

}  // namespace sqz
