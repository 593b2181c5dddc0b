#include "libindex/append.h"
#include "libindex/buckets.h"
#include "tools/common/load_runner.h"
#include "tools/sqz_index/build_index.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

struct AppendArguments {
  std::string index, output;
  SourceOptions source;
  bool force = false;
};

Status run_append(const AppendArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(arguments.index));
  const IndexMetadata& metadata = index->metadata();
  SQZ_ASSIGN_OR_RETURN(Source source, Source::open(arguments.source));
  const bool in_place = arguments.output.empty() || arguments.output == arguments.index;
  const std::string output = in_place ? arguments.index : arguments.output;
  if (!in_place) SQZ_RETURN_IF_ERROR(check_output(output, arguments.force, source.files()));
  SQZ_ASSIGN_OR_RETURN(std::optional<ChatFormat> chat, chat_of(*index));
  if (arguments.source.tokens.empty()) SQZ_RETURN_IF_ERROR(source.set_chat(std::move(chat)));
  SQZ_RETURN_IF_ERROR(
      check_same_model(metadata.model, source.model().description, arguments.index));
  SQZ_ASSIGN_OR_RETURN(const FixedTokens tokens, source.tokens(source.documents()));
  SQZ_RETURN_IF_ERROR(check_appendable(*index, tokens.ids));
  SQZ_RETURN_IF_ERROR(index->check_whole({}, context.options.threads));

  SQZ_ASSIGN_OR_RETURN(
      const auto runner,
      load_runner(arguments.source.model, runner_options(arguments.source, context.options)));
  const QmodelFile qmodel = embedded_qmodel(*index);
  IndexTarget target{output, in_place || arguments.force, options_of(*index, qmodel)};
  target.options.threads = context.options.threads;
  target.options.pass = pass_name(runner_options(arguments.source, context.options));
  Progress progress(context.progress_style(), "append");
  SQZ_ASSIGN_OR_RETURN(const BuiltIndex built, build_from_model(*runner, tokens, target, progress));
  const int64_t appended = built.report.tokens - metadata.tokens;
  context.output.result(
      {{"path", output},
       {"tokens", built.report.tokens},
       {"appended", appended},
       {"clustered", built.report.clustered},
       {"bytes", built.report.bytes}},
      {{"index", output},
       {"tokens", concat(built.report.tokens, ", of which ", appended, " are new")},
       {"size", bytes_text(static_cast<double>(built.report.bytes))}});
  return {};
}

}  // namespace

void add_append_command(Tool& tool) {
  const auto arguments = std::make_shared<AppendArguments>();
  CLI::App* app = tool.command(
      "append", "Lengthen the context of an index of buckets (built with --qmodel).",
      "The texts are those of the index and, behind them, the new ones. New keys go to the "
      "buckets\n"
      "that are in the index, which needs no other file and none of the options it was built\n"
      "with; the result is the file that building all at once gives. The model runs over all of\n"
      "the texts: what it makes of the new ones depends on those before.\n\n"
      "The index is replaced when the new one is whole; -o writes another file instead. Refused: "
      "an\n"
      "index of clusters or pages, which depend on every key; texts that do not begin with the\n"
      "index's own, or have nothing more; another model; a damaged index.\n"
      "\n"
      "Result: path, tokens, appended, clustered, bytes.\n"
      "\n"
      "Examples:\n"
      "  sqz-index append log.sqz monday.txt tuesday.txt --model MODEL\n"
      "  sqz-index append log.sqz monday.txt tuesday.txt --model MODEL -o longer.sqz\n",
      [arguments](const ToolContext& context) { return run_append(*arguments, context); });
  app->add_option("INDEX", arguments->index, "The index (.sqz)")->required();
  add_source_options(*app, arguments->source);
  app->add_option("-o,--output", arguments->output,
                  "The index to write (default: INDEX, which is replaced when the new one is "
                  "whole)");
  app->add_flag("--force", arguments->force, "Replace an existing output");
}

}  // namespace sqz
