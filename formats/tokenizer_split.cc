#include <algorithm>

#include "formats/pretokenizer.h"

namespace sqz {
namespace {

struct Part {
  size_t begin;
  size_t end;
  bool match;
};

// Matches and what lies between them, in order, covering all of `text`.
Status find_parts(std::string_view text, RegexMatcher& matcher, bool invert,
                  std::vector<Part>& parts) {
  parts.clear();
  matcher.reset(text);
  size_t covered = 0;
  while (true) {
    SQZ_ASSIGN_OR_RETURN(const std::optional<Span> match, matcher.next());
    if (!match) break;
    if (covered != match->begin) parts.push_back({covered, match->begin, invert});
    parts.push_back({match->begin, match->end, !invert});
    covered = match->end;
  }
  if (covered != text.size()) parts.push_back({covered, text.size(), invert});
  return {};
}

// Joins each part for which `join(is a match, previous is one)` holds with the part before it.
template <class Join>
void merge_parts(std::vector<Part>& parts, Join join) {
  size_t count = 0;
  bool previous = false;
  for (const Part& part : parts) {
    if (count > 0 && join(part.match, previous)) {
      Part& before = parts[count - 1];
      before = {std::min(before.begin, part.begin), std::max(before.end, part.end), before.match};
    } else {
      parts[count++] = part;
    }
    previous = part.match;
  }
  parts.resize(count);
}

void merge(std::vector<Part>& parts, SplitBehavior behavior) {
  const auto lone_match = [](bool match, bool previous) { return match && !previous; };
  switch (behavior) {
    case SplitBehavior::kIsolated:
      break;
    case SplitBehavior::kRemoved:
      std::erase_if(parts, [](const Part& part) { return part.match; });
      break;
    case SplitBehavior::kMergedWithPrevious:
      merge_parts(parts, lone_match);
      break;
    case SplitBehavior::kMergedWithNext:  // the same, from the end
      std::reverse(parts.begin(), parts.end());
      merge_parts(parts, lone_match);
      std::reverse(parts.begin(), parts.end());
      break;
    case SplitBehavior::kContiguous:
      merge_parts(parts, [](bool match, bool previous) { return match == previous; });
      break;
  }
}

}  // namespace

Status split_pieces(std::vector<Piece>& pieces, const SplitRule& rule) {
  RegexMatcher matcher(rule.pattern);
  std::vector<Part> parts;
  std::vector<Piece> out;
  out.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    if (piece.token >= 0) {
      out.push_back(piece);
      continue;
    }
    SQZ_RETURN_IF_ERROR(find_parts(piece.text, matcher, rule.invert, parts));
    merge(parts, rule.behavior);
    for (const Part& part : parts) {
      if (part.begin == part.end) continue;
      out.push_back({piece.text.substr(part.begin, part.end - part.begin), -1,
                     piece.at_start && part.begin == 0});
    }
  }
  pieces = std::move(out);
  return {};
}

}  // namespace sqz
