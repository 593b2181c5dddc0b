#include "tools/sqz_eval/trials.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace sqz::eval {
namespace {

constexpr std::array<const char*, 6> kTaskNames = {"needle1", "needle4", "passkey",
                                                   "loss",    "error",   "recall"};
constexpr int64_t kNeedlesOfFour = 4;
constexpr int64_t kFactTokens = 50;  // a needle and a passkey, roughly
constexpr int64_t kLineSearch = 64;  // tokens: how far a fact moves to stand at a line's end

bool wants(const TrialOptions& options, Task task) {
  return std::find(options.tasks.begin(), options.tasks.end(), task) != options.tasks.end();
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Single views that one pass may carry without leaving out more than kMostLeftOut of each.
int64_t most_singles(const TrialOptions& options) {
  const auto room = static_cast<int64_t>(static_cast<double>(options.tokens) * kMostLeftOut);
  return std::clamp<int64_t>(room / kFactTokens, 1, std::min(options.share, most_facts()));
}

bool ends_line(const Tokenizer& tokenizer, int32_t id) {
  const auto text = tokenizer.decode(std::span(&id, 1));
  return text.ok() && text->ends_with('\n');
}

// The first place from `from` on, before `end`, that follows a line's end; `from` if none is near.
int64_t after_line_end(const Tokenizer& tokenizer, std::span<const int32_t> ids, int64_t from,
                       int64_t end) {
  for (int64_t i = std::max<int64_t>(from, 1); i < std::min(end, from + kLineSearch); ++i) {
    if (ends_line(tokenizer, ids[static_cast<size_t>(i - 1)])) return i;
  }
  return from;
}

// One depth for each of `count` facts, spread evenly over [0, 1), in random order.
std::vector<double> random_depths(Random& random, size_t count) {
  std::vector<double> out(count);
  for (size_t i = 0; i < count; ++i) {
    out[i] = (static_cast<double>(i) + random.unit()) / static_cast<double>(count);
  }
  for (size_t i = count; i > 1; --i) std::swap(out[i - 1], out[random.below(i)]);
  return out;
}

// Needles, passkeys and facts that calibrate are spread separately.
std::vector<double> fact_depths(Random& random, const Pass& pass, const PassShape& shape) {
  std::vector<double> out;
  const auto needles = static_cast<size_t>(shape.needles);
  for (const size_t count :
       {needles, pass.calibration - needles, pass.facts.size() - pass.calibration}) {
    const auto depths = random_depths(random, count);
    out.insert(out.end(), depths.begin(), depths.end());
  }
  return out;
}

// Facts that a view shows: those that calibrate, to which it adds its own.
std::vector<bool> shown_to_all(const Pass& pass) {
  std::vector<bool> out(pass.facts.size());
  std::fill(out.begin() + static_cast<int64_t>(pass.calibration), out.end(), true);
  return out;
}

// Puts the facts into `text` (ids without special tokens) at `places`, and notes where they stand.
void plant(std::span<const int32_t> text, const std::vector<std::vector<int32_t>>& fact_ids,
           const std::vector<int64_t>& places, Pass& pass) {
  std::vector<size_t> order(places.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return places[a] < places[b]; });
  pass.planted.resize(places.size());
  int64_t done = 0;
  for (const size_t fact : order) {
    const int64_t place = places[fact];
    pass.ids.insert(pass.ids.end(), text.begin() + done, text.begin() + place);
    done = place;
    pass.planted[fact] = {static_cast<int64_t>(pass.ids.size()),
                          static_cast<int64_t>(fact_ids[fact].size())};
    pass.ids.insert(pass.ids.end(), fact_ids[fact].begin(), fact_ids[fact].end());
  }
  pass.ids.insert(pass.ids.end(), text.begin() + done, text.end());
}

// The pass without the facts that are not shown.
std::vector<Range> visible_ranges(const Pass& pass, const std::vector<bool>& shown) {
  std::vector<Range> hidden;
  for (size_t i = 0; i < pass.planted.size(); ++i) {
    if (!shown[i]) hidden.push_back(pass.planted[i]);
  }
  std::sort(hidden.begin(), hidden.end(),
            [](const Range& a, const Range& b) { return a.first < b.first; });
  std::vector<Range> out;
  int64_t next = 0;
  const auto add = [&](int64_t end) {
    if (end > next) out.push_back({next, end - next});
  };
  for (const Range& range : hidden) {
    add(range.first);
    next = range.first + range.count;
  }
  add(static_cast<int64_t>(pass.ids.size()));
  return out;
}

void add_views(const PassShape& shape, const TrialOptions& options, Pass& pass) {
  const auto needles = static_cast<size_t>(shape.needles);
  for (size_t i = 0; i < static_cast<size_t>(shape.singles); ++i) {
    View view{concat("single-", i), {}, {}, shape.text && i == 0};
    std::vector<bool> shown = shown_to_all(pass);
    shown[i] = true;
    if (shape.questions) view.questions.push_back({Task::kNeedle1, i});
    if (shape.passkeys) {
      shown[needles + i] = true;
      if (wants(options, Task::kPasskey)) view.questions.push_back({Task::kPasskey, needles + i});
    }
    view.visible = visible_ranges(pass, shown);
    pass.views.push_back(std::move(view));
  }
  for (size_t i = 0; i < static_cast<size_t>(shape.fours); ++i) {
    View view{concat("four-", i), {}, {}, false};
    std::vector<bool> shown = shown_to_all(pass);
    for (size_t k = 0; k < static_cast<size_t>(kNeedlesOfFour); ++k) {
      const size_t fact = i + k * static_cast<size_t>(shape.fours);
      shown[fact] = true;
      view.questions.push_back({Task::kNeedle4, fact});
    }
    view.visible = visible_ranges(pass, shown);
    pass.views.push_back(std::move(view));
  }
}

}  // namespace

const char* task_name(Task task) {
  return kTaskNames[static_cast<size_t>(task)];
}

Result<Task> parse_task(const std::string& name) {
  for (size_t i = 0; i < kTaskNames.size(); ++i) {
    if (name == kTaskNames[i]) return static_cast<Task>(i);
  }
  return Status(Code::kInvalidArgument,
                concat("--task: found ", name,
                       ", expected needle1, needle4, passkey, loss, error or recall"));
}

std::vector<PassShape> plan_passes(const TrialOptions& options) {
  const bool four = wants(options, Task::kNeedle4);
  const bool passkeys = wants(options, Task::kPasskey);
  const bool probes = wants(options, Task::kError) || wants(options, Task::kRecall);
  const bool text = probes || wants(options, Task::kLoss);
  const bool questions = wants(options, Task::kNeedle1) || probes;
  const int64_t singles = questions || passkeys ? options.trials : 0;
  const int64_t fours = four ? divide_up(options.trials, kNeedlesOfFour) : 0;
  // A trial of the text tasks is a block of the continuation.
  const int64_t texts = text ? divide_up(options.trials * kBlockTokens, options.continuation) : 0;

  int64_t share = most_singles(options);
  const bool together = share >= kNeedlesOfFour;
  if (four && together) share = share / kNeedlesOfFour * kNeedlesOfFour;
  std::vector<PassShape> out;
  int64_t single = 0, quad = 0;
  while (single < singles || static_cast<int64_t>(out.size()) < texts ||
         (together && quad < fours)) {
    PassShape shape;
    shape.text = static_cast<int64_t>(out.size()) < texts;
    shape.singles = std::min(share, singles - single);
    if (shape.singles == 0 && shape.text) shape.singles = 1;
    shape.questions = questions && single < singles;
    shape.passkeys = passkeys && single < singles;
    if (together) shape.fours = std::min(share / kNeedlesOfFour, fours - quad);
    shape.needles = std::max(shape.singles, shape.fours * kNeedlesOfFour);
    single += std::min(shape.singles, singles - single);
    quad += shape.fours;
    out.push_back(shape);
  }
  for (; quad < fours; ++quad) {
    PassShape shape;
    shape.needles = kNeedlesOfFour;
    shape.fours = 1;
    out.push_back(shape);
  }
  return out;
}

Result<Pass> make_pass(const Tokenizer& tokenizer, const Haystack& haystack, const PassShape& shape,
                       const TrialOptions& options, int64_t number) {
  Pass pass;
  pass.source = haystack.path;
  SQZ_RETURN_IF_ERROR(tokenizer.encode("", true, pass.ids));
  const auto specials = static_cast<int64_t>(pass.ids.size());
  const auto available = static_cast<int64_t>(haystack.ids.size());
  const int64_t after = options.continuation + 1;
  const int64_t needed = options.tokens + after + kLineSearch;
  if (available < needed) {
    return Status(Code::kInvalidArgument,
                  concat(haystack.path, ": the text has ", available, " tokens, but contexts of ",
                         options.tokens, " tokens and what follows them need ", needed,
                         "; pass a longer text or fewer --tokens"));
  }
  Random random(options.seed);
  for (const int64_t part : {options.tokens, number}) {
    random = Random(random.next() ^ static_cast<uint64_t>(part));
  }
  const int64_t any =
      static_cast<int64_t>(random.below(static_cast<uint64_t>(available - needed + 1)));
  const int64_t start = after_line_end(tokenizer, haystack.ids, any, available);
  const auto all = std::span(haystack.ids).subspan(static_cast<size_t>(start));

  SQZ_ASSIGN_OR_RETURN(const std::string text,
                       tokenizer.decode(all.first(static_cast<size_t>(options.tokens + after))));
  pass.facts = random_facts(random, shape.needles, shape.passkeys, options.calibration, text);
  pass.calibration = pass.facts.size() - static_cast<size_t>(options.calibration);
  std::vector<std::vector<int32_t>> fact_ids(pass.facts.size());
  int64_t length = options.tokens - specials;  // of the text that is not planted
  for (size_t i = 0; i < pass.facts.size(); ++i) {
    SQZ_RETURN_IF_ERROR(tokenizer.encode(pass.facts[i].text, false, fact_ids[i]));
    length -= static_cast<int64_t>(fact_ids[i].size());
  }
  const int64_t lowest = options.sink, highest = length - options.tail;
  if (highest - lowest < kLineSearch) {
    return Status(Code::kInvalidArgument,
                  concat("--tokens ", options.tokens, ": ", pass.facts.size(),
                         " facts, sink and tail leave no room for text; pass more tokens"));
  }
  std::vector<int64_t> places;
  for (const double depth : fact_depths(random, pass, shape)) {
    const auto place = lowest + static_cast<int64_t>(depth * static_cast<double>(highest - lowest));
    places.push_back(after_line_end(tokenizer, all, place, highest));
  }
  plant(all.first(static_cast<size_t>(length)), fact_ids, places, pass);
  const auto follows = all.subspan(static_cast<size_t>(length), static_cast<size_t>(after));
  pass.continuation.assign(follows.begin(), follows.end());
  add_views(shape, options, pass);
  return pass;
}

std::vector<int32_t> view_ids(const Pass& pass, const View& view) {
  std::vector<int32_t> out;
  for (const Range& range : view.visible) {
    const auto begin = pass.ids.begin() + range.first;
    out.insert(out.end(), begin, begin + range.count);
  }
  return out;
}

}  // namespace sqz::eval
