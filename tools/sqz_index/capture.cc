#include "formats/capture.h"
#include "tools/common/model_options.h"
#include "tools/sqz_index/build_index.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

struct CaptureArguments {
  SourceOptions source;
  std::string output;
  bool force = false;
  int64_t queries = 100;  // as many as a build's default tail
};

std::vector<float> copy(std::span<const float> data) {
  return {data.begin(), data.end()};
}

Status run_capture(const CaptureArguments& arguments, const ToolContext& context) {
  std::optional<Source> source;
  SQZ_ASSIGN_OR_RETURN(FixedTokens tokens, read_tokens(arguments.source, source));
  SQZ_RETURN_IF_ERROR(
      check_output(arguments.output, arguments.force, named_files(arguments.source)));
  SQZ_ASSIGN_OR_RETURN(const auto runner,
                       load_runner(arguments.source.model,
                                   runner_options(arguments.source.run_dtype, context.options)));

  CaptureInfo info;
  info.model = runner->config().description;
  info.tokenizer_hash = tokens.tokenizer_hash;
  info.tokens = std::move(tokens.ids);
  info.query_positions =
      last_positions(static_cast<int64_t>(info.tokens.size()), arguments.queries);
  SQZ_ASSIGN_OR_RETURN(const auto writer,
                       CaptureWriter::create(arguments.output, arguments.force, info));

  Progress progress(context.progress_style(), "capture");
  PrefillOptions pass;
  pass.query_positions = info.query_positions;
  pass.progress = [&](double done) { progress.update(done); };
  pass.consumer = [&](const LayerCapture& layer) -> Status {
    CapturedLayer data;
    data.keys = copy(layer.keys);
    data.values = copy(layer.values);
    data.queries = copy(layer.queries);
    return writer->write_layer(layer.layer, data);
  };
  SQZ_RETURN_IF_ERROR(runner->prefill(info.tokens, pass));
  SQZ_ASSIGN_OR_RETURN(const uint64_t bytes, writer->commit());
  progress.finish();
  context.output.result({{"path", arguments.output},
                         {"tokens", info.tokens.size()},
                         {"layers", info.model.layers},
                         {"queries", info.query_positions.size()},
                         {"bytes", bytes}});
  return {};
}

}  // namespace

void add_capture_command(Tool& tool) {
  const auto arguments = std::make_shared<CaptureArguments>();
  CLI::App* app = tool.command(
      "capture", "Write keys, values and queries of a fixed context as HDF5.",
      "Result: path, tokens, layers, queries, bytes.\n"
      "\n"
      "Examples:\n"
      "  sqz-index capture --model MODEL book.txt -o book.h5\n"
      "  sqz-index build --capture book.h5 -o book.sqz\n",
      [arguments](const ToolContext& context) { return run_capture(*arguments, context); });
  add_source_options(*app, arguments->source);
  app->add_option("-o,--output", arguments->output, "The capture (.h5) to write")->required();
  app->add_flag("--force", arguments->force, "Replace an existing output");
  app->add_option("--queries", arguments->queries, "Store the queries of the last N tokens")
      ->check(whole_number(1))
      ->type_name("N")
      ->capture_default_str();
}

}  // namespace sqz
