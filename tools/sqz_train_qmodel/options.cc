#include "tools/common/model_options.h"
#include "tools/sqz_train_qmodel/train_qmodel.h"

namespace sqz {
namespace {

void add_number(CLI::App& app, const char* name, int64_t& value, int64_t least, const char* text) {
  app.add_option(name, value, text)->check(whole_number(least))->type_name("N");
}

void add_network_options(CLI::App& app, TrainQmodelArguments& arguments) {
  const HelpSection section(app, "Network");
  QmodelOptions& options = arguments.options;
  add_number(app, "--buckets", options.buckets, 2, "Buckets of each KV head");
  add_number(app, "--hidden", options.hidden, 1, "Hidden units of each network");
  add_number(app, "--steps", options.steps, 1, "Updates of the weights at most");
  add_number(app, "--batch", options.batch, 2, "Queries of a step, of each KV head");
  app.add_option("--near", options.near_queries,
                 "Share of the queries learned from whose best key is among the last --recent "
                 "tokens; of the others the best is further back")
      ->check(real_number(0.0, 1.0))
      ->type_name("X");
  app.add_option("--lr", options.learning_rate, "Learning rate of Adam")
      ->check(real_number(1e-12, 1.0))
      ->type_name("X");
  app.add_option("--decay", arguments.decay, "How the learning rate falls: cosine, to 0, or none")
      ->check(CLI::IsMember({"cosine", "none"}));
  app.add_option("--dense", options.dense,
                 "Layers without buckets, which read everything; layers with a sliding window "
                 "are added")
      ->delimiter(',')
      ->check(whole_number(0))
      ->type_name("LAYER");
  app.add_option("--dtype", arguments.dtype, "Of the weights in the file")
      ->check(CLI::IsMember({"F32", "BF16"}));
}

void add_data_options(CLI::App& app, QmodelOptions& options) {
  const HelpSection section(app, "Samples");
  add_number(
      app, "--window", options.window, 1,
      "Tokens of a window, which is one dense pass: more than four times --recent and --sink");
  add_number(app, "--recent", options.recent, 0,
             "Last tokens that will be attended exactly: their keys do not count");
  add_number(app, "--sink", options.sink, 0, "First tokens that will be attended exactly");
  add_number(app, "--positions", options.positions, 1,
             "Tokens of a window whose queries are looked at");
  add_number(app, "--queries", options.queries, 1, "Of these, kept at most for each KV head");
  add_number(app, "--keys", options.keys_per_bucket, kLeastBucketKeys,
             "Keys that are clustered, by bucket: 32 or more");
  app.add_option("--memory", options.memory,
                 "Bytes of samples that are held to train on, one window's at least (units: K, M, "
                 "G)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50).description(""))
      ->type_name("SIZE");
}

void add_check_options(CLI::App& app, TrainQmodelArguments& arguments) {
  const HelpSection section(app, "Checks");
  app.add_option("--checks", arguments.checks,
                 "Times that held-out recall is measured (default: every 100 steps, at most 20)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->type_name("N");
}

}  // namespace

void add_train_qmodel_options(CLI::App& app, TrainQmodelArguments& arguments) {
  app.add_option("TEXT", arguments.texts,
                 "Text files, or folders of them (recursive, sorted); - reads standard input")
      ->required();
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option("-o,--output", arguments.output, "The query classifier (.sqz) to write")
      ->required();
  app.add_option("--test", arguments.test,
                 "Texts to measure the result with (default: windows of TEXT that are held out)")
      ->type_name("TEXT");
  app.add_flag("--force", arguments.force, "Replace an existing output");
  add_network_options(app, arguments);
  add_data_options(app, arguments.options);
  add_check_options(app, arguments);
  add_run_dtype_option(app, arguments.run_dtype);
}

}  // namespace sqz
