#include "tools/sqz_eval/eval.h"

namespace sqz::eval {

const char* const kDescription =
    "Measures what a selector costs: answers, loss, attention outputs and bytes read, against "
    "dense attention.";

const char* const kHelp =
    R"(Trials
  A context is a slice of a text, from a random line on (--seed), of exactly --tokens tokens,
  with a fact (needle) planted at a line's end, at a depth between sink and tail:
    "One of the special magic numbers for harbour is: 1234567."
    needle1  the question follows the context; the answer is generated greedily and counts only
             if it is the whole number; a trial a context
    loss     mean loss (nats) of the --continuation tokens that follow the context; a trial is
             128 of them
    error    ||sparse - dense|| / ||dense|| of the attention output (the fixed context merged
             with the exact attention to the tokens since), mean over layers, query heads and
             tokens, all other layers dense; of the text that follows and of the questions
    recall   part of the dense attention to the fixed context that is on keys that were read;
             not of key codes on a CPU, which approximate the other keys
  Contexts that differ only in their facts share a dense pass of the model: up to --share needles
  are planted in one text, and each trial's index leaves out the tokens of the facts that belong
  to others (at most 2 % of the context). --share 1 gives each trial a pass of its own. All
  selectors and budgets are served from the same indexes.

Rows
  One a (task, setting). asked, delivered: fraction of the context's bytes,
  metadata included; lowest, highest: delivered to one question or text; keys: fraction of the
  clustered keys that was read; +- standard error (binomial, or over trials); to dense: the
  difference, trial by trial; agree: right answers of those that are right with dense attention.

Result: rows[] with task, on, tokens, the setting, trials, value, stderr, difference,
agreement, budget, keep, dense_fallback; model, fingerprint, seed, seconds.
Events `pass` have the rows so far.

Examples:
  sqz-eval --model MODEL --text book.txt --tokens 8000 --trials 24
  sqz-eval --model MODEL --text a.txt --text b.txt --tokens 31000 \
    --selector squeezed --levels 1,2 --rule threshold,budget --budget 0.125,0.25 --json
)";

namespace {

void add_trial_options(CLI::App& app, EvalArguments& arguments) {
  const HelpSection section(app, "Trials");
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option("--text", arguments.texts,
                 "Texts to take slices of: files or folders; passes take turns")
      ->required();
  app.add_option("--tokens", arguments.trials.tokens, "Length of the fixed context")
      ->required()
      ->check(whole_number(1));
  app.add_option("--task", arguments.trials.tasks, "What to measure")
      ->delimiter(',')
      ->check(CLI::IsMember({kNeedle1, kLoss, kError, kRecall}));
  app.add_option("--trials", arguments.trials.trials, "Trials of each task")
      ->check(CLI::Range(1, 1000000));
  app.add_option("--share", arguments.trials.share, "Most trials that share a dense pass")
      ->check(CLI::Range(int64_t{1}, kMostFacts));
  app.add_option("--continuation", arguments.trials.continuation,
                 "Tokens after the context whose loss is measured")
      ->check(CLI::Range(int64_t{kBlockTokens}, int64_t{65536}));
  app.add_option("--calibrate-prompts", arguments.trials.calibration,
                 "Calibrate with the questions of N needles more, planted for that in every "
                 "context; 0: with its tail")
      ->check(CLI::Range(int64_t{0}, kMostCalibrationFacts))
      ->type_name("N");
}

void add_setting_options(CLI::App& app, SettingOptions& settings) {
  const HelpSection section(app, "Selection (all combinations are measured)");
  app.add_option("--selector", settings.selectors, "Selectors; dense is always among them")
      ->delimiter(',')
      ->check(CLI::IsMember(selector_names()));
  app.add_option("--budget", settings.budgets, "Fractions of the fixed context's bytes to read")
      ->delimiter(',')
      ->check(real_number(1e-6, 1.0));
  app.add_option("--levels", settings.levels, "Levels of the tree to use; 0 = all, 1 = flat lookup")
      ->delimiter(',')
      ->check(CLI::Range(0, 16));
  app.add_option("--rule", settings.rules, "budget, threshold (of squeezed and ideal)")
      ->delimiter(',')
      ->check(CLI::IsMember({"budget", "threshold"}));
  app.add_option("--rows", settings.rows,
                 "Rows of the index: bf16, q8 (of selectors that read clusters)")
      ->delimiter(',')
      ->check(CLI::IsMember({"bf16", "q8"}));
  app.add_option("--key-codes", settings.key_codes,
                 "Bits a dimension of the key codes that squeezed chooses by; 0: none")
      ->delimiter(',')
      ->check(CLI::Range(0, 2));
  app.add_option(
         "--layers", settings.layers,
         "Profiles (L.json) of sqz-profile-layers that spread the budget over the layers, and "
         "uniform for all alike")
      ->delimiter(',');
  app.add_option("--dense-layers", settings.dense_layers,
                 "First layers that are read whole (default: what each selector wants, quest 2)")
      ->check(whole_number(0));
  app.add_option("--block", settings.block, "Prompt tokens that share a selection; 0 = all of them")
      ->check(whole_number(0));
}

}  // namespace

void add_eval_options(CLI::App& app, EvalArguments& arguments) {
  add_trial_options(app, arguments);
  add_setting_options(app, arguments.settings);
  const HelpSection section(app, "Work");
  app.add_option("--run-dtype", arguments.run_dtype, "What the model computes in")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--qmodel", arguments.qmodel,
                 "Query classifier (.sqz) of this model, for --selector saap");
  app.add_option("--engine", arguments.engine, "Engine that clusters the indexes")
      ->check(CLI::IsMember({"auto", "faiss", "cuda"}));
  app.add_option("--level-fractions", arguments.level_fractions,
                 "Clusters a token of the indexes, coarse to fine (default: 0.01,0.05)")
      ->delimiter(',')
      ->check(real_number(1e-9, 1.0));
}

}  // namespace sqz::eval
