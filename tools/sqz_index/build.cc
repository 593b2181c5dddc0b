#include "tools/sqz_index/build_options.h"
#include "tools/sqz_index/commands.h"

namespace sqz {

void add_build_command(Tool& tool) {
  const auto arguments = std::make_shared<BuildArguments>();
  CLI::App* app = tool.command(
      "build", "Build the index of a fixed context: texts, token ids or a capture.",
      "Texts are one context, encoded file by file, with the model's special tokens once,\n"
      "at the start. Hidden files of a folder and files with a zero byte are left out.\n"
      "\n"
      "--chat F.json is for instruct models: the texts stand in the system turn of a chat\n"
      "(or begin the user's, if there is no system turn), and sqz-generate puts each prompt\n"
      "into the user's turn. The index stores F.json, the texts around the turns:\n"
      "{\"before\": \"\", \"between\": \"\", \"after\": \"\", \"end\": [tokens that end an "
      "answer],\n"
      "\"trim\": false}. `python -m sqz.chat MODEL > F.json` writes it for the model's chat\n"
      "template. Special tokens that a text spells out are text.\n"
      "\n"
      "--manifest F.jsonl builds a corpus: a line a document, {\"key\": \"a/b\", \"texts\":\n"
      "[\"a.md\", \"b/\"]}, or with \"tokens\" or \"capture\", becomes DIR/a/b.sqz. Paths begin\n"
      "at the manifest's folder. An index that is there and of the same tokens, model\n"
      "and options is done; another is refused, or replaced with --force. A document\n"
      "that fails stops no other. Exit code: 0 if all are there, 1 if some failed, 3 if\n"
      "all failed. With --json an event `document` each: key, path, line, state (built,\n"
      "there or failed), tokens, bytes, build_id, seconds, or code and message.\n"
      "\n"
      "Result: path, tokens, clustered, clusters[], pages, bytes, build_id,\n"
      "seconds{capture, cluster, calibrate, write}, engine, fingerprint; of a manifest\n"
      "documents, built, there, failed, tokens, seconds.\n"
      "\n"
      "--dry-run: indexes, tokens, clusters[], pages, bytes (exact), peak_memory,\n"
      "gpu_memory, gpu_memory_least (one KV head at a time; 0 without a GPU).\n"
      "\n"
      "Examples:\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --chat F.json\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --dry-run\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --partition pages\n"
      "  sqz-index build --model MODEL chapter2.txt -o 2.sqz --after book.sqz\n"
      "  sqz-index build --model MODEL --manifest corpus.jsonl -o indexes/ --shard 3/16\n"
      "  sqz-index build --capture book.h5 -o book.sqz --level-fractions 0.05\n",
      [arguments](const ToolContext& context) -> Status {
        SQZ_RETURN_IF_ERROR(complete(*arguments, context.options));
        return run_build(*arguments, context);
      });
  add_build_options(*app, *arguments);
}

}  // namespace sqz
