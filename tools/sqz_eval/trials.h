// The trial generator: texts with planted facts, and the facts that each trial may see.
//
// A pass is one text of exactly `tokens` tokens that goes through the model once. It carries the
// facts of several trials. A view is the fixed context of one trial: the pass without the tokens of
// the facts of other trials. Those tokens are left out of the index, so no question can attend to
// them. Views share the dense pass, which takes most of the time. The tokens left out are at most
// 2 % of a view (kMostLeftOut).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/random.h"
#include "formats/base/status.h"
#include "formats/tokenizer.h"
#include "training/runner.h"

namespace sqz::eval {

// The facts (needles) that are planted in a text, and the questions that ask for them.
//
//   planted  "\nOne of the special magic numbers for harbour is: 1234567.\n"
//   asked    "\nWhat is the special magic number for harbour mentioned in the provided text? The
//             special magic number for harbour mentioned in the provided text is"    " 1234567"
struct Fact {
  std::string text;    // is planted; a newline at both ends
  std::string prompt;  // is asked
  std::string answer;  // 4, 5 or 7 digits, no leading zero
};

// Most facts of one text that are asked for, and that calibrate. The words differ.
inline constexpr int64_t kMostFacts = 8, kMostCalibrationFacts = 56;

// `count` facts for different words. No answer is part of another answer or of `text`.
std::vector<Fact> random_facts(Random& random, int64_t count, std::string_view text);

// The generated text is the answer, whole: a space, the digits, and no digit after them.
bool answers(const Fact& fact, std::string_view generated);
// The generated text can no longer become the answer, or is it already: generating may stop.
bool decided(const Fact& fact, std::string_view generated);

// Names of the tasks.
inline constexpr const char *kNeedle1 = "needle1", *kLoss = "loss", *kError = "error",
                            *kRecall = "recall";

struct Range {
  int64_t first = 0, count = 0;  // tokens
};

struct View {
  std::vector<Range> visible;  // of the pass: ascending, disjoint
  bool question = false;       // the fact with the view's number is asked for
  bool text = false;           // loss, error and recall are measured on the text that follows
};

struct Pass {
  std::string source;                 // the text's path
  std::vector<int32_t> ids;           // [tokens], special tokens first
  std::vector<int32_t> continuation;  // the text that follows, without facts
  std::vector<View> views;
  std::vector<Fact> facts;  // one a view; the others are in every view: their questions calibrate
  std::vector<Range> planted;  // [facts] places in `ids`
};

// The trials that a pass carries.
struct PassShape {
  int64_t views = 0;
  bool questions = false, text = false;
};

struct TrialOptions {
  int64_t tokens = 0;  // of a pass
  std::vector<std::string> tasks = {kNeedle1, kLoss, kError, kRecall};
  int64_t trials = 48;            // of each task
  int64_t share = 8;              // most trials that share a pass
  int64_t continuation = 1024;    // tokens whose loss is measured; one more is the last target
  int64_t sink = 16, tail = 100;  // no fact is planted there
  int64_t calibration = 0;        // further facts of a pass, whose questions calibrate; 0: the tail
  uint64_t seed = 0;

  bool wants(const char* task) const;
};

inline constexpr double kMostLeftOut = 0.02;
inline constexpr int64_t kBlockTokens = 128;  // of the continuation: one sample of loss and error

// The shapes of the passes that the options ask for.
std::vector<PassShape> plan_passes(const TrialOptions& options);

// Makes pass `number` of a plan. The slice of text begins at a line's start. Facts are planted at
// ends of lines, at depths spread over the clustered part. Fails if the text is too short.
Result<Pass> make_pass(const Tokenizer& tokenizer, const TokenText& haystack,
                       const PassShape& shape, const TrialOptions& options, int64_t number);

// A pass as `count` documents of about one length, each with the special tokens in front, which no
// fact is cut by.
Result<std::vector<Pass>> documents_of(const Pass& pass, const Tokenizer& tokenizer, int count);

// The token ids of a view, of which its index is built.
std::vector<int32_t> view_ids(const Pass& pass, const View& view);

}  // namespace sqz::eval
