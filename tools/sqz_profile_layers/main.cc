// sqz-profile-layers: how much each layer's attention matters, and what share of a budget it gets.
#include "tools/sqz_profile_layers/profile_layers.h"

int main(int argc, char** argv) {
  sqz::Tool tool(
      "sqz-profile-layers",
      "Measures how much the attention of each layer changes the hidden state, and shares out a "
      "budget of keys by it.",
      R"(Method
  The cosine of the hidden state before a layer's input norm with the state after the
  attention's residual add, averaged over tokens (SqueezeAttention). Layers are split into
  three groups by their cosines, the best split there is. Layers of group 2, which hardly
  change their input, keep p of the budget; the others share the rest. The sum is that of the
  same budget for every layer, to the key.

  Whether p < 1 helps depends on model, selector and text, and is not measured here: compare
  with sqz-eval --layers uniform,layers.json. --allocate measured deals the budget by what each
  layer's own errors cost on held-out text instead, and keeps every layer alike unless that
  gains more than its standard error.

Refused: models of fewer than three layers, or whose layers have fewer than three different
cosines; texts of fewer than 256 tokens together.

`sqz-index build --layers` puts the budgets into an index, and sqz-generate and sqz-eval take
them by --layers.

Result: the fields of the layer profile (docs/format.md), path, seconds{load, profile, measure}.

Examples:
  sqz-profile-layers --model MODEL book.txt -o layers.json
  sqz-profile-layers --model MODEL texts/ --tokens 16000 --budget 0.1 --p 0.7 -o l.json
  sqz-profile-layers --model MODEL book.txt --allocate measured --selector h2o -o l.json
)");
  sqz::ProfileArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const sqz::ToolContext& context) { return sqz::run_profile(arguments, context); });
  sqz::add_profile_options(*app, arguments);
  return tool.run(argc, argv, true);
}
