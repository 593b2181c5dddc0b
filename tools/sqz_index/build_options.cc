#include "tools/sqz_index/build_options.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "tools/common/layer_policy.h"

namespace sqz {
namespace {

// One cluster for every 20 tokens at the finest level, five times fewer at each coarser one
// (Squeezed Attention, section 6.1: 5 % and 1 %).
std::vector<double> default_fractions(int levels) {
  std::vector<double> out;
  double fraction = 0.05;
  for (int level = 0; level < levels; ++level, fraction /= 5) out.insert(out.begin(), fraction);
  return out;
}

DType dtype_of(const BuildArguments& arguments) {
  const std::string& name = arguments.dtype.empty() ? arguments.rows.rows : arguments.dtype;
  return name == "f16" ? DType::kF16 : DType::kBF16;
}

}  // namespace

void add_row_options(CLI::App& app, RowOptions& options) {
  app.add_option("--rows", options.rows,
                 "Keys and values of clusters: in 16 bits a number (bf16, f16) or in 8 (q8)")
      ->check(CLI::IsMember({"bf16", "f16", "q8"}));
  app.add_option("--key-codes", options.key_codes,
                 "Bits a dimension of codes that choose single keys; 0: none")
      ->check(CLI::Range(0, 2));
  app.add_option("--layers16", options.layers16, "Layers whose rows stay in 16 bits, from 0 on")
      ->delimiter(',')
      ->check(whole_number(0));
}

Result<CompressOptions> compress_options(const RowOptions& rows, DType dtype,
                                         const CommonOptions& common) {
  CompressOptions out;
  out.rows = rows_of(rows.rows);
  out.key_codes = rows.key_codes;
  out.layers16 = rows.layers16;
  out.seed = common.seed;
  const char* own = dtype == DType::kF16 ? "f16" : "bf16";
  if (out.rows != RowKind::k16 || rows.rows.empty() || rows.rows == own) return out;
  return Status(Code::kInvalidArgument, concat("--rows: found ", rows.rows, ", expected ", own,
                                               ", the type of the index, or q8"));
}

void add_build_options(CLI::App& app, BuildArguments& arguments) {
  BuildOptions& build = arguments.build;
  add_source_options(app, arguments.source);
  app.add_flag("--chat", arguments.source.chat,
               "Put the texts into a turn of the model's chat template");
  app.add_option("--chat-format", arguments.source.chat_format,
                 "--chat, with the texts around the turns in this file")
      ->type_name("F.json");
  app.add_option("--capture", arguments.capture, "Keys and values (.h5) instead of a model");
  app.add_option("--manifest", arguments.manifest, "A corpus (.jsonl): one index a line");
  app.add_option(
         "--shard", arguments.shard,
         "Part I of N of the manifest, 0 to N - 1; auto/N: I is the task of a Slurm array or the "
         "index of a Kubernetes Job; auto: the task of a Slurm array 0 to N - 1")
      ->type_name("I/N");
  app.add_flag("--update", arguments.update,
               "Replace indexes of the corpus that are of other tokens, model or options");
  app.add_option("--status", arguments.status,
                 "Folder for what became of each document of the manifest, a file a shard that "
                 "later runs lengthen")
      ->type_name("DIR");
  app.add_option("--together", arguments.together,
                 "Documents of the manifest in work at a time, a device (default: 2; on a GPU 4)")
      ->check(CLI::Range(1, 64));
  app.add_option("-o,--output", arguments.output,
                 "The index to write; a folder with --separate or --manifest")
      ->required();
  app.add_flag("--separate", arguments.separate, "One index a document, into the folder -o");
  app.add_flag("--force", arguments.force, "Replace an existing output");
  app.add_flag("--dry-run", arguments.dry_run, "Say what a build would take; write nothing");
  app.add_flag("--resume", build.resume,
               "Keep whole layers if the build is killed, and go on from those that were kept");

  const HelpSection section(app, "Index");
  app.add_option("--sink", arguments.sink,
                 "First tokens that are always attended (default: 16; with --qmodel 1)")
      ->check(whole_number(0));
  app.add_option("--tail", arguments.tail,
                 "Last tokens that are always attended; they calibrate (default: 100; with "
                 "--qmodel 2047)")
      ->check(whole_number(1));
  app.add_option("--qmodel", arguments.qmodel,
                 "Query classifier (.sqz) whose buckets the keys go to (for --selector saap)");
  app.add_option("--partition", arguments.partition,
                 "Clusters of similar keys, or pages of consecutive tokens (for --selector quest)")
      ->check(CLI::IsMember({"kmeans", "pages"}));
  app.add_option("--page-size", build.page_size, "Tokens of a page")
      ->check(CLI::Range(int64_t{1}, kMaxPageSize));
  app.add_flag("--calibrate-keys", build.calibrate_keys,
               "Calibrate --selector ideal, too: scores every key, and takes its time");
  app.add_flag("--heavy-hitters", build.heavy_hitters,
               "Store the order that --selector h2o needs: looks at all attention of the context "
               "once more");
  app.add_option("--layers", arguments.layers,
                 "Embed a profile of sqz-profile-layers: sessions spread their budget over the "
                 "layers by it")
      ->type_name("L.sqz");
  app.add_option("--levels", arguments.levels, "Levels of the centroid tree")
      ->check(CLI::Range(1, kMaxLevels));
  app.add_option("--level-fractions", arguments.level_fractions,
                 "Clusters a token, coarse to fine (default for 2 levels: 0.01,0.05)")
      ->delimiter(',')
      ->check(real_number(1e-9, 1.0));
  app.add_option("--coarse-keep", build.coarse_keep,
                 "Fraction of the keys that the coarse levels let through")
      ->check(real_number(1e-6, 1.0));
  app.add_option("--iterations", build.iterations, "Iterations of k-means")
      ->check(CLI::Range(1, 10000));
  app.add_option("--engine", build.engine,
                 "What clusters: faiss (CPU), faiss-gpu, cuda; auto takes the fastest there is")
      ->check(CLI::IsMember({"auto", "faiss", "faiss-gpu", "cuda"}));
  app.add_option("--dtype", arguments.dtype,
                 "Type of stored keys, values and centroids (default: that of --rows, or bf16)")
      ->check(CLI::IsMember({"bf16", "f16"}));
  add_row_options(app, arguments.rows);
  app.add_option("--calibrate-with", arguments.calibrate_with,
                 "Prompts that calibrate instead of the context's last tokens: one a line; in "
                 "F.jsonl objects with \"prompt\". May be repeated")
      ->take_all();
  app.add_option("--answer-tokens", arguments.answer_tokens,
                 "Tokens of each greedy answer that count beside a prompt of --calibrate-with")
      ->check(CLI::Range(0, 4096));
  const auto option = [&](const char* name) { return app.get_option(name); };
  for (const char* name :
       {"--levels", "--level-fractions", "--coarse-keep", "--iterations", "--engine"}) {
    option("--qmodel")->excludes(option(name));
    option("--page-size")->excludes(option(name));
  }
  option("--level-fractions")->excludes(option("--levels"));
  option("--capture")->excludes(option("--run-dtype"));
  option("--answer-tokens")->needs(option("--calibrate-with"));
}

std::vector<std::string> files_of(const BuildArguments& arguments) {
  std::vector<std::string> out = files_of(arguments.source);
  out.insert(out.end(),
             {arguments.capture, arguments.manifest, arguments.layers, arguments.qmodel});
  out.insert(out.end(), arguments.calibrate_with.begin(), arguments.calibrate_with.end());
  return out;
}

Status check_arguments(const BuildArguments& arguments) {
  SQZ_RETURN_IF_ERROR(compress_options(arguments.rows, dtype_of(arguments), {}).status());
  const SourceOptions& source = arguments.source;
  const bool from_capture = !arguments.capture.empty();
  const bool from_model = !source.texts.empty() || !source.tokens.empty();
  const bool corpus = !arguments.manifest.empty(), prompts = !arguments.calibrate_with.empty();
  const bool keys = arguments.build.calibrate_keys;
  const auto& fractions = arguments.level_fractions;
  std::error_code error;
  const bool file = std::filesystem::exists(arguments.output, error) &&
                    !std::filesystem::is_directory(arguments.output, error);
  const struct {
    bool refused;
    std::string message;
  } checks[] = {
      {!corpus && (arguments.update || !arguments.shard.empty() || !arguments.status.empty() ||
                   arguments.together > 0),
       "--shard, --update, --status and --together are for a corpus: pass --manifest F.jsonl"},
      {corpus && (from_capture || from_model || arguments.separate),
       "--manifest names the documents: pass no text, --tokens, --capture or --separate beside it"},
      {file && (corpus || arguments.separate),
       concat(arguments.output,
              ": is a file; with --manifest or --separate give the name of a folder with -o")},
      {corpus && (arguments.dry_run || prompts),
       "--manifest: --dry-run and --calibrate-with are for a single index"},
      {from_capture && (from_model || !source.model.empty() || source.max_tokens > 0),
       "--capture brings model, tokens and keys with it: pass no --model, --tokens, --max-tokens "
       "or text beside it"},
      {from_capture && source.in_turns(),
       "--capture brings its tokens with it, which no turn can be put around: build from the "
       "model with --chat"},
      {from_capture && prompts,
       "--calibrate-with runs the model, which a build from --capture does not have: build "
       "without it, then use sqz-index calibrate"},
      {arguments.build.resume && prompts,
       "--calibrate-with is for a whole index: build with --resume alone, then use sqz-index "
       "calibrate"},
      {from_capture && arguments.build.heavy_hitters,
       "--heavy-hitters looks at all queries of the context, which a capture does not hold: "
       "build from the model"},
      {arguments.separate && source.texts.empty(),
       "--separate makes one index a document: name text files"},
      {prompts && arguments.partition == "pages" && !keys,
       "--calibrate-with: an index of pages has nothing to calibrate without --calibrate-keys"},
      {!arguments.qmodel.empty() && arguments.partition != "kmeans",
       "--qmodel brings its own buckets: pass it or --partition pages, not both"},
      {prompts && !arguments.qmodel.empty() && !keys,
       "--calibrate-with: an index of buckets has nothing to calibrate without --calibrate-keys"},
      {fractions.size() > static_cast<size_t>(kMaxLevels),
       concat("--level-fractions: found ", fractions.size(), " levels, expected at most ",
              kMaxLevels)},
      {std::adjacent_find(fractions.begin(), fractions.end(), std::greater_equal<>()) !=
           fractions.end(),
       "--level-fractions: every level must have more clusters than the coarser one before it"},
  };
  for (const auto& check : checks) {
    if (check.refused) return {Code::kInvalidArgument, check.message};
  }
  return {};
}

BuildOptions build_options(const BuildArguments& arguments, const CommonOptions& common) {
  BuildOptions out = arguments.build;
  out.level_fractions = arguments.level_fractions.empty() ? default_fractions(arguments.levels)
                                                          : arguments.level_fractions;
  // SAAP attends "1 + 2047" tokens exactly.
  const bool buckets = !arguments.qmodel.empty();
  out.sink = arguments.sink.value_or(buckets ? 1 : out.sink);
  out.tail = arguments.tail.value_or(buckets ? 2047 : out.tail);
  out.seed = common.seed;
  out.threads = common.threads;
  out.dtype = dtype_of(arguments);
  const auto compress = compress_options(arguments.rows, out.dtype, common);
  if (compress.ok()) out.compress = *compress;  // check_arguments() refuses the others
  out.partition = arguments.partition == "pages" ? Partition::kPages
                  : buckets                      ? Partition::kBuckets
                                                 : Partition::kKmeans;
  if (arguments.capture.empty()) out.pass = pass_name(runner_options(arguments.source, common));
  // The model's GPU is the engine's, too: its keys need not move.
  out.gpu = common.gpu().value_or(0);
  return out;
}

Result<BuildOptions> full_options(const BuildArguments& arguments, const CommonOptions& common,
                                  const ModelDescription& model, QmodelFile& qmodel) {
  BuildOptions out = build_options(arguments, common);
  if (!arguments.layers.empty()) {
    SQZ_ASSIGN_OR_RETURN(out.layer_budgets, read_layer_budgets(arguments.layers, model));
  }
  if (!arguments.qmodel.empty()) {
    SQZ_ASSIGN_OR_RETURN(qmodel, read_qmodel_file(arguments.qmodel));
    out.qmodel = &qmodel;
  }
  return out;
}

}  // namespace sqz
