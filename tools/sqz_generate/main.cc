#include "tools/sqz_generate/generate.h"

int main(int argc, char** argv) {
  sqz::Tool tool(
      "sqz-generate",
      "Answers prompts over the fixed context of an index, and reads the part that matters.",
      "The prompt follows the fixed context. It gets no special tokens; over an index built with\n"
      "--chat it stands in the user's turn. The likeliest token is always taken. To serve many "
      "prompts at speed, use vLLM with the\n"
      "plug-in sqz.vllm (examples/vllm).\n"
      "\n"
      "Result: prompt, text, tokens[], stop_reason, budget{asked, delivered}, keep{asked,\n"
      "delivered}, dense_fallback, seconds{load, prefill, decode}. Several prompts: an event\n"
      "`answer` each, and a result with answers[], seconds{load, answers} and tokens_per_second;\n"
      "with --batch budget and keep are there, because they are of all answers.\n"
      "\n"
      "Examples:\n"
      "  sqz-generate --model MODEL --index book.sqz --prompt 'Who is Mina?'\n"
      "  sqz-generate --model MODEL --index book.sqz --dense --prompt 'Who is Mina?'\n"
      "  sqz-generate --model MODEL --index book.sqz --budget 0.1 < prompts.txt\n"
      "  sqz-generate --model MODEL --index book.sqz --batch 8 --prompts questions.jsonl "
      "--json\n");
  sqz::GenerateArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const sqz::ToolContext& context) { return sqz::run_generate(arguments, context); });
  sqz::add_generate_options(*app, arguments);
  return tool.run(argc, argv);
}
