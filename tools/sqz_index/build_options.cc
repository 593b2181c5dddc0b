#include "tools/sqz_index/build_options.h"

#include "tools/common/selector_options.h"

namespace sqz {
namespace {

// An option that would not be used is refused.
void refuse_unused(CLI::App& app) {
  const auto exclude = [&](const char* name, std::initializer_list<const char*> others) {
    for (const char* other : others) app.get_option(name)->excludes(app.get_option(other));
  };
  exclude("--capture", {"TEXT", "--model", "--tokens", "--max-tokens", "--chat", "--run-dtype",
                        "--heavy-hitters", "--after"});
  exclude("--after", {"--heavy-hitters"});
  exclude("--manifest", {"TEXT", "--tokens", "--capture"});
  exclude("--qmodel", {"--partition", "--levels", "--level-fractions", "--coarse-keep",
                       "--iterations", "--engine"});
  exclude("--page-size",
          {"--levels", "--level-fractions", "--coarse-keep", "--iterations", "--engine"});
  exclude("--level-fractions", {"--levels"});
  app.get_option("--page-size")->needs(app.get_option("--partition"));
  app.get_option("--shard")->needs(app.get_option("--manifest"));
}

void add_index_options(CLI::App& app, BuildArguments& arguments) {
  BuildOptions& build = arguments.build;
  const HelpSection section(app, "Index");
  app.add_option("--sink", build.sink, "First tokens that are always attended (with --qmodel 1)")
      ->check(whole_number(0));
  app.add_option("--tail", build.tail,
                 "Last tokens that are always attended; they calibrate (with --qmodel 2047)")
      ->check(whole_number(1));
  app.add_option("--qmodel", arguments.qmodel,
                 "Query classifier (.sqz) whose buckets the keys go to (for --selector saap)");
  app.add_option_function<std::string>(
         "--partition",
         [&build](const std::string& name) {
           build.partition = name == "pages" ? Partition::kPages : Partition::kKmeans;
         },
         "Clusters of similar keys, or pages of consecutive tokens (for --selector quest)")
      ->check(CLI::IsMember({"kmeans", "pages"}))
      ->default_str("kmeans");
  app.add_option("--page-size", build.page_size, "Tokens of a page")
      ->check(CLI::Range(int64_t{1}, kMaxPageSize));
  app.add_flag("--heavy-hitters", build.heavy_hitters,
               "Store the order that --selector h2o needs: looks at all attention of the context "
               "once more");
  app.add_option("--layers", arguments.layers,
                 "Embed a profile of sqz-profile-layers: sessions spread their budget over the "
                 "layers by it")
      ->type_name("L.json");
  app.add_option_function<int>(
         "--levels",
         [&build](int levels) { build.level_fractions = default_level_fractions(levels); },
         "Levels of the centroid tree")
      ->check(CLI::Range(1, kMaxLevels))
      ->default_str("2");
  app.add_option("--level-fractions", build.level_fractions, "Clusters a token, coarse to fine")
      ->delimiter(',')
      ->check(real_number(1e-9, 1.0));
  app.add_option("--coarse-keep", build.coarse_keep,
                 "Fraction of the keys that the coarse levels let through")
      ->check(real_number(1e-6, 1.0));
  app.add_option("--iterations", build.iterations, "Iterations of k-means")
      ->check(CLI::Range(1, 10000));
  app.add_option("--engine", build.engine,
                 "What clusters: faiss (CPU) or cuda; auto takes cuda where it can run")
      ->check(CLI::IsMember({"auto", "faiss", "cuda"}));
  app.add_option_function<std::string>(
         "--rows",
         [&build](const std::string& name) {
           build.dtype = name == "f16" ? DType::kF16 : DType::kBF16;
           build.compress.rows = rows_of(name);
         },
         "Stored keys and values: 16 bits a number (bf16, f16), or codes of 8 (q8)")
      ->check(CLI::IsMember({"bf16", "f16", "q8"}))
      ->default_str("bf16");
  add_code_options(app, build.compress);
}

}  // namespace

void add_code_options(CLI::App& app, CompressOptions& options) {
  app.add_option("--layers16", options.layers16, "Layers whose rows stay in 16 bits, from 0 on")
      ->delimiter(',')
      ->check(whole_number(0));
}

void add_build_options(CLI::App& app, BuildArguments& arguments) {
  add_source_options(app, arguments.source);
  app.add_option("--chat", arguments.source.chat,
                 "Put the texts into a turn of a chat; F has the texts around the turns")
      ->type_name("F.json");
  app.add_option("--capture", arguments.capture, "Keys and values (.h5) instead of a model");
  app.add_option("--after", arguments.after,
                 "Indexes that the texts continue, one behind the other: their tokens are not "
                 "computed again, and the new index serves behind these alone")
      ->delimiter(',')
      ->expected(1, SQZ_MOST_CONTEXTS - 1)
      ->allow_extra_args(false)
      ->type_name("A.sqz[,B.sqz]");
  app.add_option("--manifest", arguments.manifest, "A corpus (.jsonl): one index a line");
  app.add_option("--shard", arguments.shard, "Part I of N of the manifest, 0 to N - 1")
      ->type_name("I/N");
  app.add_option("-o,--output", arguments.output, "The index to write; a folder with --manifest")
      ->required();
  app.add_flag("--force", arguments.force,
               "Replace an existing output; with --manifest, indexes of other tokens or options");
  app.add_flag("--dry-run", arguments.dry_run, "Say what a build would take; write nothing");
  add_index_options(app, arguments);
  refuse_unused(app);
  app.final_callback([&app, &arguments] {
    if (arguments.qmodel.empty()) return;
    // SAAP attends "1 + 2047" tokens exactly.
    if (app.count("--sink") == 0) arguments.build.sink = 1;
    if (app.count("--tail") == 0) arguments.build.tail = 2047;
  });
}

Status complete(BuildArguments& arguments, const CommonOptions& common) {
  BuildOptions& build = arguments.build;
  build.seed = common.seed;
  build.threads = common.threads;
  build.gpu = common.gpu().value_or(0);  // the model's GPU is the engine's: its keys need not move
  build.pass = pass_name(runner_options(arguments.source.run_dtype, common));
  if (arguments.qmodel.empty()) return {};
  SQZ_ASSIGN_OR_RETURN(arguments.classifier, read_qmodel_file(arguments.qmodel));
  build.partition = Partition::kBuckets;
  build.qmodel = &arguments.classifier;
  return {};
}

}  // namespace sqz
