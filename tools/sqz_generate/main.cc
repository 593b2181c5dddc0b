// sqz-generate: answers prompts over a fixed context, reading it through its index.
#include "tools/sqz_generate/generate.h"

int main(int argc, char** argv) {
  sqz::Tool tool(
      "sqz-generate",
      "Answers prompts over the fixed context of an index, reading the part that matters.",
      "A prompt follows the fixed context and is encoded without special tokens; over an index\n"
      "built with --chat it stands in the user's turn. At a terminal Ctrl-C ends an answer, and a\n"
      "second one the loop. Refused: an index of another model or tokenizer.\n"
      "\n"
      "Result: text, tokens[], stop_reason, budget{asked, delivered}, keep{asked, delivered} "
      "(asked\n"
      "is 0 with --threshold or --mass, which adds mass{asked, estimated, delivered, error}),\n"
      "dense_fallback, seconds{load, prefill, decode}; of several prompts an event `answer` each,\n"
      "with prompt, and answers[]. With --lossless drafts{tokens, accepted, steps, checks}. With\n"
      "--batch events `answer` as they end, with index, and of all budget, keep, mass,\n"
      "seconds{load, answers} and tokens_per_second.\n"
      "\n"
      "Examples:\n"
      "  sqz-generate --model MODEL --index book.sqz --prompt 'Who is Mina?'\n"
      "  sqz-generate --model MODEL --index book.sqz --dense --prompt 'Who is Mina?'\n"
      "  sqz-generate --model MODEL --index book.sqz --budget 0.1 < prompts.txt\n"
      "  sqz-generate --model MODEL --index book.sqz --batch 64 --prompts questions.jsonl "
      "--json\n");
  sqz::GenerateArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const sqz::ToolContext& context) { return sqz::run_generate(arguments, context); });
  sqz::add_generate_options(*app, arguments);
  return tool.run(argc, argv);
}
