#include "libindex/compress.h"

#include "tools/common/output_file.h"
#include "tools/sqz_index/build_options.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

struct CompressArguments {
  std::string index, output;
  bool force = false;
  CompressOptions options;
};

Status run_compress(const CompressArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(arguments.index));
  CompressOptions options = arguments.options;
  options.seed = context.options.seed;
  if (!options.any()) {
    return {Code::kInvalidArgument,
            "found neither --rows q8 nor --key-codes: there is nothing to do"};
  }
  SQZ_RETURN_IF_ERROR(check_output(arguments.output, arguments.force, {arguments.index}));
  Progress progress(context.progress_style(), "compress");
  SQZ_ASSIGN_OR_RETURN(
      const CompressReport report,
      compress_index(Env::posix(), *index, options, arguments.output, arguments.force,
                     context.options.threads, [&](double done) { progress.update(done); }));
  progress.finish();
  context.output.result({{"path", arguments.output},
                         {"bytes", report.bytes},
                         {"bytes_before", report.bytes_before},
                         {"rows", rows_name(options.rows)},
                         {"key_codes", options.key_codes}});
  return {};
}

}  // namespace

void add_compress_command(Tool& tool) {
  const auto arguments = std::make_shared<CompressArguments>();
  CLI::App* app = tool.command(
      "compress", "Store keys and values of an index in fewer bits, or add key codes.",
      "The result is byte for byte what `sqz-index build` writes with the same options. It needs\n"
      "no model. Sink, tail and dense layers stay in 16 bits.\n"
      "\n"
      "Result: path, bytes, bytes_before, rows, key_codes.\n"
      "\n"
      "Examples:\n"
      "  sqz-index compress book.sqz -o small.sqz --rows q8\n"
      "  sqz-index compress book.sqz -o coded.sqz --rows q8 --key-codes 2\n",
      [arguments](const ToolContext& context) { return run_compress(*arguments, context); });
  app->add_option("INDEX", arguments->index, "The index (.sqz), with 16-bit rows")->required();
  app->add_option("-o,--output", arguments->output, "The index to write")->required();
  app->add_flag("--force", arguments->force, "Replace an existing output");
  app->add_option_function<std::string>(
         "--rows",
         [arguments](const std::string& name) { arguments->options.rows = rows_of(name); },
         "Codes of 8 bits in place of 16-bit keys and values: q8")
      ->check(CLI::IsMember({"q8"}));
  add_code_options(*app, arguments->options);
}

}  // namespace sqz
