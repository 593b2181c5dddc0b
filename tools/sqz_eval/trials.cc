#include "tools/sqz_eval/trials.h"

#include <algorithm>
#include <numeric>

namespace sqz::eval {
namespace {

constexpr int64_t kFactTokens = 50;  // of a fact, roughly
constexpr int64_t kLineSearch = 64;  // tokens: how far a fact moves to stand at a line's end

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Views that one pass may carry without leaving out more than kMostLeftOut of each.
int64_t most_views(const TrialOptions& options) {
  const auto room = static_cast<int64_t>(static_cast<double>(options.tokens) * kMostLeftOut);
  return std::clamp<int64_t>(room / kFactTokens, 1, std::min(options.share, kMostFacts));
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

// The pass without the facts of views other than number `view`.
std::vector<Range> visible_ranges(const Pass& pass, size_t view) {
  std::vector<Range> hidden;
  for (size_t i = 0; i < pass.views.size(); ++i) {
    if (i != view) hidden.push_back(pass.planted[i]);
  }
  std::sort(hidden.begin(), hidden.end(),
            [](const Range& a, const Range& b) { return a.first < b.first; });
  hidden.push_back({std::ssize(pass.ids), 0});
  std::vector<Range> out;
  int64_t next = 0;
  for (const Range& range : hidden) {
    if (range.first > next) out.push_back({next, range.first - next});
    next = range.first + range.count;
  }
  return out;
}

}  // namespace

bool TrialOptions::wants(const char* task) const {
  return std::find(tasks.begin(), tasks.end(), task) != tasks.end();
}

std::vector<PassShape> plan_passes(const TrialOptions& options) {
  const bool probes = options.wants(kError) || options.wants(kRecall);
  const bool questions = options.wants(kNeedle1) || probes;
  int64_t left = questions ? options.trials : 0;
  // A trial of the text tasks is a block of the continuation.
  int64_t texts = probes || options.wants(kLoss)
                      ? divide_up(options.trials * kBlockTokens, options.continuation)
                      : 0;
  std::vector<PassShape> out;
  for (; left > 0 || texts > 0; --texts) {
    const int64_t asked = std::min(most_views(options), left);
    out.push_back({std::max<int64_t>(asked, 1), asked > 0, texts > 0});
    left -= asked;
  }
  return out;
}

Result<Pass> make_pass(const Tokenizer& tokenizer, const TokenText& haystack,
                       const PassShape& shape, const TrialOptions& options, int64_t number) {
  Pass pass;
  pass.source = haystack.name;
  SQZ_RETURN_IF_ERROR(tokenizer.encode("", true, pass.ids));
  const auto specials = static_cast<int64_t>(pass.ids.size());
  const auto available = static_cast<int64_t>(haystack.tokens.size());
  const int64_t after = options.continuation + 1;
  const int64_t needed = options.tokens + after + kLineSearch;
  if (available < needed) {
    return Status(Code::kInvalidArgument,
                  concat(haystack.name, ": the text has ", available, " tokens, but contexts of ",
                         options.tokens, " tokens and what follows them need ", needed,
                         "; pass a longer text or fewer --tokens"));
  }
  Random random(options.seed);
  for (const int64_t part : {options.tokens, number}) {
    random = Random(random.next() ^ static_cast<uint64_t>(part));
  }
  const int64_t any =
      static_cast<int64_t>(random.below(static_cast<uint64_t>(available - needed + 1)));
  const int64_t start = after_line_end(tokenizer, haystack.tokens, any, available);
  const auto all = std::span(haystack.tokens).subspan(static_cast<size_t>(start));

  SQZ_ASSIGN_OR_RETURN(const std::string text,
                       tokenizer.decode(all.first(static_cast<size_t>(options.tokens + after))));
  pass.facts = random_facts(random, shape.views + options.calibration, text);
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
  for (const int64_t count : {shape.views, options.calibration}) {  // each spread over the text
    for (const double depth : random_depths(random, static_cast<size_t>(count))) {
      const auto place =
          lowest + static_cast<int64_t>(depth * static_cast<double>(highest - lowest));
      places.push_back(after_line_end(tokenizer, all, place, highest));
    }
  }
  plant(all.first(static_cast<size_t>(length)), fact_ids, places, pass);
  const auto follows = all.subspan(static_cast<size_t>(length), static_cast<size_t>(after));
  pass.continuation.assign(follows.begin(), follows.end());
  pass.views.resize(static_cast<size_t>(shape.views));
  for (size_t i = 0; i < pass.views.size(); ++i) {
    pass.views[i] = {visible_ranges(pass, i), shape.questions, shape.text && i == 0};
  }
  return pass;
}

Result<std::vector<Pass>> documents_of(const Pass& pass, const Tokenizer& tokenizer, int count) {
  if (count == 1) return std::vector<Pass>{pass};
  std::vector<int32_t> specials;
  SQZ_RETURN_IF_ERROR(tokenizer.encode("", true, specials));
  std::vector<Pass> out;
  for (int64_t i = 1, begin = 0; i <= count; ++i) {
    int64_t end = std::ssize(pass.ids) * i / count;
    for (const Range& fact : pass.planted) {
      if (fact.first < end && end < fact.first + fact.count) end = fact.first + fact.count;
    }
    Pass& document = out.emplace_back();
    document.source = pass.source;
    if (i > 1) document.ids = specials;
    const int64_t moved = std::ssize(document.ids) - begin;
    document.ids.insert(document.ids.end(), pass.ids.begin() + begin, pass.ids.begin() + end);
    for (const View& view : pass.views) {
      View& part = document.views.emplace_back();
      if (moved + begin > 0) part.visible.push_back({0, moved + begin});
      for (const Range& range : view.visible) {
        const int64_t first = std::max(range.first, begin);
        const int64_t last = std::min(range.first + range.count, end);
        if (first < last) part.visible.push_back({first + moved, last - first});
      }
    }
    begin = end;
  }
  return out;
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
