// sqz-profile-layers: how much each layer's attention matters, and what share of a budget it gets.
#include "tools/sqz_profile_layers/profile_layers.h"

int main(int argc, char** argv) {
  sqz::Tool tool(
      "sqz-profile-layers",
      "Measures how much the attention of each layer changes the hidden state, and shares out a "
      "budget of keys by it.",
      "Method\n"
      "  The cosine of the hidden state before a layer's input norm with the state after the\n"
      "  attention's residual add, averaged over tokens (SqueezeAttention). Layers are split into\n"
      "  three groups by their cosines, the best split there is. Layers of group 2, which hardly\n"
      "  change their input, keep p of the budget; the others share what that frees. The sum is\n"
      "  that of the same budget for every layer, to the key.\n"
      "\n"
      "  --allocate measured shares it out by what each layer's own errors cost instead. Whatever\n"
      "  is asked for, --sweep and --allocate measured run the model on held-out text and print "
      "what\n"
      "  each choice costs beside all layers alike.\n"
      "\n"
      "Prints a table with a line and a bar a layer. Refused: models of fewer than three layers, "
      "or\n"
      "whose layers have fewer than three different cosines; texts of fewer than 256 tokens\n"
      "together.\n"
      "\n"
      "Result: path, bytes, layers, texts, windows, window, tokens, cosine[], cosine_error[],\n"
      "group[], budget[] (keys), uniform_budget, context, p, allocation, fingerprint,\n"
      "tokenizer_hash, producer, seconds{load, profile, measure}; recommendation and sweep[] with\n"
      "allocation, p, strength, loss, gain, gain_stderr, delivered, budget[] of each that was\n"
      "measured.\n"
      "\n"
      "Examples:\n"
      "  sqz-profile-layers --model MODEL book.txt -o layers.sqz\n"
      "  sqz-profile-layers --model MODEL texts/ --tokens 16000 --budget 0.1 --p 0.7 -o l.sqz\n"
      "  sqz-profile-layers --model MODEL book.txt --selector stream --p auto -o l.sqz\n"
      "  sqz-profile-layers --model MODEL book.txt --allocate measured --selector h2o -o l.sqz\n"
      "  sqz-profile-layers --model MODEL book.txt --index book.sqz --allocate measured\n");
  sqz::ProfileArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const sqz::ToolContext& context) { return sqz::run_profile(arguments, context); });
  sqz::add_profile_options(*app, arguments);
  return tool.run(argc, argv, true);
}
