// The trial generator: texts with planted facts, and which of them each question may see.
//
// A pass is one text of exactly `tokens` tokens that goes through the model once. It carries the
// facts of several trials. A view is the fixed context of one trial: the pass without the tokens of
// the facts that belong to other trials; they are left out of the index, so no question can attend
// to them. A view of the kind "single" shows one needle and one passkey; one of the kind "four"
// shows four needles and asks for each. What views share is the dense pass, which is what costs
// time; the tokens left out are at most 2 % of a single view (kMostLeftOut).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/base/status.h"
#include "formats/tokenizer.h"
#include "tools/sqz_eval/facts.h"

namespace sqz::eval {

enum class Task { kNeedle1, kNeedle4, kPasskey, kLoss, kError, kRecall };
const char* task_name(Task task);
Result<Task> parse_task(const std::string& name);

struct Range {
  int64_t first = 0, count = 0;  // tokens
};

struct Question {
  Task task = Task::kNeedle1;
  size_t fact = 0;  // in Pass::facts
};

struct View {
  std::string name;            // "single-0", "four-1": part of the name of a saved index
  std::vector<Range> visible;  // what of the pass is the fixed context: ascending, disjoint
  std::vector<Question> questions;
  bool text = false;  // loss, error and recall on the text that follows are measured here
};

struct Pass {
  std::string source;                 // the text's path
  std::vector<int32_t> ids;           // [tokens], special tokens first
  std::vector<int32_t> continuation;  // the text that follows, without facts
  std::vector<Fact> facts;
  size_t calibration = 0;      // facts from here on are in every view: their questions calibrate
  std::vector<Range> planted;  // where each fact stands in `ids`
  std::vector<View> views;
};

// What a pass is asked to carry.
struct PassShape {
  int64_t needles = 1;
  bool passkeys = false;
  int64_t singles = 0;    // single views; at most `needles`
  int64_t fours = 0;      // views of four needles; needles >= 4 * fours
  bool questions = true;  // false: single views are for the text alone
  bool text = false;
};

struct TrialOptions {
  int64_t tokens = 0;  // of a pass
  std::vector<Task> tasks;
  int64_t trials = 48;  // of each task
  int64_t share = 8;    // most trials of a kind that share a pass
  int64_t continuation =
      1024;  // tokens whose loss is measured; one more is taken as the last target
  int64_t sink = 16, tail = 100;  // no fact is planted there
  int64_t calibration = 0;        // needles more a pass whose questions calibrate; 0: the tail does
  uint64_t seed = 0;
};

inline constexpr double kMostLeftOut = 0.02;
inline constexpr int64_t kBlockTokens = 128;  // of the continuation: one sample of loss and error

// How many passes of which shape the options ask for.
std::vector<PassShape> plan_passes(const TrialOptions& options);

// One haystack: a text as token ids.
struct Haystack {
  std::string path;
  std::vector<int32_t> ids;
};

// Pass `number` of a plan. The slice of text begins at a line's start; facts are planted at ends of
// lines, at depths spread over the clustered part. Fails if the text is too short.
Result<Pass> make_pass(const Tokenizer& tokenizer, const Haystack& haystack, const PassShape& shape,
                       const TrialOptions& options, int64_t number);

// The token ids of a view: what its index is built of.
std::vector<int32_t> view_ids(const Pass& pass, const View& view);

}  // namespace sqz::eval
